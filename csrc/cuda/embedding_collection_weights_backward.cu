#include "embedding_collection_current.cuh"
#include "embedding_collection_weights.cuh"

namespace tsr {
namespace {

Tensor embedding_collection_weights_backward_cuda(
    const Tensor& grad, const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
    const std::vector<Tensor>& last_steps, const std::optional<Tensor>& history, const Tensor& indices,
    const std::optional<Tensor>& offsets, const Tensor& per_sample_weights, const Tensor& output,
    const std::vector<int64_t>& tables, const std::vector<int64_t>& keys, const std::vector<int64_t>& modes,
    const std::vector<int64_t>& bags, const std::vector<int64_t>& padding_idx, bool side_by_side, int64_t rule_value,
    const std::vector<double>& hyperparameters, int64_t step, int64_t base) {
  const CollectionLists lists{tables, keys, modes, bags, padding_idx, side_by_side};
  const Collection c = check_embedding_collection_weights_backward(grad, weights, states, last_steps, history, indices,
                                                                   offsets, per_sample_weights, output, lists);
  OptimizerRule rule{};
  if (history) {
    rule = check_collection_current(c.op, weights, states, last_steps, history, rule_value, hyperparameters, step, base);
  }
  DeviceCall call(c.op, weights[0]);
  const Tensor out = call.empty({indices.size(0)}, weights[0].scalar_type());
  const WeightsGradient gradient{c, grad, indices, offsets, per_sample_weights, output};
  if (history) {
    const CollectionOptimizer optimizer{weights, states, last_steps, history, rule, hyperparameters, step, base};
    write_current_weights_gradient(call, gradient, optimizer, out);
    return out;
  }
  std::vector<const void*> stored;
  for (const Tensor& weight : weights) stored.push_back(call.data(weight));
  dispatch_float(weights[0].scalar_type(), call.op(), "weights", [&](auto tag) {
    using T = typename decltype(tag)::type;
    write_weights_gradient<T>(call, gradient, StoredRows<T>(), stored, out);
  });
  return out;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding_collection_weights_backward", &tsr::embedding_collection_weights_backward_cuda);
}
