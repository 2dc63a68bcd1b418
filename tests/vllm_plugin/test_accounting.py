"""The arithmetic of the start-up log, against the figures of vLLM's own log and against tensors."""

import re
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treewy.planner.catalogue import model_preset
from treewy.planner.vllm import Layout
from treewy.vllm_plugin.accounting import Account, Rows, account, log_lines, predict_layout, read_layout, rows_of
from treewy.vllm_plugin.memory import Memory, Sizes
from treewy.vllm_plugin.options import Options

SPEC = model_preset("qwen3.5-35b-a3b").spec
TOKEN_BYTES = 2 * 2 * 256 * 2
# Bytes left to the cache at a memory fraction of 0.6.
AVAILABLE = 651_776 * TOKEN_BYTES * 11
NONE = Rows(30, 20_736, 0, 4, 0)


def blocks_of(drafts: int, state_dtype: str = "float32") -> Layout:
    return predict_layout(SPEC, drafts=drafts, dtype="bfloat16", state_dtype=state_dtype)


def rows(options: Options, drafts: int, state_dtype: str = "float32", num_step_rows: int | None = None) -> Rows:
    return rows_of(
        SPEC,
        options,
        drafts=drafts,
        max_num_seqs=256,
        dtype="bfloat16",
        state_dtype=state_dtype,
        num_step_rows=num_step_rows,
    )


# drafts; block size, blocks, KV tokens at 4,096 of vLLM as it is, and resident requests of 1,192 tokens
@pytest.mark.parametrize(
    ("drafts", "block_size", "num_blocks", "tokens", "resident"),
    [(3, 1072, 608, 155_648, 43), (14, 1168, 558, 46_644, 11), (39, 1360, 479, 15_822, 3)],
)
def test_vllm_as_it_is(drafts: int, block_size: int, num_blocks: int, tokens: int, resident: int) -> None:
    stock = account(
        blocks_of(drafts), NONE, Options("reconstruct"), drafts=drafts, max_model_len=4096, available=AVAILABLE
    ).stock
    assert (stock.blocks.block_size, stock.num_blocks, stock.kv_tokens) == (block_size, num_blocks, tokens)
    assert stock.blocks.requests(num_blocks, 1192) == resident
    assert stock.blocks_per_request == -(-4096 // block_size) + 3 * (1 + drafts)
    assert stock.requests == num_blocks / stock.blocks_per_request


def test_the_gain_without_rows_is_the_largest() -> None:
    """2.29 times the KV tokens at 4,096, for a chain of 3."""
    made = account(blocks_of(3), NONE, Options("reconstruct"), drafts=3, max_model_len=4096, available=AVAILABLE)
    assert made.treewy.blocks == made.stock.blocks._replace(states_per_request=1)
    assert made.treewy.num_blocks == made.stock.num_blocks == 608
    assert made.treewy.kv_tokens / made.stock.kv_tokens == pytest.approx(2.29, abs=0.005)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("options", "drafts", "kept"),
    [
        (Options("reconstruct"), 3, 4),
        (Options("ring"), 3, 16),
        (Options("ring", ring_capacity=8), 3, 8),
        (Options("reconstruct", (3, 3, 3)), 39, 4),
        (Options("ring", (2, 2, 2)), 14, 16),
    ],
)
def test_rows_take_what_their_tensors_take(options: Options, drafts: int, kept: int, state_dtype: str) -> None:
    """Of the worker's own memory, in every combination of policy, shape and dtype."""
    made = rows(options, drafts, state_dtype, num_step_rows=256 * (1 + drafts) + 5)
    u = torch.bfloat16 if state_dtype == "bfloat16" else torch.float32
    sizes = Sizes(
        num_layers=30,
        num_requests=256,
        step_rows=1 + drafts,
        kept_rows=kept,
        max_path=options.longest_path(drafts),
        num_step_rows=256 * (1 + drafts) + 5,
        num_heads=16,
        num_value_heads=32,
        key_dim=128,
        value_dim=128,
        u_dtype=u,
        k_dtype=torch.bfloat16,
    )
    assert made.row_bytes == sizes.row_bytes
    assert made.num_bytes == Memory(sizes, "meta").num_bytes
    assert made.row_bytes == (20_736 if u == torch.float32 else 12_544)
    assert rows(options, drafts, state_dtype).num_step_rows == 256 * (1 + drafts)


def test_rows_are_blocks_that_vllm_would_have_had() -> None:
    """The stock share has the bytes of the rows as well."""
    options = Options("reconstruct")
    made = account(blocks_of(3), rows(options, 3), options, drafts=3, max_model_len=4096, available=AVAILABLE)
    assert made.treewy.num_blocks == 608
    assert made.stock.num_blocks == (AVAILABLE + made.rows.num_bytes) // made.stock.blocks.block_bytes
    assert made.stock.num_blocks > 608


def test_a_running_engine_is_read() -> None:
    """From its groups of layers, whose states are those with speculative blocks."""
    expected = blocks_of(3)._replace(states_per_request=1)
    window, state = (8192, 6), (32, 128, 128)
    attention = SimpleNamespace(head_size=256, block_size=1072, page_size_bytes=expected.page_bytes)
    recurrent = SimpleNamespace(
        block_size=4096,
        page_size_bytes=expected.page_bytes,
        num_speculative_blocks=0,
        shapes=(window, state),
        dtypes=(torch.bfloat16, torch.float32),
    )
    assert prod(window) * 2 + prod(state) * 4 == expected.state_bytes
    groups = [(recurrent, 11), (attention, 11), (recurrent, 11), (recurrent, 8)]
    config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=["layer"] * count, kv_cache_spec=spec) for spec, count in groups]
    )
    assert read_layout(config) == expected
    recurrent.num_speculative_blocks = 3
    assert read_layout(config) == blocks_of(3)
    attention.page_size_bytes += 1
    assert read_layout(config) is None
    for kinds in ([recurrent], [attention], [recurrent, attention, SimpleNamespace()]):
        for spec in kinds:
            spec.page_size_bytes = 1
        one_each = [SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec) for spec in kinds]
        assert read_layout(SimpleNamespace(kv_cache_groups=one_each)) is None


def test_the_log() -> None:
    options = Options("reconstruct")
    made: Account = account(blocks_of(3), rows(options, 3), options, drafts=3, max_model_len=4096, available=AVAILABLE)
    assert log_lines(made) == [
        "treewy: reconstruct, 3 drafts: a request takes 1 block of each of 3 recurrent groups instead of 4; 30 layers in 33 "
        "pages, 3 of padding",
        "treewy: 608 blocks of 1,072 tokens and 24,150,016 bytes: 11 pages of 2,195,456 bytes, 2,195,456 of them used by a "
        "state",
        "treewy: 4,096 tokens take 7 blocks instead of 16: 355,766 KV tokens, 86.86 requests; without treewy 168,960 and "
        "41.25",
        "treewy: 1,274,020,864 bytes of rows beside the blocks: 30 layers of 256 x 4 kept rows and 1,024 of a step, 20,736 "
        "bytes each",
        "treewy: the blocks hold 157 requests at most, and there are rows for 256: with --max-num-seqs 157 there would be 20 "
        "blocks more",
    ]


@pytest.mark.parametrize("caches_prefixes", [False, True])
@pytest.mark.parametrize("requests", [8, 100, 154, 160, 256, 1024])
def test_advice_is_what_it_says(requests: int, *, caches_prefixes: bool) -> None:
    """Followed, it leaves as many blocks more, which hold all requests that there are rows for; nobody then hears more."""
    options = Options("reconstruct")
    bounds: dict[str, Any] = {"drafts": 3, "max_model_len": 4096, "prefix_caching": caches_prefixes}

    def made(requests: int, available: int) -> tuple[Account, list[str]]:
        kept = Rows(30, 20_736, requests, 4, 4 * requests)
        counted = account(blocks_of(3), kept, options, available=available, **bounds)
        return counted, log_lines(counted)[4:]

    before, lines = made(requests, AVAILABLE)
    if requests <= 154:
        assert not lines  # 608 blocks, four of them a request, and the rows of two are less than a block
        return
    most, gained = map(int, re.findall(r"--max-num-seqs (\d+) .* (\d+) blocks more", lines[0])[0])
    after, nothing = made(most, AVAILABLE + before.rows.num_bytes - Rows(30, 20_736, most, 4, 4 * most).num_bytes)
    assert after.treewy.num_blocks - before.treewy.num_blocks in (
        gained,
        gained + 1,
    )  # of what does not fill a block before
    assert most - 1 <= after.treewy.num_blocks // 4 <= most
    assert not nothing


def test_the_log_says_which_tree() -> None:
    options = Options("reconstruct", widths=(2, 2, 2))
    made = account(blocks_of(14), rows(options, 14), options, drafts=14, max_model_len=4096, available=AVAILABLE)
    assert log_lines(made)[0].startswith("treewy: reconstruct, 14 drafts in a tree of [2, 2, 2]: a request takes")


def test_cached_prefixes_take_a_state_more() -> None:
    """With the plugin and without it: that of the block which is being left."""
    bounds = {"drafts": 3, "max_model_len": 4096, "available": AVAILABLE}
    made = account(blocks_of(3), NONE, Options("reconstruct"), **bounds, prefix_caching=True)
    assert [share.blocks.states_per_request for share in (made.treewy, made.stock)] == [2, 5]
    assert [share.blocks_per_request for share in (made.treewy, made.stock)] == [4 + 3 * 2, 4 + 3 * 5]
    assert "a request takes 2 blocks of each" in log_lines(made)[0]
