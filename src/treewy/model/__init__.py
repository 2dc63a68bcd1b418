"""Targets: models that verify draft trees."""

from treewy.model.base import Target, Verified
from treewy.model.toy import ToyConfig, ToyTarget

__all__ = ["Target", "ToyConfig", "ToyTarget", "Verified"]
