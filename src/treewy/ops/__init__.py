"""Ops over packed trees: one folder per op, `api` in front of sibling implementations."""

from treewy.ops import accept, attention, conv, gdn, tree

__all__ = ["accept", "attention", "conv", "gdn", "tree"]
