"""What cannot run with the plugin, refused before anything does: what must hold, what was given, what to do."""

from typing import Any

from treewy.errors import RequestError, UnsupportedError
from treewy.planner.model import SUPPORTED as MODEL_TYPES
from treewy.vllm_plugin.facts import Facts, read
from treewy.vllm_plugin.options import CHECK_EVERY, COMMIT, MAX_ROWS, RING_CAPACITY, WIDTHS, Options

STATE_DTYPES = ("float32", "bfloat16")
PLATFORMS = ("cuda", "cpu")
# How recurrent states are kept for prefixes: not at all, or one at the end of each block.
CACHE_MODES = ("none", "align")


def refuse(vllm_config: Any, options: Options) -> None:
    """Refuse a configuration that the options cannot run with. Options that change nothing are never refused.

    Raises:
        RequestError: numbers do not fit each other.
        UnsupportedError: something asked for together does not work together.
    """
    if not options.active:
        return
    facts = read(vllm_config)
    for check in (_check_drafts, _check_model, _check_runner, _check_states, _check_parallel, _check_requests):
        check(facts, options)
    if options.widths is not None:
        _check_tree(facts)
        _check_tree_sampling(facts)


def check_tree_size(options: Options, drafts: Any) -> None:
    """Check that vLLM was told how many drafts the tree has, if there is a tree.

    Args:
        options: The engine's.
        drafts: What vLLM was told; None if nothing.

    Raises:
        RequestError: it is another number.
    """
    if options.widths is not None and drafts != options.num_tree_drafts:
        raise RequestError(
            f"num_speculative_tokens must be the number of drafts in the tree; {WIDTHS} {list(options.widths)} has "
            f'{options.num_tree_drafts}, num_speculative_tokens is {drafts!r}. Pass "num_speculative_tokens": '
            f"{options.num_tree_drafts}."
        )


def _check_drafts(facts: Facts, options: Options) -> None:
    drafts = facts.drafts
    if drafts is None:
        raise RequestError(
            f"{COMMIT} {options.commit!r} is about drafts; there is no speculative config. Pass one, as in "
            f'--speculative-config \'{{"method": "mtp", "num_speculative_tokens": 3, "{COMMIT}": "{options.commit}"}}\'.'
        )
    check_tree_size(options, drafts)
    if drafts + 1 > MAX_ROWS:
        raise RequestError(
            f"A step must have at most {MAX_ROWS} rows per request, {MAX_ROWS - 1} drafts and the last token; "
            f"num_speculative_tokens is {drafts}. Draft fewer tokens."
        )
    longest = options.longest_path(drafts)
    if options.commit == "ring" and options.ring_capacity < longest:
        raise RequestError(
            f"A history must hold the longest path that a step can accept, {longest} rows; {RING_CAPACITY} is "
            f"{options.ring_capacity}. Raise it to {longest} at least."
        )
    if facts.dynamic_drafts is not None:
        raise UnsupportedError(
            f"Every request must draft the same number of tokens; {facts.dynamic_drafts} makes it vary. Leave it out of the "
            "speculative config."
        )


def _check_model(facts: Facts, options: Options) -> None:
    if facts.model_type not in MODEL_TYPES or not facts.num_linear_layers:
        raise UnsupportedError(
            f"{COMMIT} {options.commit!r} needs a model with Gated DeltaNet layers, of type {', '.join(MODEL_TYPES)}; "
            f"{facts.model} has {facts.num_linear_layers} linear layers and is of type {facts.model_type!r}. Leave "
            f"{COMMIT} out for it."
        )


def _check_runner(facts: Facts, options: Options) -> None:
    if facts.platform not in PLATFORMS:
        raise UnsupportedError(
            f"{COMMIT} {options.commit!r} runs on {' and '.join(PLATFORMS)}; this is {facts.platform}. Leave it out there."
        )
    if not facts.is_v2 and (options.widths is not None or facts.cache_mode != "none"):
        what, instead = (
            ("draft trees", "draft a chain, without prefix caching")
            if options.widths is not None
            else (
                f"prefix caching (mamba_cache_mode {facts.cache_mode!r})",
                "pass --no-enable-prefix-caching (in Python enable_prefix_caching=False)",
            )
        )
        remedy = f"Set the environment variable VLLM_USE_V2_MODEL_RUNNER=1, or {instead}."
        if facts.platform == "cpu":
            remedy = f"On a CPU, where V2 wants a Triton that compiles for it, {instead}."
        raise UnsupportedError(
            f"{COMMIT} {options.commit!r} with {what} needs vLLM's Model Runner V2; this configuration runs on V1. {remedy}"
        )


def _check_states(facts: Facts, options: Options) -> None:
    if facts.cache_mode not in CACHE_MODES:
        raise UnsupportedError(
            f"{COMMIT} {options.commit!r} works with mamba_cache_mode {' and '.join(CACHE_MODES)}; it is {facts.cache_mode!r}. "
            "Pass --mamba-cache-mode align, or --no-enable-prefix-caching."
        )
    if options.check_every and facts.full_graphs:
        raise UnsupportedError(
            f"{CHECK_EVERY} looks at states from the host, which no captured graph can; it is {options.check_every} and steps "
            "are captured whole. Pass --enforce-eager, or leave it out."
        )
    if facts.other_policies:
        raise UnsupportedError(
            f"Only one commit policy can own the recurrent states; got {COMMIT} {options.commit!r} and "
            f"{' and '.join(facts.other_policies)}. Drop one."
        )
    if facts.state_dtype not in STATE_DTYPES:
        raise UnsupportedError(
            f"Recurrent states must be {' or '.join(STATE_DTYPES)}; they would be {facts.state_dtype}. Pass "
            "--mamba-ssm-cache-dtype float32, or bfloat16."
        )


def _check_parallel(facts: Facts, options: Options) -> None:
    refused = {
        "one pipeline stage": (facts.pipeline > 1, f"pipeline_parallel_size is {facts.pipeline}", "Set it to 1"),
        "contexts that stay whole on one GPU": (
            facts.context_parallel > 1,
            f"decode or prefill context parallelism is over {facts.context_parallel} GPUs",
            "Set decode_context_parallel_size and prefill_context_parallel_size to 1",
        ),
        "batches that run whole": (facts.ubatches, "enable_dbo or ubatch_size cuts them", "Leave both out"),
    }
    for condition, (broken, given, remedy) in refused.items():
        if broken:
            raise UnsupportedError(f"{COMMIT} {options.commit!r} needs {condition}; {given}. {remedy}.")


def _check_requests(facts: Facts, options: Options) -> None:
    if facts.kv_connector is not None:
        raise UnsupportedError(
            f"{COMMIT} {options.commit!r} keeps rows of a request beside vLLM's blocks, where a KV connector does not see "
            f"them; {facts.kv_connector} is on. Leave connectors and offloading out."
        )
    if facts.lora:
        raise UnsupportedError(
            f"{COMMIT} {options.commit!r} does not work with LoRA adapters yet, in the target or in the drafter; adapters are "
            "enabled. Leave --enable-lora out."
        )


def _check_tree(facts: Facts) -> None:
    if facts.acceptance == "block":
        raise UnsupportedError(
            f"Trees are accepted path by path; rejection_sample_method is {facts.acceptance!r}, which is for chains. Leave "
            "it out of the speculative config."
        )
    if facts.draft_sampling == "probabilistic":
        raise UnsupportedError(
            f"Drafts of a tree are chosen, not drawn; draft_sample_method is {facts.draft_sampling!r}. Use 'greedy'."
        )
    if facts.kv_dtype not in ("auto", facts.dtype):
        raise UnsupportedError(
            f"Attention over trees reads keys and values in the model's dtype; kv_cache_dtype is {facts.kv_dtype!r}. Pass "
            f"--kv-cache-dtype auto, or leave {WIDTHS} out."
        )
    if facts.sliding_window is not None:
        raise UnsupportedError(
            f"Attention over trees looks at all places before a row; the model has a sliding window of {facts.sliding_window}. "
            f"Leave {WIDTHS} out for it."
        )


def _check_tree_sampling(facts: Facts) -> None:
    refused = {
        "drafts with the model's own head": (facts.method != "mtp", f"the method is {facts.method!r}", "Use 'mtp'"),
        "the likeliest tokens of the whole vocabulary": (
            facts.local_argmax,
            "use_local_argmax_reduction finds one",
            "Leave it out",
        ),
        "one sampler for the whole batch": (
            facts.sharded_sampling,
            "enable_batch_sharded_sampling is on",
            "Leave it out",
        ),
        "logits that depend on nothing but the row": (
            facts.logits_processors,
            "logits_processors are given",
            "Leave them out",
        ),
        "tokens without their sampling masks": (
            facts.sampling_masks,
            "return_sampling_mask is on",
            "Leave it out",
        ),
        "tokens without the experts that they went to": (
            facts.routed_experts,
            "enable_return_routed_experts is on",
            "Leave it out",
        ),
        "the same attention in target and drafter": (
            facts.draft_backend is not None or facts.draft_kv_dtype is not None,
            f"the speculative config has attention_backend {facts.draft_backend} and kv_cache_dtype {facts.draft_kv_dtype}",
            "Leave both out there",
        ),
        "one data parallel engine": (facts.data_parallel > 1, f"there are {facts.data_parallel}", "Run them apart"),
    }
    for condition, (broken, given, remedy) in refused.items():
        if broken:
            raise UnsupportedError(f"{WIDTHS} needs {condition}; {given}. {remedy}, or leave {WIDTHS} out.")
