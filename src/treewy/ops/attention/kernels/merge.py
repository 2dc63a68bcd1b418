"""The kernel that merges the parts of each row by log-sum-exp."""

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.attention.kernels.parts import chunk_len


@triton.jit(
    do_not_specialize=[
        "max_places",
        "max_rows",
        "num_queries",
        "least",
        "most",
        "per_pair",
        "fewest",
        "share",
        "max_chunks",
    ]
)
@no_type_check
def merge_parts_kernel(
    sums, tops, totals, seq_of_query, cu_queries, lengths, out, scale, max_places, max_rows, num_queries,
    least, most, per_pair, fewest, share, max_chunks, so_n, so_h, so_e,
    HQ: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BP: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row and query head; a row without a live sequence becomes zero.

    Parts are added in blocks of BP, in order: a part that is not there adds an exact zero, so the result does not depend
    on how many there could be.
    """
    i_query, i_head = tl.program_id(0), tl.program_id(1)
    i_seq = tl.load(seq_of_query + i_query)
    o_e = tl.arange(0, BE)
    m_e = o_e < E
    p_o = out + i_query.to(tl.int64) * so_n + i_head * so_h + o_e * so_e
    length = tl.load(lengths + tl.maximum(i_seq, 0), mask=i_seq >= 0, other=-1).to(tl.int32)
    if length < 0:
        tl.store(p_o, tl.zeros((BE,), out.dtype.element_ty), mask=m_e)
        return
    length = tl.minimum(length, max_places)
    pairs = tl.minimum(tl.load(cu_queries + i_seq + 1) - tl.load(cu_queries + i_seq), max_rows) * G
    per_chunk = chunk_len(length, pairs, least, most, per_pair, fewest, share, max_chunks)
    num_parts = tl.maximum(tl.cdiv(length, per_chunk), 1)

    o_p = tl.arange(0, BP)
    first = i_query.to(tl.int64) * HQ + i_head
    stride = num_queries.to(tl.int64) * HQ
    top = tl.full((BP,), -float("inf"), tl.float32)
    for block in range(0, num_parts, BP):
        i_part = block + o_p
        top = tl.maximum(top, tl.load(tops + first + i_part * stride, mask=i_part < num_parts, other=-float("inf")))
    highest = tl.max(top, 0)
    total = tl.zeros((BP,), tl.float32)
    acc = tl.zeros((BE,), tl.float32)
    for block in range(0, num_parts, BP):
        i_part = block + o_p
        there = i_part < num_parts
        at = first + i_part * stride
        weight = tl.math.exp2((tl.load(tops + at, mask=there, other=-float("inf")) - highest) * scale)
        total += weight * tl.load(totals + at, mask=there, other=0.0)
        p_sums = sums + at[:, None] * E + o_e[None, :]
        part = tl.load(p_sums, mask=there[:, None] & m_e[None, :], other=0.0)
        acc += tl.sum(weight[:, None] * part, 0)
    tl.store(p_o, (acc / tl.sum(total, 0)).to(out.dtype.element_ty), mask=m_e)
