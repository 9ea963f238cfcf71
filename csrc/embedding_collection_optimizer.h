// What the operators of embedding_collection ask of an optimizer's tables: the checks of row_optimizer.h in their words.
#pragma once
#include "embedding_collection.h"
#include "row_optimizer.h"

namespace tsr {

// Tables whose rows are looked up as of `step`, and their gradients.
inline OptimizerRule check_collection_current(const char* op, const std::vector<Tensor>& weights,
                                              const std::vector<Tensor>& states, const std::vector<Tensor>& last_steps,
                                              const std::optional<Tensor>& history, int64_t rule_value,
                                              const std::vector<double>& hyperparameters, int64_t step, int64_t base) {
  const OptimizerRule rule = check_optimizer_rule(op, rule_value, hyperparameters);
  check_optimizer_steps(op, step, base, /*least=*/0);
  check_optimizer_tables(op, rule, hyperparameters, weights, states, last_steps);
  TSR_CHECK_VALUE(!last_steps.empty(), op, ": last_steps must be one for each of the ", weights.size(),
                  " tables, got none");
  check_catching_up(op, last_steps, history, step - base);
  return rule;
}

// The wanted tables of a step.
inline OptimizerRule check_collection_step(const char* op, const std::vector<Tensor>& weights,
                                           const std::vector<Tensor>& states, const std::vector<Tensor>& last_steps,
                                           const std::optional<Tensor>& history,
                                           const std::optional<Tensor>& grad_scale, int64_t rule_value,
                                           const std::vector<double>& hyperparameters, int64_t step, int64_t base,
                                           const std::vector<int64_t>& rounding_seeds) {
  const OptimizerRule rule = check_optimizer_rule(op, rule_value, hyperparameters);
  check_optimizer_steps(op, step, base, /*least=*/1);
  check_optimizer_tables(op, rule, hyperparameters, weights, states, last_steps);
  check_catching_up(op, last_steps, history, step - 1 - base);
  if (!last_steps.empty()) check_idle_rows(op, rule, hyperparameters);
  check_rounding_seeds(op, weights, rounding_seeds);
  check_grad_scale(op, grad_scale, weights);
  return rule;
}

}  // namespace tsr
