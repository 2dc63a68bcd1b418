typedef unsigned int u32;
// Two warps that do one thing wrong each time: what the emulator must notice.
struct Params {
    const float *in;
    float *out;
    int fault;
};
extern "C" __global__ void gdn_step(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char memory[];
    float *shared = (float *)memory;
    const int lane = threadIdx.x & 31;
    float row[4] = {0.f, 0.f, 0.f, 0.f};
    switch (p.fault) {
    case 0:  // nothing wrong: each warp copies what the other one reads
        copy16(smem_at(shared + 4 * threadIdx.x), p.in + 4 * threadIdx.x);
        copies_sent();
        copies_done<0>();
        __syncthreads();
        p.out[threadIdx.x] = shared[4 * (63 - threadIdx.x)];
        break;
    case 1:  // no barrier
        shared[threadIdx.x] = p.in[threadIdx.x];
        p.out[threadIdx.x] = shared[63 - threadIdx.x];
        break;
    case 2:  // no wait for the copy
        copy16(smem_at(shared + 4 * threadIdx.x), p.in + 4 * threadIdx.x);
        copies_sent();
        __syncthreads();
        p.out[threadIdx.x] = shared[4 * (63 - threadIdx.x)];
        __syncthreads();
        copies_done<0>();
        break;
    case 3: copy16(smem_at(shared), p.in); break;
    case 4: copy16(smem_at(shared + 1), p.in), copies_sent(), copies_done<0>(); break;
    case 5: copy16(smem_at(shared), p.in + 1); break;
    case 6: smem_at(shared + SHARED_BYTES / 4); break;
    case 7: memory[SHARED_BYTES + 4] = 0; break;
    case 8: lane < 16 ? __syncwarp() : (void)__any_sync(~0u, true); break;
    case 9: if (lane) __syncwarp(); break;
    case 10: *(float4 *)(shared + lane) = make_float4(0.f, 0.f, 0.f, 0.f); break;
    case 11: row[lane] = 0.f; p.out[lane] = row[3]; break;
    case 12:  // a whole warp may leave before a barrier
        if (threadIdx.x < 32) return;
        __syncthreads();
        p.out[threadIdx.x] = __shfl_xor_sync(~0u, p.in[threadIdx.x], 1);
        break;
    case 13:  // jobs for whoever is free, and no barrier after them
        if (threadIdx.x == 0) *(u32 *)memory = 0;
        __syncthreads();
        for (;;) {
            int job = lane == 0 ? atomicAdd((u32 *)memory, 1u) : 0;
            job = __shfl_sync(~0u, job, 0);
            if (job >= 4) break;
            shared[1 + 32 * job + lane] = p.in[lane];
        }
        p.out[threadIdx.x] = shared[1 + lane] + shared[33 + lane];
        break;
    }
}
