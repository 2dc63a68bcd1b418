"""Checkpoints for the tests of this folder."""

from fixtures import checkpoints

__all__ = ["checkpoints"]
