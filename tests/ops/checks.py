"""How errors are measured, and the oracles they are measured against."""

from typing import NamedTuple

import numpy as np
import torch

from ops.problems import Problem
from treewy.ops import gdn
from treewy.ops.gdn import reference
from treewy.packed import pack_paths
from treewy.tree import DraftTree


class Errors(NamedTuple):
    """Relative errors of one head after another (each head is one draw): outputs of all rows, and a committed state."""

    o: np.ndarray
    state: np.ndarray


class Arithmetic(NamedTuple):
    """Errors on the same inputs: of the op under test, of the float32 walk, and of float32 forward substitution."""

    op: Errors
    walk: Errors
    substitution: Errors


def forward_substitution(
    rows: reference.Rows, state: np.ndarray, parents: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (o, states) of the WY form by honest forward substitution in the operands' dtype.

    Path sums of log decays are taken in float64 and their differences rounded once: what is measured is the arithmetic
    of the solve, not of the gates.
    """
    dtype, tree = rows.v.dtype, DraftTree(parents)
    u, o = np.empty_like(rows.v), np.empty_like(rows.v)
    states = np.empty((tree.num_rows, *state.shape), dtype)
    log_decay = np.empty(rows.g.shape, np.float64)
    for t in range(tree.num_rows):
        path = tree.path(t)
        above = path[:-1]
        log_decay[t] = rows.g[path].astype(np.float64).sum(axis=0)
        ratios = np.exp((log_decay[t] - log_decay[path]).astype(dtype))
        carried = np.exp(log_decay[t].astype(dtype))[:, None]
        residual = rows.v[t] - carried * np.einsum("hvk,hk->hv", state, rows.k[t])
        gram = np.einsum("hk,phk->ph", rows.k[t], rows.k[above])
        u[t] = rows.beta[t][:, None] * (residual - np.einsum("ph,phv->hv", ratios[:-1] * gram, u[above]))
        read = ratios * np.einsum("hk,phk->ph", rows.q[t], rows.k[path])
        o[t] = carried * np.einsum("hvk,hk->hv", state, rows.q[t]) + np.einsum("ph,phv->hv", read, u[path])
        states[t] = carried[..., None] * state + np.einsum("ph,phv,phk->hvk", ratios, u[path], rows.k[path])
    return o, states


def relative(got: np.ndarray, want: np.ndarray, head_axis: int) -> np.ndarray:
    """Return each head's largest error over its largest value."""
    others = tuple(axis for axis in range(want.ndim) if axis != head_axis)
    return np.abs(got - want).max(axis=others) / np.abs(want).max(axis=others)


def geometric_mean(errors: np.ndarray) -> float:
    """Return the geometric mean; an exact zero counts as a tenth of the float32 unit roundoff."""
    return float(np.exp(np.log(np.maximum(errors, 2.0**-24 / 10)).mean()))


def arithmetic(problem: Problem) -> Arithmetic:
    """Measure the eager op on a problem of one sequence whose heads are the draws.

    Outputs are float32, before any cast; the committed state is that of the deepest row, written to a float32 pool that
    holds the same values as the problem's.
    """
    parents = problem.tree.shapes[0]
    last = DraftTree(parents).max_depth
    last = int(np.argmax(DraftTree(parents).depth))
    exact_o, exact_states = reference.walk(problem.rows(0), problem.committed(0), parents)

    def errors(o: np.ndarray, state: np.ndarray) -> Errors:
        return Errors(relative(o, exact_o, 1), relative(state, exact_states[last], 0))

    single = problem.rows(0, np.float32), problem.committed(0, np.float32), parents
    walk_o, walk_states = reference.walk(*single)
    wy_o, wy_states = forward_substitution(*single)
    verified = problem.verify(out_dtype=torch.float32)
    pool = problem.state.float()
    gdn.commit(pool, problem.slots, verified.record, pack_paths(problem.tree, [DraftTree(parents).path(last)]))
    return Arithmetic(
        op=errors(verified.o.numpy(), pool[problem.slots[0]].numpy()),
        walk=errors(walk_o, walk_states[last]),
        substitution=errors(wy_o, wy_states[last]),
    )
