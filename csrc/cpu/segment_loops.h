// The loops of the segment reductions without indices and of their gradients, compiled per instruction set.
#pragma once
#include "../segment.h"

namespace tsr {

// Bag b holds the entries [starts[b], starts[b + 1]); entry e is row order[e] of data, or row e where order is null.
template <class T>
struct ReduceArguments {
  const T* data;  // [rows, dim]
  int64_t dim;
  int64_t first_column, last_column;  // only these are computed
  const int64_t* order;               // [entries] or null
  const int64_t* starts;              // [bags + 1]
  int64_t bags;
  acc_t<T> direction;        // order_of the reduction, for extremes
  const acc_t<T>* divisors;  // [bags] or null: of sums of floats
  T empty;                   // the result of a bag without entries
  T* out;                    // [bags, dim]
};

template <class T>
struct ReduceLoops {
  void (*sum)(const ReduceArguments<T>& arguments);
  void (*extreme)(const ReduceArguments<T>& arguments);
  void (*product)(const ReduceArguments<T>& arguments);
};

// T: floats, and the unsigned integers.
template <class T>
const ReduceLoops<T>& reduce_loops();

// The gradients of extreme and product: out has data's rows, of which those of bag b receive their part of grad[b].
template <class T>
struct ReduceBackwardArguments {
  const T* data;
  const T* grad;  // [bags, dim]
  int64_t dim;
  int64_t first_column, last_column;
  const int64_t* order;
  const int64_t* starts;
  int64_t bags;
  acc_t<T> direction;
  T* out;
};

template <class T>
struct ReduceBackwardLoops {
  void (*extreme)(const ReduceBackwardArguments<T>& arguments);
  void (*product)(const ReduceBackwardArguments<T>& arguments);
};

// T: floats.
template <class T>
const ReduceBackwardLoops<T>& reduce_backward_loops();

}  // namespace tsr
