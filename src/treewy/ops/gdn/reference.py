"""Gated delta rule on trees in NumPy float64: the definition the other implementations are held to.

`walk` is the recurrence itself, one token at a time; its dtype is an argument, because the honest error of a float32
implementation is that of the float32 walk. `closed_form` and `rebuild` are the algebra of docs/theory.md on one
sequence, heads last to first, no cleverness.
"""

from typing import NamedTuple

import numpy as np
import torch

from treewy.ops.gdn.records import History, Record, Snapshots, Verified
from treewy.ops.slots import check_slots
from treewy.packed import PackedPath, PackedTree
from treewy.shapes import Array
from treewy.tree import DraftTree


class Rows(NamedTuple):
    """The operands of one sequence, value heads only: q, k [T, HV, K], v [T, HV, V], g, beta [T, HV]."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array

    def astype(self, dtype: np.dtype | type) -> "Rows":
        """Return the operands in `dtype`."""
        return Rows(*(x.astype(dtype) for x in self))


class ClosedForm(NamedTuple):
    """Outputs [T, HV, V], pseudo-values [T, HV, V] and path log decays [T, HV]."""

    o: Array
    u: Array
    log_decay: Array


def walk(rows: Rows, state: Array, parents: tuple[int, ...]) -> tuple[Array, Array]:
    """Apply the recurrence row by row, each from its parent's state.

    S_t = exp(g_t) S_p (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and o_t = S_t q_t, in the operands' dtype.

    Args:
        rows: Operands of one sequence.
        state: Committed state [HV, V, K].
        parents: Parent of each row, -1 for the root.

    Returns:
        (o [T, HV, V], states [T, HV, V, K]).
    """
    states = np.empty((len(parents), *state.shape), dtype=rows.v.dtype)
    outputs = np.empty_like(rows.v)
    for t, parent in enumerate(parents):
        before = state.astype(rows.v.dtype) if parent < 0 else states[parent]
        decayed = np.exp(rows.g[t])[:, None, None] * before
        error = rows.v[t] - np.einsum("hvk,hk->hv", decayed, rows.k[t])
        states[t] = decayed + np.einsum("hv,hk->hvk", rows.beta[t][:, None] * error, rows.k[t])
        outputs[t] = np.einsum("hvk,hk->hv", states[t], rows.q[t])
    return outputs, states


def closed_form(rows: Rows, state: Array, parents: tuple[int, ...]) -> ClosedForm:
    """Evaluate every row from the committed state alone, by forward substitution.

    (I + A) U = R with A[t, i] = beta_t exp(G_t - G_i) (k_t . k_i) over strict ancestors i of t, and
    R[t] = beta_t (v_t - exp(G_t) S_0 k_t); then o_t = exp(G_t) S_0 q_t + sum_i exp(G_t - G_i) (q_t . k_i) u_i.
    """
    tree = DraftTree(parents)
    log_decay, u, o = np.empty_like(rows.g), np.empty_like(rows.v), np.empty_like(rows.v)
    for t in range(tree.num_rows):
        path = tree.path(t)
        log_decay[t] = rows.g[path].sum(axis=0)
        ratios = np.exp(log_decay[t] - log_decay[path])  # [P, HV]
        carried = np.exp(log_decay[t])[:, None]
        above = path[:-1]
        erased = carried * np.einsum("hvk,hk->hv", state, rows.k[t])
        couplings = ratios[:-1] * np.einsum("hk,phk->ph", rows.k[t], rows.k[above])
        u[t] = rows.beta[t][:, None] * (rows.v[t] - erased - np.einsum("ph,phv->hv", couplings, u[above]))
        read = ratios * np.einsum("hk,phk->ph", rows.q[t], rows.k[path])
        o[t] = carried * np.einsum("hvk,hk->hv", state, rows.q[t]) + np.einsum("ph,phv->hv", read, u[path])
    return ClosedForm(o, u, log_decay)


def rebuild(state: Array, u: Array, k: Array, log_decay: Array) -> Array:
    """Return the state after a path: S_a = exp(G_a) S_0 + sum_i exp(G_a - G_i) u_i k_i^T.

    The same sum folds a history into its checkpoint (eq. 13 of docs/theory.md).

    Args:
        state: Committed state [HV, V, K].
        u: Pseudo-values of the path's rows [P, HV, V].
        k: Keys of the path's rows [P, HV, K].
        log_decay: Path log decays of the path's rows [P, HV].
    """
    ratios = np.exp(log_decay[-1] - log_decay)
    return np.exp(log_decay[-1])[:, None, None] * state + np.einsum("ph,phv,phk->hvk", ratios, u, k)


def current(state: torch.Tensor, slot: int, history: History | None) -> Array:
    """Return the state [HV, V, K] that a slot's checkpoint and history stand for."""
    checkpoint, length = _numpy(state[slot]), 0 if history is None else int(history.lengths[slot])
    if history is None or length == 0:
        return checkpoint
    u, k, high, low = (_numpy(part[slot, :length]) for part in history[:4])
    return rebuild(checkpoint, u, np.repeat(k, u.shape[1] // k.shape[1], axis=1), high + low)


def verify(
    q, k, v, g, beta, state, slots, tree: PackedTree, out_dtype: torch.dtype, history: History | None
) -> Verified:
    """See `api.verify`."""
    check_slots(slots, state.shape[0])
    o, u, log_decay = np.zeros(v.shape), np.zeros(v.shape), np.zeros(g.shape)
    for seq, rows, before in _sequences(q, k, v, g, beta, state, slots, tree, history):
        span = slice(tree.starts[seq], tree.starts[seq + 1])
        o[span], u[span], log_decay[span] = closed_form(rows, before, tree.shapes[seq])
    high = torch.from_numpy(log_decay).to(v.device)
    record = Record(torch.from_numpy(u).to(v.device), k.double(), high, torch.zeros_like(high))
    return Verified(torch.from_numpy(o).to(v.device, out_dtype), record)


def verify_snapshots(q, k, v, g, beta, state, slots, tree: PackedTree, out_dtype: torch.dtype) -> Verified:
    """See `api.verify_snapshots`."""
    check_slots(slots, state.shape[0])
    o = np.zeros(v.shape)
    states = np.zeros((v.shape[0], *state.shape[1:]))
    for seq, rows, before in _sequences(q, k, v, g, beta, state, slots, tree):
        span = slice(tree.starts[seq], tree.starts[seq + 1])
        o[span], states[span] = walk(rows, before, tree.shapes[seq])
    snapshots = Snapshots(torch.from_numpy(states).to(state.device, state.dtype))
    return Verified(torch.from_numpy(o).to(v.device, out_dtype), snapshots)


def commit(state: torch.Tensor, slots: torch.Tensor, record: Record, path: PackedPath) -> None:
    """See `api.commit`."""
    check_slots(slots, state.shape[0])
    group = record.u.shape[1] // record.k.shape[1]
    u, k = _numpy(record.u), np.repeat(_numpy(record.k), group, axis=1)
    log_decay = _numpy(record.decay_high) + _numpy(record.decay_low)
    for slot, rows in _targets(slots, path):
        after = rebuild(_numpy(state[slot]), u[rows], k[rows], log_decay[rows])
        state[slot] = torch.from_numpy(after).to(state.device, state.dtype)


def append(history: History, slots: torch.Tensor, record: Record, path: PackedPath) -> None:
    """See `api.append`."""
    check_slots(slots, history.lengths.shape[0])
    for slot, rows in _targets(slots, path):
        append_rows(history, slot, record, rows)
        history.lengths[slot] += len(rows)


def append_rows(history: History, slot: int, record: Record, rows: list[int]) -> None:
    """Write rows of a record behind those that a slot's history holds, and keep its length."""
    log_decay = record.decay_high.double() + record.decay_low.double()
    start = int(history.lengths[slot])
    newest = slice(start - 1, start) if start else slice(0, 0)
    before = (history.decay_high[slot, newest].double() + history.decay_low[slot, newest].double()).sum(dim=0)
    for place, row in enumerate(rows, start):
        history.u[slot, place], history.k[slot, place] = record.u[row], record.k[row]
        history.decay_high[slot, place] = before + log_decay[row]
        history.decay_low[slot, place] = before + log_decay[row] - history.decay_high[slot, place].double()


def fold(state: torch.Tensor, slots: torch.Tensor, history: History) -> None:
    """See `api.fold`."""
    check_slots(slots, state.shape[0])
    for slot in slots.tolist():
        if slot >= 0 and history.lengths[slot]:
            state[slot] = torch.from_numpy(current(state, slot, history)).to(state.device, state.dtype)
            history.lengths[slot] = 0


def commit_snapshots(state: torch.Tensor, slots: torch.Tensor, record: Snapshots, path: PackedPath) -> None:
    """See `api.commit_snapshots`."""
    check_slots(slots, state.shape[0])
    for slot, rows in _targets(slots, path):
        state[slot] = record.states[rows[-1]].to(state.dtype)


def _targets(slots: torch.Tensor, path: PackedPath):
    for seq, (slot, nodes) in enumerate(zip(slots.tolist(), path.paths, strict=True)):
        if nodes and slot >= 0:
            yield slot, [path.tree.starts[seq] + node for node in nodes]


def _sequences(q, k, v, g, beta, state, slots, tree: PackedTree, history: History | None = None):
    group = v.shape[1] // q.shape[1]
    wide = Rows(*(_numpy(x) for x in (q, k, v, g, beta)))
    wide = wide._replace(q=np.repeat(wide.q, group, axis=1), k=np.repeat(wide.k, group, axis=1))
    for seq, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rows = Rows(*(x[tree.starts[seq] : tree.starts[seq + 1]] for x in wide))
            yield seq, rows, current(state, slot, history)


def _numpy(x: torch.Tensor) -> Array:
    return x.detach().cpu().double().numpy()
