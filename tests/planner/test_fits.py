"""Fits, regimes and advice, on figures worked out by hand."""

from dataclasses import replace

import pytest

from treewy.errors import RequestError
from treewy.planner import GPU, Plan, Setting, Source, find_gpu, find_model, make_plan, per_sequence
from treewy.planner.catalogue import model_preset

MIB, GIB = 1 << 20, 1 << 30
SPEC = model_preset("qwen3.5-35b-a3b").spec
MODEL = find_model("qwen3.5-35b-a3b", "bfloat16")


def plan(gpu: str = "h200", model: Source = MODEL, **options) -> Plan:
    return make_plan(model, find_gpu(gpu), Setting(**options))


def test_parts_by_hand() -> None:
    """35B-A3B, a chain of 3 at 32,768 tokens: 30 linear layers, 10 softmax layers, one in the head."""
    part = per_sequence(SPEC, rows=4, context=32768, dtype="bfloat16", state_dtype="bfloat16")
    record = 30 * (32 * 128 + 16 * 128 + 2 * 32) * 4
    channels = 2 * 16 * 128 + 32 * 128
    assert part.state == 30 * 32 * 128 * 128 * 2 == 30 * MIB
    assert part.conv == 30 * 3 * channels * 2
    assert part.kv == 10 * 32768 * 2 * (2 * 256) * 2 == 640 * MIB
    assert part.draft_kv == 32768 * 2 * (2 * 256) * 2 == 64 * MIB
    assert part.snapshots == 4 * 30 * MIB
    assert part.conv_inputs == 4 * 30 * channels * 2
    assert part.stash == 4 * record + part.conv_inputs
    assert part.history == 16 * record + 30 * 8
    assert part.pending_kv == 4 * 10 * 2 * (2 * 256) * 2


def test_state_dtype_and_tree() -> None:
    wide = per_sequence(SPEC, rows=40, context=32768, dtype="bfloat16", state_dtype="float32")
    narrow = per_sequence(SPEC, rows=40, context=32768, dtype="bfloat16", state_dtype="bfloat16")
    assert (wide.state, wide.snapshots) == (60 * MIB, 40 * 60 * MIB)
    assert (narrow.state, narrow.snapshots) == (30 * MIB, 40 * 30 * MIB)
    assert wide._replace(state=0, snapshots=0) == narrow._replace(state=0, snapshots=0)


def test_dtype_of_keys_values_and_windows() -> None:
    """Records stay in float32 whatever the model's dtype; everything that the model's dtype holds doubles."""
    narrow, wide = (
        per_sequence(SPEC, rows=4, context=100, dtype=dtype, state_dtype="bfloat16")
        for dtype in ("bfloat16", "float32")
    )
    for part in ("conv", "kv", "draft_kv", "conv_inputs", "pending_kv"):
        assert getattr(wide, part) == 2 * getattr(narrow, part)
    for part in ("state", "snapshots", "history"):
        assert getattr(wide, part) == getattr(narrow, part)
    assert wide.stash - wide.conv_inputs == narrow.stash - narrow.conv_inputs


def test_what_each_policy_holds() -> None:
    """Fault J04: store_all takes a state per row beside the committed one, the others take records."""
    part = per_sequence(SPEC, rows=4, context=1000, dtype="bfloat16", state_dtype="bfloat16", ring_capacity=8)
    plain = part.state + part.conv + part.kv
    drafting = plain + part.draft_kv + part.pending_kv
    assert part.totals() == {
        "none": plain,
        "store_all": drafting + part.snapshots + part.conv_inputs,
        "reconstruct": drafting + part.stash,
        "ring": drafting + part.stash + part.history,
    }
    assert part.history == 2 * (part.stash - part.conv_inputs) + 30 * 8


def test_without_drafts_there_is_no_drafters_memory() -> None:
    part = per_sequence(SPEC, rows=1, context=1000, dtype="bfloat16", state_dtype="bfloat16")
    assert part.draft_kv == 0
    assert part.snapshots == part.state
    result = plan(rows=1)
    assert result.weights_bytes == MODEL.weights.target
    assert result.budget_bytes["none"] == result.budget_bytes["store_all"]
    assert result.advice.startswith("Nothing is drafted")


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_tensor_parallelism_divides(tp: int) -> None:
    """States, windows and records divide, a history's count does not; KV heads only down to one, then every GPU holds a copy."""
    whole = per_sequence(SPEC, rows=4, context=1000, dtype="bfloat16", state_dtype="float32")
    share = per_sequence(SPEC.shard(tp), rows=4, context=1000, dtype="bfloat16", state_dtype="float32")
    for part in ("state", "conv", "snapshots", "stash", "conv_inputs"):
        assert getattr(share, part) * tp == getattr(whole, part)
    assert (share.history - 30 * 8) * tp == whole.history - 30 * 8
    for part in ("kv", "draft_kv", "pending_kv"):
        assert getattr(share, part) * 2 == getattr(whole, part)


@pytest.mark.parametrize("tp", [3, 5, 32, 0, -1])
def test_heads_that_do_not_divide(tp: int) -> None:
    with pytest.raises(RequestError, match=f"tp {tp}"):
        plan(tp=tp)


def test_kv_heads_that_do_not_divide() -> None:
    spec = replace(SPEC, num_kv_heads=4, num_heads=24, num_key_heads=12, num_value_heads=24)
    assert spec.shard(12).num_kv_heads == 1
    assert spec.shard(2).num_kv_heads == 2
    with pytest.raises(RequestError, match="4 KV heads and tp 6"):
        spec.shard(6)


def test_fits_by_hand() -> None:
    """(usable memory - reserve - weights) / sequence, rounded down; without drafts the head's weights are free."""
    result = plan("100", memory_fraction=0.75, reserve_gib=2.5, context=4096, tp=2)
    usable = 75 * GIB - 5 * GIB // 2
    for policy in ("none", "store_all", "reconstruct", "ring"):
        weights = MODEL.weights.target + (MODEL.weights.head if policy != "none" else 0)
        assert result.budget_bytes[policy] == usable - weights // 2
        assert result.fits[policy] == (usable - weights // 2) // result.totals[policy]
    assert result.fits["none"] > result.fits["reconstruct"] > result.fits["ring"] > result.fits["store_all"] > 0
    assert result.weights_bytes == MODEL.weights.target + MODEL.weights.head


def test_weights_that_do_not_fit() -> None:
    result = plan("h100", find_model("qwen3.5-122b-a10b", "bfloat16"))
    assert result.regime == "weights do not fit"
    assert set(result.fits.values()) == {0}
    assert result.vllm is None
    short = result.weights_bytes + 3 * GIB - int(81559 * MIB * 0.9)
    assert f"{short / GIB:.2f} GiB more than each GPU may use" in result.advice


def test_no_sequence_fits() -> None:
    """0 requests is an answer, with what to do."""
    result = plan("78", context=1 << 18)
    assert result.regime == "kv-bound"
    assert result.fits["reconstruct"] == 0
    assert "Not one request" in result.advice
    assert "Shorten the context" in result.advice


def test_worth_it() -> None:
    result = plan(context=4096)
    assert result.state_dtype == "float32"
    assert result.regime == "state-bound"
    fits = result.fits
    assert result.advice.startswith(
        f"Use reconstruct: {fits['reconstruct']} requests fit, against {fits['store_all']} with store_all, "
        f"{fits['reconstruct'] / fits['store_all']:.2f} times as many"
    )
    assert "its records are 2.84 MiB in place of 240.00 MiB of snapshots" in result.advice
    assert f"{fits['none'] - fits['reconstruct']} of the {fits['none']} that fit without drafts" in result.advice
    assert f"{fits['ring']} fit with ring" in result.advice


def test_do_not_bother_with_long_contexts() -> None:
    result = plan(context=1 << 18, state_dtype="bfloat16")
    assert result.regime == "kv-bound"
    assert result.advice.startswith("Do not bother: store_all holds")
    share = result.per_sequence.snapshots / result.totals["store_all"]
    assert f"{share:.1%} of a sequence" in result.advice


def test_do_not_bother_when_memory_does_not_limit() -> None:
    result = plan(context=4096, requests=8)
    assert result.regime == "not memory-bound"
    assert result.advice.startswith("Do not bother: 8 requests fit even with store_all")


@pytest.mark.parametrize(
    ("wanted", "said"), [("reconstruct", None), ("none", "fit only without drafts"), (None, "fit under no policy")]
)
def test_wanted_requests(wanted: str | None, said: str | None) -> None:
    fits = plan(context=4096).fits
    count = fits[wanted] if wanted else fits["none"] + 1
    result = plan(context=4096, requests=count)
    assert result.regime == "state-bound"
    assert result.advice.startswith("Use reconstruct")
    assert ("you want" in result.advice) == (said is not None)
    assert (said or "Use") in result.advice


def test_one_more_than_store_all_holds_is_memory_bound() -> None:
    fits = plan(context=4096).fits
    assert plan(context=4096, requests=fits["store_all"]).regime == "not memory-bound"
    assert plan(context=4096, requests=fits["store_all"] + 1).regime == "state-bound"


def test_a_tree_that_only_reconstruct_can_hold() -> None:
    """store_all holds none: no ratio, no division by zero."""
    result = plan("80", rows=1024, context=1024)
    assert result.fits["store_all"] == 0 < result.fits["reconstruct"]
    assert f"{result.fits['reconstruct']} request" in result.advice
    assert "times as many" not in result.advice


def test_notes() -> None:
    headless = replace(MODEL, spec=replace(SPEC, num_head_layers=0))
    assert "no multi-token-prediction head" in plan(model=headless, context=4096).advice
    assert "no multi-token-prediction head" not in plan(model=headless, rows=1).advice
    assert "no multi-token-prediction head" not in plan(context=4096).advice
    assert "is 10 tokens beyond" in plan(context=SPEC.max_len + 10).advice
    assert "beyond" not in plan(context=SPEC.max_len).advice


def test_vllm_uses_the_same_budget() -> None:
    result = plan(context=4096)
    assert result.vllm is not None
    assert set(result.vllm) == set(result.fits)
    for policy, blocks in result.vllm.items():
        layers = 10 if policy == "none" else 11
        assert blocks["num_blocks"] == result.budget_bytes[policy] // (blocks["page_bytes"] * layers)
        assert blocks["requests"] == blocks["num_blocks"] // blocks["blocks_per_request"]
    assert result.vllm["store_all"]["block_size"] == 1072
    assert result.vllm["ring"]["block_size"] == 1280


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_fraction": 0.0}, "memory fraction"),
        ({"memory_fraction": 1.5}, "memory fraction"),
        ({"memory_fraction": float("nan")}, "memory fraction"),
        ({"reserve_gib": -1.0}, "reserve"),
        ({"reserve_gib": float("inf")}, "reserve"),
        ({"requests": 0}, "Wanted requests"),
        ({"context": 0}, "context"),
        ({"rows": 0}, "rows"),
        ({"ring_capacity": 0}, "ring capacity"),
    ],
)
def test_settings_out_of_range(options: dict, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        plan(**options)


def test_a_gpu_of_the_callers_own() -> None:
    own = GPU("mine", 200 * GIB, None, "as given")
    assert make_plan(MODEL, own, Setting()).fits["none"] > plan(context=32768).fits["none"]
