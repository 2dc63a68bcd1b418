"""Targets and drafters over transformers models: the checkpoint's own code, with only its memory replaced."""

from treewy.hf.generate import generate
from treewy.hf.load import load
from treewy.hf.mtp import HFMTPHead
from treewy.hf.target import HFTarget

__all__ = ["HFMTPHead", "HFTarget", "generate", "load"]
