// One step of the gated delta rule for K = V = 128: commit of the prior rows, then verify of the tree. No headers: NVRTC compiles it.
//
// Every warp owns 16 MT rows of the state [V, K] and holds them in registers as the M operand of its matrix products, straight
// from memory: lane (g, c) = (lane / 4, lane % 4) loads the 8 keys 32 kb + 8 c .. + 7 of rows g and g + 8. The order of the
// keys inside a product is free as long as both operands share it, so no shared memory and no shuffle is needed. Rows of
// the tree are the N operand. What depends on no state (grams, decays, the inverse) is computed while the state is in
// flight. A row's arithmetic does not depend on BT, MT or NW, nor on what else runs.
//
// Macros: BT rows of the largest tree (4, 16, 32, 48, 64), NW warps, MT, STATE_F32, U_F32 (dtype of pseudo-values in records
// and histories), PARTS bfloat16 parts of an fp32 state, EXACT, PMAX prior rows.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define DIM 128
#define BV (16 * MT * NW)
#define VB (DIM / BV)
#define NT (BT / 8)
#define LDK 160           // halves of a row of keys or queries in shared memory: 64 bytes past a multiple of 128
#define LDA (BT + 4)
#define LDS 136           // the same for prior keys
#define LDP (PMAX + 8)
#define LDU (16 * MT + 4) // per warp
#define QSCALE 0.08838834764831845f
#define MAX_FLOAT 3.402823466e38f

#if U_F32
typedef float ut;
#else
typedef u16 ut;
#endif
#if STATE_F32
typedef float st;
#else
typedef u16 st;
#endif

struct Params {
    const u16 *q, *k, *v;
    const void *a, *b;
    const float *a_log, *dt_bias;
    void *state;
    const int *slots, *cu_rows, *ancestors;
    void *hist_u;
    u16 *hist_k;
    float *hist_high, *hist_low;
    const int *hist_len;
    const void *rec_u;
    const u16 *rec_k;
    const float *rec_high, *rec_low;
    const int *path_rows, *path_len, *fold;
    u16 *o;
    void *u_out;
    u16 *k_out;
    float *high_out, *low_out;
    i64 q_row, q_head, k_row, k_head, v_row, v_head, a_row, b_row, state_slot, state_head;
    i64 hu_slot, hu_row, hu_head, hk_slot, hk_row, hk_head, hg_slot, hg_row, hg_head;
    i64 ru_row, ru_head, rk_row, rk_head, rg_row, rg_head;
    i64 o_row, o_head, uo_row, uo_head, ko_row, ko_head, go_row, go_head;
    int num_seqs, num_heads, group, num_slots, words, path_stride, capacity, gates_f32;
    float beta_scale;
};

// ---- small tools ----
__device__ __forceinline__ float lo_of(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float hi_of(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float widen(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u16 narrow(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ void put(float *p, float x) { *p = x; }
__device__ __forceinline__ void put(u16 *p, float x) { *p = narrow(x); }
__device__ __forceinline__ bool finite(float x) { return fabsf(x) <= MAX_FLOAT; }
__device__ __forceinline__ float read_gate(const void *p, i64 at, int f32) {
    return f32 ? ((const float *)p)[at] : widen(((const u16 *)p)[at]);
}
__device__ __forceinline__ uint4 load_stream(const void *p) {
    uint4 r;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ u32 part(const uint4 &x, int j) { return j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w; }
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 smem_at(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void copy16(void *to, const void *from, bool live) {
    int bytes = live ? 16 : 0;  // the rest is filled with zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_at(to)), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ u64 ancestors_of(const Params &p, int row) {
    const u32 *w = (const u32 *)p.ancestors + (i64)row * p.words;
    return p.words > 1 ? (u64)w[0] | ((u64)w[1] << 32) : (u64)w[0];
}
// Three bfloat16 parts hold 24 bits: x = parts[0] + parts[1] + parts[2]. Two neighbours at a time.
template <int COUNT> __device__ __forceinline__ void split(float x0, float x1, u32 (&parts)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        parts[i] = pack(x0, x1);
        x0 -= lo_of(parts[i]);
        x1 -= hi_of(parts[i]);
    }
}

// ---- what a block works on ----
struct Work {
    int seq, head, vb, slot, start, rows, hist, path, prior, fold, key_head;
    bool live;
};
__device__ __forceinline__ Work work_of(const Params &p) {
    Work w;
    int id = blockIdx.x;
    w.vb = id % VB;
    id /= VB;
    w.head = id % p.num_heads;
    w.seq = id / p.num_heads;
    w.key_head = w.head / p.group;
    w.slot = p.slots[w.seq];
    w.live = w.slot >= 0 && w.slot < p.num_slots;
    w.start = p.cu_rows[w.seq];
    w.rows = min(p.cu_rows[w.seq + 1] - w.start, BT);
    w.hist = w.live && p.hist_len ? p.hist_len[w.slot] : 0;
    w.path = w.live && p.path_len ? p.path_len[w.seq] : 0;
    w.hist = max(0, min(w.hist, p.capacity));
    w.path = max(0, min(w.path, PMAX - w.hist));
    w.prior = w.hist + w.path;
    w.fold = w.prior && (p.capacity == 0 || p.fold[w.seq] != 0 || w.prior > p.capacity);
    return w;
}

// ---- prior rows ----
typedef u16 Keys[PMAX][LDS];
__device__ __forceinline__ i64 path_row(const Params &p, const Work &w, int i) {
    return p.path_rows[(i64)w.seq * p.path_stride + i - w.hist];
}
__device__ __forceinline__ double hist_decay(const Params &p, const Work &w, int i) {
    i64 at = w.slot * p.hg_slot + i * p.hg_row + w.head * p.hg_head;
    return (double)p.hist_high[at] + (double)p.hist_low[at];
}
// Stage every prior row: its key for the block, and this warp's 16 MT values of u weighted by exp(G_last - G_i). Rows of a
// path join a history that is kept. Lane i first looks up row i, so that no load waits for another row's.
// Returns exp(G_last). The keys are there after copies_done and a barrier.
__device__ __forceinline__ float stage_prior(const Params &p, const Work &w, Keys &keys, float *su, int lane, int v0) {
    if (!w.prior) return 1.f;
    for (int at = threadIdx.x; at < w.prior * 16; at += 32 * NW) {
        int i = at >> 4, piece = at & 15;
        const u16 *from = i < w.hist ? p.hist_k + w.slot * p.hk_slot + i * p.hk_row + w.key_head * p.hk_head
                                     : p.rec_k + path_row(p, w, i) * p.rk_row + w.key_head * p.rk_head;
        copy16(&keys[i][8 * piece], from + 8 * piece, true);
    }
    const int SETS = (PMAX + 31) / 32;
    double decay[SETS];
    u64 from[SETS];
#pragma unroll
    for (int j = 0; j < SETS; ++j) {
        int i = lane + 32 * j;
        decay[j] = 0.0;
        from[j] = 0;
        if (i >= w.prior) continue;
        if (i < w.hist) {
            decay[j] = hist_decay(p, w, i);
            from[j] = (u64)((const ut *)p.hist_u + w.slot * p.hu_slot + i * p.hu_row + w.head * p.hu_head);
        } else {
            i64 row = path_row(p, w, i), at = row * p.rg_row + w.head * p.rg_head;
            decay[j] = (w.hist ? hist_decay(p, w, w.hist - 1) : 0.0) + (double)p.rec_high[at] + (double)p.rec_low[at];
            from[j] = (u64)((const ut *)p.rec_u + row * p.ru_row + w.head * p.ru_head);
            if (!w.fold && v0 == 0) {
                i64 to = w.slot * p.hg_slot + i * p.hg_row + w.head * p.hg_head;
                float high = (float)decay[j];
                p.hist_high[to] = high;
                p.hist_low[to] = (float)(decay[j] - (double)high);
            }
        }
    }
    double last = 0.0;
#pragma unroll
    for (int j = 0; j < SETS; ++j) {
        double x = __shfl_sync(~0u, decay[j], (w.prior - 1) & 31);
        if ((w.prior - 1) / 32 == j) last = x;
    }
#pragma unroll
    for (int j = 0; j < SETS; ++j) {
        float weight = expf((float)(last - decay[j]));
        for (int i0 = 32 * j; i0 < min(w.prior, 32 * j + 32); i0 += 8) {
            ut x[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const ut *u = (const ut *)__shfl_sync(~0u, from[j], (i0 + e) & 31);
                x[e] = 0;
                if (i0 + e < w.prior && lane < 16 * MT) x[e] = u[v0 + lane];
            }
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                int i = i0 + e;
                float y = __shfl_sync(~0u, weight, i & 31) * widen(x[e]);
                if (i < w.prior && lane < 16 * MT) {
                    su[i * LDU + lane] = y;
                    if (!w.fold && i >= w.hist)
                        ((ut *)p.hist_u)[w.slot * p.hu_slot + i * p.hu_row + w.head * p.hu_head + v0 + lane] = x[e];
                }
            }
        }
    }
    __syncwarp();
    return expf((float)last);
}
__device__ __forceinline__ void append_keys(const Params &p, const Work &w, const Keys &keys) {
    if (w.fold || w.vb || w.head % p.group) return;
    for (int at = threadIdx.x; at < w.path * 16; at += 32 * NW) {
        int i = w.hist + (at >> 4), piece = at & 15;
        u16 *to = p.hist_k + w.slot * p.hk_slot + i * p.hk_row + w.key_head * p.hk_head;
        *(uint4 *)(to + 8 * piece) = *(const uint4 *)&keys[i][8 * piece];
    }
}

// ---- the state of a warp ----
struct State {
#if STATE_F32
    uint4 x[MT][4][2][2];  // [tile][32 keys][row g, g + 8][4 keys]
#else
    uint4 x[MT][4][2];
#endif
    __device__ __forceinline__ void load(const st *rows, int g, int c) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int kb = 0; kb < 4; ++kb)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const st *at = rows + (16 * m + 8 * h + g) * DIM + 32 * kb + 8 * c;
#if STATE_F32
                    x[m][kb][h][0] = load_stream(at);
                    x[m][kb][h][1] = load_stream(at + 4);
#else
                    x[m][kb][h] = load_stream(at);
#endif
                }
    }
    // Fold prior rows in: S <- exp(G_last) S + sum of weighted u k^T, in float32, and write it back.
    __device__ __forceinline__ void fold(const Work &w, st *rows, const Keys &prior, const float *su, float carried, int g, int c) {
#pragma unroll
        for (int kb = 0; kb < 4; ++kb) {
            float f[MT][2][8];
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
#if STATE_F32
                        const uint4 &y = x[m][kb][h][j / 2];
                        f[m][h][2 * j] = carried * __uint_as_float(part(y, 2 * (j % 2)));
                        f[m][h][2 * j + 1] = carried * __uint_as_float(part(y, 2 * (j % 2) + 1));
#else
                        u32 y = part(x[m][kb][h], j);
                        f[m][h][2 * j] = carried * lo_of(y);
                        f[m][h][2 * j + 1] = carried * hi_of(y);
#endif
                    }
#pragma unroll 2
            for (int i = 0; i < w.prior; ++i) {
                uint4 keys = *(const uint4 *)&prior[i][32 * kb + 8 * c];
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float u = su[i * LDU + 16 * m + 8 * h + g];
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            f[m][h][2 * j] += u * lo_of(part(keys, j));
                            f[m][h][2 * j + 1] += u * hi_of(part(keys, j));
                        }
                    }
            }
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    st *at = rows + (16 * m + 8 * h + g) * DIM + 32 * kb + 8 * c;
                    float(&y)[8] = f[m][h];
#if STATE_F32
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        x[m][kb][h][j] = make_uint4(__float_as_uint(y[4 * j]), __float_as_uint(y[4 * j + 1]),
                                                    __float_as_uint(y[4 * j + 2]), __float_as_uint(y[4 * j + 3]));
                        ((uint4 *)at)[j] = x[m][kb][h][j];
                    }
#else
                    x[m][kb][h] = make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
                    *(uint4 *)at = x[m][kb][h];
#endif
                }
        }
    }
    // Add S x^T for 8 rows x, whose 32 keys of block kb lie in `rows`, to the accumulators of every tile.
    __device__ __forceinline__ void read(int m, int kb, const uint4 &rows, float (&acc)[4]) const {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            u32 b0 = part(rows, 2 * s), b1 = part(rows, 2 * s + 1);
#if STATE_F32
            u32 a[4][PARTS];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint4 &y = x[m][kb][h][s];
                split<PARTS>(__uint_as_float(y.x), __uint_as_float(y.y), a[h]);
                split<PARTS>(__uint_as_float(y.z), __uint_as_float(y.w), a[2 + h]);
            }
#pragma unroll
            for (int i = PARTS - 1; i >= 0; --i) mma(acc, a[0][i], a[1][i], a[2][i], a[3][i], b0, b1);
#else
            mma(acc, part(x[m][kb][0], 2 * s), part(x[m][kb][1], 2 * s), part(x[m][kb][0], 2 * s + 1), part(x[m][kb][1], 2 * s + 1), b0, b1);
#endif
        }
    }
};

struct Gate {
    float g, beta;
};
__device__ __forceinline__ Gate gate_of(const Params &p, const Work &w, int t) {
    Gate r = {0.f, 0.f};
    if (t < w.rows) {
        float a = read_gate(p.a, (i64)(w.start + t) * p.a_row + w.head, p.gates_f32) + p.dt_bias[w.head];
        float b = read_gate(p.b, (i64)(w.start + t) * p.b_row + w.head, p.gates_f32);
        float softplus = a > 20.f ? a : log1pf(expf(a));
        r.g = -expf(p.a_log[w.head]) * softplus;
        r.beta = p.beta_scale / (1.f + expf(-b));
    }
    return r;
}
__device__ __forceinline__ float inverse_norm(float sum) { return rsqrtf(sum + 1e-6f); }

// ---- up to 4 rows: every warp alone, all T x T work in float32 registers ----
#define SMALL_FLOATS (PMAX * LDU + 8 * PMAX + 16 * MT * 8 + 64)
__device__ __forceinline__ void small_step(const Params &p, const Work &w, State &s, st *rows, Keys &keys, float *mem, int lane, int v0) {
    const int g = lane >> 2, c = lane & 3;
    float *su = mem, *coef = su + PMAX * LDU, *out = coef + 8 * PMAX, *tt = out + 16 * MT * 8;

    // Rows 0-3 are keys, 4-7 queries; the same registers serve as either operand of a product.
    const int row = g & 3;
    uint4 kq[4];
#pragma unroll
    for (int kb = 0; kb < 4; ++kb) {
        kq[kb] = make_uint4(0, 0, 0, 0);
        if (row < w.rows) {
            const u16 *from = g < 4 ? p.k + (i64)(w.start + row) * p.k_row + w.key_head * p.k_head
                                    : p.q + (i64)(w.start + row) * p.q_row + w.key_head * p.q_head;
            kq[kb] = *(const uint4 *)(from + 32 * kb + 8 * c);
        }
    }
    float values[4];
#pragma unroll
    for (int t = 0; t < 4; ++t)
        values[t] = t < w.rows && lane < 16 * MT ? widen(p.v[(i64)(w.start + t) * p.v_row + w.head * p.v_head + v0 + lane]) : 0.f;
    Gate gate = gate_of(p, w, lane & 3);
    u32 bits = (lane & 3) < w.rows ? (u32)ancestors_of(p, w.start + (lane & 3)) : 0u;
    float carried = stage_prior(p, w, keys, su, lane, v0);
    if (w.prior) {
        copies_done();
        __syncthreads();
        append_keys(p, w, keys);
    }

    float gram[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int kb = 0; kb < 4; ++kb)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            mma(gram, part(kq[kb], 2 * h), 0, part(kq[kb], 2 * h + 1), 0, part(kq[kb], 2 * h), part(kq[kb], 2 * h + 1));

    if (p.k_out && v0 == 0 && w.head % p.group == 0 && g < 4 && row < w.rows)
#pragma unroll
        for (int kb = 0; kb < 4; ++kb)
            *(uint4 *)(p.k_out + (i64)(w.start + row) * p.ko_row + w.key_head * p.ko_head + 32 * kb + 8 * c) = kq[kb];

    if (w.prior && !w.fold) {
        for (int i0 = 0; i0 < w.prior; i0 += 8) {
            float d[4] = {0.f, 0.f, 0.f, 0.f};
            const u16 *key = keys[min(i0 + g, w.prior - 1)];
#pragma unroll
            for (int kb = 0; kb < 4; ++kb) {
                uint4 y = *(const uint4 *)(key + 32 * kb + 8 * c);
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    mma(d, part(kq[kb], 2 * h), 0, part(kq[kb], 2 * h + 1), 0, part(y, 2 * h), part(y, 2 * h + 1));
            }
            coef[(i0 + 2 * c) * 8 + g] = d[0];
            coef[(i0 + 2 * c + 1) * 8 + g] = d[1];
        }
    }
    // Lane 4 t + i of the first 16 finishes entry (t, i) of both T x T matrices.
    const int t = (lane >> 2) & 3, i = lane & 3;
    {
        float k0 = __shfl_sync(~0u, gram[0], 4 * t + (i >> 1)), k1 = __shfl_sync(~0u, gram[1], 4 * t + (i >> 1));
        float q0 = __shfl_sync(~0u, gram[0], 16 + 4 * t + (i >> 1)), q1 = __shfl_sync(~0u, gram[1], 16 + 4 * t + (i >> 1));
        float kk = i & 1 ? k1 : k0, qk = i & 1 ? q1 : q0;
        float n0 = __shfl_sync(~0u, gram[0], 4 * i + (i >> 1)), n1 = __shfl_sync(~0u, gram[1], 4 * i + (i >> 1));
        float key_norm_i = inverse_norm(i & 1 ? n1 : n0);
        float key_norm = __shfl_sync(~0u, key_norm_i, t);
        n0 = __shfl_sync(~0u, gram[0], 16 + 4 * t + 2 + (t >> 1)), n1 = __shfl_sync(~0u, gram[1], 16 + 4 * t + 2 + (t >> 1));
        float query_norm = QSCALE * inverse_norm(t & 1 ? n1 : n0);
        float beta = __shfl_sync(~0u, gate.beta, t);
        u32 bits_t = __shfl_sync(~0u, bits, t), bits_i = bits;
        float segment = 0.f;
        double total = 0.0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float x = __shfl_sync(~0u, gate.g, j);
            if (bits_t >> j & 1) {
                total += (double)x;
                if (!(bits_i >> j & 1)) segment += x;
            }
        }
        bool above = bits_t >> i & 1;
        float ratio = above ? expf(segment) : 0.f;
        if (lane < 16) {
            tt[4 * t + i] = above && i != t ? beta * ratio * kk * key_norm * key_norm_i : 0.f;
            tt[16 + 4 * t + i] = above ? ratio * qk * query_norm * key_norm_i : 0.f;
            if (i == 0) {
                float decay = expf((float)total);
                tt[32 + t] = beta;
                tt[36 + t] = decay * key_norm;
                tt[40 + t] = decay * query_norm;
                tt[44 + t] = key_norm;
                if (v0 == 0 && p.high_out && t < w.rows) {
                    float high = (float)total;
                    p.high_out[(i64)(w.start + t) * p.go_row + w.head * p.go_head] = high;
                    p.low_out[(i64)(w.start + t) * p.go_row + w.head * p.go_head] = (float)(total - (double)high);
                }
            }
        }
    }
    if (w.fold) {
        s.fold(w, rows, keys, su, carried, g, c);
        carried = 1.f;
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int kb = 0; kb < 4; ++kb) s.read(m, kb, kq[kb], acc);
        *(float2 *)(out + (16 * m + g) * 8 + 2 * c) = make_float2(acc[0], acc[1]);
        *(float2 *)(out + (16 * m + 8 + g) * 8 + 2 * c) = make_float2(acc[2], acc[3]);
    }
    __syncwarp();
    if (lane >= 16 * MT) return;
    float x[8];
    *(float4 *)x = *(float4 *)(out + 8 * lane);
    *(float4 *)(x + 4) = *(float4 *)(out + 8 * lane + 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= carried;
    if (!w.fold)
        for (int r = 0; r < w.prior; ++r) {
            float u = su[r * LDU + lane];
            float4 c0 = *(float4 *)(coef + 8 * r), c1 = *(float4 *)(coef + 8 * r + 4);
            x[0] += u * c0.x; x[1] += u * c0.y; x[2] += u * c0.z; x[3] += u * c0.w;
            x[4] += u * c1.x; x[5] += u * c1.y; x[6] += u * c1.z; x[7] += u * c1.w;
        }
    float u[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        if (r >= w.rows) break;
        float y = tt[32 + r] * (values[r] - tt[36 + r] * x[r]);
#pragma unroll
        for (int j = 0; j < r; ++j) {
            float a = tt[4 * r + j];
            if (a != 0.f) y -= a * u[j];  // a row that is not finite must not reach rows that do not see it
        }
        u[r] = y;
        float z = tt[40 + r] * x[4 + r];
#pragma unroll
        for (int j = 0; j <= r; ++j) {
            float a = tt[16 + 4 * r + j];
            if (a != 0.f) z += a * u[j];
        }
        i64 at = w.start + r;
        p.o[at * p.o_row + w.head * p.o_head + v0 + lane] = narrow(z);
        put((ut *)p.u_out + at * p.uo_row + w.head * p.uo_head + v0 + lane, y * tt[44 + r]);
    }
}

#if BT > 4
// ---- up to BT rows: keys, queries and T x T matrices in shared memory, products on tensor cores ----
#define VALUE_BYTES (BT * (BV + 8) * 2)
#define SYSTEM_BYTES (BT * LDA * 4)
#define FIRST_BYTES (VALUE_BYTES > SYSTEM_BYTES ? VALUE_BYTES : SYSTEM_BYTES)
struct Shared {
    u16 k[BT][LDK];
    u16 q[BT][LDK];
    union {
        float system[BT][LDA];      // A transposed: [ancestor][row]
        u16 values[BT][BV + 8];     // v of all rows; then staging of u and o
        char bytes[FIRST_BYTES];
    };
    float inverse[BT][LDA];         // (I + A)^-1, [row][ancestor]
#if EXACT
    float scores[BT][LDA];
    float past[2 * BT][LDP];        // k . k_i and q . k_i of prior rows i
#else
    u16 scores[BT][BT + 8];
    u16 past[2 * BT][LDP];
#endif
    float su[NW][PMAX * LDU];
    float key_norm[BT], query_norm[BT], beta[BT], high[BT], low[BT], read_k[BT], read_q[BT];
    u64 bits[BT];
    u32 bad[2];
    double sums[64];
    int jump[64];
};

__device__ __forceinline__ void row_norms(const u16 (*rows)[LDK], float *to, float scale, int warp, int lane) {
    for (int r = 2 * warp + (lane >> 4); r < BT; r += 2 * NW) {
        uint4 y = *(const uint4 *)&rows[r][8 * (lane & 15)];
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += lo_of(part(y, j)) * lo_of(part(y, j)) + hi_of(part(y, j)) * hi_of(part(y, j));
#pragma unroll
        for (int d = 8; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if ((lane & 15) == 0) to[r] = scale * inverse_norm(sum);
    }
}
// Log decays over root paths by pointer jumping, in double; one warp.
__device__ __forceinline__ void path_sums(Shared &m, const Params &p, const Work &w, int lane) {
    for (int t = lane; t < BT; t += 32) {
        Gate x = gate_of(p, w, t);
        u64 bits = t < w.rows ? ancestors_of(p, w.start + t) : 0ull;
        u64 above = bits & ~(1ull << t);
        m.beta[t] = x.beta;
        m.bits[t] = bits;
        m.sums[t] = (double)x.g;
        m.jump[t] = above ? 63 - __clzll((i64)above) : -1;  // the nearest ancestor is the newest row
    }
    __syncwarp();
#pragma unroll 1
    for (int reach = 1; reach < BT; reach <<= 1) {
        double add[(BT + 31) / 32];
        int next[(BT + 31) / 32];
#pragma unroll
        for (int j = 0; j < (BT + 31) / 32; ++j) {
            int t = lane + 32 * j, up = t < BT ? m.jump[t] : -1;
            add[j] = up >= 0 ? m.sums[up] : 0.0;
            next[j] = up >= 0 ? m.jump[up] : -1;
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < (BT + 31) / 32; ++j)
            if (lane + 32 * j < BT) {
                m.sums[lane + 32 * j] += add[j];
                m.jump[lane + 32 * j] = next[j];
            }
        __syncwarp();
    }
    for (int t = lane; t < BT; t += 32) {
        float high = (float)m.sums[t], low = (float)(m.sums[t] - (double)high);
        m.high[t] = high;
        m.low[t] = low;
        if (w.vb == 0 && p.high_out && t < w.rows) {
            p.high_out[(i64)(w.start + t) * p.go_row + w.head * p.go_head] = high;
            p.low_out[(i64)(w.start + t) * p.go_row + w.head * p.go_head] = low;
        }
    }
}
// 16 rows of keys or queries against all keys up to them, and against prior keys.
__device__ __forceinline__ void gram(Shared &m, const Keys &keys, const Work &w, int block, bool queries, int lane) {
    const int g = lane >> 2, c = lane & 3;
    const u16(*from)[LDK] = queries ? m.q : m.k;
    uint4 a[4][2];
#pragma unroll
    for (int kb = 0; kb < 4; ++kb)
#pragma unroll
        for (int h = 0; h < 2; ++h) a[kb][h] = *(const uint4 *)&from[16 * block + 8 * h + g][32 * kb + 8 * c];
    for (int tile = 0; tile < 2 * block + 2; ++tile) {
        float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int kb = 0; kb < 4; ++kb) {
            uint4 y = *(const uint4 *)&m.k[8 * tile + g][32 * kb + 8 * c];
#pragma unroll
            for (int s = 0; s < 2; ++s)
                mma(d, part(a[kb][0], 2 * s), part(a[kb][1], 2 * s), part(a[kb][0], 2 * s + 1), part(a[kb][1], 2 * s + 1), part(y, 2 * s), part(y, 2 * s + 1));
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int t = 16 * block + 8 * h + g;
            u64 bits = m.bits[t];
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int i = 8 * tile + 2 * c + e;
                bool above = (bits >> i & 1) && (queries || i != t);
                float ratio = above ? expf((m.high[t] - m.high[i]) + (m.low[t] - m.low[i])) : 0.f;
                float scale = queries ? m.query_norm[t] : m.beta[t] * m.key_norm[t];
                x[e] = above ? ratio * d[2 * h + e] * scale * m.key_norm[i] : 0.f;
                if (queries) continue;
                // A row whose system is not finite is taken out of it, and gets NaN at the end.
                if (!finite(x[e])) atomicOr(&m.bad[t >> 5], 1u << (t & 31));
                m.system[i][t] = finite(x[e]) ? x[e] : 0.f;
            }
#if EXACT
            if (queries) *(float2 *)&m.scores[t][8 * tile + 2 * c] = make_float2(x[0], x[1]);
#else
            if (queries) *(u32 *)&m.scores[t][8 * tile + 2 * c] = pack(x[0], x[1]);
#endif
        }
    }
    if (!w.prior || w.fold) return;
    for (int i0 = 0; i0 < PMAX; i0 += 8) {
        float d[4] = {0.f, 0.f, 0.f, 0.f};
        if (i0 >= ((w.prior + 15) & ~15)) break;
        if (i0 < w.prior) {
            const u16 *key = keys[min(i0 + g, w.prior - 1)];
#pragma unroll
            for (int kb = 0; kb < 4; ++kb) {
                uint4 y = *(const uint4 *)(key + 32 * kb + 8 * c);
#pragma unroll
                for (int s = 0; s < 2; ++s)
                    mma(d, part(a[kb][0], 2 * s), part(a[kb][1], 2 * s), part(a[kb][0], 2 * s + 1), part(a[kb][1], 2 * s + 1), part(y, 2 * s), part(y, 2 * s + 1));
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float x0 = i0 + 2 * c < w.prior ? d[2 * h] : 0.f, x1 = i0 + 2 * c + 1 < w.prior ? d[2 * h + 1] : 0.f;
            int r = (queries ? BT : 0) + 16 * block + 8 * h + g;
#if EXACT
            *(float2 *)&m.past[r][i0 + 2 * c] = make_float2(x0, x1);
#else
            *(u32 *)&m.past[r][i0 + 2 * c] = pack(x0, x1);
#endif
        }
    }
}
// Columns 16 block .. + 15 of (I + A)^-1 by forward substitution in float32, 16 rows at a time; one warp, a lane per
// column and half of each sum.
__device__ __forceinline__ void invert(Shared &m, const Work &w, int block, int lane) {
    const int column = 16 * block + (lane & 15), half = lane >> 4;
#pragma unroll 1
    for (int r = block; 16 * r < w.rows; ++r) {
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = 0.f;
#pragma unroll 1
        for (int kb = block; kb < r; ++kb)
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                int row = 16 * kb + 8 * half + k;
                float y = m.inverse[row][column];
#pragma unroll
                for (int i = 0; i < 16; i += 4) {
                    float4 a = *(const float4 *)&m.system[row][16 * r + i];
                    x[i] -= a.x * y; x[i + 1] -= a.y * y; x[i + 2] -= a.z * y; x[i + 3] -= a.w * y;
                }
            }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            x[i] += __shfl_xor_sync(~0u, x[i], 16);
            x[i] += 16 * r + i == column ? 1.f : 0.f;
        }
#pragma unroll
        for (int k = 0; k < 15; ++k) {
            float a[16];
#pragma unroll
            for (int i = (k + 1) & ~3; i < 16; i += 4) *(float4 *)(a + i) = *(const float4 *)&m.system[16 * r + k][16 * r + i];
#pragma unroll
            for (int i = k + 1; i < 16; ++i) x[i] -= a[i] * x[k];
        }
        if (half == 0)
#pragma unroll
            for (int i = 0; i < 16; ++i) m.inverse[16 * r + i][column] = x[i];
        __syncwarp();
    }
}
#if EXACT
#define XPARTS 3
#else
#define XPARTS 1
#endif
// Accumulate the products of three-part operands that matter at 24 bits, smallest first.
__device__ __forceinline__ void mma_parts(float (&d)[4], const u32 (&a)[4][XPARTS], const u32 (&b)[2][XPARTS]) {
#pragma unroll
    for (int order = XPARTS - 1; order >= 0; --order)
#pragma unroll
        for (int i = 0; i <= order; ++i) mma(d, a[0][i], a[1][i], a[2][i], a[3][i], b[0][order - i], b[1][order - i]);
}
__device__ __forceinline__ void row_parts(const float *row, u32 (&b)[2][XPARTS]) {
    float2 x = *(const float2 *)row, y = *(const float2 *)(row + 8);
    split<XPARTS>(x.x, x.y, b[0]);
    split<XPARTS>(y.x, y.y, b[1]);
}
__device__ __forceinline__ void row_parts(const u16 *row, u32 (&b)[2][XPARTS]) {
    b[0][0] = *(const u32 *)row;
    b[1][0] = *(const u32 *)(row + 8);
}
// Two accumulator tiles of 8 columns as one operand of 16.
__device__ __forceinline__ void operand(const float (&x)[4], const float (&y)[4], u32 (&a)[4][XPARTS]) {
    split<XPARTS>(x[0], x[1], a[0]);
    split<XPARTS>(x[2], x[3], a[1]);
    split<XPARTS>(y[0], y[1], a[2]);
    split<XPARTS>(y[2], y[3], a[3]);
}
// What the committed state gives for all rows of `rows`: S x^T carried on, and the prior rows beside it.
__device__ __forceinline__ void read_past(const State &s, Shared &m, const Work &w, const u16 (*rows)[LDK], int offset, const float *su, float carried, float (&acc)[MT][NT][4], int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int t = 0; t < MT; ++t) acc[t][n][0] = acc[t][n][1] = acc[t][n][2] = acc[t][n][3] = 0.f;
        if (8 * n >= w.rows) continue;
#pragma unroll
        for (int kb = 0; kb < 4; ++kb) {
            uint4 y = *(const uint4 *)&rows[8 * n + g][32 * kb + 8 * c];
#pragma unroll
            for (int t = 0; t < MT; ++t) s.read(t, kb, y, acc[t][n]);
        }
    }
    if (!w.prior || w.fold) return;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[t][n][e] *= carried;
    for (int i0 = 0; i0 < w.prior; i0 += 16)
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            u32 a[4][XPARTS];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int i = i0 + 2 * c + 8 * (e >> 1), v = 16 * t + 8 * (e & 1) + g;
                float x0 = i < w.prior ? su[i * LDU + v] : 0.f, x1 = i + 1 < w.prior ? su[(i + 1) * LDU + v] : 0.f;
                split<XPARTS>(x0, x1, a[e]);
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                if (8 * n >= w.rows) continue;
                u32 b[2][XPARTS];
                row_parts(&m.past[offset + 8 * n + g][i0 + 2 * c], b);
                mma_parts(acc[t][n], a, b);
            }
        }
}
// out[v, t] += sum over i <= t of in[v, i] matrix[t, i]; rows that are not finite leave the products.
template <typename M>
__device__ __forceinline__ void apply(const float (&in)[MT][NT][4], const M &matrix, float (&out)[MT][NT][4], const Work &w, int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int ks = 0; ks < NT / 2; ++ks) {
        if (16 * ks >= w.rows) break;
        u32 a[MT][4][XPARTS];
#pragma unroll
        for (int t = 0; t < MT; ++t) operand(in[t][2 * ks], in[t][2 * ks + 1], a[t]);
#pragma unroll
        for (int n = 2 * ks; n < NT; ++n) {
            if (8 * n >= w.rows) break;
            u32 b[2][XPARTS];
            row_parts(&matrix[8 * n + g][16 * ks + 2 * c], b);
#pragma unroll
            for (int t = 0; t < MT; ++t) mma_parts(out[t][n], a[t], b);
        }
    }
}
// Rows with an element that is not finite, as bits; the same in every lane.
__device__ __forceinline__ u64 tainted(const float (&x)[MT][NT][4], int lane) {
    float probe = 0.f;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) probe += 0.f * x[t][n][e];
    if (!__any_sync(~0u, probe != 0.f)) return 0ull;
    u64 bad = 0;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (!finite(x[t][n][e])) bad |= 1ull << (8 * n + 2 * (lane & 3) + (e & 1));
    u32 low = __reduce_or_sync(~0u, (u32)bad), high = __reduce_or_sync(~0u, (u32)(bad >> 32));
    return (u64)low | ((u64)high << 32);
}
// Put NaN (or, with `clear`, 0) into columns t that see a tainted row.
__device__ __forceinline__ void mark(const Shared &m, u64 bad, bool clear, float (&x)[MT][NT][4], int lane) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (m.bits[8 * n + 2 * (lane & 3) + e] & bad)
#pragma unroll
                for (int t = 0; t < MT; ++t) x[t][n][e] = x[t][n][e + 2] = clear ? 0.f : __uint_as_float(0x7fc00000u);
}
// Write [v, t] accumulators as bfloat16 rows t through this warp's columns of the staging area.
__device__ __forceinline__ void write_rows(Shared &m, const Work &w, const float (&x)[MT][NT][4], const float *scale, u16 *to, i64 row_stride, int column, int lane) {
    const int g = lane >> 2, c = lane & 3;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        if (8 * n >= w.rows) break;
        float s0 = scale ? scale[8 * n + 2 * c] : 1.f, s1 = scale ? scale[8 * n + 2 * c + 1] : 1.f;
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 pair = pack(s0 * x[t][n][2 * h], s1 * x[t][n][2 * h + 1]), turned;
                // Lane (g, c) gets row 8 n + g, columns 2 c and 2 c + 1 of the tile.
                asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
                *(u32 *)&m.values[8 * n + g][column + 16 * t + 8 * h + 2 * c] = turned;
            }
    }
    __syncwarp();
    const int per_row = 2 * MT;  // 16-byte pieces
    for (int i = lane; i < w.rows * per_row; i += 32)
        *(uint4 *)(to + (i64)(w.start + i / per_row) * row_stride + 8 * (i % per_row)) = *(const uint4 *)&m.values[i / per_row][column + 8 * (i % per_row)];
}
__device__ __forceinline__ void wide_step(const Params &p, const Work &w, State &s, st *rows, Keys &keys, Shared &m, int warp, int lane, int v0) {
    const int g = lane >> 2, c = lane & 3, column = 16 * MT * warp;
    for (int i = threadIdx.x; i < 2 * BT * 16; i += 32 * NW) {
        int r = i >> 4, piece = i & 15, t = r % BT;
        bool live = t < w.rows;
        i64 row = w.start + (live ? t : 0);
        const u16 *from = r < BT ? p.k + row * p.k_row + w.key_head * p.k_head : p.q + row * p.q_row + w.key_head * p.q_head;
        copy16(r < BT ? &m.k[t][8 * piece] : &m.q[t][8 * piece], from + 8 * piece, live);
    }
    if (threadIdx.x < 2) m.bad[threadIdx.x] = 0;
    float carried = stage_prior(p, w, keys, m.su[warp], lane, v0 + column);
    if (warp == NW - 1) path_sums(m, p, w, lane);
    copies_done();
    __syncthreads();
    if (w.prior) append_keys(p, w, keys);
    row_norms(m.k, m.key_norm, 1.f, warp, lane);
    row_norms(m.q, m.query_norm, QSCALE, warp, lane);
    __syncthreads();
    for (int t = threadIdx.x; t < BT; t += 32 * NW) {
        float decay = expf(m.high[t] + m.low[t]);
        m.read_k[t] = decay * m.key_norm[t];
        m.read_q[t] = decay * m.query_norm[t];
    }
    if (p.k_out && v0 == 0 && w.head % p.group == 0)
        for (int i = threadIdx.x; i < w.rows * 16; i += 32 * NW)
            *(uint4 *)(p.k_out + (i64)(w.start + (i >> 4)) * p.ko_row + w.key_head * p.ko_head + 8 * (i & 15)) = *(const uint4 *)&m.k[i >> 4][8 * (i & 15)];
    // Long row blocks of keys beside short ones of queries, so that warps end together.
    for (int job = warp; job < 2 * (BT / 16); job += NW) {
        bool queries = job >= BT / 16;
        int block = queries ? 2 * (BT / 16) - 1 - job : job;
        if (16 * block < w.rows) gram(m, keys, w, block, queries, lane);
    }
    __syncthreads();
    if (w.fold) {
        s.fold(w, rows, keys, m.su[warp], carried, g, c);
        carried = 1.f;
    }
    for (int block = warp; block < BT / 16; block += NW)
        if (16 * block < w.rows) invert(m, w, block, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < BT * (BV / 8); i += 32 * NW) {
        int t = i / (BV / 8), piece = i % (BV / 8);
        bool live = t < w.rows;
        copy16(&m.values[t][8 * piece], p.v + (i64)(w.start + (live ? t : 0)) * p.v_row + w.head * p.v_head + v0 + 8 * piece, live);
    }
    float x[MT][NT][4], y[MT][NT][4];
    read_past(s, m, w, m.k, 0, m.su[warp], carried, x, lane);
    copies_done();
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        float2 beta = *(float2 *)&m.beta[8 * n + 2 * c], read = *(float2 *)&m.read_k[8 * n + 2 * c];
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            u32 v[2];
            u32 at = smem_at(&m.values[8 * n + (lane & 7)][column + 16 * t + 8 * ((lane >> 3) & 1)]);
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                x[t][n][2 * h] = beta.x * (lo_of(v[h]) - read.x * x[t][n][2 * h]);
                x[t][n][2 * h + 1] = beta.y * (hi_of(v[h]) - read.y * x[t][n][2 * h + 1]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) y[t][n][e] = 0.f;
        }
    }
    u64 bad = tainted(x, lane) | (u64)m.bad[0] | ((u64)m.bad[1] << 32);
    if (bad) mark(m, bad, true, x, lane);
    apply(x, m.inverse, y, w, lane);
    if (bad) mark(m, bad, false, y, lane);
#if U_F32
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            int t = 8 * n + 2 * c + e;
            if (t < w.rows)
#pragma unroll
                for (int k = 0; k < MT; ++k)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        ((float *)p.u_out)[(i64)(w.start + t) * p.uo_row + w.head * p.uo_head + v0 + column + 16 * k + 8 * h + g] = m.key_norm[t] * y[k][n][e + 2 * h];
        }
#else
    write_rows(m, w, y, m.key_norm, (u16 *)p.u_out + w.head * p.uo_head + v0 + column, p.uo_row, column, lane);
#endif
    read_past(s, m, w, m.q, BT, m.su[warp], carried, x, lane);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        float2 read = *(float2 *)&m.read_q[8 * n + 2 * c];
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            x[t][n][0] *= read.x;
            x[t][n][1] *= read.y;
            x[t][n][2] *= read.x;
            x[t][n][3] *= read.y;
        }
    }
    if (bad) mark(m, bad, true, y, lane);
    apply(y, m.scores, x, w, lane);
    if (bad) mark(m, bad, false, x, lane);
    write_rows(m, w, x, 0, p.o + w.head * p.o_head + v0 + column, p.o_row, column, lane);
}
#endif

__device__ __forceinline__ void zero_rows(const Params &p, const Work &w, int v0) {
    for (int i = threadIdx.x; i < w.rows * (BV / 8); i += 32 * NW)
        *(uint4 *)(p.o + (i64)(w.start + i / (BV / 8)) * p.o_row + w.head * p.o_head + v0 + 8 * (i % (BV / 8))) = make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(32 * NW, MIN_BLOCKS) gdn_step(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char memory[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Keys &keys = *(Keys *)memory;
    const Work w = work_of(p);
    const int v0 = BV * w.vb;
    if (!w.live) {
        zero_rows(p, w, v0);
        return;
    }
    const int mine = v0 + 16 * MT * warp;
    st *rows = (st *)p.state + w.slot * p.state_slot + w.head * p.state_head + (i64)mine * DIM;
    State s;
    s.load(rows, lane >> 2, lane & 3);
#if BT > 4
    if (w.rows > 4) {
        wide_step(p, w, s, rows, keys, *(Shared *)(memory + sizeof(Keys)), warp, lane, v0);
        return;
    }
#endif
    small_step(p, w, s, rows, keys, (float *)(memory + sizeof(Keys)) + warp * SMALL_FLOATS, lane, mine);
}
#define SMALL_BYTES (NW * SMALL_FLOATS * 4)
#if BT > 4
extern "C" __device__ const u32 shared_bytes = sizeof(Keys) + (sizeof(Shared) > SMALL_BYTES ? sizeof(Shared) : SMALL_BYTES);
#else
extern "C" __device__ const u32 shared_bytes = sizeof(Keys) + SMALL_BYTES;
#endif
