#if BT > 4
// ---- the state's half ----
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
#endif
