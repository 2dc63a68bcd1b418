"""treewy as a plugin of vLLM."""

__all__ = ["register"]


def register() -> None:
    """Register with vLLM, which calls this in each of its processes."""
