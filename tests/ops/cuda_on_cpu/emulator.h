// CUDA C++ on a CPU, for kernels that keep to what stands here. A block's threads are fibers that run until they must wait
// for others; the lanes of a warp meet in every collective instruction. Whatever a GPU would leave undefined is an error or a NaN.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#define TREEWY_EMULATED
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index {
    unsigned x, y;
};
inline Index threadIdx, blockIdx;
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }

// Bits of a NaN, whatever they are read as; as a whole number, beyond every array.
constexpr uint32_t POISON = 0x7fffffff;
constexpr int GUARD = 4096, STACK = 256 * 1024, LANES = 32;
// A block's shared memory lies between two guards. The kernel's own name for it is `memory`.
extern "C" {
alignas(128) inline char guarded[GUARD + SHARED_BYTES + GUARD] __attribute__((used));
}
extern char memory[];
inline char *shared_base() { return guarded + GUARD; }

namespace emulator {
enum class Kind { none, barrier, syncwarp, shuffle, shuffle_xor, reduce_or, any, ballot, mma, mma8, load4, load4_turned, store4_turned };
struct Copy {
    uint32_t to;
    const void *from;
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool waits, ended;
    std::vector<Copy> unsent;
    std::deque<std::vector<Copy>> sent;
};
struct Warp {
    Kind kind;
    int arrived;
    void *of[LANES];  // each lane's operands
    bool counted, late;  // has added to a shared counter; must wait until no other warp can move
};
struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    int at_barrier, running;
    ucontext_t scheduler;
};
inline Block block;
inline char message[256];

inline Fiber &self() { return block.fibers[threadIdx.x]; }
inline void leave() { swapcontext(&self().context, &block.scheduler); }
// The first error ends the run: its fiber is never resumed.
inline void fail(const char *what) {
    if (!message[0]) snprintf(message, sizeof message, "block (%u, %u), thread %u: %s", blockIdx.x, blockIdx.y, threadIdx.x, what);
    leave();
}
inline void require(bool holds, const char *what) {
    if (!holds) fail(what);
}
// Wait for all lanes of the warp, and have the last one do the work of all.
template <typename Work> void meet(Kind kind, void *operands, Work work) {
    const unsigned first = threadIdx.x / LANES * LANES;
    Warp &warp = block.warps[threadIdx.x / LANES];
    require(!warp.arrived || warp.kind == kind, "lanes of one warp meet in different instructions");
    warp.kind = kind;
    warp.of[threadIdx.x % LANES] = operands;
    if (++warp.arrived < LANES) {
        self().waits = true;
        return leave();
    }
    work(warp.of);
    warp.arrived = 0;
    for (int lane = 0; lane < LANES; ++lane) block.fibers[first + lane].waits = false;
}
// A warp's first job is done as late as can be: all others go on as far as they may.
inline void be_late() {
    Warp &warp = block.warps[threadIdx.x / LANES];
    if (warp.counted) return;
    warp.counted = warp.late = true;
    leave();
}
inline void release_barrier() {
    if (!block.at_barrier || block.at_barrier < block.running) return;
    block.at_barrier = 0;
    for (Fiber &fiber : block.fibers) fiber.waits = false;
}
inline char *shared_at(uint32_t at, int bytes) {
    require(at % bytes == 0, "misaligned address in shared memory");
    require(at + bytes <= SHARED_BYTES, "address outside shared memory");
    return shared_base() + at;
}
inline float wide(uint32_t half) {
    half <<= 16;
    float x;
    memcpy(&x, &half, 4);
    return x;
}
// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void finish(std::vector<Copy> &copies) {
    for (const Copy &copy : copies) memcpy(shared_at(copy.to, 16), copy.from, 16);
}
}  // namespace emulator
