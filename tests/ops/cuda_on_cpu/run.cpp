// Runs gdn_step over a grid, one block after the other.
#include "instructions.h"
#include KERNEL

asm(".set memory, guarded + 4096");
static_assert(GUARD == 4096, "what the line above says");

namespace emulator {
static const Params *params;

static void thread() {
    gdn_step(*params);
    require(self().unsent.empty() && self().sent.empty(), "ended before its copies were done");
    self().ended = true;
    --block.running;
    release_barrier();
    leave();
}
static void start_block() {
    for (size_t i = 0; i < sizeof guarded; i += 4) memcpy(guarded + i, &POISON, 4);
    block.warps.assign(NW, Warp{});
    block.at_barrier = 0;
    block.running = 32 * NW;
    for (Fiber &fiber : block.fibers) {
        fiber.waits = fiber.ended = false;
        fiber.unsent.clear();
        fiber.sent.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, thread, 0);
    }
}
static void check_guards() {
    for (size_t i = 0; i < GUARD; i += 4)
        if (memcmp(guarded + i, &POISON, 4) || memcmp(guarded + GUARD + SHARED_BYTES + i, &POISON, 4))
            snprintf(message, sizeof message, "block (%u, %u): wrote past shared memory", blockIdx.x, blockIdx.y);
}
// Let one warp run as far as it can. Returns whether it moved at all.
static bool run_warp(int warp, bool backwards) {
    bool moved = false;
    for (bool again = true; again && !block.warps[warp].late;) {
        again = false;
        for (int i = 0; i < LANES && !block.warps[warp].late; ++i) {
            Fiber &fiber = block.fibers[threadIdx.x = LANES * warp + (backwards ? LANES - 1 - i : i)];
            if (fiber.waits || fiber.ended) continue;
            moved = again = true;
            swapcontext(&block.scheduler, &fiber.context);
            if (message[0]) return true;
        }
    }
    return moved;
}
// Let a late warp go on. Returns whether there was one.
static bool release_late(bool backwards) {
    for (int i = 0; i < NW; ++i) {
        Warp &warp = block.warps[backwards ? NW - 1 - i : i];
        if (!warp.late) continue;
        warp.late = false;
        return true;
    }
    return false;
}
// Warps run up to barriers one after the other: what two of them do at once on a GPU is far apart here.
static void run_block(bool backwards) {
    start_block();
    while (block.running) {
        bool moved = false;
        for (int i = 0; i < NW; ++i) {
            moved |= run_warp(backwards ? NW - 1 - i : i, backwards);
            if (message[0]) return;
        }
        if (!moved && !release_late(backwards)) {
            snprintf(message, sizeof message, "block (%u, %u): threads wait for ones that never come", blockIdx.x, blockIdx.y);
            return;
        }
    }
    check_guards();
}
}  // namespace emulator

// What -fsanitize=alignment,bounds reports to.
extern "C" void __ubsan_handle_type_mismatch_v1(void *, void *) { emulator::fail("misaligned access"); }
extern "C" void __ubsan_handle_out_of_bounds(void *, void *) { emulator::fail("index past an array"); }

// `backwards` runs blocks, and the threads of each, in the opposite order: what only holds in one is a race. Returns what
// went wrong, or null.
extern "C" __attribute__((visibility("default"))) const char *run(const Params *p, int grid_x, int grid_y, int backwards) {
    using namespace emulator;
    params = p;
    message[0] = 0;
    block.fibers.resize(32 * NW);
    const int count = grid_x * grid_y;
    for (int i = 0; i < count && !message[0]; ++i) {
        const int at = backwards ? count - 1 - i : i;
        blockIdx = {(unsigned)(at % grid_x), (unsigned)(at / grid_x)};
        run_block(backwards);
    }
    return message[0] ? message : nullptr;
}
