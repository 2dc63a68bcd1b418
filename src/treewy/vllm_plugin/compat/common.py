"""Private names that both tested versions of vLLM have alike, and what is done with the objects behind them."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
import dataclasses
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops import causal_conv1d
from vllm.model_executor.utils import set_weight_attrs
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadata, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
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
from treewy.vllm_plugin.conv import chain_conv as eager_chain_conv

__all__ = [
    "NO_LOGPROBS",
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
    "mamba_hybrid",
    "mtp",
    "one_state_per_request",
    "pages_of",
    "register_backend",
    "set_weight_attrs",
    "split_copies",
    "state_of",
    "window_of",
]

PROCESSED_LOGPROBS_MODES = ("processed_logprobs", "processed_logits")

# What vLLM's copies between pages know of each window and state.
COLUMNS = (
    *("state_base_addrs", "state_block_strides", "state_elem_sizes", "state_inner_sizes", "state_conv_widths"),
    *("state_group_indices", "state_dim_row_count", "state_dim_row_stride"),
)


def one_state_per_request(spec: Any) -> Any:
    """Return a layer's cache spec without the blocks that hold a state per draft."""
    return dataclasses.replace(spec, num_speculative_blocks=0)


def state_of(layer: Any) -> Float[Tensor, "S HV V K"]:
    """Return the states of a layer's pages. On a CPU vLLM keeps [K, V] in memory that it declares [V, K]."""
    states = layer.kv_cache[1]
    if states.is_cuda:
        return states
    slots, heads, value_dim, key_dim = states.shape
    return states.view(slots, heads, key_dim, value_dim).transpose(-1, -2)


def window_of(layer: Any) -> Float[Tensor, "S C X"]:
    """Return the rolling windows of a layer's pages, channels first."""
    return layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(-1, -2)


def pages_of(kv_cache: Tensor, head_dim: int) -> tuple[Float[Tensor, "X L HK E"], Float[Tensor, "X L HK E"]]:
    """Return the pools of keys and of values of an attention layer, which vLLM keeps heads first and side by side."""
    keys, values = kv_cache.transpose(1, 2).split(head_dim, dim=-1)
    return keys, values


def conv_weight(layer: Any) -> Float[Tensor, "C W"]:
    """Return the taps of a layer's convolution; vLLM packs them anew on a CPU, and keeps the old ones beside."""
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    return layer.conv1d.weight.flatten(1) if weight is None else weight


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


def split_copies(copies: Any) -> tuple[Any, Any]:
    """Return vLLM's copies between pages for convolution windows alone, and for states alone."""
    return tuple(_subset(copies, chosen) for chosen in (copies.state_conv_widths > 0, copies.state_conv_widths == 0))


def _subset(copies: Any, chosen: Tensor) -> Any:
    columns = {name: getattr(copies, name)[chosen] for name in COLUMNS}
    count = int(chosen.sum())
    if hasattr(copies, "num_states"):
        return dataclasses.replace(copies, **columns, num_states=count)
    return dataclasses.replace(copies, **columns, num_layers=count, num_state_types=1)
