"""What decides whether a configuration of vLLM can run, read from it into plain values: the only reader of its fields.

Fields that only one of the tested versions has are read with the value that they stand for where they are missing.
"""

from typing import Any, NamedTuple

from treewy.vllm_plugin.compat import platform

LINEAR = "linear_attention"
# Fields of the cache's configuration that switch on other commit policies; 0.26 has none of them.
OTHER_POLICIES = ("use_replayssm", "use_kda_recoverssm")
# Fields of the speculative configuration that make the number of drafts vary; 0.26 lacks the second.
DYNAMIC_DRAFTS = ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification")


class Facts(NamedTuple):
    """A configuration, as far as the plugin cares.

    Attributes:
        platform: What it runs on, as `compat.platform` calls it.
        drafts: Tokens drafted per step; None without speculative decoding.
        model: Name of the model.
        model_type: Type of its text model.
        num_linear_layers: Its layers that are not softmax attention.
        is_v2: Whether the second model runner runs it.
        cache_mode: How recurrent states are kept for prefixes: "none", "align" or "all".
        dtype: Of the model.
        state_dtype: Of recurrent states.
        kv_dtype: Of keys and values, as asked for.
        sliding_window: Newest places that softmax layers attend to; None if to all.
        other_policies: Other commit policies of vLLM that are switched on.
        pipeline: Pipeline stages.
        context_parallel: GPUs that a context is spread over, in decoding or prefill.
        ubatches: Whether batches are cut in two that overlap.
        kv_connector: What moves cached keys and values elsewhere; None if nothing does.
        lora: Whether adapters are served.
        dynamic_drafts: What makes the number of drafts vary; None if nothing does.
        acceptance: How drafts are accepted: "standard", "synthetic" or "block".
        draft_sampling: How drafts are chosen: "greedy" or "probabilistic".
        full_graphs: Whether whole steps run as captured graphs.
        method: How tokens are drafted; None without speculative decoding.
        local_argmax: Whether GPUs find the likeliest draft among their shares of the vocabulary.
        sharded_sampling: Whether GPUs share a batch out for sampling.
        logits_processors: Whether the model has logits processors of its user.
        sampling_masks: Whether it is to say which tokens sampling left.
        routed_experts: Whether it is to say which experts each token went to.
        draft_backend: Attention backend of the drafter, where it has one of its own.
        draft_kv_dtype: Of the drafter's keys and values, likewise.
        data_parallel: Engines that share the requests.
    """

    platform: str
    drafts: int | None
    model: str
    model_type: str
    num_linear_layers: int
    is_v2: bool
    cache_mode: str
    dtype: str
    state_dtype: str
    kv_dtype: str
    sliding_window: int | None
    other_policies: tuple[str, ...]
    pipeline: int
    context_parallel: int
    ubatches: bool
    kv_connector: str | None
    lora: bool
    dynamic_drafts: str | None
    acceptance: str
    draft_sampling: str
    full_graphs: bool
    method: str | None
    local_argmax: bool
    sharded_sampling: bool
    logits_processors: bool
    sampling_masks: bool
    routed_experts: bool
    draft_backend: str | None
    draft_kv_dtype: str | None
    data_parallel: int


def read(vllm_config: Any) -> Facts:
    """Read a `VllmConfig`."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    speculative, transfer, text = vllm_config.speculative_config, vllm_config.kv_transfer_config, model.hf_text_config
    return Facts(
        platform=platform(),
        drafts=None if speculative is None else speculative.num_speculative_tokens,
        model=str(model.model),
        model_type=str(getattr(text, "model_type", None)),
        num_linear_layers=sum(kind == LINEAR for kind in getattr(text, "layer_types", None) or ()),
        is_v2=vllm_config.use_v2_model_runner,
        cache_mode=cache.mamba_cache_mode,
        dtype=_model_dtype(model),
        state_dtype=_state_dtype(model, cache),
        kv_dtype=str(cache.cache_dtype),
        sliding_window=getattr(cache, "sliding_window", None),
        other_policies=tuple(x for x in OTHER_POLICIES if getattr(cache, x, False)),
        pipeline=parallel.pipeline_parallel_size,
        context_parallel=max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size),
        ubatches=bool(parallel.use_ubatching),
        # Offloading is a connector too, by the time that a configuration is whole.
        kv_connector=None if transfer is None else transfer.kv_connector,
        lora=vllm_config.lora_config is not None,
        dynamic_drafts=None if speculative is None else _dynamic_drafts(speculative),
        acceptance="standard" if speculative is None else speculative.rejection_sample_method,
        draft_sampling="greedy" if speculative is None else speculative.draft_sample_method,
        full_graphs=vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
        method=None if speculative is None else speculative.method,
        local_argmax=bool(getattr(speculative, "use_local_argmax_reduction", False)),
        sharded_sampling=bool(getattr(parallel, "enable_batch_sharded_sampling", False)),
        logits_processors=bool(getattr(model, "logits_processors", None)),
        sampling_masks=bool(getattr(model, "return_sampling_mask", False)),
        routed_experts=_routed_experts(vllm_config),
        draft_backend=_name(getattr(speculative, "attention_backend", None)),
        draft_kv_dtype=getattr(speculative, "kv_cache_dtype", None),
        data_parallel=parallel.data_parallel_size,
    )


def _state_dtype(model: Any, cache: Any) -> str:
    asked = (cache.mamba_ssm_cache_dtype, cache.mamba_cache_dtype)
    return next((x for x in asked if x != "auto"), _model_dtype(model))


def _model_dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _routed_experts(vllm_config: Any) -> bool:
    """Return whether the experts of each token are to be returned; 0.26 and later versions keep that in different places."""
    places = (vllm_config.model_config, getattr(vllm_config, "aux_output_config", None))
    return any(bool(getattr(place, "enable_return_routed_experts", False)) for place in places)


def _name(backend: Any) -> str | None:
    return None if backend is None else str(backend.name)


def _dynamic_drafts(speculative: Any) -> str | None:
    return next((name for name in DYNAMIC_DRAFTS if getattr(speculative, name, None)), None)
