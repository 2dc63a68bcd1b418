"""Causal depthwise convolution over draft trees, with its committed window."""

from treewy.ops.conv.api import commit, verify

__all__ = ["commit", "verify"]
