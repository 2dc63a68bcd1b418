"""Where the plugin takes hold of vLLM."""

from treewy.vllm_plugin import compat


def register() -> None:
    """Register the layer with vLLM's out-of-tree registry and the model state in its module, once per process."""
    vllm = compat.names()
    if getattr(vllm.mamba_hybrid, "_treewy", False):
        return
    from treewy.vllm_plugin.layer import layer_class
    from treewy.vllm_plugin.state import model_state_class

    vllm.QwenGatedDeltaNetAttention.register_oot(layer_class(vllm))
    vllm.mamba_hybrid.MambaHybridModelState = model_state_class(vllm)
    vllm.mamba_hybrid._treewy = True
