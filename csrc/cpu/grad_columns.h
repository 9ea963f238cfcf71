// Copies of the columns of grad that belong to lookups side by side with many others.
//
// There each row of a lookup is in a page of its own, and to look those up row by row in the order of a table's entries
// costs more than to copy them in theirs. A cache line holds the columns of several narrow lookups: they are copied
// together.
#pragma once
#include <cstring>
#include <vector>

#include "row_loops.h"

namespace tsr {

// Neighbouring lookups whose columns are copied together.
template <class T>
struct ColumnWindow {
  const T* grad;  // the first row of the first lookup
  int64_t stride, rows;
  int64_t width = 0;
  std::vector<int64_t> dims{};  // of the lookups, from left to right

  bool takes(const T* next, int64_t next_stride, int64_t next_rows, int64_t dim) const {
    return next == grad + width && next_stride == stride && next_rows == rows &&
           (width + dim) * static_cast<int64_t>(sizeof(T)) <= kSharedBytes && rows * (width + dim) <= kMostElements;
  }
  void add(int64_t dim) {
    dims.push_back(dim);
    width += dim;
  }

  static constexpr int64_t kSharedBytes = 64;        // of a row
  static constexpr int64_t kMostElements = 1 << 19;  // some second-level caches
};

// One thread's copy of a window, lookup after lookup.
template <class T>
class GradColumns {
 public:
  // Whether that pays for a lookup that a table has so many entries of.
  static bool pay(int64_t stride, int64_t rows, int64_t dim, int64_t entries) {
    return stride * static_cast<int64_t>(sizeof(T)) >= kLeastStride && dim < stride && entries >= rows &&
           rows * dim <= ColumnWindow<T>::kMostElements;
  }

  // The rows of the lookup that begins at `grad`, one after the other.
  const T* of(const ColumnWindow<T>& window, const T* grad) {
    if (copied_ != &window) copy(window);
    copied_ = &window;
    return columns_.data() + (grad - window.grad) * window.rows;
  }

 private:
  static constexpr int64_t kLeastStride = 512;  // bytes
  static constexpr int64_t kBlockRows = 32;     // their lines stay in the first-level cache for all lookups

  void copy(const ColumnWindow<T>& window) {
    if (room_ < window.rows * window.width) {
      room_ = window.rows * window.width;
      columns_ = Buffer<T>(room_);
    }
    for (int64_t first = 0, end; first < window.rows; first = end) {
      end = std::min(first + kBlockRows, window.rows);
      for (int64_t row = end; row < std::min(end + kBlockRows, window.rows); ++row) {
        fetch_row(window.grad + row * window.stride, window.width);
      }
      int64_t column = 0;
      for (const int64_t dim : window.dims) {
        const T* from = window.grad + first * window.stride + column;
        copy_rows(from, window.stride, end - first, dim, columns_.data() + column * window.rows + first * dim);
        column += dim;
      }
    }
  }

  static void copy_rows(const T* from, int64_t stride, int64_t rows, int64_t dim, T* to) {
    constexpr int64_t kChunk = 64 / sizeof(T);
    for (int64_t row = 0; row < rows; ++row, from += stride, to += dim) {
      int64_t d = 0;
      // Of a constant size: to call memmove takes longer than to copy so little.
      for (; d + kChunk <= dim; d += kChunk) std::memcpy(to + d, from + d, sizeof(T) * kChunk);
      for (; d < dim; ++d) to[d] = from[d];
    }
  }

  const ColumnWindow<T>* copied_ = nullptr;
  int64_t room_ = 0;
  Buffer<T> columns_;
};

}  // namespace tsr
