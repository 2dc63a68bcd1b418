"""Where the plugin takes hold of vLLM: its options always, its layer and model state where they can work."""

from treewy.vllm_plugin import compat, intake, versions


def install() -> None:
    """Install the intake of options, and where vLLM's internals are as expected, what carries them out; once per process.

    Elsewhere the intake refuses: whoever asks for nothing of ours is not to notice us.
    """
    intake.install()
    if versions.fits(on_cpu=compat.platform() == "cpu"):
        _take_hold()


def _take_hold() -> None:
    """Register the layer with vLLM's out-of-tree registry, and the model state and the drafter in their modules."""
    vllm = compat.names()
    if getattr(vllm.mamba_hybrid, "_treewy", False):
        return
    from treewy.vllm_plugin.layer import layer_class
    from treewy.vllm_plugin.state import model_state_class
    from treewy.vllm_plugin.tree_drafter import drafter_class

    vllm.QwenGatedDeltaNetAttention.register_oot(layer_class(vllm))
    vllm.mamba_hybrid.MambaHybridModelState = model_state_class(vllm)
    vllm.mtp.MTPSpeculator = drafter_class(vllm)
    vllm.mamba_hybrid._treewy = True
