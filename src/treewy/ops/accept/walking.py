"""Greedy acceptance in Triton: the most likely token of each row, and the walks that follow them."""

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.accept.records import NO_TOKEN, Ending
from treewy.ops.accept.vocabulary import find_peak

NONE = tl.constexpr(NO_TOKEN)
RECOVERED, BONUS, CUT = (tl.constexpr(int(x)) for x in (Ending.RECOVERED, Ending.BONUS, Ending.CUT))
NOT_FINITE, NOTHING = (tl.constexpr(int(x)) for x in (Ending.NOT_FINITE, Ending.NOTHING))


@triton.jit
@no_type_check
def accept_choices_kernel(
    logits, seq_of_row, slots, choices, stride,
    HAS_TABLES: tl.constexpr, HAS_SLOTS: tl.constexpr,
    V: tl.constexpr, NC: tl.constexpr, U: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Find the most likely token of one row; an inert one is not read."""
    i_n = tl.program_id(0)
    is_live = True
    if HAS_TABLES:
        seq = tl.load(seq_of_row + i_n)
        is_live = seq >= 0
        if HAS_SLOTS:
            is_live = tl.load(slots + seq, mask=seq >= 0, other=-1) >= 0
    choice = NONE
    if is_live:
        _, best, is_sound = find_peak(logits + i_n.to(tl.int64) * stride, V, NC, U, BV)
        choice = tl.where(is_sound, best, NONE)
    tl.store(choices + i_n, choice)


@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def accept_walk_kernel(
    parents, cu_rows, seq_of_row, tokens, choices, slots, rows, out_tokens, lengths, endings, num_used, num_rows, room,
    HAS_SLOTS: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Walk down one tree, from child to child that holds the choice."""
    i_b = tl.program_id(0)
    start, b_parents, b_tokens, is_going = read_tree(
        parents, cu_rows, seq_of_row, tokens, slots, i_b, num_rows, HAS_SLOTS, BT
    )
    o_p = tl.arange(0, BP)
    b_rows = tl.full([BP], 0, tl.int32) + num_rows
    b_delivered = tl.full([BP], NONE, tl.int32)
    ending = tl.where(is_going, CUT, NOTHING)
    is_going = is_going & (room > 0)
    at, length = 0, 0
    while is_going:
        choice = tl.load(choices + start + at).to(tl.int32)
        if choice < 0:
            ending = NOT_FINITE
            is_going = False
        else:
            b_rows = tl.where(o_p == length, start + at, b_rows)
            b_delivered = tl.where(o_p == length, choice, b_delivered)
            length += 1
            child, ending = follow(b_parents, b_tokens, at, -1, choice, BT)
            is_going = (child < BT) & (length < room)
            at = tl.where(is_going, child, at)
    write_walk(rows, out_tokens, lengths, endings, num_used, i_b, room, b_rows, b_delivered, length, ending, 0, BP)


@triton.jit
@no_type_check
def read_tree(parents, cu_rows, seq_of_row, tokens, slots, i_b, num_rows, HAS_SLOTS: tl.constexpr, BT: tl.constexpr):
    """Return (first row, parents and tokens of the tree's rows, whether there is a root and a slot)."""
    o_t = tl.arange(0, BT)
    start, end = tl.load(cu_rows + i_b), tl.load(cu_rows + i_b + 1)
    # Rows of no sequence among the tree's have parent -1, and the root's row is where every walk starts.
    b_parents = tl.load(parents + start + o_t, mask=o_t < end - start, other=-1)
    b_tokens = tl.load(tokens + start + o_t, mask=o_t < end - start, other=-1).to(tl.int32)
    is_live = tl.load(seq_of_row + start, mask=end > start, other=-1) == i_b
    if HAS_SLOTS:
        is_live = is_live & (tl.load(slots + i_b) >= 0)
    return start, b_parents, b_tokens, is_live


@triton.jit
@no_type_check
def follow(b_parents, b_tokens, at, after, choice, BT: tl.constexpr):
    """Return (the first child of a row past `after` that holds the choice, BT if none; how a walk that ends here ends).

    A walk that goes on and has no room left is cut, so that is the ending where there is a child.
    """
    o_t = tl.arange(0, BT)
    m_child = b_parents == at
    child = tl.min(tl.where(m_child & (o_t > after) & (b_tokens == choice), o_t, BT), 0)
    last = tl.where(tl.max(m_child.to(tl.int32), 0) > 0, RECOVERED, BONUS)
    return child, tl.where(child < BT, CUT, last)


@triton.jit
@no_type_check
def write_walk(
    rows, out_tokens, lengths, endings, num_used, i_b, room, b_rows, b_delivered, length, ending, taken,
    BP: tl.constexpr,
):  # fmt: skip
    """Write the outcome of one walk, and that there is nothing past it."""
    o_p = tl.arange(0, BP)
    o_out = i_b.to(tl.int64) * room + o_p
    tl.store(rows + o_out, b_rows, mask=o_p < room)
    tl.store(out_tokens + o_out, b_delivered, mask=o_p < room)
    tl.store(lengths + i_b, length)
    tl.store(endings + i_b, ending)
    tl.store(num_used + i_b, taken)
