// Finds races: accesses of two threads of a launch to the same memory that nothing orders, of which one is a write and
// one is not atomic.
//
// The kernels of one build of the library are compiled with -fsanitize=thread: g++ then calls races.cpp at every access
// to memory and at every atomic operation. What orders accesses is what CUDA says: barriers, __syncwarp, and what one
// thread's fence and atomic write hand over to another one's atomic read and fence. Shuffles and votes order nothing. A
// volatile access is a relaxed atomic one, as PTX says. Fences and atomics of all scopes count as the device's.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fiber.h"

namespace tsr::emulated {

// By the threads' numbers in the grid: the first step that is not known to come before.
using Known = std::vector<uint32_t>;

// Where a thread is, and what comes before its next access: all that others did in the steps before those named here.
struct Order {
  uint32_t thread = 0, block_begin = 0;  // numbers in the grid
  uint32_t step = 0;                     // another one whenever the thread's accesses are handed over
  uint32_t block = 0;                    // known of its block, from barriers
  std::array<uint32_t, 32> lanes{};      // known of its warp
  Known all;                             // known by fences
  Known fenced;                          // what its atomic writes hand over
  Known seen;                            // what its atomic reads found, for its next fence
};

// None of the following does anything where the kernels are not compiled so.

void start_races(int64_t threads_of_block);
// Refuses if the launch had races.
void finish_races();
void start_order(Order& order, int64_t block, int64_t thread);
// Who runs from now on; null: the emulation itself.
void watch(Order* order, const Fiber* fiber);
// All threads of a block have passed a barrier, or have returned before it.
void order_block(const std::vector<Order*>& threads);
// Lanes of a warp, null for those that took no part.
void order_lanes(const std::vector<Order*>& lanes);
// The memory is shared memory now, and was anything before.
void start_shared(const void* begin, size_t bytes);

}  // namespace tsr::emulated
