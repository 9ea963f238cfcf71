// The rows of a table on the CPU, wherever they lie, and how they are read.
#pragma once
#include <cmath>

#include "../embedding_shards.h"
#include "row_loops.h"

namespace tsr {

// Rows of one tensor, read as they are.
template <class T>
struct PlainRows {
  PlainRows(const Tensor& weight) : table(weight.const_data_ptr<T>()), dim(weight.size(1)) {}

  const T* row(int64_t r) const { return table + r * dim; }
  acc_t<T> scale(const T*) const { return 1; }

  const T* table;
  int64_t dim;
};

// Rows of shards laid end to end, clipped to max_norm unless that is negative.
template <class T>
class ShardRows {
 public:
  using A = acc_t<T>;

  // params must be contiguous and outlive this.
  ShardRows(const std::vector<Tensor>& params, double max_norm)
      : dim_(params[0].size(1)), max_norm_(static_cast<A>(max_norm)), clips_(max_norm >= 0) {
    for (const Tensor& shard : params) {
      if (shard.size(0) == 0) continue;
      const T* data = shard.const_data_ptr<T>();
      if (base_ == nullptr) base_ = data;
      const int64_t distance =
          static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(base_)) /
          static_cast<int64_t>(sizeof(T));
      // From row number times dim to the element, for the rows of this shard.
      shifts_.push_back(distance - rows_ * dim_);
      rows_ += shard.size(0);
      ends_.push_back(rows_);
    }
  }

  int64_t dim() const { return dim_; }
  int64_t rows() const { return rows_; }
  bool clips() const { return clips_; }
  // Where offsets count from.
  const T* base() const { return base_; }

  // In elements from base().
  int64_t offset(int64_t r) const {
    size_t shard = 0;
    while (r >= ends_[shard]) ++shard;  // shards are few
    return r * dim_ + shifts_[shard];
  }
  const T* row(int64_t r) const { return base_ + offset(r); }

  A scale(const T* x) const {
    if (!clips_) return 1;
    return clip_factor(dot_(x, x, dim_), max_norm_, [](A squares) { return std::sqrt(squares); });
  }

 private:
  int64_t dim_;
  A max_norm_;
  bool clips_;
  const T* base_ = nullptr;
  int64_t rows_ = 0;
  std::vector<int64_t> shifts_, ends_;
  decltype(DotLoop<T>::dot) dot_ = dot_loop<T>().dot;
};

inline std::vector<Tensor> as_contiguous(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  for (const Tensor& x : tensors) result.push_back(as_contiguous(x));
  return result;
}

}  // namespace tsr
