"""Whether a variant computes what it should: nothing that is wrong gets a time.

A few sequences of a problem's own operands are held against the float64 walk, level by level, of the same quantised
numbers: outputs, the state that the record stands for, and what the call left in pool and history.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from treewy.bench.ops.problems import Problem, Step
from treewy.bench.ops.variants import Variant
from treewy.ops import gdn
from treewy.ops.gdn import Prior, Projections
from treewy.packed import PackedTree, pack
from treewy.shapes import Float, Tensor
from treewy.tree import DraftTree

# Relative Frobenius errors. Fast mode's operands are bfloat16 in places; exact mode has float32's accuracy and what is
# lost where a result is rounded to a bfloat16 buffer, 2^-9 in the worst element.
FAST_BOUND = 1e-2
EXACT_BOUND = 1e-5
ROUNDED = 4e-3

NUM_CHECKED = 3


class Errors(NamedTuple):
    """Relative Frobenius errors, the largest over the sequences that were checked.

    Attributes:
        o: Of the outputs.
        record: Of the state that the deepest row's path of records stands for.
        committed: Of the state that pool and history stand for after the call.
    """

    o: float
    record: float
    committed: float


class Checked(NamedTuple):
    """The outcome of a check.

    Attributes:
        errors: What was measured.
        fault: What is wrong; None if nothing is.
    """

    errors: Errors
    fault: str | None


class Rows(NamedTuple):
    """Rows that add to a state: pseudo-values [P, HV, V], keys [P, H, K], log decays from that state [P, HV]."""

    u: Tensor
    k: Tensor
    log_decay: Tensor


def check(variant: Variant, problem: Problem) -> Checked:
    """Run one set of a problem, under "cycle" through all its steps, and compare it."""
    worst = Errors(0.0, 0.0, 0.0)
    for step in problem.steps[:: problem.num_sets]:
        worst = _worse(worst, _step_errors(variant, problem, step))
    bounds = _bounds(variant, problem)
    faults = [
        f"{name} {error:.1e}"
        for name, error, bound in zip(Errors._fields, worst, bounds, strict=True)
        if not error <= bound
    ]
    return Checked(worst, f"relative errors {', '.join(faults)} against the float64 walk" if faults else None)


def rebuilt(state: Float[Tensor, "HV V K"], rows: Rows) -> Float[Tensor, "HV V K"]:
    """Return the state behind rows, in float64.

    Source: eq. 13 of docs/theory.md.
    """
    if not len(rows.u):
        return state.double()
    u, log_decay = rows.u.double(), rows.log_decay.double()
    k = rows.k.double().repeat_interleave(u.shape[1] // rows.k.shape[1], dim=1)
    weighted = u * (log_decay[-1] - log_decay).exp()[..., None]
    return log_decay[-1].exp()[:, None, None] * state.double() + torch.einsum("phv,phk->hvk", weighted, k)


def walked(
    x: Projections, state: Float[Tensor, "HV V K"], parents: Sequence[int], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return outputs [T, HV, V] and states [T, HV, V, K] of one sequence by the recurrence itself.

    Args:
        x: Its rows.
        state: Its committed state.
        parents: Its tree.
        dtype: What is computed in. The states of a walk in float32 are rounded to the dtype of `state`.
    """
    tree = pack([DraftTree(parents)], device=state.device)
    wide = x._replace(**{name: part.to(dtype) for name, part in x._asdict().items() if isinstance(part, Tensor)})
    g, beta = gdn.finish_gates(wide.a, wide.b, wide.a_log, wide.dt_bias, beta_scale=x.beta_scale)
    q, k = gdn.scale_queries(wide.q), gdn.l2_normalise(wide.k)
    pool = state[None].to(dtype if dtype == torch.float64 else state.dtype)
    slots = torch.zeros(1, dtype=torch.int64, device=state.device)
    verified = gdn.verify_snapshots(q, k, wide.v, g, beta, pool, slots, tree, out_dtype=dtype)
    assert isinstance(verified.record, gdn.Snapshots)
    return verified.o, verified.record.states


def prior_rows(prior: Prior, seq: int, slot: int) -> Rows:
    """Return the rows that a sequence's state lacks, log decays counted from its checkpoint, in float64."""
    parts: list[Rows] = []
    if prior.history is not None:
        held = prior.history
        n = int(held.lengths[slot])
        parts.append(
            Rows(held.u[slot, :n], held.k[slot, :n], held.decay_high[slot, :n].double() + held.decay_low[slot, :n])
        )
    if prior.record is not None and prior.path is not None:
        taken = prior.path.rows[seq, : int(prior.path.lengths[seq])].long()
        u, k, high, low = (part[taken] for part in prior.record)
        before = parts[0].log_decay[-1:].sum(dim=0) if parts else 0.0
        parts.append(Rows(u, k, high.double() + low + before))
    return Rows(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def relative(got: Tensor, want: Tensor) -> float:
    """Return the relative Frobenius error; not a number if anything is not."""
    return float((got.double() - want).norm() / want.norm())


def _bounds(variant: Variant, problem: Problem) -> Errors:
    if not variant.exact:
        return Errors(FAST_BOUND, FAST_BOUND, FAST_BOUND)
    o, state = (EXACT_BOUND if x == torch.float32 else ROUNDED for x in (problem.case.io, problem.case.state))
    return Errors(o, state, state)


def _step_errors(variant: Variant, problem: Problem, step: Step) -> Errors:
    """Run one step and return the worst errors of a few of its sequences, first and last among them."""
    num = problem.case.batch_size
    seqs = sorted({round(i * (num - 1) / max(1, NUM_CHECKED - 1)) for i in range(NUM_CHECKED)})
    slots = [int(step.slots[seq]) for seq in seqs]
    before = [problem.state[slot].clone() for slot in slots]
    lacking = [prior_rows(step.prior, seq, slot) for seq, slot in zip(seqs, slots, strict=True)]
    lacking = [Rows(*(part.clone() for part in rows)) for rows in lacking]
    out = variant.run(problem, step)
    worst = Errors(0.0, 0.0, 0.0)
    for seq, slot, state, rows in zip(seqs, slots, before, lacking, strict=True):
        errors = _sequence_errors(problem, step, out, seq, rebuilt(state, rows))
        folded = bool(step.prior.fold[seq])
        after = problem.state[slot]
        if not folded and not torch.equal(after, state):
            errors = errors._replace(committed=float("inf"))  # a state that nothing folds into keeps its bits
        kept = Rows(rows.u[:0], rows.k[:0], rows.log_decay[:0]) if folded else _held(step.prior, slot, len(rows.u))
        committed = relative(rebuilt(after, kept), rebuilt(state, rows))
        worst = _worse(worst, _worse(errors, Errors(0.0, 0.0, committed)))
    return worst


def _worse(a: Errors, b: Errors) -> Errors:
    """Return the larger ones; what is not a number stays so, which `max` would not see to."""
    return Errors(*np.maximum(a, b).tolist())


def _held(prior: Prior, slot: int, num_rows: int) -> Rows:
    """Return what the history of a slot holds once the pending rows have joined it."""
    assert prior.history is not None
    u, k, high, low = (part[slot, :num_rows] for part in prior.history[:4])
    return Rows(u, k, high.double() + low)


def _sequence_errors(problem: Problem, step: Step, out: gdn.Verified, seq: int, state: Tensor) -> Errors:
    tree: PackedTree = problem.tree
    own = slice(tree.starts[seq], tree.starts[seq + 1])
    x = step.rows._replace(**{name: getattr(step.rows, name)[own] for name in ("q", "k", "v", "a", "b")})
    o, states = walked(x, state, tree.shapes[seq])
    shape = DraftTree(tree.shapes[seq])
    deepest = int(shape.depth.argmax())
    assert isinstance(out.record, gdn.Record)
    u, k, high, low = (part[own][shape.path(deepest)] for part in out.record)
    record = relative(rebuilt(state, Rows(u, k, high.double() + low)), states[deepest])
    return Errors(relative(out.o[own], o), record, 0.0)
