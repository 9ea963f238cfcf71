// A bag's sum of rows, each times its weight, and what it is divided by.
#pragma once
#include "pool_kernels.cuh"

namespace tsr {

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
    return divisor_of(kind, static_cast<A>(count), sums.value(0), sums.value(1));
  }
};

// An entry's weight.
template <class T>
struct WeightEntry {
  using A = acc_t<T>;
  A weight;
  bool is_nan;

  template <class View>
  __device__ void prepare(const View& p, int64_t j) {
    weight = p.weights == nullptr ? A(1) : static_cast<A>(p.weights[j]);
    is_nan = weight != weight;
  }
  template <class View>
  __device__ void load(const View&, const RowTile&, bool, int64_t, int64_t) {
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

    template <class View>
    __device__ void load(const View& p, const RowTile& tile, bool has_columns, int64_t index, int64_t j) {
      if (has_columns) row = p.template load_row<width>(index, tile);
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

  template <class View>
  __device__ void store(const View& p, int64_t bag, const RowTile& tile) const {
    store_quotient(p, bag, tile, sums, weights.divisor(p.divisor));
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

  template <class View>
  __device__ void store(const View& p, int64_t bag, const RowTile&) const {
    p.divisors[bag] = weights.divisor(p.divisor);
  }
};

}  // namespace tsr
