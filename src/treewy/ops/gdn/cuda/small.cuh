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
