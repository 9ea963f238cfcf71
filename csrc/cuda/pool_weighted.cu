#include "pool_kernels.cuh"

namespace tsr {
namespace {

// What the divisors are made of.
template <class A>
struct Weights {
  A sum = 0;
  A squares = 0;
  int64_t count = 0;

  __device__ void add(A weight) {
    sum += weight;
    squares += weight * weight;
    ++count;
  }
  __device__ void merge(const Weights& later) {
    sum += later.sum;
    squares += later.squares;
    count += later.count;
  }
  __device__ A divisor(Divisor kind) const {
    return kind == Divisor::kOne       ? A(1)
           : kind == Divisor::kCount   ? static_cast<A>(count)
           : kind == Divisor::kWeights ? sum
                                       : sqrt(squares);
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

  A value[width] = {};
  Weights<A> weights;

  __device__ void add(const Entry& entry, int64_t) {
    weights.add(entry.weight);
#pragma unroll
    for (int c = 0; c < width; ++c) value[c] += entry.weight * static_cast<A>(entry.row.at[c]);
  }

  __device__ void merge(const WeightedSum& later) {
    weights.merge(later.weights);
#pragma unroll
    for (int c = 0; c < width; ++c) value[c] += later.value[c];
  }

  template <class I>
  __device__ void store(const PoolView<T, I>& p, int64_t bag, const RowTile& tile) const {
    store_quotient(p, bag, tile, value, weights.divisor(p.divisor));
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
    this->weights.add(entry.weight);
    const A scale = entry.weight * entry.coefficient;
#pragma unroll
    for (int c = 0; c < width_; ++c) this->value[c] += scale * static_cast<A>(entry.row.at[c]);
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
