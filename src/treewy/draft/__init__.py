"""Drafters: what proposes a tree of tokens for the target to verify. Each name brings torch only if it needs it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treewy.draft.base import Committed, Draft, Drafter, Draws, NoDrafter, Root
    from treewy.draft.model import ModelDrafter
    from treewy.draft.mtp import MTPDrafter, MTPHead
    from treewy.draft.ngram import NgramDrafter
    from treewy.draft.shape import Budget, Shape, parse_shape

_NAMES = {
    "Budget": "shape",
    "Committed": "base",
    "Draft": "base",
    "Drafter": "base",
    "Draws": "base",
    "MTPDrafter": "mtp",
    "MTPHead": "mtp",
    "ModelDrafter": "model",
    "NgramDrafter": "ngram",
    "NoDrafter": "base",
    "Root": "base",
    "Shape": "shape",
    "parse_shape": "shape",
}

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


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(f"treewy.draft.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'treewy.draft' has no attribute {name!r}")
