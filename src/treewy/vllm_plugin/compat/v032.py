"""Private names of vLLM 0.32."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from typing import Any

import numpy as np
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops import causal_conv1d
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core as cpu_core
from vllm.model_executor.utils import set_weight_attrs
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadata, GDNAttentionMetadataBuilder
from vllm.v1.worker.gpu.model_states import mamba_hybrid
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from treewy.shapes import Float, Int, Tensor
from treewy.vllm_plugin.compat import common
from treewy.vllm_plugin.compat.common import one_state_per_request, padded_tails, split_copies, state_of, unwritten_rows

__all__ = [
    "CUDAGraphMode",
    "GDNAttentionBackend",
    "GDNAttentionMetadata",
    "GDNAttentionMetadataBuilder",
    "MambaHybridModelState",
    "QwenGatedDeltaNetAttention",
    "chain_conv",
    "cpu_core",
    "drafted_rows",
    "first_runner_class",
    "get_forward_context",
    "mamba_hybrid",
    "one_state_per_request",
    "second_runner_with_the_fault",
    "set_weight_attrs",
    "split_copies",
    "state_of",
    "unwritten_rows",
    "window_of",
]


def drafted_rows(batch: Any) -> Int[np.ndarray, "B"]:
    """Return which requests of a batch verify: those that decode, and prompts whose one new token runs like a decode."""
    drafted = ~batch.is_prefilling_np
    if batch.prefill_runs_as_decode_np is not None:
        drafted = drafted | batch.prefill_runs_as_decode_np
    drafted = np.flatnonzero(drafted & (batch.num_scheduled_tokens[: batch.num_reqs] > 0))
    return np.union1d(drafted, padded_tails(batch))


def chain_conv(layer: Any, metadata: Any, x: Float[Tensor, "N C"], max_rows: int) -> Float[Tensor, "N C"]:
    """See `common.chain_conv`."""
    update = causal_conv1d.causal_conv1d_update
    return common.chain_conv(layer, metadata, x, max_rows, dim_first=is_conv_state_dim_first(), update=update)


def window_of(layer: Any) -> Float[Tensor, "S C X"]:
    """See `common.window_of`."""
    return common.window_of(layer, dim_first=is_conv_state_dim_first())


def first_runner_class() -> type:
    """Return the first model runner, which is imported only where it runs."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner


def second_runner_with_the_fault() -> type | None:
    """Return the second model runner if it takes prompts for drafts; see `second_runner`."""
    return None
