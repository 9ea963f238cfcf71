#include "pool_extremes.cuh"

namespace tsr {
namespace {

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

void pool_extremes(DeviceCall& call, const Pooling& pooling, Reduction reduction, int64_t* argmax) {
  dispatch_pooling(call, pooling, [&](auto value_tag, auto index_tag, auto width) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    PoolView<T, I> view = view_of<T, I>(call, pooling);
    view.reduction = reduction;
    view.argmax = argmax;
    launch_pool<Extreme<T, width.value>>(call, view, pooling.entries);
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
