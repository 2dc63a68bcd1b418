"""A plugin for vLLM: Gated DeltaNet layers that keep one state per request, whatever is drafted. Nothing happens at import."""

__all__ = ["register"]


def register() -> None:
    """Take effect in this process; vLLM calls it in each of its own, more than once."""
    from treewy.vllm_plugin.intake import install

    install()
