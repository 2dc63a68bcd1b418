"""vLLM's rolling windows in Triton: a step's rows go in, and the columns of accepted rows move together.

A program owns a sequence's channels, so that what it reads of a window and what it writes there cannot race. The convolution
reads neither: the newest accepted inputs go into a pool of their own, and `conv.verify` has its rows side by side on the
GPU, which is quicker for few large trees than a program per sequence.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from treewy.errors import UnsupportedError
from treewy.ops.launch import launch
from treewy.packed import PathTables, TreeTables
from treewy.shapes import Float, Int, Tensor
from treewy.vllm_plugin.windows import WindowTable

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Rows and channels that a program copies at a time, and its warps: a thread moves 16 bytes at once.
ROLL_ROWS, ROLL_CHANNELS, ROLL_WARPS = 16, 128, 4

# Columns and channels that a program moves at a time. Most paths are short and most columns stay.
MOVE_COLUMNS, MOVE_CHANNELS, MOVE_WARPS = 4, 512, 4


# The import hook of the tests must not wrap what Triton compiles.
@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "stride_slots", "stride_accepted"],
    do_not_specialize_on_alignment=["p_places", "p_slots", "p_accepted", "p_cu_rows"],
)
@no_type_check
def roll_rows(
    p_newest,
    p_places,
    p_window,
    p_x,
    p_slots,
    p_accepted,
    p_cu_rows,
    num_rows,
    num_slots,
    num_channels,
    num_columns,
    stride_window_slot,
    stride_window_channel,
    stride_window_column,
    stride_x_row,
    stride_x_channel,
    stride_slots,
    stride_accepted,
    W: tl.constexpr,
    BW: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Copy the newest inputs of BC channels of one sequence out of its window, and its rows into it."""
    i_seq = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + i_seq * stride_slots).to(tl.int64)
    start = tl.load(p_cu_rows + i_seq).to(tl.int64)
    end = tl.minimum(tl.load(p_cu_rows + i_seq + 1).to(tl.int64), num_rows)
    live = (slot >= 0) & (slot < num_slots) & (start < end)
    if tl.program_id(0) == 0:
        tl.store(p_places + i_seq, tl.where(live, i_seq, -1).to(p_places.dtype.element_ty))
    if live:
        o_channel = (tl.program_id(0) * BC + tl.arange(0, BC)).to(tl.int64)[None, :]
        m_channel = o_channel < num_channels
        accepted = tl.load(p_accepted + i_seq * stride_accepted).to(tl.int64)
        accepted = tl.minimum(tl.maximum(accepted, 1), num_columns - (W - 2))
        p_own = p_window + slot * stride_window_slot + o_channel * stride_window_channel

        o_place = tl.arange(0, BW)[:, None].to(tl.int64)
        p_old = p_own + (accepted - 1 + o_place) * stride_window_column
        b_old = tl.load(p_old, mask=(o_place < W - 1) & m_channel, other=0)
        p_new = p_newest + (i_seq * (W - 1) + o_place) * num_channels + o_channel
        tl.store(p_new, b_old, mask=(o_place < W - 1) & m_channel)
        # Every thread has read before any writes: inputs move within the window.
        tl.debug_barrier()
        p_older = p_own + (o_place - 1) * stride_window_column
        tl.store(p_older, b_old, mask=(o_place > 0) & (o_place < W - 1) & m_channel)

        p_rows = p_own + (W - 2) * stride_window_column
        for first in range(0, (end - start).to(tl.int32), BT):
            o_row = first + tl.arange(0, BT)[:, None].to(tl.int64)
            m_row = (start + o_row < end) & (o_row < num_columns - (W - 2))
            p_source = p_x + (start + o_row) * stride_x_row + o_channel * stride_x_channel
            b_x = tl.load(p_source, mask=m_row & m_channel, other=0)
            tl.store(p_rows + o_row * stride_window_column, b_x.to(p_window.dtype.element_ty), mask=m_row & m_channel)


@triton.jit(
    do_not_specialize=["num_places", "stride_slots_layer", "stride_slots", "stride_path_seq", "stride_lengths"],
    do_not_specialize_on_alignment=["p_addresses", "p_slots", "p_path", "p_lengths"],
)
@no_type_check
def gather_columns(
    p_addresses,
    p_slots,
    p_path,
    p_lengths,
    num_slots,
    num_places,
    num_channels,
    num_columns,
    stride_window_slot,
    stride_window_channel,
    stride_window_column,
    stride_slots_layer,
    stride_slots,
    stride_path_seq,
    stride_path_place,
    stride_lengths,
    OLDER: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Move BC channels of the accepted rows of one sequence together, in the window of one layer."""
    i_seq, i_layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.load(p_slots + i_layer * stride_slots_layer + i_seq * stride_slots).to(tl.int64)
    length = tl.minimum(tl.load(p_lengths + i_seq * stride_lengths).to(tl.int32), num_places)
    if (slot >= 0) & (slot < num_slots) & (length > 1):
        p_layer = tl.load(p_addresses + i_layer).to(tl.pointer_type(DTYPE))
        if ALIGNED:
            p_layer = tl.multiple_of(p_layer, 16)
        o_channel = (tl.program_id(0) * BC + tl.arange(0, BC)).to(tl.int64)[None, :]
        p_window = p_layer + slot * stride_window_slot
        p_rows = p_window + OLDER * stride_window_column + o_channel * stride_window_channel
        for first in range(1, length, BP):
            o_place = first + tl.arange(0, BP)
            p_row = p_path + i_seq * stride_path_seq + o_place * stride_path_place
            b_row = tl.load(p_row, mask=o_place < length, other=-1)
            m_moved = ((b_row > o_place) & (b_row < num_columns - OLDER))[:, None] & (o_channel < num_channels)
            b_x = tl.load(p_rows + b_row[:, None].to(tl.int64) * stride_window_column, mask=m_moved, other=0)
            # Every thread has read before any writes. Later rows lie behind all that is written here: paths ascend.
            tl.debug_barrier()
            tl.store(p_rows + o_place[:, None].to(tl.int64) * stride_window_column, b_x, mask=m_moved)


def roll(
    window: Float[Tensor, "S C X"],
    slots: Int[Tensor, "B"],
    num_accepted: Int[Tensor, "B"],
    x: Float[Tensor, "N C"],
    tree: TreeTables,
    width: int,
) -> tuple[Float[Tensor, "B W1 C"], Int[Tensor, "B"]]:
    """See `windows.roll_windows`."""
    _refuse_unsupported(window, x)
    num_slots, channels, columns = window.shape
    newest = torch.empty(len(slots), width - 1, channels, dtype=window.dtype, device=window.device)
    places = torch.empty(len(slots), dtype=torch.int32, device=window.device)
    launch(
        roll_rows,
        (-(-channels // ROLL_CHANNELS), len(slots)),
        *(newest, places, window, x, slots, num_accepted, tree.cu_rows),
        *(x.shape[0], num_slots, channels, columns),
        *(*window.stride(), *x.stride(), slots.stride(0), num_accepted.stride(0)),
        W=width,
        BW=triton.next_power_of_2(width - 1),
        BT=min(ROLL_ROWS, triton.next_power_of_2(max(1, tree.max_rows))),
        BC=ROLL_CHANNELS,
        num_warps=ROLL_WARPS,
    )
    return newest, places


def move_columns(table: WindowTable, slots: Int[Tensor, "L B"], path: PathTables, older: int) -> None:
    """See `windows.compact_windows`; `older` columns lie before a step's rows."""
    window = table.windows[0]
    _refuse_unsupported(window)
    num_slots, channels, columns = window.shape
    launch(
        gather_columns,
        (-(-channels // MOVE_CHANNELS), slots.shape[1], slots.shape[0]),
        *(table.addresses, slots, path.rows, path.lengths),
        *(num_slots, path.rows.shape[1], channels, columns),
        *(*window.stride(), *slots.stride(), *path.rows.stride(), path.lengths.stride(0)),
        OLDER=older,
        DTYPE=DTYPES[window.dtype],
        ALIGNED=table.aligned,
        BP=MOVE_COLUMNS,
        BC=MOVE_CHANNELS,
        num_warps=MOVE_WARPS,
    )


def _refuse_unsupported(*operands: Tensor) -> None:
    for operand in operands:
        if operand.dtype not in DTYPES:
            raise UnsupportedError(
                f"The kernel's operands must be float32, bfloat16 or float16; got {operand.dtype}. Use backend='eager'."
            )
