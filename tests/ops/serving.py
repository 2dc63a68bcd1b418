"""Problems of the serving entry over many steps, the float64 walk beside them, and buffers whose unowned parts are poison."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ops.problems import unit_keys
from treewy.ops import gdn
from treewy.ops.gdn import reference
from treewy.packed import PackedTree, PathTables, pack
from treewy.tree import DraftTree


class Spec(NamedTuple):
    """Sizes and difficulty of the problems of one layer."""

    heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int = 16
    correlation: float = 0.0
    beta_scale: float = 1.0
    beta_logit: tuple[float, float] = (0.0, 2.0)  # mean and deviation
    gate_one: bool = False
    strong_gate: float = 0.0

    @property
    def value_heads(self) -> int:
        """HV."""
        return self.heads * self.group


HARD = Spec(correlation=0.98, beta_scale=2.0, beta_logit=(40.0, 0.0), gate_one=True)


def projections(spec: Spec, trees: Sequence[DraftTree], *, seed: int, num_rows: int | None = None) -> gdn.Projections:
    """Return random raw rows, float64: keys and queries of any norm, gates as their projections.

    A strong gate comes on one row of each root path, a third of the way down.
    """
    rng = np.random.default_rng(seed)
    total = sum(tree.num_rows for tree in trees) if num_rows is None else num_rows
    q, k = (
        unit_keys(rng, total, spec.heads, spec.key_dim, c) * rng.uniform(0.5, 4.0, (total, spec.heads, 1))
        for c in (0.0, spec.correlation)
    )
    a_log = np.linspace(-1.0, 0.5, spec.value_heads)
    a = np.full((total, spec.value_heads), -1e4) if spec.gate_one else rng.normal(-2.5, 1.0, (total, spec.value_heads))
    if spec.strong_gate:
        start = 0
        for tree in trees:
            rows = np.asarray(tree.depth) == max(1, max(tree.depth) // 3)
            # -exp(a_log) softplus(a) is -exp(a_log) a where a is large.
            a[start : start + tree.num_rows][rows] = -spec.strong_gate / np.exp(a_log)
            start += tree.num_rows
    parts = (
        q,
        k,
        rng.normal(size=(total, spec.value_heads, spec.value_dim)),
        a,
        rng.normal(*spec.beta_logit, (total, spec.value_heads)),
        a_log,
        np.zeros(spec.value_heads),
    )
    return gdn.Projections(*map(torch.from_numpy, parts), spec.beta_scale)


def cast(x: gdn.Projections, dtype: torch.dtype, gates: torch.dtype | None = None) -> gdn.Projections:
    """Return the projections in `dtype`, gates in `gates` (default: the same)."""
    q, k, v = (part.to(dtype) for part in x[:3])
    return gdn.Projections(q, k, v, *(part.to(gates or dtype) for part in x[3:7]), x.beta_scale)


def finished(x: gdn.Projections) -> reference.Rows:
    """Return what the serving entry makes of the projections, in float64, value heads only."""
    group = x.v.shape[1] // x.k.shape[1]
    wide = [part.double() for part in x[:7]]
    q, k = (y.repeat_interleave(group, dim=1) for y in (gdn.scale_queries(wide[0]), gdn.l2_normalise(wide[1])))
    g, beta = gdn.finish_gates(*wide[3:], beta_scale=x.beta_scale)
    return reference.Rows(*(y.cpu().numpy() for y in (q, k, wide[2], g, beta)))


def walked(x: gdn.Projections, packed: PackedTree, states: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Walk each sequence from its state [HV, V, K]: outputs and states after each row, zero where no sequence is."""
    rows = finished(x)
    o, after = np.zeros(rows.v.shape), np.zeros((*rows.v.shape, rows.k.shape[2]))
    for seq, state in enumerate(states):
        span = slice(packed.starts[seq], packed.starts[seq + 1])
        one = reference.Rows(*(part[span] for part in rows))
        o[span], after[span] = reference.walk(one, state, packed.shapes[seq])
    return o, after


def paths_of(starts: Sequence[int], paths: Sequence[Sequence[int]], width: int, fill: int = 10**6) -> PathTables:
    """Return local paths as tables of packed rows; what lies behind a path is a row that does not exist."""
    rows = torch.full((len(paths), width), fill, dtype=torch.int32)
    for seq, path in enumerate(paths):
        rows[seq, : len(path)] = torch.tensor([starts[seq] + row for row in path], dtype=torch.int32)
    return PathTables(rows, torch.tensor([len(path) for path in paths], dtype=torch.int32))


def poisoned_history(spec: Spec, num_slots: int, num_rows: int, dtype: torch.dtype, u: torch.dtype) -> gdn.History:
    """Return an empty history whose places all hold NaN."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def nan(*shape: int, of: torch.dtype) -> torch.Tensor:
        return torch.full((num_slots, num_rows, *shape), torch.nan, dtype=of)

    return gdn.History(
        nan(spec.value_heads, spec.value_dim, of=u),
        nan(spec.heads, spec.key_dim, of=dtype),
        nan(spec.value_heads, of=wide),
        nan(spec.value_heads, of=wide),
        torch.zeros(num_slots, dtype=torch.int32),
    )


def settle(history: gdn.History, slots: torch.Tensor, prior: gdn.Prior) -> None:
    """Move the lengths as a step must, once, after its last layer."""
    for seq, slot in enumerate(slots.tolist()):
        if slot >= 0:
            appended = 0 if prior.path is None else int(prior.path.lengths[seq])
            history.lengths[slot] = 0 if prior.fold[seq] else history.lengths[slot] + appended


class Stream:
    """Sequences of one layer that step through the serving entry, beside the float64 states their tokens give.

    Args:
        spec: The layer.
        num_slots: Slots of the pool.
        num_rows: Rows of each history; 0 for none.
        dtype: Of projections.
        state: Dtype of the state.
        u: Dtype of pseudo-values, in record and history.
        o: Dtype of outputs; default: that of the arithmetic.
        options: Passed on to `commit_verify`.
    """

    def __init__(
        self, spec, num_slots, num_rows=0, *, dtype=torch.float64, state=None, u=None, o=None, device="cpu", **options
    ):
        self.spec, self.dtype, self.options, self.device, self.o = spec, dtype, options, device, o
        state, self.u = state or dtype, u or dtype
        rng = np.random.default_rng(99)
        shape = (num_slots, spec.value_heads, spec.value_dim, spec.key_dim)
        self.state = torch.from_numpy(rng.normal(size=shape)).to(device, state)
        self.exact = {slot: self.state[slot].double().cpu().numpy() for slot in range(num_slots)}
        self.history = None
        if num_rows:
            history = poisoned_history(spec, num_slots, num_rows, dtype, self.u)
            self.history = gdn.History(*(part.to(device) for part in history))
        self.pending = None  # record, starts, paths, states after each row

    def prior(self, slots: Sequence[int], paths: Sequence[Sequence[int]], fold: Sequence[int]) -> gdn.Prior | None:
        """Return the prior rows of a step whose sequences accepted `paths` last time, and move the exact states."""
        record = path = None
        if self.pending is not None:
            record, starts, after = self.pending
            width = max(1, *(len(path) for path in paths)) + 1
            path = PathTables(*(part.to(self.device) for part in paths_of(starts, paths, width)))
            for seq, slot in enumerate(slots):
                if slot >= 0 and paths[seq]:
                    self.exact[slot] = after[starts[seq] + paths[seq][-1]]
        return gdn.Prior(self.history, record, path, torch.tensor(fold, dtype=torch.int32, device=self.device))

    def step(self, slots, trees, *, paths=None, fold=None, seed=0, num_rows=None, out=None):
        """Commit the paths and verify the trees; return (verified, outputs of the walk)."""
        packed = pack(trees, num_rows=num_rows)
        gates = torch.float32 if self.dtype != torch.float64 else None
        x = cast(projections(self.spec, trees, seed=seed, num_rows=packed.num_rows), self.dtype, gates)
        prior = self.prior(slots, paths or [[]] * len(trees), fold or [0] * len(trees))
        states = [self.exact[slot] if slot >= 0 else np.zeros_like(self.exact[0]) for slot in slots]
        want, after = walked(x, packed, states)
        for seq, slot in enumerate(slots):
            if slot < 0:
                want[packed.starts[seq] : packed.starts[seq + 1]] = 0.0
        x = gdn.Projections(*(part.to(self.device) for part in x[:7]), x.beta_scale)
        tables = pack(trees, num_rows=num_rows, device=self.device).tables
        slots = torch.tensor(slots, dtype=torch.int32, device=self.device)
        out = self.buffers(packed.num_rows) if out is None else out
        verified = gdn.commit_verify(x, self.state, slots, tables, prior=prior, out=out, **self.options)
        if self.history is not None:
            settle(self.history, slots, prior)
        self.pending = verified.record, packed.starts, after
        return verified, want

    def buffers(self, rows: int) -> gdn.Verified:
        """Return buffers for one step, NaN throughout."""
        spec, wide = self.spec, torch.float64 if self.dtype == torch.float64 else torch.float32

        def nan(*shape: int, of: torch.dtype) -> torch.Tensor:
            return torch.full((rows, *shape), torch.nan, dtype=of, device=self.device)

        record = gdn.Record(
            nan(spec.value_heads, spec.value_dim, of=self.u),
            nan(spec.heads, spec.key_dim, of=self.dtype),
            nan(spec.value_heads, of=wide),
            nan(spec.value_heads, of=wide),
        )
        return gdn.Verified(nan(spec.value_heads, spec.value_dim, of=self.o or wide), record)
