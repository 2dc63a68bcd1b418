"""Private names of vLLM 0.32."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from typing import Any

import numpy as np
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core as cpu_core
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from treewy.shapes import Float, Int, Tensor
from treewy.vllm_plugin.compat import alike, common
from treewy.vllm_plugin.compat.alike import *  # noqa: F403  (all of it is this version's too)

__all__ = ["cpu_core", *alike.__all__]  # noqa: PLE0604  (they are strings)


def drafted_rows(batch: Any) -> Int[np.ndarray, "B"]:
    """Return which requests of a batch verify: those that decode, and prompts whose one new token runs like a decode."""
    drafted = ~batch.is_prefilling_np
    if batch.prefill_runs_as_decode_np is not None:
        drafted = drafted | batch.prefill_runs_as_decode_np
    drafted = np.flatnonzero(drafted & (batch.num_scheduled_tokens[: batch.num_reqs] > 0))
    return np.union1d(drafted, common.padded_tails(batch))


def windows_race() -> bool:
    """See `v026.windows_race`."""
    return False


def second_runner_with_the_fault() -> type | None:
    """Return the second model runner if it takes prompts for drafts; see `second_runner`."""
    return None


def cpu_attention() -> type:
    """Return the CPU's attention backend, which is imported only where it runs."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend


def forget_backends() -> None:
    """Have vLLM look for the backend of each kind of attention again."""
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()


def processed_logits(
    sampler: Any,
    logits: Float[Tensor, "N vocab"],
    batch: Any,
    requests: slice,
    rows: slice,
    positions: Int[Tensor, "N"],
    drafts: Int[Tensor, "N"],
) -> Float[Tensor, "N vocab"]:
    """See `v026.processed_logits`."""
    return sampler.apply_sampling_params(
        logits,
        batch.expanded_idx_mapping[rows],
        batch.idx_mapping[requests],
        batch.idx_mapping_np[requests],
        positions,
        drafts,
        batch.expanded_local_pos[rows],
        batch.seq_lens_cpu_upper_bound.numpy()[requests],
    )


def sample(
    logits: Float[Tensor, "N vocab"],
    requests: Int[Tensor, "N"],
    temperature: Float[Tensor, "R"],
    seeds: Int[Tensor, "R"],
    positions: Int[Tensor, "N"],
    use_fp64: bool,
) -> Int[Tensor, "N"]:
    """See `v026.sample`."""
    return gumbel_sample(
        logits,
        requests,
        temperature,
        seeds,
        positions,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=use_fp64,
    )
