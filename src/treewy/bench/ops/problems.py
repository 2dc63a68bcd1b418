"""Operands at named shapes, rotated: everything is a function of the case and its seed."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from treewy.bench.ops.cycle import CAPACITY, SHARE_OF_FOUR
from treewy.bench.ops.floors import Heads, Work, floor_bytes
from treewy.bench.ops.timing import num_sets
from treewy.errors import RequestError
from treewy.ops.gdn import History, Prior, Projections, Record, Verified
from treewy.packed import PackedPath, PackedTree, pack, pack_paths
from treewy.shapes import Array, Tensor
from treewy.tree import DraftTree

NUM_HISTORY_ROWS = 8
TREES = ("tree15", "tree40", "spine64")
RAGGED = ("chain4", "tree15", "chain1", "tree40", "chain7", "spine64")


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        policy: "ring": a history of 8 rows, nothing pending, nothing folded. "reconstruct": no history, the last step's
            path is folded by every sequence.
        shape: `chainN` (N rows), tree15, tree40, spine64, or ragged: several of them in turn.
        batch_size: Sequences.
        state: Dtype of the state, of u and of the history.
        io: Dtype of q, k, v, the gates' inputs and o.
        heads: Sizes of the layer.
    """

    policy: str
    shape: str
    batch_size: int
    state: torch.dtype = torch.bfloat16
    io: torch.dtype = torch.bfloat16
    heads: Heads = field(default_factory=Heads)

    @property
    def trees(self) -> list[DraftTree]:
        """One tree per sequence."""
        names = RAGGED if self.shape == "ragged" else (self.shape,)
        return [tree_of(names[seq % len(names)]) for seq in range(self.batch_size)]

    @property
    def paths(self) -> list[list[int]]:
        """One accepted path per sequence: 3 or 4 rows of a chain, the root to a leaf below 4 levels of a tree."""
        rng = np.random.default_rng(self.batch_size)
        lengths = 3 + (rng.random(self.batch_size) < SHARE_OF_FOUR)
        return [path_of(tree, int(n) if tree.is_chain else 4) for tree, n in zip(self.trees, lengths, strict=True)]

    @property
    def work(self) -> Work:
        """What one call does."""
        num_rows = sum(tree.num_rows for tree in self.trees)
        if self.policy == "ring":
            return Work(self.batch_size, num_rows, NUM_HISTORY_ROWS * self.batch_size)
        return Work(2 * self.batch_size, num_rows, sum(map(len, self.paths)))

    @property
    def floor_bytes(self) -> int:
        """Bytes that one call must move."""
        return floor_bytes(self.heads, self.work, self.state.itemsize, self.io.itemsize)


@dataclass(frozen=True)
class Problem:
    """Operands of one case: as many sets as leave L2 cold, over one pool.

    Attributes:
        case: What it is a problem of.
        tree: The packed trees, the same in every set.
        path: The path accepted by the step before.
        rows, slots, priors, outs: One per set.
        state: The pool of all sets.
        history: Its histories, under ring.
    """

    case: Case
    tree: PackedTree
    path: PackedPath
    rows: Sequence[Projections]
    slots: Sequence[Tensor]
    priors: Sequence[Prior]
    outs: Sequence[Verified]
    state: Tensor
    history: History | None

    @property
    def num_sets(self) -> int:
        """Sets of operands."""
        return len(self.rows)

    @property
    def bytes_per_seq(self) -> int:
        """What one sequence keeps between steps: its state, its history, and the records of its rows."""
        case, parts = self.case, [self.state[:1]] + ([] if self.history is None else [x[:1] for x in self.history])
        kept = sum(x.numel() * x.element_size() for x in parts)
        return kept + sum(x.numel() * x.element_size() for x in self.outs[0].record) // case.batch_size


def tree_of(shape: str) -> DraftTree:
    """Return the tree of `chainN` (N rows), tree15, tree40 or spine64.

    Raises:
        RequestError: no such shape.
    """
    if match := re.fullmatch(r"chain([1-9]\d*)", shape):
        return DraftTree.chain(int(match[1]) - 1)
    if shape in TREES:
        return {
            "tree15": DraftTree.from_widths([2, 2, 2]),
            "tree40": DraftTree.from_widths([3, 3, 3]),
            "spine64": spine(16, 3),
        }[shape]
    raise RequestError(f"A shape must be chainN or one of {', '.join(TREES)}; got {shape!r}. Choose one of them.")


def spine(num_rows: int, num_siblings: int) -> DraftTree:
    """Return a chain of `num_rows` rows, each with `num_siblings` leaves below it beside the chain's next row."""
    parents, row = [-1], 0
    for level in range(num_rows):
        width = num_siblings + (level < num_rows - 1)
        first = len(parents)
        parents += [row] * width
        row = first
    return DraftTree(parents)


def path_of(tree: DraftTree, num_rows: int) -> list[int]:
    """Return the path of `num_rows` rows, or as many as there are, to the last row of its level."""
    depth = min(num_rows - 1, tree.max_depth)
    return tree.path(int(np.flatnonzero(tree.depth == depth)[-1]))


def make_problem(case: Case, device: torch.device | str, *, seed: int = 0, sets: int | None = None) -> Problem:
    """Return a random problem.

    Args:
        case: What to make.
        device: Where.
        seed: Decides everything random.
        sets: Sets of operands; default: as many as leave L2 cold.
    """
    sets = num_sets(case.floor_bytes) if sets is None else sets
    draw = torch.Generator(device).manual_seed(seed)
    tree = pack(case.trees, device=device)
    path = pack_paths(tree, case.paths)
    num_slots, heads = sets * case.batch_size, case.heads
    shape = (num_slots, heads.num_value_heads, heads.value_dim, heads.key_dim)
    # Filled slot by slot: a pool in float32 beside its bfloat16 copy would not always fit.
    state = torch.empty(shape, dtype=case.state, device=device)
    for slot in state:
        slot.copy_(torch.randn(shape[1:], generator=draw, device=device) * 0.1)
    order = torch.randperm(num_slots, generator=draw, device=device).int().view(sets, case.batch_size)
    history = make_history(case, num_slots, draw) if case.policy == "ring" else None
    rows = [make_rows(case, tree.num_rows, draw) for _ in range(sets)]
    return Problem(
        case=case,
        tree=tree,
        path=path,
        rows=rows,
        slots=list(order),
        priors=[make_prior(case, x, history, path, draw) for x in rows],
        outs=[empty_out(case, tree.num_rows, device) for _ in range(sets)],
        state=state,
        history=history,
    )


def make_rows(case: Case, num_rows: int, draw: torch.Generator) -> Projections:
    """Return random operands as a convolution would leave them."""
    heads = case.heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=draw.device).to(case.io)

    num = heads.num_value_heads
    return Projections(
        q=normal(num_rows, heads.num_heads, heads.key_dim),
        k=normal(num_rows, heads.num_heads, heads.key_dim),
        v=normal(num_rows, num, heads.value_dim),
        a=normal(num_rows, num),
        b=normal(num_rows, num),
        a_log=torch.rand(num, generator=draw, device=draw.device).clamp(min=1e-3).log(),
        dt_bias=torch.randn(num, generator=draw, device=draw.device),
    )


def make_history(case: Case, num_slots: int, draw: torch.Generator, lengths: Array | None = None) -> History:
    """Return histories of `NUM_HISTORY_ROWS` rows, or of the given lengths, whose log decays fall row by row."""
    record = make_record(case, num_slots * CAPACITY, draw)
    u, k, high, low = (part.unflatten(0, (num_slots, CAPACITY)) for part in record)
    filled = torch.full((num_slots,), NUM_HISTORY_ROWS) if lengths is None else torch.from_numpy(lengths)
    return History(u, k, high.cumsum(dim=1), low, filled.to(device=draw.device, dtype=torch.int32))


def make_record(case: Case, num_rows: int, draw: torch.Generator) -> Record:
    """Return random records; raw keys, whose norms u carries."""
    heads, device = case.heads, draw.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device)

    u = normal(num_rows, heads.num_value_heads, heads.value_dim) / math.sqrt(heads.key_dim)
    k = normal(num_rows, heads.num_heads, heads.key_dim)
    decay = -torch.rand((num_rows, heads.num_value_heads), generator=draw, device=device) / 4
    return Record(u.to(case.state), k.to(case.io), decay, torch.zeros_like(decay))


def make_prior(
    case: Case, rows: Projections, history: History | None, path: PackedPath, draw: torch.Generator
) -> Prior:
    """Return what the state of one set lacks."""
    device, num = draw.device, case.batch_size
    if case.policy == "ring":
        return Prior(history, None, None, torch.zeros(num, dtype=torch.int32, device=device))
    record = make_record(case, path.tree.num_rows, draw)
    depth = path.tree.depth[:, None] + 1
    # Along a path log decays fall: those of one row, times its depth, do.
    record = record._replace(decay_high=record.decay_high[:1] * depth, k=rows.k.flip(0))
    return Prior(None, record, path.tables, torch.ones(num, dtype=torch.int32, device=device))


def empty_out(case: Case, num_rows: int, device: torch.device | str) -> Verified:
    """Return buffers for what a call gives."""
    heads = case.heads

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    values = (num_rows, heads.num_value_heads, heads.value_dim)
    gates = (num_rows, heads.num_value_heads)
    keys = (num_rows, heads.num_heads, heads.key_dim)
    record = Record(empty(*values, dtype=case.state), empty(*keys, dtype=case.io), empty(*gates), empty(*gates))
    return Verified(empty(*values, dtype=case.io), record)
