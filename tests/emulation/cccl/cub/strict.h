// Shared by the host's versions of CUB's primitives: they refuse what CUB's contracts forbid, and overwrite memory that
// CUB leaves undefined.
#pragma once
#include <thrust/iterator/transform_iterator.h>

#include <cuda/std/functional>

#include "../../emulation.h"

namespace cub {

// A range of memory that a call reads or writes; only iterators that are pointers have one.
struct Memory {
  const void* begin;
  size_t bytes;
};
template <class T>
Memory memory_of(T* begin, int64_t n) {
  return {begin, static_cast<size_t>(n) * sizeof(T)};
}
template <class Iterator>
Memory memory_of(const Iterator&, int64_t) {
  return {nullptr, 0};
}
template <class F, class Base>
Memory memory_of(const thrust::transform_iterator<F, Base>& iterator, int64_t n) {
  return memory_of(iterator.base(), n);
}

template <class... Parts>
[[noreturn]] void refuse(const char* primitive, const Parts&... parts) {
  throw std::logic_error(tsr::message("emulated CUB: ", primitive, ": ", parts...));
}

// A call of a primitive, in CUB's two phases: without scratch it answers how much it needs; with scratch it runs.
class Call {
 public:
  // More items need more scratch.
  Call(const char* name, void* scratch, size_t& bytes, int64_t n, size_t bytes_per_item)
      : name_(name), scratch_(scratch) {
    if (n < 0) refuse(name_, n, " items");
    const size_t needed = 256 + static_cast<size_t>(n / 32 + 1) * bytes_per_item;
    if (scratch == nullptr) {
      bytes = needed;
      return;
    }
    if (bytes < needed) refuse(name_, bytes, " bytes of temporary storage, ", needed, " are needed");
    if (reinterpret_cast<uintptr_t>(scratch) % 16 != 0) refuse(name_, "temporary storage that is not aligned");
    used_.push_back({scratch, needed});
    overwrite(used_.back());
  }

  bool asks_for_size() const { return scratch_ == nullptr; }

  // The memory that the call reads and writes besides its scratch; no two ranges may overlap.
  void uses(std::initializer_list<Memory> memory) {
    used_.insert(used_.end(), memory);
    std::sort(used_.begin(), used_.end(), [](const Memory& a, const Memory& b) { return a.begin < b.begin; });
    const Memory* last = nullptr;
    for (const Memory& next : used_) {
      if (next.bytes == 0) continue;
      if (last != nullptr && static_cast<const uint8_t*>(last->begin) + last->bytes > next.begin) {
        refuse(name_, "buffers overlap");
      }
      last = &next;
    }
  }

  static void overwrite(const Memory& memory) { std::memset(const_cast<void*>(memory.begin), 0xff, memory.bytes); }

  // launches: the number of CUB's launches, memory sets included.
  cudaError_t finish(int64_t launches) const {
    tsr::emulated::count_launches(launches);
    tsr::emulated::check_guards();
    return cudaSuccess;
  }

 private:
  const char* name_;
  const void* scratch_;
  std::vector<Memory> used_;
};

}  // namespace cub
