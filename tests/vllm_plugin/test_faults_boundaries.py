"""Reported faults of block boundaries: paths that cross one at every offset, and what tells windows, states and blocks apart."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treewy.vllm_plugin.compat import common
from treewy.vllm_plugin.state import model_state_class
from treewy.vllm_plugin.step import Drafted
from vllm_plugin import test_prefix
from vllm_plugin.fakes import ModelState, compat, layers_on
from vllm_plugin.rows import LAYERS, Engine
from vllm_plugin.test_prefix import BLOCK, RECONSTRUCT, RING, Aligned


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
@pytest.mark.parametrize("kept_rows", [RECONSTRUCT, RING])
def test_every_offset(kept_rows: int, accepted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults B02, B04, E02, E05 and E09: from each offset in a block, by each number of tokens, alike on both sides.

    The page of a boundary is there as soon as the step has ended that crossed it, also if the request ends with the step.
    """
    crossed = 0
    for first in range(0, BLOCK, 4):
        starts = [BLOCK + first + place for place in range(4)]
        monkeypatch.setattr(test_prefix, "STARTS", starts)
        aligned = Aligned(kept_rows)
        for sampled in (accepted, 1, 4):
            aligned.run([0, 1, 2, 3], [4] * 4, [sampled] * 4, 0)
        ends = [start + accepted + 5 for start in starts]
        assert aligned.computed[:4].tolist() == ends
        wanted = [
            (request, at)
            for request, (start, end) in enumerate(zip(starts, ends, strict=True))
            for at in range(start + 1, end + 1)
            if at % BLOCK == 0
        ]
        assert sorted(aligned.filled) == wanted
        aligned.check_filled()
        assert aligned.engine.checker.largest < 1e-6
        crossed += len(wanted)
    assert crossed >= 6


@dataclasses.dataclass
class Copies:
    """vLLM's copies between pages, as far as they tell windows from states: an entry per layer and kind."""

    state_base_addrs: torch.Tensor
    state_block_strides: torch.Tensor
    state_elem_sizes: torch.Tensor
    state_inner_sizes: torch.Tensor
    state_conv_widths: torch.Tensor
    state_group_indices: torch.Tensor
    state_dim_row_count: torch.Tensor
    state_dim_row_stride: torch.Tensor
    num_layers: int
    num_state_types: int


def test_windows_and_states_are_told_apart_by_what_they_are() -> None:
    """Fault B05: not by their places in a page; with three windows before a state, each is a window."""
    columns = {name: torch.arange(8) + 100 * place for place, name in enumerate(common.COLUMNS)}
    columns["state_conv_widths"] = torch.tensor([3, 3, 3, 0, 0, 3, 3, 3])
    windows, states = common.split_copies(Copies(**columns, num_layers=2, num_state_types=4))
    assert windows.state_base_addrs.tolist() == [0, 1, 2, 5, 6, 7]
    assert states.state_base_addrs.tolist() == [3, 4]
    for name, column in columns.items():
        assert torch.equal(getattr(states, name), column[3:5])
    assert (windows.num_layers, states.num_layers) == (6, 2)
    assert windows.num_state_types == states.num_state_types == 1


def test_blocks_are_those_of_states() -> None:
    """Fault E03: a boundary is where a block of states ends, however small the blocks of keys and values are."""
    engine = Engine(RING)
    layers = layers_on(engine, engine.normal(LAYERS, 9, 2, 6))

    class Small(ModelState):
        """Makes its copies when it is told of the cache."""

        def __init__(self, vllm_config: Any, align: bool = False) -> None:
            super().__init__(vllm_config, align)
            self.vllm_config = vllm_config

        def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
            """Take the states' blocks."""
            self._mamba_ctx = SimpleNamespace(block_size=32)

    vllm = compat(split_copies=lambda given: (given, given))
    vars(vllm)["MambaHybridModelState"] = Small
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict(enumerate(layers))),
        cache_config=SimpleNamespace(block_size=8, mamba_block_size=32),
    )
    made = model_state_class(vllm)(config, align=True)
    made.initialize_kv_cache(SimpleNamespace(kv_cache_groups=[]), None)
    # Request 3 has accepted three tokens, of which the second was the last of 64; each block has a page of its number.
    accepted, computed, none = (torch.full((8,), count, dtype=torch.int32) for count in (3, 65, 0))
    for part in engine.memory.kept[:4]:
        part.fill_(-1.0)
    engine.memory.lengths[3] = 3
    engine.step.keeps[3] = True
    before = engine.states.clone()
    drafted = Drafted(np.array([0]), np.array([3], np.int32), np.array([4], np.int32))
    made.boundaries.begin(drafted, np.array([62]), [torch.arange(8).expand(1, -1)] * LAYERS)
    copied: list[int] = []
    states = SimpleNamespace(run_fused_postprocess_align=lambda *told: copied.append(int(told[3][3])))
    made.boundaries.fill(states, 1, accepted, none, computed, torch.tensor([3]))
    assert copied == [64]
    changed = (engine.states != before).flatten(2).any(2).any(0)
    assert changed.nonzero().flatten().tolist() == [64 // 32 - 1]
