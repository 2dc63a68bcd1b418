"""The generator behind `sampling.Stream` in Triton: Philox 4x64 of ten rounds (Salmon et al., SC 2011), as NumPy runs it."""

from typing import no_type_check

import triton
import triton.language as tl

ROUNDS = tl.constexpr(10)
FACTOR_0, FACTOR_1 = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
WEYL_0, WEYL_1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)
# The upper 53 of 64 bits are the number.
UNIT = tl.constexpr(2.0**-53)


@triton.jit(do_not_specialize=["num"])
@no_type_check
def accept_uniforms_kernel(keys, positions, uniforms, num, BU: tl.constexpr):
    """Make one request's next numbers. The counter counts fours, from 1: each gives four words."""
    i_b = tl.program_id(0)
    o_u = tl.program_id(1) * BU + tl.arange(0, BU)
    place = tl.load(positions + i_b) + o_u
    key_0 = tl.load(keys + 2 * i_b).to(tl.uint64, bitcast=True)
    key_1 = tl.load(keys + 2 * i_b + 1).to(tl.uint64, bitcast=True)
    zeros = tl.zeros([BU], tl.uint64)
    x_0, x_1, x_2, x_3 = (place // 4 + 1).to(tl.uint64), zeros, zeros, zeros
    factor_0, factor_1 = tl.full([BU], FACTOR_0, tl.uint64), tl.full([BU], FACTOR_1, tl.uint64)
    b_key_0, b_key_1 = zeros + key_0, zeros + key_1
    for _ in tl.static_range(ROUNDS):
        high_0, high_1 = tl.umulhi(factor_0, x_0), tl.umulhi(factor_1, x_2)
        x_1, x_3, x_0, x_2 = factor_1 * x_2, factor_0 * x_0, high_1 ^ x_1 ^ b_key_0, high_0 ^ x_3 ^ b_key_1
        b_key_0 += tl.full([BU], WEYL_0, tl.uint64)
        b_key_1 += tl.full([BU], WEYL_1, tl.uint64)
    lane = place % 4
    word = tl.where(lane == 0, x_0, tl.where(lane == 1, x_1, tl.where(lane == 2, x_2, x_3)))
    number = (word >> 11).to(tl.int64).to(tl.float64) * UNIT
    tl.store(uniforms + i_b.to(tl.int64) * num + o_u, number, mask=o_u < num)
