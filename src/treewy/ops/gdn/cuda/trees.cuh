#if BT > 4
// ---- what a tree larger than 4 rows needs in shared memory, and its gates and decays ----
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
#endif
