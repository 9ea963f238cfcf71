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

  // unique
  m.def("unique(Tensor x) -> (Tensor values, Tensor inverse)");
  m.def("unique_with_counts(Tensor x) -> (Tensor values, Tensor inverse, Tensor counts)");

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
      "cross_hashed(Tensor[] values, Tensor[] offsets, int num_buckets, int? hash_key)"
      " -> (Tensor values, Tensor offsets)");

  // embedding
  m.def("embedding(Tensor weight, Tensor indices, SymInt padding_idx, bool scale_grad_by_freq, bool sparse) -> Tensor");
  m.def(
      "embedding_bag(Tensor weight, Tensor indices, Tensor offsets, Tensor? per_sample_weights, int mode,"
      " SymInt padding_idx, bool scale_grad_by_freq, bool sparse) -> (Tensor output, Tensor argmax)");
  m.def(
      "embedding_dense_backward(Tensor grad, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
      " Tensor? argmax, SymInt num_embeddings, int mode, SymInt padding_idx, bool scale_grad_by_freq) -> Tensor");
  m.def(
      "embedding_sparse_backward(Tensor grad, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
      " Tensor? argmax, SymInt num_embeddings, int mode, SymInt padding_idx, bool scale_grad_by_freq)"
      " -> (Tensor values, Tensor rows)");
  m.def(
      "embedding_weights_backward(Tensor grad, Tensor weight, Tensor indices, Tensor offsets,"
      " Tensor per_sample_weights, Tensor output, int mode, SymInt padding_idx) -> Tensor");

  // device: what the machine offers, and errors that CUDA kernels recorded
  m.def("cpu_level() -> int");
  m.def("check_errors(Tensor probe) -> ()");
}
