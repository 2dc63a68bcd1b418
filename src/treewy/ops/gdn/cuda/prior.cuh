// ---- prior rows ----
// A path that its history has no room for is read, but not appended: whoever chooses folds sees to it that there is none.
__device__ __forceinline__ bool appends(const Params &p, const Work &w) { return !w.fold && w.prior <= p.capacity; }
struct Weights {
    float weight[(PMAX + 31) / 32];  // lane i: exp(G_last - G_i) of row i, i + 32; 0 past the rows
    float carried;                   // exp(G_last)
};
struct Decays {
    float high[(PMAX + 31) / 32], low[(PMAX + 31) / 32], before_high, before_low;
};
// Every warp for itself.
__device__ __forceinline__ Decays prior_decays(const Params &p, const Work &w, int lane) {
    Decays r;
    r.before_high = r.before_low = 0.f;
    const i64 hist = w.place * p.hg_slot + w.head * p.hg_head;
    if (w.path && w.hist) {
        r.before_high = early(p.hist_high + hist + (w.hist - 1) * p.hg_row);
        r.before_low = early(p.hist_low + hist + (w.hist - 1) * p.hg_row);
    }
#pragma unroll
    for (int j = 0; j < (PMAX + 31) / 32; ++j) {
        int i = lane + 32 * j;
        r.high[j] = r.low[j] = 0.f;
        if (i >= w.prior) continue;
        const bool old = i < w.hist;
        i64 at = old ? hist + i * p.hg_row : record_row(p, w, i) * p.rg_row + w.head * p.rg_head;
        r.high[j] = early((old ? p.hist_high : p.rec_high) + at);
        r.low[j] = early((old ? p.hist_low : p.rec_low) + at);
    }
    return r;
}
// `writes` appends the decays of a path to a history that is kept.
__device__ __forceinline__ Weights prior_weights(const Params &p, const Work &w, const Decays &d, int lane, bool writes) {
    Weights r;
    const int SETS = (PMAX + 31) / 32;
    double decay[SETS], last = 0.0;
    const double before = (double)d.before_high + (double)d.before_low;
#pragma unroll
    for (int j = 0; j < SETS; ++j) {
        int i = lane + 32 * j;
        decay[j] = (double)d.high[j] + (double)d.low[j];
        if (i < w.hist || i >= w.prior) continue;
        decay[j] += before;
        if (writes && appends(p, w)) {
            i64 to = w.place * p.hg_slot + i * p.hg_row + w.head * p.hg_head;
            float high = (float)decay[j];
            p.hist_high[to] = high;
            p.hist_low[to] = (float)(decay[j] - (double)high);
        }
    }
#pragma unroll
    for (int j = 0; j < SETS; ++j) {
        double x = __shfl_sync(~0u, decay[j], (w.prior - 1) & 31);
        if (w.prior && (w.prior - 1) / 32 == j) last = x;
    }
#pragma unroll
    for (int j = 0; j < SETS; ++j) r.weight[j] = lane + 32 * j < w.prior ? expf((float)(last - decay[j])) : 0.f;
    r.carried = expf((float)last);
    return r;
}
__device__ __forceinline__ float weight_of(const Weights &x, int i) {
    float y = 0.f;
#pragma unroll
    for (int j = 0; j < (PMAX + 31) / 32; ++j) {
        float z = __shfl_sync(~0u, x.weight[j], i & 31);
        if (i / 32 == j) y = z;
    }
    return y;
}
__device__ __forceinline__ void append(const Params &p, const Work &w, const Tile &m) {
    if (!w.path || !appends(p, w)) return;
    const int per_row = BV * sizeof(ut) / 16;
    for (int at = threadIdx.x; at < w.path * per_row; at += 32 * NW) {
        int i = w.hist + at / per_row, piece = at % per_row;
        ut *to = (ut *)p.hist_u + w.place * p.hu_slot + i * p.hu_row + w.head * p.hu_head + BV * w.vb;
        ((uint4 *)to)[piece] = ((const uint4 *)m.prior_u[i])[piece];
    }
    if (w.vb || !w.first_of_group) return;
    for (int at = threadIdx.x; at < w.path * 16; at += 32 * NW) {
        int i = w.hist + (at >> 4);
        u16 *to = p.hist_k + w.place * p.hk_slot + i * p.hk_row + w.key_head * p.hk_head;
        ((uint4 *)to)[at & 15] = ((const uint4 *)m.prior_k[i])[at & 15];
    }
}

// ---- operands ----
// Two accumulator tiles of 8 columns as one operand of 16.
template <int COUNT> __device__ __forceinline__ void operand(const float (&x)[4], const float (&y)[4], u32 (&a)[4][COUNT]) {
    split<COUNT>(x[0], x[1], a[0]);
    split<COUNT>(x[2], x[3], a[1]);
    split<COUNT>(y[0], y[1], a[2]);
    split<COUNT>(y[2], y[3], a[3]);
}
// Accumulate the products of operands in parts that matter at their precision, smallest first.
template <int COUNT> __device__ __forceinline__ void mma_parts(float (&d)[4], const u32 (&a)[4][COUNT], const u32 (&b)[2][COUNT]) {
#pragma unroll
    for (int order = COUNT - 1; order >= 0; --order)
#pragma unroll
        for (int i = 0; i <= order; ++i) mma(d, a[0][i], a[1][i], a[2][i], a[3][i], b[0][order - i], b[1][order - i]);
}
// 16 rows of the state, keys 16 k .. + 15.
__device__ __forceinline__ void state_operand(const Tile &m, int row, int k, u32 (&a)[4][SPARTS], int lane) {
#if STATE_F32
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        float2 x = *(const float2 *)&m.s[row + g + 8 * (e & 1)][16 * k + 2 * c + 8 * (e >> 1)];
        split<SPARTS>(x.x, x.y, a[e]);
    }
#else
    u32 x[4];
    load4(x, &m.s[row + (lane & 15)][16 * k + 8 * (lane >> 4)]);
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e][0] = x[e];
#endif
}
// u of prior rows 16 chunk .. + 15 as 16 rows of values, unweighted.
template <int COUNT>
__device__ __forceinline__ void prior_operand(const Tile &m, int row, int chunk, u32 (&a)[4][COUNT], int lane) {
#if U_F32
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        int i = 16 * chunk + 2 * c + 8 * (e >> 1), v = row + g + 8 * (e & 1);
        split<COUNT>(m.prior_u[i][v], m.prior_u[i + 1][v], a[e]);
    }
#else
    u32 x[4];
    load4_turned(x, &m.prior_u[16 * chunk + (lane & 7) + 8 * (lane >> 4)][row + 8 * ((lane >> 3) & 1)]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        a[e][0] = x[e];
#pragma unroll
        for (int i = 1; i < COUNT; ++i) a[e][i] = 0;
    }
#endif
}

// S <- exp(G_last) S + sum of exp(G_last - G_i) u_i k_i^T for 16 rows of values, in float32, in shared memory and in the pool.
__device__ __forceinline__ void fold(const Params &p, const Work &w, Tile &m, const Weights &x, int row, int lane) {
    const int g = lane >> 2, c = lane & 3;
    u32 u[CHUNKS][4][FPARTS];
#pragma unroll
    for (int h = 0; h < CHUNKS; ++h) {
        if (16 * h >= w.prior) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // rows i = 2 c, 2 c + 1 of the chunk's halves
            if (16 * h + 8 * e >= w.prior) break;
            float w0 = weight_of(x, 16 * h + 2 * c + 8 * e), w1 = weight_of(x, 16 * h + 2 * c + 1 + 8 * e);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int i = 16 * h + 2 * c + 8 * e, v = row + g + 8 * r;
                split<FPARTS>(w0 * widen(m.prior_u[i][v]), w1 * widen(m.prior_u[i + 1][v]), u[h][2 * e + r]);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        // What is added is summed apart: tensor cores cut off what does not fit, and a state would drift towards zero.
        float d[2][4];
#pragma unroll
        for (int e = 0; e < 4; ++e) d[0][e] = d[1][e] = 0.f;
#pragma unroll
        for (int h = 0; h < CHUNKS; ++h) {
            if (16 * h >= w.prior) break;
            u32 b[4];
            load4_turned(b, &m.prior_k[16 * h + (lane & 15)][16 * k + 8 * (lane >> 4)]);
#pragma unroll
            for (int i = FPARTS - 1; i >= 0; --i) {
                if (16 * h + 8 < w.prior) {
                    mma(d[0], u[h][0][i], u[h][1][i], u[h][2][i], u[h][3][i], b[0], b[1]);
                    mma(d[1], u[h][0][i], u[h][1][i], u[h][2][i], u[h][3][i], b[2], b[3]);
                } else {
                    mma8(d[0], u[h][0][i], u[h][1][i], b[0]);
                    mma8(d[1], u[h][0][i], u[h][1][i], b[2]);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            st *at = &m.s[row + g + 8 * (e & 1)][16 * k + 2 * c + 8 * (e >> 1)];
            const float d0 = d[e >> 1][2 * (e & 1)], d1 = d[e >> 1][2 * (e & 1) + 1];
#if STATE_F32
            float2 y = *(const float2 *)at;
            *(float2 *)at = make_float2(fmaf(x.carried, y.x, d0), fmaf(x.carried, y.y, d1));
#else
            u32 y = *(const u32 *)at;
            *(u32 *)at = pack(fmaf(x.carried, lo_of(y), d0), fmaf(x.carried, hi_of(y), d1));
#endif
        }
    }
    __syncwarp();
    const int pieces = DIM * sizeof(st) / 16;
    char *to = (char *)((st *)p.state + w.slot * p.state_slot + w.head * p.state_head + (i64)(BV * w.vb + row) * DIM);
#pragma unroll
    for (int i = lane; i < 16 * pieces; i += 32) *(uint4 *)(to + 16 * i) = *(const uint4 *)((const char *)m.s[row + i / pieces] + 16 * (i % pieces));
}
