"""Softmax attention of draft trees over a committed prefix, and the move of accepted keys and values."""

from treewy.ops.attention.api import commit, verify

__all__ = ["commit", "verify"]
