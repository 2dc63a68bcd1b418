"""Gated delta rule over draft trees: verify reads; commit, append and fold write."""

from treewy.ops.gdn.api import append, commit, commit_snapshots, fits, fold, verify, verify_snapshots
from treewy.ops.gdn.gates import finish_gates, l2_normalise, scale_queries
from treewy.ops.gdn.records import History, Prior, Projections, Record, Snapshots, Verified

__all__ = [
    "History",
    "Prior",
    "Projections",
    "Record",
    "Snapshots",
    "Verified",
    "append",
    "commit",
    "commit_snapshots",
    "finish_gates",
    "fits",
    "fold",
    "l2_normalise",
    "scale_queries",
    "verify",
    "verify_snapshots",
]
