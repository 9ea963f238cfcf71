// What the ways of finding unique values on the CPU share: scratch memory, page population, the result.
//
// Keys are handled as the unsigned type of their width: identity is all that matters. Positions and ids are `Pos`:
// 32 bits below kMaxShort elements, to halve the traffic, else 64.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "../abi.h"

namespace tsr {

// Leaves the top bit of a 32-bit position free for a mark.
constexpr int64_t kMaxShort = int64_t{1} << 30;
// Elements a thread must have before it is worth waking.
constexpr int64_t kUniqueGrain = 16384;

struct UniqueResult {
  Tensor values;
  Tensor inverse;
  std::optional<Tensor> counts;
};

// Uninitialised memory, released with the object. Allocated before parallel loops, whose bodies must not throw.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t n) : data_(new T[static_cast<size_t>(n)]) {}
  T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
};

// Maps the pages of a fresh output in one system call: half the time of faulting them in one by one. Only advice:
// where it is not understood, or fails, the pages come as they are touched.
inline void populate_pages(void* begin, int64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes)) / page * page;
  if (last > first) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_POPULATE_WRITE);
#else
  (void)begin;
  (void)bytes;
#endif
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// x cut into equal, contiguous chunks, one for each thread that is worth its while.
struct Chunks {
  int64_t n;
  int64_t count;
  int64_t length;
  Chunks(int64_t elements, int64_t wanted)
      : n(elements),
        count(std::max<int64_t>(1, std::min(wanted, ceil_div(elements, kUniqueGrain)))),
        length(ceil_div(elements, count)) {}
  int64_t begin(int64_t chunk) const { return std::min(n, chunk * length); }
  int64_t end(int64_t chunk) const { return begin(chunk + 1); }
};

}  // namespace tsr
