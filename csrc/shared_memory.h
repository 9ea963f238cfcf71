// Whether tensors share memory: what is written in place must lie apart from all else that a call writes and reads.
#pragma once
#include <algorithm>
#include <vector>

#include "abi.h"

namespace tsr {

// Prints as "weights[3]"; a tensor that is not one of a list, as "grad".
struct Place {
  static constexpr size_t kAlone = SIZE_MAX;
  const char* argument;
  size_t k = kAlone;
  friend std::ostream& operator<<(std::ostream& out, const Place& x) {
    out << x.argument;
    if (x.k != kAlone) out << '[' << x.k << ']';
    return out;
  }
};

// Where a tensor with elements has its memory, in bytes: each row within `width` bytes, the next one `stride` further.
// One row alone fits every stride.
struct RowMemory {
  uintptr_t begin, end;
  int64_t stride, width;

  explicit RowMemory(const Tensor& x) : begin(reinterpret_cast<uintptr_t>(x.data_ptr())), stride(0) {
    const auto sizes = x.sizes(), strides = x.strides();
    const int64_t element = static_cast<int64_t>(x.element_size());
    width = element;
    for (size_t d = 1; d < sizes.size(); ++d) width += (sizes[d] - 1) * strides[d] * element;
    if (!sizes.empty() && sizes[0] > 1) stride = strides[0] * element;
    end = begin + static_cast<uintptr_t>(width + (sizes.empty() ? 0 : sizes[0] - 1) * stride);
  }

  // Rows at one distance may lie side by side, as columns of one tensor do.
  bool shared_with(const RowMemory& other) const {
    if (end <= other.begin || other.end <= begin) return false;
    const int64_t distance = std::max(stride, other.stride);
    if (distance == 0 || (stride != other.stride && std::min(stride, other.stride) != 0)) return true;
    const int64_t apart = static_cast<int64_t>(other.begin - begin) % distance;
    const int64_t ahead = apart < 0 ? apart + distance : apart;
    return ahead < width || ahead + other.width > distance;
  }
};

inline bool share_memory(const Tensor& a, const Tensor& b) {
  return a.numel() != 0 && b.numel() != 0 && RowMemory(a).shared_with(RowMemory(b));
}

// The tensors of one call. There may be hundreds of tables: only neighbours in memory are compared.
class CallMemory {
 public:
  void add_written(const Place& name, const Tensor& x) { add(name, x, true); }
  void add_read(const Place& name, const Tensor& x) { add(name, x, false); }

  void check(const char* op) const {
    std::vector<std::pair<uintptr_t, size_t>> places;
    places.reserve(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) places.emplace_back(tensors_[i].memory.begin, i);
    std::sort(places.begin(), places.end());
    for (size_t p = 0; p < places.size(); ++p) {
      const Entry& x = tensors_[places[p].second];
      for (size_t q = p + 1; q < places.size() && places[q].first < x.memory.end; ++q) {
        const Entry& other = tensors_[places[q].second];
        if ((!x.written && !other.written) || !x.memory.shared_with(other.memory)) continue;
        // What is read is named first, and of two that are written the later argument.
        const bool in_order = x.written == other.written ? places[p].second > places[q].second : other.written;
        throw std::invalid_argument(message(op, ": ", (in_order ? x : other).name, " must not share memory with ",
                                            (in_order ? other : x).name));
      }
    }
  }

 private:
  struct Entry {
    RowMemory memory;
    Place name;
    bool written;
  };

  void add(const Place& name, const Tensor& x, bool written) {
    if (x.numel() != 0) tensors_.push_back({RowMemory(x), name, written});
  }

  std::vector<Entry> tensors_;
};

}  // namespace tsr
