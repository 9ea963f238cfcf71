// embedding: from ids with row numbers, as TensorFlow's sparse tensors hold them, to the bags of a pooled lookup.
//
// No size depends on values: nothing is read back on CUDA.
//
// shard_rows(ids [...], shard_sizes, strategy, keep_padding) -> [...], dtype of ids: where a table that is split over
// shards of shard_sizes[s] rows holds row `id`, as a row of the shards laid end to end (the shards' rows before it,
// plus its row within its shard).
// * strategy 0, "mod": shard id % n, row id / n of it. 1, "div": with q, e = divmod(sum of sizes, n), the first e
//   shards take q + 1 consecutive ids each and the others q. (Both are TensorFlow's partition strategies.) A shard's
//   own size may be another than the strategy would give it.
// * keep_padding: an id equal to the sum of sizes, the mark of pruned_bags, stays as it is. Negative ids, and ids whose
//   row their shard does not have, are errors: IndexError (on CUDA such an id becomes that mark). ValueError: no
//   shards, a negative size, a sum of sizes that the dtype of ids cannot hold.
//
// pruned_bags(ids [N], row_ids [N], weights [N]?, num_bags, num_embeddings, prune_weights, default_id?, with_positions)
//   -> (weights [M] or [0], indices [M], offsets [num_bags + 1] int64, positions [N] or [0] int64)
//   the entries ordered by row, stably; M = N, or N + num_bags with a default_id: then each bag has one entry more, its
//   last. An entry with a negative id, and with prune_weights one whose weight is not > 0 (NaN too), is left out: it
//   keeps its place, with num_embeddings, which is no row, for its index. (Give that as padding_idx to the lookup.)
//   The last entry of a bag without others that count holds default_id, elsewhere it is left out.
// * indices have the dtype of ids. weights: those of the entries, 0 for entries left out, 1 for default_id; without
//   weights [0], float32. positions[i]: where entry i is now; [0] without with_positions.
// * row_ids need not be sorted; any stride. weights: float16, bfloat16, float32 or float64.
// * Errors: IndexError for row_ids outside [0, num_bags), for ids >= num_embeddings of entries that are not left out,
//   for default_id outside [0, num_embeddings); ValueError for shapes, dtypes, prune_weights without weights, and where
//   num_embeddings does not fit the dtype of ids. On CUDA an entry whose id or row is reported is left out.
// * Gradient: of weights, grad[positions] where entries count, else 0; positions must be asked for.
//
// Determinism: integers, and copies of weights; the same on every run.
// Source: tf.nn.embedding_lookup_sparse and tf.nn.safe_embedding_lookup_sparse, tf.sparse.fill_empty_rows.
#pragma once
#include "embedding.h"

namespace tsr {

enum class Partition : int64_t { kMod = 0, kDiv = 1 };

// Where the rows of a table are, as arithmetic on ids. Trivially copyable.
struct ShardMap {
  int64_t shards;
  int64_t short_size;  // div: q
  int64_t long_ids;    // div: the ids of the shards that take q + 1

  template <Partition kStrategy>
  TSR_HOST_DEVICE void locate(int64_t id, int64_t& shard, int64_t& row) const {
    if constexpr (kStrategy == Partition::kMod) {
      shard = id % shards;
      row = id / shards;
    } else if (id < long_ids) {
      shard = id / (short_size + 1);
      row = id % (short_size + 1);
    } else {
      // Where every shard takes one id or none, ids beyond are beyond the last shard.
      const int64_t size = short_size > 0 ? short_size : 1;
      shard = long_ids / (short_size + 1) + (id - long_ids) / size;
      row = (id - long_ids) % size;
    }
  }
};

inline ShardMap shard_map(const std::vector<int64_t>& sizes) {
  const int64_t n = static_cast<int64_t>(sizes.size());
  int64_t total = 0;
  for (const int64_t size : sizes) total += size;
  return {n, total / n, total % n * (total / n + 1)};
}

inline void check_rows_fit(const char* op, const char* what, int64_t rows, const Tensor& ids) {
  TSR_CHECK_VALUE(ids.scalar_type() == ScalarType::Long || rows <= INT32_MAX, op, ": ids must be int64 for ", what,
                  " = ", rows, ", got ", dtype_name(ids.scalar_type()));
}

inline Partition check_shard_rows(const Tensor& ids, const std::vector<int64_t>& shard_sizes, int64_t strategy) {
  const char* op = "shard_rows";
  check_index_dtype(op, "ids", ids);
  TSR_CHECK_VALUE(!shard_sizes.empty(), op, ": shard_sizes must name at least one shard, got none");
  int64_t total = 0;
  for (size_t s = 0; s < shard_sizes.size(); ++s) {
    TSR_CHECK_VALUE(shard_sizes[s] >= 0, op, ": shard_sizes[", s, "] must be >= 0, got ", shard_sizes[s]);
    TSR_CHECK_VALUE(shard_sizes[s] < INT64_MAX - total, op, ": shard_sizes must add up to less than 2^63 - 1, got ",
                    shard_sizes[s], " in shard_sizes[", s, "] after ", total);
    total += shard_sizes[s];
  }
  check_rows_fit(op, "the sum of shard_sizes", total, ids);
  TSR_CHECK_VALUE(strategy == 0 || strategy == 1, op, ": strategy must be 0 (mod) or 1 (div), got ", strategy);
  return static_cast<Partition>(strategy);
}

inline void check_pruned_bags(const Tensor& ids, const Tensor& row_ids, const std::optional<Tensor>& weights,
                              int64_t num_bags, int64_t num_embeddings, bool prune_weights,
                              const std::optional<int64_t>& default_id) {
  const char* op = "pruned_bags";
  check_vector(op, "ids", ids);
  check_index_dtype(op, "ids", ids);
  check_vector(op, "row_ids", row_ids);
  check_index_dtype(op, "row_ids", row_ids);
  TSR_CHECK_VALUE(row_ids.size(0) == ids.size(0), op, ": row_ids must have the length of ids, ", ids.size(0), ", got ",
                  row_ids.size(0));
  check_same_device(op, "row_ids", row_ids, "ids", ids);
  if (weights) {
    check_vector(op, "weights", *weights);
    check_float_dtype(op, "weights", *weights);
    TSR_CHECK_VALUE(weights->size(0) == ids.size(0), op, ": weights must have the length of ids, ", ids.size(0),
                    ", got ", weights->size(0));
    check_same_device(op, "weights", *weights, "ids", ids);
  }
  TSR_CHECK_VALUE(weights || !prune_weights, op, ": prune_weights needs weights");
  check_count(op, "num_bags", num_bags);
  TSR_CHECK_VALUE(num_embeddings >= 0, op, ": num_embeddings must be >= 0, got ", num_embeddings);
  check_rows_fit(op, "num_embeddings", num_embeddings, ids);
  TSR_CHECK_INDEX(!default_id || (*default_id >= 0 && *default_id < num_embeddings), op, ": default_id must be in [0, ",
                  num_embeddings, "), got ", *default_id);
}

}  // namespace tsr
