#include "pool_sum.cuh"

namespace tsr {
namespace {

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
  template <class I>
  __device__ void store(const PoolView<T, I>& p, int64_t bag, const RowTile& tile) const {
    if (tile.column >= p.columns) return;
    const int64_t at = bag * p.columns + tile.column;
    Vector<T, width> result;
#pragma unroll
    for (int c = 0; c < width; ++c) {
      result.at[c] = static_cast<T>(value[c]);
      p.argmax[at + c] = winner[c];
    }
    store_vector(p.out + at, result);
  }
};

// A sum of what entries won: of a row of gradients, the columns whose winner is the entry's position.
template <class T, int width_>
struct WonSum : Sum<T, width_> {
  using Row = typename Sum<T, width_>::Entry;

  struct Entry : Row {
    template <class I>
    __device__ void load(const PoolView<T, I>& p, const RowTile& tile, bool has_columns, int64_t index, int64_t j) {
      Row::load(p, tile, has_columns, index, j);
      if (!has_columns) return;
      const int64_t* const winners = p.winners + index * p.columns + tile.column;
#pragma unroll
      for (int c = 0; c < width_; ++c) {
        if (winners[c] != p.positions[j]) this->row.at[c] = T(0);
      }
    }
  };
};

}  // namespace

void pool_max(DeviceCall& call, const Pooling& pooling, int64_t* argmax) {
  dispatch_pooling(call, pooling, [&](auto value_tag, auto index_tag, auto width) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    PoolView<T, I> view = view_of<T, I>(call, pooling);
    view.argmax = argmax;
    launch_pool<Max<T, width.value>>(call, view, pooling.entries);
  });
}

void pool_won_rows(DeviceCall& call, const Pooling& pooling, const int64_t* winners, const int64_t* positions) {
  dispatch_pooling(call, pooling, [&](auto value_tag, auto index_tag, auto width) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    PoolView<T, I> view = view_of<T, I>(call, pooling);
    view.winners = winners;
    view.positions = positions;
    launch_pool<WonSum<T, width.value>>(call, view, pooling.entries);
  });
}

}  // namespace tsr
