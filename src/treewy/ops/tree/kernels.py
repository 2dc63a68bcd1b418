"""Tree tables in Triton: one launch, one program per sequence, and a few that fill the rows of none."""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from treewy.errors import UnsupportedError
from treewy.ops.launch import launch
from treewy.ops.tree.api import FAULT_BOUNDS, FAULT_PARENT, FAULT_SIZE, empty, empty_paths
from treewy.ops.warmup import Facts
from treewy.packed import WORD, PathTables, TreeTables
from treewy.shapes import Tensor

# A program holds its tree's words in registers: rows by words, 2,048 numbers at this many rows.
MAX_ROWS = 256
# Rows that one program beyond those of the sequences fills.
FILL = 256

BITS = tl.constexpr(WORD)
MOVED, OVERSIZED, ROOTLESS = tl.constexpr(FAULT_BOUNDS), tl.constexpr(FAULT_SIZE), tl.constexpr(FAULT_PARENT)


def tables(parents: Tensor, cu_rows: Tensor, out: TreeTables, faults: Tensor | None) -> None:
    """See `api.tables`."""
    check_max_rows(out.max_rows)
    num_seqs, num_rows, num_words = out.num_seqs, out.num_rows, out.ancestors.shape[1]
    launch(
        tree_tables_kernel,
        (num_seqs + -(-num_rows // FILL) or 1,),
        parents.contiguous(),
        cu_rows.contiguous(),
        *out[:5],
        faults,
        num_seqs,
        num_rows,
        out.max_rows,
        HAS_FAULTS=faults is not None,
        BT=next_power_of_2(out.max_rows),
        NW=num_words,
        BW=next_power_of_2(num_words),
        BB=next_power_of_2(num_seqs + 1),
        FILL=FILL,
        num_warps=4,
    )


def paths(tables: TreeTables, nodes: Tensor, out: PathTables) -> None:
    """See `api.paths`."""
    room = out.rows.shape[1]
    launch(
        tree_paths_kernel,
        (tables.num_seqs,),
        tables.parents,
        tables.cu_rows,
        tables.seq_of_row,
        tables.depth,
        nodes.contiguous(),
        *out,
        tables.num_rows,
        room,
        BP=next_power_of_2(room),
        num_warps=1,
    )


def warm(facts: Facts) -> None:
    """Compile tables, with and without faults, and paths, on sequences without rows."""
    for num_seqs, max_rows, max_path in facts.buckets:
        out = empty(num_seqs, 1, max_rows, facts.device)
        none = torch.full((num_seqs,), -1, dtype=torch.int32, device=facts.device)
        for faults in (None, torch.empty_like(none)):
            tables(out.parents, out.cu_rows, out, faults)
        paths(out, none, empty_paths(num_seqs, max_path, facts.device))


def next_power_of_2(number: int) -> int:
    """Return the least power of 2 that is at least this, and 1."""
    return 1 << max(number - 1, 0).bit_length()


def check_max_rows(max_rows: int) -> None:
    """Refuse trees that a program has no registers for.

    Raises:
        UnsupportedError: more than `MAX_ROWS` rows.
    """
    if max_rows > MAX_ROWS:
        raise UnsupportedError(
            f"Tree kernels take trees of at most {MAX_ROWS} rows; got max_rows={max_rows}. Use backend='eager'."
        )


@triton.jit(do_not_specialize=["num_seqs", "num_rows"])
@no_type_check
def tree_tables_kernel(  # noqa: PLR0915
    parents,
    cu_rows,
    out_parents,
    out_cu_rows,
    out_seq_of_row,
    out_depth,
    out_words,
    faults,
    num_seqs,
    num_rows,
    max_rows,
    HAS_FAULTS: tl.constexpr,
    BT: tl.constexpr,
    NW: tl.constexpr,
    BW: tl.constexpr,
    BB: tl.constexpr,
    FILL: tl.constexpr,
):
    """Walk every row of one sequence to its root at once; or make rows of no sequence inert."""
    i_b = tl.program_id(0)
    o_b = tl.arange(0, BB)
    o_w = tl.arange(0, BW)
    # Boundaries raised to the largest before them: disjoint spans inside 0..N, whatever was given. Another program may
    # have written its own already, where out is the input: raising twice changes nothing.
    b_bounds = tl.load(cu_rows + o_b, mask=o_b <= num_seqs, other=0).to(tl.int32)
    start = _bound(b_bounds, o_b, i_b, num_rows)
    if i_b < num_seqs:
        end = _bound(b_bounds, o_b, i_b + 1, num_rows)
        o_t = tl.arange(0, BT)
        m_t = (o_t < end - start) & (o_t < max_rows)
        b_parent = tl.load(parents + start + o_t, mask=m_t, other=-1).to(tl.int32)
        b_up, b_at, b_depth = b_parent, o_t, tl.zeros([BT], tl.int32)
        b_words = tl.zeros([BT, BW], tl.int32)
        m_ok, m_on = m_t, m_t
        # Rows on the way only ever get smaller: a walk ends after at most BT turns.
        while tl.max(m_on.to(tl.int32), 0) > 0:
            b_bit = tl.where(m_on, 1 << (b_at % BITS), 0)
            b_words |= tl.where((b_at // BITS)[:, None] == o_w[None, :], b_bit[:, None], 0)
            m_sound = tl.where(b_at == 0, b_up == -1, (b_up >= 0) & (b_up < b_at))
            m_ok &= m_sound | ~m_on
            m_on &= m_sound & (b_at > 0)
            b_depth += m_on.to(tl.int32)
            b_at = tl.where(m_on, b_up, b_at)
            b_up = tl.load(parents + start + b_at, mask=m_on, other=-1).to(tl.int32)
        # All reads of parents lie before the first write, which may go to the same place.
        tl.debug_barrier()
        row = start + o_t
        tl.store(out_parents + row, tl.where(m_ok, b_parent, -1), mask=m_t)
        tl.store(out_seq_of_row + row, tl.where(m_ok, i_b, -1), mask=m_t)
        tl.store(out_depth + row, tl.where(m_ok, b_depth, 0), mask=m_t)
        p_words = out_words + row.to(tl.int64)[:, None] * NW + o_w[None, :]
        tl.store(p_words, tl.where(m_ok[:, None], b_words, 0), mask=m_t[:, None] & (o_w < NW)[None, :])
        tl.store(out_cu_rows + i_b, start)
        if i_b == num_seqs - 1:
            tl.store(out_cu_rows + num_seqs, end)
        if HAS_FAULTS:
            b_moved = (b_bounds != tl.where(o_b == i_b, start, end)) & ((o_b == i_b) | (o_b == i_b + 1))
            found = tl.where(tl.max(b_moved.to(tl.int32), 0) > 0, MOVED, 0)
            found |= tl.where(end - start > max_rows, OVERSIZED, 0)
            found |= tl.where(tl.max((m_t & ~m_ok).to(tl.int32), 0) > 0, ROOTLESS, 0)
            tl.store(faults + i_b, found)
        # What a tree has no room for is inert.
        o_extra = start + max_rows
        while o_extra < end:
            o_row = o_extra + tl.arange(0, FILL)
            _make_inert(out_parents, out_seq_of_row, out_depth, out_words, o_row, o_row < end, NW, FILL)
            o_extra += FILL
    else:
        first = _bound(b_bounds, o_b, 0, num_rows)
        last = _bound(b_bounds, o_b, num_seqs, num_rows)
        if num_seqs == 0:
            tl.store(out_cu_rows, first)
        o_row = (i_b - num_seqs) * FILL + tl.arange(0, FILL)
        m_row = ((o_row < first) | (o_row >= last)) & (o_row < num_rows)
        _make_inert(out_parents, out_seq_of_row, out_depth, out_words, o_row, m_row, NW, FILL)


@triton.jit
@no_type_check
def _bound(b_bounds, o_b, place, num_rows):
    largest = tl.max(tl.where(o_b <= place, b_bounds, 0), 0)
    return tl.minimum(tl.maximum(largest, 0), num_rows)


@triton.jit
@no_type_check
def _make_inert(out_parents, out_seq_of_row, out_depth, out_words, o_row, m_row, NW: tl.constexpr, FILL: tl.constexpr):
    tl.store(out_parents + o_row, tl.full([FILL], -1, tl.int32), mask=m_row)
    tl.store(out_seq_of_row + o_row, tl.full([FILL], -1, tl.int32), mask=m_row)
    tl.store(out_depth + o_row, tl.zeros([FILL], tl.int32), mask=m_row)
    for i_w in range(NW):
        tl.store(out_words + o_row.to(tl.int64) * NW + i_w, tl.zeros([FILL], tl.int32), mask=m_row)


@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def tree_paths_kernel(parents, cu_rows, seq_of_row, depth, nodes, rows, lengths, num_rows, room, BP: tl.constexpr):
    """Walk from one row of a tree up to its root, writing the path from its end."""
    i_b = tl.program_id(0)
    o_p = tl.arange(0, BP)
    start, end = tl.load(cu_rows + i_b), tl.load(cu_rows + i_b + 1)
    at = tl.load(nodes + i_b).to(tl.int32)
    m_in = (at >= 0) & (at < end - start)
    m_in = m_in & (tl.load(seq_of_row + start + at, mask=m_in, other=-1) == i_b)
    left = tl.load(depth + start + at, mask=m_in, other=-1) + 1
    tl.store(lengths + i_b, tl.minimum(left, room))
    b_path = tl.full([BP], 0, tl.int32) + num_rows
    while left > 0:
        left -= 1
        b_path = tl.where(o_p == left, start + at, b_path)
        if left > 0:
            at = tl.load(parents + start + at)
    tl.store(rows + i_b * room + o_p, b_path, mask=o_p < room)
