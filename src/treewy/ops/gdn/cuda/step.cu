// One step of the gated delta rule for K = V = 128: commit of the prior rows, then verify of the tree. No headers: NVRTC compiles it.
//
// A block owns BV = 16 MT NW rows of one head's state [V, K], a warp 16 MT of them: they are the M operand of its matrix
// products, rows of the tree the N operand. All rows come in as asynchronous copies of whole rows, two dependent loads after
// the start: what the block works on, then everything else. What depends on no state (grams, decays, the inverse) is
// computed while the state is in flight. A row's arithmetic does not depend on BT, MT or NW, nor on what else runs.
//
// The unknowns of the solve are w = u / |k|, what a record holds: with them every norm scales a row of the system, none a column.
//
// Macros: BT rows of the largest tree (4, 16, 32, 48, 64), NW warps, MT, STATE_F32, U_F32 (dtype of pseudo-values in records
// and histories), PARTS bfloat16 parts of an fp32 state, EXACT, PMAX prior rows (a multiple of 16).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define DIM 128
#define BV (16 * MT * NW)
#define VB (DIM / BV)
#define NT (BT / 8)
#define LDK 136           // halves of a row of 128 in shared memory: 16 bytes past a multiple of 128, for ldmatrix
#define LDA (BT + 4)
#define LDP (PMAX + 8)
#define CHUNKS (PMAX / 16)
#define QSCALE 0.08838834764831845f
#define MAX_FLOAT 3.402823466e38f

#if U_F32
typedef float ut;
#define LDU (BV + 4)
#else
typedef u16 ut;
#define LDU (BV + 8)
#endif
#if STATE_F32
typedef float st;
#define LDS 136           // 32 bytes past: 8-byte accesses of 4 rows meet in no bank
#define SPARTS PARTS
#else
typedef u16 st;
#define LDS 136
#define SPARTS 1
#endif
#if EXACT
#define XPARTS 3
#else
#define XPARTS 1
#endif
#define FPARTS (EXACT ? 3 : 2)  // of pseudo-values that are folded

struct Params {
    const u16 *q, *k, *v;
    const void *a, *b;
    const float *a_log, *dt_bias;
    void *state;
    const int *slots, *cu_rows, *ancestors;
    void *hist_u;
    u16 *hist_k;
    float *hist_high, *hist_low;
    const int *hist_len, *held;
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
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 smem_at(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}
// ---- asynchronous copies of whole rows; `bar` counts their bytes ----
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void bar_init(u64 *bar) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(smem_at(bar)) : "memory"); }
__device__ __forceinline__ void bar_expect(u64 *bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_at(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_wait(u64 *bar) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], 0;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(smem_at(bar)) : "memory");
}
__device__ __forceinline__ void copy_row(void *to, const void *from, u32 bytes, u64 *bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_at(to)), "l"(from), "r"(bytes), "r"(smem_at(bar)) : "memory");
}
__device__ __forceinline__ void store_row(void *to, const void *from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(smem_at(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void stores_read() {
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Between ordinary accesses of shared memory and copies that touch the same bytes.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
__device__ __forceinline__ void bar_init(u64 *) {}
__device__ __forceinline__ void bar_expect(u64 *, u32) {}
__device__ __forceinline__ void bar_wait(u64 *) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}
__device__ __forceinline__ void copy_row(void *to, const void *from, u32 bytes, u64 *) {
    for (u32 i = 0; i < bytes; i += 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_at(to) + i), "l"((const char *)from + i));
}
__device__ __forceinline__ void store_row(void *to, const void *from, u32 bytes) {
    for (u32 i = 0; i < bytes; i += 16) *(uint4 *)((char *)to + i) = *(const uint4 *)((const char *)from + i);
}
__device__ __forceinline__ void stores_read() {}
__device__ __forceinline__ void fence_copies() {}
#endif
__device__ __forceinline__ void load4(u32 (&x)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(smem_at(row)));
}
__device__ __forceinline__ void load4_turned(u32 (&x)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(smem_at(row)));
}
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
    u32 id = blockIdx.x;
    w.vb = id % VB;
    id /= VB;
    w.head = id % (u32)p.num_heads;
    w.seq = id / (u32)p.num_heads;
    w.slot = p.slots[w.seq];
    w.start = p.cu_rows[w.seq];
    int end = p.cu_rows[w.seq + 1];
    int held = p.held ? p.held[w.seq] : 0, path = p.path_len ? p.path_len[w.seq] : 0, fold = p.fold ? p.fold[w.seq] : 0;
    w.key_head = (u32)w.head / (u32)p.group;
    w.live = w.slot >= 0 && w.slot < p.num_slots;
    if (w.live && p.hist_len && !p.held) held = p.hist_len[w.slot];
    w.rows = min(end - w.start, BT);
    w.hist = w.live ? max(0, min(held, p.capacity)) : 0;
    w.path = w.live ? max(0, min(path, PMAX - w.hist)) : 0;
    w.prior = w.hist + w.path;
    w.fold = w.prior && (p.capacity == 0 || fold != 0 || w.prior > p.capacity);
    return w;
}

// ---- shared memory ----
struct __align__(16) Tile {
    st s[BV][LDS];
    u16 k[BT][LDK], q[BT][LDK];
    union {
        u16 prior_k[PMAX][LDK];
        float inverse[BT][LDA];     // (I + A)^-1, [row][ancestor]; prior keys are done with by then
    };
    ut prior_u[PMAX][LDU];
    u64 small_in, state_in, values_in;
};
// Sent out at once by all threads, each a row: what is small first.
__device__ __forceinline__ void request(const Params &p, const Work &w, Tile &m, u16 (*values)[BV + 8]) {
    const int tid = threadIdx.x, v0 = BV * w.vb;
    if (tid == 0) {
        bar_init(&m.small_in);
        bar_init(&m.state_in);
        bar_init(&m.values_in);
        fence_copies();
        bar_expect(&m.small_in, w.rows * 512 + (values ? w.rows * BV * 2 : 0) + w.prior * (256 + BV * (u32)sizeof(ut)));
        bar_expect(&m.state_in, BV * DIM * (u32)sizeof(st));
    }
    __syncthreads();
    for (int i = tid; i < w.prior; i += 32 * NW) {
        const u16 *k;
        const ut *u;
        if (i < w.hist) {
            k = p.hist_k + w.slot * p.hk_slot + i * p.hk_row + w.key_head * p.hk_head;
            u = (const ut *)p.hist_u + w.slot * p.hu_slot + i * p.hu_row + w.head * p.hu_head;
        } else {
            i64 row = p.path_rows[(i64)w.seq * p.path_stride + i - w.hist];
            k = p.rec_k + row * p.rk_row + w.key_head * p.rk_head;
            u = (const ut *)p.rec_u + row * p.ru_row + w.head * p.ru_head;
        }
        copy_row(m.prior_k[i], k, 256, &m.small_in);
        copy_row(m.prior_u[i], u + v0, BV * sizeof(ut), &m.small_in);
    }
    for (int t = tid; t < w.rows; t += 32 * NW) {
        i64 row = w.start + t;
        copy_row(m.k[t], p.k + row * p.k_row + w.key_head * p.k_head, 256, &m.small_in);
        copy_row(m.q[t], p.q + row * p.q_row + w.key_head * p.q_head, 256, &m.small_in);
        if (values) copy_row(values[t], p.v + row * p.v_row + w.head * p.v_head + v0, BV * 2, &m.small_in);
    }
    const st *state = (const st *)p.state + w.slot * p.state_slot + w.head * p.state_head + (i64)v0 * DIM;
    for (int r = tid; r < BV; r += 32 * NW) copy_row(m.s[r], state + r * DIM, DIM * sizeof(st), &m.state_in);
    // Rows that pad products: zeros, so that nothing left behind is ever multiplied.
    const int padded = BT > 4 ? ((w.rows + 15) & ~15) : 4, chunk = (w.prior + 15) & ~15;
    for (int i = tid; i < (padded - w.rows) * (LDK / 8); i += 32 * NW) {
        ((uint4 *)m.k[w.rows])[i] = make_uint4(0, 0, 0, 0);
        ((uint4 *)m.q[w.rows])[i] = make_uint4(0, 0, 0, 0);
    }
    for (int i = tid; i < (chunk - w.prior) * (LDK / 8); i += 32 * NW) ((uint4 *)m.prior_k[w.prior])[i] = make_uint4(0, 0, 0, 0);
    for (int i = tid; i < (chunk - w.prior) * (int)(LDU * sizeof(ut) / 16); i += 32 * NW) ((uint4 *)m.prior_u[w.prior])[i] = make_uint4(0, 0, 0, 0);
}

// ---- prior rows ----
struct Weights {
    float weight[(PMAX + 31) / 32];  // lane i: exp(G_last - G_i) of row i, i + 32; 0 past the rows
    float carried;                   // exp(G_last)
};
__device__ __forceinline__ double hist_decay(const Params &p, const Work &w, int i) {
    i64 at = w.slot * p.hg_slot + i * p.hg_row + w.head * p.hg_head;
    return (double)p.hist_high[at] + (double)p.hist_low[at];
}
// Every warp for itself; `writes` appends the decays of a path to a history that is kept.
__device__ __forceinline__ Weights prior_weights(const Params &p, const Work &w, int lane, bool writes) {
    Weights r;
    r.carried = 1.f;
    const int SETS = (PMAX + 31) / 32;
    double decay[SETS], last = 0.0;
#pragma unroll
    for (int j = 0; j < SETS; ++j) {
        int i = lane + 32 * j;
        decay[j] = 0.0;
        if (i >= w.prior) continue;
        if (i < w.hist) {
            decay[j] = hist_decay(p, w, i);
            continue;
        }
        i64 at = p.path_rows[(i64)w.seq * p.path_stride + i - w.hist] * p.rg_row + w.head * p.rg_head;
        decay[j] = (w.hist ? hist_decay(p, w, w.hist - 1) : 0.0) + (double)p.rec_high[at] + (double)p.rec_low[at];
        if (writes && !w.fold) {
            i64 to = w.slot * p.hg_slot + i * p.hg_row + w.head * p.hg_head;
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
    if (w.fold || !w.path) return;
    const int per_row = BV * sizeof(ut) / 16;
    for (int at = threadIdx.x; at < w.path * per_row; at += 32 * NW) {
        int i = w.hist + at / per_row, piece = at % per_row;
        ut *to = (ut *)p.hist_u + w.slot * p.hu_slot + i * p.hu_row + w.head * p.hu_head + BV * w.vb;
        ((uint4 *)to)[piece] = ((const uint4 *)m.prior_u[i])[piece];
    }
    if (w.vb || w.head % p.group) return;
    for (int at = threadIdx.x; at < w.path * 16; at += 32 * NW) {
        int i = w.hist + (at >> 4);
        u16 *to = p.hist_k + w.slot * p.hk_slot + i * p.hk_row + w.key_head * p.hk_head;
        ((uint4 *)to)[at & 15] = ((const uint4 *)m.prior_k[i])[at & 15];
    }
}

// ---- operands ----
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
#define UPARTS (U_F32 ? XPARTS : 1)

// S <- exp(G_last) S + sum of exp(G_last - G_i) u_i k_i^T for 16 rows of values, in float32, in shared memory and in the pool.
__device__ __forceinline__ void fold(const Params &p, const Work &w, Tile &m, const Weights &x, int row, int lane) {
    const int g = lane >> 2, c = lane & 3;
    u32 u[CHUNKS][4][FPARTS];
#pragma unroll
    for (int h = 0; h < CHUNKS; ++h) {
        if (16 * h >= w.prior) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // rows i = 2 c, 2 c + 1 of the chunk's halves
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
        float d[2][4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const st *at = &m.s[row + g + 8 * (e & 1)][16 * k + 2 * c + 8 * (e >> 1)];
#if STATE_F32
            float2 y = *(const float2 *)at;
#else
            u32 pair = *(const u32 *)at;
            float2 y = make_float2(lo_of(pair), hi_of(pair));
#endif
            d[e >> 1][2 * (e & 1)] = x.carried * y.x;
            d[e >> 1][2 * (e & 1) + 1] = x.carried * y.y;
        }
#pragma unroll
        for (int h = 0; h < CHUNKS; ++h) {
            if (16 * h >= w.prior) break;
            u32 b[4];
            load4_turned(b, &m.prior_k[16 * h + (lane & 15)][16 * k + 8 * (lane >> 4)]);
#pragma unroll
            for (int i = FPARTS - 1; i >= 0; --i) {
                mma(d[0], u[h][0][i], u[h][1][i], u[h][2][i], u[h][3][i], b[0], b[1]);
                mma(d[1], u[h][0][i], u[h][1][i], u[h][2][i], u[h][3][i], b[2], b[3]);
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            st *at = &m.s[row + g + 8 * (e & 1)][16 * k + 2 * c + 8 * (e >> 1)];
#if STATE_F32
            *(float2 *)at = make_float2(d[e >> 1][2 * (e & 1)], d[e >> 1][2 * (e & 1) + 1]);
#else
            *(u32 *)at = pack(d[e >> 1][2 * (e & 1)], d[e >> 1][2 * (e & 1) + 1]);
#endif
        }
    }
    fence_copies();
    __syncwarp();
    st *to = (st *)p.state + w.slot * p.state_slot + w.head * p.state_head + (i64)(BV * w.vb + row) * DIM;
    if (lane < 16) store_row(to + lane * DIM, m.s[row + lane], DIM * sizeof(st));
}

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
struct __align__(16) Small {
    float tt[NW][64];
    u16 values[4][BV + 8];
};
__device__ __forceinline__ void small_step(const Params &p, const Work &w, Tile &m, Small &z, int warp, int lane) {
    const int g = lane >> 2, c = lane & 3, first = 16 * MT * warp;
    float *tt = z.tt[warp];
    Gate gate = gate_of(p, w, lane & 3);
    u32 bits = (lane & 3) < w.rows ? (u32)ancestors_of(p, w.start + (lane & 3)) : 0u;
    Weights x;
    if (w.prior) x = prior_weights(p, w, lane, warp == 0 && w.vb == 0);
    bar_wait(&m.small_in);
    __syncthreads();  // the zeros, too
    append(p, w, m);

    // Rows 0-3 are keys, 4-7 queries; the same registers serve as either operand of a product.
    u32 kq[4][4];
    const u16 *mine = (lane & 4) ? m.q[lane & 3] : m.k[lane & 3];
#pragma unroll
    for (int kb = 0; kb < 4; ++kb) load4(kq[kb], mine + 32 * kb + 8 * (lane >> 3));
    float gram[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int kb = 0; kb < 4; ++kb)
#pragma unroll
        for (int h = 0; h < 2; ++h) mma(gram, kq[kb][2 * h], 0, kq[kb][2 * h + 1], 0, kq[kb][2 * h], kq[kb][2 * h + 1]);
    if (p.k_out && w.vb == 0 && w.head % p.group == 0)
        for (int i = threadIdx.x; i < w.rows * 16; i += 32 * NW)
            *(uint4 *)(p.k_out + (i64)(w.start + (i >> 4)) * p.ko_row + w.key_head * p.ko_head + 8 * (i & 15)) = *(const uint4 *)&m.k[i >> 4][8 * (i & 15)];

    // Lane 4 t + i of the first 16 finishes entry (t, i) of both T x T matrices.
    const int t = (lane >> 2) & 3, i = lane & 3;
    {
        float k0 = __shfl_sync(~0u, gram[0], 4 * t + (i >> 1)), k1 = __shfl_sync(~0u, gram[1], 4 * t + (i >> 1));
        float q0 = __shfl_sync(~0u, gram[0], 16 + 4 * t + (i >> 1)), q1 = __shfl_sync(~0u, gram[1], 16 + 4 * t + (i >> 1));
        float kk = i & 1 ? k1 : k0, qk = i & 1 ? q1 : q0;
        float n0 = __shfl_sync(~0u, gram[0], 4 * t + (t >> 1)), n1 = __shfl_sync(~0u, gram[1], 4 * t + (t >> 1));
        float key_norm = inverse_norm(t & 1 ? n1 : n0);
        n0 = __shfl_sync(~0u, gram[0], 16 + 4 * t + 2 + (t >> 1)), n1 = __shfl_sync(~0u, gram[1], 16 + 4 * t + 2 + (t >> 1));
        float query_norm = QSCALE * inverse_norm(t & 1 ? n1 : n0);
        float beta = __shfl_sync(~0u, gate.beta, t) * key_norm;
        u32 bits_t = __shfl_sync(~0u, bits, t), bits_i = bits;
        float segment = 0.f;
        double total = 0.0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float y = __shfl_sync(~0u, gate.g, j);
            if (bits_t >> j & 1) {
                total += (double)y;
                if (!(bits_i >> j & 1)) segment += y;
            }
        }
        bool above = bits_t >> i & 1;
        float ratio = above ? expf(segment) : 0.f;
        if (lane < 16) {
            tt[4 * t + i] = above && i != t ? beta * ratio * kk * key_norm : 0.f;
            tt[16 + 4 * t + i] = above ? ratio * qk * query_norm : 0.f;
            if (i == 0) {
                float decay = expf((float)total);
                tt[32 + t] = beta;
                tt[36 + t] = decay * key_norm;
                tt[40 + t] = decay * query_norm;
                if (warp == 0 && w.vb == 0 && p.high_out && t < w.rows) {
                    float high = (float)total;
                    p.high_out[(i64)(w.start + t) * p.go_row + w.head * p.go_head] = high;
                    p.low_out[(i64)(w.start + t) * p.go_row + w.head * p.go_head] = (float)(total - (double)high);
                }
            }
        }
    }
    bar_wait(&m.state_in);
    if (w.fold)
#pragma unroll
        for (int j = 0; j < MT; ++j) fold(p, w, m, x, first + 16 * j, lane);
    __syncwarp();
    float acc[MT][4];
#pragma unroll
    for (int j = 0; j < MT; ++j) {
        acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            u32 a[4][SPARTS];
            state_operand(m, first + 16 * j, k, a, lane);
#pragma unroll
            for (int s = SPARTS - 1; s >= 0; --s) mma(acc[j], a[0][s], a[1][s], a[2][s], a[3][s], kq[k / 2][2 * (k & 1)], kq[k / 2][2 * (k & 1) + 1]);
        }
    }
    if (w.prior && !w.fold) {
#pragma unroll
        for (int j = 0; j < MT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[j][e] *= x.carried;
#pragma unroll
        for (int h = 0; h < CHUNKS; ++h) {
            if (16 * h >= w.prior) break;
            u32 b[2][3];  // the weighted grams with prior keys, whose layout as a result is that of an operand
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
                for (int kb = 0; kb < 4; ++kb) {
                    u32 y[4];
                    load4(y, &m.prior_k[16 * h + 8 * r + (lane & 7)][32 * kb + 8 * (lane >> 3)]);
                    mma(d, kq[kb][0], 0, kq[kb][1], 0, y[0], y[1]);
                    mma(d, kq[kb][2], 0, kq[kb][3], 0, y[2], y[3]);
                }
                split<3>(d[0] * weight_of(x, 16 * h + 8 * r + 2 * c), d[1] * weight_of(x, 16 * h + 8 * r + 2 * c + 1), b[r]);
            }
#pragma unroll
            for (int j = 0; j < MT; ++j) {
                u32 a[4][3];
                prior_operand<3>(m, first + 16 * j, h, a, lane);
#pragma unroll
                for (int order = 2; order >= 0; --order)
#pragma unroll
                    for (int s = 0; s <= (U_F32 ? order : 0); ++s) mma(acc[j], a[0][s], a[1][s], a[2][s], a[3][s], b[0][order - s], b[1][order - s]);
            }
        }
    }
    // From here on a lane owns a value. The state's rows are done with, once they are stored.
    if (w.fold) stores_read();
    __syncwarp();
    float(*out)[8] = (float(*)[8])m.s[first];
#pragma unroll
    for (int j = 0; j < MT; ++j) {
        *(float2 *)&out[16 * j + g][2 * c] = make_float2(acc[j][0], acc[j][1]);
        *(float2 *)&out[16 * j + 8 + g][2 * c] = make_float2(acc[j][2], acc[j][3]);
    }
    __syncwarp();
    if (lane < 16 * MT) {
        float y[8], u[4];
        *(float4 *)y = *(float4 *)&out[lane][0];
        *(float4 *)(y + 4) = *(float4 *)&out[lane][4];
        const int v = first + lane;
        u16 *o = p.o + (i64)w.start * p.o_row + w.head * p.o_head + BV * w.vb + v;
        ut *to = (ut *)p.u_out + (i64)w.start * p.uo_row + w.head * p.uo_head + BV * w.vb + v;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            if (r >= w.rows) break;
            float s = tt[32 + r] * (widen(z.values[r][v]) - tt[36 + r] * y[r]);
#pragma unroll
            for (int j = 0; j < r; ++j) {
                float a = tt[4 * r + j];
                if (a != 0.f) s -= a * u[j];  // a row that is not finite must not reach rows that do not see it
            }
            u[r] = s;
            float q = tt[40 + r] * y[4 + r];
#pragma unroll
            for (int j = 0; j <= r; ++j) {
                float a = tt[16 + 4 * r + j];
                if (a != 0.f) q += a * u[j];
            }
            o[r * p.o_row] = narrow(q);
            put(to + r * p.uo_row, s);
        }
    }
}

#if BT > 4
// ---- up to BT rows: T x T matrices in shared memory, products on tensor cores ----
struct __align__(16) Shared {
    union {
        float system[BT][LDA];      // A transposed: [ancestor][row]
        u16 values[BT][BV + 8];     // v of all rows; then staging of u and o
    };
#if EXACT
    float scores[BT][LDA];
    float past[2 * BT][LDP];        // weighted k . k_i and q . k_i of prior rows i
#else
    u16 scores[BT][BT + 8];
    u16 past[2 * BT][LDP];
#endif
    float beta[BT], high[BT], low[BT], read_k[BT], read_q[BT];
    u64 bits[BT];
    u32 bad[2];
    double sums[64];
    int jump[64];
};
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
__device__ __forceinline__ void gram(const Tile &m, Shared &z, const Weights &x, const Work &w, int block, bool queries, int lane) {
    const int g = lane >> 2, c = lane & 3;
    const u16(*from)[LDK] = queries ? m.q : m.k;
    u32 a[8][4];
#pragma unroll
    for (int k = 0; k < 8; ++k) load4(a[k], &from[16 * block + (lane & 15)][16 * k + 8 * (lane >> 4)]);
    auto product = [&](const u16(*rows)[LDK], int n, float(&d)[4]) {
        d[0] = d[1] = d[2] = d[3] = 0.f;
#pragma unroll
        for (int kb = 0; kb < 4; ++kb) {
            u32 y[4];
            load4(y, &rows[n + (lane & 7)][32 * kb + 8 * (lane >> 3)]);
            mma(d, a[2 * kb][0], a[2 * kb][1], a[2 * kb][2], a[2 * kb][3], y[0], y[1]);
            mma(d, a[2 * kb + 1][0], a[2 * kb + 1][1], a[2 * kb + 1][2], a[2 * kb + 1][3], y[2], y[3]);
        }
    };
    // Squared norms stand on the diagonal of the rows' own gram.
    float d[4], scale[2];
    u64 bits[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        product(from, 16 * block + 8 * h, d);
        float y = __shfl_sync(~0u, d[2 * h], 4 * g + (g >> 1)), z1 = __shfl_sync(~0u, d[2 * h + 1], 4 * g + (g >> 1));
        float norm = inverse_norm(g & 1 ? z1 : y);
        int t = 16 * block + 8 * h + g;
        float decay = expf(z.high[t] + z.low[t]);
        bits[h] = z.bits[t];
        scale[h] = queries ? QSCALE * norm : z.beta[t] * norm * norm;
        if (c == 0) {
            if (queries) {
                z.read_q[t] = decay * scale[h];
            } else {
                z.read_k[t] = decay * norm;
            }
        }
        if (!queries) {
            float b = z.beta[t] * norm;
            __syncwarp();
            if (c == 0) z.beta[t] = b;
        }
    }
#pragma unroll 1
    for (int tile = 0; tile < 2 * block + 2; ++tile) {
        product(m.k, 8 * tile, d);
        const int i = 8 * tile + 2 * c;
        float2 high = *(float2 *)&z.high[i], low = *(float2 *)&z.low[i];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int t = 16 * block + 8 * h + g;
            float y[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                bool above = (bits[h] >> (i + e) & 1) && (queries || i + e != t);
                float diff = (z.high[t] - (e ? high.y : high.x)) + (z.low[t] - (e ? low.y : low.x));
                y[e] = above ? expf(diff) * d[2 * h + e] * scale[h] : 0.f;
            }
            if (queries) {
#if EXACT
                *(float2 *)&z.scores[t][i] = make_float2(y[0], y[1]);
#else
                *(u32 *)&z.scores[t][i] = pack(y[0], y[1]);
#endif
            } else {
                // A row whose system is not finite is taken out of it, and gets NaN at the end.
                if (!finite(y[0] + y[1])) {
                    atomicOr(&z.bad[t >> 5], 1u << (t & 31));
                    y[0] = y[1] = 0.f;
                }
                z.system[i][t] = y[0];
                z.system[i + 1][t] = y[1];
            }
        }
    }
    if (!w.prior || w.fold) return;
#pragma unroll 1
    for (int i0 = 0; i0 < ((w.prior + 15) & ~15); i0 += 8) {
        product(m.prior_k, i0, d);
        float w0 = weight_of(x, i0 + 2 * c), w1 = weight_of(x, i0 + 2 * c + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int r = (queries ? BT : 0) + 16 * block + 8 * h + g;
#if EXACT
            *(float2 *)&z.past[r][i0 + 2 * c] = make_float2(w0 * d[2 * h], w1 * d[2 * h + 1]);
#else
            *(u32 *)&z.past[r][i0 + 2 * c] = pack(w0 * d[2 * h], w1 * d[2 * h + 1]);
#endif
        }
    }
}
// Columns 16 block .. + 15 of (I + A)^-1 by forward substitution in float32, 16 rows at a time; one warp, a lane per
// column and half of each sum.
__device__ __forceinline__ void invert(Tile &m, const Shared &z, const Work &w, int block, int lane) {
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
                    float4 a = *(const float4 *)&z.system[row][16 * r + i];
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
            for (int i = (k + 1) & ~3; i < 16; i += 4) *(float4 *)(a + i) = *(const float4 *)&z.system[16 * r + k][16 * r + i];
#pragma unroll
            for (int i = k + 1; i < 16; ++i) x[i] -= a[i] * x[k];
        }
        if (half == 0)
#pragma unroll
            for (int i = 0; i < 16; ++i) m.inverse[16 * r + i][column] = x[i];
        __syncwarp();
    }
}
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
__device__ __forceinline__ void read_past(const Tile &m, const Shared &z, const Work &w, const u16 (*rows)[LDK], int offset, float carried, int first, float (&acc)[MT][NT][4], int lane) {
    const int c = lane & 3, g = lane >> 2;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int t = 0; t < MT; ++t) acc[t][n][0] = acc[t][n][1] = acc[t][n][2] = acc[t][n][3] = 0.f;
#pragma unroll 1
    for (int kb = 0; kb < 4; ++kb) {
        u32 a[2][MT][4][SPARTS];
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int t = 0; t < MT; ++t) state_operand(m, first + 16 * t, 2 * kb + s, a[s][t], lane);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            if (8 * n >= w.rows) break;
            u32 y[4];
            load4(y, &rows[8 * n + (lane & 7)][32 * kb + 8 * (lane >> 3)]);
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
                for (int i = SPARTS - 1; i >= 0; --i)
#pragma unroll
                    for (int t = 0; t < MT; ++t) mma(acc[t][n], a[s][t][0][i], a[s][t][1][i], a[s][t][2][i], a[s][t][3][i], y[2 * s], y[2 * s + 1]);
        }
    }
    if (!w.prior || w.fold) return;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[t][n][e] *= carried;
#pragma unroll 1
    for (int h = 0; 16 * h < w.prior; ++h) {
        u32 a[MT][4][XPARTS];
#pragma unroll
        for (int t = 0; t < MT; ++t) prior_operand<XPARTS>(m, first + 16 * t, h, a[t], lane);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            if (8 * n >= w.rows) break;
            u32 b[2][XPARTS];
            row_parts(&z.past[offset + 8 * n + g][16 * h + 2 * c], b);
#pragma unroll
            for (int t = 0; t < MT; ++t) mma_parts(acc[t][n], a[t], b);
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
__device__ __forceinline__ void mark(const Shared &z, u64 bad, bool clear, float (&x)[MT][NT][4], int lane) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (z.bits[8 * n + 2 * (lane & 3) + e] & bad)
#pragma unroll
                for (int t = 0; t < MT; ++t) x[t][n][e] = x[t][n][e + 2] = clear ? 0.f : __uint_as_float(0x7fc00000u);
}
// Write [v, t] accumulators as bfloat16 rows t through this warp's columns of the staging area.
__device__ __forceinline__ void write_rows(Shared &z, const Work &w, const float (&x)[MT][NT][4], u16 *to, i64 row_stride, int first, int lane) {
    const int g = lane >> 2, c = lane & 3;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        if (8 * n >= w.rows) break;
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 pair = pack(x[t][n][2 * h], x[t][n][2 * h + 1]), turned;
                // Lane (g, c) gets row 8 n + g, columns 2 c and 2 c + 1 of the tile.
                asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
                *(u32 *)&z.values[8 * n + g][first + 16 * t + 8 * h + 2 * c] = turned;
            }
    }
    __syncwarp();
    const int per_row = 2 * MT, step = 32 / per_row;  // 16-byte pieces
    const int piece = lane % per_row;
    const u16 *from = &z.values[lane / per_row][first + 8 * piece];
    u16 *at = to + (i64)(w.start + lane / per_row) * row_stride + 8 * piece;
    for (int t = lane / per_row; t < w.rows; t += step, from += step * (BV + 8), at += step * row_stride) *(uint4 *)at = *(const uint4 *)from;
}
__device__ __forceinline__ void wide_step(const Params &p, const Work &w, Tile &m, Shared &z, int warp, int lane) {
    const int g = lane >> 2, c = lane & 3, first = 16 * MT * warp, v0 = BV * w.vb;
    if (threadIdx.x < 2) z.bad[threadIdx.x] = 0;
    Weights x;
    x.carried = 1.f;
    if (w.prior) x = prior_weights(p, w, lane, warp == 0 && w.vb == 0);
    if (warp == NW - 1) path_sums(z, p, w, lane);
    bar_wait(&m.small_in);
    __syncthreads();
    append(p, w, m);
    if (p.k_out && w.vb == 0 && w.head % p.group == 0)
        for (int i = threadIdx.x; i < w.rows * 16; i += 32 * NW)
            *(uint4 *)(p.k_out + (i64)(w.start + (i >> 4)) * p.ko_row + w.key_head * p.ko_head + 8 * (i & 15)) = *(const uint4 *)&m.k[i >> 4][8 * (i & 15)];
    // Long row blocks of keys beside short ones of queries, so that warps end together.
#pragma unroll 1
    for (int job = warp; job < 2 * (BT / 16); job += NW) {
        bool queries = job >= BT / 16;
        int block = queries ? 2 * (BT / 16) - 1 - job : job;
        if (16 * block < w.rows) gram(m, z, x, w, block, queries, lane);
    }
    __syncthreads();
    if (w.fold) {
        bar_wait(&m.state_in);
#pragma unroll 1
        for (int t = 0; t < MT; ++t) fold(p, w, m, x, first + 16 * t, lane);
        __syncthreads();
    }
#pragma unroll 1
    for (int block = warp; block < BT / 16; block += NW)
        if (16 * block < w.rows) invert(m, z, w, block, lane);
    if (!w.fold) bar_wait(&m.state_in);
    fence_copies();
    __syncthreads();
    // The system's place is free for the values.
    if (threadIdx.x == 0) bar_expect(&m.values_in, w.rows * BV * 2);
    for (int t = threadIdx.x; t < w.rows; t += 32 * NW) copy_row(z.values[t], p.v + (i64)(w.start + t) * p.v_row + w.head * p.v_head + v0, BV * 2, &m.values_in);
    for (int i = threadIdx.x; i < (((w.rows + 15) & ~15) - w.rows) * ((BV + 8) / 8); i += 32 * NW) ((uint4 *)z.values[w.rows])[i] = make_uint4(0, 0, 0, 0);
    float r[MT][NT][4], y[MT][NT][4];
    read_past(m, z, w, m.k, 0, x.carried, first, r, lane);
    bar_wait(&m.values_in);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        if (8 * n < w.rows) {
            float2 beta = *(float2 *)&z.beta[8 * n + 2 * c], read = *(float2 *)&z.read_k[8 * n + 2 * c];
#pragma unroll
            for (int t = 0; t < MT; ++t) {
                u32 v[2];
                u32 at = smem_at(&z.values[8 * n + (lane & 7)][first + 16 * t + 8 * ((lane >> 3) & 1)]);
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at));
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    r[t][n][2 * h] = beta.x * (lo_of(v[h]) - read.x * r[t][n][2 * h]);
                    r[t][n][2 * h + 1] = beta.y * (hi_of(v[h]) - read.y * r[t][n][2 * h + 1]);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < MT; ++t) y[t][n][0] = y[t][n][1] = y[t][n][2] = y[t][n][3] = 0.f;
    }
    u64 bad = tainted(r, lane) | (u64)z.bad[0] | ((u64)z.bad[1] << 32);
    if (bad) mark(z, bad, true, r, lane);
    apply(r, m.inverse, y, w, lane);
    if (bad) mark(z, bad, false, y, lane);
#if U_F32
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            int t = 8 * n + 2 * c + e;
            if (t >= w.rows) continue;
            float *to = (float *)p.u_out + (i64)(w.start + t) * p.uo_row + w.head * p.uo_head + v0 + first + g;
#pragma unroll
            for (int k = 0; k < MT; ++k)
#pragma unroll
                for (int h = 0; h < 2; ++h) to[16 * k + 8 * h] = y[k][n][e + 2 * h];
        }
#else
    write_rows(z, w, y, (u16 *)p.u_out + w.head * p.uo_head + v0 + first, p.uo_row, first, lane);
#endif
    read_past(m, z, w, m.q, BT, x.carried, first, r, lane);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        float2 read = *(float2 *)&z.read_q[8 * n + 2 * c];
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            r[t][n][0] *= read.x;
            r[t][n][1] *= read.y;
            r[t][n][2] *= read.x;
            r[t][n][3] *= read.y;
        }
    }
    if (bad) mark(z, bad, true, y, lane);
    apply(y, z.scores, r, w, lane);
    if (bad) mark(z, bad, false, r, lane);
    write_rows(z, w, r, p.o + w.head * p.o_head + v0 + first, p.o_row, first, lane);
    if (w.fold) stores_read();
}
#endif

__device__ __forceinline__ void zero_rows(const Params &p, const Work &w) {
    for (int i = threadIdx.x; i < w.rows * (BV / 8); i += 32 * NW)
        *(uint4 *)(p.o + (i64)(w.start + i / (BV / 8)) * p.o_row + w.head * p.o_head + BV * w.vb + 8 * (i % (BV / 8))) = make_uint4(0, 0, 0, 0);
}

union Rest {
    Small small;
#if BT > 4
    Shared wide;
#endif
};
extern "C" __device__ const u32 shared_bytes = sizeof(Tile) + sizeof(Rest);

extern "C" __global__ void __launch_bounds__(32 * NW, MIN_BLOCKS) gdn_step(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char memory[];
    Tile &tile = *(Tile *)memory;
    Rest &rest = *(Rest *)(memory + sizeof(Tile));
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Work w = work_of(p);
    if (!w.live) {
        zero_rows(p, w);
        return;
    }
#if BT > 4
    if (w.rows > 4) {
        request(p, w, tile, 0);
        wide_step(p, w, tile, rest.wide, warp, lane);
        return;
    }
#endif
    request(p, w, tile, rest.small.values);
    small_step(p, w, tile, rest.small, warp, lane);
}
