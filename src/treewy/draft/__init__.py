"""Drafters: what proposes a tree of tokens for the target to verify. Each name brings torch only if it needs it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treewy.draft.base import Committed, Draft, Drafter, Draws, NoDrafter, Root
    from treewy.draft.mtp import MTPDrafter, MTPHead
    from treewy.draft.shape import parse_shape

_NAMES = {
    "Committed": "base",
    "Draft": "base",
    "Drafter": "base",
    "Draws": "base",
    "MTPDrafter": "mtp",
    "MTPHead": "mtp",
    "NoDrafter": "base",
    "Root": "base",
    "parse_shape": "shape",
}

__all__ = ["Committed", "Draft", "Drafter", "Draws", "MTPDrafter", "MTPHead", "NoDrafter", "Root", "parse_shape"]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(f"treewy.draft.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'treewy.draft' has no attribute {name!r}")
