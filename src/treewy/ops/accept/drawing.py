"""Sampled acceptance in Triton: one program walks one tree, and reads the logits of the rows on its way only."""

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.accept.vocabulary import MINUS_INFINITY, find_peak, find_threshold, read_logits, sum_kept, weigh
from treewy.ops.accept.walking import CUT, NONE, NOT_FINITE, NOTHING, follow, read_tree, write_walk


@triton.jit(do_not_specialize=["num_rows", "room", "num_laws"])
@no_type_check
def accept_sampled_kernel(
    parents, cu_rows, seq_of_row, tokens, logits, temperature, top_k, top_p, min_p, uniforms, laws, law_of_row, slots,
    rows, out_tokens, lengths, endings, num_used, notes, num_rows, room, max_rows, logits_stride, uniforms_stride, laws_stride,
    num_laws,
    HAS_LAWS: tl.constexpr, HAS_SLOTS: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
    NX: tl.constexpr, UX: tl.constexpr, BX: tl.constexpr,
    V: tl.constexpr, NC: tl.constexpr, U: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Walk down one tree: at each row choose what follows it, as `accept.choose_sampled` does."""
    i_b = tl.program_id(0)
    start, b_parents, b_tokens, is_going = read_tree(
        parents, cu_rows, seq_of_row, tokens, slots, i_b, num_rows, HAS_SLOTS, BT
    )
    o_p = tl.arange(0, BP)
    b_rows = tl.full([BP], 0, tl.int32) + num_rows
    b_delivered = tl.full([BP], NONE, tl.int32)
    ending = tl.where(is_going, CUT, NOTHING)
    is_going = is_going & (room > 0)
    heat = tl.load(temperature + i_b).to(tl.float64)
    is_drawing = heat > 0
    # From 1e30 on every token weighs 1, and its inverse is still a float32: -inf times 0 would be NaN.
    per_unit = 1.0 / tl.where(is_drawing, tl.minimum(heat, 1e30), 1.0)
    # Out of range counts as the nearest that is not, as `RequestLaws` says; 64 bits do not wrap.
    num_top = tl.minimum(tl.maximum(tl.load(top_k + i_b).to(tl.int64), 0), V).to(tl.int32)
    nucleus, floor = tl.load(top_p + i_b).to(tl.float64), tl.load(min_p + i_b).to(tl.float64)
    floor = tl.where(floor > 0, tl.where(floor < 1, floor, 1.0), 0.0)
    p_uniform = uniforms + i_b.to(tl.int64) * uniforms_stride
    p_notes = notes + i_b.to(tl.int64) * max_rows * 3
    at, length, taken = 0, 0, 0
    while is_going:
        p_row = logits + (start + at).to(tl.int64) * logits_stride
        peak, choice, is_sound = find_peak(p_row, V, NX, UX, BX)
        child, after = BT, -1
        if is_sound & is_drawing:
            tau, b_sums = find_law(
                p_row, peak, per_unit, num_top, nucleus, floor, V, NC, U, BV, BC, DT
            )  # fmt: skip
            total = tl.sum(b_sums, 0)
            p_law, num_fallen = laws, 0
            if HAS_LAWS:
                law = tl.load(law_of_row + start + at).to(tl.int32)
                law = tl.where(law < num_laws, law, -1)  # nothing is read past the laws
                p_law = laws + tl.maximum(law, 0).to(tl.int64) * laws_stride
                if law >= 0:
                    child, choice, after, taken, num_fallen, b_sums = try_drafts(
                        p_row, p_law, b_parents, b_tokens, at, choice, peak, per_unit, tau, floor, total, b_sums, p_uniform,
                        taken, p_notes, BT, V, NC, U, BV, BC, DT,
                    )  # fmt: skip
            if child == BT:
                uniform = tl.load(p_uniform + taken).to(tl.float64)
                taken += 1
                choice = draw(
                    p_row, p_law, peak, per_unit, tau, floor, total, num_fallen, p_notes, b_sums, uniform,
                    HAS_LAWS, V, NC, U, BV, BC, DT,
                )  # fmt: skip
        if is_sound:
            b_rows = tl.where(o_p == length, start + at, b_rows)
            b_delivered = tl.where(o_p == length, choice, b_delivered)
            length += 1
            if child == BT:
                child, ending = follow(b_parents, b_tokens, at, after, choice, BT)
            else:
                ending = CUT
            is_going = (child < BT) & (length < room)
            at = tl.where(is_going, child, at)
        else:
            ending = NOT_FINITE
            is_going = False
    write_walk(rows, out_tokens, lengths, endings, num_used, i_b, room, b_rows, b_delivered, length, ending, taken, BP)


@triton.jit
@no_type_check
def find_law(
    p_row, peak, per_unit, num_top, nucleus, floor,
    V: tl.constexpr, NC: tl.constexpr, U: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Return (the logit that tokens are kept from, sums of the kept weights by chunks); see `sampling.Law`."""
    tau = peak * 0.0 + MINUS_INFINITY
    if (num_top > 0) & (num_top < V):
        tau = find_threshold(p_row, tau, num_top, peak, per_unit, False, V, NC, U, BV, DT)
    if nucleus < 1:
        need = nucleus * tl.sum(sum_kept(p_row, peak, per_unit, tau, floor * 0.0, V, NC, U, BV, BC, DT), 0)
        tau = find_threshold(p_row, tau, need, peak, per_unit, True, V, NC, U, BV, DT)
    return tau, sum_kept(p_row, peak, per_unit, tau, floor, V, NC, U, BV, BC, DT)


@triton.jit
@no_type_check
def try_drafts(
    p_row, p_law, b_parents, b_tokens, at, choice, peak, per_unit, tau, floor, total, b_sums, p_uniform, taken, p_notes,
    BT: tl.constexpr, V: tl.constexpr, NC: tl.constexpr, U: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Test one row's drawn children in order, until one stands or the drafter's law is used up.

    Return (the child that stands, BT if none; its token; the last child tested; numbers taken; drafts that fell; sums of
    what they left of the target's law, by chunks).
    """
    o_t = tl.arange(0, BT)
    child, after, num_fallen = BT, -1, 0
    mass = sum_law(p_law, V, NC, U, BV)
    is_trying = mass > 0
    while is_trying:
        drawn = tl.min(tl.where((b_parents == at) & (o_t > after), o_t, BT), 0)
        token = tl.sum(tl.where(o_t == drawn, b_tokens, 0), 0)
        m_known = (drawn < BT) & (token >= 0) & (token < V)
        logit = tl.load(p_row + token, mask=m_known, other=MINUS_INFINITY).to(tl.float32)
        p = weigh(logit, peak, per_unit, tau, floor, DT) / total.to(DT)
        q = tl.load(p_law + token, mask=m_known, other=0.0).to(DT)
        p, q = reduce(p, q, token, num_fallen, p_notes)
        is_trying = drawn < BT
        after = tl.where(is_trying, drawn, after)
        # A token that the law could not give falls, and leaves everything as it was.
        if q > 0:
            uniform = tl.load(p_uniform + taken).to(tl.float64)
            taken += 1
            if uniform < p.to(tl.float64) / (q.to(tl.float64) / mass):
                child = drawn
            else:
                b_left, mass_left = sum_left(
                    p_row, p_law, peak, per_unit, tau, floor, total, mass, token, num_fallen, p_notes,
                    V, NC, U, BV, BC, DT,
                )  # fmt: skip
                left = tl.sum(b_left, 0)
                # Nothing can be left only if rounding made a certain acceptance uncertain.
                child = tl.where(left > 0, BT, drawn)
                if left > 0:
                    tl.store(p_notes + num_fallen * 3, mass)
                    tl.store(p_notes + num_fallen * 3 + 1, left)
                    tl.store(p_notes + num_fallen * 3 + 2, token.to(tl.float64))
                    # All threads read what one has noted.
                    tl.debug_barrier()
                    num_fallen += 1
                    b_sums, mass = b_left, mass_left
            choice = tl.where(child < BT, token, choice)
            is_trying = (child == BT) & (mass > 0)
    return child, choice, after, taken, num_fallen, b_sums


@triton.jit
@no_type_check
def reduce(p, q, token, num_fallen, p_notes):
    """Return what is left at tokens of the target's law and of the drafter's, after the drafts noted so far have fallen."""
    i = 0
    while i < num_fallen:
        mass = tl.load(p_notes + i * 3).to(p.dtype)
        left = tl.load(p_notes + i * 3 + 1).to(p.dtype)
        fallen = tl.load(p_notes + i * 3 + 2).to(tl.int32)
        p = tl.maximum(p - q / mass, 0.0) / left
        q = tl.where(token == fallen, 0.0, q)
        i += 1
    return p, q


@triton.jit
@no_type_check
def sum_law(p_law, V: tl.constexpr, NC: tl.constexpr, U: tl.constexpr, BV: tl.constexpr):
    """Return the sum of a drafter's law."""
    b_sum = tl.zeros([BV], tl.float64)
    for i_c in range(NC):
        for i_u in tl.static_range(U):
            o_v = (i_c * U + i_u) * BV + tl.arange(0, BV)
            b_sum += tl.load(p_law + o_v, mask=o_v < V, other=0.0).to(tl.float64)
    return tl.sum(b_sum, 0)


@triton.jit
@no_type_check
def sum_left(
    p_row, p_law, peak, per_unit, tau, floor, total, mass, fallen, num_fallen, p_notes,
    V: tl.constexpr, NC: tl.constexpr, U: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Return what one more fallen draft leaves: the target's law, not normalised, by chunks; and the sum of the drafter's."""
    o_b, o_c = tl.arange(0, BV), tl.arange(0, BC)
    b_sums = tl.zeros([BC], tl.float64)
    b_mass = tl.zeros([BV], tl.float64)
    for i_c in range(NC):
        b_sum = tl.zeros([BV], tl.float64)
        for i_u in tl.static_range(U):
            o_v = (i_c * U + i_u) * BV + o_b
            b_p = weigh(read_logits(p_row, o_v, V), peak, per_unit, tau, floor, DT) / total.to(DT)
            b_q = tl.load(p_law + o_v, mask=o_v < V, other=0.0).to(DT)
            b_p, b_q = reduce(b_p, b_q, o_v, num_fallen, p_notes)
            b_sum += tl.maximum(b_p - b_q / mass.to(DT), 0.0).to(tl.float64)
            b_mass += tl.where(o_v == fallen, 0.0, b_q).to(tl.float64)
        b_sums = tl.where(o_c == i_c, tl.sum(b_sum, 0), b_sums)
    return b_sums, tl.sum(b_mass, 0)


@triton.jit
@no_type_check
def draw(
    p_row, p_law, peak, per_unit, tau, floor, total, num_fallen, p_notes, b_sums, uniform, HAS_LAWS: tl.constexpr,
    V: tl.constexpr, NC: tl.constexpr, U: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Return the token at which the running sum of what is left passes `uniform` times all of it; never one of weight 0."""
    o_b, o_c = tl.arange(0, BV), tl.arange(0, BC)
    b_passed = tl.cumsum(b_sums, 0)
    goal = uniform * tl.max(b_passed, 0)
    last = tl.max(tl.where(b_sums > 0, o_c, 0), 0)
    chunk = tl.minimum(tl.min(tl.where((b_passed > goal) & (b_sums > 0), o_c, BC), 0), last)
    before = tl.sum(tl.where(o_c == chunk - 1, b_passed, 0.0), 0)
    # By chunks sums are weights, and what is left is a law: within one, both count as the chunk's own.
    token, spare = V, -1
    for i_u in tl.static_range(U):
        o_v = (chunk * U + i_u) * BV + o_b
        b_p = weigh(read_logits(p_row, o_v, V), peak, per_unit, tau, floor, DT)
        if HAS_LAWS:  # noqa: SIM102, compiled or not
            if num_fallen > 0:
                b_q = tl.load(p_law + o_v, mask=o_v < V, other=0.0).to(DT)
                # The last draft that fell left its law unnormalised, as its sums are.
                left = tl.load(p_notes + num_fallen * 3 - 2)
                b_p, b_q = reduce(b_p / total.to(DT), b_q, o_v, num_fallen, p_notes)
                b_p = b_p * left.to(DT)
        b_weights = b_p.to(tl.float64)
        b_running = before + tl.cumsum(b_weights, 0)
        token = tl.minimum(token, tl.min(tl.where((b_running > goal) & (b_weights > 0), o_v, V), 0))
        spare = tl.maximum(spare, tl.max(tl.where(b_weights > 0, o_v, -1), 0))
        before += tl.sum(b_weights, 0)
    # Rounding may carry the goal past every sum.
    return tl.where(token < V, token, spare)
