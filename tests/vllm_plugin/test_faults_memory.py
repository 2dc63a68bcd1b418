"""Reported faults of memory: what is taken, when, for whom, and who is told."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treewy.planner.catalogue import model_preset
from treewy.vllm_plugin.accounting import Rows, account, predict_layout, rows_of
from treewy.vllm_plugin.announcement import announce_rows
from treewy.vllm_plugin.memory import Memory, Sizes
from treewy.vllm_plugin.options import Options
from treewy.vllm_plugin.step import Drafted, Step
from vllm_plugin import test_layer
from vllm_plugin.rows import HEADS, VALUE_HEADS, sizes
from vllm_plugin.test_layer import WIDE, layers

PAGE = (Path(__file__).parent.parent.parent / "docs" / "vllm.md").read_text()
SPEC = model_preset("qwen3.5-35b-a3b").spec
MIB = 2**20
# A configuration of vLLM that has what a layer reads.
whole = test_layer.whole


@pytest.mark.parametrize("largest_graph", [None, 50])
def test_rows_for_the_worst_mix(largest_graph: int | None, whole: Any) -> None:
    """Fault J01: every request drafts all it may, or a graph is full: rows are there from the start, and none is made later."""
    whole.compilation_config.max_cudagraph_capture_size = largest_graph
    (made,) = layers(whole, 1)
    memory, step = made.treewy.memory, made.treewy.step
    most = largest_graph or 8 * 4
    assert memory.step_of(0, most).u.shape[0] == memory.sizes.num_step_rows == most
    tensors = [*memory.step, *memory.kept, *step.lasting.values()]
    before = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    for rows in (4, 1, 4):
        drafted = Drafted(np.arange(8), np.arange(8, dtype=np.int32), np.full(8, rows, np.int32))
        step.begin(drafted, 8, most)
        assert step.tables.tree.num_rows == most
        step.finish(torch.full((8,), rows))
    assert [
        tensor.untyped_storage().data_ptr() for tensor in (*memory.step, *memory.kept, *step.lasting.values())
    ] == before


def test_rows_are_those_of_requests() -> None:
    """Faults J02 and J07: neither pages nor the length of a context take any, and tables are linear in rows."""
    taken = [Memory(sizes(4, requests=count), "cpu") for count in (8, 64, 120)]
    first, second, third = (memory.num_bytes for memory in taken)
    assert first < second < third
    assert second - first == third - second
    of_tables = [
        sum(tensor.untyped_storage().nbytes() for tensor in Step(memory, "eager").lasting.values()) for memory in taken
    ]
    assert of_tables[1] - of_tables[0] == of_tables[2] - of_tables[1]


@pytest.mark.parametrize("drafts", [1, 4, 16, 64])
@pytest.mark.parametrize("commit", ["reconstruct", "ring"])
def test_what_is_said_is_what_is_taken(commit: Any, drafts: int) -> None:
    """Fault J03: to the byte, for any number of drafts."""
    options = Options(commit, ring_capacity=max(16, drafts + 1))
    said = rows_of(SPEC, options, drafts=drafts, max_num_seqs=64, dtype="bfloat16", state_dtype="float32")
    asked = Sizes(
        num_layers=SPEC.num_linear_layers,
        num_requests=64,
        step_rows=1 + drafts,
        kept_rows=options.kept_rows(1 + drafts),
        max_path=1 + drafts,
        num_step_rows=64 * (1 + drafts),
        num_heads=SPEC.num_key_heads,
        num_value_heads=SPEC.num_value_heads,
        key_dim=SPEC.key_dim,
        value_dim=SPEC.value_dim,
        u_dtype=torch.float32,
        k_dtype=torch.bfloat16,
    )
    assert said.num_bytes == asked.num_bytes == Memory(asked, "meta").num_bytes


@pytest.mark.parametrize("drafts", [1, 4, 14])
def test_a_request_takes_one_state(drafts: int) -> None:
    """Fault J04: however much is drafted; without the plugin it takes one per draft, and so runs beside fewer."""
    made = account(
        predict_layout(SPEC, drafts=drafts, dtype="bfloat16", state_dtype="float32"),
        Rows(SPEC.num_linear_layers, 0, 0, 1 + drafts, 0),
        Options("reconstruct"),
        drafts=drafts,
        max_model_len=4096,
        available=16_384 * MIB,
    )
    blocks = made.treewy.blocks
    attention = -(-4096 // blocks.block_size)
    assert made.treewy.blocks_per_request == attention + blocks.num_state_groups
    assert made.stock.blocks_per_request == attention + blocks.num_state_groups * (1 + drafts)
    assert made.treewy.requests == made.treewy.num_blocks / made.treewy.blocks_per_request > made.stock.requests


def test_one_request_on_each_of_four(whole: Any) -> None:
    """Fault J05: what runs at once is asked of each rank by itself; it is not divided by their number."""
    whole.scheduler_config.max_num_seqs, whole.compilation_config.max_cudagraph_capture_size = 1, None
    whole.parallel_config.data_parallel_size = 4
    (made,) = layers(whole, 1)
    assert made.treewy.memory.sizes.num_requests == 1
    assert made.treewy.memory.sizes.num_step_rows == 4
    made.treewy.step.begin(Drafted(np.arange(1), np.zeros(1, np.int32), np.array([4], np.int32)), 1, 4)
    made.treewy.step.finish(torch.tensor([2]))
    assert made.treewy.memory.lengths.tolist() == [2]


def test_rows_are_announced_before_memory_can_be_short(
    whole: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault J06: weights and blocks are in vLLM's log and message; what rows take of them is said before any allocation."""
    caplog.set_level(logging.INFO, "vllm.treewy")

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(test_layer.module, "Memory", fail)
        with pytest.raises(torch.OutOfMemoryError):
            layers(whole, 1)
    taken = 2 * (8 * 8 + 50) * (VALUE_HEADS * 16 * 4 + HEADS * 16 * 4 + 8 * VALUE_HEADS) + 8 * 4
    assert caplog.messages == [f"treewy: taking {taken:,} bytes for rows of 8 requests, the most that run at once"]
    whole.compilation_config.static_forward_context = {}
    first, _ = layers(whole, 2)
    assert first.treewy.memory.num_bytes == taken
    assert len(caplog.messages) == 2  # once an engine
    caplog.clear()
    announce_rows(1_274_020_864, 256)
    assert caplog.messages[0] in PAGE.splitlines()


def test_rows_of_nobody_are_zero(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault C10: the layer's output has a value in every row of a captured graph, whoever had the buffer before."""
    (made,) = layers(whole, 1)
    monkeypatch.setattr(made, "states", torch.zeros(9, VALUE_HEADS, 16, 16), raising=False)
    made.treewy.step.begin(Drafted(np.arange(1), np.array([4], np.int32), np.array([4], np.int32)), 3, 9)
    tables = made.treewy.step.tables
    given = test_layer.SimpleNamespace(treewy=tables, spec_state_indices_tensor=torch.tensor([[5], [0], [-1]]).int())
    out = torch.full((9, VALUE_HEADS, 16), 7.0)
    made._drafted(given, torch.ones(9, WIDE), torch.ones(9, VALUE_HEADS), torch.ones(9, VALUE_HEADS), out)
    assert out[:4].ne(7.0).all()
    assert not out[4:].any()
