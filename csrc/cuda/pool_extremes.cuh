// The elementwise maximum of a bag's rows, or the minimum.
#pragma once
#include "pool_sum.cuh"

namespace tsr {

// The largest value of each column, and the entry that it came from. Values are negated where the smallest is wanted.
template <class T, int width_>
struct Extreme {
  using A = acc_t<T>;
  static constexpr int width = width_;

  struct Entry : Sum<T, width_>::Entry {
    bool negated;

    template <class View>
    __device__ void prepare(const View& p, int64_t) {
      negated = p.reduction == Reduction::kMin;
    }
  };

  A value[width] = {};
  int64_t winner[width];

  __device__ Extreme() {
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
    for (int c = 0; c < width; ++c) {
      const A x = static_cast<A>(entry.row.at[c]);
      offer(c, entry.negated ? -x : x, j);
    }
  }

  __device__ void merge(const Extreme& later) {
#pragma unroll
    for (int c = 0; c < width; ++c) {
      if (later.winner[c] >= 0) offer(c, later.value[c], later.winner[c]);
    }
  }

  // argmax: written.
  template <class View>
  __device__ void store(const View& p, int64_t bag, const RowTile& tile) const {
    if (tile.column >= p.columns) return;
    p.store_row(bag, tile, result(p));
    p.store_winners(bag, tile, winner);
  }

  // Zero without entries.
  template <class View>
  __device__ Vector<T, width> result(const View& p) const {
    const bool negated = p.reduction == Reduction::kMin;
    Vector<T, width> row;
#pragma unroll
    for (int c = 0; c < width; ++c) row.at[c] = static_cast<T>(negated && winner[c] >= 0 ? -value[c] : value[c]);
    return row;
  }
};

}  // namespace tsr
