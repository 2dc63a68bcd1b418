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
    int seq, head, vb, slot, place, start, rows, end, hist, path, prior, fold, key_head;
    bool live, first_of_group;
};
__device__ __forceinline__ Work work_of(const Params &p) {
    Work w;
    w.seq = blockIdx.y;
    w.vb = blockIdx.x % VB;
    w.head = blockIdx.x / VB;
    w.slot = p.slots[w.seq];
    w.place = p.places[w.seq];
    w.start = p.cu_rows[w.seq];
    int end = p.cu_rows[w.seq + 1];
    int held = p.held ? p.held[w.seq] : 0, path = p.path_len ? p.path_len[w.seq] : 0, fold = p.fold ? p.fold[w.seq] : 0;
    w.key_head = ((u32)w.head * (u32)p.group_inverse) >> 16;
    w.first_of_group = w.head == w.key_head * p.group;
    w.live = w.slot >= 0 && w.slot < p.num_slots;
    const bool kept = w.live && w.place >= 0 && w.place < p.num_places;
    if (kept && p.hist_len && !p.held) held = p.hist_len[w.place];
    w.end = end;
    w.rows = max(0, min(end - w.start, min(BT, p.max_rows)));
    w.hist = kept ? max(0, min(held, p.capacity)) : 0;
    w.path = w.live ? max(0, min(min(path, p.path_width), PMAX - w.hist)) : 0;
    w.prior = w.hist + w.path;
    w.fold = w.prior && (!kept || fold != 0);
    return w;
}

// Row of the record that path row i of the prior rows is, kept within the record whatever the table says.
__device__ __forceinline__ i64 record_row(const Params &p, const Work &w, int i) {
    return max(0, min(p.path_rows[(i64)w.seq * p.path_width + i - w.hist], p.num_record_rows - 1));
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
            from = p.hist_k + w.place * p.hk_slot + row_of * p.hk_row + w.key_head * p.hk_head;
            u = (const ut *)p.hist_u + w.place * p.hu_slot + row_of * p.hu_row + w.head * p.hu_head;
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
