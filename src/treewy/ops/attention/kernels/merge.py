"""The kernel that merges the parts of each row by log-sum-exp."""

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.attention.kernels.parts import chunk_len


@triton.jit(do_not_specialize=["max_places", "num_queries", "min_places", "max_chunks"])
@no_type_check
def merge_parts_kernel(
    sums, tops, totals, seq_of_query, lengths, out, scale, max_places, num_queries, min_places,
    max_chunks, so_n, so_h, so_e,
    HQ: tl.constexpr, E: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge one row's parts for BH query heads; a row without a live sequence becomes zero.

    Parts are added one by one, in order: a part that is not there adds an exact zero, so the result does not depend on
    how many there could be.
    """
    i_query, i_block = tl.program_id(0), tl.program_id(1)
    i_seq = tl.load(seq_of_query + i_query)
    length = tl.load(lengths + tl.maximum(i_seq, 0), mask=i_seq >= 0, other=-1).to(tl.int32)
    length = tl.minimum(length, max_places)
    num_parts = 1 + tl.cdiv(length, chunk_len(length, min_places, max_chunks))
    num_parts = tl.where(length < 0, 0, num_parts)

    head = i_block * BH + tl.arange(0, BH)
    o_e = tl.arange(0, BE)
    m_h = head < HQ
    m_he = m_h[:, None] & (o_e < E)[None, :]
    part = i_query.to(tl.int64) * HQ + head
    stride = num_queries.to(tl.int64) * HQ

    top = tl.full((BH,), -float("inf"), tl.float32)
    for i_part in tl.static_range(NUM_PARTS):
        there = m_h & (i_part < num_parts)
        top = tl.maximum(top, tl.load(tops + i_part * stride + part, mask=there, other=-float("inf")))
    any_part = m_h & (num_parts > 0)
    top = tl.where(any_part, top, 0.0)
    total = tl.where(any_part, 0.0, 1.0)
    acc = tl.zeros((BH, BE), tl.float32)
    for i_part in tl.static_range(NUM_PARTS):
        there = m_h & (i_part < num_parts)
        at = i_part * stride + part
        weight = tl.math.exp2((tl.load(tops + at, mask=there, other=-float("inf")) - top) * scale)
        total += weight * tl.load(totals + at, mask=there, other=0.0)
        p_sums = sums + at[:, None] * E + o_e[None, :]
        acc += weight[:, None] * tl.load(p_sums, mask=m_he & (i_part < num_parts), other=0.0)
    p_o = out + i_query.to(tl.int64) * so_n + head[:, None] * so_h + o_e[None, :] * so_e
    tl.store(p_o, (acc / total[:, None]).to(out.dtype.element_ty), mask=m_he)
