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
#define LDP (PMAX + 8)
#define CHUNKS (PMAX / 16)
#define BLOCKS (BT / 16)  // of 16 rows
#define TRIANGLE (BLOCKS * (BLOCKS + 1) / 2)
#define LDA 20            // of a block of 16 x 16 in float32
#define EARLY_VALUES (BT <= 32 && !LEAN)
#define EARLY_STATE (BT <= 32 || !LEAN)
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
#define FPARTS (STATE_F32 ? 3 : 2)  // of pseudo-values that are folded

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
    int num_seqs, num_rows, group, num_slots, words, path_stride, capacity, gates_f32, group_inverse, path_width, max_rows, num_record_rows;
    float beta_scale;
};

// ---- instructions: whoever runs this elsewhere brings their own ----
#ifndef TREEWY_EMULATED
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
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma8(float (&d)[4], u32 a0, u32 a1, u32 b0) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b0));
}
__device__ __forceinline__ u32 smem_at(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}
// ---- asynchronous copies, 16 bytes per thread ----
__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copies_sent() { asm volatile("cp.async.commit_group;"); }
template <int LEFT> __device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
// Loads that must be on their way before the copies, which would delay them.
__device__ __forceinline__ float early(const float *p) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(p));
    return x;
}
__device__ __forceinline__ u32 early(const u32 *p) {
    u32 x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
__device__ __forceinline__ u32 early(const u16 *p) {
    u32 x;
    asm volatile("ld.global.u16 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
__device__ __forceinline__ uint4 early(const uint4 *p) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Bring `bytes` of memory, a multiple of 16, into the L2.
__device__ __forceinline__ void prefetch(const void *from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void load4(u32 (&x)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(smem_at(row)));
}
__device__ __forceinline__ void load4_turned(u32 (&x)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(smem_at(row)));
}
// Store four 8 x 8 tiles transposed: lane (g, c) gives columns 2 c and 2 c + 1 of row g; lane i points to row i % 8 of tile i / 8.
__device__ __forceinline__ void store4_turned(void *row, const u32 (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem_at(row)), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
#else
    const u32 lane = threadIdx.x & 31, address = smem_at(row);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 turned;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(x[i]));
        const u32 at = __shfl_sync(~0u, address, 8 * i + (lane >> 2)) + 4 * (lane & 3);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(turned) : "memory");
    }
#endif
}
#endif

// ---- small tools ----
__device__ __forceinline__ float lo_of(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float hi_of(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float widen(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ void put(float *p, float x) { *p = x; }
__device__ __forceinline__ void put(u16 *p, float x) { *p = narrow(x); }
__device__ __forceinline__ bool finite(float x) { return fabsf(x) <= MAX_FLOAT; }
// As it is stored: to convert it would be to wait for it.
__device__ __forceinline__ u32 read_gate(const void *p, i64 at, int f32) {
    return f32 ? early((const u32 *)p + at) : early((const u16 *)p + at);
}
__device__ __forceinline__ float gate_value(u32 x, int f32) { return __uint_as_float(f32 ? x : x << 16); }
__device__ __forceinline__ u64 ancestors_of(const Params &p, int row) {
    const u32 *w = (const u32 *)p.ancestors + (i64)row * p.words;
    u64 bits = early(w);
    if (BT > 32 && p.words > 1) bits |= (u64)early(w + 1) << 32;
    return bits;
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
    int seq, head, vb, slot, start, rows, end, hist, path, prior, fold, key_head;
    bool live, first_of_group;
};
__device__ __forceinline__ Work work_of(const Params &p) {
    Work w;
    w.seq = blockIdx.y;
    w.vb = blockIdx.x % VB;
    w.head = blockIdx.x / VB;
    w.slot = p.slots[w.seq];
    w.start = p.cu_rows[w.seq];
    int end = p.cu_rows[w.seq + 1];
    int held = p.held ? p.held[w.seq] : 0, path = p.path_len ? p.path_len[w.seq] : 0, fold = p.fold ? p.fold[w.seq] : 0;
    w.key_head = ((u32)w.head * (u32)p.group_inverse) >> 16;
    w.first_of_group = w.head == w.key_head * p.group;
    w.live = w.slot >= 0 && w.slot < p.num_slots;
    if (w.live && p.hist_len && !p.held) held = p.hist_len[w.slot];
    w.end = end;
    w.rows = max(0, min(end - w.start, min(BT, p.max_rows)));
    w.hist = w.live ? max(0, min(held, p.capacity)) : 0;
    w.path = w.live ? max(0, min(min(path, p.path_width), PMAX - w.hist)) : 0;
    w.prior = w.hist + w.path;
    w.fold = w.prior && (p.capacity == 0 || fold != 0);
    return w;
}

// Row of the record that path row i of the prior rows is, kept within the record whatever the table says.
__device__ __forceinline__ i64 record_row(const Params &p, const Work &w, int i) {
    return max(0, min(p.path_rows[(i64)w.seq * p.path_stride + i - w.hist], p.num_record_rows - 1));
}

// ---- shared memory ----
struct __align__(16) Tile {
#if EARLY_STATE
    st s[BV][LDS];
#else
    union {
        st s[BV][LDS];
        float system[TRIANGLE][16][LDA];
    };
#endif
    u16 k[BT][LDK], q[BT][LDK];
    u16 prior_k[PMAX][LDK];
    ut prior_u[PMAX][LDU];
};
// One group of copies: everything but the state. Rows that pad products to `padded` become zeros,
// so that nothing left behind is ever multiplied; so do those of `values`, where they are not null.
__device__ __forceinline__ void request(const Params &p, const Work &w, Tile &m, u16 (*values)[BV + 8], int padded) {
    const int tid = threadIdx.x, v0 = BV * w.vb;
    {
        const int first = tid >> 4, piece = 8 * (tid & 15), step = 2 * NW;
        const u16 *k = p.k + (w.start + first) * p.k_row + w.key_head * p.k_head + piece, *q = p.q + (w.start + first) * p.q_row + w.key_head * p.q_head + piece;
        const i64 k_step = step * p.k_row, q_step = step * p.q_row;
        u32 to_k = smem_at(&m.k[0][0]) + 2 * (first * LDK + piece), to_q = to_k + (u32)sizeof(m.k);
        for (int t = first; t < w.rows; t += step) {
            copy16(to_k, k);
            copy16(to_q, q);
            k += k_step, q += q_step, to_k += 2 * step * LDK, to_q += 2 * step * LDK;
        }
    }
    if (values) {
        const int first = tid / (BV / 8), piece = 8 * (tid % (BV / 8)), step = 32 * NW / (BV / 8);
        const u16 *v = p.v + (w.start + first) * p.v_row + w.head * p.v_head + v0 + piece;
        const i64 v_step = step * p.v_row;
        u32 to = smem_at(&values[0][0]) + 2 * (first * (BV + 8) + piece);
        for (int t = first; t < w.rows; t += step, v += v_step, to += 2 * step * (BV + 8)) copy16(to, v);
    }
    const int per_row = BV * sizeof(ut) / 16, chunk = padded == 4 ? (w.prior + 7) & ~7 : (w.prior + 15) & ~15;
    // Chunks are filled up with the newest row, whose weight is 0 there.
    for (int i = tid >> 4; i < chunk; i += 2 * NW) {
        const u16 *from;
        const ut *u;
        const int row_of = min(i, w.prior - 1);
        if (row_of < w.hist) {
            from = p.hist_k + w.slot * p.hk_slot + row_of * p.hk_row + w.key_head * p.hk_head;
            u = (const ut *)p.hist_u + w.slot * p.hu_slot + row_of * p.hu_row + w.head * p.hu_head;
        } else {
            i64 row = record_row(p, w, row_of);
            from = p.rec_k + row * p.rk_row + w.key_head * p.rk_head;
            u = (const ut *)p.rec_u + row * p.ru_row + w.head * p.ru_head;
        }
        copy16(smem_at(&m.prior_k[i][8 * (tid & 15)]), from + 8 * (tid & 15));
#pragma unroll
        for (int j = 0; j < (per_row + 15) / 16; ++j)
            if (16 * j + (tid & 15) < per_row) copy16(smem_at((uint4 *)m.prior_u[i] + 16 * j + (tid & 15)), (const uint4 *)(u + v0) + 16 * j + (tid & 15));
    }
    copies_sent();
    for (int i = tid; i < (padded - w.rows) * (LDK / 8); i += 32 * NW) {
        ((uint4 *)m.k[w.rows])[i] = make_uint4(0, 0, 0, 0);
        ((uint4 *)m.q[w.rows])[i] = make_uint4(0, 0, 0, 0);
    }
    if (values)
        for (int i = tid; i < (padded - w.rows) * ((BV + 8) / 8); i += 32 * NW) ((uint4 *)values[w.rows])[i] = make_uint4(0, 0, 0, 0);
}
// The warp's own rows of the state.
__device__ __forceinline__ void request_state(const Params &p, const Work &w, Tile &m, int warp, int lane) {
    const int pieces = DIM * sizeof(st) / 16, rows = 32 / pieces ? 32 / pieces : 1;  // of one row; rows at a time
    const int first = 16 * MT * warp + (rows > 1 ? lane / pieces : 0), piece = lane % pieces;
    const char *state = (const char *)((const st *)p.state + w.slot * p.state_slot + w.head * p.state_head + (i64)(BV * w.vb + first) * DIM) + 16 * piece;
    u32 to = smem_at(&m.s[first]) + 16 * piece;
#pragma unroll
    for (int r = 0; r < 16 * MT; r += rows) copy16(to + r * LDS * (u32)sizeof(st), state + r * DIM * sizeof(st));
    copies_sent();
}
// Copy the rows' keys into the record, where they are not what it holds already.
__device__ __forceinline__ void copy_keys(const Params &p, const Work &w, const Tile &m) {
    if (!p.k_out || w.vb || !w.first_of_group) return;
    for (int i = threadIdx.x; i < w.rows * 16; i += 32 * NW)
        *(uint4 *)(p.k_out + (i64)(w.start + (i >> 4)) * p.ko_row + w.key_head * p.ko_head + 8 * (i & 15)) = *(const uint4 *)&m.k[i >> 4][8 * (i & 15)];
}

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
    const i64 hist = w.slot * p.hg_slot + w.head * p.hg_head;
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
    if (!w.path || !appends(p, w)) return;
    const int per_row = BV * sizeof(ut) / 16;
    for (int at = threadIdx.x; at < w.path * per_row; at += 32 * NW) {
        int i = w.hist + at / per_row, piece = at % per_row;
        ut *to = (ut *)p.hist_u + w.slot * p.hu_slot + i * p.hu_row + w.head * p.hu_head + BV * w.vb;
        ((uint4 *)to)[piece] = ((const uint4 *)m.prior_u[i])[piece];
    }
    if (w.vb || !w.first_of_group) return;
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

struct Gate {
    float g, beta;
};
struct GateInputs {
    u32 a, b;
    float a_log, dt_bias;
};
__device__ __forceinline__ GateInputs gate_inputs(const Params &p, const Work &w, int t) {
    GateInputs x = {0, 0, 0.f, 0.f};
    if (t >= w.rows) return x;
    x.a = read_gate(p.a, (w.start + t) * p.a_row + w.head, p.gates_f32);
    x.b = read_gate(p.b, (w.start + t) * p.b_row + w.head, p.gates_f32);
    x.a_log = early(p.a_log + w.head);
    x.dt_bias = early(p.dt_bias + w.head);
    return x;
}
__device__ __forceinline__ Gate gate_of(const Params &p, const Work &w, const GateInputs &x, int t) {
    Gate r = {0.f, 0.f};
    if (t >= w.rows) return r;
    float a = gate_value(x.a, p.gates_f32) + x.dt_bias;
    r.g = -expf(x.a_log) * (a > 20.f ? a : log1pf(expf(a)));
    r.beta = p.beta_scale / (1.f + expf(-gate_value(x.b, p.gates_f32)));
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
    GateInputs inputs = gate_inputs(p, w, lane & 3);
    u32 bits = (lane & 3) < w.rows ? (u32)ancestors_of(p, w.start + (lane & 3)) : 0u;
    Decays decays;
    if (w.prior) decays = prior_decays(p, w, lane);
    request(p, w, m, z.values, 4);
    request_state(p, w, m, warp, lane);
    Gate gate = gate_of(p, w, inputs, lane & 3);
    Weights x;
    if (w.prior) x = prior_weights(p, w, decays, lane, warp == 0 && w.vb == 0);
    copies_done<1>();
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
    copy_keys(p, w, m);

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
                tt[44 + t] = bits_t ? 1.f : 0.f;
                if (warp == 0 && w.vb == 0 && p.high_out && t < w.rows) {
                    float high = (float)total;
                    p.high_out[(i64)(w.start + t) * p.go_row + w.head * p.go_head] = high;
                    p.low_out[(i64)(w.start + t) * p.go_row + w.head * p.go_head] = (float)(total - (double)high);
                }
            }
        }
    }
    // The weighted grams with prior keys; their layout as a result is that of an operand.
    u32 past[CHUNKS][2][3];
#pragma unroll
    for (int h = 0; h < CHUNKS; ++h) {
        if (16 * h >= w.prior || w.fold) break;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (16 * h + 8 * r >= w.prior) break;
            float d[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
            for (int kb = 0; kb < 4; ++kb) {
                u32 y[4];
                load4(y, &m.prior_k[16 * h + 8 * r + (lane & 7)][32 * kb + 8 * (lane >> 3)]);
                mma(d[0], kq[kb][0], 0, kq[kb][1], 0, y[0], y[1]);
                mma(d[1], kq[kb][2], 0, kq[kb][3], 0, y[2], y[3]);
            }
            const int i = 16 * h + 8 * r + 2 * c;
            split<3>((d[0][0] + d[1][0]) * weight_of(x, i), (d[0][1] + d[1][1]) * weight_of(x, i + 1), past[h][r]);
        }
    }
    copies_done<0>();
    __syncwarp();
    if (w.fold)
#pragma unroll
        for (int j = 0; j < MT; ++j) fold(p, w, m, x, first + 16 * j, lane);
    __syncwarp();
    float acc[MT][4];
#pragma unroll
    for (int j = 0; j < MT; ++j) {
        float other[4] = {0.f, 0.f, 0.f, 0.f};
        acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 a[4][SPARTS], b[4][SPARTS];
            state_operand(m, first + 16 * j, 2 * k, a, lane);
            state_operand(m, first + 16 * j, 2 * k + 1, b, lane);
#pragma unroll
            for (int i = SPARTS - 1; i >= 0; --i) {
                mma(acc[j], a[0][i], a[1][i], a[2][i], a[3][i], kq[k][0], kq[k][1]);
                mma(other, b[0][i], b[1][i], b[2][i], b[3][i], kq[k][2], kq[k][3]);
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[j][e] += other[e];
    }
    if (w.prior && !w.fold) {
#pragma unroll
        for (int j = 0; j < MT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[j][e] *= x.carried;
#pragma unroll
        for (int h = 0; h < CHUNKS; ++h) {
            if (16 * h >= w.prior) break;
#pragma unroll
            for (int j = 0; j < MT; ++j) {
                u32 a[4][3];
                prior_operand<3>(m, first + 16 * j, h, a, lane);
#pragma unroll
                for (int order = 2; order >= 0; --order)
#pragma unroll
                    for (int i = 0; i <= (U_F32 ? order : 0); ++i) {
                        if (16 * h + 8 < w.prior)
                            mma(acc[j], a[0][i], a[1][i], a[2][i], a[3][i], past[h][0][order - i], past[h][1][order - i]);
                        else
                            mma8(acc[j], a[0][i], a[1][i], past[h][0][order - i]);
                    }
            }
        }
    }
    // From here on a lane owns a value. The state's rows are done with.
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
            if (tt[44 + r] == 0.f) s = 0.f;  // a row that is no part of the tree
            u[r] = s;
            float q = tt[40 + r] * y[4 + r];
#pragma unroll
            for (int j = 0; j <= r; ++j) {
                float a = tt[16 + 4 * r + j];
                if (a != 0.f) q += a * u[j];
            }
            o[r * p.o_row] = narrow(tt[44 + r] == 0.f ? 0.f : q);
            put(to + r * p.uo_row, s);
        }
    }
}

#if BT > 4
// ---- up to BT rows: T x T matrices in shared memory, products on tensor cores ----
// Blocks of 16 x 16 rows: only those that hold an ancestor are computed, written and read.
#define SETS ((BT + 31) / 32)  // rows of a lane
static_assert(NW >= SETS, "a warp per 32 rows");
#if EXACT
typedef float mt;
#define LDM 20
#else
typedef u16 mt;
#define LDM 24
#endif
// Where they fit beside everything else, values are on their way from the start; else they take the place of the keys.
#define VALUE_PIECES ((BT * BV / 8 + 32 * NW - 1) / (32 * NW))
struct __align__(16) Shared {
#if EARLY_STATE
    float system[TRIANGLE][16][LDA];  // A, [row][ancestor]; on the diagonal, the inverses of I + A's blocks
#endif
    mt inverse[TRIANGLE][16][LDM];    // (I + A)^-1, blocks transposed: [ancestor][row]
    mt scores[TRIANGLE][16][LDM];     // [row][ancestor]
#if EARLY_VALUES
    u16 values[BT][BV + 8];
#endif
    mt past[2 * BT][LDP];             // weighted k . k_i and q . k_i of prior rows i
    float weights[32 * ((PMAX + 31) / 32)];
    float beta[BT], read_k[BT], read_q[BT], write[BT];
    float high[BT], low[BT];          // log decays from the root, in powers of 2
    u32 bits[2][BT];
    u32 bad[2], inert[2], next;       // next: the first job that nobody does yet
    u32 live;                         // bit 4 r + b: rows of block r have ancestors in block b, themselves left out
    float carried;
};
// Where block b of the blocks of 16 rows r lies.
__device__ __forceinline__ int block_at(int r, int b) { return r * (r + 1) / 2 + b; }
// Row lane + 32 j of the tables; one warp.
__device__ __forceinline__ void put_gates(Shared &z, const Params &p, const Work &w, int j, const GateInputs &inputs, u64 word, int lane) {
    const int t = lane + 32 * j;
    const Gate x = gate_of(p, w, inputs, t);
    const u32 idle = __ballot_sync(~0u, t < w.rows && !word);
    if (lane == 0) z.inert[j] = idle;
    if (t >= BT) return;
    z.beta[t] = x.beta;
    z.high[t] = x.g;
    z.bits[0][t] = (u32)word;
    z.bits[1][t] = (u32)(word >> 32);
}
// Log decays over root paths by pointer jumping, in double; one warp.
__device__ __forceinline__ void path_sums(Shared &z, const Params &p, const Work &w, int lane) {
    double sum[SETS];
    int jump[SETS];
#pragma unroll
    for (int j = 0; j < SETS; ++j) {
        const int t = lane + 32 * j;
        const u64 above = t < BT ? (z.bits[0][t] | (u64)z.bits[1][t] << 32) & ~(1ull << t) : 0ull;
        sum[j] = t < BT ? (double)z.high[t] : 0.0;
        jump[j] = above ? 63 - __clzll((i64)above) : -1;  // the nearest ancestor is the newest row
    }
    for (;;) {
        bool more = jump[0] >= 0;
        if (SETS > 1) more |= jump[SETS - 1] >= 0;
        if (!__any_sync(~0u, more)) break;
        double add[SETS];
        int next[SETS];
#pragma unroll
        for (int j = 0; j < SETS; ++j) {
            add[j] = __shfl_sync(~0u, sum[0], jump[j] & 31);
            next[j] = __shfl_sync(~0u, jump[0], jump[j] & 31);
            if (SETS == 1) continue;
            const double other = __shfl_sync(~0u, sum[SETS - 1], jump[j] & 31);
            const int beyond = __shfl_sync(~0u, jump[SETS - 1], jump[j] & 31);
            if (jump[j] >= 32) add[j] = other, next[j] = beyond;
        }
#pragma unroll
        for (int j = 0; j < SETS; ++j)
            if (jump[j] >= 0) sum[j] += add[j], jump[j] = next[j];
    }
#pragma unroll
    for (int j = 0; j < SETS; ++j) {
        const int t = lane + 32 * j;
        if (t >= BT) continue;
        const double binary = sum[j] * 1.4426950408889634;
        const float high = (float)binary;
        z.high[t] = high;
        z.low[t] = (float)(binary - (double)high);
        if (w.vb == 0 && p.high_out && t < w.rows) {
            const float natural = (float)sum[j];
            p.high_out[(i64)(w.start + t) * p.go_row + w.head * p.go_head] = natural;
            p.low_out[(i64)(w.start + t) * p.go_row + w.head * p.go_head] = (float)(sum[j] - (double)natural);
        }
    }
}
__device__ __forceinline__ void find_live(Shared &z, int lane) {
    u32 live = 0;
#pragma unroll
    for (int r = 0; r < BLOCKS; ++r) {
        const int t = 16 * r + (lane & 15);
        const u64 itself = 1ull << t;
        const u32 low = __reduce_or_sync(~0u, z.bits[0][t] & ~(u32)itself), high = BT > 32 ? __reduce_or_sync(~0u, z.bits[1][t] & ~(u32)(itself >> 32)) : 0u;
        live |= ((low & 0xffffu ? 1 : 0) | (low >> 16 ? 2 : 0) | (high & 0xffffu ? 4 : 0) | (high >> 16 ? 8 : 0)) << (4 * r);
    }
    if (lane == 0) z.live = live;
}
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
        invert_diagonal(system_of(m, z)[block_at(block, block)], lane);
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
#pragma unroll
        for (int order = IPARTS - 1; order >= 0; --order)
#pragma unroll
            for (int i = 0; i <= order; ++i) mma(out[n], x[0][i], x[1][i], x[2][i], x[3][i], b[0][order - i], b[1][order - i]);
    }
}
__device__ __forceinline__ void split16(const float (&x)[2][4], u32 (&parts)[4][IPARTS]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) split<IPARTS>(x[e >> 1][2 * (e & 1)], x[e >> 1][2 * (e & 1) + 1], parts[e]);
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
                split16(sum[j], parts);
                multiply16(x, parts, system[block_at(r, r)], lane);
            }
        }
        put_inverse(z, x, b, r, lane);
        u32 parts[4][IPARTS];
        split16(x, parts);
#pragma unroll
        for (int i = j + 1; i < BLOCKS; ++i)
            if (b + i < blocks && (live >> (4 * (b + i) + r) & 1)) multiply16(sum[i], parts, system[block_at(b + i, r)], lane);
    }
}
// ---- the state's half ----
// Accumulate the products of three-part operands that matter at 24 bits, smallest first.
__device__ __forceinline__ void mma_parts(float (&d)[4], const u32 (&a)[4][XPARTS], const u32 (&b)[2][XPARTS]) {
#pragma unroll
    for (int order = XPARTS - 1; order >= 0; --order)
#pragma unroll
        for (int i = 0; i <= order; ++i) mma(d, a[0][i], a[1][i], a[2][i], a[3][i], b[0][order - i], b[1][order - i]);
}
// 16 rows and 16 columns of a row-major matrix as second operands of two products.
__device__ __forceinline__ void second(const u16 *matrix, int stride, u32 (&b)[2][2][XPARTS], int lane) {
    u32 x[4];
    load4(x, &matrix[((lane & 7) + 8 * (lane >> 4)) * stride + 8 * ((lane >> 3) & 1)]);
    b[0][0][0] = x[0], b[0][1][0] = x[1], b[1][0][0] = x[2], b[1][1][0] = x[3];
}
__device__ __forceinline__ void second(const float *matrix, int stride, u32 (&b)[2][2][XPARTS], int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float2 x = *(const float2 *)&matrix[(8 * n + g) * stride + 8 * h + 2 * c];
            split<XPARTS>(x.x, x.y, b[n][h]);
        }
}
// The same of a transposed matrix.
__device__ __forceinline__ void second_turned(const u16 *matrix, int stride, u32 (&b)[2][2][XPARTS], int lane) {
    u32 x[4];
    load4_turned(x, &matrix[((lane & 7) + 8 * ((lane >> 3) & 1)) * stride + 8 * (lane >> 4)]);
    b[0][0][0] = x[0], b[0][1][0] = x[1], b[1][0][0] = x[2], b[1][1][0] = x[3];
}
__device__ __forceinline__ void second_turned(const float *matrix, int stride, u32 (&b)[2][2][XPARTS], int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float *from = &matrix[(8 * h + 2 * c) * stride + 8 * n + g];
            split<XPARTS>(from[0], from[stride], b[n][h]);
        }
}
// Two accumulator tiles of 8 columns as one operand of 16.
__device__ __forceinline__ void operand(const float (&x)[4], const float (&y)[4], u32 (&a)[4][XPARTS]) {
    split<XPARTS>(x[0], x[1], a[0]);
    split<XPARTS>(x[2], x[3], a[1]);
    split<XPARTS>(y[0], y[1], a[2]);
    split<XPARTS>(y[2], y[3], a[3]);
}
// What the committed state gives for all keys and queries: S x^T carried on, and the prior rows beside it.
__device__ __forceinline__ void read_past(const Tile &m, const Shared &z, const Work &w, int first, float (&r)[MT][NT][4], float (&q)[MT][NT][4], int lane) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) r[t][n][e] = q[t][n][e] = 0.f;
#pragma unroll 2
    for (int k = 0; k < 8; ++k) {
        u32 a[MT][4][SPARTS];
#pragma unroll
        for (int t = 0; t < MT; ++t) state_operand(m, first + 16 * t, k, a[t], lane);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            u32 x[4], y[4];
            const int row = 8 * n + (lane & 7) + 8 * (lane >> 4), column = 16 * k + 8 * ((lane >> 3) & 1);
            load4(x, &m.k[row][column]);
            load4(y, &m.q[row][column]);
#pragma unroll
            for (int i = SPARTS - 1; i >= 0; --i)
#pragma unroll
                for (int t = 0; t < MT; ++t) {
                    mma(r[t][n], a[t][0][i], a[t][1][i], a[t][2][i], a[t][3][i], x[0], x[1]);
                    mma(r[t][n + 1], a[t][0][i], a[t][1][i], a[t][2][i], a[t][3][i], x[2], x[3]);
                    mma(q[t][n], a[t][0][i], a[t][1][i], a[t][2][i], a[t][3][i], y[0], y[1]);
                    mma(q[t][n + 1], a[t][0][i], a[t][1][i], a[t][2][i], a[t][3][i], y[2], y[3]);
                }
        }
    }
    if (!w.prior || w.fold) return;
    const float carried = z.carried;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                r[t][n][e] *= carried;
                q[t][n][e] *= carried;
            }
#pragma unroll 1
    for (int h = 0; 16 * h < w.prior; ++h) {
        u32 a[MT][4][XPARTS];
#pragma unroll
        for (int t = 0; t < MT; ++t) prior_operand<XPARTS>(m, first + 16 * t, h, a[t], lane);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            u32 x[2][2][XPARTS], y[2][2][XPARTS];
            second(&z.past[8 * n][16 * h], LDP, x, lane);
            second(&z.past[BT + 8 * n][16 * h], LDP, y, lane);
#pragma unroll
            for (int t = 0; t < MT; ++t)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    mma_parts(r[t][n + e], a[t], x[e]);
                    mma_parts(q[t][n + e], a[t], y[e]);
                }
        }
    }
}
// out[v, t] += sum over i <= t of in[v, i] matrix[t, i]; rows that are not finite leave the products.
template <bool TURNED>
__device__ __forceinline__ void apply(const float (&in)[MT][NT][4], const mt (&matrix)[TRIANGLE][16][LDM], float (&out)[MT][NT][4], u32 used, int lane) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        u32 a[MT][4][XPARTS];
#pragma unroll
        for (int t = 0; t < MT; ++t) operand(in[t][2 * i], in[t][2 * i + 1], a[t]);
#pragma unroll
        for (int r = i; r < BLOCKS; ++r) {
            if (!(used >> (4 * r + i) & 1)) continue;  // nothing was written there
            u32 b[2][2][XPARTS];
            if (TURNED)
                second_turned(matrix[block_at(r, i)][0], LDM, b, lane);
            else
                second(matrix[block_at(r, i)][0], LDM, b, lane);
#pragma unroll
            for (int t = 0; t < MT; ++t)
#pragma unroll
                for (int e = 0; e < 2; ++e) mma_parts(out[t][2 * r + e], a[t], b[e]);
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
            if ((z.bits[0][8 * n + 2 * (lane & 3) + e] & (u32)bad) | (z.bits[1][8 * n + 2 * (lane & 3) + e] & (u32)(bad >> 32)))
#pragma unroll
                for (int t = 0; t < MT; ++t) x[t][n][e] = x[t][n][e + 2] = clear ? 0.f : __uint_as_float(0x7fc00000u);
}
// Zero the columns of rows that are no part of the tree.
__device__ __forceinline__ void drop_inert(const Shared &z, float (&x)[MT][NT][4], int lane) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (!(z.bits[0][8 * n + 2 * (lane & 3) + e] | z.bits[1][8 * n + 2 * (lane & 3) + e]))
#pragma unroll
                for (int t = 0; t < MT; ++t) x[t][n][e] = x[t][n][e + 2] = 0.f;
}
// Rows of u (0) and o (1) lie in the warp's own rows of the state, which are done with, until all warps' can be written at once.
// No two of a matrix's 8 rows meet in a bank.
#define PIECES (2 * MT)  // of 16 bytes, of a row of one warp
static_assert(4 * BT <= LDS * sizeof(st), "u and o take the place of the state");
__device__ __forceinline__ u16 *staged(Tile &m, int warp, int which, int t, int piece) {
    return (u16 *)m.s[16 * MT * warp] + 8 * ((which * BT + t) * PIECES + (piece ^ (t * PIECES / 8 & (PIECES - 1))));
}
__device__ __forceinline__ void stage(Tile &m, const float (&x)[MT][NT][4], int which, int warp, int lane) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < NT; n += 2)
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            u32 tiles[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) tiles[j] = pack(x[t][n + (j >> 1)][2 * (j & 1)], x[t][n + (j >> 1)][2 * (j & 1) + 1]);
            store4_turned(staged(m, warp, which, 8 * n + (lane & 7) + 8 * (lane >> 4), 2 * t + (lane >> 3 & 1)), tiles);
        }
}
// Write the rows of u and o that all warps have staged.
__device__ __forceinline__ void write_rows(const Params &p, const Work &w, Tile &m) {
    const int piece = threadIdx.x % (BV / 8), first = threadIdx.x / (BV / 8), step = 32 * NW / (BV / 8);
    u16 *to = p.o + (i64)(w.start + first) * p.o_row + w.head * p.o_head + BV * w.vb + 8 * piece;
    const i64 o_step = step * p.o_row;
#if !U_F32
    u16 *u = (u16 *)p.u_out + (i64)(w.start + first) * p.uo_row + w.head * p.uo_head + BV * w.vb + 8 * piece;
    const i64 u_step = step * p.uo_row;
#endif
#pragma unroll
    for (int j = 0; j < BT / step; ++j) {
        const int t = first + j * step;
        if (t < w.rows) {
#if !U_F32
            *(uint4 *)u = *(const uint4 *)staged(m, piece / PIECES, 0, t, piece % PIECES);
#endif
            *(uint4 *)to = *(const uint4 *)staged(m, piece / PIECES, 1, t, piece % PIECES);
        }
        to += o_step;
#if !U_F32
        u += u_step;
#endif
    }
}
// r <- beta (v - r).
__device__ __forceinline__ void residuals(const Shared &z, const u16 (*values)[BV + 8], float (&r)[MT][NT][4], int first, int lane) {
    const int c = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n += 2)
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            u32 v[4];
            load4_turned(v, &values[8 * n + (lane & 7) + 8 * (lane >> 4)][first + 16 * t + 8 * ((lane >> 3) & 1)]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int i = 8 * (n + (j >> 1)) + 2 * c;
                const float2 write = *(const float2 *)&z.write[i], read = *(const float2 *)&z.read_k[i];
                float(&x)[4] = r[t][n + (j >> 1)];
                x[2 * (j & 1)] = write.x * (lo_of(v[j]) - read.x * x[2 * (j & 1)]);
                x[2 * (j & 1) + 1] = write.y * (hi_of(v[j]) - read.y * x[2 * (j & 1) + 1]);
            }
        }
}
#if U_F32
__device__ __forceinline__ void write_pseudo_values(const Params &p, const Work &w, const float (&y)[MT][NT][4], int first, int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            int t = 8 * n + 2 * c + e;
            if (t >= w.rows) continue;
            float *to = (float *)p.u_out + (i64)(w.start + t) * p.uo_row + w.head * p.uo_head + BV * w.vb + first + g;
#pragma unroll
            for (int k = 0; k < MT; ++k)
#pragma unroll
                for (int h = 0; h < 2; ++h) to[16 * k + 8 * h] = y[k][n][e + 2 * h];
        }
}
#endif
__device__ __forceinline__ void wide_step(const Params &p, const Work &w, Tile &m, Shared &z, int warp, int lane) {
    const int c = lane & 3, first = 16 * MT * warp, v0 = BV * w.vb, blocks = (w.rows + 15) / 16;
    if (threadIdx.x < 2) z.bad[threadIdx.x] = 0;
    if (threadIdx.x == 0) z.next = 0;
    // Set j of rows is prepared by the last warp but j; the last one sums up.
    const int set = SETS == 1 || warp == NW - 1 ? 0 : 1;
    const bool prepares = warp >= NW - SETS;
    GateInputs inputs;
    u64 word;
    if (prepares) {
        const int t = lane + 32 * set;
        inputs = gate_inputs(p, w, t);
        word = t < w.rows ? ancestors_of(p, w.start + t) : 0ull;
    }
    Decays decays;
    if (warp == 0 && w.prior) decays = prior_decays(p, w, lane);
#if EARLY_VALUES
    u16(*values)[BV + 8] = z.values;
    request(p, w, m, values, BT);
#else
    u16(*values)[BV + 8] = (u16(*)[BV + 8])m.k;
    static_assert(BV + 8 <= LDK, "values take the place of the keys");
    request(p, w, m, 0, BT);
#endif
#if EARLY_STATE
    request_state(p, w, m, warp, lane);
#else
    if (threadIdx.x == 0) prefetch((const st *)p.state + w.slot * p.state_slot + w.head * p.state_head + (i64)v0 * DIM, BV * DIM * sizeof(st));
#endif
    if (warp == 0 && w.prior) {
        const Weights x = prior_weights(p, w, decays, lane, w.vb == 0);
#pragma unroll
        for (int j = 0; j < (PMAX + 31) / 32; ++j) z.weights[lane + 32 * j] = x.weight[j];
        if (lane == 0) z.carried = x.carried;
    }
    if (prepares) put_gates(z, p, w, set, inputs, word, lane);
    if (SETS == 1) {
        if (warp == NW - 1 && lane == 0) z.inert[1] = 0;
        __syncwarp();
    } else {
        __syncthreads();
    }
    if (warp == NW - 1) path_sums(z, p, w, lane);
    if (warp == NW - SETS) find_live(z, lane);
    copies_done<EARLY_STATE>();
    __syncthreads();
    append(p, w, m);
    copy_keys(p, w, m);
    const u32 live = z.live;
    const int halves = blocks > 2 ? blocks - 2 : 0, row_jobs = 2 * (blocks + halves), chunks = w.prior && !w.fold ? (w.prior + 15) / 16 : 0;
#pragma unroll 1
    for (;;) {
        int job = lane == 0 ? atomicAdd(&z.next, 1u) : 0;
        job = __shfl_sync(~0u, job, 0);
        if (job >= row_jobs + 2 * blocks * chunks) break;
        const bool queries = job & 1;
        job >>= 1;
        if (job < blocks + halves) {
            row_job(m, z, blocks - 1 - (job < blocks ? job : job - blocks), queries, job >= blocks, live, lane);
            if (BT == 16 && !queries) {
                __syncwarp();
                invert_column(m, z, 0, 1, live, lane);
            }
        } else {
            job -= blocks + halves;
            past_job(m, z, job % blocks, job / blocks, queries, lane);
        }
    }
    __syncthreads();
#if !EARLY_VALUES
    uint4 pieces[VALUE_PIECES];
    const u16 *v = p.v + w.start * p.v_row + w.head * p.v_head + v0;
#pragma unroll
    for (int j = 0; j < VALUE_PIECES; ++j) {
        const int i = threadIdx.x + 32 * NW * j, t = i / (BV / 8);
        pieces[j] = make_uint4(0, 0, 0, 0);
        if (t < w.rows) pieces[j] = early((const uint4 *)(v + t * p.v_row + 8 * (i % (BV / 8))));
    }
#endif
    if (BT > 16)
#pragma unroll 1
        for (int b = warp; b < blocks; b += NW) invert_column(m, z, b, blocks, live, lane);
#if !EARLY_STATE
    // The system is done with.
    __syncthreads();
    request_state(p, w, m, warp, lane);
#endif
    copies_done<0>();
    __syncwarp();
    if (w.fold) {
        Weights x;
#pragma unroll
        for (int j = 0; j < (PMAX + 31) / 32; ++j) x.weight[j] = z.weights[lane + 32 * j];
        x.carried = z.carried;
#pragma unroll 1
        for (int t = 0; t < MT; ++t) fold(p, w, m, x, first + 16 * t, lane);
        __syncwarp();
    }
    float r[MT][NT][4], q[MT][NT][4], y[MT][NT][4];
    read_past(m, z, w, first, r, q, lane);
    if (BT > 16 || !EARLY_VALUES) __syncthreads();
#if !EARLY_VALUES
    // The keys are done with.
#pragma unroll
    for (int j = 0; j < VALUE_PIECES; ++j) {
        const int i = threadIdx.x + 32 * NW * j;
        if (i < BT * BV / 8) *(uint4 *)&values[i / (BV / 8)][8 * (i % (BV / 8))] = pieces[j];
    }
    __syncthreads();
#endif
    residuals(z, values, r, first, lane);
    const u32 used = live | (0x8421u & ((1u << 4 * blocks) - 1));
    const u64 bad = tainted(r, lane) | (u64)z.bad[0] | ((u64)z.bad[1] << 32), inert = (u64)z.inert[0] | ((u64)z.inert[1] << 32);
    if (bad | inert) drop_inert(z, r, lane);
    if (bad) mark(z, bad, true, r, lane);
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) y[t][n][e] = 0.f;
    apply<true>(r, z.inverse, y, used, lane);
    if (bad) mark(z, bad, false, y, lane);
#if U_F32
    write_pseudo_values(p, w, y, first, lane);
#else
    stage(m, y, 0, warp, lane);
#endif
    if (bad) mark(z, bad, true, y, lane);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const float2 read = *(const float2 *)&z.read_q[8 * n + 2 * c];
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            q[t][n][0] *= read.x;
            q[t][n][1] *= read.y;
            q[t][n][2] *= read.x;
            q[t][n][3] *= read.y;
        }
    }
    apply<false>(y, z.scores, q, used, lane);
    if (bad) mark(z, bad, false, q, lane);
    if (bad | inert) drop_inert(z, q, lane);
    stage(m, q, 1, warp, lane);
    __syncthreads();
    write_rows(p, w, m);
}
#endif

// Zero this block's columns of rows from `first` on, every `step`-th.
__device__ __forceinline__ void zero_rows(const Params &p, const Work &w, int first, int end, int step) {
    for (int i = threadIdx.x; first + i / (BV / 8) * step < end; i += 32 * NW)
        *(uint4 *)(p.o + (i64)(first + i / (BV / 8) * step) * p.o_row + w.head * p.o_head + BV * w.vb + 8 * (i % (BV / 8))) = make_uint4(0, 0, 0, 0);
}

union Rest {
    Small small;
#if BT > 4
    Shared wide;
#endif
};
static_assert(sizeof(Tile) + sizeof(Rest) == SHARED_BYTES, "what the host reserves");

extern "C" __global__ void __launch_bounds__(32 * NW, MIN_BLOCKS) gdn_step(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char memory[];
    Tile &tile = *(Tile *)memory;
    Rest &rest = *(Rest *)(memory + sizeof(Tile));
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Work w = work_of(p);
    // Rows outside the trees are shared out among the sequences.
    const int before = p.cu_rows[0], past = p.cu_rows[p.num_seqs];
    if (before > 0) zero_rows(p, w, w.seq, before, p.num_seqs);
    if (past < p.num_rows) zero_rows(p, w, past + w.seq, p.num_rows, p.num_seqs);
    if (w.start + w.rows < w.end || !w.live) zero_rows(p, w, w.live ? w.start + w.rows : w.start, w.end, 1);
    if (!w.live) return;
#if BT > 4
    if (w.rows > 4) {
        wide_step(p, w, tile, rest.wide, warp, lane);
        return;
    }
#endif
    small_step(p, w, tile, rest.small, warp, lane);
}
