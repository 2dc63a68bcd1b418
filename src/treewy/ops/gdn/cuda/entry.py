"""From tensors to the kernel's parameters, with the checks of what it can take."""

import ctypes

import torch

from treewy.errors import BackendError, ShapeError, UnsupportedError
from treewy.ops.gdn.cuda.variant import DIM, Variant, choose, kernel
from treewy.ops.gdn.records import Prior, Projections, Record, Verified
from treewy.ops.warmup import Facts
from treewy.packed import TreeTables
from treewy.shapes import Tensor

POINTERS = (
    *("q", "k", "v", "a", "b", "a_log", "dt_bias", "state", "slots", "places", "cu_rows", "ancestors"),
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
    "num_rows",
    "group",
    "num_slots",
    "num_places",
    "words",
    "capacity",
    "gates_f32",
    "group_inverse",
    "path_width",
    "max_rows",
    "num_record_rows",
)

WIDE_OR_NARROW = (torch.float32, torch.bfloat16)


class Params(ctypes.Structure):
    """`Params` of params.cuh, field by field."""

    __slots__ = ()  # a misspelt field is an error

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
    prior: Prior | None,
    out: Verified,
    exact: bool,
    variant: Variant | None = None,
) -> None:
    """See `serving.commit_verify`; `variant` overrides the choice, for measurements.

    int32 slots, places, lengths, fold and paths are taken as they are; others cost a conversion each.
    """
    record = out.record
    assert isinstance(record, Record)
    check(x, state, out, prior)
    if tree.num_seqs == 0:
        out.o.zero_()
        return
    chosen = variant or variant_of(state, tree, prior, record, exact=exact)
    keep: list[Tensor] = []  # what was converted, alive until the launch
    params = make_params(x, state, slots, tree, prior, out, keep)
    grid = (state.shape[1] * chosen.value_blocks, tree.num_seqs)
    with torch.cuda.device(state.device):
        kernel(chosen, state.device.index or 0).launch(grid, chosen.num_threads, params)


def variant_of(state: Tensor, tree: TreeTables, prior: Prior | None, record: Record, *, exact: bool) -> Variant:
    """Return the variant that a step runs, by its bounds; see `choose`."""
    return choose(
        max_rows=tree.max_rows,
        max_prior=_max_prior(prior),
        state=state.dtype,
        u=record.u.dtype,
        exact=exact,
        num_heads=tree.num_seqs * state.shape[1],
        shared_limit=torch.cuda.get_device_properties(state.device).shared_memory_per_block_optin,
    )


def make_params(
    x: Projections,
    state: Tensor,
    slots: Tensor,
    tree: TreeTables,
    prior: Prior | None,
    out: Verified,
    keep: list[Tensor],
) -> Params:
    """Return the kernel's parameters; `keep` takes the tensors made for it, to be kept until it has been launched."""
    assert isinstance(out.record, Record)
    group = state.shape[1] // x.k.shape[1]
    # head // group as a product: exact below 2^16 / group heads.
    params = Params(num_seqs=tree.num_seqs, num_rows=tree.num_rows, group=group, group_inverse=2**16 // group + 1)
    params.max_rows = tree.max_rows
    _set_operands(params, x, state, slots, tree, keep)
    _set_prior(params, prior, keep)
    _set_out(params, x, out.o, out.record)
    return params


def warm(facts: Facts) -> None:
    """Compile the variants of every bucket, after a step and without prior rows, and launch nothing.

    Only a GPU can run them: on another device no step launches any.
    """
    device = torch.device(facts.device)
    if facts.gdn_backend != "cuda" or device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    for num_seqs, max_rows, max_path in facts.buckets:
        for max_prior in (0, facts.history_capacity + max_path):
            chosen = choose(
                max_rows=max_rows,
                max_prior=max_prior,
                state=facts.state_dtype,
                u=facts.record_dtype,
                exact=facts.exact,
                num_heads=num_seqs * facts.num_value_heads,
                shared_limit=torch.cuda.get_device_properties(index).shared_memory_per_block_optin,
            )
            kernel(chosen, index)


def check(x: Projections, state: Tensor, out: Verified, prior: Prior | None) -> None:
    """Refuse what the kernel was not written for.

    Raises:
        BackendError: no GPU.
        UnsupportedError: other head dims or dtypes.
        ShapeError: a layout that cannot be read 16 bytes at a time.
    """
    if not state.is_cuda:
        raise BackendError(
            f"The CUDA kernel must run on a GPU; got operands on {state.device}. Use backend='eager' there."
        )
    check_operands(x, state, out, prior)


def check_operands(x: Projections, state: Tensor, out: Verified, prior: Prior | None) -> None:
    """Refuse what the kernel could not read, wherever it lies; see `check`."""
    o, record = out.o, out.record
    assert isinstance(record, Record)
    if state.shape[2:] != (DIM, DIM):
        raise UnsupportedError(
            f"The CUDA kernel takes heads of {DIM} keys and {DIM} values; got state {tuple(state.shape)}. "
            "Use backend='triton'."
        )
    for name, y in (("q", x.q), ("k", x.k), ("v", x.v), ("o", o), ("the record's keys", record.k)):
        if y.dtype != torch.bfloat16:
            raise UnsupportedError(f"The CUDA kernel takes bfloat16 {name}; got {y.dtype}. Use backend='triton'.")
    if state.dtype not in WIDE_OR_NARROW or record.u.dtype not in WIDE_OR_NARROW:
        raise UnsupportedError(
            "The CUDA kernel takes states and records in float32 or bfloat16; got state "
            f"{state.dtype}, record {record.u.dtype}. Use backend='triton'."
        )
    if (
        x.a.dtype not in WIDE_OR_NARROW
        or x.a.dtype != x.b.dtype
        or (x.a_log.dtype, x.dt_bias.dtype) != (torch.float32,) * 2
    ):
        raise UnsupportedError(
            "The CUDA kernel takes a and b of one dtype, float32 or bfloat16, and float32 a_log and dt_bias; got "
            f"{x.a.dtype}, {x.b.dtype}, {x.a_log.dtype} and {x.dt_bias.dtype}. Convert them, or use backend='triton'."
        )
    if state.stride()[2:] != (DIM, 1):
        raise UnsupportedError(
            f"The CUDA kernel takes states whose [V, K] matrices are contiguous; got strides {state.stride()}. "
            "Use backend='triton' for other layouts."
        )
    _check_layouts(x, record, prior)
    for name, y in (("q", x.q), ("k", x.k), ("v", x.v), ("o", o), ("state", state.flatten(2))):
        if y.stride(2) != 1 or y.stride(0) % 8 or y.stride(1) % 8 or y.data_ptr() % 16:
            raise ShapeError(
                f"The CUDA kernel reads and writes rows 16 bytes at a time; {name} has strides {y.stride()} and starts at "
                f"{y.data_ptr() % 16} past a multiple of 16. Make it contiguous."
            )


def _check_layouts(x: Projections, out: Record, prior: Prior | None) -> None:
    """Check that rows are read and written 16 bytes at a time, and scalars where one stride says they are."""
    kept = (
        [("out.record", out)]
        if prior is None
        else [("out.record", out), ("history", prior.history), ("record", prior.record)]
    )
    for owner, rows in kept:
        if rows is None:
            continue
        for name, y in (("u", rows.u), ("k", rows.k)):
            wanted = out.u.dtype if name == "u" else torch.bfloat16
            if (
                y.dtype != wanted
                or y.stride(-1) != 1
                or any(n * y.element_size() % 16 for n in y.stride()[:-1])
                or y.data_ptr() % 16
            ):
                raise ShapeError(
                    f"The CUDA kernel takes {owner}.{name} in {wanted}, its rows contiguous and on multiples of 16 bytes; got "
                    f"{y.dtype} with strides {y.stride()} at {y.data_ptr() % 16} past one. Make it as out.record is made."
                )
        high, low = rows.decay_high, rows.decay_low
        if high.dtype != torch.float32 or low.dtype != torch.float32 or high.stride() != low.stride():
            raise ShapeError(
                f"The CUDA kernel takes {owner}'s decays in float32 and laid out alike; got {high.dtype} {high.stride()} and "
                f"{low.dtype} {low.stride()}. Make them as out.record's are made."
            )
    for name, y in (("a_log", x.a_log), ("dt_bias", x.dt_bias), ("a", x.a), ("b", x.b)):
        if y.stride(-1) != 1:
            raise ShapeError(
                f"The CUDA kernel takes {name} with heads side by side; got strides {y.stride()}. Make it contiguous."
            )


def _max_prior(prior: Prior | None) -> int:
    if prior is None:
        return 0
    rows = 0 if prior.history is None else prior.history.num_rows
    return rows + (0 if prior.path is None else prior.path.rows.shape[1])


def _address(x: Tensor, keep: list[Tensor]) -> int:
    """Return where the int32 values of x lie, side by side."""
    if x.dtype != torch.int32 or not x.is_contiguous():
        x = x.to(torch.int32).contiguous()
        keep.append(x)
    return x.data_ptr()


def _set_operands(
    params: Params, x: Projections, state: Tensor, slots: Tensor, tree: TreeTables, keep: list[Tensor]
) -> None:
    for name, y in (("q", x.q), ("k", x.k), ("v", x.v), ("a", x.a), ("b", x.b), ("a_log", x.a_log)):
        setattr(params, name, y.data_ptr())
    for name, y in (("dt_bias", x.dt_bias), ("state", state)):
        setattr(params, name, y.data_ptr())
    params.slots, params.cu_rows = _address(slots, keep), _address(tree.cu_rows, keep)
    params.places, params.ancestors = params.slots, _address(tree.ancestors, keep)
    (params.q_row, params.q_head), (params.k_row, params.k_head) = x.q.stride()[:2], x.k.stride()[:2]
    (params.v_row, params.v_head), (params.a_row, params.b_row) = x.v.stride()[:2], (x.a.stride(0), x.b.stride(0))
    params.state_slot, params.state_head = state.stride()[:2]
    params.num_slots, params.words = state.shape[0], tree.ancestors.shape[1]
    params.gates_f32 = int(x.a.dtype == torch.float32)
    params.beta_scale = x.beta_scale


def _set_prior(params: Params, prior: Prior | None, keep: list[Tensor]) -> None:
    if prior is None:
        return
    history, record, path = prior.history, prior.record, prior.path
    params.fold = _address(prior.fold, keep)
    if prior.held is not None:
        params.held = _address(prior.held, keep)
    if history is not None:
        if prior.places is not None:
            params.places = _address(prior.places, keep)
        params.num_places = history.lengths.shape[0]
        params.capacity, params.hist_len = history.num_rows, _address(history.lengths, keep)
        params.hist_u, params.hist_k = history.u.data_ptr(), history.k.data_ptr()
        params.hist_high, params.hist_low = history.decay_high.data_ptr(), history.decay_low.data_ptr()
        params.hu_slot, params.hu_row, params.hu_head = history.u.stride()[:3]
        params.hk_slot, params.hk_row, params.hk_head = history.k.stride()[:3]
        params.hg_slot, params.hg_row, params.hg_head = history.decay_high.stride()
    if record is not None and path is not None:
        params.rec_u, params.rec_k = record.u.data_ptr(), record.k.data_ptr()
        params.rec_high, params.rec_low = record.decay_high.data_ptr(), record.decay_low.data_ptr()
        (params.ru_row, params.ru_head), (params.rk_row, params.rk_head) = record.u.stride()[:2], record.k.stride()[:2]
        params.rg_row, params.rg_head = record.decay_high.stride()
        params.path_rows, params.path_len = _address(path.rows, keep), _address(path.lengths, keep)
        params.path_width = path.rows.shape[1]
        params.num_record_rows = record.u.shape[0]


def _set_out(params: Params, x: Projections, o: Tensor, record: Record) -> None:
    params.o, params.u_out = o.data_ptr(), record.u.data_ptr()
    params.high_out, params.low_out = record.decay_high.data_ptr(), record.decay_low.data_ptr()
    if record.k.data_ptr() != x.k.data_ptr():  # keys that stay where they are need no copy
        params.k_out = record.k.data_ptr()
    (params.o_row, params.o_head), (params.uo_row, params.uo_head) = o.stride()[:2], record.u.stride()[:2]
    (params.ko_row, params.ko_head), (params.go_row, params.go_head) = record.k.stride()[:2], record.decay_high.stride()
