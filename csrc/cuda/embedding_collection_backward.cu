#include "embedding_collection_groups.cuh"
#include "table_shards.cuh"

namespace tsr {
namespace {

// One thread per group.
template <class K>
__global__ void table_rows_kernel(const K* keys, const int64_t* starts, const int64_t* first_rows,
                                  const int64_t* bounds, int64_t tables, const int64_t* addresses) {
  const int64_t groups = bounds[tables];
  for (int64_t g = thread_index(); g < groups; g += thread_count()) {
    const int64_t w = lower_bound(bounds, tables, g + 1) - 1;
    int64_t* const rows = reinterpret_cast<int64_t*>(addresses[w]);
    rows[g - bounds[w]] = static_cast<int64_t>(keys[starts[g]]) - first_rows[w];
  }
}

// Adds up the groups that offsets delimits; outputs and how many groups each has by wanted table.
void write_gradients(DeviceCall& call, const CollectionGradient& in, const CollectionGroups& groups,
                     const int64_t* offsets, const std::vector<int64_t>& first_groups,
                     const std::vector<Tensor>& outputs) {
  dispatch_float(in.grad.scalar_type(), call.op(), "grad", [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int wide = 16 / sizeof(T);
    PartList list(wide, wide);
    for (size_t w = 0; w < groups.tables.size(); ++w) {
      Part part = part_of_groups(in, groups, w);
      const Tensor& out = outputs[static_cast<size_t>(groups.tables[w])];
      part.first_offset = first_groups[w];
      part.bags = first_groups[w + 1] - first_groups[w];
      part.out = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out.data_ptr()));
      part.out_stride = part.columns;
      part.out_aligned = moves_wide(out.data_ptr(), part.columns, part.columns, sizeof(T));
      list.add(part);
    }
    PartInputs<T> inputs = inputs_of_groups<T>(call, groups);
    inputs.offsets = offsets;
    launch_parts<GradientSum<T, wide>, PartView<T>>(call, list, inputs, groups.groups.entries);
  });
}

std::vector<Tensor> embedding_collection_dense_backward_cuda(
    const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
    const std::vector<int64_t>& num_embeddings, const std::vector<int64_t>& dims, const std::vector<int64_t>& tables,
    const std::vector<int64_t>& keys, const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
    const std::vector<int64_t>& padding_idx, bool side_by_side, const std::vector<bool>& wanted) {
  const char* op = "embedding_collection_dense_backward";
  const CollectionLists lists{tables, keys, modes, bags, padding_idx, side_by_side};
  const Collection c = check_embedding_collection_backward(op, grad, indices, offsets, per_sample_weights, argmax,
                                                           num_embeddings, dims, lists, wanted);
  DeviceCall call(op, grad);
  std::vector<Tensor> out;
  for (size_t k = 0; k < wanted.size(); ++k) {
    call.asks("num_embeddings", num_embeddings[k]);
    out.push_back(call.empty({wanted[k] ? num_embeddings[k] : 0, dims[k]}, grad.scalar_type()));
  }
  const CollectionGradient in{c, grad, per_sample_weights, argmax, wanted};
  const CollectionGroups groups = group_collection(call, in, collection_input(call, indices, offsets));
  if (std::any_of(out.begin(), out.end(), [](const Tensor& x) { return x.numel() > 0; })) {
    write_gradients(call, in, groups, dense_offsets(call, groups.groups), groups.first_rows, out);
  }
  return out;
}

// The values and the rows of the wanted tables' gradients; rows as COO tensors keep them, [1, U], or as [U].
std::tuple<std::vector<Tensor>, std::vector<Tensor>> values_and_rows(
    const char* op, const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
    const std::vector<int64_t>& num_embeddings, const std::vector<int64_t>& dims, const CollectionLists& lists,
    const std::vector<bool>& wanted, bool for_coo) {
  const Collection c = check_embedding_collection_backward(op, grad, indices, offsets, per_sample_weights, argmax,
                                                           num_embeddings, dims, lists, wanted);
  DeviceCall call(op, grad);
  const CollectionGradient in{c, grad, per_sample_weights, argmax, wanted};
  const CollectionGroups groups = group_collection(call, in, collection_input(call, indices, offsets));
  const int64_t count = static_cast<int64_t>(groups.tables.size());
  const RowRuns runs = row_runs(call, groups.groups);
  const int64_t* const bounds = first_groups_of_tables(call, groups, runs);
  const std::vector<int64_t> first_groups = call.read_back(bounds, count + 1, "the number of rows that have entries");

  std::vector<Tensor> values, rows;
  std::vector<int64_t> addresses, shape(for_coo ? 2 : 1, 1);
  size_t w = 0;
  for (size_t k = 0; k < wanted.size(); ++k) {
    const int64_t present = wanted[k] ? first_groups[w + 1] - first_groups[w] : 0;
    values.push_back(call.empty({present, dims[k]}, grad.scalar_type()));
    shape.back() = present;
    rows.push_back(call.empty(shape, ScalarType::Long));
    if (!wanted[k]) continue;
    addresses.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows[k].data_ptr())));
    ++w;
  }
  const int64_t* const uploaded = upload(call, addresses);
  with_pairs(groups.groups, [&](const auto& pairs) {
    using K = std::remove_pointer_t<decltype(pairs.keys)>;
    launch(call, one_thread_each(first_groups.back()), table_rows_kernel<K>, pairs.keys, runs.starts,
           groups.first_rows_there, bounds, count, uploaded);
  });
  write_gradients(call, in, groups, runs.starts, first_groups, values);
  return {std::move(values), std::move(rows)};
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>> embedding_collection_sparse_backward_cuda(
    const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
    const std::vector<int64_t>& num_embeddings, const std::vector<int64_t>& dims, const std::vector<int64_t>& tables,
    const std::vector<int64_t>& keys, const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
    const std::vector<int64_t>& padding_idx, bool side_by_side, const std::vector<bool>& wanted) {
  return values_and_rows("embedding_collection_sparse_backward", grad, indices, offsets, per_sample_weights, argmax,
                         num_embeddings, dims, {tables, keys, modes, bags, padding_idx, side_by_side}, wanted,
                         /*for_coo=*/false);
}

std::vector<Tensor> embedding_collection_coo_backward_cuda(
    const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
    const std::vector<int64_t>& num_embeddings, const std::vector<int64_t>& dims, const std::vector<int64_t>& tables,
    const std::vector<int64_t>& keys, const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
    const std::vector<int64_t>& padding_idx, bool side_by_side, const std::vector<bool>& wanted) {
  const char* op = "embedding_collection_coo_backward";
  const auto [values, rows] =
      values_and_rows(op, grad, indices, offsets, per_sample_weights, argmax, num_embeddings, dims,
                      {tables, keys, modes, bags, padding_idx, side_by_side}, wanted, /*for_coo=*/true);
  return coo_gradients(op, values, rows, num_embeddings);
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding_collection_dense_backward", &tsr::embedding_collection_dense_backward_cuda);
  TSR_IMPL(m, "embedding_collection_sparse_backward", &tsr::embedding_collection_sparse_backward_cuda);
  TSR_IMPL(m, "embedding_collection_coo_backward", &tsr::embedding_collection_coo_backward_cuda);
}
