// Gradients of a collection's lookups with respect to its tables.
#include "../embedding_collection.h"
#include "collection_groups.h"

namespace tsr {
namespace {

constexpr const char* kDenseOp = "embedding_collection_dense_backward";

// The arguments of both gradients, contiguous.
struct BackwardInputs {
  Collection c;
  Tensor grad, indices;
  std::optional<Tensor> offsets, per_sample_weights, argmax;
  const std::vector<bool>& wanted;

  // write(groups, T()) is called once, with the types chosen.
  template <class F>
  void with_groups(GradientRows written, const F& write) const {
    dispatch_float(grad.scalar_type(), c.op, "grad", [&](auto value_tag) {
      using T = typename decltype(value_tag)::type;
      dispatch_index(indices.scalar_type(), c.op, "indices", [&](auto index_tag) {
        using I = typename decltype(index_tag)::type;
        const CollectionInput<T, I> input(c, indices, offsets, per_sample_weights);
        dispatch_collection_width(input, [&](auto width_tag) {
          using U = typename decltype(width_tag)::type;
          write(CollectionGroups<T, U>(group_tables<U>(input, grad.const_data_ptr<T>(),
                                                       argmax ? argmax->const_data_ptr<int64_t>() : nullptr, wanted,
                                                       written)),
                T());
        });
      });
    });
  }
};

BackwardInputs checked_inputs(const char* op, const Tensor& grad, const Tensor& indices,
                              const std::optional<Tensor>& offsets, const std::optional<Tensor>& per_sample_weights,
                              const std::optional<Tensor>& argmax, const std::vector<int64_t>& num_embeddings,
                              const std::vector<int64_t>& dims, const CollectionLists& lists,
                              const std::vector<bool>& wanted) {
  Collection c = check_embedding_collection_backward(op, grad, indices, offsets, per_sample_weights, argmax,
                                                     num_embeddings, dims, lists, wanted);
  return {std::move(c),
          as_contiguous(grad),
          as_contiguous(indices),
          offsets,
          as_contiguous(per_sample_weights),
          as_contiguous(argmax),
          wanted};
}

// Writes every table's gradient. output_of(table) says where it goes.
template <class T, class Groups, class F>
void write_gradients(const Groups& groups, bool dense, const F& output_of) {
  std::vector<GradientOutput<T, int64_t>> outputs;
  for (const auto& table : groups.tables()) outputs.push_back(output_of(table));
  groups.for_each_slice([dense](const auto&) { return dense; }, [](int64_t) {},
                        [&](int64_t, const auto& table, const auto& meaning, const Slice& slice, auto& scratch) {
                          const auto& to = outputs[static_cast<size_t>(&table - groups.tables().data())];
                          if (to.count > 0) write_slice(groups.groups(table).items(), slice, meaning, to, scratch);
                        });
}

// The values and the rows of the wanted tables' gradients; rows as COO tensors keep them, [1, U], or as [U].
std::tuple<std::vector<Tensor>, std::vector<Tensor>> values_and_rows(const BackwardInputs& inputs, bool for_coo) {
  const std::vector<int64_t>& dims = inputs.c.dims;
  std::vector<Tensor> values, rows;
  values.reserve(dims.size());
  rows.reserve(dims.size());
  inputs.with_groups(GradientRows::kPresent, [&](const auto& groups, auto element) {
    using T = decltype(element);
    std::vector<int64_t> counts(dims.size(), 0);
    for (const auto& table : groups.tables()) counts[static_cast<size_t>(table.table)] = groups.groups(table).groups();
    std::vector<int64_t> shape(for_coo ? 2 : 1, 1);
    for (size_t k = 0; k < dims.size(); ++k) {
      values.push_back(new_empty(inputs.grad, {counts[k], dims[k]}, inputs.grad.scalar_type()));
      shape.back() = counts[k];
      rows.push_back(new_empty(inputs.grad, shape, ScalarType::Long));
    }
    write_gradients<T>(groups, /*dense=*/false, [&](const auto& table) {
      const size_t k = static_cast<size_t>(table.table);
      return GradientOutput<T, int64_t>{values[k].mutable_data_ptr<T>(), rows[k].mutable_data_ptr<int64_t>(),
                                        counts[k]};
    });
  });
  return {std::move(values), std::move(rows)};
}

}  // namespace

std::vector<Tensor> embedding_collection_dense_backward_cpu(
    const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
    const std::vector<int64_t>& num_embeddings, const std::vector<int64_t>& dims, const std::vector<int64_t>& tables,
    const std::vector<int64_t>& keys, const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
    const std::vector<int64_t>& padding_idx, bool side_by_side, const std::vector<bool>& wanted) {
  const BackwardInputs inputs =
      checked_inputs(kDenseOp, grad, indices, offsets, per_sample_weights, argmax, num_embeddings, dims,
                     {tables, keys, modes, bags, padding_idx, side_by_side}, wanted);
  std::vector<Tensor> result;
  for (size_t k = 0; k < dims.size(); ++k) {
    result.push_back(new_empty(grad, {wanted[k] ? num_embeddings[k] : 0, dims[k]}, grad.scalar_type(),
                               {kDenseOp, "num_embeddings", num_embeddings[k]}));
  }
  inputs.with_groups(GradientRows::kAll, [&](const auto& groups, auto element) {
    using T = decltype(element);
    write_gradients<T>(groups, /*dense=*/true, [&](const auto& table) {
      const Tensor& out = result[static_cast<size_t>(table.table)];
      return GradientOutput<T, int64_t>{out.mutable_data_ptr<T>(), nullptr, out.size(0)};
    });
  });
  return result;
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>> embedding_collection_sparse_backward_cpu(
    const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
    const std::vector<int64_t>& num_embeddings, const std::vector<int64_t>& dims, const std::vector<int64_t>& tables,
    const std::vector<int64_t>& keys, const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
    const std::vector<int64_t>& padding_idx, bool side_by_side, const std::vector<bool>& wanted) {
  const BackwardInputs inputs =
      checked_inputs("embedding_collection_sparse_backward", grad, indices, offsets, per_sample_weights, argmax,
                     num_embeddings, dims, {tables, keys, modes, bags, padding_idx, side_by_side}, wanted);
  return values_and_rows(inputs, /*for_coo=*/false);
}

std::vector<Tensor> embedding_collection_coo_backward_cpu(
    const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
    const std::vector<int64_t>& num_embeddings, const std::vector<int64_t>& dims, const std::vector<int64_t>& tables,
    const std::vector<int64_t>& keys, const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
    const std::vector<int64_t>& padding_idx, bool side_by_side, const std::vector<bool>& wanted) {
  const char* op = "embedding_collection_coo_backward";
  const BackwardInputs inputs = checked_inputs(op, grad, indices, offsets, per_sample_weights, argmax, num_embeddings,
                                               dims, {tables, keys, modes, bags, padding_idx, side_by_side}, wanted);
  const auto [values, rows] = values_and_rows(inputs, /*for_coo=*/true);
  return coo_gradients(op, values, rows, num_embeddings);
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "embedding_collection_dense_backward", &tsr::embedding_collection_dense_backward_cpu);
  TSR_IMPL(m, "embedding_collection_sparse_backward", &tsr::embedding_collection_sparse_backward_cpu);
  TSR_IMPL(m, "embedding_collection_coo_backward", &tsr::embedding_collection_coo_backward_cpu);
}
