#include "pool_kernels.cuh"

namespace tsr {
namespace {

// What the divisors are made of.
template <class A>
struct Weights {
  Sums<A, 2> sums;  // of the weights and of their squares
  int64_t count = 0;

  // Returns whether a block of entries is complete.
  __device__ bool add(A weight) {
    sums.add(0, weight);
    sums.add(1, weight * weight);
    const bool completes = ++count % kSumBlock == 0;
    if (completes) sums.end_block();
    return completes;
  }
  __device__ void merge(const Weights& later) {
    sums.merge(later.sums);
    count += later.count;
  }
  __device__ A divisor(Divisor kind) const {
    return kind == Divisor::kOne       ? A(1)
           : kind == Divisor::kCount   ? static_cast<A>(count)
           : kind == Divisor::kWeights ? sums.value(0)
                                       : sqrt(sums.value(1));
  }
};

// An entry's weight.
template <class T>
struct WeightEntry {
  using A = acc_t<T>;
  A weight;
  bool is_nan;

  template <class I>
  __device__ void prepare(const PoolView<T, I>& p, int64_t j) {
    weight = p.weights == nullptr ? A(1) : static_cast<A>(p.weights[j]);
    is_nan = weight != weight;
  }
  template <class I>
  __device__ void load(const PoolView<T, I>&, const RowTile&, bool, int64_t, int64_t) {
    if (is_nan) weight = A(0);
  }
  __device__ bool is_bad() const { return is_nan; }
};

// A weighted sum of rows.
template <class T, int width_>
struct WeightedSum {
  using A = acc_t<T>;
  static constexpr int width = width_;

  struct Entry : WeightEntry<T> {
    Vector<T, width> row;

    template <class I>
    __device__ void load(const PoolView<T, I>& p, const RowTile& tile, bool has_columns, int64_t index, int64_t j) {
      if (has_columns) row = load_vector<T, width>(p.table + index * p.columns + tile.column);
      WeightEntry<T>::load(p, tile, has_columns, index, j);
    }
  };

  Sums<A, width> sums;
  Weights<A> weights;

  __device__ void add(const Entry& entry, int64_t) { add_scaled(entry.row, entry.weight, entry.weight); }

  __device__ void add_scaled(const Vector<T, width>& row, A scale, A weight) {
#pragma unroll
    for (int c = 0; c < width; ++c) sums.add(c, scale * static_cast<A>(row.at[c]));
    if (weights.add(weight)) sums.end_block();
  }

  __device__ void merge(const WeightedSum& later) {
    weights.merge(later.weights);
    sums.merge(later.sums);
  }

  template <class I>
  __device__ void store(const PoolView<T, I>& p, int64_t bag, const RowTile& tile) const {
    store_quotient(p, bag, tile, sums, weights.divisor(p.divisor));
  }
};

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

// The divisor alone.
template <class T>
struct DivisorOnly {
  using A = acc_t<T>;
  using Entry = WeightEntry<T>;
  static constexpr int width = 1;

  Weights<A> weights;

  __device__ void add(const Entry& entry, int64_t) { weights.add(entry.weight); }
  __device__ void merge(const DivisorOnly& later) { weights.merge(later.weights); }

  template <class I>
  __device__ void store(const PoolView<T, I>& p, int64_t bag, const RowTile&) const {
    p.divisors[bag] = weights.divisor(p.divisor);
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
    launch_pool<ShardedSum<T, width.value>>(call, view, pooling.entries);
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
