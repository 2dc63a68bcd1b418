"""Appending to the histories of all layers in Triton: one launch that copies rows and sums their decays."""
# pyright: reportGeneralTypeIssues=false

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from treewy.errors import ShapeError
from treewy.ops.gdn import triton_args as args
from treewy.ops.gdn.records import Record, StackedHistory, StackedRecord
from treewy.ops.gdn.triton_prior import record_row
from treewy.ops.gdn.triton_rows import two_sum
from treewy.ops.launch import launch
from treewy.ops.slots import INERT
from treewy.ops.warmup import Facts
from treewy.packed import PathTables
from treewy.shapes import Tensor

# What one program copies: so many elements of so many rows, 16 bytes a thread and more than one such load on its way.
ELEMENTS, MOST_ROWS, WARPS = 1024, 4, 4

# Nothing here is worth a variant of its own: decays are few, tables are read once.
INTEGERS = [
    *("kept_layer", "kept_slot", "kept_row", "kept_head", "new_layer", "new_row", "new_head"),
    *("num_places", "capacity", "num_record_rows", "path_width"),
    *("stride_lengths", "stride_places", "stride_path", "stride_path_row", "stride_path_lengths"),
]
POINTERS = ["p_lengths", "p_places", "p_path", "p_path_lengths", "kept_high", "kept_low", "new_high", "new_low"]


class Moved(NamedTuple):
    """One wide part of the rows, u or k: where it is copied to and from. Elements of a head lie side by side."""

    kept: Tensor
    new: Tensor
    kept_layer: args.Stride
    kept_slot: args.Stride
    kept_row: args.Stride
    kept_head: args.Stride
    new_layer: args.Stride
    new_row: args.Stride
    new_head: args.Stride


class Sizes(NamedTuple):
    """What is compiled in, all of it `tl.constexpr`: heads and dims, elements and rows of a program."""

    H: Any
    HV: Any
    K: Any
    V: Any
    BE: Any
    BP: Any


# The import hook of the tests must not wrap what Triton compiles: hence no_type_check throughout.
@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
@no_type_check
def append_layers_kernel(
    u,
    k,
    kept_high,
    kept_low,
    new_high,
    new_low,
    p_lengths,
    p_places,
    p_path,
    p_path_lengths,
    kept_layer,
    kept_slot,
    kept_row,
    kept_head,
    new_layer,
    new_row,
    new_head,
    num_places,
    capacity,
    num_record_rows,
    path_width,
    stride_lengths,
    stride_places,
    stride_path,
    stride_path_row,
    stride_path_lengths,
    size,
):
    """Copy a piece of one layer's rows of one path, of u or of k, or do what there is to do of their decays."""
    num_u, num_k = tl.cdiv(size.HV * size.V, size.BE), tl.cdiv(size.H * size.K, size.BE)
    i_b, piece = tl.program_id(0) // (num_u + num_k + 1), tl.program_id(0) % (num_u + num_k + 1)
    i_b, i_layer = i_b.to(tl.int64), tl.program_id(1).to(tl.int64)
    i_place = tl.load(p_places + i_b * stride_places).to(tl.int64)
    live = (i_place >= 0) & (i_place < num_places)
    path_len = tl.maximum(0, tl.minimum(tl.load(p_path_lengths + i_b * stride_path_lengths), path_width)).to(tl.int32)
    num_accepted = tl.where(live, path_len, 0)
    num_kept = tl.load(p_lengths + i_place * stride_lengths, mask=live, other=0)
    num_kept = tl.maximum(0, tl.minimum(num_kept, capacity)).to(tl.int32)
    fits = num_kept + num_accepted <= capacity
    first = 0
    while first < num_accepted:
        o_i = first + tl.arange(0, size.BP)
        # Rows are read whether or not they fit: the loads need not wait for the history's length.
        m_i = o_i < num_accepted
        row = tl.load(p_path + i_b * stride_path + o_i * stride_path_row, mask=o_i < path_width, other=0)
        row = record_row(row, (None, None, None, num_record_rows))
        at = i_layer, i_place, num_kept + o_i, row, m_i, fits
        if piece < num_u:
            move_rows(u, at, piece, size.HV, size.V, size)
        elif piece < num_u + num_k:
            move_rows(k, at, piece - num_u, size.H, size.K, size)
        else:
            o_hv = tl.arange(0, triton.next_power_of_2(size.HV))
            m_hv = o_hv < size.HV
            o_hv = o_hv.to(tl.int64)
            o_kept = i_layer * kept_layer + i_place * kept_slot + o_hv * kept_head
            o_last = o_kept + (num_kept - 1).to(tl.int64) * kept_row
            before_high = tl.load(kept_high + o_last, mask=m_hv & (num_kept > 0), other=0.0).to(tl.float32)
            before_low = tl.load(kept_low + o_last, mask=m_hv & (num_kept > 0), other=0.0).to(tl.float32)
            m_decay = m_i[:, None] & m_hv[None, :]
            o_new = i_layer * new_layer + row[:, None] * new_row + (o_hv * new_head)[None, :]
            high = tl.load(new_high + o_new, mask=m_decay, other=0.0).to(tl.float32)
            low = tl.load(new_low + o_new, mask=m_decay, other=0.0).to(tl.float32)
            high, lost = two_sum(before_high[None, :], high)
            high, low = two_sum(high, lost + (before_low[None, :] + low))
            o_to = o_kept[None, :] + (num_kept + o_i)[:, None].to(tl.int64) * kept_row
            tl.store(kept_high + o_to, high.to(kept_high.dtype.element_ty), mask=m_decay & fits)
            tl.store(kept_low + o_to, low.to(kept_low.dtype.element_ty), mask=m_decay & fits)
        first += size.BP


@triton.jit
@no_type_check
def move_rows(part, at, piece, HEADS: tl.constexpr, DIM: tl.constexpr, size):
    """Copy a piece of u or k of a tile of rows to where the path belongs, if it fits."""
    i_layer, i_place, to, row, m_i, fits = at
    o_e = piece * size.BE + tl.arange(0, size.BE)
    head, e = (o_e // DIM).to(tl.int64), o_e % DIM
    m_e = m_i[:, None] & (o_e < HEADS * DIM)[None, :]
    p_new = part.new + i_layer * part.new_layer + row[:, None] * part.new_row + (head * part.new_head + e)[None, :]
    b_e = tl.load(p_new, mask=m_e, other=0.0)
    p_kept = part.kept + i_layer * part.kept_layer + i_place * part.kept_slot
    p_kept += to[:, None].to(tl.int64) * part.kept_row + (head * part.kept_head + e)[None, :]
    tl.store(p_kept, b_e.to(part.kept.dtype.element_ty), mask=m_e & fits)


def append_layers(history: StackedHistory, places: Tensor, record: StackedRecord, path: PathTables) -> None:
    """See `layers.append_layers`."""
    _check(history, record)
    layers, num_places = history.u.shape[:2]
    if 0 in (layers, num_places, path.rows.shape[1], record.u.shape[1]):
        return
    size = _sizes(history, path.rows.shape[1])
    launch(
        append_layers_kernel,
        (_num_pieces(history) * len(places), layers),
        Moved(history.u, record.u, *history.u.stride()[:4], *record.u.stride()[:3]),
        Moved(history.k, record.k, *history.k.stride()[:4], *record.k.stride()[:3]),
        history.decay_high,
        history.decay_low,
        record.decay_high,
        record.decay_low,
        history.lengths,
        places,
        path.rows,
        path.lengths,
        *history.decay_high.stride(),
        *record.decay_high.stride(),
        num_places,
        history.num_rows,
        record.u.shape[1],
        path.rows.shape[1],
        history.lengths.stride(0),
        places.stride(0),
        *path.rows.stride(),
        path.lengths.stride(0),
        size,
        num_warps=WARPS,
    )


def warm(facts: Facts) -> None:
    """Compile the kernel for every bucket's paths, on a sequence without a history; without histories there is none."""
    if not facts.history_capacity:
        return
    history = StackedHistory(
        *_zeros(facts, 1, 1, facts.history_capacity), torch.zeros(1, dtype=facts.index_dtype, device=facts.device)
    )
    places = torch.full((1,), INERT, dtype=facts.index_dtype, device=facts.device)
    for max_path in sorted({max_path for _, _, max_path in facts.buckets}):
        rows, lengths = (torch.zeros(*shape, dtype=torch.int32, device=facts.device) for shape in ((1, max_path), (1,)))
        append_layers(history, places, StackedRecord(*_zeros(facts, 1, 1)), PathTables(rows, lengths))


def _zeros(facts: Facts, *leading: int) -> Record:
    heads = facts.num_value_heads
    shapes = (heads, facts.value_dim), (facts.num_heads, facts.key_dim), (heads,), (heads,)
    dtypes = facts.record_dtype, facts.dtype, torch.float32, torch.float32
    parts = zip(shapes, dtypes, strict=True)
    return Record(*(torch.zeros(*leading, *shape, dtype=of, device=facts.device) for shape, of in parts))


def _sizes(history: StackedHistory, path_width: int) -> Sizes:
    (value_heads, value_dim), (heads, key_dim) = history.u.shape[3:], history.k.shape[3:]
    rows = min(MOST_ROWS, triton.next_power_of_2(path_width))
    return Sizes(*map(tl.constexpr, (heads, value_heads, key_dim, value_dim, ELEMENTS, rows)))


def _num_pieces(history: StackedHistory) -> int:
    """Return the programs of one layer and path: those of u, those of k, and one for the decays."""
    return 1 + sum(-(-part[0, 0, 0].numel() // ELEMENTS) for part in history[:2])


def _check(history: StackedHistory, record: StackedRecord) -> None:
    floats = {}
    for owner, parts in (("history", history[:4]), ("record", record)):
        named = {f"{owner}.{name}": part for name, part in zip(Record._fields, parts, strict=True)}
        for name in ("u", "k"):
            part = named[f"{owner}.{name}"]
            args.check_layout({f"{owner}.{name}": part}, part.ndim - 1)
        high, low = parts[2:]
        if high.stride() != low.stride():
            raise ShapeError(
                f"The kernel must find both parts of {owner}'s decays laid out alike; got strides {high.stride()} and "
                f"{low.stride()}. Make them alike."
            )
        floats |= named
    args.check_dtypes(floats)
