// Threads as fibers, and how they wait for each other: what emulation.h's builtins are made of.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace tsr::emulated {

// Where in the source a thread waits: all threads that wait for each other must wait at one place.
struct Site {
  const char* file;
  int line;
};
// The last parameters of a function that waits: they take the caller's place in the source.
#define TSR_EMULATED_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
// For functions that stand for one instruction: races.h names their callers.
#define TSR_EMULATED_INLINE __attribute__((always_inline)) inline

// ---- The threads of a block -----------------------------------------------------------------------------------------

// The votes of the threads that have not returned.
struct Votes {
  int set;
  int threads;
};
// Waits for all threads of the block that have not returned; counts those that came with `predicate`.
Votes barrier(bool predicate, Site site);

// The block's shared array of that key, allocated when its first thread asks.
void* shared_array(const void* key, size_t bytes);
void* dynamic_shared_bytes();

// ---- The lanes of a warp --------------------------------------------------------------------------------------------

enum class Collective { kSync, kShuffle, kVote, kMatch, kReduce };

// The lanes that took part in a collective, and the value that each brought.
struct Lanes {
  unsigned present;
  std::array<uint64_t, 32> values;
};
// Waits for the lanes of `mask` that have not returned.
const Lanes& collective(Collective kind, unsigned mask, uint64_t value, Site site);

int lane();
// The first lane of the asking lane's group of `width` neighbours, a power of two.
int segment_start(int width);
// The value that lane `source` brought; the lane must take part.
uint64_t shuffle_bits(unsigned mask, uint64_t value, int source, Site site);
// The lanes whose predicate is set, and all lanes that took part.
std::pair<unsigned, unsigned> vote(unsigned mask, bool predicate, Site site);
// The lanes that brought the asking lane's value, and all lanes that took part.
std::pair<unsigned, unsigned> match(unsigned mask, uint64_t value, Site site);

// ---- Everything else ------------------------------------------------------------------------------------------------

// Lets another thread run.
void switch_point();
// Refuses an address that is no multiple of `bytes`, as hardware does.
void check_alignment(const void* address, size_t bytes);
// Throws if a kernel or primitive wrote outside a tensor.
void check_guards();
// Counts other work of the device: sets of memory, kernels of CUB.
void count_launches(int64_t launches);

void run(int64_t blocks, int64_t threads, size_t shared_bytes, const std::function<void()>& body);

}  // namespace tsr::emulated
