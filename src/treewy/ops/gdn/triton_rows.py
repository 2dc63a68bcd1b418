"""Device functions over the rows of one tree: gates, path sums of log decays, ancestor masks, and the solve."""
# pyright: reportGeneralTypeIssues=false
# Nested ifs ask what is known when the kernel compiles before what is not.

from typing import no_type_check

import triton
import triton.language as tl

# A log decay below this is cut to it: exp of either is 0, also in float64.
LEAST_DECAY = tl.constexpr(-1024.0)

# Log decays are summed as two parts, multiples of 2^-7 and of 2^-25. Each sum over up to 128 rows fits the 24 bits of a
# float32, so that it is exact and the same in any order. Adding and subtracting 1.5 * 2^23 units rounds to a unit.
COARSE = tl.constexpr(1.5 * 2**16)
FINE = tl.constexpr(1.5 * 2**-2)


# The import hook of the tests must not wrap what Triton compiles: hence no_type_check throughout.
@triton.jit
@no_type_check
def log1p(x):
    """Return log(1 + x) for x in 0..1, to float32's relative accuracy however small x is."""
    one_more = 1.0 + x
    return tl.where(one_more == 1.0, x, tl.log(one_more) * (x / tl.where(one_more == 1.0, 1.0, one_more - 1.0)))


@triton.jit
@no_type_check
def gates(x, first, m_row, i_hv, size):
    """Return (g, beta) of rows; of raw projections by eq. 2 of docs/theory.md."""
    b_g = tl.load(x.a + first * x.a_row + i_hv * x.a_head + tl.arange(0, size.BT) * x.a_row, mask=m_row, other=0.0).to(
        tl.float32
    )
    b_beta = tl.load(
        x.b + first * x.b_row + i_hv * x.b_head + tl.arange(0, size.BT) * x.b_row, mask=m_row, other=0.0
    ).to(tl.float32)
    if not size.finished:
        b_g += tl.load(x.dt_bias + i_hv).to(tl.float32)
        softplus = tl.where(b_g > 0, b_g, 0.0) + log1p(tl.exp(-tl.abs(b_g)))
        b_g = -tl.exp(tl.load(x.a_log + i_hv).to(tl.float32)) * softplus
        b_beta = 1.0 / (1.0 + tl.exp(-b_beta)) * size.beta_scale
    return b_g, b_beta


@triton.jit
@no_type_check
def ancestor_mask(p_ancestors, num_words, first, m_row, BT: tl.constexpr):
    """Return [t, i]: i is t or an ancestor of t."""
    o_i = tl.arange(0, BT)
    p_words = p_ancestors + first * num_words + o_i * num_words
    bits = tl.zeros([BT, BT], dtype=tl.int32)
    for word in tl.static_range((BT + 31) // 32):
        b_word = tl.load(p_words + word, mask=m_row & (word < num_words), other=0)
        of_word = (b_word[:, None] >> (o_i % 32)[None, :]) & 1
        bits = tl.where((o_i // 32 == word)[None, :], of_word, bits)
    return bits != 0


@triton.jit
@no_type_check
def path_sums(b_g, m_ancestors):
    """Return each row's log decay from the root's parent on, as coarse and fine part; both are exact sums."""
    b_g = tl.where(b_g < LEAST_DECAY, LEAST_DECAY, b_g)
    coarse = (b_g + COARSE) - COARSE
    fine = ((b_g - coarse) + FINE) - FINE
    # Masked by value: a row whose gate is NaN spoils no row but its descendants.
    coarse = tl.sum(tl.where(m_ancestors, coarse[None, :], 0.0), axis=1)
    return coarse, tl.sum(tl.where(m_ancestors, fine[None, :], 0.0), axis=1)


@triton.jit
@no_type_check
def two_sum(a, b):
    """Return the sum of two floats and what its rounding lost."""
    high = a + b
    part = high - a
    return high, (a - (high - part)) + (b - part)


@triton.jit
@no_type_check
def decay_ratios(coarse, fine, m_ancestors):
    """Return exp(G_t - G_i) for ancestors i of t and t itself, else 0; masked before exp."""
    difference = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.exp(tl.where(m_ancestors, difference, -float("inf")))


@triton.jit
@no_type_check
def diagonal_blocks(matrix, SIZE: tl.constexpr, NUM: tl.constexpr):
    """Return the diagonal blocks [NUM, SIZE, SIZE] of a square matrix."""
    if NUM == 1:
        blocks = tl.reshape(matrix, [1, SIZE, SIZE])
    else:
        four = tl.reshape(matrix, [NUM, SIZE, NUM, SIZE])
        o_n = tl.arange(0, NUM)
        on_diagonal = o_n[:, None, None, None] == o_n[None, None, :, None]
        blocks = tl.sum(tl.where(on_diagonal, four, 0), axis=2)
    return blocks


@triton.jit
@no_type_check
def inverse_blocks(couplings, m_strict, NUM: tl.constexpr):
    """Return (I + A)^-1 of the diagonal blocks of 16 rows, by substitution level by level.

    A block is as deep as its deepest row has ancestors in it: a star takes one product, a chain 15.
    """
    blocks = diagonal_blocks(couplings, 16, NUM)
    level = tl.sum(diagonal_blocks(m_strict.to(tl.int32), 16, NUM), axis=2)
    num_levels = tl.max(tl.max(level, axis=1), axis=0)
    o = tl.arange(0, 16)
    eye = tl.where(o[None, :, None] == o[None, None, :], 1.0, 0.0)
    inverse = eye + tl.zeros_like(blocks)
    done = 0
    while done < num_levels:
        # A row is final once its ancestors were: from then on it comes out the same. What rows below it hold is finite,
        # not larger than (1 + |A|)^15, and meets only zeros.
        inverse = eye - tl.dot(blocks, inverse, input_precision="ieee")
        done += 1
    return inverse


@triton.jit
@no_type_check
def quarters(blocks, SIZE: tl.constexpr, NUM: tl.constexpr):
    """Return the quarters [NUM, SIZE, SIZE] of lower triangular blocks: upper left, lower left, lower right."""
    five = tl.permute(tl.reshape(blocks, [NUM, 2, SIZE, 2, SIZE]), (0, 2, 4, 1, 3))
    left, right = tl.split(five)
    upper, below = tl.split(left)
    return upper, below, tl.split(right)[1]


@triton.jit
@no_type_check
def lower_product(wide, lower, size):
    """Return wide @ lower^T for wide [BV, BT] and lower triangular [BT, BT], in halves where shared memory is short."""
    if size.BT < 128:
        c = tl.dot(wide, tl.trans(lower), input_precision=size.precision)
    else:
        parts = quarters(lower, size.BT // 2, 1)
        left, right = tl.split(tl.permute(tl.reshape(wide, [size.BV, 2, size.BT // 2]), (0, 2, 1)))
        upper = tl.trans(tl.reshape(parts[0], [size.BT // 2, size.BT // 2]))
        below = tl.trans(tl.reshape(parts[1], [size.BT // 2, size.BT // 2]))
        last = tl.trans(tl.reshape(parts[2], [size.BT // 2, size.BT // 2]))
        first = tl.dot(left, upper, input_precision=size.precision)
        second = tl.dot(left, below, input_precision=size.precision)
        second += tl.dot(right, last, input_precision=size.precision)
        c = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [size.BV, size.BT])
    return c


@triton.jit
@no_type_check
def merged(inverse, couplings, SIZE: tl.constexpr, NUM: tl.constexpr):
    """Return the inverses of blocks twice as large, given those of the NUM blocks of SIZE rows."""
    pairs = tl.permute(tl.reshape(inverse, [NUM // 2, 2, SIZE, SIZE]), (0, 2, 3, 1))
    upper, lower = tl.split(pairs)
    quarters = tl.reshape(diagonal_blocks(couplings, 2 * SIZE, NUM // 2), [NUM // 2, 2, SIZE, 2, SIZE])
    left, _ = tl.split(tl.permute(quarters, (0, 2, 4, 1, 3)))
    _, below = tl.split(left)
    below = -tl.dot(lower, tl.dot(below, upper, input_precision="ieee"), input_precision="ieee")
    four = tl.join(tl.join(upper, below), tl.join(tl.zeros_like(lower), lower))
    return tl.reshape(tl.permute(four, (0, 3, 1, 4, 2)), [NUM // 2, 2 * SIZE, 2 * SIZE])


@triton.jit
@no_type_check
def inverse_less_one(couplings, m_strict, BT: tl.constexpr):
    """Return (I + A)^-1 - I in float32, for a strictly lower A: eq. 9 of docs/theory.md in blocks of 16 rows.

    A is never squared: on nearly equal keys its powers grow until nothing is left of the inverse.
    """
    inverse = inverse_blocks(couplings, m_strict, BT // 16)
    if BT >= 32:
        inverse = merged(inverse, couplings, 16, BT // 16)
    if BT >= 64:
        inverse = merged(inverse, couplings, 32, BT // 32)
    if BT >= 128:
        inverse = merged(inverse, couplings, 64, BT // 64)
    o = tl.arange(0, BT)
    return tl.reshape(inverse, [BT, BT]) - tl.where(o[:, None] == o[None, :], 1.0, 0.0)
