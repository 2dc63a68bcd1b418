"""Tree convolution in Triton: a tile of packed rows and channels per program, walking up the parents.

Sums are taken in float32, newest input first, and each output is computed alone: its bits depend on its own inputs only.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from treewy.errors import UnsupportedError
from treewy.ops.launch import launch
from treewy.ops.slots import INERT, check_slots
from treewy.ops.warmup import Facts
from treewy.packed import PackedPath, PackedTree, PathTables, TreeTables
from treewy.shapes import Float, Int, Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = range(2, 9)


class Blocks(NamedTuple):
    """The tile of one program: rows and channels, and its warps."""

    rows: int
    channels: int
    warps: int


# By how many packed rows there are at least. Few rows: many small programs, so that every multiprocessor has one. Many
# rows: tiles of several, whose common ancestors and weights are then read once. A thread has 8 channels, so that the
# weights of a tap lie as its rows do, and no exchange between threads comes between the loads.
BLOCKS = {0: Blocks(1, 256, 1), 33: Blocks(2, 512, 2), 257: Blocks(4, 512, 2)}

# Channels of one program of commit, which moves W - 1 rows of them.
COMMIT_CHANNELS = 1024
COMMIT_WARPS = 4


# The import hook of the tests must not wrap what Triton compiles.
@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "stride_slots"],
    do_not_specialize_on_alignment=["p_slots", "p_parents", "p_seq_of_row", "p_cu_rows"],
)
@no_type_check
def convolve_paths(
    p_y,
    p_x,
    p_weight,
    p_bias,
    p_window,
    p_slots,
    p_parents,
    p_seq_of_row,
    p_cu_rows,
    num_rows,
    num_slots,
    num_channels,
    stride_y_row,
    stride_y_channel,
    stride_x_row,
    stride_x_channel,
    stride_weight_channel,
    stride_weight_tap,
    stride_bias,
    stride_window_slot,
    stride_window_row,
    stride_window_channel,
    stride_slots,
    W: tl.constexpr,
    SILU: tl.constexpr,
    ALIKE: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Convolve BT packed rows of BC channels with their W - 1 nearest ancestors, or with their slot's window.

    ALIKE says that rows and windows have one dtype and one distance between channels.
    """
    o_row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_channel = tl.program_id(1) * BC + tl.arange(0, BC)
    m_row = o_row < num_rows
    m_channel = (o_channel < num_channels)[None, :]
    b_seq = tl.load(p_seq_of_row + o_row, mask=m_row, other=-1)
    b_parent = tl.load(p_parents + o_row, mask=m_row, other=-1)
    b_slot = tl.load(p_slots + b_seq.to(tl.int64) * stride_slots, mask=b_seq >= 0, other=-1).to(tl.int64)
    m_live = (b_slot >= 0) & (b_slot < num_slots)
    b_start = tl.load(p_cu_rows + b_seq, mask=m_live, other=0)

    p_weight += o_channel * stride_weight_channel + (W - 1) * stride_weight_tap
    b_y = tl.zeros([BT, BC], dtype=tl.float32)
    if p_bias is not None:
        b_y += tl.load(p_bias + o_channel * stride_bias, mask=o_channel < num_channels, other=0).to(tl.float32)[None, :]
    o_x_channel = o_channel.to(tl.int64)[None, :] * stride_x_channel
    o_window_channel = o_channel.to(tl.int64)[None, :] * stride_window_channel
    p_x_row = p_x + o_row * stride_x_row
    # Above the root, the newest place of the window comes first.
    p_window_row = p_window + b_slot * stride_window_slot + (W - 2) * stride_window_row
    m_x = m_live
    for back in tl.static_range(W):
        if back > 0:
            m_x = m_live & (b_parent >= 0)
            o_ancestor = (b_start + b_parent).to(tl.int64)
            p_x_row = p_x + o_ancestor * stride_x_row
            if back < W - 1:
                b_parent = tl.load(p_parents + o_ancestor, mask=m_x, other=-1)
        m_window = m_live & ~m_x
        if ALIKE:
            p_input = tl.where(m_x, p_x_row, p_window_row)[:, None] + o_x_channel
            b_x = tl.load(p_input, mask=m_live[:, None] & m_channel, other=0).to(tl.float32)
        else:
            b_x = tl.load(p_x_row[:, None] + o_x_channel, mask=m_x[:, None] & m_channel, other=0).to(tl.float32)
            p_old = p_window_row[:, None] + o_window_channel
            b_old = tl.load(p_old, mask=m_window[:, None] & m_channel, other=0).to(tl.float32)
            b_x = tl.where(m_x[:, None], b_x, b_old)
        p_window_row = tl.where(m_window, p_window_row - stride_window_row, p_window_row)
        b_weight = tl.load(p_weight, mask=o_channel < num_channels, other=0).to(tl.float32)
        p_weight -= stride_weight_tap
        b_y = tl.fma(b_x, b_weight[None, :], b_y)
    if SILU:
        b_y = b_y / (1.0 + tl.exp2(b_y * -1.4426950408889634))  # log2 e
    b_y = tl.where(m_live[:, None], b_y, 0.0)
    p_y += o_row[:, None] * stride_y_row + o_channel.to(tl.int64)[None, :] * stride_y_channel
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=m_row[:, None] & m_channel)


@triton.jit(
    do_not_specialize=["num_slots", "num_rows", "num_places", "stride_slots", "stride_lengths", "stride_path"],
    do_not_specialize_on_alignment=["p_slots", "p_path", "p_lengths"],
)
@no_type_check
def shift_windows(
    p_window,
    p_x,
    p_slots,
    p_path,
    p_lengths,
    num_slots,
    num_rows,
    num_places,
    num_channels,
    stride_window_layer,
    stride_window_slot,
    stride_window_row,
    stride_window_channel,
    stride_x_layer,
    stride_x_row,
    stride_x_channel,
    stride_slots,
    stride_path,
    stride_lengths,
    W1: tl.constexpr,
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    """Move BC channels of one layer's window of one sequence over its path, in place."""
    i_seq, i_layer = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.load(p_slots + i_seq * stride_slots).to(tl.int64)
    length = tl.minimum(tl.load(p_lengths + i_seq * stride_lengths).to(tl.int32), num_places)
    if (slot >= 0) & (slot < num_slots) & (length > 0):
        o_place = tl.arange(0, BW)
        o_channel = (tl.program_id(1) * BC + tl.arange(0, BC)).to(tl.int64)
        # Where each new place comes from, among the old window and then the path.
        o_source = o_place + length
        m_place = o_place < W1
        m_channel = (o_channel < num_channels)[None, :]
        m_old = m_place & (o_source < W1)
        m_new = m_place & (o_source >= W1)
        b_row = tl.load(p_path + i_seq * stride_path + o_source - W1, mask=m_new, other=-1).to(tl.int64)
        m_new = m_new & (b_row >= 0) & (b_row < num_rows)

        o_window = i_layer * stride_window_layer + slot * stride_window_slot + o_channel * stride_window_channel
        o_x = i_layer * stride_x_layer + o_channel * stride_x_channel
        p_old = p_window + o_window[None, :] + o_source.to(tl.int64)[:, None] * stride_window_row
        b_old = tl.load(p_old, mask=m_old[:, None] & m_channel, other=0)
        p_new = p_x + o_x[None, :] + b_row[:, None] * stride_x_row
        b_new = tl.load(p_new, mask=m_new[:, None] & m_channel, other=0)
        b_window = tl.where(m_old[:, None], b_old, b_new.to(p_window.dtype.element_ty))
        # Every thread has read before any writes: places move within the window.
        tl.debug_barrier()
        p_place = p_window + o_window[None, :] + o_place.to(tl.int64)[:, None] * stride_window_row
        tl.store(p_place, b_window, mask=(m_old | m_new)[:, None] & m_channel)


def verify(
    x: Float[Tensor, "N C"],
    weight: Float[Tensor, "C W"],
    bias: Float[Tensor, "C"] | None,
    window: Float[Tensor, "S W1 C"],
    slots: Int[Tensor, "B"],
    tree: PackedTree | TreeTables,
    activation: str | None,
    out: Float[Tensor, "N C"],
) -> None:
    """See `api.verify`."""
    if isinstance(tree, PackedTree):
        check_slots(slots, window.shape[0])
        tree = tree.tables
    _refuse_apart(parents=tree.parents, seq_of_row=tree.seq_of_row, cu_rows=tree.cu_rows)
    _refuse_unsupported(weight.shape[1], out, x, weight, window, *([] if bias is None else [bias]))
    blocks = next(blocks for least, blocks in reversed(BLOCKS.items()) if x.shape[0] >= least)
    _convolve(x, weight, bias, window, slots, tree, activation, out, blocks)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    slots: Tensor,
    tree: TreeTables,
    activation: str | None,
    out: Tensor,
    blocks: Blocks,
) -> None:
    num_rows, channels = x.shape
    block_channels = min(blocks.channels, _power_of_2(channels))
    launch(
        convolve_paths,
        (-(-num_rows // blocks.rows), -(-channels // block_channels)),
        *(out, x, weight, bias, window, slots, tree.parents, tree.seq_of_row, tree.cu_rows),
        *(num_rows, window.shape[0], channels),
        *(*out.stride(), *x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0)),
        *(*window.stride(), slots.stride(0)),
        W=weight.shape[1],
        SILU=activation is not None,
        ALIKE=x.dtype == window.dtype and x.stride(1) == window.stride(2),
        BT=blocks.rows,
        BC=block_channels,
        num_warps=blocks.warps,
    )


def commit(window: Tensor, slots: Int[Tensor, "B"], x: Tensor, path: PackedPath | PathTables) -> None:
    """See `api.commit`."""
    if isinstance(path, PackedPath):
        check_slots(slots, window.shape[-3])
        path = path.tables
    _refuse_apart(rows=path.rows[:1])
    *layers, num_slots, places, channels = window.shape
    _refuse_unsupported(places + 1, window, x)
    block_channels = min(COMMIT_CHANNELS, _power_of_2(channels))
    # One layer needs no stride; 0 is divisible by 16 whatever the number of slots and rows is.
    strides = (*window.stride(), *x.stride()) if layers else (0, *window.stride(), 0, *x.stride())
    launch(
        shift_windows,
        (slots.shape[0], -(-channels // block_channels), *(layers or (1,))),
        *(window, x, slots, path.rows, path.lengths, num_slots, x.shape[-2], path.rows.shape[1], channels),
        *(*strides, slots.stride(0), path.rows.stride(0), path.lengths.stride(0)),
        W1=places,
        BW=_power_of_2(places),
        BC=block_channels,
        num_warps=COMMIT_WARPS,
    )


def warm(facts: Facts) -> None:
    """Compile every tile of verify, with weights in either order, and commit, on sequences without a slot.

    Inputs may be copied out of a wider projection before they are committed.
    """
    channels, width = facts.conv_channels, facts.conv_width
    x, weight, window, out = (
        torch.zeros(*shape, dtype=facts.dtype, device=facts.device)
        for shape in (
            (2, facts.conv_row_stride or channels),
            (channels, width),
            (1, width - 1, channels),
            (2, channels),
        )
    )
    x, bias = x[:, :channels], weight[:, 0].contiguous() if facts.conv_bias else None
    slots = torch.full((1,), INERT, dtype=facts.index_dtype, device=facts.device)
    no_rows = torch.full((2,), -1, dtype=torch.int32, device=facts.device)
    none = torch.zeros(2, 1, dtype=torch.int32, device=facts.device)
    tree = TreeTables(no_rows, none[:, 0], no_rows, none[:, 0], none, 1)
    for blocks in BLOCKS.values():
        for taps in (weight, weight.T.contiguous().T):
            _convolve(x, taps, bias, window, slots, tree, "silu", out, blocks)
    for rows in (x, x.contiguous()):
        commit(window, slots, rows, PathTables(none[:1], none[0]))


def _power_of_2(number: int) -> int:
    """Return the least power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _refuse_apart(**tables: Tensor) -> None:
    for name, table in tables.items():
        if not table.is_contiguous():
            raise UnsupportedError(
                f"Entries of {name} must lie side by side for the kernel; got strides {table.stride()}. Pass a contiguous table."
            )


def _refuse_unsupported(width: int, *operands: Tensor) -> None:
    if width not in WIDTHS:
        raise UnsupportedError(
            f"The kernel's width must lie in {WIDTHS.start}..{WIDTHS.stop - 1}; got {width}. Use backend='eager'."
        )
    for operand in operands:
        if operand.dtype not in DTYPES:
            raise UnsupportedError(
                f"The kernel's operands must be float32, bfloat16 or float16; got {operand.dtype}. Use backend='eager'."
            )
