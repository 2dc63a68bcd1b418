"""What both halves of attention share: a running softmax, and loads of rows."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def softmax_step(scores, top, total, acc, scale):
    """Take a tile of scores into the running softmax; return it with the tile's weights.

    Scores are raw until their difference is taken: `score * scale - top` may be contracted to one rounding, and then
    the rounding error of a huge score is what is exponentiated.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.math.exp2((scores - new_top[:, None]) * scale)
    shrink = tl.math.exp2((top - new_top) * scale)
    return new_top, total * shrink + tl.sum(weights, 1), acc * shrink[:, None], weights


@triton.jit
@no_type_check
def load_columns(p_rows, there, o_e, s_e, E: tl.constexpr, BE: tl.constexpr, WHOLE: tl.constexpr):
    """Load columns of rows; zeros for rows that are not there, unless all are: WHOLE."""
    p = p_rows[:, None] + o_e[None, :] * s_e
    if WHOLE and E == BE:
        return tl.load(p)
    if WHOLE:
        return tl.load(p, mask=(o_e < E)[None, :], other=0.0)
    return tl.load(p, mask=there[:, None] & (o_e < E)[None, :], other=0.0)
