"""Ops over packed trees: one folder per op, `api` in front of sibling implementations."""

from treewy.ops import attention, conv, gdn, tree

__all__ = ["attention", "conv", "gdn", "tree"]
