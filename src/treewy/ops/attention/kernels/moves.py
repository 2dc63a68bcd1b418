"""Kernels that move accepted keys and values to the places after the committed ones."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "num_pages", "max_places", "sr_b", "stable_b"])
@no_type_check
def commit_rows_kernel(
    k, v, keys, values, block_tables, lengths, rows, num_accepted, num_rows, num_pages, max_places, sr_b, sr_p,
    sk_n, sk_h, sk_e, sv_n, sv_h, sv_e,
    skeys_x, skeys_m, skeys_h, skeys_e, svalues_x, svalues_m, svalues_h, svalues_e, stable_b, stable_x,
    HK: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write one accepted row's keys and values of all heads to its place. Row, place or page out of range: nothing."""
    i_seq, i_step = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + i_seq).to(tl.int32)
    place = length + i_step
    if (length < 0) | (i_step >= tl.load(num_accepted + i_seq)) | (place >= max_places):
        return
    row = tl.load(rows + i_seq.to(tl.int64) * sr_b + i_step * sr_p).to(tl.int64)
    column = 0 if PAGE == 0 else place // PAGE
    page = tl.load(block_tables + i_seq.to(tl.int64) * stable_b + column * stable_x).to(tl.int64)
    if (row < 0) | (row >= num_rows) | (page < 0) | (page >= num_pages):
        return
    within = (place if PAGE == 0 else place % PAGE).to(tl.int64)
    o_h, o_e = tl.arange(0, BH)[:, None].to(tl.int64), tl.arange(0, BE)[None, :]
    mask = (o_h < HK) & (o_e < E)
    b_k = tl.load(k + row * sk_n + o_h * sk_h + o_e * sk_e, mask=mask)
    b_v = tl.load(v + row * sv_n + o_h * sv_h + o_e * sv_e, mask=mask)
    tl.store(keys + page * skeys_x + within * skeys_m + o_h * skeys_h + o_e * skeys_e, b_k, mask=mask)
    tl.store(values + page * svalues_x + within * svalues_m + o_h * svalues_h + o_e * svalues_e, b_v, mask=mask)


@triton.jit
@no_type_check
def find(p_table, place, there, num_pages, stable_x, PAGE: tl.constexpr):
    """Return the page of each place, the place within it, and whether the pool has that page."""
    column = 0 * place if PAGE == 0 else place // PAGE
    within = place if PAGE == 0 else place % PAGE
    page = tl.load(p_table + column * stable_x, mask=there, other=-1).to(tl.int64)
    return page, within.to(tl.int64), there & (page >= 0) & (page < num_pages)


@triton.jit(do_not_specialize=["num_pages", "max_places", "sr_b", "stable_b"])
@no_type_check
def compact_rows_kernel(
    keys, values, block_tables, lengths, cu_rows, rows, num_accepted, num_pages, max_places, sr_b, sr_p,
    skeys_x, skeys_m, skeys_h, skeys_e, svalues_x, svalues_m, svalues_h, svalues_e, stable_b, stable_x,
    E: tl.constexpr, PAGE: tl.constexpr, BP: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Move one head's accepted rows, which lie after the committed ones in tree order, to consecutive places.

    A path only ever moves towards the front: its i-th row is at least the tree's i-th. So blocks of BP rows go in
    order, each read whole before it is written.
    """
    i_seq, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + i_seq).to(tl.int32)
    first_row = tl.load(cu_rows + i_seq)
    num_rows = tl.load(cu_rows + i_seq + 1) - first_row
    accepted = tl.minimum(tl.load(num_accepted + i_seq), num_rows)
    if length < 0:
        return
    p_table = block_tables + i_seq.to(tl.int64) * stable_b
    o_e = tl.arange(0, BE)[None, :]
    p_keys, p_values = keys + i_head * skeys_h + o_e * skeys_e, values + i_head * svalues_h + o_e * svalues_e
    for first in range(0, accepted, BP):
        step = first + tl.arange(0, BP)
        row = tl.load(rows + i_seq.to(tl.int64) * sr_b + step * sr_p, mask=step < accepted, other=-1)
        local = row.to(tl.int32) - first_row
        there = (local > step) & (local < num_rows) & (length + local < max_places)
        from_page, from_within, readable = find(p_table, length + local, there, num_pages, stable_x, PAGE)
        to_page, to_within, writable = find(p_table, length + step, there, num_pages, stable_x, PAGE)
        mask = (readable & writable)[:, None] & (o_e < E)
        b_k = tl.load(p_keys + (from_page * skeys_x + from_within * skeys_m)[:, None], mask=mask)
        b_v = tl.load(p_values + (from_page * svalues_x + from_within * svalues_m)[:, None], mask=mask)
        tl.debug_barrier()
        tl.store(p_keys + (to_page * skeys_x + to_within * skeys_m)[:, None], b_k, mask=mask)
        tl.store(p_values + (to_page * svalues_x + to_within * svalues_m)[:, None], b_v, mask=mask)
