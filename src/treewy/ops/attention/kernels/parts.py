"""The kernel of one part: a tile of a tree's rows and query heads against a run of committed places, or their tree too."""

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.attention.kernels.geometry import GRAIN as GRAIN_PLACES
from treewy.ops.attention.kernels.prefix import attend_prefix
from treewy.ops.attention.kernels.tree import attend_tree

GRAIN = tl.constexpr(GRAIN_PLACES)


@triton.jit
@no_type_check
def chunk_len(length, pairs, least, most, per_pair, fewest, share, max_chunks):
    """Return the places per chunk of a prefix; as `geometry.Chunking.chunk_len`."""
    pairs = tl.maximum(pairs, 1)
    chunks = tl.minimum(tl.maximum(share // pairs, fewest), max_chunks)
    places = tl.minimum(tl.maximum(per_pair * pairs, least), most)
    return tl.cdiv(tl.maximum(tl.cdiv(length, chunks), places), GRAIN) * GRAIN


@triton.jit(
    do_not_specialize=[
        *("num_pages", "max_places", "max_rows", "num_queries", "stable_b", "sbits_n"),
        *("least", "most", "per_pair", "fewest", "share", "max_chunks"),
    ]
)
@no_type_check
def attend_parts_kernel(
    q, k, v, keys, values, block_tables, lengths, cu_rows, cu_queries, ancestors, sums, tops, totals,
    scale, num_pages, max_places, max_rows, num_queries, least, most, per_pair, fewest, share, max_chunks,
    sq_n, sq_h, sq_e, sk_n, sk_h, sk_e, sv_n, sv_h, sv_e,
    skeys_x, skeys_m, skeys_h, skeys_e, svalues_x, svalues_m, svalues_h, svalues_e, stable_b, stable_x, sbits_n, sbits_w,
    HK: tl.constexpr, G: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, PIECE: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from BM (row, query head) pairs of one KV head to one chunk of the prefix, the first also to the tree.

    A unit is a tile of pairs beside a chunk; how many there are is the sequence's own matter, and the grid has as many as
    a sequence may need. Rows are those of the trees that ask: the last ones. PAGE = 0: one page holds a whole sequence.
    Sums, tops and totals are [num_parts, queries, HQ]: not divided, raw scores' maxima, weights' sums. `scale` counts in
    powers of 2.
    """
    i_v, i_unit = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_head, i_seq = tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.minimum(tl.load(lengths + i_seq).to(tl.int32), max_places)
    first_row = tl.load(cu_rows + i_seq)
    num_rows = tl.minimum(tl.load(cu_rows + i_seq + 1) - first_row, max_rows)
    first_query = tl.load(cu_queries + i_seq)
    asking = tl.minimum(tl.load(cu_queries + i_seq + 1) - first_query, num_rows)
    num_tiles = tl.cdiv(asking * G, BM)
    per_chunk = chunk_len(length, asking * G, least, most, per_pair, fewest, share, max_chunks)
    i_part = i_unit // tl.maximum(num_tiles, 1)
    start = i_part * per_chunk
    if (length < 0) | (num_tiles <= 0) | ((i_part > 0) & (start >= length)):
        return
    i_tile = i_unit % num_tiles
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

    p_keys, p_values = keys + i_head * skeys_h, values + i_head * svalues_h
    top, total, acc = attend_prefix(
        *(b_q, block_tables + i_seq.to(tl.int64) * stable_b, stable_x, num_pages, start, stop),
        *(p_keys, skeys_x, skeys_m, skeys_e, p_values, svalues_x, svalues_m, svalues_e),
        *(o_v, top, total, acc, scale, E, PAGE, PIECE, UNIT, BN, BE, NUM_STAGES, PRECISION),
    )
    # After the prefix: with a loop before that one, the compiler lets tensor-core products wait for each other.
    nodes = tl.where(i_part == 0, num_rows, 0)
    p_bits = ancestors + (first_row + num_rows - asking + i_query).to(tl.int64) * sbits_n
    top, total, acc = attend_tree(
        *(b_q, p_bits, sbits_w, live, first_row, nodes, k + i_head * sk_h, sk_n, sk_e),
        *(v + i_head * sv_h, sv_n, sv_e, o_v, top, total, acc, scale, E, BN, BE, BV, PRECISION),
    )

    part = (i_part.to(tl.int64) * num_queries + n_query) * (HK * G) + head
    tl.store(sums + part[:, None] * E + o_v[None, :], acc, mask=live[:, None] & m_v[None, :])
    if i_v == 0:
        tl.store(tops + part, top, mask=live)
        tl.store(totals + part, total, mask=live)
