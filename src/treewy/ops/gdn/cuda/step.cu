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
