"""Ops over packed trees: one folder per op, `api` in front of sibling implementations."""

from treewy.ops import accept, attention, conv, gdn, tree
from treewy.ops.warmup import Facts, warmup

__all__ = ["Facts", "accept", "attention", "conv", "gdn", "tree", "warmup"]
