// sparse_segment: sparse segment reductions and their gradients.
//
// Forward, sparse_segment_reduce(data [V, ...], indices [N], segment_ids [N], num_segments, reduction) -> [S, ...]:
//   out[s] = scale(s) * sum of data[indices[i]] over the i with segment_ids[i] == s, added in the order of i
//   scale(s) = 1 (sum), 1 / n_s (mean), 1 / sqrt(n_s) (sqrt_n), n_s = number of those i
// * segment_ids must be sorted and >= 0; a segment without entries is zero. S = num_segments, or the last id + 1 when
//   it is None (0 if N == 0): on CUDA that is one read-back, refused while a graph is captured.
// * dtypes: float16, bfloat16 (accumulated in float32, rounded once), float32, float64; indices and segment_ids int32
//   or int64, independently. data has rank >= 1.
// * Errors: IndexError for an index outside [0, V); ValueError for unsorted or negative segment ids, for ids
//   >= num_segments, and for wrong shapes and dtypes.
//
// Gradient, sparse_segment_reduce_grad(grad [S, ...], indices, segment_ids, output_dim0) -> [output_dim0, ...]:
//   out[v] = sum of scale(segment_ids[i]) * grad[segment_ids[i]] over the i with indices[i] == v, in the order of i
// * segment_ids need not be sorted here; n_s counts entries of s. Rows without entries are zero (also when N == 0,
//   where TensorFlow 2.21 returns uninitialised memory).
// sparse_segment_reduce_grad_v2 returns only the rows that have entries: values [U, ...] and their ids, sorted, unique,
// in the dtype of indices.
// * Errors: IndexError for an index outside [0, output_dim0) or a segment id outside [0, S).
// The _out forms write into given tensors, resized as torch's `out=` does (memory is kept where it suffices). They
// share no memory with what is read, and no storage where they are resized.
//
// Determinism: every output row is computed by one thread in the order above: the same bits on every run, for every
// number of threads and every instruction set. On CUDA too the bits are the same on every run; there the entries of a
// row are added in pieces of 128, and then the pieces in their order.
// Precision: a float32 sum of n terms is within 2^-23 * sqrt(n) * sum|terms| of the exact one, also where all terms are
// equal and err alike. For that it is taken in blocks of 16 terms, parts of some blocks (16 on the CPU, 8 on CUDA: a
// piece), and the parts are added in float64. Up to 16 terms are added one by one; so are those of float64.
// Source: tf.sparse.segment_{sum,mean,sqrt_n}; SparseSegment*Grad and SparseSegment*GradV2.
#pragma once
#include "checks.h"
#include "shared_memory.h"

namespace tsr {

// What forward and gradients share: a floating tensor of rank >= 1 and two index vectors of one length.
inline void check_segment_inputs(const char* op, const char* values_name, const Tensor& values, const Tensor& indices,
                                 const Tensor& segment_ids) {
  check_float_dtype(op, values_name, values);
  TSR_CHECK_VALUE(values.dim() >= 1, op, ": ", values_name, " must have rank >= 1, got a scalar");
  check_vector(op, "indices", indices);
  check_vector(op, "segment_ids", segment_ids);
  check_index_dtype(op, "indices", indices);
  check_index_dtype(op, "segment_ids", segment_ids);
  TSR_CHECK_VALUE(indices.size(0) == segment_ids.size(0), op, ": segment_ids must have the length of indices, ",
                  indices.size(0), ", got ", segment_ids.size(0));
  check_same_device(op, "indices", indices, values_name, values);
  check_same_device(op, "segment_ids", segment_ids, values_name, values);
}

inline Reduction check_sparse_segment_reduce(const Tensor& data, const Tensor& indices, const Tensor& segment_ids,
                                             std::optional<int64_t> num_segments, int64_t reduction) {
  const char* op = "sparse_segment_reduce";
  check_segment_inputs(op, "data", data, indices, segment_ids);
  if (num_segments) check_count(op, "num_segments", *num_segments);
  return check_reduction(op, reduction, /*weighted=*/true);
}

inline Reduction check_sparse_segment_reduce_grad(const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                                                  int64_t output_dim0, int64_t reduction,
                                                  const char* argument = "output_dim0") {
  const char* op = "sparse_segment_reduce_grad";
  check_segment_inputs(op, "grad", grad, indices, segment_ids);
  check_count(op, argument, output_dim0);
  return check_reduction(op, reduction, /*weighted=*/true);
}

// The tensors of an _out form: same dtype and device as what the functional form returns.
inline void check_out(const char* op, const char* argument, const Tensor& out, const char* like_name,
                      const Tensor& like) {
  TSR_CHECK_VALUE(out.scalar_type() == like.scalar_type(), op, ": ", argument, " must have the dtype of ", like_name,
                  ", ", dtype_name(like.scalar_type()), ", got ", dtype_name(out.scalar_type()));
  TSR_CHECK_VALUE(out.is_contiguous(), op, ": ", argument, " must be contiguous");
  check_same_device(op, argument, out, like_name, like);
}

// What the _out forms read, for the outputs to lie apart from.
inline CallMemory segment_gradient_memory(const Tensor& grad, const Tensor& indices, const Tensor& segment_ids) {
  CallMemory memory;
  memory.add_read(Place{"grad"}, grad);
  memory.add_read(Place{"indices"}, indices);
  memory.add_read(Place{"segment_ids"}, segment_ids);
  return memory;
}

inline void check_dense_out(const char* op, const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                            const Tensor& out, const std::vector<int64_t>& shape) {
  check_out(op, "out", out, "grad", grad);
  CallMemory memory = segment_gradient_memory(grad, indices, segment_ids);
  memory.add_resized(Place{"out"}, out, shape);
  memory.check(op);
}

inline void check_compact_out(const char* op, const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                              const Tensor& values, const Tensor& rows) {
  check_out(op, "values", values, "grad", grad);
  check_out(op, "rows", rows, "indices", indices);
  CallMemory memory = segment_gradient_memory(grad, indices, segment_ids);
  memory.add_written(Place{"values"}, values);
  memory.add_written(Place{"rows"}, rows);
  memory.check(op);
}

// Gives the outputs, which have been checked, their shapes, now that the rows are known that have entries.
inline void resize_compact_out(const char* op, const Tensor& grad, const Tensor& indices, const Tensor& segment_ids,
                               const Tensor& values, const Tensor& rows, int64_t count) {
  const std::vector<int64_t> shape = shape_with_rows(grad, count);
  CallMemory memory = segment_gradient_memory(grad, indices, segment_ids);
  memory.add_resized(Place{"values"}, values, shape);
  memory.add_resized(Place{"rows"}, rows, {count});
  memory.check(op);
  resize_(values, shape);
  resize_(rows, {count});
}

}  // namespace tsr
