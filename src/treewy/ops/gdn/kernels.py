"""Gated delta rule on trees in Triton: one kernel behind every entry, whatever is to be done with prior rows.

A row's result depends on its own sequence only. Rows that are not finite spoil themselves and their descendants.
"""

import torch
import triton
import triton.language as tl

from treewy.errors import BackendError, ShapeError, UnsupportedError
from treewy.ops.gdn import triton_args as args
from treewy.ops.gdn.records import History, Prior, Projections, Record, Snapshots, Verified
from treewy.ops.gdn.triton_state import ALWAYS, BY_TABLE, NEVER
from treewy.ops.gdn.triton_step import gdn_lengths, gdn_step
from treewy.ops.launch import interpreted, launch, refuse_interpreted_bfloat16
from treewy.ops.slots import INERT, check_slots
from treewy.ops.tree.api import empty as empty_trees
from treewy.ops.tree.api import empty_paths
from treewy.ops.warmup import Facts
from treewy.packed import PackedPath, PackedTree, TreeTables
from treewy.shapes import Tensor

MAX_ROWS = 128
MAX_DIM = 256


def commit_verify(
    x: Projections,
    state: Tensor,
    slots: Tensor,
    tree: TreeTables,
    prior: Prior | None,
    out: Verified,
    exact: bool,
) -> None:
    """See `serving.commit_verify`."""
    if x.beta_scale <= 0:
        raise UnsupportedError(f"Kernels must have a beta_scale above 0; got {x.beta_scale}. Use backend='eager'.")
    rows = args.rows_args(x)
    prior = prior or Prior(None, None, None, slots)
    fold = BY_TABLE if prior.history is not None else ALWAYS
    _step(state, slots, rows, tree, out, prior, fold, exact=exact, scale=x.k.shape[2] ** -0.5, beta=x.beta_scale)


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
    """See `api.verify`. Products keep float32's accuracy."""
    check_slots(slots, state.shape[0])
    decays = [torch.empty(g.shape, dtype=torch.float32, device=g.device) for _ in range(2)]
    record = Record(torch.empty(v.shape, dtype=torch.float32, device=v.device), k.float(), *decays)
    out = Verified(torch.empty(v.shape, dtype=out_dtype, device=v.device), record)
    rows = args.finished_args(q, k, v, g, beta)
    _step(state, slots, rows, tree.tables, out, Prior(history, None, None, slots), NEVER, exact=True, finished=True)
    return out


def commit(state: Tensor, slots: Tensor, record: Record, path: PackedPath) -> None:
    """See `api.commit`."""
    check_slots(slots, state.shape[0])
    _step(state, slots, None, None, None, Prior(None, record, path.tables, slots), ALWAYS, exact=True)


def append(history: History, slots: Tensor, record: Record, path: PackedPath) -> None:
    """See `api.append`."""
    check_slots(slots, history.lengths.shape[0])
    # No row is read from the state: it only says how large one is.
    like = history.u.new_empty(()).expand(*history.u.shape[:1], *history.u.shape[2:], history.k.shape[3])
    _step(like, slots, None, None, None, Prior(history, record, path.tables, slots), NEVER, exact=True)
    _move_lengths(history, slots, path.tables.lengths)


def fold(state: Tensor, slots: Tensor, history: History) -> None:
    """See `api.fold`."""
    check_slots(slots, state.shape[0])
    _step(state, slots, None, None, None, Prior(history, None, None, slots), ALWAYS, exact=True)
    _move_lengths(history, slots, None)


def verify_snapshots(*operands: object) -> Verified:
    """Refuse: a state per row is what the kernels are there to avoid."""
    raise BackendError(
        "A backend must have the op; there is no Triton kernel of gdn.verify_snapshots. Use backend='eager'."
    )


def commit_snapshots(state: Tensor, slots: Tensor, record: Snapshots, path: PackedPath) -> None:
    """Refuse: there are no snapshots without `verify_snapshots`."""
    raise BackendError(
        "A backend must have the op; there is no Triton kernel of gdn.commit_snapshots. Use backend='eager'."
    )


def warm(facts: Facts) -> None:
    """Compile the serving entry for every bucket, on sequences without a slot.

    With no prior rows, with a path, and with a path and a history where there are any; history rows looked up or `held`.
    Dims that the kernels do not have are nothing to compile, nor is anything where another backend runs the delta rule.
    """
    if facts.gdn_backend != "triton" or not _has_dims(facts.key_dim, facts.value_dim):
        return
    x, device = _warm_rows(facts), facts.device
    shape = (1, facts.num_value_heads, facts.value_dim, facts.key_dim)
    state = torch.zeros(shape, dtype=facts.state_dtype, device=device)
    histories: list[History | None] = [None]
    if facts.history_capacity:
        kept = _warm_record(facts, 1, facts.history_capacity)
        histories.append(History(*kept, torch.zeros(1, dtype=facts.index_dtype, device=device)))
    out = Verified(torch.zeros_like(x.v, memory_format=torch.contiguous_format), _warm_record(facts, 1))
    for num_seqs, max_rows, max_path in facts.buckets:
        slots = torch.full((num_seqs,), INERT, dtype=facts.index_dtype, device=device)
        tree, path = empty_trees(num_seqs, 1, max_rows, device), empty_paths(num_seqs, max_path, device)
        fold, pending = torch.zeros_like(path.lengths), _warm_record(facts, 1)
        priors = [None, *(Prior(history, pending, path, fold, held) for history in histories for held in (None, fold))]
        for prior in priors:
            commit_verify(x, state, slots, tree, prior, out, facts.exact)


def _warm_rows(facts: Facts) -> Projections:
    """Return a row as the convolution leaves it: q, k and v side by side."""
    sizes = [facts.num_heads * facts.key_dim] * 2 + [facts.num_value_heads * facts.value_dim]
    q, k, v = torch.zeros(1, sum(sizes), dtype=facts.dtype, device=facts.device).split(sizes, dim=1)
    heads, value_heads = (facts.num_heads, facts.key_dim), (facts.num_value_heads, facts.value_dim)
    gates = torch.zeros(1, facts.num_value_heads, dtype=facts.gate_dtype or facts.dtype, device=facts.device)
    of_heads = torch.zeros(facts.num_value_heads, dtype=torch.float32, device=facts.device)
    q, k, v = q.unflatten(1, heads), k.unflatten(1, heads), v.unflatten(1, value_heads)
    return Projections(q, k, v, gates, gates, of_heads, of_heads, facts.beta_scale)


def _warm_record(facts: Facts, *leading: int) -> Record:
    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*leading, *shape, dtype=dtype, device=facts.device)

    u = zeros(facts.num_value_heads, facts.value_dim, dtype=facts.record_dtype)
    k = zeros(facts.num_heads, facts.key_dim, dtype=facts.dtype)
    return Record(u, k, *(zeros(facts.num_value_heads, dtype=torch.float32) for _ in range(2)))


def _step(
    state: Tensor,
    slots: Tensor,
    rows: args.Rows | None,
    tree: TreeTables | None,
    out: Verified | None,
    prior: Prior,
    fold: tl.constexpr,
    *,
    exact: bool,
    finished: bool = False,
    scale: float = 1.0,
    beta: float = 1.0,
) -> None:
    history, pending, path = prior.history, prior.record, prior.path
    if path is not None and pending is not None and 0 in (path.rows.shape[1], pending.u.shape[0]):
        pending = path = None
    if history is None and path is None:
        if tree is None:
            return
        fold = NEVER
    _check(state, rows, out, history, pending)
    tables = {"slots": slots, "prior.fold": prior.fold, "prior.held": prior.held, "prior.places": prior.places}
    args.check_layout(tables | ({} if path is None else {"path.rows": path.rows, "path.lengths": path.lengths}), 0)
    some_k = next(part.k for part in (rows, history, pending) if part is not None)
    num_heads = some_k.shape[-2]
    size = _sizes(state, num_heads, tree, rows, finished, fold, exact, scale, beta)
    programs = -(-state.shape[2] // size.BV.value) * state.shape[1]
    launch(
        gdn_step,
        ((len(slots) + (tree is not None)) * programs,),
        args.state_args(state),
        slots,
        rows,
        None if tree is None else tree.cu_rows,
        None if tree is None else tree.ancestors,
        None if out is None else args.Out(out.o, out.o.stride(0)),
        None if out is None else args.record_args(_record(out)),
        None if history is None else args.history_args(history),
        None if pending is None else args.record_args(pending),
        None if path is None else path.rows,
        None if path is None else path.lengths,
        prior.fold,
        prior.held,
        slots if prior.places is None else prior.places,
        len(slots),
        0 if tree is None else tree.num_rows,
        0 if tree is None else tree.max_rows,
        state.shape[0],
        0 if history is None else history.lengths.shape[0],
        0 if tree is None else tree.ancestors.shape[1],
        0 if path is None else path.rows.shape[1],
        0 if pending is None else pending.u.shape[0],
        0 if history is None else history.num_rows,
        size,
        num_warps=_num_warps(size),
        num_stages=1,
    )


def _record(out: Verified) -> Record:
    assert isinstance(out.record, Record)
    return out.record


def _move_lengths(history: History, slots: Tensor, by: Tensor | None) -> None:
    grid = (-(-len(slots) // 128),)
    launch(gdn_lengths, grid, history.lengths, slots, by, len(slots), history.lengths.shape[0], BLOCK=128)


def _sizes(
    state: Tensor,
    num_heads: int,
    tree: TreeTables | None,
    rows: args.Rows | None,
    finished: bool,
    fold: tl.constexpr,
    exact: bool,
    scale: float,
    beta: float,
) -> args.Sizes:
    value_heads, value_dim, key_dim = state.shape[1:]
    largest = 0 if tree is None else tree.max_rows
    if largest > MAX_ROWS or not _has_dims(key_dim, value_dim):
        raise ShapeError(
            f"Kernels must have trees of at most {MAX_ROWS} rows, K and V of 16 to {MAX_DIM}, and K a multiple of 16; got "
            f"max_rows={largest}, K={key_dim}, V={value_dim}. Use backend='eager'."
        )
    block_rows = max(16, triton.next_power_of_2(largest))
    wide = rows is not None and rows.q.dtype == torch.float32
    most = 32 if block_rows == MAX_ROWS and wide else 64
    block_keys = min(most, key_dim & -key_dim)
    block_values = min(64, triton.next_power_of_2(value_dim))
    # Of float32 operands: as many bfloat16 or tf32 parts of each as keep all, or most, of its bits. Grams keep more.
    precisions = ("ieee", "ieee") if interpreted() else ("bf16x6", "bf16x6") if exact else ("tf32", "tf32x3")
    sizes = (num_heads, value_heads, key_dim, value_dim, block_rows, block_keys, block_values, finished)
    return args.Sizes(*map(tl.constexpr, (*sizes, fold.value, exact, *precisions, scale, beta)))


def _has_dims(key_dim: int, value_dim: int) -> bool:
    return 16 <= key_dim <= MAX_DIM and 16 <= value_dim <= MAX_DIM and key_dim % 16 == 0


def _num_warps(size: args.Sizes) -> int:
    return 8 if size.BT.value >= 64 else 4


def _check(
    state: Tensor,
    rows: args.Rows | None,
    out: Verified | None,
    history: History | None,
    pending: Record | None,
) -> None:
    floats: dict[str, Tensor | None] = {"state": state}
    if rows is not None and out is not None:
        floats |= {name: getattr(rows, name) for name in ("q", "k", "v", "a", "b", "a_log", "dt_bias")} | {"o": out.o}
        args.check_layout({"q": rows.q, "k": rows.k, "v": rows.v}, 2)
        args.check_layout({"a_log": rows.a_log, "dt_bias": rows.dt_bias}, 0)
        _check_record("out.record", _record(out), floats)
        args.check_layout({"o": out.o}, 1)
        refuse_interpreted_bfloat16(state, rows.q, rows.k)
    if pending is not None:
        _check_record("record", pending, floats)
        refuse_interpreted_bfloat16(pending.k)
    if history is not None:
        named = {f"history.{name}": part for name, part in zip(Record._fields, history[:4], strict=True)}
        args.check_layout({"history.u": history.u, "history.k": history.k}, 3)
        args.check_layout({"history.decay_high": history.decay_high, "history.decay_low": history.decay_low}, 1)
        floats |= named
        refuse_interpreted_bfloat16(history.k)
        if pending is not None and pending.k.dtype != history.k.dtype:
            raise UnsupportedError(
                f"Kernels must find keys of history and record in one dtype; got {history.k.dtype} and {pending.k.dtype}. "
                "Make both for the same layer."
            )
    args.check_dtypes(floats)
    if rows is not None and rows.q.dtype != rows.k.dtype:
        raise UnsupportedError(
            f"Kernels must be given q and k of one dtype; got {rows.q.dtype} and {rows.k.dtype}. Cast one of them."
        )


def _check_record(what: str, record: Record, floats: dict[str, Tensor | None]) -> None:
    named = {f"{what}.{name}": part for name, part in zip(Record._fields, record, strict=True)}
    args.check_layout(named, 1)
    floats |= named
