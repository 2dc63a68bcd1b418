"""Drafters: what proposes a tree of tokens for the target to verify."""

from treewy.draft.base import Committed, Draft, Drafter, Draws, NoDrafter, Root
from treewy.draft.model import ModelDrafter
from treewy.draft.mtp import MTPDrafter, MTPHead
from treewy.draft.ngram import NgramDrafter
from treewy.draft.shape import Budget, Shape, parse_shape

__all__ = [
    "Budget",
    "Committed",
    "Draft",
    "Drafter",
    "Draws",
    "MTPDrafter",
    "MTPHead",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "Root",
    "Shape",
    "parse_shape",
]
