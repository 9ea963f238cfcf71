// embedding: table lookups, pooled per bag or one per id, and their gradients.
//
// embedding(weight [V, D], indices [...]) -> [..., D]: out[i] = weight[indices[i]].
// embedding_bag(weight [V, D], indices [N], offsets [B + 1], per_sample_weights [N]?, mode) -> (output [B, D], argmax):
//   bag b holds the i in [offsets[b], offsets[b + 1]) whose index is not padding_idx, each with w_i (1 without
//   weights). With x_i = weight[indices[i]], added in the order of i, the result of a bag is
//     sum:   sum w_i x_i
//     mean:  sum w_i x_i / sum w_i
//     sqrtn: sum w_i x_i / sqrt(sum w_i^2)
//     max:   elementwise maximum of x_i (no weights)
//     min:   elementwise minimum of x_i (no weights)
//   A bag without entries, and a zero denominator, give zero (TensorFlow's div_no_nan). max and min: the first of equal
//   values wins, a NaN wins over everything; argmax [B, D] int64 holds the winning position i, or -1 for an empty bag.
//   In the other modes argmax is empty, [0].
// * offsets are int64 or int32, non-decreasing, offsets[0] == 0, offsets[B] == N. Without include_last_offset they are
//   [B], and N follows. padding_idx < 0 means none; V, which is no row, is allowed too: then index V, which is otherwise
//   an error, marks entries that are left out.
// * dtypes: weight float16, bfloat16 (accumulated in float32, rounded once), float32, float64; indices int32 or int64;
//   per_sample_weights have the dtype of weight.
// * Errors: IndexError for an index outside [0, V); ValueError for bad offsets, shapes, dtypes, and NaN weights (also
//   of entries that do not count). The gradient with respect to weight relies on the lookup's check of the weights: on
//   CUDA it reports a NaN too, and counts it as zero; on CPU it does not look for one again.
//
// Gradients with respect to weight, from grad [B, D] (or [N, D] when offsets is None: each id its own bag):
//   row v receives the sum over its entries i, in the order of i, of c_i * grad[bag(i)], c_i = dout/dx_i of the
//   formulas above (max and min: grad[bag(i), d] where argmax[bag(i), d] == i). scale_grad_by_freq divides by the
//   number of entries of v. The row padding_idx receives nothing. embedding_dense_backward -> [num_embeddings, D];
//   embedding_sparse_backward -> (values [U, D], rows [U] int64, sorted and unique, only rows that have entries);
//   embedding_coo_backward -> these as a coalesced COO tensor [num_embeddings, D]. No [N, D] temporary in any.
// Gradient with respect to per_sample_weights, embedding_weights_backward -> [N] (mode sum, mean or sqrtn):
//   sum:   <grad[b], x_i>
//   mean:  <grad[b], x_i - output[b]> / sum w
//   sqrtn: (<grad[b], x_i> - <grad[b], output[b]> w_i / q) / q  with q = sqrt(sum w^2)
//   Zero where the denominator is zero and for padding.
//
// Determinism and precision of sums: as in sparse_segment.h.
// Source: torch.nn.functional.embedding and embedding_bag; tf.nn.embedding_lookup_sparse for the weighted modes.
#pragma once
#include "abi.h"
#include "checks.h"
#include "dispatch.h"

namespace tsr {

inline void check_embedding_weight(const char* op, const Tensor& weight) {
  check_float_dtype(op, "weight", weight);
  TSR_CHECK_VALUE(weight.dim() == 2, op, ": weight must have rank 2, got shape ", shape_text(weight));
}

inline void check_padding_idx(const char* op, int64_t padding_idx, int64_t num_embeddings) {
  TSR_CHECK_VALUE(padding_idx < num_embeddings, op, ": padding_idx must be < ", num_embeddings, ", got ", padding_idx);
}

// Of bags, padding_idx may also be num_embeddings: no row, but an index for entries that are left out.
inline void check_bag_padding(const char* op, int64_t padding_idx, int64_t num_embeddings) {
  TSR_CHECK_VALUE(padding_idx <= num_embeddings, op, ": padding_idx must be <= ", num_embeddings, ", got ",
                  padding_idx);
}

// Indices of bags must be below this.
inline int64_t index_bound(int64_t num_embeddings, int64_t padding_idx) {
  return num_embeddings + (padding_idx == num_embeddings ? 1 : 0);
}

inline void check_embedding(const Tensor& weight, const Tensor& indices, int64_t padding_idx) {
  const char* op = "embedding";
  check_embedding_weight(op, weight);
  check_index_dtype(op, "indices", indices);
  check_padding_idx(op, padding_idx, weight.size(0));
  check_same_device(op, "indices", indices, "weight", weight);
}

// The bags between offsets.
inline int64_t bag_count(const Tensor& offsets, bool include_last_offset) {
  return offsets.size(0) - (include_last_offset ? 1 : 0);
}

// A table's gradient as a COO tensor; torch counts the elements of the table that it stands for. `argument`, which says
// how many rows the table has, is a name, or anything else that prints as one.
template <class Name>
Tensor coo_gradient(const char* op, const Name& argument, const Tensor& values, const Tensor& rows,
                    int64_t num_embeddings) {
  const int64_t dim = values.size(1);
  int64_t elements = 0;
  TSR_CHECK_VALUE(!__builtin_mul_overflow(num_embeddings, dim, &elements), op, ": ", argument,
                  " must be such that the table has less than 2^63 elements, got ", num_embeddings, " rows of ", dim);
  return coalesced_rows(values, rows, {num_embeddings, dim});
}

// Indices of rank 1, offsets of rank 1 with at least one element, the last, weights of the values' dtype.
inline void check_bags(const char* op, const char* values_name, const Tensor& values, const Tensor& indices,
                       const std::optional<Tensor>& offsets, const std::optional<Tensor>& per_sample_weights,
                       bool include_last_offset = true) {
  check_vector(op, "indices", indices);
  check_index_dtype(op, "indices", indices);
  check_same_device(op, "indices", indices, values_name, values);
  if (offsets) {
    check_vector(op, "offsets", *offsets);
    check_index_dtype(op, "offsets", *offsets);
    TSR_CHECK_VALUE(bag_count(*offsets, include_last_offset) >= 0, op,
                    ": offsets must have one element more than there are bags, got none");
    check_same_device(op, "offsets", *offsets, values_name, values);
  }
  if (per_sample_weights) {
    check_vector(op, "per_sample_weights", *per_sample_weights);
    TSR_CHECK_VALUE(per_sample_weights->size(0) == indices.size(0), op,
                    ": per_sample_weights must have the length of indices, ", indices.size(0), ", got ",
                    per_sample_weights->size(0));
    TSR_CHECK_VALUE(per_sample_weights->scalar_type() == values.scalar_type(), op,
                    ": per_sample_weights must have the dtype of ", values_name, ", ", dtype_name(values.scalar_type()),
                    ", got ", dtype_name(per_sample_weights->scalar_type()));
    check_same_device(op, "per_sample_weights", *per_sample_weights, values_name, values);
  }
}

inline Reduction check_embedding_bag(const Tensor& weight, const Tensor& indices, const Tensor& offsets,
                                     const std::optional<Tensor>& per_sample_weights, int64_t mode, int64_t padding_idx,
                                     bool include_last_offset) {
  const char* op = "embedding_bag";
  check_embedding_weight(op, weight);
  check_bags(op, "weight", weight, indices, offsets, per_sample_weights, include_last_offset);
  check_bag_padding(op, padding_idx, weight.size(0));
  const Reduction reduction = check_reduction(op, mode, /*weighted=*/false);
  TSR_CHECK_VALUE(!(per_sample_weights && is_extreme(reduction)), op, ": per_sample_weights must be None in mode ",
                  extreme_word(reduction));
  return reduction;
}

inline Reduction check_embedding_backward(const Tensor& grad, const Tensor& indices,
                                          const std::optional<Tensor>& offsets,
                                          const std::optional<Tensor>& per_sample_weights,
                                          const std::optional<Tensor>& argmax, int64_t num_embeddings, int64_t mode,
                                          int64_t padding_idx, bool include_last_offset) {
  const char* op = "embedding_backward";
  check_float_dtype(op, "grad", grad);
  TSR_CHECK_VALUE(grad.dim() == 2, op, ": grad must have rank 2, got shape ", shape_text(grad));
  check_bags(op, "grad", grad, indices, offsets, per_sample_weights, include_last_offset);
  const int64_t bags = offsets ? bag_count(*offsets, include_last_offset) : indices.size(0);
  TSR_CHECK_VALUE(grad.size(0) == bags, op, ": grad must have one row per bag, ", bags, ", got ", grad.size(0));
  check_count(op, "num_embeddings", num_embeddings);
  check_bag_padding(op, padding_idx, num_embeddings);
  const Reduction reduction = check_reduction(op, mode, /*weighted=*/false);
  if (is_extreme(reduction)) {
    TSR_CHECK_VALUE(offsets && argmax && !per_sample_weights, op, ": mode ", extreme_word(reduction),
                    " needs offsets and argmax, and takes no per_sample_weights");
    TSR_CHECK_VALUE(argmax->dim() == 2 && argmax->size(0) == grad.size(0) && argmax->size(1) == grad.size(1) &&
                        argmax->scalar_type() == ScalarType::Long,
                    op, ": argmax must be int64 of grad's shape ", shape_text(grad), ", got ", shape_text(*argmax));
    check_same_device(op, "argmax", *argmax, "grad", grad);
  } else if (!offsets) {
    TSR_CHECK_VALUE(!per_sample_weights && reduction == Reduction::kSum, op,
                    ": without offsets, mode must be sum and per_sample_weights None");
  }
  return reduction;
}

// weight: the table, or one of its shards; it has num_embeddings rows in all.
inline Reduction check_pooled_weights_backward(const char* op, const Tensor& grad, const Tensor& weight,
                                               int64_t num_embeddings, const Tensor& indices, const Tensor& offsets,
                                               const Tensor& per_sample_weights, const Tensor& output, int64_t mode,
                                               int64_t padding_idx) {
  check_bags(op, "weight", weight, indices, offsets, per_sample_weights);
  check_bag_padding(op, padding_idx, num_embeddings);
  for (const Tensor* x : {&grad, &output}) {
    TSR_CHECK_VALUE(x->dim() == 2 && x->size(0) == offsets.size(0) - 1 && x->size(1) == weight.size(1) &&
                        x->scalar_type() == weight.scalar_type(),
                    op, ": grad and output must have shape [", offsets.size(0) - 1, ", ", weight.size(1),
                    "] and the dtype of weight, got ", shape_text(*x));
    check_same_device(op, "grad and output", *x, "weight", weight);
  }
  return check_reduction(op, mode, /*weighted=*/true);
}

inline Reduction check_embedding_weights_backward(const Tensor& grad, const Tensor& weight, const Tensor& indices,
                                                  const Tensor& offsets, const Tensor& per_sample_weights,
                                                  const Tensor& output, int64_t mode, int64_t padding_idx) {
  const char* op = "embedding_weights_backward";
  check_embedding_weight(op, weight);
  return check_pooled_weights_backward(op, grad, weight, weight.size(0), indices, offsets, per_sample_weights, output,
                                       mode, padding_idx);
}

}  // namespace tsr
