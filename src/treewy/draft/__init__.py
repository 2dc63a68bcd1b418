"""Drafters: what proposes a tree of tokens for the target to verify."""

from treewy.draft.base import Committed, Drafter, NoDrafter, Root
from treewy.draft.mtp import MTPDrafter, MTPHead
from treewy.draft.shape import parse_shape

__all__ = ["Committed", "Drafter", "MTPDrafter", "MTPHead", "NoDrafter", "Root", "parse_shape"]
