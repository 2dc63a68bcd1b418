"""Drafters: what proposes a tree of tokens for the target to verify."""

from treewy.draft.base import Committed, Draft, Drafter, Draws, NoDrafter, Root
from treewy.draft.mtp import MTPDrafter, MTPHead
from treewy.draft.shape import parse_shape

__all__ = ["Committed", "Draft", "Drafter", "Draws", "MTPDrafter", "MTPHead", "NoDrafter", "Root", "parse_shape"]
