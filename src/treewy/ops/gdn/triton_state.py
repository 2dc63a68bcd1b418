"""Device functions that read the state and fold prior rows into it. See `triton_prior` for `past`, `at` and `count`."""
# pyright: reportGeneralTypeIssues=false
# Nested ifs ask what is known when the kernel compiles before what is not.
# ruff: noqa: SIM102

from typing import no_type_check

import triton
import triton.language as tl

from treewy.ops.gdn import triton_prior as prior

# What becomes of prior rows: read beside the state, as a table says for each sequence, or moved into the state.
NEVER, BY_TABLE, ALWAYS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


# The import hook of the tests must not wrap what Triton compiles: hence no_type_check throughout.
@triton.jit
@no_type_check
def product(a, b, size):
    """Return a @ b in float32.

    Equal 16-bit operands multiply exactly as they are. A float32 a is split into bfloat16 parts where b is bfloat16:
    three of them hold all its 24 bits, two hold 16. Anything else multiplies as float32, in the precision asked for.
    """
    if a.dtype == b.dtype and a.dtype != tl.float32:
        c = tl.dot(a, b)
    elif a.dtype == tl.float32 and b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        low = rest.to(tl.bfloat16)
        c = tl.dot(low, b)
        if size.exact:
            c += tl.dot((rest - low.to(tl.float32)).to(tl.bfloat16), b)
        c += tl.dot(high, b)
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=size.precision)
    return c


@triton.jit
@no_type_check
def state_block(state, at, o_v, i_k, size):
    """Return pointers to a block [BV, BK] of a slot's state, and their mask."""
    o_k = tl.arange(0, size.BK) + i_k * size.BK
    p_s = state.p + at[1] * state.slot + at[3] * state.head
    return p_s + o_v[:, None] * state.v + o_k[None, :] * state.k, (o_v < size.V)[:, None]


@triton.jit
@no_type_check
def folded(b_s, past, newest, at, count, o_v, i_k, size):
    """Return a block of the state with all prior rows in it, rounded to its dtype once: eq. 13 of docs/theory.md."""
    num_prior = count[0] + count[1]
    wide = tl.exp((newest[0] + newest[2]) + (newest[1] + newest[3])) * b_s.to(tl.float32)
    first = 0
    while first < num_prior:
        tile = prior.tile_of(first, past, at, count)
        b_w = prior.weights(past, tile, newest, at, size)
        b_u = prior.pseudo_values(past, tile, at, o_v, size) * b_w[:, None]
        wide += product(tl.trans(b_u), prior.keys(past, tile, at, i_k, size), size)
        first += prior.BH
    return wide.to(b_s.dtype)


@triton.jit
@no_type_check
def fold_all(state, past, newest, at, count, o_v, size):
    """Fold all prior rows into a program's part of the state."""
    for i_k in tl.range(0, size.K // size.BK, loop_unroll_factor=2):
        p_s, m_s = state_block(state, at, o_v, i_k, size)
        b_s = tl.load(p_s, mask=m_s, other=0.0)
        tl.store(p_s, folded(b_s, past, newest, at, count, o_v, i_k, size), mask=m_s)


@triton.jit
@no_type_check
def load_state(state, at, o_v, size):
    """Return a program's part of the state as two blocks [BV, BK], both on their way at once.

    The second is the first where K is one block. Larger states are loaded when they are read: see `read_state`.
    """
    p_s, m_s = state_block(state, at, o_v, 0, size)
    first = tl.load(p_s, mask=m_s, other=0.0)
    second = first
    if size.K > size.BK:
        p_s, m_s = state_block(state, at, o_v, 1, size)
        second = tl.load(p_s, mask=m_s, other=0.0)
    return first, second


@triton.jit
@no_type_check
def row_block(p, stride, first, m_row, i_k, size):
    """Return a block [BT, BK] of the keys or queries of a tree whose first row is `first`."""
    o_k = (tl.arange(0, size.BK) + i_k * size.BK)[None, :]
    return tl.load(p + first * stride + (tl.arange(0, size.BT)[:, None] * stride + o_k), mask=m_row[:, None], other=0.0)


@triton.jit
@no_type_check
def folded_block(b_s, state, past, newest, at, count, folds, o_v, i_k, size):
    """Return a block of the state with prior rows in it if they go there, and write it then."""
    if size.fold != NEVER:
        if folds:
            b_s = folded(b_s, past, newest, at, count, o_v, i_k, size)
            p_s, m_s = state_block(state, at, o_v, i_k, size)
            tl.store(p_s, b_s, mask=m_s)
    return b_s


@triton.jit
@no_type_check
def read_block(b_s, x, at, first, m_row, i_k, size):
    """Return what a block of the state gives for each key and query."""
    b_k = row_block(x.k + at[2] * x.k_head, x.k_row, first, m_row, i_k, size)
    b_q = row_block(x.q + at[2] * x.q_head, x.q_row, first, m_row, i_k, size)
    return product(b_s, tl.trans(b_k), size), product(b_s, tl.trans(b_q), size)


@triton.jit
@no_type_check
def read_state(blocks, x, state, past, newest, at, count, folds, o_v, first, m_row, size):
    """Return what the state gives for each key and query, [BV, BT], after prior rows went into it if they do."""
    if size.K <= 2 * size.BK:
        b_s = folded_block(blocks[0], state, past, newest, at, count, folds, o_v, 0, size)
        read_keys, read_queries = read_block(b_s, x, at, first, m_row, 0, size)
        if size.K > size.BK:
            b_s = folded_block(blocks[1], state, past, newest, at, count, folds, o_v, 1, size)
            keys, queries = read_block(b_s, x, at, first, m_row, 1, size)
            read_keys += keys
            read_queries += queries
    else:
        if size.fold != NEVER:
            if folds:
                fold_all(state, past, newest, at, count, o_v, size)
            # What other threads of this program have written is read below.
            tl.debug_barrier()
        read_keys = tl.zeros([size.BV, size.BT], dtype=tl.float32)
        read_queries = tl.zeros([size.BV, size.BT], dtype=tl.float32)
        for i_k in tl.range(0, size.K // size.BK):
            p_s, m_s = state_block(state, at, o_v, i_k, size)
            keys, queries = read_block(tl.load(p_s, mask=m_s, other=0.0), x, at, first, m_row, i_k, size)
            read_keys += keys
            read_queries += queries
    return read_keys, read_queries


@triton.jit
@no_type_check
def read_prior(x, past, newest, at, count, o_v, first, m_row, size):
    """Return what prior rows beside the state give for each key and query: sum_i exp(G_newest - G_i) (k_i . x) u_i.

    Source: eq. 14 of docs/theory.md.
    """
    p_k, p_q = x.k + at[2] * x.k_head, x.q + at[2] * x.q_head
    read_keys = tl.zeros([size.BV, size.BT], dtype=tl.float32)
    read_queries = tl.zeros([size.BV, size.BT], dtype=tl.float32)
    done = 0
    while done < count[0] + count[1]:
        tile = prior.tile_of(done, past, at, count)
        b_w = prior.weights(past, tile, newest, at, size)
        b_u = tl.trans(prior.pseudo_values(past, tile, at, o_v, size))
        of_keys = tl.zeros([prior.BH, size.BT], dtype=tl.float32)
        of_queries = tl.zeros([prior.BH, size.BT], dtype=tl.float32)
        for i_k in tl.range(0, size.K // size.BK, loop_unroll_factor=2):
            b_h = prior.keys(past, tile, at, i_k, size)
            of_keys += product(b_h, tl.trans(row_block(p_k, x.k_row, first, m_row, i_k, size)), size)
            of_queries += product(b_h, tl.trans(row_block(p_q, x.q_row, first, m_row, i_k, size)), size)
        read_keys += tl.dot(b_u, of_keys * b_w[:, None], input_precision=size.precision)
        read_queries += tl.dot(b_u, of_queries * b_w[:, None], input_precision=size.precision)
        done += prior.BH
    return read_keys, read_queries
