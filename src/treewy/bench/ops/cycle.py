"""The steps that a history really goes through: it grows by what is accepted and is folded when it is full.

Both rules are run on the same accepted lengths, from staggered starts, until they have settled: what a launch costs on
average is then the average over the steps.
"""

from typing import NamedTuple

import numpy as np

from treewy.shapes import Array

# 3.24 rows a step: three, and four in 24 of 100.
SHARE_OF_FOUR = 0.24
CAPACITY = 16
# Even: records alternate between two buffers, also from the last step of a replay to the first of the next.
NUM_STEPS = 16
NUM_SETTLING = 64


class Cycle(NamedTuple):
    """What every sequence does at every step; arrays are [steps, sequences].

    Attributes:
        lengths: Rows in the history when the step is launched.
        pending: Rows that the step before accepted.
        fold: Whether the step writes the state.
    """

    lengths: Array
    pending: Array
    fold: Array

    @property
    def last_steps(self) -> "Cycle":
        """The steps that are timed: those before only settle the lengths."""
        return Cycle(*(x[-NUM_STEPS:] for x in self))


def accepted_lengths(seed: int, num_seqs: int) -> Array:
    """Return accepted rows [steps, sequences], 3 or 4, settling steps first."""
    draws = np.random.default_rng(seed).random((NUM_SETTLING + NUM_STEPS, num_seqs))
    return 3 + (draws < SHARE_OF_FOUR).astype(np.int64)


def ring_cycle(accepted: Array) -> Cycle:
    """Return what treewy's ring does: a step takes the pending rows over, or folds if the history cannot hold them."""
    held, lengths, fold = _staggered(accepted), np.empty_like(accepted), np.empty(accepted.shape, dtype=bool)
    for step, pending in enumerate(accepted):
        lengths[step], fold[step] = held, held + pending > CAPACITY
        held = np.where(fold[step], 0, held + pending)
    return Cycle(lengths, accepted, fold)


def u_cache_cycle(accepted: Array, num_rows: int) -> Cycle:
    """Return what FlashInfer's u-cache does: pending rows are in it already, and a step folds that could overfill it.

    Args:
        accepted: As in `ring_cycle`.
        num_rows: Rows of a step; all of them join the cache before any is accepted.
    """
    held, lengths, fold = _staggered(accepted), np.empty_like(accepted), np.empty(accepted.shape, dtype=bool)
    for step, pending in enumerate(accepted):
        lengths[step] = held + pending
        fold[step] = lengths[step] > CAPACITY - num_rows
        held = np.where(fold[step], 0, lengths[step])
    return Cycle(lengths, accepted, fold)


def _staggered(accepted: Array) -> Array:
    """Return lengths to start from: steps vary so little that sequences which start alike fold together for long."""
    return np.arange(accepted.shape[1]) % (CAPACITY - 3)


def u_cache_bases(cycle: Cycle, num_places: int) -> Array:
    """Return where each window starts in its circle of `num_places`: a fold moves it past the rows it folded."""
    moved = np.where(cycle.fold, cycle.lengths, 0).cumsum(axis=0)
    return (moved - np.where(cycle.fold, cycle.lengths, 0)) % num_places
