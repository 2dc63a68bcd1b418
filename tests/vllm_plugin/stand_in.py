"""A configuration of vLLM as far as the plugin reads it, as both tested versions have it, without vLLM."""

from types import SimpleNamespace
from typing import Any

# Fields that came after 0.26.
NEW_FIELDS = {
    "cache": {"use_replayssm": False, "use_kda_recoverssm": False},
    "speculative": {"enable_adaptive_verification": False},
    "parallel": {"enable_batch_sharded_sampling": False},
}


def config(version: str = "0.32", **changes: Any) -> SimpleNamespace:
    """Return a configuration that `reconstruct` with a chain of 3 runs with, but for `changes`: "part__field"=value."""
    text = SimpleNamespace(model_type="qwen3_5_text", layer_types=["linear_attention"] * 3 + ["full_attention"])
    parts: dict[str, Any] = {
        "model": SimpleNamespace(model="a/model", hf_text_config=text, dtype="torch.bfloat16", logits_processors=None),
        "text": text,
        "cache": SimpleNamespace(
            enable_prefix_caching=False,
            mamba_cache_mode="none",
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="float32",
            cache_dtype="auto",
            sliding_window=None,
        ),
        "parallel": SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
            data_parallel_size=1,
        ),
        "speculative": SimpleNamespace(
            num_speculative_tokens=3,
            num_speculative_tokens_per_batch_size=None,
            rejection_sample_method="standard",
            draft_sample_method="greedy",
            method="mtp",
            use_local_argmax_reduction=False,
        ),
        "transfer": SimpleNamespace(kv_connector=None),
        "compilation": SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False)),
    }
    if version != "0.26":
        for part, fields in NEW_FIELDS.items():
            vars(parts[part]).update(fields)
    whole = SimpleNamespace(
        model_config=parts["model"],
        cache_config=parts["cache"],
        parallel_config=parts["parallel"],
        speculative_config=parts["speculative"],
        kv_transfer_config=parts["transfer"],
        compilation_config=parts["compilation"],
        lora_config=None,
        use_v2_model_runner=True,
        additional_config={},
    )
    for path, value in changes.items():
        part, _, field = path.rpartition("__")
        setattr(parts[part] if part else whole, field, value)
    return whole
