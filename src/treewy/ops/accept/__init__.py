"""Acceptance on the device: which drafts stand, and which token follows them, without a look from the host."""

from treewy.ops.accept.api import choices, empty, greedy, sampled, uniforms, walk_choices
from treewy.ops.accept.records import AcceptedTables, DrawnLaws, Ending, RequestLaws, request_laws

__all__ = [
    "AcceptedTables",
    "DrawnLaws",
    "Ending",
    "RequestLaws",
    "choices",
    "empty",
    "greedy",
    "request_laws",
    "sampled",
    "uniforms",
    "walk_choices",
]
