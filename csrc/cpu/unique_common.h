// What the ways of finding unique values on the CPU share: scratch memory, chunks, the result.
//
// Keys are handled as the unsigned type of their width: identity is all that matters. Positions and ids are `Pos`:
// 32 bits below kMaxShort elements, to halve the traffic, else 64.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>

#include "../abi.h"

namespace tsr {

// Leaves the top bit of a 32-bit position free for a mark.
constexpr int64_t kMaxShort = int64_t{1} << 30;
// Elements of a simple loop that are worth a thread.
constexpr int64_t kUniqueGrain = 32768;

// The operator (unique.cpp): unique of rows is that of their hashes.
std::tuple<Tensor, Tensor, Tensor> unique_with_counts_cpu(const Tensor& x);

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

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// x cut into equal, contiguous chunks.
struct Chunks {
  int64_t n;
  int64_t count;
  int64_t length;
  Chunks(int64_t elements, int64_t wanted)
      : n(elements), count(std::max<int64_t>(1, wanted)), length(ceil_div(elements, count)) {}
  int64_t begin(int64_t chunk) const { return std::min(n, chunk * length); }
  int64_t end(int64_t chunk) const { return begin(chunk + 1); }
};

}  // namespace tsr
