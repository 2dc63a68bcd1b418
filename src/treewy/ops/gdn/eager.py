"""Gated delta rule on trees in PyTorch: runs on every device.

Products with the state run in the compute dtype, float32 or float64. The T x T work, and that with the C rows of a
history, always runs in float64: it is small beside them, and on nearly equal keys it is where a float32 closed form loses
against the walk.
"""

import math
from typing import NamedTuple

import torch

from treewy.ops.dispatch import compute_dtype
from treewy.ops.gdn.records import History, Record, Snapshots, Verified
from treewy.ops.slots import check_slots, gather_slots, kept, written, zero_inert
from treewy.packed import PackedPath, PackedTree
from treewy.shapes import Bool, Float, Tensor

# From this depth on, one triangular solve beats a product per level. Both are substitution.
SOLVE_TRIANGULAR_DEPTH = 12


class _Dense(NamedTuple):
    """Operands at dense places, heads first; value heads grouped by key head (J = HV / H)."""

    q: Float[Tensor, "B H 1 T K"]
    k: Float[Tensor, "B H 1 T K"]
    v: Float[Tensor, "B H J T V"]
    log_decay: Float[Tensor, "B H J T"]  # float64: summed over the path
    beta: Float[Tensor, "B H J T"]
    state: Float[Tensor, "B H J V K"]


class _Past(NamedTuple):
    """Histories, heads first, unused rows zero. Log decays turn into two weights: G_last and G_last - G_h are at most 0."""

    u: Float[Tensor, "B H J C V"]
    k: Float[Tensor, "B H 1 C K"]
    weights: Float[Tensor, "B H J 1 C"]  # exp(G_last - G_h)
    carried: Float[Tensor, "B H J 1 1"]  # exp(G_last)


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    tree: PackedTree,
    out_dtype: torch.dtype,
    history: History | None,
) -> Verified:
    """See `api.verify`."""
    all_live = check_slots(slots, state.shape[0])
    x = _dense(q, k, v, g, beta, gather_slots(state, slots, all_live=all_live), tree)
    past = None if history is None else _past(history, slots)
    dtype = x.v.dtype
    ratios = decay_ratios(x.log_decay, tree.ancestors[:, None, None])
    carried, beta = x.log_decay.exp()[..., None], x.beta.double()[..., None]
    keys = x.k.double()
    keys_t = keys.transpose(-1, -2)

    couplings = beta * ratios * (keys @ keys_t)
    couplings = torch.where(tree.strict_ancestors[:, None, None], couplings, 0.0)
    residual = beta * (x.v - carried * _read(x.k, x.state, past))
    scores = ratios * (x.q.double() @ keys_t)
    tainted = _tainted(couplings, residual, tree)
    if tainted is not None:
        clear = ~(tainted | tainted.transpose(-1, -2))
        couplings, scores = (torch.where(clear, y, 0.0) for y in (couplings, scores))
        residual = torch.where(tainted, 0.0, residual)
    u = solve(couplings, residual, tree)
    o = carried * _read(x.q, x.state, past) + scores @ u
    if tainted is not None:
        u, o = (torch.where(tainted, torch.nan, y) for y in (u, o))

    high = x.log_decay.to(dtype)
    low = (x.log_decay - high.double()).to(dtype)
    record = Record(_packed(u.to(dtype), tree), k.to(dtype), _packed(high, tree), _packed(low, tree))
    o = zero_inert(_packed(o.to(out_dtype), tree), slots, tree, all_live=all_live)
    return Verified(o, record)


def _read(rows: Float[Tensor, "B H 1 T K"], state: Float[Tensor, "B H J V K"], past: _Past | None) -> Tensor:
    """Return what the committed state gives for each key or query.

    Source: eq. 14 of docs/theory.md.
    """
    read = rows @ state.transpose(-1, -2)
    if past is None:
        return read
    scores = past.weights * (rows.double() @ past.k.transpose(-1, -2))
    return past.carried * read + scores @ past.u


def _tainted(couplings: Tensor, residual: Tensor, tree: PackedTree) -> Bool[Tensor, "B H J T 1"] | None:
    """Return the rows that are not finite and their descendants; None if every row is.

    0 * NaN is NaN: such rows must leave every product, or one bad draft would spoil its siblings and its root.
    """
    # One sum tells the usual case: a sum of finite numbers that overflows float64 only looks closer than it needs to.
    if math.isfinite((residual.sum() + couplings.sum()).item()):
        return None
    bad = ~(residual.isfinite().all(-1) & couplings.isfinite().all(-1))
    if not bool(bad.any()):
        return None
    return (tree.ancestors[:, None, None] & bad[..., None, :]).any(-1, keepdim=True)


def decay_ratios(log_decay: Float[Tensor, "B H J T"], ancestors: Bool[Tensor, "B 1 1 T T"]) -> Tensor:
    """Return exp(G_t - G_i) for ancestors i of t or t itself, else 0.

    The difference is masked before exp: an argument above 0 never reaches it.
    """
    difference = log_decay[..., :, None] - log_decay[..., None, :]
    return torch.where(ancestors, difference, -torch.inf).exp()


def solve(couplings: Tensor, residual: Tensor, tree: PackedTree) -> Tensor:
    """Solve (I + A) U = R by substitution: level by level, or row by row on deep trees.

    Rows below the current level are masked, so that nothing unfinished is ever multiplied.

    Source: eq. 9 of docs/theory.md.
    """
    if tree.max_depth == 0:
        return residual
    if tree.max_depth >= SOLVE_TRIANGULAR_DEPTH:
        return torch.linalg.solve_triangular(couplings, residual, upper=False, unitriangular=True)
    depth = tree.depth_dense[:, None, None, :, None]
    zero = residual.new_zeros(())
    u = torch.where(depth == 0, residual, zero)
    for level in range(1, tree.max_depth + 1):
        u = torch.where(depth <= level, residual - couplings @ u, zero)
    return u


def verify_snapshots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    tree: PackedTree,
    out_dtype: torch.dtype,
) -> Verified:
    """See `api.verify_snapshots`."""
    all_live = check_slots(slots, state.shape[0])
    dtype = compute_dtype(q, k, v, g, beta, state)
    group = v.shape[1] // q.shape[1]
    q, k = (x.to(dtype).repeat_interleave(group, dim=1) for x in (q, k))
    v, decay, beta = v.to(dtype), g.to(dtype).exp(), beta.to(dtype)
    committed = gather_slots(state, slots, all_live=all_live).to(dtype)
    wide, o = v.new_zeros(tree.num_rows, *state.shape[1:]), torch.zeros_like(v)
    seq, parents, depth = tree.seq_of_row, tree.parents, tree.depth
    offsets = tree.cu_rows[seq.clamp(min=0)]
    for level in range(tree.max_depth + 1):
        rows = ((depth == level) & (seq >= 0)).nonzero().squeeze(1)
        before = committed[seq[rows]] if level == 0 else wide[offsets[rows] + parents[rows]]
        decayed = decay[rows][..., None, None] * before
        # Sums, not matrix-vector products: those add up 128 terms one by one, which costs the walk a factor of 3.
        error = v[rows] - (decayed * k[rows][..., None, :]).sum(-1)
        after = decayed + (beta[rows][..., None] * error)[..., None] * k[rows][..., None, :]
        wide[rows], o[rows] = after, (after * q[rows][..., None, :]).sum(-1)
    o = zero_inert(o, slots, tree, all_live=all_live)
    return Verified(o.to(out_dtype), Snapshots(wide.to(state.dtype, copy=True)))


def commit(state: Tensor, slots: Tensor, record: Record, path: PackedPath) -> None:
    """See `api.commit`."""
    all_live = check_slots(slots, state.shape[0])
    targets, live = written(slots, path, all_live=all_live)
    if not len(targets):
        return
    dtype, group = record.u.dtype, record.u.shape[1] // record.k.shape[1]
    rows = kept(path.active_rows, live)
    valid = None if path.is_even else rows < path.tree.num_rows
    rows = rows if valid is None else torch.where(valid, rows, 0)
    log_decay = record.decay_high.double() + record.decay_low.double()
    total = log_decay[kept(path.last_rows, live)]
    weights = total[:, None] - log_decay[rows]
    u, keys = record.u[rows], record.k[rows]
    if valid is not None:
        weights = torch.where(valid[..., None], weights, -torch.inf)
        # Padding rows are masked by value, not by weight alone: 0 * NaN would be NaN.
        u, keys = (torch.where(valid[..., None, None], x, 0) for x in (u, keys))
    u = u * weights.to(dtype).exp()[..., None]
    written_part = u.permute(0, 2, 3, 1).unflatten(1, (-1, group)) @ keys.permute(0, 2, 1, 3)[:, :, None]
    old = state.index_select(0, targets).to(dtype)
    after = total.to(dtype).exp()[..., None, None] * old + written_part.flatten(1, 2)
    state.index_copy_(0, targets, after.to(state.dtype))


def append(history: History, slots: Tensor, record: Record, path: PackedPath) -> None:
    """See `api.append`."""
    all_live = check_slots(slots, history.lengths.shape[0])
    targets, live = written(slots, path, all_live=all_live)
    if not len(targets):
        return
    rows = kept(path.active_rows, live)
    valid = rows < path.tree.num_rows
    taken = rows[valid]
    before = history.lengths[targets]
    seq, step = valid.nonzero(as_tuple=True)
    places = targets[seq], before[seq] + step
    log_decay = (
        _newest_decay(history, targets)[seq] + record.decay_high.double()[taken] + record.decay_low.double()[taken]
    )
    high = log_decay.to(history.decay_high.dtype)
    history.u[places] = record.u[taken].to(history.u.dtype)
    history.k[places] = record.k[taken].to(history.k.dtype)
    history.decay_high[places] = high
    history.decay_low[places] = (log_decay - high.double()).to(history.decay_low.dtype)
    history.lengths[targets] = before + valid.sum(dim=1)


def fold(state: Tensor, slots: Tensor, history: History) -> None:
    """See `api.fold`."""
    check_slots(slots, state.shape[0])
    targets = slots.long()[slots >= 0]
    targets = targets[history.lengths[targets] > 0]
    if not len(targets):
        return
    past = _past(history, targets)
    old = state[targets].unflatten(1, past.u.shape[1:3])
    folded = past.carried * old + (past.weights * past.u.transpose(-1, -2)) @ past.k
    state[targets] = folded.flatten(1, 2).to(state.dtype)
    history.lengths[targets] = 0


def _past(history: History, slots: Tensor) -> _Past:
    lengths = gather_slots(history.lengths, slots)
    used = torch.arange(history.num_rows, device=slots.device) < lengths[:, None]
    num_heads, at = history.k.shape[2], slots.clamp(min=0).long()
    newest = torch.where((slots >= 0)[:, None], _newest_decay(history, at), 0.0)
    to_newest = newest[:, None] - history.decay_high[at].double() - history.decay_low[at].double()
    weights = torch.where(used[..., None], to_newest, -torch.inf).exp()
    # Unused rows are masked by value, not by weight: 0 * NaN would be NaN.
    u, k = (torch.where(used[..., None, None], x[at].double(), 0.0) for x in (history.u, history.k))
    return _Past(
        u.unflatten(2, (num_heads, -1)).permute(0, 2, 3, 1, 4),
        k.permute(0, 2, 1, 3)[:, :, None],
        weights.unflatten(2, (num_heads, -1)).permute(0, 2, 3, 1)[..., None, :],
        newest.exp().unflatten(1, (num_heads, -1))[..., None, None],
    )


def _newest_decay(history: History, slots: Tensor) -> Float[Tensor, "A HV"]:
    """Return the log decay from each slot's checkpoint to its newest row, float64; 0 for an empty history."""
    lengths = history.lengths[slots]
    newest = (lengths - 1).clamp(min=0)
    log_decay = history.decay_high[slots, newest].double() + history.decay_low[slots, newest].double()
    return torch.where((lengths > 0)[:, None], log_decay, 0.0)


def commit_snapshots(state: Tensor, slots: Tensor, record: Snapshots, path: PackedPath) -> None:
    """See `api.commit_snapshots`."""
    all_live = check_slots(slots, state.shape[0])
    targets, live = written(slots, path, all_live=all_live)
    if len(targets):
        state.index_copy_(0, targets, record.states[kept(path.last_rows, live)].to(state.dtype))


def _dense(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, committed: Tensor, tree: PackedTree) -> _Dense:
    dtype = compute_dtype(q, k, v, g, beta, committed)
    num_heads = q.shape[1]

    def heads_first(x: Tensor) -> Tensor:
        dense = tree.to_dense(x).to(dtype)
        dense = dense.unflatten(2, (num_heads, -1))
        return dense.permute(0, 2, 3, 1, 4) if dense.ndim == 5 else dense.permute(0, 2, 3, 1)

    per_row = heads_first(g).double()
    log_decay = torch.where(tree.ancestors[:, None, None], per_row[..., None, :], 0.0).sum(-1)
    committed = committed.to(dtype).unflatten(1, (num_heads, -1))
    return _Dense(heads_first(q), heads_first(k), heads_first(v), log_decay, heads_first(beta), committed)


def _packed(dense: Tensor, tree: PackedTree) -> Tensor:
    """Bring [B, H, J, T, ...] to packed rows [N, HV, ...]."""
    rows_first = dense.movedim(3, 1)
    return tree.to_packed(rows_first.flatten(2, 3))
