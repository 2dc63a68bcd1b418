"""How errors are measured, the oracles they are measured against, and the checks the mutation tests must see fail."""

from typing import NamedTuple

import numpy as np
import torch

from ops.problems import Problem
from tolerances import EXACT, FLOAT32_FLOOR, SUBSTITUTION_FACTOR, WALK_FACTOR
from treewy.ops import gdn
from treewy.ops.gdn import reference
from treewy.packed import PackedPath, pack_paths
from treewy.tree import DraftTree


class Kind(NamedTuple):
    """One way to verify and commit: with a record of pseudo-values, or with a snapshot per row."""

    verify: object
    commit: object


KINDS = {
    "record": Kind(gdn.verify, gdn.commit),
    "snapshots": Kind(gdn.verify_snapshots, gdn.commit_snapshots),
}


def assert_close(got: torch.Tensor | np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Assert that everything is finite and the largest error is within `tolerance` of the largest value (at least 1)."""
    got = got.double().numpy() if isinstance(got, torch.Tensor) else got
    assert got.shape == want.shape
    if want.size:
        assert np.isfinite(got).all()
        error, scale = np.abs(got - want).max(), max(1.0, np.abs(want).max())
        assert error <= tolerance * scale, f"error {error:.2e} at scale {scale:.2e}, tolerance {tolerance:.0e}"


class Walked(NamedTuple):
    """Outputs [N, HV, V] and states after each row [N, HV, V, K] by the float64 walk; zero on inert rows."""

    o: np.ndarray
    states: np.ndarray


def walked(problem: Problem) -> Walked:
    """Walk every sequence of a problem, one token at a time, in float64."""
    o, states = np.zeros(problem.v.shape), np.zeros((problem.tree.num_rows, *problem.state.shape[1:]))
    for seq, slot in enumerate(problem.slots.tolist()):
        if slot >= 0:
            span = slice(problem.tree.starts[seq], problem.tree.starts[seq + 1])
            one = reference.walk(problem.rows(seq), problem.committed(seq), problem.tree.shapes[seq])
            o[span], states[span] = one
    return Walked(o, states)


def committed_pool(problem: Problem, path: PackedPath, want: Walked) -> np.ndarray:
    """Return the pool that committing `path` must leave."""
    pool = problem.state.double().numpy().copy()
    for seq, slot in enumerate(problem.slots.tolist()):
        if slot >= 0 and path.paths[seq]:
            pool[slot] = want.states[problem.tree.starts[seq] + path.paths[seq][-1]]
    return pool


def check_algebra(problem: Problem, path: PackedPath, kind: str = "record", backend: str | None = None) -> None:
    """Rung 2: outputs and the committed pool of a float64 problem equal the walk; the rest of the pool keeps its bits."""
    want = walked(problem)
    verified = KINDS[kind].verify(*problem, backend=backend)
    assert_close(verified.o, want.o, EXACT)
    pool = problem.state.clone()
    KINDS[kind].commit(pool, problem.slots, verified.record, path, backend=backend)
    assert_close(pool, committed_pool(problem, path, want), EXACT)
    written = {slot for slot, rows in zip(problem.slots.tolist(), path.paths, strict=True) if slot >= 0 and rows}
    kept = [slot for slot in range(pool.shape[0]) if slot not in written]
    assert torch.equal(pool[kept], problem.state[kept])


class Errors(NamedTuple):
    """Relative errors, one per head (each head is one draw): outputs of all rows, and one committed state."""

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
    """Return (o, states) of the closed form by honest forward substitution in the operands' dtype.

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
    """Return the geometric mean; an exact zero counts as a tenth of float32's unit roundoff, a NaN as infinity."""
    errors = np.where(np.isfinite(errors), errors, np.inf)
    return float(np.exp(np.log(np.maximum(errors, 2.0**-24 / 10)).mean()))


def arithmetic(problem: Problem, kind: str = "record") -> Arithmetic:
    """Measure an eager op on a problem of one sequence whose heads are the draws.

    Outputs are float32, before any cast; the committed state is that of the deepest row, written to a float32 pool that
    holds the same values as the problem's.
    """
    tree = DraftTree(problem.tree.shapes[0])
    deepest = int(np.argmax(tree.depth))
    exact = reference.walk(problem.rows(0), problem.committed(0), tree.parents)

    def errors(o: np.ndarray, state: np.ndarray) -> Errors:
        return Errors(relative(o, exact[0], 1), relative(state, exact[1][deepest], 0))

    single = problem.rows(0, np.float32), problem.committed(0, np.float32), tree.parents
    walk, substitution = reference.walk(*single), forward_substitution(*single)
    pool = problem.state.float()
    read = problem if kind == "record" else problem._replace(state=pool)  # snapshots come in the state's dtype
    verified = KINDS[kind].verify(*read, out_dtype=torch.float32)
    KINDS[kind].commit(pool, problem.slots, verified.record, pack_paths(problem.tree, [tree.path(deepest)]))
    return Arithmetic(
        op=errors(verified.o.numpy(), pool[problem.slots[0]].numpy()),
        walk=errors(walk[0], walk[1][deepest]),
        substitution=errors(substitution[0], substitution[1][deepest]),
    )


def check_against_walk(problem: Problem, kind: str = "record") -> None:
    """Rung 3, ordinary keys: at most WALK_FACTOR times the float32 walk's error, and a floor."""
    measured = arithmetic(problem, kind)
    check_factor(measured, measured.walk, WALK_FACTOR)


def check_against_substitution(problem: Problem, kind: str = "record") -> None:
    """Rung 3, hard keys: at most SUBSTITUTION_FACTOR times float32 forward substitution's error, and a floor."""
    measured = arithmetic(problem, kind)
    check_factor(measured, measured.substitution, SUBSTITUTION_FACTOR)


def check_factor(measured: Arithmetic, oracle: Errors, factor: float) -> None:
    """Assert that the op's errors are at most `factor` times the oracle's, and a floor."""
    for part in Errors._fields:
        op, walk, bound = (geometric_mean(getattr(x, part)) for x in (measured.op, measured.walk, oracle))
        assert op <= factor * bound + FLOAT32_FLOOR, (
            f"{part}: error {op:.2e}, bound {factor} * {bound:.2e} + {FLOAT32_FLOOR:.1e}; ratio to the float32 walk "
            f"{op / walk:.2f}, to the oracle {op / bound:.2f}"
        )
