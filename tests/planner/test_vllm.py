"""vLLM's block arithmetic: every figure of its logs and of the tables made from them, for the 35B-A3B shape."""

from dataclasses import replace
from fractions import Fraction

import pytest

from treewy.planner import ModelSpec
from treewy.planner.catalogue import model_preset
from treewy.planner.vllm import Layout, layout

SPEC = model_preset("qwen3.5-35b-a3b").spec
GROUP, GROUP_WITHOUT_HEAD, TOKEN_BYTES = 11, 10, 2 * 2 * 256 * 2
# Bytes left to the cache at a memory fraction of 0.6: all the block counts below come from these two.
AVAILABLE = 651_776 * TOKEN_BYTES * GROUP
AVAILABLE_WITHOUT_HEAD = 818 * 1056 * TOKEN_BYTES * GROUP_WITHOUT_HEAD
REQUEST = 1024 + 168


def of(policy: str, drafts: int = 3, ring: int = 16, state_dtype: str = "float32", spec: ModelSpec = SPEC) -> Layout:
    return layout(spec, policy, drafts=drafts, dtype="bfloat16", state_dtype=state_dtype, ring_capacity=ring)


# policy, drafts, ring rows; block size, blocks, KV tokens at 2,048 and at 4,096, resident requests
TABLE = [
    ("store_all", 3, 16, 1072, 608, 88_942, 155_648, 43),
    ("none", 3, 16, 1056, 818, 335_053, 478_646, 163),
    ("reconstruct", 3, 16, 1120, 581, 237_977, 339_968, 116),
    ("ring", 3, 16, 1280, 509, None, 297_837, 127),
    ("ring", 3, 8, 1200, 543, None, 317_732, 135),
    ("store_all", 14, 16, 1168, 558, None, 46_644, 11),
    ("reconstruct", 14, 16, 1312, 496, None, 290_230, 124),
    ("store_all", 39, 16, 1360, 479, None, 15_822, 3),
    ("reconstruct", 39, 16, 1776, 366, None, 249_856, 91),
]


@pytest.mark.parametrize(("policy", "drafts", "ring", "block_size", "num_blocks", "short", "long", "resident"), TABLE)
def test_the_table_of_policies(
    policy: str, drafts: int, ring: int, block_size: int, num_blocks: int, short: int | None, long: int, resident: int
) -> None:
    blocks = of(policy, drafts, ring)
    assert blocks.block_size == block_size
    assert blocks.num_blocks(AVAILABLE_WITHOUT_HEAD if policy == "none" else AVAILABLE) == num_blocks
    assert blocks.kv_tokens(num_blocks, 4096) == long
    if short is not None:
        # These two stand rounded to the nearest token in the table they come from; the log rounds down.
        assert abs(blocks.concurrency(num_blocks, 2048) * 2048 - short) < 1
    assert blocks.requests(num_blocks, REQUEST) == resident


def test_a_request_takes_its_tokens_and_three_groups_of_states() -> None:
    """Blocks / (ceil(M / block size) + 3 (1 + speculative blocks)), with three padding pages in the third group."""
    drafting, plain = of("store_all"), of("none")
    assert (drafting.group_size, drafting.num_attention_groups, drafting.num_state_groups) == (11, 1, 3)
    assert drafting.num_state_groups * drafting.group_size - SPEC.num_linear_layers == 3
    assert (plain.group_size, plain.num_state_groups) == (10, 3)
    assert drafting.blocks_per_request(4096) == 4 + 3 * 4
    assert plain.blocks_per_request(4096) == 4 + 3
    assert of("reconstruct").blocks_per_request(4096) == 4 + 3
    assert drafting.concurrency(608, 4096) == Fraction(608, 16)


# memory fraction 0.9, 4,096 tokens: KV tokens of the log, by policy and state dtype, and the blocks behind them
@pytest.mark.parametrize(
    ("policy", "state_dtype", "num_blocks", "tokens"),
    [
        ("none", "float32", 2900, 1_696_914),
        ("store_all", "float32", 2472, 632_832),
        ("store_all", "bfloat16", 4733, 969_318),
        ("store_all", "float32", 2540, 650_240),
        ("store_all", "float32", 675, 172_800),
    ],
)
def test_logged_cache_sizes(policy: str, state_dtype: str, num_blocks: int, tokens: int) -> None:
    assert of(policy, state_dtype=state_dtype).kv_tokens(num_blocks, 4096) == tokens


def test_float32_and_bfloat16_states_share_one_memory() -> None:
    """The same bytes give the logged blocks under both state dtypes."""
    wide, narrow = of("store_all"), of("store_all", state_dtype="bfloat16")
    assert (narrow.block_size, wide.block_size) == (560, 1072)
    available = 4733 * narrow.block_bytes
    assert narrow.num_blocks(available) == 4733
    assert wide.num_blocks(available) == 2472


@pytest.mark.parametrize(("context", "gain"), [(8192, 1.7), (32768, 1.25)])
def test_the_gain_shrinks_with_context(context: int, gain: float) -> None:
    ratio = of("reconstruct").kv_tokens(581, context) / of("store_all").kv_tokens(608, context)
    assert ratio == pytest.approx(gain, abs=0.05)


def test_the_gain_at_4096() -> None:
    """At most 2.29 with records that take nothing; 2.1 to 2.2 with them in the page."""
    assert of("store_all")._replace(states_per_request=1).kv_tokens(608, 4096) / 155_648 == pytest.approx(
        2.29, abs=0.005
    )
    assert 2.1 < of("reconstruct").kv_tokens(581, 4096) / 155_648 < 2.2


def test_one_gpus_share() -> None:
    """Heads divide, so pages do; at twice as many GPUs as KV heads the page shrinks and the token does not."""
    whole, half, quarter = (of("none", spec=SPEC.shard(tp)) for tp in (1, 2, 4))
    assert half.state_bytes * 2 == whole.state_bytes == quarter.state_bytes * 4
    assert half.block_size == whole.block_size
    assert quarter.block_size == 16 * -(-quarter.state_bytes // (16 * TOKEN_BYTES // 2))


def test_no_memory_no_blocks() -> None:
    assert of("none").num_blocks(-5) == 0


@pytest.mark.parametrize(("linear", "group_size", "groups"), [(14, 14, 1), (15, 10, 2), (8, 10, 1), (6, 6, 1)])
def test_group_sizes(linear: int, group_size: int, groups: int) -> None:
    """As large as the rarer kind of layer, unless the other is less than half as common again: then as large as that."""
    blocks = of("none", spec=replace(SPEC, num_linear_layers=linear))
    assert (blocks.group_size, blocks.num_state_groups) == (group_size, groups)
    assert blocks.num_attention_groups == -(-10 // group_size)
