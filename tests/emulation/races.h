// Finds races: two threads of a launch access the same memory in no defined order, at least one access is a write, and
// at least one is not atomic.
//
// The kernels of one build of the library are compiled with -fsanitize=thread: g++ then calls races.cpp at every access
// to memory and at every atomic operation. Accesses are ordered as CUDA says: by barriers, by __syncwarp, and by one
// thread's fence and atomic write that another one's atomic read and fence follow. Shuffles and votes order nothing. A
// volatile access is a relaxed atomic one, as PTX says. Fences and atomics of all scopes count as the device's.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fiber.h"

namespace tsr::emulated {

// By a thread's number in the grid: its first step that is not known to come before the next access.
using Known = std::vector<uint32_t>;

// A thread's position, and what comes before its next access: all accesses of others in steps before those named here.
struct Order {
  uint32_t thread = 0, block_begin = 0;  // numbers in the grid
  uint32_t step = 0;                     // changes whenever the thread's accesses are handed over
  uint32_t block = 0;                    // known of its block, from barriers
  std::array<uint32_t, 32> lanes{};      // known of its warp
  Known all;                             // known by fences
  Known fenced;                          // what its atomic writes hand over
  Known seen;                            // what its atomic reads found, for its next fence
};

// The following functions do nothing if the kernels were not compiled in this way.

void start_races(int64_t threads_of_block);
// Refuses if the launch had races.
void finish_races();
void start_order(Order& order, int64_t block, int64_t thread);
// The thread that runs from now on; null: the emulation itself.
void watch(Order* order, const Fiber* fiber);
// All threads of a block have passed a barrier, or have returned before it.
void order_block(const std::vector<Order*>& threads);
// The lanes of a warp that have met, null for those that took no part.
void order_lanes(const std::vector<Order*>& lanes);
// The memory is shared memory from now on; earlier accesses to it no longer count.
void start_shared(const void* begin, size_t bytes);

}  // namespace tsr::emulated
