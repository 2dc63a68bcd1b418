"""What a user of real vLLM meets before a model is loaded: options accepted where vLLM refuses unknown keys, and refusals."""

from pathlib import Path
from typing import Any

import pytest
from front_end import ask

from treewy.planner.catalogue import model_preset
from treewy.vllm_plugin import facts, versions
from treewy.vllm_plugin.accounting import predict_layout

ON = {"mamba_state_commit": "reconstruct"}
OFF = {"enable_prefix_caching": False}
TREE = ON | {"num_speculative_tokens": 14, "draft_tree_widths": [2, 2, 2]}
AVAILABLE = 651_776 * 2048 * 11
SPEC = model_preset("qwen3.5-35b-a3b").spec


def drafting(**options: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3, **options}}


# The arguments of a configuration that the plugin refuses, and a part of its message.
REFUSED = {
    "first runner and prefixes": (
        drafting(**ON) | {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
        "On a CPU, where V2 wants a Triton that compiles for it, pass --no-enable-prefix-caching (in Python "
        "enable_prefix_caching=False).",
    ),
    "bad value": (drafting(mamba_state_commit="x") | OFF, "must be one of store_all, reconstruct, ring; got 'x'"),
    "no number": (
        {"speculative_config": {"method": "mtp", "draft_tree_widths": [3, 3, 3], **ON}} | OFF,
        'Pass "num_speculative_tokens": 39.',
    ),
    "first runner and trees": (
        drafting(**TREE) | OFF | {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
        "with draft trees needs vLLM's Model Runner V2; this configuration runs on V1. On a CPU, where V2 wants "
        "a Triton that compiles for it, draft a chain, without prefix caching.",
    ),
    "trees with another attention": (
        drafting(**TREE) | {"attention_backend": "FLASH_ATTN"},
        "attention_backend is FLASH_ATTN",
    ),
    "trees that are drawn": (drafting(**TREE, draft_sample_method="probabilistic"), "Use 'greedy'"),
    "trees with longer paths than they have": (
        drafting(**TREE, rejection_sample_method="synthetic", synthetic_acceptance_length=5.0),
        "the tree has 3 levels. Ask for 4 tokens at most.",
    ),
    "trees of too many rows": (
        drafting(**TREE) | OFF | {"max_num_batched_tokens": 24, "max_num_seqs": 5, "max_model_len": 24},
        "5 x 6 rows; max_num_batched_tokens is 24",
    ),
    "no drafts": ({"additional_config": {"treewy": ON}} | OFF, "there is no speculative config"),
    "offloading": (drafting(**ON) | OFF | {"kv_offloading_size": 1.0}, "OffloadingConnector is on"),
    "adapters": (drafting(**ON) | OFF | {"enable_lora": True}, "adapters are enabled"),
    "float16": (drafting(**ON) | OFF | {"mamba_ssm_cache_dtype": "float16"}, "they would be float16"),
    "pipeline": (drafting(**ON) | OFF | {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
    "twice": (drafting(**ON) | OFF | {"additional_config": {"treewy": {"mamba_state_commit": "ring"}}}, "Drop one."),
    "typing error": (drafting() | OFF | {"additional_config": {"treewy": {"commit": "ring"}}}, "must be among"),
}
ACCEPTED = {
    "in the speculative config": drafting(**ON) | OFF,
    "prefix caching": drafting(**ON),
    "trees": drafting(**TREE),
    "dashes": drafting(**{"mamba-state-commit": "reconstruct"}) | OFF,
    "in the additional config": drafting() | OFF | {"additional_config": {"treewy": ON}},
    "not asked for": drafting(),
    "store_all": drafting(mamba_state_commit="store_all"),
    "no drafting": {},
}
DRAFTS = (3, 14, 39)


def sizes(drafts: int, blocks: int) -> dict[str, int]:
    predicted = predict_layout(SPEC, drafts=drafts, dtype="bfloat16", state_dtype="float32")
    return {
        "drafts": drafts,
        "blocks": blocks,
        "block_size": predicted.block_size,
        "page_bytes": predicted.page_bytes,
        "available": AVAILABLE,
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ask(
        tmp_path_factory.mktemp("model"),
        cases={name: arguments for name, (arguments, _) in REFUSED.items()} | ACCEPTED,
        layouts=[sizes(drafts, blocks) for drafts in DRAFTS for blocks in (0, drafts)],
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, answers: dict[str, Any]) -> None:
    """Faults C11, L08 and L09: with our own errors, not wrapped into those of vLLM's validation."""
    answer = answers["cases"][name]
    assert answer.get("error") in ("RequestError", "UnsupportedError"), answer
    assert REFUSED[name][1] in answer["message"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str, answers: dict[str, Any]) -> None:
    answer = answers["cases"][name]
    plain = {"store_all": {"treewy": {"mamba_state_commit": "store_all"}}, "not asked for": {}, "no drafting": {}}
    wanted = plain | {"trees": {"treewy": ON | {"draft_tree_widths": [2, 2, 2]}}}
    assert answer["additional"] == wanted.get(name, {"treewy": ON})
    assert answer["shown"] == (name not in plain)  # the histogram among vLLM's metrics


def test_a_version_between_the_tested_ones(tmp_path: Path) -> None:
    """Its internals are those of 0.32 here, so it is accepted; the plugin has taken hold by the time that it is asked."""
    cases = {"asked for": drafting(**ON) | OFF, "not asked for": drafting()}
    answers = ask(tmp_path, version="0.30.0+cpu", cases=cases, layouts=[])["cases"]
    assert answers["asked for"]["additional"] == {"treewy": ON}
    assert answers["not asked for"]["additional"] == {}


def test_facts(answers: dict[str, Any]) -> None:
    """Read from the real fields: names that vLLM changes are found here."""
    assert answers["cases"]["in the speculative config"]["facts"] == {
        "platform": "cpu",
        "drafts": 3,
        "model": answers["cases"]["store_all"]["facts"]["model"],
        "model_type": "qwen3_5_text",
        "num_linear_layers": 3,
        "is_v2": True,
        "cache_mode": "none",
        "dtype": "bfloat16",
        "state_dtype": "float32",
        "kv_dtype": "auto",
        "other_policies": [],
        "pipeline": 1,
        "context_parallel": 1,
        "ubatches": False,
        "kv_connector": None,
        "lora": False,
        "dynamic_drafts": None,
        "acceptance": "standard",
        "draft_sampling": "greedy",
        "full_graphs": False,
        "method": "mtp",
        "local_argmax": False,
        "sharded_sampling": False,
        "logits_processors": False,
        "sampling_masks": False,
        "routed_experts": False,
        "draft_backend": None,
        "draft_kv_dtype": None,
        "sliding_window": None,
        "data_parallel": 1,
    }
    assert Path(answers["cases"]["store_all"]["facts"]["model"]).name.startswith("model")
    assert answers["cases"]["not asked for"]["facts"]["cache_mode"] == "align"
    assert answers["cases"]["no drafting"]["facts"]["drafts"] is None


def test_fields_that_a_version_may_lack(answers: dict[str, Any]) -> None:
    """They are read with a default, which would hide a new name."""
    new = versions.installed() >= versions.Version(0, 32, 0)
    assert answers["cases"]["in the speculative config"]["fields"] == {
        "cache": list(facts.OTHER_POLICIES) if new else [],
        "speculative": list(facts.DYNAMIC_DRAFTS) if new else [facts.DYNAMIC_DRAFTS[0]],
    }


@pytest.mark.parametrize(("drafts", "num_blocks"), [(3, 608), (14, 558), (39, 479)])
def test_vllm_lays_out_as_predicted(drafts: int, num_blocks: int, answers: dict[str, Any]) -> None:
    """Fault J03: groups, pages and blocks of the 35B-A3B shape, with a state per request and with one per draft."""
    predicted = predict_layout(SPEC, drafts=drafts, dtype="bfloat16", state_dtype="float32")
    one, all_of_them = answers["layouts"][2 * DRAFTS.index(drafts) :][:2]
    assert all_of_them == {"layout": list(predicted), "num_blocks": num_blocks}
    assert one == {"layout": list(predicted._replace(states_per_request=1)), "num_blocks": num_blocks}
    assert predicted.num_blocks(AVAILABLE) == num_blocks
