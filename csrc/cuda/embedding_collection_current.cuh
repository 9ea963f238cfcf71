// The rows of a collection's tables as of now, for kernels that read them.
#pragma once
#include "embedding_collection.cuh"
#include "row_optimizer.cuh"

namespace tsr {

// A weight as its table would hold it.
template <class A>
__device__ A rounded_weight(const OptimizerCall<A>& call, A weight) {
  with_weight_type<A>(call.weight_dtype, [&](auto* type) {
    weight = static_cast<A>(static_cast<std::remove_pointer_t<decltype(type)>>(weight));
  });
  return weight;
}

// What the operators take of an optimizer.
struct CollectionOptimizer {
  const std::vector<Tensor>&weights, &states, &last_steps;
  const std::optional<Tensor>& history;
  OptimizerRule rule;
  const std::vector<double>& hyperparameters;
  int64_t step, base;
};

inline std::vector<OptimizerTable> optimizer_tables(const CollectionOptimizer& o, const OptimizerArguments& arguments,
                                                    const std::vector<int64_t>& seeds) {
  std::vector<OptimizerTable> tables;
  const size_t per_table = o.states.size() / std::max<size_t>(o.weights.size(), 1);
  for (size_t k = 0; k < o.weights.size(); ++k) {
    tables.push_back(optimizer_table(arguments, o.weights[k], o.states.data() + k * per_table,
                                     o.last_steps.empty() ? nullptr : &o.last_steps[k], seeds.empty() ? 0 : seeds[k]));
  }
  return tables;
}

// Calls f with the kernels' OptimizerCall<A>, its list of rules, and the tables on the device. Nothing is written: the
// tensors may have any layout.
template <class A, class F>
void with_current_tables(DeviceCall& call, const CollectionOptimizer& given, const F& f) {
  const auto readable = [](const std::vector<Tensor>& tensors) {
    std::vector<Tensor> result;
    for (const Tensor& x : tensors) result.push_back(readable_rows(x));
    return result;
  };
  const std::vector<Tensor> weights = readable(given.weights), states = readable(given.states);
  std::vector<Tensor> last_steps;
  for (const Tensor& x : given.last_steps) last_steps.push_back(as_contiguous(x));
  const CollectionOptimizer o{weights,    states,    last_steps, given.history, given.rule, given.hyperparameters,
                              given.step, given.base};
  const std::optional<Tensor> no_scale;
  const OptimizerArguments arguments{o.rule,    o.hyperparameters, o.step, o.base, o.step, o.weights[0].scalar_type(),
                                     o.history, no_scale,          false,  false};
  const OptimizerTable* const tables = upload_all(call, optimizer_tables(o, arguments, {}));
  const OptimizerCall<A> step_call = optimizer_call<A>(call, arguments);
  with_idle_rules(step_call, [&](auto rules) { f(step_call, rules, tables); });
}

}  // namespace tsr
