"""Device functions over the prior rows of one sequence: its history, then the path that the last step accepted.

`at` is where a program works: (sequence, slot, key head, value head, place of the history or -1).
`count` is (rows of the history, rows of the path). `past` is (history, record, path): history and record may be None, and
there is a path where there is a record. `path` is (rows, lengths, places of a sequence in rows, rows of the record).
"""
# pyright: reportGeneralTypeIssues=false
# Nested ifs ask what is known when the kernel compiles before what is not.

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.gdn.triton_rows import two_sum

# Prior rows are taken this many at a time.
BH = tl.constexpr(16)


# The import hook of the tests must not wrap what Triton compiles: hence no_type_check throughout.
@triton.jit
@no_type_check
def record_row(row, path):
    """Return a path's row, kept within the record whatever the table says."""
    return tl.minimum(tl.maximum(row.to(tl.int64), 0), path[3] - 1)


@triton.jit
@no_type_check
def newest_decays(past, at, count, size):
    """Return the log decays (high, low) from the checkpoint to the history's end, and from there to the path's end."""
    history, record, path = past
    i_b, i_place, i_hv = at[0], at[4].to(tl.int64), at[3]
    num_kept, num_accepted = count
    zero = tl.full([], 0.0, tl.float32)
    past_high, past_low, path_high, path_low = zero, zero, zero, zero
    if history is not None:
        o_past, some = (num_kept - 1) * size.HV + i_hv, num_kept > 0
        past_high = tl.load(history.high + i_place * history.high_slot + o_past, mask=some, other=0.0).to(tl.float32)
        past_low = tl.load(history.low + i_place * history.low_slot + o_past, mask=some, other=0.0).to(tl.float32)
    if record is not None:
        some = num_accepted > 0
        row = record_row(tl.load(path[0] + i_b * path[2] + num_accepted - 1, mask=some, other=0), path)
        path_high = tl.load(record.high + row * record.high_row + i_hv, mask=some, other=0.0).to(tl.float32)
        path_low = tl.load(record.low + row * record.low_row + i_hv, mask=some, other=0.0).to(tl.float32)
    return past_high, past_low, path_high, path_low


@triton.jit
@no_type_check
def tile_of(first, past, at, count):
    """Return of a tile of prior rows: place, whether it is in the history, row of the record, whether it is in the path."""
    num_kept, num_accepted = count
    o_j = first + tl.arange(0, BH)
    m_past = o_j < num_kept
    m_path = (o_j >= num_kept) & (o_j < num_kept + num_accepted)
    rows = tl.zeros([BH], dtype=tl.int64)
    if past[1] is not None:
        path = past[2]
        rows = record_row(tl.load(path[0] + at[0] * path[2] + o_j - num_kept, mask=m_path, other=0), path)
    return o_j, m_past, rows, m_path


@triton.jit
@no_type_check
def weights(past, tile, newest, at, size):
    """Return exp(G_newest - G_i) of a tile of prior rows; 0 where there is none."""
    history, record = past[0], past[1]
    o_j, m_past, rows, m_path = tile
    past_high, past_low, path_high, path_low = newest
    i_place, i_hv = at[4].to(tl.int64), at[3]
    difference = tl.zeros([BH], dtype=tl.float32)
    if history is not None:
        o_past = o_j * size.HV + i_hv
        high = tl.load(history.high + i_place * history.high_slot + o_past, mask=m_past, other=0.0).to(tl.float32)
        low = tl.load(history.low + i_place * history.low_slot + o_past, mask=m_past, other=0.0).to(tl.float32)
        difference = (past_high - high) + (past_low - low) + (path_high + path_low)
    if record is not None:
        high = tl.load(record.high + rows * record.high_row + i_hv, mask=m_path, other=0.0).to(tl.float32)
        low = tl.load(record.low + rows * record.low_row + i_hv, mask=m_path, other=0.0).to(tl.float32)
        difference = tl.where(m_path, (path_high - high) + (path_low - low), difference)
    return tl.exp(tl.where(m_past | m_path, difference, -float("inf")))


@triton.jit
@no_type_check
def pseudo_values(past, tile, at, o_v, size):
    """Return u [BH, BV] of a tile of prior rows in float32, zero where there is none."""
    history, record = past[0], past[1]
    o_j, m_past, rows, m_path = tile
    i_place, i_hv = at[4].to(tl.int64), at[3]
    b_u = tl.zeros([BH, size.BV], dtype=tl.float32)
    m_v = (o_v < size.V)[None, :]
    if history is not None:
        p_u = history.u + i_place * history.u_slot + o_j[:, None] * history.u_row + i_hv * history.u_head + o_v[None, :]
        b_u += tl.load(p_u, mask=m_past[:, None] & m_v, other=0.0).to(tl.float32)
    if record is not None:
        p_u = record.u + rows[:, None] * record.u_row + i_hv * size.V + o_v[None, :]
        b_u += tl.load(p_u, mask=m_path[:, None] & m_v, other=0.0).to(tl.float32)
    return b_u


@triton.jit
@no_type_check
def keys(past, tile, at, i_k, size):
    """Return the block [BH, BK] of k of a tile of prior rows, zero where there is none."""
    history, record = past[0], past[1]
    o_j, m_past, rows, m_path = tile
    i_place, i_h = at[4].to(tl.int64), at[2]
    o_k = (tl.arange(0, size.BK) + i_k * size.BK)[None, :]
    if history is not None:
        p_k = history.k + i_place * history.k_slot + o_j[:, None] * history.k_row + i_h * history.k_head + o_k
        b_k = tl.load(p_k, mask=m_past[:, None], other=0.0)
        if record is not None:
            p_k = record.k + rows[:, None] * record.k_row + i_h * size.K + o_k
            b_k = tl.where(m_path[:, None], tl.load(p_k, mask=m_path[:, None], other=0.0), b_k)
    else:
        p_k = record.k + rows[:, None] * record.k_row + i_h * size.K + o_k
        b_k = tl.load(p_k, mask=m_path[:, None], other=0.0)
    return b_k


@triton.jit
@no_type_check
def append(past, newest, at, count, o_v, leads, size):
    """Write the path's rows behind the history's, log decays counted from the checkpoint.

    Each program brings its own part of u. `leads` says whether it also brings the keys of its key head, and the decays of
    its value head.
    """
    history, record = past[0], past[1]
    i_place, i_h, i_hv = at[4].to(tl.int64), at[2], at[3]
    num_kept, num_accepted = count
    m_v = (o_v < size.V)[None, :]
    first = num_kept
    while first < num_kept + num_accepted:
        o_j, _, rows, m_path = tile_of(first, past, at, count)
        m_u = m_path[:, None] & m_v
        b_u = tl.load(record.u + rows[:, None] * record.u_row + i_hv * size.V + o_v[None, :], mask=m_u, other=0.0)
        p_u = history.u + i_place * history.u_slot + o_j[:, None] * history.u_row + i_hv * history.u_head + o_v[None, :]
        tl.store(p_u, b_u.to(history.u.dtype.element_ty), mask=m_u)
        m_key, m_decay, o_decay = (m_path & leads[0])[:, None], m_path & leads[1], o_j * size.HV + i_hv
        high = tl.load(record.high + rows * record.high_row + i_hv, mask=m_decay, other=0.0).to(tl.float32)
        low = tl.load(record.low + rows * record.low_row + i_hv, mask=m_decay, other=0.0).to(tl.float32)
        high, lost = two_sum(newest[0], high)
        high, low = two_sum(high, lost + (newest[1] + low))
        tl.store(history.high + i_place * history.high_slot + o_decay, high, mask=m_decay)
        tl.store(history.low + i_place * history.low_slot + o_decay, low, mask=m_decay)
        for i_k in tl.range(0, size.K // size.BK, loop_unroll_factor=2):
            o_k = (tl.arange(0, size.BK) + i_k * size.BK)[None, :]
            b_k = tl.load(record.k + rows[:, None] * record.k_row + i_h * size.K + o_k, mask=m_key, other=0.0)
            p_k = history.k + i_place * history.k_slot + o_j[:, None] * history.k_row + i_h * history.k_head + o_k
            tl.store(p_k, b_k.to(history.k.dtype.element_ty), mask=m_key)
        first += BH
