// A bag's sum of rows, each with weight 1.
#pragma once
#include "pool_kernels.cuh"

namespace tsr {

template <class T, int width_>
struct Sum {
  using A = acc_t<T>;
  static constexpr int width = width_;

  struct Entry {
    Vector<T, width> row;

    template <class View>
    __device__ void prepare(const View&, int64_t) {}
    template <class View>
    __device__ void load(const View& p, const RowTile& tile, bool has_columns, int64_t index, int64_t) {
      if (has_columns) row = p.template load_row<width>(index, tile);
    }
    __device__ bool is_bad() const { return false; }
  };

  Sums<A, width> sums;
  int64_t count = 0;

  __device__ void add(const Entry& entry, int64_t) {
#pragma unroll
    for (int c = 0; c < width; ++c) sums.add(c, static_cast<A>(entry.row.at[c]));
    count_entry();
  }

  __device__ void count_entry() {
    if (++count % kSumBlock == 0) sums.end_block();
  }

  __device__ void merge(const Sum& later) {
    count += later.count;
    sums.merge(later.sums);
  }

  // Without weights each entry weighs 1.
  template <class View>
  __device__ void store(const View& p, int64_t bag, const RowTile& tile) const {
    const A n = static_cast<A>(count);
    store_quotient(p, bag, tile, sums, divisor_of(p.divisor, n, n, n));
  }
};

template <>
inline constexpr bool kFourBlocks<Sum<float, 4>, int64_t> = true;
template <>
inline constexpr bool kFourBlocks<Sum<double, 2>, int64_t> = true;

}  // namespace tsr
