"""The steps that a history really goes through: it grows by what is accepted and is folded when it is full.

Both rules are run on the same accepted lengths, from lengths that have settled: what a launch costs on average is then
the average over the steps.
"""

from typing import NamedTuple

import numpy as np

from treewy.shapes import Array

# 3.24 rows a step: three, and four in 24 of 100.
SHARE_OF_FOUR = 0.24
CAPACITY = 16
NUM_STEPS = 16
NUM_SETTLING = 64


class Cycle(NamedTuple):
    """What every sequence does at every step; arrays are [steps, sequences].

    Attributes:
        lengths: Rows in the history before the step.
        pending: Rows accepted by the step before, which this one takes over.
        fold: Whether the step writes the state.
    """

    lengths: Array
    pending: Array
    fold: Array


def accepted_lengths(rng: np.random.Generator, num_steps: int, num_seqs: int) -> Array:
    """Return accepted rows [steps, sequences], 3 or 4."""
    return 3 + (rng.random((num_steps, num_seqs)) < SHARE_OF_FOUR).astype(np.int64)


def ring_cycle(accepted: Array, num_steps: int = NUM_STEPS) -> Cycle:
    """Return the last steps of treewy's ring: a path that no longer fits is folded with all before it.

    Args:
        accepted: Rows accepted before each step, settling steps first.
        num_steps: Steps to return.
    """
    lengths, fold = np.zeros_like(accepted), np.zeros(accepted.shape, dtype=bool)
    held = np.zeros(accepted.shape[1], dtype=np.int64)
    for step, pending in enumerate(accepted):
        lengths[step] = held
        fold[step] = held + pending > CAPACITY
        held = np.where(fold[step], 0, held + pending)
    return Cycle(lengths[-num_steps:], accepted[-num_steps:], fold[-num_steps:])


def u_cache_cycle(accepted: Array, num_rows: int, num_steps: int = NUM_STEPS) -> Cycle:
    """Return the last steps of FlashInfer's u-cache: it folds ahead of a step whose rows no longer fit.

    Args:
        accepted: As in `ring_cycle`.
        num_rows: Rows of a step, which join the cache before any is accepted.
        num_steps: Steps to return.
    """
    lengths, fold = np.zeros_like(accepted), np.zeros(accepted.shape, dtype=bool)
    held = np.zeros(accepted.shape[1], dtype=np.int64)
    for step, pending in enumerate(accepted):
        held = held + pending
        lengths[step] = held
        fold[step] = held > CAPACITY - num_rows
        held = np.where(fold[step], 0, held)
    return Cycle(lengths[-num_steps:], accepted[-num_steps:], fold[-num_steps:])
