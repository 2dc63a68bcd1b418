"""Operands of a case, in rotated sets: everything is a function of the case and its seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from treewy.bench.ops.cycle import CAPACITY, Cycle, accepted_lengths, ring_cycle
from treewy.bench.ops.floors import QWEN_35B, Heads, Work, floor_bytes
from treewy.bench.ops.operands import empty_out, make_history, make_record, make_rows, make_state
from treewy.bench.ops.shapes import paths_of, trees_of
from treewy.bench.ops.timing import num_sets
from treewy.ops.gdn import History, Prior, Projections, Record, Verified
from treewy.packed import PackedPath, PackedTree, PathTables, pack, pack_paths
from treewy.shapes import Array, Int, Tensor
from treewy.tree import DraftTree

NUM_HISTORY_ROWS = 8


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        policy: "ring": beside a history of 8 rows, nothing pending, nothing folded. "reconstruct": no history, every
            sequence folds the path of the last step. "cycle": the ring's own steps, 3.24 rows accepted in each.
        shape: `chainN` (N rows), tree15, tree40, spine64, or ragged: several of them in turn.
        batch_size: Sequences.
        state: Dtype of the state, of u and of the history.
        io: Dtype of q, k, v, of what the gates are made from, and of o.
        heads: Sizes of the layer.
    """

    policy: str
    shape: str
    batch_size: int
    state: torch.dtype = torch.bfloat16
    io: torch.dtype = torch.bfloat16
    heads: Heads = QWEN_35B

    @cached_property
    def trees(self) -> list[DraftTree]:
        """One tree per sequence."""
        return trees_of(self.shape, self.batch_size)

    @cached_property
    def paths(self) -> list[list[int]]:
        """The path that the last step accepted, per sequence."""
        return paths_of(self.trees, seed=self.batch_size)

    @property
    def num_rows(self) -> int:
        """Rows of all trees."""
        return sum(tree.num_rows for tree in self.trees)

    def floor_bytes(self, work: Work) -> float:
        """Return the bytes that a call must move."""
        return floor_bytes(self.heads, work, self.state.itemsize, self.io.itemsize)


class Step(NamedTuple):
    """The operands of one call."""

    rows: Projections
    slots: Int[Tensor, "B"]
    prior: Prior
    out: Verified


@dataclass(frozen=True, eq=False)
class Problem:
    """Operands of one case: as many sets as leave L2 cold, over one pool.

    Attributes:
        case: What it is a problem of.
        tree: The packed trees, the same in every call.
        steps: Set after set; under "cycle" that for step after step.
        num_sets: Sets of operands.
        state: The pool of all sets.
        history: Its histories, if the policy has any.
        work: What one call does, on average.
        accepted: Under "cycle": rows accepted, [steps, sets * sequences]; else None.
    """

    case: Case
    tree: PackedTree
    steps: Sequence[Step]
    num_sets: int
    state: Tensor
    history: History | None
    work: Work
    accepted: Array | None = None

    @property
    def floor_bytes(self) -> float:
        """Bytes that one call must move, on average."""
        return self.case.floor_bytes(self.work)

    @property
    def bytes_per_seq(self) -> int:
        """What one sequence keeps between steps: its state, its history, and the records of its rows."""
        parts = [self.state[:1]] + ([] if self.history is None else [x[:1] for x in self.history])
        records = sum(x.numel() * x.element_size() for x in self.steps[0].out.record)
        return sum(x.numel() * x.element_size() for x in parts) + records // self.case.batch_size


def make_problem(case: Case, device: torch.device | str, *, seed: int = 0, sets: int | None = None) -> Problem:
    """Return a random problem.

    Args:
        case: What to make.
        device: Where.
        seed: Decides everything random.
        sets: Sets of operands; default: as many as leave L2 cold.
    """
    work = _work(case)
    sets = num_sets(case.floor_bytes(work)) if sets is None else sets
    draw = torch.Generator(device).manual_seed(seed)
    tree = pack(case.trees, device=device)
    num_slots = sets * case.batch_size
    order = torch.randperm(num_slots, generator=draw, device=device).int().view(sets, case.batch_size)
    slots = [x.clone() for x in order]  # aligned, as an engine's own are
    state = make_state(case.heads, num_slots, case.state, draw)
    rows = [make_rows(case.heads, tree.num_rows, case.io, draw) for _ in range(sets)]
    if case.policy == "cycle":
        accepted = accepted_lengths(seed, num_slots)
        cycle = ring_cycle(accepted).last_steps
        steps, history = _cycle_steps(case, tree, rows, slots, cycle, draw)
        return Problem(case, tree, steps, sets, state, history, _cycle_work(case, cycle, sets), accepted)
    history = None if case.policy == "reconstruct" else _history(case, num_slots, draw)
    path = pack_paths(tree, case.paths)
    priors = [
        Prior(history, None, None, _flags(case, 0, draw), history.lengths[at])
        if history
        else _pending(case, path, draw)
        for at in order.long()
    ]
    outs = [empty_out(case.heads, tree.num_rows, case.state, case.io, draw.device) for _ in rows]
    return Problem(case, tree, list(map(Step, rows, slots, priors, outs)), sets, state, history, work)


def _work(case: Case) -> Work:
    if case.policy == "reconstruct":
        return Work(2 * case.batch_size, case.num_rows, sum(map(len, case.paths)))
    return Work(case.batch_size, case.num_rows, NUM_HISTORY_ROWS * case.batch_size)


def _cycle_work(case: Case, cycle: Cycle, sets: int) -> Work:
    """Return the mean of the calls: a path that joins a history is read from its record and written again."""
    calls = len(cycle.fold) * sets
    states = case.batch_size + int(cycle.fold.sum()) / calls
    prior_rows = cycle.lengths + cycle.pending + cycle.pending * ~cycle.fold
    return Work(states, case.num_rows, int(prior_rows.sum()) / calls)


def _history(case: Case, num_slots: int, draw: torch.Generator) -> History:
    lengths = torch.full((num_slots,), NUM_HISTORY_ROWS, dtype=torch.int32, device=draw.device)
    return make_history(case.heads, num_slots, CAPACITY, lengths, case.state, case.io, draw)


def _pending(case: Case, path: PackedPath, draw: torch.Generator) -> Prior:
    """Return a path of which nothing is in the state yet."""
    record = make_record(case.heads, path.tree.num_rows, case.state, case.io, draw)
    # Along a path log decays fall: those of one row, times its depth, do.
    record = record._replace(decay_high=record.decay_high[:1] * (path.tree.depth[:, None] + 1))
    return Prior(None, record, path.tables, _flags(case, 1, draw))


def _cycle_steps(
    case: Case,
    tree: PackedTree,
    rows: Sequence[Projections],
    slots: Sequence[Tensor],
    cycle: Cycle,
    draw: torch.Generator,
) -> tuple[list[Step], History]:
    """Return the steps of all sets, step after step; of each set's two records one is written and the other taken over."""
    device, num_slots = draw.device, len(rows) * case.batch_size
    history = _history(case, num_slots, draw)
    place = torch.cat(list(slots)).long()  # where the cycle's sequences live
    lengths = torch.empty(len(cycle.lengths), num_slots, dtype=torch.int32, device=device)
    lengths[:, place] = torch.from_numpy(cycle.lengths).to(device, torch.int32)
    shape = (-1, len(rows), case.batch_size)
    pending, fold = (torch.from_numpy(x).to(device, torch.int32).view(shape) for x in (cycle.pending, cycle.fold))
    num_taken = int(cycle.pending.max())
    taken = tree.cu_rows[:-1, None].int() + torch.arange(num_taken, dtype=torch.int32, device=device)
    outs = [[empty_out(case.heads, tree.num_rows, case.state, case.io, device) for _ in rows] for _ in range(2)]
    for out in outs[1]:
        first = make_record(case.heads, tree.num_rows, case.state, case.io, draw)
        for buffer, part in zip(_record(out), first, strict=True):
            buffer.copy_(part)
    steps = []
    for step in range(len(lengths)):
        held = history._replace(lengths=lengths[step])
        for number, (x, at) in enumerate(zip(rows, slots, strict=True)):
            path = PathTables(taken, pending[step, number].clone())
            record, now = _record(outs[1 - step % 2][number]), held.lengths[at.long()]
            prior = Prior(held, record, path, fold[step, number].clone(), now)
            steps.append(Step(x, at, prior, outs[step % 2][number]))
    return steps, history


def _record(out: Verified) -> Record:
    assert isinstance(out.record, Record)
    return out.record


def _flags(case: Case, value: int, draw: torch.Generator) -> Int[Tensor, "B"]:
    return torch.full((case.batch_size,), value, dtype=torch.int32, device=draw.device)
