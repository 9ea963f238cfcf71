// The elementwise maximum of a bag's rows.
#pragma once
#include "pool_sum.cuh"

namespace tsr {

// The largest value of each column, and the entry that it came from.
template <class T, int width_>
struct Max {
  using A = acc_t<T>;
  using Entry = typename Sum<T, width_>::Entry;
  static constexpr int width = width_;

  A value[width] = {};
  int64_t winner[width];

  __device__ Max() {
#pragma unroll
    for (int c = 0; c < width; ++c) winner[c] = -1;
  }

  __device__ void offer(int c, A offered, int64_t j) {
    const bool is_nan = value[c] != value[c], offers_nan = offered != offered;
    if (winner[c] < 0 || (!is_nan && (offers_nan || offered > value[c]))) {
      value[c] = offered;
      winner[c] = j;
    }
  }

  __device__ void add(const Entry& entry, int64_t j) {
#pragma unroll
    for (int c = 0; c < width; ++c) offer(c, static_cast<A>(entry.row.at[c]), j);
  }

  __device__ void merge(const Max& later) {
#pragma unroll
    for (int c = 0; c < width; ++c) {
      if (later.winner[c] >= 0) offer(c, later.value[c], later.winner[c]);
    }
  }

  // argmax: written.
  template <class View>
  __device__ void store(const View& p, int64_t bag, const RowTile& tile) const {
    if (tile.column >= p.columns) return;
    Vector<T, width> result;
#pragma unroll
    for (int c = 0; c < width; ++c) result.at[c] = static_cast<T>(value[c]);
    p.store_row(bag, tile, result);
    p.store_winners(bag, tile, winner);
  }
};

}  // namespace tsr
