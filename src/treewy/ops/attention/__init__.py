"""Softmax attention of draft trees over a committed prefix, and the move of accepted keys and values."""

from treewy.ops.attention.api import commit, verify
from treewy.ops.attention.paged import commit_paged, compact_paged, verify_paged, workspace
from treewy.ops.attention.records import Paged, Workspace

__all__ = [
    "Paged",
    "Workspace",
    "commit",
    "commit_paged",
    "compact_paged",
    "verify",
    "verify_paged",
    "workspace",
]
