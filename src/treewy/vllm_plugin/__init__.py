"""The vLLM plugin: Gated DeltaNet layers that keep one state per request while drafting. Nothing happens at import."""


def register() -> None:
    """Put the plugin's layer and model state where vLLM looks for them; called by vLLM in each of its processes."""
    from treewy.vllm_plugin.register import register as run

    run()
