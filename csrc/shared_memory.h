// Whether tensors share memory: what is written in place must lie apart from all else that a call writes and reads.
//
// A schema says what is written, by `Tensor(a!)`. The check_<op> of every such operator names its tensors to a
// CallMemory; tests/ops/test_shared_memory.py holds the two together.
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

  // A piece of memory without gaps.
  RowMemory(const void* data, int64_t bytes)
      : begin(reinterpret_cast<uintptr_t>(data)), end(begin + static_cast<uintptr_t>(bytes)), stride(0), width(bytes) {}

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

// The tensors of one call. There may be hundreds of tables: then only neighbours in memory are compared.
class CallMemory {
 public:
  void add_written(const Place& name, const Tensor& x) { add(name, x, true); }
  void add_read(const Place& name, const Tensor& x) { add(name, x, false); }
  void add_read(const Place& name, const std::optional<Tensor>& x) {
    if (x) add(name, *x, false);
  }
  void add_written(const char* argument, const std::vector<Tensor>& list) { add(argument, list, true); }
  void add_read(const char* argument, const std::vector<Tensor>& list) { add(argument, list, false); }

  // Is written once it has been resized: where that changes its shape, whoever has a part of its storage may lose it.
  void add_resized(const Place& name, const Tensor& x, const std::vector<int64_t>& sizes) {
    const auto present = x.sizes();
    if (std::equal(present.begin(), present.end(), sizes.begin(), sizes.end())) return add(name, x, true);
    if (const int64_t bytes = storage_bytes(x)) add(RowMemory(storage_data(x), bytes), name, true);
  }

  void check(const char* op) const {
    if (tensors_.size() <= kFew) {
      for (size_t i = 1; i < tensors_.size(); ++i) {
        for (size_t j = 0; j < i; ++j) check_pair(op, j, i);
      }
      return;
    }
    std::vector<std::pair<uintptr_t, size_t>> places;
    places.reserve(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) places.emplace_back(tensors_[i].memory.begin, i);
    std::sort(places.begin(), places.end());
    for (size_t p = 0; p < places.size(); ++p) {
      const uintptr_t end = tensors_[places[p].second].memory.end;
      for (size_t q = p + 1; q < places.size() && places[q].first < end; ++q) {
        check_pair(op, std::min(places[p].second, places[q].second), std::max(places[p].second, places[q].second));
      }
    }
  }

 private:
  static constexpr size_t kFew = 12;
  struct Entry {
    RowMemory memory;
    Place name;
    bool written;
  };

  void add(const char* argument, const std::vector<Tensor>& list, bool written) {
    if (list.size() > tensors_.capacity() - tensors_.size()) tensors_.reserve(2 * (tensors_.size() + list.size()));
    for (size_t k = 0; k < list.size(); ++k) add(Place{argument, k}, list[k], written);
  }

  void add(const Place& name, const Tensor& x, bool written) {
    if (x.numel() != 0) add(RowMemory(x), name, written);
  }

  void add(const RowMemory& memory, const Place& name, bool written) {
    if (tensors_.capacity() == 0) tensors_.reserve(kFew);
    tensors_.push_back({memory, name, written});
  }

  // Checks the tensors that were named as number i and, later, j.
  void check_pair(const char* op, size_t i, size_t j) const {
    const Entry &x = tensors_[i], &later = tensors_[j];
    if ((!x.written && !later.written) || !x.memory.shared_with(later.memory)) return;
    // What is read is named first, and of two that are written the later argument.
    const bool in_order = x.written;
    throw std::invalid_argument(
        message(op, ": ", (in_order ? later : x).name, " must not share memory with ", (in_order ? x : later).name));
  }

  std::vector<Entry> tensors_;
};

}  // namespace tsr
