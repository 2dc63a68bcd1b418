#if BT > 4
// ---- T x T matrices, in blocks of 16 x 16 rows: only those that hold an ancestor are computed, written and read ----
__device__ __forceinline__ float decay_of(float x) {
#if EXACT
    return exp2f(x);
#else
    return exp2_fast(x);
#endif
}
__device__ __forceinline__ void rows16(const u16 (*from)[LDK], int block, u32 (&a)[8][4], int lane) {
#pragma unroll
    for (int k = 0; k < 8; ++k) load4(a[k], &from[16 * block + (lane & 15)][16 * k + 8 * (lane >> 4)]);
}
// 16 rows against 16 rows; each sum in two halves, so that products need not wait for each other.
__device__ __forceinline__ void product16(const u32 (&a)[8][4], const u16 (*rows)[LDK], int n, float (&d)[2][4], int lane) {
    float other[2][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) d[0][e] = d[1][e] = other[0][e] = other[1][e] = 0.f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        u32 x[4], y[4];
        const u16 *from = &rows[n + (lane & 7) + 8 * (lane >> 4)][8 * ((lane >> 3) & 1)];
        load4(x, from + 16 * k);
        load4(y, from + 16 * (k + 4));
        mma(d[0], a[k][0], a[k][1], a[k][2], a[k][3], x[0], x[1]);
        mma(d[1], a[k][0], a[k][1], a[k][2], a[k][3], x[2], x[3]);
        mma(other[0], a[k + 4][0], a[k + 4][1], a[k + 4][2], a[k + 4][3], y[0], y[1]);
        mma(other[1], a[k + 4][0], a[k + 4][1], a[k + 4][2], a[k + 4][3], y[2], y[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        d[0][e] += other[0][e];
        d[1][e] += other[1][e];
    }
}
// 16 rows against themselves, as `product16` would: the registers of one operand hold the other.
__device__ __forceinline__ void product_own(const u32 (&a)[8][4], float (&d)[2][4]) {
    float other[2][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) d[0][e] = d[1][e] = other[0][e] = other[1][e] = 0.f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const u32(&x)[4] = a[k], (&y)[4] = a[k + 4];
        mma(d[0], x[0], x[1], x[2], x[3], x[0], x[2]);
        mma(d[1], x[0], x[1], x[2], x[3], x[1], x[3]);
        mma(other[0], y[0], y[1], y[2], y[3], y[0], y[2]);
        mma(other[1], y[0], y[1], y[2], y[3], y[1], y[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        d[0][e] += other[0][e];
        d[1][e] += other[1][e];
    }
}
#if EARLY_STATE
__device__ __forceinline__ float (*system_of(Tile &, Shared &z))[16][LDA] { return z.system; }
#else
__device__ __forceinline__ float (*system_of(Tile &m, Shared &))[16][LDA] { return m.system; }
#endif
// What scales a lane's two rows of a block, g and g + 8.
struct Scales {
    float scale[2], high[2], low[2];
    u32 bits[2][2];
};
// Squared norms stand on the diagonal of the rows' own gram.
__device__ __forceinline__ Scales row_scales(Shared &z, const float (&own)[2][4], int block, bool queries, int lane) {
    const int g = lane >> 2, c = lane & 3;
    Scales x;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float even = __shfl_sync(~0u, own[h][2 * h], 4 * g + (g >> 1)), odd = __shfl_sync(~0u, own[h][2 * h + 1], 4 * g + (g >> 1));
        const int t = 16 * block + 8 * h + g;
        const float norm = inverse_norm(g & 1 ? odd : even), beta = z.beta[t];
        x.high[h] = z.high[t];
        x.low[h] = z.low[t];
        x.scale[h] = queries ? QSCALE * norm : beta * norm * norm;
        const u64 itself = queries ? 0ull : 1ull << t;
        x.bits[h][0] = z.bits[0][t] & ~(u32)itself;
        x.bits[h][1] = z.bits[1][t] & ~(u32)(itself >> 32);
        const float decay = decay_of(x.high[h] + x.low[h]);
        if (c == 0 && queries) z.read_q[t] = decay * QSCALE * norm;
        if (c == 0 && !queries) {
            z.write[t] = beta * norm;
            z.read_k[t] = decay * norm;
        }
    }
    return x;
}
__device__ __forceinline__ void put2(float *to, float x, float y) { *(float2 *)to = make_float2(x, y); }
__device__ __forceinline__ void put2(u16 *to, float x, float y) { *(u32 *)to = pack(x, y); }
// Finish one block of A (keys) or of the scores (queries) from its raw products.
__device__ __forceinline__ void finish_block(Tile &m, Shared &z, const Scales &s, float (&d)[2][4], int block, int kb, bool queries, int lane) {
    const int g = lane >> 2, c = lane & 3;
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int i = 16 * kb + 8 * n + 2 * c;
        const float2 high = *(float2 *)&z.high[i], low = *(float2 *)&z.low[i];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 above = (kb < 2 ? s.bits[h][0] : s.bits[h][1]) >> (i & 31);
            const float x = decay_of((s.high[h] - high.x) + (s.low[h] - low.x)) * (d[n][2 * h] * s.scale[h]);
            const float y = decay_of((s.high[h] - high.y) + (s.low[h] - low.y)) * (d[n][2 * h + 1] * s.scale[h]);
            d[n][2 * h] = above & 1 ? x : 0.f;
            d[n][2 * h + 1] = above & 2 ? y : 0.f;
            sums[h] += d[n][2 * h] + d[n][2 * h + 1];
        }
    }
    if (queries) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) put2(&z.scores[block_at(block, kb)][8 * h + g][8 * n + 2 * c], d[n][2 * h], d[n][2 * h + 1]);
        return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int t = 16 * block + 8 * h + g;
        // What is not finite is taken out of the system, and its row gets NaN at the end.
        if (!finite(sums[h])) {
            atomicOr(&z.bad[t >> 5], 1u << (t & 31));
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e) d[n][e] = finite(d[n][e]) ? d[n][e] : 0.f;
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) put2(&system_of(m, z)[block_at(block, kb)][8 * h + g][8 * n + 2 * c], d[n][2 * h], d[n][2 * h + 1]);
    }
}
// An entry of a product of two 8 x 8 matrices, and the one to its right.
__device__ __forceinline__ float2 product8(const float *left, const float *right) {
    float2 x = {0.f, 0.f};
#pragma unroll
    for (int k = 0; k < 8; k += 4) {
        const float4 a = *(const float4 *)&left[k];
        const float2 b0 = *(const float2 *)&right[k * LDA], b1 = *(const float2 *)&right[(k + 1) * LDA];
        const float2 b2 = *(const float2 *)&right[(k + 2) * LDA], b3 = *(const float2 *)&right[(k + 3) * LDA];
        x.x += a.x * b0.x + a.y * b1.x + a.z * b2.x + a.w * b3.x;
        x.y += a.x * b0.y + a.y * b1.y + a.z * b2.y + a.w * b3.y;
    }
    return x;
}
// The inverse of one block on the diagonal of I + A, in its place: its halves by forward substitution, a lane per column, then
// what is below them, -D_1 (A_10 D_0).
__device__ __forceinline__ void invert_diagonal(float (*block)[LDA], int lane) {
    const int own = lane & 8, column = lane & 7;
    float x[8];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float s = i == column ? 1.f : 0.f;
#pragma unroll
        for (int k = 0; k < i; k += 4) {
            const float4 a = *(const float4 *)&block[own + i][own + k];
            s -= a.x * x[k];
            if (k + 1 < i) s -= a.y * x[k + 1];
            if (k + 2 < i) s -= a.z * x[k + 2];
            if (k + 3 < i) s -= a.w * x[k + 3];
        }
        x[i] = s;
    }
    __syncwarp();
    if (lane < 16)
#pragma unroll
        for (int i = 0; i < 8; ++i) block[own + i][own + column] = x[i];
    __syncwarp();
    const int row = 8 + (lane >> 2), pair = 2 * (lane & 3);
    float2 y = product8(block[row], &block[0][pair]);
    __syncwarp();
    *(float2 *)&block[row][pair] = y;
    __syncwarp();
    y = product8(&block[row][8], &block[8][pair]);
    __syncwarp();
    *(float2 *)&block[row][pair] = make_float2(-y.x, -y.y);
}
// Blocks of 16 rows of A, or of the scores: half 0 is the last two of them, with the inverse of the one on the diagonal, half 1
// all before. One warp.
__device__ __forceinline__ void row_job(Tile &m, Shared &z, int block, bool queries, int half, u32 live, int lane) {
    const bool diagonal = live >> (5 * block) & 1;
    u32 a[8][4];
    float d[2][4];
    rows16(queries ? m.q : m.k, block, a, lane);
    product_own(a, d);
    const Scales scales = row_scales(z, d, block, queries, lane);
    if (!queries && half == 0 && diagonal) {
        finish_block(m, z, scales, d, block, block, false, lane);
        if (STAGES >= 3) invert_diagonal(system_of(m, z)[block_at(block, block)], lane);
    }
    const int last = half ? block - 2 : queries ? block : block - 1, first = half ? 0 : block - 1;
#pragma unroll 1
    for (int kb = last; kb >= 0 && kb >= first; --kb) {
        if (kb < block && !(live >> (4 * block + kb) & 1)) continue;
        product16(a, m.k, 16 * kb, d, lane);
        finish_block(m, z, scales, d, block, kb, queries, lane);
    }
}
// 16 rows of keys or queries against 16 prior keys, weighted.
__device__ __forceinline__ void past_job(const Tile &m, Shared &z, int block, int chunk, bool queries, int lane) {
    const int g = lane >> 2, c = lane & 3;
    u32 a[8][4];
    float d[2][4];
    rows16(queries ? m.q : m.k, block, a, lane);
    product16(a, m.prior_k, 16 * chunk, d, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int i = 16 * chunk + 8 * n + 2 * c;
        const float2 weight = *(float2 *)&z.weights[i];
#pragma unroll
        for (int h = 0; h < 2; ++h) put2(&z.past[(queries ? BT : 0) + 16 * block + 8 * h + g][i], weight.x * d[n][2 * h], weight.y * d[n][2 * h + 1]);
    }
}
// ---- the inverse below its diagonal ----
#define IPARTS (EXACT ? 3 : 2)
// out[c, i] += sum over k of x[c, k] matrix[i, k]: 16 columns c, 16 rows i, 16 k.
__device__ __forceinline__ void multiply16(float (&out)[2][4], const u32 (&x)[4][IPARTS], const float (*matrix)[LDA], int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        u32 b[2][IPARTS];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 y = *(const float2 *)&matrix[8 * n + g][8 * h + 2 * c];
            split<IPARTS>(y.x, y.y, b[h]);
        }
        mma_parts(out[n], x, b);
    }
}
// One block of the inverse, as [ancestor][row].
__device__ __forceinline__ void put_inverse(Shared &z, const float (&x)[2][4], int b, int r, int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) put2(&z.inverse[block_at(r, b)][g + 8 * h][8 * n + 2 * c], x[n][2 * h], x[n][2 * h + 1]);
}
// Block column b of the inverse, from the diagonal down: X_r = -D_r (sum over k of A_rk X_k). One warp, in registers; what is
// known is taken into all sums below at once, so that products need not wait for each other.
__device__ __forceinline__ void invert_column(Tile &m, Shared &z, int b, int blocks, u32 live, int lane) {
    const int g = lane >> 2, c = lane & 3;
    float(*system)[16][LDA] = system_of(m, z);
    float sum[BLOCKS][2][4];
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[j][n][e] = 0.f;
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
        const int r = b + j;
        const bool diagonal = live >> (5 * r) & 1;
        if (r >= blocks || (j && !(live >> (4 * r + b) & 1))) continue;
        float x[2][4];
        if (j == 0) {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int column = g + 8 * (e >> 1), row = 8 * n + 2 * c + (e & 1);
                    x[n][e] = diagonal ? system[block_at(b, b)][row][column] : row == column ? 1.f : 0.f;
                }
        } else {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[n][e] = diagonal ? 0.f : -sum[j][n][e];
            if (diagonal) {
                u32 parts[4][IPARTS];
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[j][n][e] = -sum[j][n][e];
                operand(sum[j][0], sum[j][1], parts);
                multiply16(x, parts, system[block_at(r, r)], lane);
            }
        }
        put_inverse(z, x, b, r, lane);
        u32 parts[4][IPARTS];
        operand(x[0], x[1], parts);
#pragma unroll
        for (int i = j + 1; i < BLOCKS; ++i)
            if (b + i < blocks && (live >> (4 * (b + i) + r) & 1)) multiply16(sum[i], parts, system[block_at(b + i, r)], lane);
    }
}
#endif
