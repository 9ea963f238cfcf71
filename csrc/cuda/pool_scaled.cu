#include "pool_sum.cuh"

namespace tsr {
namespace {

// A sum of rows, each times a number that is the entry's or the row's.
template <class T, int width_>
struct ScaledSum : Sum<T, width_> {
  using A = acc_t<T>;
  using Row = typename Sum<T, width_>::Entry;

  struct Entry : Row {
    A scale;

    template <class I>
    __device__ void load(const PoolView<T, I>& p, const RowTile& tile, bool has_columns, int64_t index, int64_t j) {
      Row::load(p, tile, has_columns, index, j);
      scale = p.coefficients != nullptr ? p.coefficients[j] : p.scales[index];
    }
  };

  __device__ void add(const Entry& entry, int64_t) {
#pragma unroll
    for (int c = 0; c < width_; ++c) this->sums.add(c, entry.scale * static_cast<A>(entry.row.at[c]));
    this->count_entry();
  }
};

}  // namespace

void pool_scaled_rows(DeviceCall& call, const Pooling& pooling) {
  dispatch_pooling(call, pooling, [&](auto value_tag, auto index_tag, auto width) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    launch_pool<ScaledSum<T, width.value>>(call, view_of<T, I>(call, pooling), pooling.entries);
  });
}

}  // namespace tsr
