"""Floors: bytes counted by hand, and the table they must give."""

import numpy as np
import pytest
import torch

from treewy.bench.ops import Case, Heads, Work, floor_bytes
from treewy.bench.ops.cycle import NUM_STEPS, SHARE_OF_FOUR, accepted_lengths, ring_cycle, u_cache_bases, u_cache_cycle
from treewy.bench.ops.floors import record_bytes, row_bytes, state_bytes

BF16, FP32 = torch.bfloat16, torch.float32
# Microseconds at 4.3 TB/s and 128 sequences, T = 4, 15, 40, 64, as they are written down.
TABLE = {
    ("ring", BF16): ("38.6", "50.8", "78.5", "105"),
    ("ring", FP32): ("72.7", "87.6", "121", "154"),
    ("reconstruct", BF16): ("68.3", "80.5", "108", "135"),
    ("reconstruct", FP32): ("133", "148", "181", "214"),
}


@pytest.mark.parametrize(("policy", "state"), TABLE)
def test_the_table_of_floors(policy, state):
    for num_rows, want in zip((4, 15, 40, 64), TABLE[policy, state], strict=True):
        states, prior = (1, 8) if policy == "ring" else (2, 4)
        work = Work(128 * states, 128 * num_rows, 128 * prior)
        us = floor_bytes(Heads(), work, state.itemsize) / 4.3e12 * 1e6
        assert f"{us:.{len(want.partition('.')[2])}f}" == want


@pytest.mark.parametrize(("policy", "state"), TABLE)
def test_trees_of_cases_have_these_floors(policy, state):
    """Four rows are accepted of every tree; of a chain 3.24, which costs `reconstruct` less than the table's 4."""
    for shape, want in list(zip(("chain4", "tree15", "tree40", "spine64"), TABLE[policy, state], strict=True))[1:]:
        case = Case(policy, shape, 128, state)
        states, prior = (1, 8) if policy == "ring" else (2, sum(map(len, case.paths)) / 128)
        assert prior in (4, 8)
        us = case.floor_bytes(Work(128 * states, case.num_rows, 128 * prior)) / 4.3e12 * 1e6
        assert f"{us:.{len(want.partition('.')[2])}f}" == want


def test_bytes_by_hand():
    """H 2, HV 4, K 8, V 16; state and u of 4 bytes, io of 2."""
    heads = Heads(2, 4, 8, 16)
    assert state_bytes(heads, 4) == 4 * 16 * 8 * 4
    assert record_bytes(heads, 4) == 4 * 16 * 4 + 2 * 8 * 2 + 4 * 4
    assert row_bytes(heads) == 2 * (2 * 8 + 4 * 16) * 2 + 2 * 4 * 4
    assert floor_bytes(heads, Work(3, 5, 7), 4) == 3 * 2048 + 5 * (352 + 304) + 7 * 304


def test_a_ring_by_hand():
    """16 places: five threes fit, the sixth finds no room and folds with all before it."""
    cycle = ring_cycle(np.full((8, 1), 3))
    assert cycle.lengths[:, 0].tolist() == [0, 3, 6, 9, 12, 15, 0, 3]
    assert cycle.fold[:, 0].tolist() == [False] * 5 + [True] + [False] * 2


def test_a_u_cache_by_hand():
    """The window holds 16 rows and a step adds 4 before any is accepted: 13 and more fold; their places are left behind."""
    cycle = u_cache_cycle(np.full((9, 1), 3), 4)
    assert cycle.lengths[:, 0].tolist() == [3, 6, 9, 12, 15, 3, 6, 9, 12]
    assert cycle.fold[:, 0].tolist() == [False] * 4 + [True] + [False] * 4
    assert u_cache_bases(cycle, 32)[:, 0].tolist() == [0] * 5 + [15] * 4


def test_cycles_are_those_of_a_long_run():
    accepted = accepted_lengths(1, 2000)
    assert set(accepted.ravel().tolist()) == {3, 4}
    assert abs(accepted.mean() - (3 + SHARE_OF_FOUR)) < 0.01
    ring, cache = ring_cycle(accepted).last_steps, u_cache_cycle(accepted, 4).last_steps
    assert len(ring.fold) == NUM_STEPS
    # Sequences have drifted apart: every step folds about as many as every other.
    for cycle, steps_between in ((ring, 5.5), (cache, 4.3)):
        shares = cycle.fold.mean(axis=1)
        assert shares.max() - shares.min() < 0.08
        assert abs(shares.mean() - 1 / steps_between) < 0.02
    assert (ring.lengths + ring.pending * ~ring.fold).max() == 16
    assert cache.lengths.max() <= 16
    assert (ring.pending == cache.pending).all()
