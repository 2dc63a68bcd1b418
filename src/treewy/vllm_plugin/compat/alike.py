"""Private names that both tested versions of vLLM have alike."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops import causal_conv1d
from vllm.model_executor.utils import set_weight_attrs
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadata, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, mamba_get_block_table_tensor
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.model_states import mamba_hybrid
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.mtp import speculator as mtp
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from treewy.shapes import Float, Tensor
from treewy.vllm_plugin.compat.common import (
    conv_weight,
    one_state_per_request,
    padded_tails,
    pages_of,
    split_copies,
    state_of,
    unwritten_rows,
)
from treewy.vllm_plugin.conv import chain_conv as eager_chain_conv

__all__ = [
    "NO_LOGPROBS",
    "NULL_BLOCK_ID",
    "PROCESSED_LOGPROBS_MODES",
    "AttentionBackendEnum",
    "CUDAGraphMode",
    "CudaGraphManager",
    "GDNAttentionBackend",
    "GDNAttentionMetadata",
    "GDNAttentionMetadataBuilder",
    "MTPSpeculator",
    "MambaHybridModelState",
    "QwenGatedDeltaNetAttention",
    "RejectionSampler",
    "SamplerOutput",
    "chain_conv",
    "compute_topk_scores",
    "conv_weight",
    "first_runner_class",
    "flash_attention",
    "get_forward_context",
    "get_num_nans",
    "get_num_sampled_and_rejected",
    "mamba_get_block_table_tensor",
    "mamba_hybrid",
    "mtp",
    "one_state_per_request",
    "padded_tails",
    "pages_of",
    "register_backend",
    "set_weight_attrs",
    "split_copies",
    "state_of",
    "unwritten_rows",
    "window_of",
]

PROCESSED_LOGPROBS_MODES = ("processed_logprobs", "processed_logits")


def window_of(layer: Any) -> Float[Tensor, "S C X"]:
    """Return the rolling windows of a layer's pages, channels first."""
    return layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(-1, -2)


def chain_conv(layer: Any, metadata: Any, x: Float[Tensor, "N C"], max_rows: int) -> Float[Tensor, "N C"]:
    """Run the convolution of chains: vLLM's kernel on a GPU, ours elsewhere.

    Args:
        layer: The Gated DeltaNet layer.
        metadata: Its metadata.
        x: Rows of the sequences that drafted.
        max_rows: Rows of the longest chain. vLLM would take them from the table of states, which has one column only.
    """
    window, weight, bias = window_of(layer), conv_weight(layer), layer.conv1d.bias
    count = metadata.num_spec_decodes
    slots = metadata.spec_state_indices_tensor[:count, 0]
    if x.is_cuda:
        return causal_conv1d.causal_conv1d_update(
            x,
            window,
            weight,
            bias,
            layer.activation,
            conv_state_indices=slots,
            num_accepted_tokens=metadata.num_accepted_tokens,
            query_start_loc=metadata.spec_query_start_loc,
            max_query_len=max_rows,
            validate_data=False,
        )
    cu_rows = metadata.spec_query_start_loc[: count + 1]
    return eager_chain_conv(x, window, weight, bias, slots, metadata.num_accepted_tokens[:count], cu_rows)


def first_runner_class() -> type:
    """Return the first model runner, which is imported only where it runs."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner


def flash_attention() -> type:
    """Return FlashAttention's backend, which is imported only where it runs."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend
