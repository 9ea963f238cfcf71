// unique: the distinct values of a vector, or rows of a matrix, in the order of their first appearance.
//
// unique(x [N]) -> (values [U], inverse [N]) and unique_with_counts(x [N]) -> (values [U], inverse [N], counts [U]):
//   values[u] is the u-th distinct value of x in order of first appearance; values[inverse[i]] == x[i];
//   counts[u] = number of i with inverse[i] == u.
// * dtypes: every integer dtype (u)int8..64; inverse and counts are int64. x has rank 1. N == 0 gives empty results.
// * Not differentiable (integers). On CUDA, U costs one documented read-back.
// * Deterministic: the result is a function of x alone.
// * CPU memory beyond the outputs, P = 4 bytes below 2^30 elements and 8 above: for keys in a narrow range (see
//   cpu/unique.cpp) at most 7 P N, in practice one table of P bytes per possible value and thread; otherwise (P + 2) N,
//   P N more with counts, and one hash table of P times two to four slots per key of the largest of up to 1024
//   partitions and thread. Time is linear in N; keys made to collide in the hash table cost a sort, N log N.
//
// unique_rows(x [N, ...]) -> (firsts [U], inverse [N], counts [U]), all int64: the same of the rows x[i], which are
// equal if all their elements are; firsts[u] is the position of the u-th distinct row's first appearance, ascending.
// * dtypes: every integer dtype. x has rank 1 or more. Rows without elements are all equal.
// * On CUDA, U costs one documented read-back. CPU memory beyond the outputs: that of unique for N 8-byte keys, and 16
//   bytes per row. Time is linear in the elements; rows made to collide in 64-bit hashes cost a sort.
// Source: tf.unique, tf.unique_with_counts, tf.raw_ops.UniqueV2, tf.raw_ops.UniqueWithCountsV2.
#pragma once
#include "abi.h"
#include "dispatch.h"

namespace tsr {

inline void check_unique(const char* op, const Tensor& x) {
  TSR_CHECK_VALUE(x.dim() == 1, op, ": x must have rank 1, got shape ", shape_text(x));
  dispatch_integer(x.scalar_type(), op, "x", [](auto) {});
}

inline void check_unique_rows(const Tensor& x) {
  const char* op = "unique_rows";
  TSR_CHECK_VALUE(x.dim() >= 1, op, ": x must have rank 1 or more, got a scalar");
  dispatch_integer(x.scalar_type(), op, "x", [](auto) {});
}

}  // namespace tsr
