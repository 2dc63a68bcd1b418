"""The tree's half of attention: every row to its ancestors."""

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.attention.kernels.softmax import softmax_step


@triton.jit
@no_type_check
def not_finite(x):
    """Return which rows hold a value that is not finite."""
    return tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 1) != 0


@triton.jit
@no_type_check
def attend_tree(
    b_q, p_bits, sbits_w, live, first_row, num_rows, p_k, sk_n, sk_e, p_v, sv_n, sv_e, o_v, top, total, acc, scale,
    E: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take a tree's own rows into the running softmax of a tile of pairs.

    Every row sees its root, which is in the first tile, and a pair past the end sees all: no top stays -inf. A tile has
    one word of bits: BN divides 32.
    """
    o_n, o_e = tl.arange(0, BN), tl.arange(0, BE)
    for first in tl.range(0, num_rows, BN, num_stages=1):
        m_n = first + o_n < num_rows
        word = tl.load(p_bits + first // 32 * sbits_w, mask=live, other=-1)
        sees = (((word[:, None] >> (first % 32 + o_n)[None, :]) & 1) != 0) & m_n[None, :]
        n_row = (first_row + first + o_n).to(tl.int64)
        p_rows = p_k + n_row * sk_n
        b_k = tl.load(p_rows[:, None] + o_e[None, :] * sk_e, mask=m_n[:, None] & (o_e < E)[None, :], other=0.0)
        p_rows = p_v + n_row * sv_n
        b_v = tl.load(p_rows[:, None] + o_v[None, :] * sv_e, mask=m_n[:, None] & (o_v < E)[None, :], other=0.0)
        bad = not_finite(b_v)
        if BV != BE:
            for block in tl.static_range(BE // BV):
                o_b = block * BV + tl.arange(0, BV)
                p_b = p_rows[:, None] + o_b[None, :] * sv_e
                bad = bad | not_finite(tl.load(p_b, mask=m_n[:, None] & (o_b < E)[None, :], other=0.0))
        scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        scores = tl.where(sees, scores, -float("inf"))
        top, total, acc, weights = softmax_step(scores, top, total, acc, scale)
        # 0 * NaN is NaN: a row of v that is not finite leaves the product, and comes back to its viewers.
        spoiled = tl.max((sees & bad[None, :]).to(tl.int32), 1) != 0
        total = tl.where(spoiled, float("nan"), total)
        b_v = tl.where(bad[:, None], 0.0, b_v).to(b_v.dtype)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    return top, total, acc
