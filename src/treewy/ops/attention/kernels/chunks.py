"""The kernel of one chunk: a tile of a tree's rows and query heads against a run of committed places."""

from typing import no_type_check

import triton
import triton.language as tl

# Chunks are cut at multiples of this many places, so that tiles of places never straddle two.
GRAIN = tl.constexpr(128)


@triton.jit
@no_type_check
def chunk_len(length, MIN_PLACES: tl.constexpr, MAX_CHUNKS: tl.constexpr):
    """Return the places per chunk of a prefix: a function of its own length and of constants, of nothing else."""
    share = tl.cdiv(tl.cdiv(length, MAX_CHUNKS), GRAIN) * GRAIN
    return tl.maximum(share, MIN_PLACES)


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
def not_finite(p_rows, m_rows, s_e, E: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr):
    """Return which rows hold a value that is not finite, in any of their E columns."""
    bad = tl.zeros_like(m_rows.to(tl.int32))
    for block in tl.static_range(NV):
        o_v = block * BV + tl.arange(0, BV)
        x = tl.load(p_rows[:, None] + o_v[None, :] * s_e, mask=m_rows[:, None] & (o_v < E)[None, :], other=0.0)
        bad = tl.maximum(bad, tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 1))
    return bad != 0


@triton.jit
@no_type_check
def page_of(p_table, place, stable_x, num_pages, PAGE: tl.constexpr):
    """Return the page of each place, from a sequence's row of the table; always one of the pool."""
    column = 0 * place if PAGE == 0 else place // PAGE
    page = tl.load(p_table + column * stable_x, mask=place >= 0, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(page, 0), num_pages - 1)


@triton.jit
@no_type_check
def load_columns(p_rows, o_e, s_e, E: tl.constexpr, BE: tl.constexpr):
    """Load columns of rows; without a mask where the head dim fills its block."""
    p = p_rows[:, None] + o_e[None, :] * s_e
    if E == BE:
        return tl.load(p)
    return tl.load(p, mask=(o_e < E)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_pages", "max_places", "num_queries"])
@no_type_check
def attend_chunks_kernel(
    q, k, v, keys, values, block_tables, lengths, cu_rows, cu_queries, ancestors, sums, tops, totals,
    scale, num_pages, max_places, num_queries,
    sq_n, sq_h, sq_e, sk_n, sk_h, sk_e, sv_n, sv_h, sv_e,
    skeys_x, skeys_m, skeys_h, skeys_e, svalues_x, svalues_m, svalues_h, svalues_e, stable_b, stable_x, sbits_n, sbits_w,
    HK: tl.constexpr, G: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, MIN_PLACES: tl.constexpr, MAX_CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from BM (row, query head) pairs of one KV head to one chunk of the prefix; chunk 0 brings the tree.

    Rows are those of the trees that ask: the last ones. PAGE = 0: one page holds a whole sequence. Sums, tops and
    totals are [NUM_CHUNKS, queries, HQ]: not divided, raw scores' maxima, weights' sums. `scale` counts in powers of 2.
    """
    i_tile, i_v = tl.program_id(0) // NV, tl.program_id(0) % NV
    i_head, i_chunk = tl.program_id(1) // NUM_CHUNKS, tl.program_id(1) % NUM_CHUNKS
    i_seq = tl.program_id(2)
    length = tl.minimum(tl.load(lengths + i_seq).to(tl.int32), max_places)
    first_row = tl.load(cu_rows + i_seq)
    num_rows = tl.load(cu_rows + i_seq + 1) - first_row
    first_query = tl.load(cu_queries + i_seq)
    asking = tl.load(cu_queries + i_seq + 1) - first_query
    per_chunk = chunk_len(length, MIN_PLACES, MAX_CHUNKS)
    start = i_chunk * per_chunk
    if (length < 0) | (i_tile * BM >= asking * G) | ((start >= length) & (i_chunk > 0)):
        return
    stop = tl.minimum(start + per_chunk, length)

    pair = i_tile * BM + tl.arange(0, BM)
    i_query, head = pair // G, i_head * G + pair % G
    live = i_query < asking
    o_e, o_v = tl.arange(0, BE), i_v * BV + tl.arange(0, BV)
    m_e, m_v = o_e < E, o_v < E
    n_query = (first_query + i_query).to(tl.int64)
    p_q = q + (n_query * sq_n + head * sq_h)[:, None] + o_e[None, :] * sq_e
    b_q = tl.load(p_q, mask=live[:, None] & m_e[None, :], other=0.0)

    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)

    if i_chunk == 0:
        # Every row sees its root, which is in the first tile, and a pair past the end sees all: no top stays -inf.
        p_bits = ancestors + (first_row + num_rows - asking + i_query).to(tl.int64) * sbits_n
        for first in tl.range(0, num_rows, BN, num_stages=1):
            node = first + tl.arange(0, BN)
            m_n = node < num_rows
            p_words = p_bits[:, None] + (node // 32)[None, :] * sbits_w
            words = tl.load(p_words, mask=live[:, None] & m_n[None, :], other=-1)
            sees = (((words >> (node % 32)[None, :]) & 1) != 0) & m_n[None, :]
            n_row = (first_row + node).to(tl.int64)
            p_k = k + (n_row * sk_n + i_head * sk_h)[:, None] + o_e[None, :] * sk_e
            b_k = tl.load(p_k, mask=m_n[:, None] & m_e[None, :], other=0.0)
            scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            scores = tl.where(sees, scores, -float("inf"))
            top, total, acc, weights = softmax_step(scores, top, total, acc, scale)
            # 0 * NaN is NaN: a row of v that is not finite leaves the product, and comes back to its viewers.
            p_v = v + n_row * sv_n + i_head * sv_h
            bad = not_finite(p_v, m_n, sv_e, E, BV, NV)
            spoiled = tl.max((sees & bad[None, :]).to(tl.int32), 1) != 0
            total = tl.where(spoiled, float("nan"), total)
            m_good = (m_n & ~bad)[:, None] & m_v[None, :]
            b_v = tl.load(p_v[:, None] + o_v[None, :] * sv_e, mask=m_good, other=0.0)
            acc = tl.dot(weights.to(b_v.dtype), b_v, acc, input_precision=PRECISION)

    # Places past the end are read at the last one: no load of the loop has a mask, and none leaves the sequence. The
    # table is read one tile ahead, so that loads of keys and values wait for nothing and can be pipelined.
    p_table = block_tables + i_seq.to(tl.int64) * stable_b
    place = tl.minimum(start + tl.arange(0, BN), stop - 1)
    page = page_of(p_table, place, stable_x, num_pages, PAGE)
    for at in range(start, stop, BN):
        place = tl.minimum(at + tl.arange(0, BN), stop - 1)
        n_page, n_place = page.to(tl.int64), place.to(tl.int64)
        if PAGE != 0:
            n_place = (place % PAGE).to(tl.int64)
            page = page_of(p_table, tl.minimum(place + BN, stop - 1), stable_x, num_pages, PAGE)
        b_k = load_columns(keys + n_page * skeys_x + n_place * skeys_m + i_head * skeys_h, o_e, skeys_e, E, BE)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        scores = tl.where((at + tl.arange(0, BN) < stop)[None, :], scores, -float("inf"))
        top, total, acc, weights = softmax_step(scores, top, total, acc, scale)
        p_v = values + n_page * svalues_x + n_place * svalues_m + i_head * svalues_h
        b_v = load_columns(p_v, o_v, svalues_e, E, BE)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc, input_precision=PRECISION)

    part = (i_chunk.to(tl.int64) * num_queries + n_query) * (HK * G) + head
    tl.store(sums + part[:, None] * E + o_v[None, :], acc, mask=live[:, None] & m_v[None, :])
    if i_v == 0:
        tl.store(tops + part, top, mask=live)
        tl.store(totals + part, total, mask=live)
