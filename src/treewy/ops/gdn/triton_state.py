"""Device functions that read the state and fold prior rows into it. See `triton_prior` for `past`, `at` and `count`."""

import triton
import triton.language as tl

from treewy.ops.gdn import triton_prior as prior

# What becomes of prior rows: read beside the state, as a table says for each sequence, or moved into the state.
NEVER, BY_TABLE, ALWAYS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
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
def state_block(state, at, o_v, i_k, size):
    """Return pointers to a block [BV, BK] of a slot's state, and their mask."""
    o_k = tl.arange(0, size.BK) + i_k * size.BK
    p_s = state.p + at[1] * state.slot + at[3] * state.head
    return p_s + o_v[:, None] * state.v + o_k[None, :] * state.k, (o_v < size.V)[:, None]


@triton.jit
def folded(b_s, past, newest, at, count, o_v, i_k, size):
    """Return a block of the state with all prior rows in it, rounded to its dtype once: eq. 13 of docs/theory.md."""
    num_prior = count[0] + count[1]
    wide = tl.exp((newest[0] + newest[2]) + (newest[1] + newest[3])) * b_s.to(tl.float32)
    first = 0
    while first < num_prior:
        tile = prior.tile_of(first, past[2], at, count)
        b_w = prior.weights(past, tile, newest, at, size)
        b_u = prior.pseudo_values(past, tile, at, o_v, size) * b_w[:, None]
        wide += product(tl.trans(b_u), prior.keys(past, tile, at, i_k, size), size)
        first += prior.BH
    return wide.to(b_s.dtype)


@triton.jit
def fold_all(state, past, newest, at, count, o_v, size):
    """Fold all prior rows into a program's part of the state."""
    for i_k in tl.static_range(size.K // size.BK):
        p_s, m_s = state_block(state, at, o_v, i_k, size)
        b_s = tl.load(p_s, mask=m_s, other=0.0)
        tl.store(p_s, folded(b_s, past, newest, at, count, o_v, i_k, size), mask=m_s)


@triton.jit
def load_state(state, at, o_v, size):
    """Return a program's part of the state, as a tuple of blocks [BV, BK]: all loads are on their way at once."""
    blocks = ()
    for i_k in tl.static_range(size.K // size.BK):
        p_s, m_s = state_block(state, at, o_v, i_k, size)
        blocks = blocks + (tl.load(p_s, mask=m_s, other=0.0),)
    return blocks


@triton.jit
def row_block(p, stride, first, m_row, i_k, size):
    """Return a block [BT, BK] of the keys or queries of a tree whose first row is `first`."""
    o_k = (tl.arange(0, size.BK) + i_k * size.BK)[None, :]
    return tl.load(p + first * stride + (tl.arange(0, size.BT)[:, None] * stride + o_k), mask=m_row[:, None], other=0.0)


@triton.jit
def read_prior(x, past, newest, at, count, o_v, first, m_row, size):
    """Return what prior rows beside the state give for each key and query: sum_i exp(G_newest - G_i) (k_i . x) u_i.

    Source: eq. 14 of docs/theory.md.
    """
    p_k, p_q = x.k + at[2] * x.k_head, x.q + at[2] * x.q_head
    read_keys = tl.zeros([size.BV, size.BT], dtype=tl.float32)
    read_queries = tl.zeros([size.BV, size.BT], dtype=tl.float32)
    done = 0
    while done < count[0] + count[1]:
        tile = prior.tile_of(done, past[2], at, count)
        b_w = prior.weights(past, tile, newest, at, size)
        b_u = tl.trans(prior.pseudo_values(past, tile, at, o_v, size))
        of_keys = tl.zeros([prior.BH, size.BT], dtype=tl.float32)
        of_queries = tl.zeros([prior.BH, size.BT], dtype=tl.float32)
        for i_k in tl.static_range(size.K // size.BK):
            b_h = prior.keys(past, tile, at, i_k, size)
            of_keys += product(b_h, tl.trans(row_block(p_k, x.k_row, first, m_row, i_k, size)), size)
            of_queries += product(b_h, tl.trans(row_block(p_q, x.q_row, first, m_row, i_k, size)), size)
        read_keys += tl.dot(b_u, of_keys * b_w[:, None], input_precision=size.precision)
        read_queries += tl.dot(b_u, of_queries * b_w[:, None], input_precision=size.precision)
        done += prior.BH
    return read_keys, read_queries
