"""From tensors to the kernel's parameters, with the checks of what it can take."""

import ctypes

import torch

from treewy.errors import ShapeError, UnsupportedError
from treewy.ops.gdn.cuda.variant import DIM, Variant, choose, kernel
from treewy.ops.gdn.records import Prior, Projections, Record, Verified
from treewy.packed import TreeTables
from treewy.shapes import Tensor

POINTERS = (
    *("q", "k", "v", "a", "b", "a_log", "dt_bias", "state", "slots", "cu_rows", "ancestors"),
    *("hist_u", "hist_k", "hist_high", "hist_low", "hist_len", "held"),
    *("rec_u", "rec_k", "rec_high", "rec_low", "path_rows", "path_len", "fold"),
    *("o", "u_out", "k_out", "high_out", "low_out"),
)
STRIDES = (
    *("q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "a_row", "b_row", "state_slot", "state_head"),
    *("hu_slot", "hu_row", "hu_head", "hk_slot", "hk_row", "hk_head", "hg_slot", "hg_row", "hg_head"),
    *("ru_row", "ru_head", "rk_row", "rk_head", "rg_row", "rg_head"),
    *("o_row", "o_head", "uo_row", "uo_head", "ko_row", "ko_head", "go_row", "go_head"),
)
COUNTS = (
    "num_seqs",
    "num_heads",
    "group",
    "num_slots",
    "words",
    "path_stride",
    "capacity",
    "gates_f32",
    "group_inverse",
)


class Params(ctypes.Structure):
    """`Params` of step.cu, field by field."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in POINTERS]
        + [(name, ctypes.c_int64) for name in STRIDES]
        + [(name, ctypes.c_int32) for name in COUNTS]
        + [("beta_scale", ctypes.c_float)]
    )


def commit_verify(
    x: Projections,
    state: Tensor,
    slots: Tensor,
    tree: TreeTables,
    *,
    prior: Prior | None = None,
    exact: bool = False,
    out: Verified | None = None,
    variant: Variant | None = None,
) -> Verified:
    """See `serving.commit_verify`; `variant` overrides the choice, for measurements."""
    check(x, state, slots, tree, prior)
    out = out if out is not None else _buffers(x, state, exact=exact)
    record = out.record
    assert isinstance(record, Record)
    chosen = variant or choose(
        max_rows=tree.max_rows,
        max_prior=_max_prior(prior),
        state=state.dtype,
        u=record.u.dtype,
        exact=exact,
        num_heads=tree.num_seqs * state.shape[1],
    )
    group = state.shape[1] // x.k.shape[1]
    # head // group as a product: exact for any number of heads there is.
    inverse = 2**16 // group + 1
    params = Params(num_seqs=tree.num_seqs, num_heads=state.shape[1], group=group, group_inverse=inverse)
    _set_operands(params, x, state, slots, tree)
    keep = _set_prior(params, prior)
    _set_out(params, x, out.o, record)
    grid = (state.shape[1] * chosen.value_blocks, tree.num_seqs)
    with torch.cuda.device(state.device):
        kernel(chosen, state.device.index or 0).launch(grid, chosen.num_threads, params)
    del keep  # tensors the parameters point at, alive until the launch
    return out


def check(x: Projections, state: Tensor, slots: Tensor, tree: TreeTables, prior: Prior | None) -> None:
    """Refuse what the kernel was not written for.

    Raises:
        UnsupportedError: other head dims or dtypes.
        ShapeError: a layout whose last axis is not contiguous.
    """
    if state.shape[2:] != (DIM, DIM) or x.k.shape[2] != DIM or x.v.shape[2] != DIM:
        raise UnsupportedError(
            f"The CUDA kernel takes heads of {DIM} keys and {DIM} values; got state {tuple(state.shape)}. "
            "Use backend='triton'."
        )
    if any(y.dtype != torch.bfloat16 for y in (x.q, x.k, x.v)):
        raise UnsupportedError(
            f"The CUDA kernel takes bfloat16 q, k and v; got {x.q.dtype}, {x.k.dtype}, {x.v.dtype}. Use backend='triton'."
        )
    if state.dtype not in (torch.float32, torch.bfloat16) or x.a.dtype != x.b.dtype:
        raise UnsupportedError(
            f"The CUDA kernel takes float32 or bfloat16 states, and a and b of one dtype; got state {state.dtype}, "
            f"a {x.a.dtype}, b {x.b.dtype}. Use backend='triton'."
        )
    if state.stride()[2:] != (DIM, 1):
        raise ShapeError(
            f"The CUDA kernel takes states whose [V, K] matrices are contiguous; got strides {state.stride()}. "
            "Use backend='triton' for other layouts."
        )
    for name, y in (("q", x.q), ("k", x.k), ("v", x.v)):
        if y.stride(2) != 1 or y.stride(0) % 8 or y.stride(1) % 8 or y.data_ptr() % 16:
            raise ShapeError(
                f"The CUDA kernel reads rows 16 bytes at a time; {name} has strides {y.stride()} and starts at "
                f"{y.data_ptr() % 16} past a multiple of 16. Make it contiguous."
            )
    given = (None, None) if prior is None else (prior.fold, prior.held)
    for name, y in (("slots", slots), ("history lengths", _lengths(prior)), ("fold", given[0]), ("held", given[1])):
        if y is not None and y.dtype != torch.int32:
            raise UnsupportedError(
                f"The CUDA kernel takes int32 {name}; got {y.dtype}. Convert them once, outside the step."
            )


def _lengths(prior: Prior | None) -> Tensor | None:
    return None if prior is None or prior.history is None else prior.history.lengths


def _max_prior(prior: Prior | None) -> int:
    if prior is None:
        return 0
    rows = 0 if prior.history is None else prior.history.num_rows
    return rows + (0 if prior.path is None else prior.path.rows.shape[1])


def _buffers(x: Projections, state: Tensor, *, exact: bool) -> Verified:
    narrow = state.dtype == torch.bfloat16 and not exact
    u = torch.empty(x.v.shape, dtype=torch.bfloat16 if narrow else torch.float32, device=x.v.device)
    high = torch.empty(x.v.shape[:2], dtype=torch.float32, device=x.v.device)
    record = Record(u, torch.empty(x.k.shape, dtype=x.k.dtype, device=x.k.device), high, torch.empty_like(high))
    # Rows past the trees belong to no program.
    return Verified(torch.zeros(x.v.shape, dtype=x.v.dtype, device=x.v.device), record)


def _set_operands(params: Params, x: Projections, state: Tensor, slots: Tensor, tree: TreeTables) -> None:
    for name, y in (("q", x.q), ("k", x.k), ("v", x.v), ("a", x.a), ("b", x.b), ("a_log", x.a_log)):
        setattr(params, name, y.data_ptr())
    for name, y in (("dt_bias", x.dt_bias), ("state", state), ("slots", slots), ("cu_rows", tree.cu_rows)):
        setattr(params, name, y.data_ptr())
    params.ancestors = tree.ancestors.data_ptr()
    (params.q_row, params.q_head), (params.k_row, params.k_head) = x.q.stride()[:2], x.k.stride()[:2]
    (params.v_row, params.v_head), (params.a_row, params.b_row) = x.v.stride()[:2], (x.a.stride(0), x.b.stride(0))
    params.state_slot, params.state_head = state.stride()[:2]
    params.num_slots, params.words = state.shape[0], tree.ancestors.shape[1]
    params.gates_f32 = int(x.a.dtype == torch.float32)
    params.beta_scale = x.beta_scale


def _set_prior(params: Params, prior: Prior | None) -> list[Tensor]:
    if prior is None:
        return []
    history, record, path = prior.history, prior.record, prior.path
    params.fold = prior.fold.data_ptr()
    if prior.held is not None:
        params.held = prior.held.data_ptr()
    if history is not None:
        params.capacity = history.num_rows
        params.hist_u, params.hist_k, params.hist_len = (y.data_ptr() for y in (history.u, history.k, history.lengths))
        params.hist_high, params.hist_low = history.decay_high.data_ptr(), history.decay_low.data_ptr()
        params.hu_slot, params.hu_row, params.hu_head = history.u.stride()[:3]
        params.hk_slot, params.hk_row, params.hk_head = history.k.stride()[:3]
        params.hg_slot, params.hg_row, params.hg_head = history.decay_high.stride()
    if record is not None and path is not None:
        params.rec_u, params.rec_k = record.u.data_ptr(), record.k.data_ptr()
        params.rec_high, params.rec_low = record.decay_high.data_ptr(), record.decay_low.data_ptr()
        (params.ru_row, params.ru_head), (params.rk_row, params.rk_head) = record.u.stride()[:2], record.k.stride()[:2]
        params.rg_row, params.rg_head = record.decay_high.stride()
        params.path_rows, params.path_len = path.rows.data_ptr(), path.lengths.data_ptr()
        params.path_stride = path.rows.stride(0)
    return [prior.fold]


def _set_out(params: Params, x: Projections, o: Tensor, record: Record) -> None:
    params.o, params.u_out = o.data_ptr(), record.u.data_ptr()
    params.high_out, params.low_out = record.decay_high.data_ptr(), record.decay_low.data_ptr()
    if record.k.data_ptr() != x.k.data_ptr():  # keys that stay where they are need no copy
        params.k_out = record.k.data_ptr()
    (params.o_row, params.o_head), (params.uo_row, params.uo_head) = o.stride()[:2], record.u.stride()[:2]
    (params.ko_row, params.ko_head), (params.go_row, params.go_head) = record.k.stride()[:2], record.decay_high.stride()
