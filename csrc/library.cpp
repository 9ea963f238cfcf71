// Every operator's schema, and nothing else: the table of contents of the C++ side.
// Contracts are in <family>.h, kernels in cpu/<family>.cpp and cuda/<family>.cu, the Python side in
// torchsparse_rec/ops/<family>.py.
#include "abi.h"

STABLE_TORCH_LIBRARY(torchsparse_rec, m) {
  // segment
  m.def(
      "sparse_segment_reduce(Tensor data, Tensor indices, Tensor segment_ids, SymInt? num_segments, int reduction)"
      " -> Tensor");
  m.def(
      "sparse_segment_reduce_grad(Tensor grad, Tensor indices, Tensor segment_ids, SymInt output_dim0, int reduction)"
      " -> Tensor");
  m.def(
      "sparse_segment_reduce_grad_out(Tensor grad, Tensor indices, Tensor segment_ids, SymInt output_dim0,"
      " int reduction, Tensor(a!) out) -> ()");
  m.def(
      "sparse_segment_reduce_grad_v2(Tensor grad, Tensor indices, Tensor segment_ids, SymInt dense_output_dim0,"
      " int reduction) -> (Tensor values, Tensor rows)");
  m.def(
      "sparse_segment_reduce_grad_v2_out(Tensor grad, Tensor indices, Tensor segment_ids, SymInt dense_output_dim0,"
      " int reduction, Tensor(a!) values, Tensor(b!) rows) -> ()");
  m.def(
      "segment_reduce(Tensor data, Tensor? segment_ids, Tensor? offsets, SymInt? num_segments, int reduction)"
      " -> Tensor");
  m.def(
      "segment_reduce_backward(Tensor grad, Tensor? data, Tensor? segment_ids, Tensor? offsets, SymInt rows,"
      " int reduction) -> Tensor");
  m.def("unsorted_segment_reduce(Tensor data, Tensor segment_ids, SymInt num_segments, int reduction) -> Tensor");
  m.def("unsorted_segment_reduce_backward(Tensor grad, Tensor? data, Tensor segment_ids, int reduction) -> Tensor");

  // unique
  m.def("unique(Tensor x) -> (Tensor values, Tensor inverse)");
  m.def("unique_with_counts(Tensor x) -> (Tensor values, Tensor inverse, Tensor counts)");
  m.def("unique_rows(Tensor x) -> (Tensor firsts, Tensor inverse, Tensor counts)");

  // route
  m.def(
      "route(Tensor ids, SymInt[] starts, int[] sizes, int[] blocks, int ranks, bool distinct)"
      " -> (Tensor rows, Tensor counts, Tensor places)");
  m.def(
      "route_keys(Tensor keys, SymInt[] starts, int ranks, bool distinct)"
      " -> (Tensor sent, Tensor occurrences, Tensor counts, Tensor places)");

  // hash
  m.def("fingerprint64(Tensor x) -> Tensor");
  m.def("string_fingerprint64(Tensor bytes, Tensor offsets) -> Tensor");
  m.def("to_hash_bucket_fast(Tensor x, int num_buckets) -> Tensor");
  m.def("string_to_hash_bucket_fast(Tensor bytes, Tensor offsets, int num_buckets) -> Tensor");
  m.def("to_hash_bucket_strong(Tensor x, int num_buckets, int key0, int key1) -> Tensor");
  m.def("string_to_hash_bucket_strong(Tensor bytes, Tensor offsets, int num_buckets, int key0, int key1) -> Tensor");
  m.def("to_hash_bucket(Tensor x, int num_buckets) -> Tensor");
  m.def("string_to_hash_bucket(Tensor bytes, Tensor offsets, int num_buckets) -> Tensor");
  m.def(
      "column_ids(Tensor[] columns, int[] num_buckets, int[] missing)"
      " -> (Tensor ids, Tensor keep, Tensor num_missing)");
  m.def(
      "cross_hashed(Tensor[] values, Tensor[] offsets, int num_buckets, int? hash_key)"
      " -> (Tensor values, Tensor offsets)");

  // sparse_tensor
  m.def("sparse_reshape(Tensor indices, SymInt[] shape, SymInt[] new_shape) -> Tensor");
  m.def(
      "sparse_fill_empty_rows(Tensor indices, Tensor values, SymInt num_rows, Tensor default_value)"
      " -> (Tensor output_values, Tensor output_indices, Tensor empty_row_indicator, Tensor reverse_index_map)");
  m.def(
      "sparse_fill_empty_rows_grad(Tensor reverse_index_map, Tensor grad_values)"
      " -> (Tensor d_values, Tensor d_default_value)");
  m.def("sparse_reorder(Tensor indices) -> (Tensor output_indices, Tensor permutation)");
  m.def(
      "sparse_to_dense(Tensor indices, SymInt[] shape, Tensor values, Tensor default_value, bool validate)"
      " -> Tensor");
  m.def("row_ids_to_offsets(Tensor row_ids, SymInt num_rows) -> Tensor");
  m.def("offsets_to_row_ids(Tensor offsets, SymInt num_items) -> Tensor");

  // embedding
  m.def("embedding(Tensor weight, Tensor indices, SymInt padding_idx, bool scale_grad_by_freq, bool sparse) -> Tensor");
  m.def(
      "embedding_bag(Tensor weight, Tensor indices, Tensor offsets, Tensor? per_sample_weights, int mode,"
      " SymInt padding_idx, bool scale_grad_by_freq, bool sparse, bool include_last_offset=True)"
      " -> (Tensor output, Tensor argmax)");
  m.def(
      "embedding_dense_backward(Tensor grad, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
      " Tensor? argmax, SymInt num_embeddings, int mode, SymInt padding_idx, bool scale_grad_by_freq,"
      " bool include_last_offset=True) -> Tensor");
  m.def(
      "embedding_sparse_backward(Tensor grad, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
      " Tensor? argmax, SymInt num_embeddings, int mode, SymInt padding_idx, bool scale_grad_by_freq,"
      " bool include_last_offset=True) -> (Tensor values, Tensor rows)");
  m.def(
      "embedding_coo_backward(Tensor grad, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
      " Tensor? argmax, SymInt num_embeddings, int mode, SymInt padding_idx, bool scale_grad_by_freq,"
      " bool include_last_offset=True) -> Tensor");
  m.def(
      "embedding_weights_backward(Tensor grad, Tensor weight, Tensor indices, Tensor offsets,"
      " Tensor per_sample_weights, Tensor output, int mode, SymInt padding_idx) -> Tensor");
  m.def("quantized_embedding(Tensor weight, Tensor indices, int bits) -> Tensor");
  m.def(
      "quantized_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, Tensor? per_sample_weights, int bits,"
      " int mode, SymInt padding_idx, bool include_last_offset=True, SymInt first_bag=0, SymInt? bags=None)"
      " -> Tensor");
  m.def("shard_rows(Tensor ids, SymInt[] shard_sizes, int strategy, bool keep_padding) -> Tensor");
  m.def(
      "pruned_bags(Tensor ids, Tensor row_ids, Tensor? weights, SymInt num_bags, SymInt num_embeddings,"
      " bool prune_weights, SymInt? default_id, bool with_positions)"
      " -> (Tensor weights, Tensor indices, Tensor offsets, Tensor positions)");
  m.def(
      "embedding_bag_shards(Tensor[] params, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, int mode,"
      " SymInt padding_idx, float max_norm, bool sparse) -> Tensor");
  m.def(
      "embedding_bag_shards_weights_backward(Tensor grad, Tensor[] params, Tensor indices, Tensor offsets,"
      " Tensor per_sample_weights, Tensor output, int mode, SymInt padding_idx, float max_norm) -> Tensor");
  m.def("clip_rows_backward(Tensor grad, Tensor[] params, Tensor? rows, float max_norm) -> Tensor");

  // embedding_collection
  m.def(
      "embedding_collection(Tensor[] weights, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
      " int[] tables, int[] keys, int[] modes, SymInt[] bags, int[] padding_idx, bool side_by_side, bool sparse)"
      " -> (Tensor output, Tensor argmax)");
  m.def(
      "embedding_collection_current(Tensor[] weights, Tensor[] states, Tensor[] last_steps, Tensor history,"
      " Tensor indices, Tensor? offsets, Tensor? per_sample_weights, int[] tables, int[] keys, int[] modes,"
      " SymInt[] bags, int[] padding_idx, bool side_by_side, int rule, float[] hyperparameters, int step, int base)"
      " -> (Tensor output, Tensor argmax)");
  m.def(
      "embedding_collection_dense_backward(Tensor grad, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
      " Tensor? argmax, SymInt[] num_embeddings, SymInt[] dims, int[] tables, int[] keys, int[] modes, SymInt[] bags,"
      " int[] padding_idx, bool side_by_side, bool[] wanted) -> Tensor[]");
  m.def(
      "embedding_collection_sparse_backward(Tensor grad, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
      " Tensor? argmax, SymInt[] num_embeddings, SymInt[] dims, int[] tables, int[] keys, int[] modes, SymInt[] bags,"
      " int[] padding_idx, bool side_by_side, bool[] wanted) -> (Tensor[] values, Tensor[] rows)");
  m.def(
      "embedding_collection_coo_backward(Tensor grad, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
      " Tensor? argmax, SymInt[] num_embeddings, SymInt[] dims, int[] tables, int[] keys, int[] modes, SymInt[] bags,"
      " int[] padding_idx, bool side_by_side, bool[] wanted) -> Tensor[]");
  m.def(
      "embedding_collection_weights_backward(Tensor grad, Tensor[] weights, Tensor[] states, Tensor[] last_steps,"
      " Tensor? history, Tensor indices, Tensor? offsets, Tensor per_sample_weights, Tensor output, int[] tables,"
      " int[] keys, int[] modes, SymInt[] bags, int[] padding_idx, bool side_by_side, int rule,"
      " float[] hyperparameters, int step, int base) -> Tensor");
  m.def(
      "embedding_collection_update_(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor(c!)[] last_steps,"
      " Tensor? history, Tensor grad, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, Tensor? argmax,"
      " int[] tables, int[] keys, int[] modes, SymInt[] bags, int[] padding_idx, bool side_by_side, bool[] wanted,"
      " Tensor? grad_scale, int rule, float[] hyperparameters, int step, int base, bool maximize,"
      " int[] rounding_seeds, int[] whole=[]) -> ()");

  // collection_plan
  m.def(
      "collection_plan(Tensor[] weights, Tensor[] states, Tensor[] last_steps, int[] tables, int[] keys, int[] modes,"
      " int[] padding_idx, bool maximize, int[] rounding_seeds, int[] whole) -> int");
  m.def("collection_plan_free(Tensor probe, int plan) -> ()");
  m.def(
      "planned_collection(Tensor[] weights, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, int[] bags,"
      " bool side_by_side, int plan) -> (Tensor output, Tensor argmax)");
  m.def(
      "planned_collection_current(Tensor[] weights, Tensor history, Tensor indices, Tensor? offsets,"
      " Tensor? per_sample_weights, int[] bags, bool side_by_side, int rule, float[] hyperparameters, int step,"
      " int base, int plan) -> (Tensor output, Tensor argmax)");
  m.def(
      "planned_collection_update_(Tensor(a!)[] weights, Tensor? history, Tensor grad, Tensor indices, Tensor? offsets,"
      " Tensor? per_sample_weights, Tensor? argmax, int[] bags, bool side_by_side, int rule, float[] hyperparameters,"
      " int step, int base, int plan) -> ()");

  // scores
  m.def("scores_targets(Tensor target, SymInt rows, int ignore_index, bool excluded) -> Tensor");
  m.def("scores_exclude_(Tensor(a!) scores, Tensor row_ids, Tensor samples, SymInt first_row) -> ()");
  m.def(
      "scores_lse_(Tensor scores, Tensor target, SymInt first_row, Tensor(a!) maximum, Tensor(b!) sum,"
      " Tensor(c!) own) -> ()");
  m.def(
      "scores_softmax_(Tensor(a!) scores, Tensor maximum, Tensor target, SymInt first_row, Tensor factor,"
      " Tensor own_factor) -> ()");
  m.def("scores_top_k_(Tensor scores, SymInt first_row, Tensor(a!) values, Tensor(b!) rows) -> ()");

  // candidates
  m.def(
      "candidates_(Tensor(a!) generator, Tensor(b!)? counts, Tensor[] unigrams, Tensor true_classes, SymInt range_max,"
      " SymInt num_sampled, bool unique, int kind) -> (Tensor sampled, Tensor true_count, Tensor sampled_count)");
  m.def(
      "candidates_unigrams(Tensor unigrams, SymInt reserved, float distortion)"
      " -> (Tensor weights, Tensor chances, Tensor aliases, Tensor total)");

  // row_update
  m.def(
      "row_update(Tensor(a!) weight, Tensor(b!)? state0, Tensor(c!)? state1, Tensor(d!)? state2, Tensor grad,"
      " Tensor indices, int rule, float[] hyperparameters) -> ()");

  // row_optimizer
  m.def("row_optimizer_rule(int? rule, float[] hyperparameters) -> Tensor");
  m.def(
      "row_optimizer_update_(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor(c!)[] last_steps, Tensor? history,"
      " Tensor[] rows, Tensor[] values, Tensor? grad_scale, int rule, float[] hyperparameters, int step, int base,"
      " bool maximize, int[] rounding_seeds, int[] whole=[]) -> ()");
  m.def("row_optimizer_advance_(Tensor(a!) history, int rule, float[] hyperparameters, int step, int base) -> ()");
  m.def(
      "row_optimizer_current(Tensor weight, Tensor[] states, Tensor last_step, Tensor history, Tensor rows, int rule,"
      " float[] hyperparameters, int step, int base) -> Tensor");
  m.def(
      "row_optimizer_make_current_(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor(c!)[] last_steps,"
      " Tensor? history, int rule, float[] hyperparameters, int step, int base, int[] rounding_seeds) -> ()");

  // table
  m.def("table_find(Tensor index, Tensor entries, Tensor ids) -> Tensor");
  m.def(
      "table_find_or_insert_(Tensor(a!) index, Tensor(b!) entries, Tensor(c!) counters, Tensor free_rows, Tensor ids,"
      " Tensor? allowed, Tensor? frequencies, int version, bool count) -> (Tensor rows, Tensor born)");
  m.def(
      "tables_find_or_insert_(Tensor(a!)[] index, Tensor(b!)[] entries, Tensor(c!)[] counters, Tensor[] free_rows,"
      " Tensor ids, int[] begins, int[] ends, int[] versions, bool count) -> (Tensor rows, Tensor born)");
  m.def("table_erase_(Tensor(a!) index, Tensor(b!) entries, Tensor ids, Tensor? mask) -> Tensor");
  m.def("table_rehash(Tensor entries, Tensor(a!) counters, SymInt buckets, int seed=0) -> Tensor");
  m.def(
      "table_initialize_(Tensor(a!) weight, Tensor rows, Tensor keys, Tensor? values, int kind, float[] parameters,"
      " int seed) -> ()");
  m.def(
      "table_lookup(Tensor index, Tensor entries, Tensor weight, Tensor ids, Tensor? missing, Tensor? values, int kind,"
      " float[] parameters, int seed) -> Tensor");
  m.def("table_assign_(Tensor(a!) weight, Tensor rows, Tensor values) -> ()");
  m.def("count_min_sketch_(Tensor(a!) sketch, Tensor ids, Tensor? mask, int num_hashes, bool count) -> Tensor");

  // record
  m.def("crc32c(Tensor[] buffers) -> Tensor");
  m.def("to_byte_planes(Tensor x) -> Tensor");
  m.def("from_byte_planes(Tensor planes) -> Tensor");
  m.def("join_byte_planes_(Tensor(a!) out, Tensor[] sources, Tensor planes, Tensor parts) -> ()");
  m.def("tfrecord_frames(Tensor bytes, bool verify) -> (Tensor ranges, Tensor status)");
  m.def("tfrecord_framed(Tensor bytes, Tensor offsets) -> Tensor");
  m.def(
      "parse_examples(Tensor bytes, Tensor ranges, Tensor name_bytes, Tensor name_offsets, int[] dtypes, int[] sizes,"
      " int[] absent, Tensor[] defaults) -> (Tensor[] outputs, Tensor fault)");
  m.def(
      "encode_examples(Tensor name_bytes, Tensor name_offsets, int[] dtypes, int[] sizes, Tensor[] columns, int rows)"
      " -> (Tensor bytes, Tensor offsets)");

  // device: what the machine offers, and errors that CUDA kernels recorded
  m.def("cpu_level() -> int");
  m.def("check_errors(Tensor probe) -> ()");
}
