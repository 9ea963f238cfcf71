#include "pool_weighted.cuh"

namespace tsr {
namespace {

// A weighted sum of the rows of shards, each also times a coefficient that is no weight.
template <class T, int width_>
struct ShardedSum : WeightedSum<T, width_> {
  using A = acc_t<T>;

  struct Entry : WeightEntry<T> {
    Vector<T, width_> row;
    A coefficient;

    template <class I>
    __device__ void load(const PoolView<T, I>& p, const RowTile& tile, bool has_columns, int64_t index, int64_t j) {
      if (has_columns) row = load_vector<T, width_>(p.shards.template row<T>(index, p.columns) + tile.column);
      WeightEntry<T>::load(p, tile, has_columns, index, j);
      coefficient = p.coefficients == nullptr ? A(1) : p.coefficients[j];
    }
  };

  __device__ void add(const Entry& entry, int64_t) {
    this->add_scaled(entry.row, entry.weight * entry.coefficient, entry.weight);
  }
};

}  // namespace

void pool_weighted_rows(DeviceCall& call, const Pooling& pooling) {
  dispatch_pooling(call, pooling, [&](auto value_tag, auto index_tag, auto width) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    launch_pool<WeightedSum<T, width.value>>(call, view_of<T, I>(call, pooling), pooling.entries);
  });
}

void pool_sharded_rows(DeviceCall& call, const Pooling& pooling, const ShardedTable& shards) {
  Pooling aligned = pooling;
  aligned.table = shards.alignment;
  dispatch_pooling(call, aligned, [&](auto value_tag, auto index_tag, auto width) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    PoolView<T, I> view = view_of<T, I>(call, pooling);
    view.shards = shards;
    launch_pool<ShardedSum<T, width.value>, WeightedSum<T, width.value>>(call, view, pooling.entries);
  });
}

const void* pool_divisors(DeviceCall& call, const Pooling& pooling) {
  return dispatch_float(pooling.dtype, call.op(), "values", [&](auto value_tag) -> const void* {
    using T = typename decltype(value_tag)::type;
    acc_t<T>* const divisors = call.workspace<acc_t<T>>(pooling.bags);
    dispatch_index(pooling.index_dtype, call.op(), "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      PoolView<T, I> view = view_of<T, I>(call, pooling);
      view.columns = 0;  // one lane per bag
      view.divisors = divisors;
      launch_pool<DivisorOnly<T>>(call, view, pooling.entries);
    });
    return divisors;
  });
}

}  // namespace tsr
