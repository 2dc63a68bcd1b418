"""The vLLM plugin: Gated DeltaNet layers that keep one state per request while drafting. Nothing happens at import."""

__all__ = ["register"]


def register() -> None:
    """Put the plugin where vLLM looks for it; called by vLLM in each of its processes, in some more than once."""
    from treewy.vllm_plugin.install import install

    install()
