#if BT > 4
// ---- pseudo-values and outputs ----
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
// The pseudo-values y of all rows from the residuals' ingredients; and which rows are not finite (bad) or no part of the tree (inert).
__device__ __forceinline__ void solve(const Shared &z, const u16 (*values)[BV + 8], float (&r)[MT][NT][4], float (&y)[MT][NT][4], u32 used, u64 &bad, u64 &inert, int first, int lane) {
    residuals(z, values, r, first, lane);
    bad = tainted(r, lane) | (u64)z.bad[0] | ((u64)z.bad[1] << 32);
    inert = (u64)z.inert[0] | ((u64)z.inert[1] << 32);
    if (bad | inert) drop_inert(z, r, lane);
    if (bad) mark(z, bad, true, r, lane);
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int t = 0; t < MT; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) y[t][n][e] = 0.f;
    apply<true>(r, z.inverse, y, used, lane);
    bad |= tainted(y, lane);
    if (bad) mark(z, bad, false, y, lane);
}
// The outputs q of all rows from what their queries read of the state.
__device__ __forceinline__ void look(const Shared &z, float (&y)[MT][NT][4], float (&q)[MT][NT][4], u32 used, u64 bad, u64 inert, int lane) {
    const int c = lane & 3;
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
}
#endif
