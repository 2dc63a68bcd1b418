"""The prefix's half of attention: every row to a run of committed places."""

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.attention.kernels.softmax import load_columns, softmax_step


@triton.jit
@no_type_check
def rows_at(page, within, s_x, s_m, BN: tl.constexpr, PIECE: tl.constexpr, UNIT: tl.constexpr):
    """Return where BN places begin in a pool, from page and place of each piece of PIECE places.

    Counted in UNIT elements until the end, so that the compiler sees how rows are aligned.
    """
    piece = page.to(tl.int64) * (s_x // UNIT) + (within * (s_m // UNIT)).to(tl.int64)
    pieces = tl.reshape(tl.broadcast_to(piece[:, None], (BN // PIECE, PIECE)), (BN,))
    return (pieces + (tl.arange(0, BN) % PIECE) * (s_m // UNIT)) * UNIT


@triton.jit
@no_type_check
def attend_tiles(
    b_q, p_table, stable_x, num_pages, start, stop, p_k, sk_x, sk_m, sk_e, p_v, sv_x, sv_m, sv_e, o_v, top, total, acc,
    scale, E: tl.constexpr, PAGE: tl.constexpr, PIECE: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr,
    BE: tl.constexpr, NUM_STAGES: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the places from `start` to `stop` into the running softmax of a tile of pairs; WHOLE: no tile passes `stop`.

    A page is looked up once for PIECE places, which never straddle two, and the look-up is pipelined as well: it is a
    load of its own, some tiles ahead.
    """
    o_n, o_e = tl.arange(0, BN), tl.arange(0, BE)
    for at in tl.range(start, stop, BN, num_stages=NUM_STAGES):
        piece = at + tl.arange(0, BN // PIECE) * PIECE
        if not WHOLE:
            piece = tl.minimum(piece, stop - 1)
        column, within = 0 * piece, piece
        if PAGE != 0:
            column, within = piece // PAGE, piece % PAGE // PIECE * PIECE
        page = tl.load(p_table + column * stable_x).to(tl.int32)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        there = at + o_n < stop
        b_k = load_columns(p_k + rows_at(page, within, sk_x, sk_m, BN, PIECE, UNIT), there, o_e, sk_e, E, BE, WHOLE)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if not WHOLE:
            scores = tl.where(there[None, :], scores, -float("inf"))
        top, total, acc, weights = softmax_step(scores, top, total, acc, scale)
        b_v = load_columns(p_v + rows_at(page, within, sv_x, sv_m, BN, PIECE, UNIT), there, o_v, sv_e, E, BE, WHOLE)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    return top, total, acc


@triton.jit
@no_type_check
def attend_prefix(
    b_q, p_table, stable_x, num_pages, start, stop, p_k, sk_x, sk_m, sk_e, p_v, sv_x, sv_m, sv_e, o_v, top, total, acc,
    scale, E: tl.constexpr, PAGE: tl.constexpr, PIECE: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr,
    BE: tl.constexpr, NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the places from `start` to `stop` into the running softmax of a tile of pairs.

    The tile that passes the end comes last, on its own: no load of the pipelined loop has a mask.
    """
    whole = start + (stop - start) // BN * BN
    top, total, acc = attend_tiles(
        *(b_q, p_table, stable_x, num_pages, start, whole, p_k, sk_x, sk_m, sk_e, p_v, sv_x, sv_m, sv_e),
        *(o_v, top, total, acc, scale, E, PAGE, PIECE, UNIT, BN, BE, NUM_STAGES, True, PRECISION),
    )
    return attend_tiles(
        *(b_q, p_table, stable_x, num_pages, whole, stop, p_k, sk_x, sk_m, sk_e, p_v, sv_x, sv_m, sv_e),
        *(o_v, top, total, acc, scale, E, PAGE, PIECE, UNIT, BN, BE, 1, False, PRECISION),
    )
