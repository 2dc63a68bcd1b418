"""Ops over packed trees: one folder per op, `api` in front of sibling implementations."""

from treewy.ops import attention, conv, gdn
from treewy.ops.warmup import Facts, warmup

__all__ = ["Facts", "attention", "conv", "gdn", "warmup"]
