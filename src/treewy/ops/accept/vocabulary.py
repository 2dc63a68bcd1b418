"""Passes over one row of logits in Triton: its peak, thresholds, sums of weights, and draws.

A row is read in NC chunks of U blocks of BV tokens. Within a chunk nothing is reduced over threads, so that the loads of
its blocks are in flight together. Sums are float64, in one order, whatever the batch.
"""

from typing import no_type_check

import triton
import triton.language as tl

# A threshold is sought among this many parts of what is left, by one pass.
PARTS = tl.constexpr(4)
MINUS_INFINITY = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))


@triton.jit
@no_type_check
def read_logits(p_row, o_v, V: tl.constexpr):
    """Return a block's logits in float32; past the vocabulary there are none."""
    return tl.load(p_row + o_v, mask=o_v < V, other=MINUS_INFINITY).to(tl.float32)


@triton.jit
@no_type_check
def find_peak(p_row, V: tl.constexpr, NC: tl.constexpr, U: tl.constexpr, BV: tl.constexpr):
    """Return (largest logit, lowest token that has it, whether it is finite and no logit is NaN)."""
    o_b = tl.arange(0, BV)
    b_max = tl.full([BV], float("-inf"), tl.float32)
    b_at = tl.zeros([BV], tl.int32)
    b_bad = tl.zeros([BV], tl.int32)
    for i_c in range(NC):
        for i_u in tl.static_range(U):
            b_logits = read_logits(p_row, (i_c * U + i_u) * BV + o_b, V)
            m_more = b_logits > b_max
            b_max = tl.where(m_more, b_logits, b_max)
            b_at = tl.where(m_more, i_c * U + i_u, b_at)
            b_bad |= (b_logits != b_logits).to(tl.int32)  # noqa: PLR0124, true of a NaN
    peak = tl.max(b_max, 0)
    best = tl.min(tl.where(b_max == peak, b_at * BV + o_b, V), 0)
    is_sound = (tl.max(b_bad, 0) == 0) & (peak > MINUS_INFINITY) & (peak < INFINITY)
    return peak, best, is_sound


@triton.jit
@no_type_check
def weigh(b_logits, peak, per_unit, tau, floor, DT: tl.constexpr):
    """Return what each token weighs beside the most likely one, 0 below the thresholds on logits and on weights."""
    b_weights = tl.exp((b_logits.to(DT) - peak.to(DT)) * per_unit.to(DT))
    return tl.where((b_logits >= tau) & (b_weights >= floor.to(DT)), b_weights, 0.0)


@triton.jit
@no_type_check
def sum_kept(
    p_row, peak, per_unit, tau, floor,
    V: tl.constexpr, NC: tl.constexpr, U: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Return the sum of the weights of each chunk."""
    o_b, o_c = tl.arange(0, BV), tl.arange(0, BC)
    b_sums = tl.zeros([BC], tl.float64)
    for i_c in range(NC):
        b_sum = tl.zeros([BV], tl.float64)
        for i_u in tl.static_range(U):
            o_v = (i_c * U + i_u) * BV + o_b
            b_sum += weigh(read_logits(p_row, o_v, V), peak, per_unit, tau, floor, DT).to(tl.float64)
        b_sums = tl.where(o_c == i_c, tl.sum(b_sum, 0), b_sums)
    return b_sums


@triton.jit
@no_type_check
def find_threshold(
    p_row, lowest, need, peak, per_unit,
    MASS: tl.constexpr, V: tl.constexpr, NC: tl.constexpr, U: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Return the largest logit such that the tokens from it on are `need`, by number or by the sum of their weights.

    The bits of float32, read as integers, are in the order of the numbers: the bracket [low, high) of them narrows to a
    quarter with each pass, and to the logits that lie in it. It ends at one number, so the threshold is exact. The tokens
    from `lowest` on are enough.
    """
    o_b = tl.arange(0, BV)
    low, high = _order(lowest), _order(peak) + 1
    while high - low > 1:
        part = high - low
        one, two, three = low + part // PARTS, low + part * 2 // PARTS, low + part * 3 // PARTS
        t_one, t_two, t_three = _number(one), _number(two), _number(three)
        t_low, t_high = _number(low), _number(high)
        SIZE: tl.constexpr = tl.float64 if MASS else tl.int32
        b_one, b_two, b_three = tl.zeros([BV], SIZE), tl.zeros([BV], SIZE), tl.zeros([BV], SIZE)
        b_first = tl.full([BV], float("inf"), tl.float32)
        b_last = tl.full([BV], float("-inf"), tl.float32)
        for i_c in range(NC):
            for i_u in tl.static_range(U):
                o_v = (i_c * U + i_u) * BV + o_b
                b_logits = read_logits(p_row, o_v, V)
                if MASS:
                    b_size = weigh(b_logits, peak, per_unit, t_low, peak * 0.0, DT).to(tl.float64)
                    b_one += tl.where(b_logits >= t_one, b_size, 0.0)
                    b_two += tl.where(b_logits >= t_two, b_size, 0.0)
                    b_three += tl.where(b_logits >= t_three, b_size, 0.0)
                else:
                    b_one += (b_logits >= t_one).to(tl.int32)
                    b_two += (b_logits >= t_two).to(tl.int32)
                    b_three += (b_logits >= t_three).to(tl.int32)
                m_in = (b_logits >= t_low) & (b_logits < t_high)
                b_first = tl.minimum(b_first, tl.where(m_in, b_logits, INFINITY))
                b_last = tl.maximum(b_last, tl.where(m_in, b_logits, MINUS_INFINITY))
        enough_one, enough_two, enough_three = (
            tl.sum(b_one, 0) >= need, tl.sum(b_two, 0) >= need, tl.sum(b_three, 0) >= need
        )  # fmt: skip
        first, last = tl.min(b_first, 0), tl.max(b_last, 0)
        above = tl.where(enough_one, tl.where(enough_two, tl.where(enough_three, high, three), two), one)
        below = tl.where(enough_three, three, tl.where(enough_two, two, tl.where(enough_one, one, low)))
        # Nothing lies in the bracket only if rounding made `need` more than there is: then everything stays.
        is_empty = first > last
        high = tl.where(is_empty, low + 1, tl.minimum(above, _order(last) + 1))
        low = tl.where(is_empty, low, tl.maximum(below, _order(first)))
    return _number(low)


@triton.jit
@no_type_check
def _order(number):
    bits = number.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
@no_type_check
def _number(order):
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
