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

template <class T, class I>
__device__ acc_t<T> load_weight(const PoolView<T, I>& p, int64_t index, int64_t j) {
  acc_t<T> weight = p.weights == nullptr ? acc_t<T>(1) : static_cast<acc_t<T>>(p.weights[j]);
  if (p.scales != nullptr) weight *= p.scales[index];
  return weight;
}

// NaN counts as zero.
template <class A>
__device__ A number_or_zero(A weight) {
  return weight == weight ? weight : A(0);
}

// A weighted sum of rows.
template <class T, int width_>
struct WeightedSum {
  using A = acc_t<T>;
  static constexpr int width = width_;

  struct Entry {
    Vector<T, width> row;
    A weight;

    template <class I>
    __device__ void load(const PoolView<T, I>& p, const RowTile& tile, bool has_columns, int64_t index, int64_t j) {
      if (has_columns) row = load_vector<T, width>(p.table + index * p.columns + tile.column);
      weight = load_weight(p, index, j);
    }
    __device__ bool is_bad() const { return weight != weight; }
  };

  A value[width] = {};
  Weights<A> weights;

  __device__ void add(const Entry& entry, int64_t) {
    const A weight = number_or_zero(entry.weight);
    weights.add(weight);
#pragma unroll
    for (int c = 0; c < width; ++c) value[c] += weight * static_cast<A>(entry.row.at[c]);
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

// The weights alone.
template <class T>
struct Reciprocal {
  using A = acc_t<T>;
  static constexpr int width = 1;

  struct Entry {
    A weight;

    template <class I>
    __device__ void load(const PoolView<T, I>& p, const RowTile&, bool, int64_t index, int64_t j) {
      weight = load_weight(p, index, j);
    }
    __device__ bool is_bad() const { return weight != weight; }
  };

  Weights<A> weights;

  __device__ void add(const Entry& entry, int64_t) { weights.add(number_or_zero(entry.weight)); }
  __device__ void merge(const Reciprocal& later) { weights.merge(later.weights); }

  template <class I>
  __device__ void store(const PoolView<T, I>& p, int64_t bag, const RowTile&) const {
    const A by = weights.divisor(p.divisor);
    p.reciprocals[bag] = by == A(0) ? A(0) : A(1) / by;
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

const void* pool_reciprocals(DeviceCall& call, const Pooling& pooling) {
  return dispatch_float(pooling.dtype, call.op(), "values", [&](auto value_tag) -> const void* {
    using T = typename decltype(value_tag)::type;
    acc_t<T>* const reciprocals = call.workspace<acc_t<T>>(pooling.bags);
    dispatch_index(pooling.index_dtype, call.op(), "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      PoolView<T, I> view = view_of<T, I>(call, pooling);
      view.columns = 0;  // one lane per bag
      view.reciprocals = reciprocals;
      launch_pool<Reciprocal<T>>(call, view, pooling.entries);
    });
    return reciprocals;
  });
}

}  // namespace tsr
