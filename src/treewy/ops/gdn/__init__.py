"""Gated delta rule over draft trees: verify reads, commit writes."""

from treewy.ops.gdn.api import Record, Snapshots, Verified, commit, commit_snapshots, verify, verify_snapshots
from treewy.ops.gdn.gates import finish_gates, l2_normalise, scale_queries

__all__ = [
    "Record",
    "Snapshots",
    "Verified",
    "commit",
    "commit_snapshots",
    "finish_gates",
    "l2_normalise",
    "scale_queries",
    "verify",
    "verify_snapshots",
]
