"""What is measured, row by row, and the bars that it is held against."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from treewy.bench.ops.peers import REPLAY, SGLANG, U_CACHE, U_CACHE_CYCLE, VLLM
from treewy.bench.ops.problems import Case

FAST, EXACT, FLOOR = "treewy fast", "treewy exact", "floor"
STATES = (torch.bfloat16, torch.float32)
POLICIES = ("ring", "reconstruct")
# Rows of a tree and the share of its floor that it must reach.
FLOOR_SHARES = {"tree15": 0.75, "tree40": 0.70, "spine64": 0.65}
# A single sequence's time over sglang's snapshot verify of a chain of 4.
SINGLE_TIMES = {"chain4": 0.8, "tree15": 1.15, "tree40": 1.6, "spine64": 2.0}
EXACT_TIMES = {"chain4": 1.3, "tree40": 2.5}


class Bar(NamedTuple):
    """What a figure is held against.

    Attributes:
        of: The variant.
        against: A peer or another variant, whose time is multiplied; or `FLOOR`, of which the figure is the share reached.
        limit: At most so many times that time, or at least that share.
        shape: Shape that `against` was timed at; None: the row's own.
        is_aim: Whether missing it is no failure.
    """

    of: str
    against: str
    limit: float
    shape: str | None = None
    is_aim: bool = False


class Row(NamedTuple):
    """One problem, and who is timed on it."""

    name: str
    case: Case
    variants: tuple[str, ...] = (FAST,)
    peers: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()


def verify_rows(batch_sizes: Sequence[int]) -> list[Row]:
    """Ring verify of a chain of 4, bfloat16."""
    cases = [Case("ring", "chain4", size) for size in batch_sizes]
    return [Row("verify", x, peers=(U_CACHE,), bars=_if(x.batch_size > 1, Bar(FAST, U_CACHE, 1.15))) for x in cases]


def cycle_rows(batch_sizes: Sequence[int]) -> list[Row]:
    """The ring's own steps, folds included, beside FlashInfer's own; float32 has no such peer."""
    sizes = [size for size in batch_sizes if size > 1]
    half = [
        Row("cycle", Case("cycle", "chain4", n), (FAST,), (U_CACHE_CYCLE,), (Bar(FAST, U_CACHE_CYCLE, 1.15),))
        for n in sizes
    ]
    return half + [Row("cycle", Case("cycle", "chain4", size, torch.float32)) for size in sizes]


def wide_rows(batch_sizes: Sequence[int]) -> list[Row]:
    """Ring verify of a chain of 4 over a float32 state."""
    cases = [Case("ring", "chain4", size, torch.float32) for size in batch_sizes]
    return [Row("verify-fp32", case, peers=(REPLAY,), bars=(Bar(FAST, REPLAY, 0.70),)) for case in cases]


def reconstruct_rows(batch_sizes: Sequence[int]) -> list[Row]:
    """Commit of the last step fused with verify of this one."""
    rows = []
    for state, limit in zip(STATES, (0.33, 0.42), strict=True):
        for size in batch_sizes:
            case = Case("reconstruct", "chain4", size, state)
            rows.append(Row("reconstruct", case, peers=(VLLM,), bars=_if(size >= 32, Bar(FAST, VLLM, limit))))
    return rows


def tree_rows(batch_sizes: Sequence[int]) -> list[Row]:
    """Trees of 15, 40 and 64 rows at the batch sizes from 32 on."""
    sizes = [size for size in batch_sizes if size >= 32]
    return [
        Row("trees", Case(policy, shape, size, state), bars=(Bar(FAST, FLOOR, share),))
        for policy in POLICIES
        for state in STATES
        for size in sizes
        for shape, share in FLOOR_SHARES.items()
    ]


def single_rows(batch_sizes: Sequence[int]) -> list[Row]:
    """One sequence; the peer is timed once per policy and state, on the chain."""
    if 1 not in batch_sizes:
        return []
    rows = []
    for policy in POLICIES:
        for state in STATES:
            for shape, limit in SINGLE_TIMES.items():
                aim = state == torch.float32 and shape == "chain4"
                bars = (Bar(FAST, SGLANG, limit, shape="chain4", is_aim=aim),)
                peers = (SGLANG,) if shape == "chain4" else ()
                rows.append(Row("single", Case(policy, shape, 1, state), (FAST,), peers, bars))
    return rows


def exact_rows(batch_sizes: Sequence[int]) -> list[Row]:
    """What exact mode costs, over a float32 state."""
    sizes = [size for size in batch_sizes if size >= 32]
    return [
        Row("exact", Case(policy, shape, size, torch.float32), (FAST, EXACT), bars=(Bar(EXACT, FAST, limit),))
        for policy in POLICIES
        for size in sizes
        for shape, limit in EXACT_TIMES.items()
    ]


def ragged_rows(batch_sizes: Sequence[int]) -> list[Row]:
    """Different trees side by side; no bar."""
    return [Row("ragged", Case(policy, "ragged", size)) for policy in POLICIES for size in batch_sizes if size > 1]


ROWS: dict[str, Callable[[Sequence[int]], list[Row]]] = {
    "verify": verify_rows,
    "cycle": cycle_rows,
    "verify-fp32": wide_rows,
    "reconstruct": reconstruct_rows,
    "trees": tree_rows,
    "single": single_rows,
    "exact": exact_rows,
    "ragged": ragged_rows,
}


def _if(holds: bool, bar: Bar) -> tuple[Bar, ...]:
    return (bar,) if holds else ()
