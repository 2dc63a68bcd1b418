"""Gated delta rule over draft trees: verify reads; commit, append and fold write; commit_verify does a step's work."""

from treewy.ops.gdn.api import append, commit, commit_snapshots, fits, fold, verify, verify_snapshots
from treewy.ops.gdn.gates import finish_gates, l2_normalise, scale_queries
from treewy.ops.gdn.layers import append_layers
from treewy.ops.gdn.ledger import choose_folds, settle
from treewy.ops.gdn.records import (
    History,
    Prior,
    Projections,
    Record,
    Snapshots,
    StackedHistory,
    StackedRecord,
    Verified,
)
from treewy.ops.gdn.serving import commit_verify

__all__ = [
    "History",
    "Prior",
    "Projections",
    "Record",
    "Snapshots",
    "StackedHistory",
    "StackedRecord",
    "Verified",
    "append",
    "append_layers",
    "choose_folds",
    "commit",
    "commit_snapshots",
    "commit_verify",
    "finish_gates",
    "fits",
    "fold",
    "l2_normalise",
    "scale_queries",
    "settle",
    "verify",
    "verify_snapshots",
]
