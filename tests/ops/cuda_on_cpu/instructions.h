// What the kernel calls instructions, and the intrinsics it uses, by the layouts of the PTX ISA.
#pragma once

#include "emulator.h"

// ---- numbers ----
inline unsigned __float_as_uint(float x) {
    unsigned y;
    memcpy(&y, &x, 4);
    return y;
}
inline float __uint_as_float(unsigned x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
#define __expf expf  // a macro: the C library has a function of this name
inline uint32_t pack(float low, float high) { return emulator::half(low) | (uint32_t)emulator::half(high) << 16; }
inline uint16_t narrow(float x) { return emulator::half(x); }
inline float early(const float *p) { return *p; }
inline uint32_t early(const uint32_t *p) { return *p; }
inline uint32_t early(const uint16_t *p) { return *p; }
inline uint4 early(const uint4 *p) { return *p; }
inline void prefetch(const void *, uint32_t) {}
inline float exp2_fast(float x) { return exp2f(x); }
inline void atomicOr(uint32_t *p, uint32_t bits) { *p |= bits; }
inline uint32_t atomicAdd(uint32_t *p, uint32_t x) {
    const uint32_t before = *p;
    *p += x;
    emulator::be_late();
    return before;
}

// ---- threads of a block, lanes of a warp ----
inline void __syncthreads() {
    using namespace emulator;
    self().waits = true;
    ++block.at_barrier;
    release_barrier();
    if (self().waits) leave();
}
inline void __syncwarp() {
    emulator::meet(emulator::Kind::syncwarp, nullptr, [](void **) {});
}
template <typename T> struct Shuffled {
    T in, out;
    int from;
};
template <typename T> T shuffled(emulator::Kind kind, T x, int from) {
    Shuffled<T> mine = {x, x, from & 31};
    emulator::meet(kind, &mine, [](void **of) {
        for (int lane = 0; lane < 32; ++lane) {
            auto *to = (Shuffled<T> *)of[lane];
            to->out = ((Shuffled<T> *)of[to->from])->in;
        }
    });
    return mine.out;
}
template <typename T> T __shfl_sync(unsigned, T x, int from) { return shuffled(emulator::Kind::shuffle, x, from); }
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) {
    return shuffled(emulator::Kind::shuffle_xor, x, (int)threadIdx.x % 32 ^ mask);
}
inline uint32_t or_of_all(emulator::Kind kind, uint32_t x) {
    emulator::meet(kind, &x, [](void **of) {
        uint32_t all = 0;
        for (int lane = 0; lane < 32; ++lane) all |= *(uint32_t *)of[lane];
        for (int lane = 0; lane < 32; ++lane) *(uint32_t *)of[lane] = all;
    });
    return x;
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t x) { return or_of_all(emulator::Kind::reduce_or, x); }
inline uint32_t __ballot_sync(unsigned, bool x) { return or_of_all(emulator::Kind::ballot, (uint32_t)x << threadIdx.x % 32); }
inline bool __any_sync(unsigned, bool x) { return or_of_all(emulator::Kind::any, x); }

// ---- shared memory and copies to it ----
inline uint32_t smem_at(const void *p) {
    const int64_t at = (const char *)p - shared_base();
    emulator::require(at >= 0 && at < SHARED_BYTES, "not an address in shared memory");
    return (uint32_t)at;
}
inline void copy16(uint32_t to, const void *from) {
    emulator::require((uintptr_t)from % 16 == 0, "misaligned source of a copy");
    emulator::self().unsent.push_back({to, from});
}
inline void copies_sent() {
    auto &fiber = emulator::self();
    fiber.sent.push_back(std::move(fiber.unsent));
    fiber.unsent.clear();
}
// Copies are made as late as they may be.
template <int LEFT> void copies_done() {
    auto &sent = emulator::self().sent;
    for (; sent.size() > LEFT; sent.pop_front()) emulator::finish(sent.front());
}

// ---- matrices ----
// Lane (g, c) of a warp, lane = 4 g + c.
struct Product {
    float *d;
    uint32_t a[4], b[2];
};
// Products are exact; the sum is rounded once.
template <int DEPTH> void add_products(void **of, const float (&a)[16][DEPTH], const float (&b)[8][DEPTH]) {
    for (int lane = 0; lane < 32; ++lane)
        for (int e = 0; e < 4; ++e) {
            const float *row = a[lane / 4 + 8 * (e / 2)], *column = b[2 * (lane % 4) + e % 2];
            double sum = ((Product *)of[lane])->d[e];
            for (int k = 0; k < DEPTH; ++k) sum += (double)row[k] * column[k];
            ((Product *)of[lane])->d[e] = (float)sum;
        }
}
// d += a b^T with a of 16 rows and b of 8, DEPTH columns each.
template <int DEPTH> void multiply(void **of) {
    float a[16][DEPTH], b[8][DEPTH];
    for (int lane = 0; lane < 32; ++lane) {
        const auto *x = (Product *)of[lane];
        const int g = lane / 4, c = lane % 4;
        for (int k = 0; k < DEPTH / 8; ++k)
            for (int e = 0; e < 2; ++e) {
                const int column = 8 * k + 2 * c + e;
                a[g][column] = emulator::wide(x->a[2 * k] >> 16 * e & 0xffff);
                a[g + 8][column] = emulator::wide(x->a[2 * k + 1] >> 16 * e & 0xffff);
                b[g][column] = emulator::wide(x->b[k] >> 16 * e & 0xffff);
            }
    }
    add_products(of, a, b);
}
inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    Product mine = {d, {a0, a1, a2, a3}, {b0, b1}};
    emulator::meet(emulator::Kind::mma, &mine, multiply<16>);
}
inline void mma8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    Product mine = {d, {a0, a1}, {b0}};
    emulator::meet(emulator::Kind::mma8, &mine, multiply<8>);
}
// Deal 8 x 8 tiles out to lanes, two neighbours of a row each, or of a column.
inline uint32_t dealt(const uint16_t (&tile)[8][8], int lane, bool turned) {
    const int g = lane / 4, c = 2 * (lane % 4);
    return turned ? tile[c][g] | (uint32_t)tile[c + 1][g] << 16 : tile[g][c] | (uint32_t)tile[g][c + 1] << 16;
}
struct Loaded {
    uint32_t row, *x;
};
template <int TILES, bool TURNED> void load(void **of) {
    for (int tile = 0; tile < TILES; ++tile) {
        uint16_t rows[8][8];
        for (int g = 0; g < 8; ++g) memcpy(rows[g], emulator::shared_at(((Loaded *)of[8 * tile + g])->row, 16), 16);
        for (int lane = 0; lane < 32; ++lane) ((Loaded *)of[lane])->x[tile] = dealt(rows, lane, TURNED);
    }
}
inline void load4(uint32_t (&x)[4], const void *row) {
    Loaded mine = {smem_at(row), x};
    emulator::meet(emulator::Kind::load4, &mine, load<4, false>);
}
inline void load4_turned(uint32_t (&x)[4], const void *row) {
    Loaded mine = {smem_at(row), x};
    emulator::meet(emulator::Kind::load4_turned, &mine, load<4, true>);
}
struct Stored {
    uint32_t row;
    const uint32_t *x;
};
inline void store4_turned(void *row, const uint32_t (&x)[4]) {
    Stored mine = {smem_at(row), x};
    emulator::meet(emulator::Kind::store4_turned, &mine, [](void **of) {
        for (int tile = 0; tile < 4; ++tile) {
            uint16_t rows[8][8];
            for (int lane = 0; lane < 32; ++lane)
                for (int e = 0; e < 2; ++e) rows[2 * (lane % 4) + e][lane / 4] = (uint16_t)(((Stored *)of[lane])->x[tile] >> 16 * e);
            for (int g = 0; g < 8; ++g) memcpy(emulator::shared_at(((Stored *)of[8 * tile + g])->row, 16), rows[g], 16);
        }
    });
}
