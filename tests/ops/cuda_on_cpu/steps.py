"""Steps for the emulated kernel: everything it may not touch is NaN, and beside each step the definition in float64."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ops import cuda_on_cpu
from ops.serving import Spec, cast, paths_of, poisoned_history, projections, settle
from treewy.ops import gdn
from treewy.ops.gdn.cuda.variant import Variant
from treewy.packed import TreeTables, pack
from treewy.tree import DraftTree

HALF, FULL = torch.bfloat16, torch.float32
LAYER = Spec(heads=1, group=2, key_dim=128, value_dim=128)
# Rows of the record that paths are taken from, per sequence.
RECORDED = 8


class Seq(NamedTuple):
    """One sequence: its tree (None: no rows), and what came before."""

    tree: DraftTree | None
    held: int = 0
    path: tuple[int, ...] = ()
    fold: int = 0
    inert: bool = False


class Step(NamedTuple):
    """The operands of one step; sequence i has slot B - i, so that slot 0 is nobody's."""

    seqs: Sequence[Seq]
    x: gdn.Projections
    state: torch.Tensor
    slots: torch.Tensor
    tree: TreeTables
    prior: gdn.Prior | None
    out: gdn.Verified
    variant: Variant

    def run(self, *, stay: bool = False, **options) -> "Step":
        """Run the kernel on a copy and return that; keys that `stay` are their own record."""
        prior, history = self.prior, self.prior and self.prior.history
        if prior is not None and history is not None:
            prior = prior._replace(history=gdn.History(*(part.clone() for part in history)))
        out = gdn.Verified(self.out.o.clone(), gdn.Record(*(part.clone() for part in self.out.record)))
        if stay:
            out = out._replace(record=out.record._replace(k=self.x.k))
        done = self._replace(state=self.state.clone(), prior=prior, out=out)
        cuda_on_cpu.commit_verify(done.x, done.state, done.slots, self.tree, prior, out, self.variant, **options)
        return done

    def defined(self, folded: torch.Tensor) -> "Step":
        """Return what the definition makes of it, in float64; its history has room for every path.

        The trees start from `folded`, the kernel's own states: that they were rounded is no error of the rows.
        """
        prior, state = self.prior, self.state.double()
        x = cast(self.x, torch.float64)
        x = gdn.Projections(*(part.nan_to_num() for part in x[:7]), x.beta_scale)
        committed = None
        if prior is not None:
            record = prior.record and gdn.Record(*(part.double() for part in prior.record))
            prior = prior._replace(history=prior.history and _roomy(prior.history), record=record)
            empty = self.tree._replace(cu_rows=torch.zeros_like(self.tree.cu_rows))
            gdn.commit_verify(x, state, self.slots, empty, prior=prior, backend="eager")
            if prior.history is not None:
                committed = prior._replace(record=None, path=None, fold=torch.zeros_like(prior.fold))
                settle(prior.history, self.slots, prior)
        out = gdn.commit_verify(x, folded.double(), self.slots, self.tree, prior=committed, backend="eager")
        return self._replace(state=state, prior=prior, out=out)

    def rows(self, seq: int) -> slice:
        """Packed rows of a sequence."""
        return slice(*self.tree.cu_rows[seq : seq + 2].tolist())


def step(
    seqs: Sequence[Seq], variant: Variant, *, places: int = 0, spec: Spec = LAYER, seed: int = 0, padding: int = 0
) -> Step:
    """Return a step of `seqs` with `places` in each history; rows past the trees are NaN, and so are inert ones."""
    trees = [seq.tree for seq in seqs if seq.tree is not None]
    ends = np.cumsum([0] + [0 if seq.tree is None else seq.tree.num_rows for seq in seqs])
    tree = pack(trees, num_rows=int(ends[-1]) + padding).tables
    tree = tree._replace(cu_rows=torch.from_numpy(ends).int())
    x = _fused(projections(spec, trees, seed=seed, num_rows=tree.num_rows))
    count = len(seqs)
    for seq, start, end in zip(seqs, ends[:-1], ends[1:], strict=True):
        if seq.inert:
            _spoil(x, slice(start, end))
    _spoil(x, slice(ends[-1], None))
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(count + 1, spec.value_heads, 128, 128, generator=generator)
    state = state.to(FULL if variant.state_f32 else HALF)
    slots = torch.tensor([-1 if seq.inert else count - i for i, seq in enumerate(seqs)], dtype=torch.int32)
    prior = _prior(seqs, slots, variant, places, spec, generator)
    return Step(seqs, x, state, slots, tree, prior, _blank(tree.num_rows, spec, variant), variant)


def _roomy(history: gdn.History) -> gdn.History:
    """Return a float64 copy with places for one more path."""
    room = [part.new_zeros(part.shape[0], RECORDED, *part.shape[2:]) for part in history[:4]]
    parts = (torch.cat([part, more], 1).double() for part, more in zip(history[:4], room, strict=True))
    return gdn.History(*parts, history.lengths.clone())


def _fused(x: gdn.Projections) -> gdn.Projections:
    """Return bfloat16 rows as views of one tensor, and gates as views of another."""
    q, k, v = (part.to(HALF) for part in x[:3])
    rows = torch.cat([part.flatten(1) for part in (q, k, v)], 1)
    rows = torch.nn.functional.pad(rows, (8, 16))
    q, k, v = (
        part.unflatten(1, like.shape[1:])
        for part, like in zip(rows[:, 8:-16].split([y[0].numel() for y in (q, k, v)], 1), (q, k, v), strict=True)
    )
    a, b = torch.cat([x.a, x.b], 1).float().split(x.a.shape[1], 1)
    return gdn.Projections(q, k, v, a, b, x.a_log.float(), x.dt_bias.float(), x.beta_scale)


def _spoil(x: gdn.Projections, rows: slice) -> None:
    for part in x[:5]:
        part[rows] = torch.nan


def _prior(seqs, slots, variant, places, spec, generator) -> gdn.Prior | None:
    if not any(seq.held or seq.path for seq in seqs):
        return None
    u = FULL if variant.u_f32 else HALF
    rows = len(seqs) * RECORDED
    record = _committed((rows,), spec, u, generator)
    history = None
    if places:
        history = poisoned_history(spec, len(seqs) + 1, places, HALF, u)
        for i, seq in enumerate(seqs):
            if not seq.inert:
                history.lengths[slots[i]] = seq.held
                for part, value in zip(history, _committed((seq.held,), spec, u, generator), strict=False):
                    part[slots[i], : seq.held] = value
    starts = np.arange(len(seqs)) * RECORDED
    paths = paths_of(starts.tolist(), [seq.path for seq in seqs], RECORDED)
    fold = torch.tensor([seq.fold for seq in seqs], dtype=torch.int32)
    return gdn.Prior(history, record, paths, fold)


def _committed(rows: tuple[int, ...], spec: Spec, u: torch.dtype, generator: torch.Generator) -> gdn.Record:
    """Return rows as a step leaves them; decays fall from row to row, as on a path."""
    values = torch.randn(*rows, spec.value_heads, 128, generator=generator) / 128**0.5
    keys = torch.randn(*rows, spec.heads, 128, generator=generator)
    falls = torch.rand(*rows, spec.value_heads, generator=generator, dtype=torch.float64)
    decay = -0.2 * falls.cumsum(0)
    high = decay.float()
    return gdn.Record(values.to(u), keys.to(HALF), high, (decay - high.double()).float())


def _blank(rows: int, spec: Spec, variant: Variant) -> gdn.Verified:
    def nan(*shape: int, of: torch.dtype) -> torch.Tensor:
        return torch.full((rows, *shape), torch.nan, dtype=of)

    u = FULL if variant.u_f32 else HALF
    record = gdn.Record(
        nan(spec.value_heads, 128, of=u),
        nan(spec.heads, 128, of=HALF),
        nan(spec.value_heads, of=FULL),
        nan(spec.value_heads, of=FULL),
    )
    return gdn.Verified(nan(spec.value_heads, 128, of=HALF), record)
