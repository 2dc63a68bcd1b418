"""Causal depthwise convolution over draft trees, with its committed window."""

from treewy.ops.conv.api import Split, commit, verify, verify_split

__all__ = ["Split", "commit", "verify", "verify_split"]
