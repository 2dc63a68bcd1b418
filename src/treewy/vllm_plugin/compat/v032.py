"""Private names of vLLM 0.28 to 0.32."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.worker.gpu.model_states import mamba_hybrid
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

__all__ = [
    "EngineArgs",
    "GDNAttentionBackend",
    "GDNAttentionMetadata",
    "GDNAttentionMetadataBuilder",
    "MambaHybridModelState",
    "QwenGatedDeltaNetAttention",
    "get_forward_context",
    "mamba_hybrid",
]
