"""The serving entry of the gated delta rule: what the last step accepted, and this step's trees, in one launch."""

import torch

from treewy.errors import ShapeError
from treewy.ops.dispatch import Implementations, compute_dtype, select
from treewy.ops.gdn import composed
from treewy.ops.gdn.checks import check_history, check_record, check_state
from treewy.ops.gdn.records import Prior, Projections, Record, Verified
from treewy.ops.memory import check_apart
from treewy.ops.paths import check_path_shape
from treewy.packed import TreeTables
from treewy.shapes import Float, Int, Tensor

# Keys that stay where they are need no copy.
SAME = (("out.record.k", "x.k"),)


def commit_verify(
    x: Projections,
    state: Float[Tensor, "S HV V K"],
    slots: Int[Tensor, "B"],
    tree: TreeTables,
    *,
    prior: Prior | None = None,
    exact: bool = False,
    out: Verified | None = None,
    backend: str | None = None,
    checked: bool = False,
) -> Verified:
    """Commit the last step's paths, then run the gated delta rule down every root path of this step's trees.

    The prior rows of a sequence are its history, then its path. `prior.fold` says what becomes of them. Where it is
    not 0 they go into the state, rounded once, and the tree is verified from there. Where it is 0 the state stays, the tree
    is verified from state and prior rows, and the path's rows are appended to the history. Either way
    `history.lengths` stays as it was: all layers of a model share one, so whoever runs the step moves it, once, after
    the last layer. A sequence without prior rows changes nothing, bit for bit.

    Norms of q and k, the scale K ** -0.5 of q and the gates are taken here, in float32.

    Args:
        x: The rows as convolution and projections leave them.
        state: Pool of committed states.
        slots: Pool slot of each sequence, no slot twice; -1 makes its rows inert: zeros out, nothing read or written.
        tree: The trees. Rows before the first and after the last are inert, and so are a tree's rows from place `max_rows`
            on and what `tree.tables` found to be no tree: zeros out. A sequence may have no rows: then its prior rows are
            committed and that is all.
        prior: Committed rows that the state lacks; None if it lacks none. `prior.record` must not be `out.record`: a
            caller alternates two. Nothing of it may overlap `out`, a history or the state.
        exact: Whether products, solve and record keep float32's accuracy. If not, a kernel may run products in bfloat16
            or tf32; eager and reference always keep it.
        out: Buffers to write into, apart from all else that the step works on, but keys of the record may be x.k itself.
            Default: fresh ones. A fresh `o` has the dtype of x.v. A fresh record is float32, or bfloat16 (u) where the state
            is bfloat16 and `exact` is not set.
        backend: "eager" (default), "reference", "triton" or "cuda": bfloat16 rows of K = V = 128, up to 64 rows per tree
            and 80 prior rows (places of a history and columns of the path's table), and the fastest there. Kernels cannot
            check slots, which lie on the device: to them a slot outside the pool is inert, a place outside the histories
            holds none, of a path that its history has no room for nothing is appended, and a row that the record lacks
            counts for one that it has.

        checked: Whether the caller has passed these buffers before, of these shapes: then nothing is checked here, which
            takes longer than some steps do. What an implementation itself must know of its operands it still looks at.

    Returns:
        `out`, or the fresh buffers. The record keeps keys as they came, and pseudo-values times their keys' inverse norm;
        its log decays count from the newest prior row. It is unspecified on inert rows.

    Raises:
        ShapeError: operands do not fit each other, or buffers overlap; a path has a row that its record lacks (eager,
            reference).
        CapacityError: a slot or a place is out of range or taken twice, or a history has no room for its path (eager, reference).

    Source: eqs. 1, 2, 5-8 and 13-15 of docs/theory.md.
    """
    if not checked:
        _check(x, state, slots, tree)
        if prior is not None:
            _check_prior(prior, state, slots, x.k.shape[1])
    if out is None:
        out = _fresh(x, state, exact=exact)
    if not checked:
        _check_out(out, x, state)
        _check_apart(out, x, state, prior)
        _check_devices(state, x, slots, tree, prior, out)
    from treewy.ops.gdn import eager, reference

    implementation = select(
        "gdn.commit_verify", Implementations(eager, reference, "treewy.ops.gdn.kernels", "treewy.ops.gdn.cuda"), backend
    )
    if implementation in (eager, reference):
        composed.commit_verify(implementation, x, state, slots, tree, prior, out)
    else:
        implementation.commit_verify(x, state, slots, tree, prior, out, exact)
    return out


def _fresh(x: Projections, state: Tensor, *, exact: bool) -> Verified:
    wide = compute_dtype(x.q, x.k, x.v, state)
    dtype = torch.bfloat16 if state.dtype == torch.bfloat16 and not exact else wide
    decay = torch.empty(x.a.shape, dtype=wide, device=x.v.device)
    u = torch.empty(x.v.shape, dtype=dtype, device=x.v.device)
    k = torch.empty(x.k.shape, dtype=x.k.dtype, device=x.k.device)
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    return Verified(o, Record(u, k, decay, torch.empty_like(decay)))


def _check(x: Projections, state: Tensor, slots: Tensor, tree: TreeTables) -> None:
    check_state(state)
    rows, value_heads = tree.num_rows, state.shape[1]
    heads = x.k.shape[1] if x.k.ndim == 3 else 0
    expected = {
        "q": (rows, heads, state.shape[3]),
        "k": (rows, heads, state.shape[3]),
        "v": (rows, value_heads, state.shape[2]),
        "a": (rows, value_heads),
        "b": (rows, value_heads),
        "a_log": (value_heads,),
        "dt_bias": (value_heads,),
    }
    given = {name: tuple(getattr(x, name).shape) for name in expected}
    if given != expected or heads == 0 or value_heads % heads:
        raise ShapeError(
            f"Projections must fit a tree of {rows} rows and a state {tuple(state.shape)}, {expected}, with HV a multiple "
            f"of H; got {given}. Pack projections and tree from the same batch."
        )
    if tuple(slots.shape) != (tree.num_seqs,):
        raise ShapeError(
            f"slots must have one entry per sequence, {tree.num_seqs}; got shape {tuple(slots.shape)}. Pass the slots of "
            "the sequences whose trees these are."
        )


def _check_devices(state: Tensor, *operands: object) -> None:
    """Check that every tensor in the operands lies where the state does: kernels are handed bare addresses."""
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            if operand.device != state.device:
                raise ShapeError(
                    f"All operands must lie on one device; the state is on {state.device} and a tensor of shape "
                    f"{tuple(operand.shape)} on {operand.device}. Move them first."
                )
        elif isinstance(operand, tuple):
            _check_devices(state, *operand)


def _check_prior(prior: Prior, state: Tensor, slots: Tensor, num_heads: int) -> None:
    batch = tuple(slots.shape)
    if tuple(prior.fold.shape) != batch:
        raise ShapeError(
            f"fold must have one entry per sequence, {batch[0]}; got shape {tuple(prior.fold.shape)}. Fill it with ones "
            "where there is no history."
        )
    if prior.held is not None and tuple(prior.held.shape) != batch:
        raise ShapeError(
            f"held must have one entry per sequence, {batch[0]}; got shape {tuple(prior.held.shape)}. Gather "
            "history.lengths at the sequences' places, or leave it out."
        )
    if prior.places is not None and tuple(prior.places.shape) != batch:
        raise ShapeError(
            f"places must have one entry per sequence, {batch[0]}; got shape {tuple(prior.places.shape)}. Fill it with -1 "
            "where a sequence has no history."
        )
    if (prior.record is None) != (prior.path is None):
        raise ShapeError(
            f"A pending path must come with its record; got record {prior.record is not None} and path "
            f"{prior.path is not None}. Pass both, or None for both."
        )
    if prior.history is not None:
        num_histories = state.shape[0] if prior.places is None else prior.history.lengths.shape[0]
        check_history(prior.history, (num_histories, *state.shape[1:]), num_heads)
    if prior.record is not None and prior.path is not None:
        check_record(prior.record, tuple(state.shape), num_heads, prior.record.u.shape[0])
        check_path_shape(prior.path, batch[0])


def _check_out(out: Verified, x: Projections, state: Tensor) -> None:
    record = out.record
    if not isinstance(record, Record) or out.o.shape != x.v.shape:
        raise ShapeError(
            f"out must hold o {tuple(x.v.shape)} and a Record; got {tuple(out.o.shape)} and {type(record).__name__}. "
            "Make it for this many rows."
        )
    check_record(record, tuple(state.shape), x.k.shape[1], x.v.shape[0])


def _check_apart(out: Verified, x: Projections, state: Tensor, prior: Prior | None) -> None:
    written = {"state": state, "out.o": out.o} | _named("out.record", out.record)
    read = {f"x.{name}": part for name, part in zip("qkvab", x[:5], strict=True)}
    if prior is not None:
        written |= _named("history", prior.history)
        read |= _named("prior.record", prior.record)
    check_apart(written, read, same=SAME)


def _named(owner: str, rows: tuple | None) -> dict[str, Tensor]:
    """Return pseudo-values, keys and decays by name."""
    return {} if rows is None else {f"{owner}.{name}": getattr(rows, name) for name in Record._fields}
