"""Every combination that cannot run is refused with a message of three parts, on configurations of both versions."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from treewy.errors import RequestError, UnsupportedError
from treewy.vllm_plugin import facts
from treewy.vllm_plugin.options import Options
from treewy.vllm_plugin.refusals import refuse
from vllm_plugin.stand_in import config

CHAIN, RING = Options("reconstruct"), Options("ring")
TREE = Options("reconstruct", (2, 2))
TREE_DRAFTS = {"speculative__num_speculative_tokens": 6}

# What is given, and what must hold, what was given and what to do, as the message says it.
REFUSED = [
    (
        {"use_v2_model_runner": False, "cache__mamba_cache_mode": "align"},
        "needs vLLM's Model Runner V2",
        "runs on V1",
        "VLLM_USE_V2_MODEL_RUNNER=1",
    ),
    ({"cache__mamba_cache_mode": "all"}, "none and align", "'all'", "Pass --mamba-cache-mode align"),
    ({"cache__use_replayssm": True}, "Only one commit policy", "use_replayssm", "Drop one"),
    ({"cache__use_kda_recoverssm": True}, "Only one commit policy", "use_kda_recoverssm", "Drop one"),
    ({"cache__mamba_ssm_cache_dtype": "float16"}, "float32 or bfloat16", "float16", "--mamba-ssm-cache-dtype float32"),
    (
        {"cache__mamba_ssm_cache_dtype": "auto", "cache__mamba_cache_dtype": "float16"},
        "float32 or bfloat16",
        "would be float16",
        "--mamba-ssm-cache-dtype",
    ),
    (
        {"cache__mamba_ssm_cache_dtype": "auto", "model__dtype": "torch.float16"},
        "float32 or bfloat16",
        "would be float16",
        "--mamba-ssm-cache-dtype",
    ),
    ({"parallel__pipeline_parallel_size": 2}, "one pipeline stage", "pipeline_parallel_size is 2", "Set it to 1"),
    ({"parallel__decode_context_parallel_size": 2}, "whole on one GPU", "over 2 GPUs", "decode_context_parallel_size"),
    (
        {"parallel__prefill_context_parallel_size": 4},
        "whole on one GPU",
        "over 4 GPUs",
        "prefill_context_parallel_size",
    ),
    ({"parallel__use_ubatching": True}, "batches that run whole", "enable_dbo or ubatch_size", "Leave both out"),
    ({"transfer__kv_connector": "Nixl"}, "KV connector does not see", "Nixl is on", "Leave connectors"),
    ({"lora_config": object()}, "LoRA", "adapters are enabled", "Leave --enable-lora out"),
    (
        {"speculative__num_speculative_tokens_per_batch_size": [(1, 8, 3)]},
        "the same number of tokens",
        "num_speculative_tokens_per_batch_size makes it vary",
        "Leave it out",
    ),
    (
        {"speculative__enable_adaptive_verification": True},
        "the same number of tokens",
        "enable_adaptive_verification makes it vary",
        "Leave it out",
    ),
    (
        {"text__model_type": "olmo_hybrid"},
        "Gated DeltaNet layers, of type qwen3_5",
        "'olmo_hybrid'",
        "Leave mamba_state_commit",
    ),
    (
        {"text__layer_types": ["full_attention"]},
        "Gated DeltaNet layers",
        "has 0 linear layers",
        "Leave mamba_state_commit",
    ),
    ({"text__layer_types": None}, "Gated DeltaNet layers", "a/model has 0 linear layers", "Leave mamba_state_commit"),
]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "platform", lambda: "cuda")


@pytest.mark.parametrize("version", ["0.26", "0.32"])
@pytest.mark.parametrize("options", [CHAIN, RING])
def test_a_chain_runs(version: str, options: Options) -> None:
    refuse(config(version), options)
    refuse(config(version, kv_transfer_config=None), options)
    refuse(config(version, cache__mamba_ssm_cache_dtype="auto"), options)
    refuse(config(version, cache__mamba_ssm_cache_dtype="bfloat16"), options)
    refuse(config(version, cache__mamba_cache_dtype="float16"), options)  # the state's own dtype counts
    refuse(config(version, cache__cache_dtype="fp8"), options)
    refuse(config(version, speculative__draft_sample_method="probabilistic"), options)


@pytest.mark.parametrize("version", ["0.26", "0.32"])
@pytest.mark.parametrize(("changes", "holds", "given", "remedy"), REFUSED)
@pytest.mark.parametrize("options", [CHAIN, RING, TREE])
def test_what_cannot_run_is_refused(
    options: Options, changes: dict[str, Any], holds: str, given: str, remedy: str, version: str
) -> None:
    """Faults C11, D09, L05 and L08: connectors, drafting that comes and goes, and adapters are among it."""
    changed = config(version, **(TREE_DRAFTS if options is TREE else {}), **changes)
    with pytest.raises(UnsupportedError) as refusal:
        refuse(changed, options)
    message = str(refusal.value)
    places = [message.find(part) for part in (holds, given, remedy)]
    assert places == sorted(places), message
    assert places[0] >= 0, message
    assert message.endswith(".")


def test_nothing_is_refused_without_options() -> None:
    for changes, *_ in REFUSED:
        refuse(config(**changes), Options())
    refuse(None, Options(check_every=3))


@pytest.mark.parametrize("platform", ["rocm", "xpu", "tpu", "other"])
def test_other_platforms_are_refused(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "platform", lambda: platform)
    with pytest.raises(UnsupportedError, match=f"runs on cuda and cpu; this is {platform}. Leave it out there."):
        refuse(config(), CHAIN)


def test_on_a_cpu_the_second_runner_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU build has none that runs."""
    monkeypatch.setattr(facts, "platform", lambda: "cpu")
    with pytest.raises(
        UnsupportedError, match=r"runs on V1\. On a CPU, .* pass --no-.*caching \(in Python .*=False\)\."
    ):
        refuse(config(use_v2_model_runner=False, cache__mamba_cache_mode="align"), CHAIN)


def test_drafts_are_needed() -> None:
    with pytest.raises(RequestError, match=r"there is no speculative config\. Pass one"):
        refuse(config(speculative_config=None), CHAIN)


@pytest.mark.parametrize("drafts", [5, 7, 2])
def test_a_tree_must_be_counted_right(drafts: int) -> None:
    """The message says the number to pass."""
    with pytest.raises(RequestError, match=r'\[2, 2\] has 6, .* is \d. Pass "num_speculative_tokens": 6\.'):
        refuse(config(speculative__num_speculative_tokens=drafts), TREE)


def test_the_rows_of_a_step_are_bounded() -> None:
    refuse(config(speculative__num_speculative_tokens=127), CHAIN)
    with pytest.raises(RequestError, match=r"at most 128 rows per request.*num_speculative_tokens is 128"):
        refuse(config(speculative__num_speculative_tokens=128), CHAIN)


def test_a_history_must_hold_a_path() -> None:
    refuse(config(), Options("ring", ring_capacity=4))
    with pytest.raises(RequestError, match=r"4 rows; ring_capacity is 3\. Raise it to 4 at least"):
        refuse(config(), Options("ring", ring_capacity=3))


TREES_REFUSED = [
    ({"speculative__rejection_sample_method": "block"}, "rejection_sample_method is 'block', which is for chains"),
    ({"speculative__draft_sample_method": "probabilistic"}, "draft_sample_method is 'probabilistic'. Use 'greedy'."),
    ({"cache__cache_dtype": "fp8_e4m3"}, "kv_cache_dtype is 'fp8_e4m3'. Pass --kv-cache-dtype auto"),
    (
        {"cache__cache_dtype": "float16"},
        "in the model's dtype; kv_cache_dtype is 'float16'. Pass --kv-cache-dtype auto",
    ),
    ({"cache__sliding_window": 4096}, "a sliding window of 4096. Leave draft_tree_widths out for it."),
    (
        {"speculative__method": "eagle3"},
        "drafts with the model's own head; the method is 'eagle3'. Use 'mtp', or leave",
    ),
    (
        {"speculative__use_local_argmax_reduction": True},
        "the whole vocabulary; use_local_argmax_reduction finds one. Leave it out, or leave draft_tree_widths out.",
    ),
    (
        {"parallel__enable_batch_sharded_sampling": True},
        "one sampler for the whole batch; enable_batch_sharded_sampling is on. Leave it out",
    ),
    (
        {"model__logits_processors": ["mine"]},
        "logits that depend on nothing but the row; logits_processors are given. Leave them out",
    ),
    ({"parallel__data_parallel_size": 2}, "one data parallel engine; there are 2. Run them apart"),
]


@pytest.mark.parametrize(("changes", "message"), TREES_REFUSED)
def test_what_trees_cannot_do(changes: dict[str, Any], message: str) -> None:
    """Faults G06 and G11: refused at the start, and never run as a chain. What is a chain may have all of it."""
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        refuse(config(**TREE_DRAFTS, **changes), TREE)
    refuse(config(**changes), CHAIN)


@pytest.mark.parametrize("version", ["0.26", "0.32"])
@pytest.mark.parametrize("acceptance", ["standard", "synthetic"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("bfloat16", "auto"), ("bfloat16", "bfloat16"), ("float16", "float16")]
)
def test_trees_run(version: str, acceptance: str, dtype: str, kv_dtype: str) -> None:
    changes = {
        "speculative__rejection_sample_method": acceptance,
        "model__dtype": f"torch.{dtype}",
        "cache__cache_dtype": kv_dtype,
    }
    refuse(config(version, **TREE_DRAFTS, **changes), TREE)
    refuse(config(version, **TREE_DRAFTS, **changes), Options("ring", (2, 2), ring_capacity=3))


def test_checks_need_eager_steps():
    """A captured graph cannot look at states from the host."""
    graphs = SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True))
    refuse(config(compilation_config=graphs), CHAIN)
    refuse(config(), Options("reconstruct", check_every=1))
    with pytest.raises(UnsupportedError, match=r"check_every looks at states.*it is 2.*Pass --enforce-eager"):
        refuse(config(compilation_config=graphs), Options("reconstruct", check_every=2))


def test_the_first_runner_drafts_chains_without_prefix_caching():
    """And says which of the two it cannot."""
    refuse(config(use_v2_model_runner=False), CHAIN)
    refuse(config(use_v2_model_runner=False), RING)
    with pytest.raises(UnsupportedError, match=r"with prefix caching \(mamba_cache_mode 'align'\)"):
        refuse(config(use_v2_model_runner=False, cache__mamba_cache_mode="align"), CHAIN)
    with pytest.raises(UnsupportedError, match=r"'reconstruct' with draft trees"):
        refuse(config(use_v2_model_runner=False, **TREE_DRAFTS), TREE)
