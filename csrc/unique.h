// unique: the distinct values of a vector, in the order of their first appearance.
//
// unique(x [N]) -> (values [U], inverse [N]) and unique_with_counts(x [N]) -> (values [U], inverse [N], counts [U]):
//   values[u] is the u-th distinct value of x in order of first appearance; values[inverse[i]] == x[i];
//   counts[u] = number of i with inverse[i] == u.
// * dtypes: every integer dtype (u)int8..64; inverse and counts are int64. x has rank 1. N == 0 gives empty results.
// * Not differentiable (integers). On CUDA, U costs one documented read-back.
// * Deterministic: the result is a function of x alone.
// Source: tf.unique, tf.unique_with_counts.
#pragma once
#include "abi.h"
#include "dispatch.h"

namespace tsr {

inline void check_unique(const char* op, const Tensor& x) {
  TSR_CHECK_VALUE(x.dim() == 1, op, ": x must have rank 1, got shape ", shape_text(x));
  dispatch_integer(x.scalar_type(), op, "x", [](auto) {});
}

}  // namespace tsr
