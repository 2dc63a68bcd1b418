"""The prefix's half of attention: every row to a run of committed places."""

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.attention.kernels.softmax import load_columns, softmax_step


@triton.jit
@no_type_check
def page_of(p_table, place, stable_x, num_pages, PAGE: tl.constexpr):
    """Return the page of each place, from a sequence's row of the table; always one of the pool."""
    column = 0 * place if PAGE == 0 else place // PAGE
    page = tl.load(p_table + column * stable_x, mask=place >= 0, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(page, 0), num_pages - 1)


@triton.jit
@no_type_check
def attend_prefix(
    b_q, p_table, stable_x, num_pages, start, stop, p_k, sk_x, sk_m, sk_e, p_v, sv_x, sv_m, sv_e, o_v, top, total, acc,
    scale, E: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the places from `start` to `stop` into the running softmax of a tile of pairs.

    Places past the end are read at the last one: no load of the loop has a mask, and none leaves the sequence. The table
    is read one tile ahead, so that loads of keys and values wait for nothing and can be pipelined.
    """
    o_n, o_e = tl.arange(0, BN), tl.arange(0, BE)
    page = page_of(p_table, tl.minimum(start + o_n, stop - 1), stable_x, num_pages, PAGE)
    for at in range(start, stop, BN):
        place = tl.minimum(at + o_n, stop - 1)
        n_page, n_place = page.to(tl.int64), place.to(tl.int64)
        if PAGE != 0:
            n_place = (place % PAGE).to(tl.int64)
            page = page_of(p_table, tl.minimum(place + BN, stop - 1), stable_x, num_pages, PAGE)
        b_k = load_columns(p_k + n_page * sk_x + n_place * sk_m, o_e, sk_e, E, BE)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        scores = tl.where((at + o_n < stop)[None, :], scores, -float("inf"))
        top, total, acc, weights = softmax_step(scores, top, total, acc, scale)
        b_v = load_columns(p_v + n_page * sv_x + n_place * sv_m, o_v, sv_e, E, BE)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    return top, total, acc
