// The up-to-date rows of a collection's tables, for kernels that read them: stale rows are not written.
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
  int64_t step, base;
};

// Calls f with the kernels' OptimizerCall<A>, its list of rules, and the tables on the device. Nothing is written: the
// tensors may have any layout.
template <class A, class F>
void with_current_tables(DeviceCall& call, const CollectionOptimizer& given, const F& f) {
  const std::vector<Tensor> weights = readable_rows(given.weights), states = readable_rows(given.states);
  std::vector<Tensor> last_steps;
  for (const Tensor& x : given.last_steps) last_steps.push_back(as_contiguous(x));
  const CollectionOptimizer o{weights, states, last_steps, given.history, given.rule, given.step, given.base};
  const std::optional<Tensor> no_scale;
  const OptimizerArguments arguments{o.rule,    o.step,   o.base, o.step, o.weights[0].scalar_type(),
                                     o.history, no_scale, false,  false};
  const OptimizerTable* const tables = upload(call, optimizer_tables(arguments, weights, states, last_steps, {}));
  const OptimizerCall<A> step_call = optimizer_call<A>(call, arguments);
  with_idle_rules(step_call, [&](auto rules) { f(step_call, rules, tables); });
}

}  // namespace tsr
