// embedding: lookups in a table that is split into shards, or whose rows are brought down to a norm as they are read.
//
// params: one or more tensors [V_s, D], the shards of a table of V = sum V_s rows laid end to end: row r of the table
// is row r - V_0 - ... of the shard it falls into (embedding_ids.h turns ids into such rows). No copy of them is made.
//
// embedding_bag_shards(params, indices [N], offsets [B + 1]?, per_sample_weights [N]?, mode, padding_idx, max_norm)
//   -> [B, D]: embedding_bag (embedding.h; modes sum, mean, sqrtn) where x_i is row indices[i] of the table, times
//   clip(x_i) = max_norm / max(||x_i||, max_norm). The clip changes neither the denominators nor the table. A row's
//   squares are added in the accumulator's dtype. max_norm < 0: no clip. Offsets None: each index its own bag (mode
//   sum, no weights).
// * max_norm 0 turns rows into zeros, and a row of zeros into NaN: TensorFlow's formula. ||x|| that overflows gives 0.
// * padding_idx < 0: none. padding_idx == V, which is no row, is allowed (also in embedding.h): entries to leave out.
// * Errors: as embedding_bag; also ValueError for no params, shards that differ in dtype, columns or device, and for a
//   max_norm that is NaN.
//
// embedding_bag_shards_weights_backward(grad [B, D], params, indices, offsets, per_sample_weights, output [B, D], mode,
//   padding_idx, max_norm) -> [N]: embedding_weights_backward with the clipped x_i.
//
// Gradient with respect to params: embedding_dense_backward or embedding_sparse_backward of grad, on the rows of the
// table laid end to end (half types with a clip: of grad in float32), and then, with a max_norm,
// clip_rows_backward(grad [U, D], params, rows [U] int64?, max_norm) -> [U, D], dtype of params: row u of grad belongs
//   to row rows[u] of the table (None: to row u, U = V). With x that row, n = ||x||, g = grad[u]:
//   n < max_norm: g;  else: (max_norm / n) (g - x <x, g> / n^2);  where g is all zero: 0.
// * grad has the accumulator's dtype: float32 for half types, else the dtype of params. rows: IndexError outside
//   [0, V).
//
// Determinism: as in sparse_segment.h.
// Source: tf.nn.embedding_lookup, tf.nn.embedding_lookup_sparse, tf.clip_by_norm.
#pragma once
#include "embedding.h"

namespace tsr {

// What a row whose squares add up to this is multiplied with. NaN stays NaN. Root: a host or device square root.
template <class A, class Root>
TSR_HOST_DEVICE inline A clip_factor(A squares, A max_norm, Root root) {
  const A norm = root(squares);
  return max_norm / (norm < max_norm ? max_norm : norm);
}

inline int64_t check_params(const char* op, const std::vector<Tensor>& params) {
  TSR_CHECK_VALUE(!params.empty(), op, ": params must hold at least one tensor, got none");
  int64_t rows = 0;
  for (size_t s = 0; s < params.size(); ++s) {
    const Tensor& shard = params[s];
    check_embedding_weight(op, shard);
    TSR_CHECK_VALUE(shard.size(1) == params[0].size(1) && shard.scalar_type() == params[0].scalar_type(), op,
                    ": params[", s, "] must have the columns and dtype of params[0], ", params[0].size(1), " of ",
                    dtype_name(params[0].scalar_type()), ", got ", shard.size(1), " of ",
                    dtype_name(shard.scalar_type()));
    check_same_device(op, "params", shard, "params[0]", params[0]);
    rows += shard.size(0);
  }
  return rows;
}

inline void check_max_norm(const char* op, double max_norm) {
  TSR_CHECK_VALUE(max_norm == max_norm, op, ": max_norm must be a number, got nan");
}

// Checks a lookup in shards. Returns its reduction and the number of rows of the whole table.
inline std::pair<Reduction, int64_t> check_embedding_bag_shards(const std::vector<Tensor>& params,
                                                                const Tensor& indices,
                                                                const std::optional<Tensor>& offsets,
                                                                const std::optional<Tensor>& per_sample_weights,
                                                                int64_t mode, int64_t padding_idx, double max_norm) {
  const char* op = "embedding_bag_shards";
  const int64_t rows = check_params(op, params);
  check_bags(op, "params", params[0], indices, offsets, per_sample_weights);
  check_bag_padding(op, padding_idx, rows);
  check_max_norm(op, max_norm);
  const Reduction reduction = check_reduction(op, mode, /*weighted=*/true);
  TSR_CHECK_VALUE(offsets || (!per_sample_weights && reduction == Reduction::kSum), op,
                  ": without offsets, mode must be sum and per_sample_weights None");
  return {reduction, rows};
}

inline std::pair<Reduction, int64_t> check_embedding_bag_shards_weights_backward(
    const Tensor& grad, const std::vector<Tensor>& params, const Tensor& indices, const Tensor& offsets,
    const Tensor& per_sample_weights, const Tensor& output, int64_t mode, int64_t padding_idx, double max_norm) {
  const char* op = "embedding_bag_shards_weights_backward";
  const int64_t rows = check_params(op, params);
  check_max_norm(op, max_norm);
  return {check_pooled_weights_backward(op, grad, params[0], rows, indices, offsets, per_sample_weights, output, mode,
                                        padding_idx),
          rows};
}

inline int64_t check_clip_rows_backward(const Tensor& grad, const std::vector<Tensor>& params,
                                        const std::optional<Tensor>& rows, double max_norm) {
  const char* op = "clip_rows_backward";
  const int64_t table_rows = check_params(op, params);
  const ScalarType own = params[0].scalar_type();
  const bool half = own == ScalarType::Half || own == ScalarType::BFloat16;
  const ScalarType wanted = half ? ScalarType::Float : own;
  TSR_CHECK_VALUE(grad.dim() == 2 && grad.size(1) == params[0].size(1) && grad.scalar_type() == wanted, op,
                  ": grad must be ", dtype_name(wanted), " with the columns of params, ", params[0].size(1), ", got ",
                  dtype_name(grad.scalar_type()), " of shape ", shape_text(grad));
  check_same_device(op, "grad", grad, "params[0]", params[0]);
  if (rows) {
    check_vector(op, "rows", *rows);
    TSR_CHECK_VALUE(rows->scalar_type() == ScalarType::Long, op, ": rows must be int64, got ",
                    dtype_name(rows->scalar_type()));
    check_same_device(op, "rows", *rows, "params[0]", params[0]);
  }
  const int64_t count = rows ? rows->size(0) : table_rows;
  TSR_CHECK_VALUE(grad.size(0) == count, op, ": grad must have ", count, " rows, got ", grad.size(0));
  TSR_CHECK_VALUE(max_norm >= 0, op, ": max_norm must be >= 0, got ", max_norm);
  return table_rows;
}

}  // namespace tsr
