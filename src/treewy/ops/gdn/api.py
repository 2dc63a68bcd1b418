"""Entry points of the gated delta rule on trees, with their checks."""

import torch

from treewy.errors import CapacityError, ShapeError
from treewy.ops.dispatch import Implementations, select
from treewy.ops.gdn.checks import check_history, check_record, check_state
from treewy.ops.gdn.records import History, Record, Snapshots, Verified
from treewy.ops.slots import check_slots, gather_slots
from treewy.packed import PackedPath, PackedTree
from treewy.shapes import Bool, Float, Int, Tensor


def verify(
    q: Float[Tensor, "N H K"],
    k: Float[Tensor, "N H K"],
    v: Float[Tensor, "N HV V"],
    g: Float[Tensor, "N HV"],
    beta: Float[Tensor, "N HV"],
    state: Float[Tensor, "S HV V K"],
    slots: Int[Tensor, "B"],
    tree: PackedTree,
    *,
    history: History | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Verified:
    """Run the gated delta rule down every root path of each sequence's draft tree, in closed form.

    Args:
        q: Queries, normalised and scaled by K ** -0.5.
        k: Keys, unit length.
        v: Values; value head j uses key head j // (HV / H).
        g: Log decay, natural log, at most 0.
        beta: Write strength, in (0, 2).
        state: Pool of committed states. Read only.
        slots: Pool slot of each sequence; -1 makes its rows inert: zeros out, nothing read.
        tree: The packed trees; rows past them are inert too.
        history: Committed rows that the state lacks; None if it lacks none. Read only. The record counts its log decays
            from the newest of them, so it can be appended to the history, or committed to the state once that is folded.
        out_dtype: Dtype of `o`; default: v's. The record stays in the compute dtype.
        backend: "eager" (default), "reference" or "triton".

    Raises:
        ShapeError: operands do not fit the tree, the state or the history.

    Source: eqs. 5-8 and 14 of docs/theory.md; arXiv 2608.20961, section 3.
    """
    _check(q, k, v, g, beta, state, slots, tree)
    if history is not None:
        check_history(history, tuple(state.shape), num_heads=k.shape[1])
    implementation = _implementation("gdn.verify", backend)
    return implementation.verify(q, k, v, g, beta, state, slots, tree, out_dtype or v.dtype, history)


def verify_snapshots(
    q: Float[Tensor, "N H K"],
    k: Float[Tensor, "N H K"],
    v: Float[Tensor, "N HV V"],
    g: Float[Tensor, "N HV"],
    beta: Float[Tensor, "N HV"],
    state: Float[Tensor, "S HV V K"],
    slots: Int[Tensor, "B"],
    tree: PackedTree,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Verified:
    """Walk the recurrence level by level and keep the whole state of every row, in the state's dtype.

    Arguments and errors as in `verify`. The walk itself runs in the compute dtype; each snapshot is rounded once.

    Source: eq. 3 of docs/theory.md, the definition.
    """
    _check(q, k, v, g, beta, state, slots, tree)
    implementation = _implementation("gdn.verify_snapshots", backend)
    return implementation.verify_snapshots(q, k, v, g, beta, state, slots, tree, out_dtype or v.dtype)


def commit(
    state: Float[Tensor, "S HV V K"],
    slots: Int[Tensor, "B"],
    record: Record,
    path: PackedPath,
    *,
    backend: str | None = None,
) -> None:
    """Write the state of each path's last node into its slot; empty paths and slot -1 change nothing, bit for bit.

    Source: eq. 6 of docs/theory.md.
    """
    _check_commit(state, slots, path)
    check_record(record, tuple(state.shape), record.k.shape[1], path.tree.num_rows)
    _implementation("gdn.commit", backend).commit(state, slots, record, path)


def commit_snapshots(
    state: Float[Tensor, "S HV V K"],
    slots: Int[Tensor, "B"],
    record: Snapshots,
    path: PackedPath,
    *,
    backend: str | None = None,
) -> None:
    """Copy the snapshot of each path's last node into its slot; empty paths and slot -1 change nothing."""
    _check_commit(state, slots, path)
    if record.states.shape != (path.tree.num_rows, *state.shape[1:]):
        raise ShapeError(
            f"Snapshots must be {(path.tree.num_rows, *state.shape[1:])} for this tree and state; got "
            f"{tuple(record.states.shape)}. Commit what verify_snapshots returned for this tree."
        )
    _implementation("gdn.commit_snapshots", backend).commit_snapshots(state, slots, record, path)


def append(
    history: History,
    slots: Int[Tensor, "B"],
    record: Record,
    path: PackedPath,
    *,
    backend: str | None = None,
) -> None:
    """Add each path's rows to its slot's history, in path order; empty paths and slot -1 change nothing, bit for bit.

    Raises:
        CapacityError: a history has no room for its path; none is written then. `fold` makes room.

    Source: eq. 15 of docs/theory.md.
    """
    _check_append(history, slots, record, path)
    _implementation("gdn.append", backend).append(history, slots, record, path)


def fold(
    state: Float[Tensor, "S HV V K"],
    slots: Int[Tensor, "B"],
    history: History,
    *,
    backend: str | None = None,
) -> None:
    """Move what each slot's history holds into its state; slot -1 and empty histories change nothing, bit for bit.

    Source: eq. 13 of docs/theory.md.
    """
    check_state(state)
    num_heads = history.k.shape[2] if history.k.ndim == 4 else 0
    check_history(history, tuple(state.shape), num_heads)
    _implementation("gdn.fold", backend).fold(state, slots, history)


def fits(history: History, slots: Int[Tensor, "B"], path: PackedPath) -> Bool[Tensor, "B"]:
    """Return which paths `append` has room for; slot -1 and empty paths need none."""
    check_slots(slots, history.lengths.shape[0])
    _check_one_slot_each(slots, path)
    after = gather_slots(history.lengths, slots) + path.valid.sum(dim=1)
    return (after <= history.num_rows) | (slots < 0)


def _implementation(op: str, backend: str | None):
    from treewy.ops.gdn import eager, reference

    return select(op, Implementations(eager, reference, "treewy.ops.gdn.kernels"), backend)


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor, tree: PackedTree
) -> None:
    rows = tree.num_rows
    if q.ndim != 3 or v.ndim != 3 or state.ndim != 4:
        raise ShapeError(
            f"q, k and v must be [rows, heads, dim] and state [slots, heads, V, K]; got q {tuple(q.shape)}, "
            f"v {tuple(v.shape)}, state {tuple(state.shape)}. Drop the batch axis: the rows of all sequences share one."
        )
    heads, value_heads = q.shape[1], v.shape[1]
    expected = {
        "q": (q, (rows, heads, state.shape[3])),
        "k": (k, (rows, heads, state.shape[3])),
        "v": (v, (rows, value_heads, state.shape[2])),
        "g": (g, (rows, value_heads)),
        "beta": (beta, (rows, value_heads)),
        "state": (state, (state.shape[0], value_heads, state.shape[2], state.shape[3])),
        "slots": (slots, (tree.num_seqs,)),
    }
    for name, (operand, shape) in expected.items():
        if tuple(operand.shape) != shape:
            raise ShapeError(
                f"{name} must have shape {shape} for a tree of {rows} rows and {tree.num_seqs} sequences; "
                f"got {tuple(operand.shape)}. Pack operands and tree from the same batch."
            )
    if heads == 0 or value_heads % heads:
        raise ShapeError(
            f"Value heads must be a multiple of key heads; got HV={value_heads}, H={heads}. "
            "Value head j reads key head j // (HV / H)."
        )


def _check_append(history: History, slots: Tensor, record: Record, path: PackedPath) -> None:
    if history.u.ndim != 4 or history.k.ndim != 4:
        raise ShapeError(
            f"A history's u and k must be [slots, rows, heads, dim]; got {tuple(history.u.shape)} and "
            f"{tuple(history.k.shape)}. Pass the history of one layer."
        )
    num_heads, state_shape = history.k.shape[2], (history.u.shape[0], *history.u.shape[2:], history.k.shape[3])
    check_history(history, state_shape, num_heads)
    check_record(record, state_shape, num_heads, path.tree.num_rows)
    room = fits(history, slots, path)
    if not bool(room.all()):
        seq = int((~room).nonzero()[0])
        raise CapacityError(
            f"A history must have room for its path; slot {int(slots[seq])} holds {int(history.lengths[slots[seq]])} of "
            f"{history.num_rows} rows and the path has {path.lengths[seq]}. Fold it first."
        )


def _check_one_slot_each(slots: Tensor, path: PackedPath) -> None:
    if tuple(slots.shape) != (path.tree.num_seqs,):
        raise ShapeError(
            f"slots must have one entry per sequence, {path.tree.num_seqs}; got shape {tuple(slots.shape)}. "
            "Use the slots that were verified."
        )


def _check_commit(state: Tensor, slots: Tensor, path: PackedPath) -> None:
    _check_one_slot_each(slots, path)
    check_state(state)
