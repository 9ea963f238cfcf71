// What the gradients with respect to per_sample_weights are made of.
#pragma once
#include "../checks.h"
#include "table_shards.cuh"

namespace tsr {

// <grad[b], x>; where there are divisors, <grad[b], output[b]>; where rows are clipped, <x, x>.
template <class A>
struct Products {
  A with_row = 0;
  A with_output = 0;
  A squares = 0;
};

// What one of the team's lanes adds to the products: its own columns of the bag's rows of grad and output (null: there
// are no divisors) and of x. row(c) gives columns [c, c + width) of x.
template <int width, bool kSquares, class T, class Row>
__device__ Products<acc_t<T>> lane_products(const T* grad, const T* output, int64_t columns, bool aligned, int lane,
                                            int lanes, const Row& row) {
  using A = acc_t<T>;
  Products<A> products;
  for (int64_t c = int64_t{lane} * width; c < columns; c += int64_t{lanes} * width) {
    const Vector<T, width> g = load_columns<T, width>(grad + c, aligned);
    const Vector<T, width> x = row(c);
    Vector<T, width> y{};
    if (output != nullptr) y = load_columns<T, width>(output + c, aligned);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      products.with_row += static_cast<A>(g.at[k]) * static_cast<A>(x.at[k]);
      products.with_output += static_cast<A>(g.at[k]) * static_cast<A>(y.at[k]);
      if constexpr (kSquares) products.squares += static_cast<A>(x.at[k]) * static_cast<A>(x.at[k]);
    }
  }
  return products;
}

}  // namespace tsr
