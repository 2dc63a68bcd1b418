#if BT > 4
// ---- up to BT rows: T x T matrices in shared memory, products on tensor cores ----
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
    const int first = 16 * MT * warp, v0 = BV * w.vb, blocks = (w.rows + 15) / 16;
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
        if (STAGES < 2 || job >= row_jobs + 2 * blocks * chunks) break;
        const bool queries = job & 1;
        job >>= 1;
        if (job < blocks + halves) {
            row_job(m, z, blocks - 1 - (job < blocks ? job : job - blocks), queries, job >= blocks, live, lane);
            if (BT == 16 && STAGES >= 3 && !queries) {
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
    if (BT > 16 && STAGES >= 3)
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
    const u32 used = live | (0x8421u & ((1u << 4 * blocks) - 1));
    u64 bad = 0, inert = 0;
    if (STAGES < 3)
#pragma unroll
        for (int n = 0; n < MT * NT * 4; ++n) ((float *)y)[n] = ((float *)r)[n];
    else
        solve(z, values, r, y, used, bad, inert, first, lane);
#if U_F32
    write_pseudo_values(p, w, y, first, lane);
#else
    stage(m, y, 0, warp, lane);
#endif
    if (STAGES >= 4) look(z, y, q, used, bad, inert, lane);
    stage(m, q, 1, warp, lane);
    __syncthreads();
    write_rows(p, w, m);
}
#endif
