// Gradients of the lookups with respect to per_sample_weights.
#include "embedding_bags.h"
#include "table_rows.h"

namespace tsr {
namespace {

// Rows: PlainRows or ShardRows.
template <class T, class I, class Rows>
void write_weights_gradient(const Rows& rows, const Bags<T, I>& bags, int64_t num_embeddings, Reduction reduction,
                            const I* ids, const T* grads, const T* pooled, int64_t dim, T* out,
                            FirstPosition& first_bad, FirstPosition& first_nan) {
  using A = acc_t<T>;
  const auto dot = dot_loop<T>().dot;
  const int64_t workers = pool_workers(bags, dim), tasks = workers == 1 ? 1 : workers * 16;
  const std::vector<int64_t> ranges = balanced_ranges(bags.offsets(), bags.count(), tasks);
  parallel_dynamic(tasks, workers, [&, grads, pooled, ids, out](int64_t, int64_t task) {
    const int64_t first = ranges[static_cast<size_t>(task)], end = ranges[static_cast<size_t>(task + 1)];
    if (first == end || !bags.check(first, end, num_embeddings, first_bad, first_nan)) return;
    for (int64_t b = first; b < end; ++b) {
      const A divisor = bags.divisor(b, reduction);
      const A own = is_divided(reduction) ? dot(grads + b * dim, pooled + b * dim, dim) : A(0);
      for (int64_t i = bags.offsets()[b]; i < bags.offsets()[b + 1]; ++i) {
        A value = 0;
        if (!bags.is_padding(i) && divisor != A(0)) {
          const T* row = rows.row(static_cast<int64_t>(ids[i]));
          value = dot(grads + b * dim, row, dim) * rows.scale(row);
          value = weight_gradient(reduction, value, own, bags.weight(i), divisor);
        }
        out[i] = static_cast<T>(value);
      }
    }
  });
}

// rows_of(type_tag<T>) returns the Rows of that element type.
template <class F>
Tensor weights_gradient(const char* op, ScalarType dtype, int64_t num_embeddings, const Tensor& grad_,
                        const Tensor& indices_, const Tensor& offsets, const Tensor& per_sample_weights_,
                        const Tensor& output_, Reduction reduction, int64_t padding_idx, const F& rows_of) {
  const Tensor grad = as_contiguous(grad_), indices = as_contiguous(indices_), output = as_contiguous(output_);
  const Tensor per_sample_weights = as_contiguous(per_sample_weights_);
  const Tensor result = new_empty(per_sample_weights, {indices.size(0)}, dtype);
  FirstPosition first_bad, first_nan;
  dispatch_float(dtype, op, "weight", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    dispatch_index(indices.scalar_type(), op, "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const Bags<T, I> bags(op, indices, offsets, per_sample_weights, padding_idx);
      write_weights_gradient<T, I>(rows_of(value_tag), bags, num_embeddings, reduction, indices.const_data_ptr<I>(),
                                   grad.const_data_ptr<T>(), output.const_data_ptr<T>(), grad.size(1),
                                   result.mutable_data_ptr<T>(), first_bad, first_nan);
    });
  });
  throw_bad_bags(op, indices, num_embeddings, first_bad, first_nan);
  return result;
}

}  // namespace

Tensor embedding_weights_backward_cpu(const Tensor& grad, const Tensor& weight_, const Tensor& indices,
                                      const Tensor& offsets, const Tensor& per_sample_weights, const Tensor& output,
                                      int64_t mode, int64_t padding_idx) {
  const Reduction reduction =
      check_embedding_weights_backward(grad, weight_, indices, offsets, per_sample_weights, output, mode, padding_idx);
  const Tensor weight = as_contiguous(weight_);
  return weights_gradient("embedding_weights_backward", weight.scalar_type(), weight.size(0), grad, indices, offsets,
                          per_sample_weights, output, reduction, padding_idx,
                          [&](auto tag) { return PlainRows<typename decltype(tag)::type>(weight); });
}

Tensor embedding_bag_shards_weights_backward_cpu(const Tensor& grad, const std::vector<Tensor>& params_,
                                                 const Tensor& indices, const Tensor& offsets,
                                                 const Tensor& per_sample_weights, const Tensor& output, int64_t mode,
                                                 int64_t padding_idx, double max_norm) {
  const auto [reduction, rows] = check_embedding_bag_shards_weights_backward(
      grad, params_, indices, offsets, per_sample_weights, output, mode, padding_idx, max_norm);
  const std::vector<Tensor> params = as_contiguous(params_);
  return weights_gradient("embedding_bag_shards_weights_backward", params[0].scalar_type(), rows, grad, indices,
                          offsets, per_sample_weights, output, reduction, padding_idx,
                          [&](auto tag) { return ShardRows<typename decltype(tag)::type>(params, max_norm); });
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "embedding_weights_backward", &tsr::embedding_weights_backward_cpu);
  TSR_IMPL(m, "embedding_bag_shards_weights_backward", &tsr::embedding_bag_shards_weights_backward_cpu);
}
