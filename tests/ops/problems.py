"""Random problems of the gated delta rule: trees, operands, pools. Everything is a function of its seed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from treewy.ops import gdn
from treewy.ops.gdn import reference
from treewy.packed import PackedTree, pack
from treewy.tree import DraftTree

# Shapes that reach every branch: root alone, chains on both sides of the deep solver, levels, stars, ragged trees.
SHAPES = {
    "root": DraftTree([-1]),
    "chain 3": DraftTree.chain(3),
    "chain 11": DraftTree.chain(11),
    "chain 31": DraftTree.chain(31),
    "widths 3 3 3": DraftTree.from_widths([3, 3, 3]),
    "star 33": DraftTree.from_widths([33]),
    "scattered": DraftTree([-1, 0, 0, 0, 3]),
    "two arms": DraftTree([-1, 0, 0, *range(1, 24)]),
}


class Problem(NamedTuple):
    """The operands of one `verify` call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor
    tree: PackedTree

    def to(
        self, dtype: torch.dtype, *, gates: torch.dtype | None = None, state: torch.dtype | None = None
    ) -> "Problem":
        """Return the problem with q, k, v in `dtype`, and gates and state in theirs (default: the same)."""
        gates, state = gates or dtype, state or dtype
        return self._replace(
            q=self.q.to(dtype),
            k=self.k.to(dtype),
            v=self.v.to(dtype),
            g=self.g.to(gates),
            beta=self.beta.to(gates),
            state=self.state.to(state, copy=True),
        )

    def verify(self, **options) -> gdn.Verified:
        """Run `gdn.verify` on the problem."""
        return gdn.verify(*self, **options)

    def verify_snapshots(self, **options) -> gdn.Verified:
        """Run `gdn.verify_snapshots` on the problem."""
        return gdn.verify_snapshots(*self, **options)

    def rows(self, seq: int, dtype: type = np.float64) -> reference.Rows:
        """Return the operands of one sequence as the reference takes them, value heads only."""
        span = slice(self.tree.starts[seq], self.tree.starts[seq + 1])
        group = self.v.shape[1] // self.k.shape[1]
        q, k = (x.repeat_interleave(group, dim=1) for x in (self.q, self.k))
        parts = (x[span].double().numpy() for x in (q, k, self.v, self.g, self.beta))
        return reference.Rows(*parts).astype(dtype)

    def committed(self, seq: int, dtype: type = np.float64) -> np.ndarray:
        """Return the committed state of one sequence."""
        return self.state[self.slots[seq]].double().numpy().astype(dtype)


def make(
    trees: Sequence[DraftTree],
    *,
    seed: int = 0,
    heads: int = 2,
    group: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    correlation: float = 0.0,
    beta: tuple[float, float] = (0.0, 1.0),
    gate_one: bool = False,
    strong_gate: float = 0.0,
    slots: Sequence[int] | None = None,
    num_slots: int | None = None,
    num_rows: int | None = None,
) -> Problem:
    """Return a random float64 problem.

    Args:
        trees: One per sequence.
        seed: Decides everything random.
        heads: Key heads (H).
        group: Value heads per key head (HV / H).
        key_dim: K.
        value_dim: V.
        correlation: Cosine between the keys of a head, in expectation; 1 makes them all equal.
        beta: Range of the write strengths, uniform.
        gate_one: No decay at all, g = 0; else ordinary gates.
        strong_gate: Log decay put on one row of each root path, a third of the way down the tree.
        slots: Pool slot of each sequence; default: in order.
        num_slots: Slots of the pool.
        num_rows: Packed rows, padding included.
    """
    rng = np.random.default_rng(seed)
    tree = pack(trees, num_rows=num_rows)
    value_heads, total = heads * group, tree.num_rows
    slots = range(len(trees)) if slots is None else slots
    num_slots = max(slots, default=0) + 1 if num_slots is None else num_slots
    k = unit_keys(rng, total, heads, key_dim, correlation)
    q = unit_keys(rng, total, heads, key_dim, 0.0) * key_dim**-0.5
    g = np.zeros((total, value_heads)) if gate_one else -np.log1p(np.exp(rng.normal(-2.5, 1.0, (total, value_heads))))
    if strong_gate:
        for start, shape in zip(tree.starts, trees, strict=False):
            g[start : start + shape.num_rows][shape.depth == max(1, shape.max_depth // 3)] = strong_gate
    return Problem(
        *map(torch.from_numpy, (q, k, rng.normal(size=(total, value_heads, value_dim)), g)),
        torch.from_numpy(rng.uniform(*beta, (total, value_heads))),
        torch.from_numpy(rng.normal(size=(num_slots, value_heads, value_dim, key_dim))),
        torch.tensor(list(slots), dtype=torch.int64),
        tree,
    )


def unit_keys(rng: np.random.Generator, rows: int, heads: int, dim: int, correlation: float) -> np.ndarray:
    """Return unit keys [rows, heads, dim] with the given cosine between any two of a head."""
    common, own = rng.normal(size=(1, heads, dim)), rng.normal(size=(rows, heads, dim))
    common, own = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (common, own))
    mixed = correlation**0.5 * common + (1 - correlation) ** 0.5 * own
    return mixed / np.linalg.norm(mixed, axis=-1, keepdims=True)


@st.composite
def trees(draw: st.DrawFn, max_rows: int = 24) -> DraftTree:
    """Draw a tree in topological order: chains, near-chains, stars, and anything between."""
    num_rows = draw(st.integers(1, max_rows))
    reach = draw(st.sampled_from([1, 2, 4, max_rows]))
    return DraftTree([-1] + [draw(st.integers(max(0, row - reach), row - 1)) for row in range(1, num_rows)])


@st.composite
def problems(draw: st.DrawFn, max_rows: int = 24, max_seqs: int = 1) -> Problem:
    """Draw a float64 problem, easy or hard: gates of 1, equal keys, beta up to 2, one strong gate per path."""
    shapes = draw(st.lists(trees(max_rows), min_size=1, max_size=max_seqs))
    return make(
        shapes,
        seed=draw(st.integers(0, 2**32 - 1)),
        heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 4)),
        key_dim=draw(st.sampled_from([1, 3, 8, 16])),
        value_dim=draw(st.sampled_from([1, 5, 8])),
        correlation=draw(st.sampled_from([0.0, 0.98, 1.0])),
        beta=draw(st.sampled_from([(0.0, 1.0), (0.0, 2.0), (2.0, 2.0)])),
        gate_one=draw(st.booleans()),
        strong_gate=draw(st.sampled_from([0.0, -20.0, -100.0, -200.0])),
    )
