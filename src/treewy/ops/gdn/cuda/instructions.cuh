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
