// The optimizers of row_optimizer.h, and what operators ask of one. What an optimizer is: row_optimizer_rule.h.
#pragma once
#include <optional>
#include <string_view>
#include <variant>

#include "row_optimizer_adadelta.h"
#include "row_optimizer_adagrad.h"
#include "row_optimizer_adam.h"
#include "row_optimizer_adamax.h"
#include "row_optimizer_ftrl.h"
#include "row_optimizer_lamb.h"
#include "row_optimizer_lion.h"
#include "row_optimizer_rmsprop.h"
#include "row_optimizer_sgd.h"

namespace tsr {

// One of the optimizers, with its hyperparameters. Its place in this list is its number in the schemas.
using OptimizerRule = std::variant<SgdOptimizer, AdagradOptimizer, RowwiseAdagradOptimizer, AdamOptimizer,
                                   AmsgradOptimizer, PartialRowwiseAdamOptimizer, RmspropOptimizer, FtrlOptimizer,
                                   AdadeltaOptimizer, LambOptimizer, LionOptimizer, AdamaxOptimizer>;
constexpr int64_t kOptimizerRules = std::variant_size_v<OptimizerRule>;

template <size_t... k>
std::array<OptimizerRule, sizeof...(k)> all_optimizer_rules(std::index_sequence<k...>) {
  return {OptimizerRule(std::in_place_index<k>)...};
}

// Every optimizer by its number, without values.
inline const std::array<OptimizerRule, kOptimizerRules>& optimizer_rules() {
  static const auto rules = all_optimizer_rules(std::make_index_sequence<kOptimizerRules>());
  return rules;
}

// ---- Checks ---------------------------------------------------------------------------------------------------------

// The optimizer of this number with these hyperparameters, whatever their values.
inline OptimizerRule named_optimizer_rule(const char* op, int64_t value, const std::vector<double>& h) {
  TSR_CHECK_VALUE(value >= 0 && value < kOptimizerRules, op, ": rule must be in [0, ", kOptimizerRules, "), got ",
                  value);
  OptimizerRule rule = optimizer_rules()[static_cast<size_t>(value)];
  std::visit(
      [&](auto& optimizer) {
        const auto& fields = optimizer.kHyperparameters;
        TSR_CHECK_VALUE(h.size() == std::size(fields), op, ": hyperparameters must be ", std::size(fields), " for ",
                        optimizer.kName, ", got ", h.size());
        for (size_t k = 0; k < h.size(); ++k) optimizer.*fields[k].member = h[k];
      },
      rule);
  return rule;
}

// Written so that a NaN is outside.
inline void check_range(const char* op, const char* name, Range range, double value) {
  const auto must = [&](bool holds, const char* what) {
    TSR_CHECK_VALUE(holds, op, ": ", name, " must be ", what, ", got ", value);
  };
  switch (range) {
    case Range::kNotNegative:
      return must(value >= 0, ">= 0");
    case Range::kPositive:
      return must(value > 0, "> 0");
    case Range::kNotPositive:
      return must(value <= 0, "<= 0");
    case Range::kBelowOne:
      return must(value >= 0 && value < 1, "in [0, 1)");
    case Range::kUpToOne:
      return must(value >= 0 && value <= 1, "in [0, 1]");
    case Range::kFlag:
      return must(value == 0 || value == 1, "0 or 1");
    case Range::kNumber:
      return must(value == value, "a number");
  }
}

inline OptimizerRule check_optimizer_rule(const char* op, int64_t value, const std::vector<double>& h) {
  const OptimizerRule rule = named_optimizer_rule(op, value, h);
  std::visit(
      [&](const auto& optimizer) {
        for (const auto& field : optimizer.kHyperparameters) {
          check_range(op, field.name, field.range, optimizer.*field.member);
        }
        optimizer.check(op);
      },
      rule);
  return rule;
}

// ---- Questions ------------------------------------------------------------------------------------------------------

// The states of a table, in their order.
inline StateNames state_names(const OptimizerRule& rule) {
  return std::visit([](const auto& optimizer) { return optimizer.states(); }, rule);
}

// The state that has one value per row, by its place; -1: none.
inline int row_state(const OptimizerRule& rule) {
  return std::visit([](const auto& optimizer) { return optimizer.kRowState; }, rule);
}

// The optimizer's value by its name; null: it has none.
inline double* hyperparameter(OptimizerRule& rule, std::string_view name) {
  return std::visit(
      [&](auto& optimizer) -> double* {
        for (const auto& field : optimizer.kHyperparameters) {
          if (field.name == name) return &(optimizer.*field.member);
        }
        return nullptr;
      },
      rule);
}

// The optimizer of rows whose gradient is zero, where it is another: decay is for the others alone.
inline std::optional<OptimizerRule> rule_of_zeros(OptimizerRule rule) {
  const double* seen = hyperparameter(rule, "decay_seen");
  if (seen == nullptr || *seen == 0) return std::nullopt;
  double* decay = hyperparameter(rule, "weight_decay");
  if (*decay == 0) return std::nullopt;
  *decay = 0;
  return rule;
}

inline OptimizerRule idle_rule(const OptimizerRule& rule) { return rule_of_zeros(rule).value_or(rule); }

inline IdleMotion idle_motion(const OptimizerRule& rule) {
  return std::visit([](const auto& optimizer) { return optimizer.motion(); }, idle_rule(rule));
}

template <class Optimizer>
constexpr bool kHasMap = !std::is_same_v<typename Optimizer::Map, NoMap>;

// Whether idle steps have a map that history can hold. Where they change nothing, that is "no".
inline bool has_idle_maps(const OptimizerRule& rule) {
  return std::visit([](const auto& optimizer) { return kHasMap<std::decay_t<decltype(optimizer)>>; }, rule);
}

// Whether a step that flushes no rows must look for zeros among those that it names: plain descent does not move
// them.
inline bool must_skip_zeros(const OptimizerRule& rule) {
  return state_names(rule).size() > 0 || idle_motion(rule).kind != IdleMotion::kNone;
}

// ---- Dispatch -------------------------------------------------------------------------------------------------------

// Calls f with the optimizer if it has idle maps.
template <class F>
void dispatch_map(const OptimizerRule& rule, F&& f) {
  std::visit(
      [&](const auto& optimizer) {
        if constexpr (kHasMap<std::decay_t<decltype(optimizer)>>) f(optimizer);
      },
      rule);
}

template <class Optimizer, class F, class... Rules>
void dispatch_choice(const Optimizer& optimizer, int64_t step, RuleList<Rules...>, F&& f) {
  int choice = optimizer.choice();
  ((choice-- == 0 ? f(Rules(optimizer, step)) : void()), ...);
}

// Calls f with the rule of step `step` in the accumulator's type A.
template <class A, class F>
void dispatch_optimizer_rule(const OptimizerRule& rule, int64_t step, F&& f) {
  std::visit(
      [&](const auto& optimizer) {
        dispatch_choice(optimizer, step, typename std::decay_t<decltype(optimizer)>::template Rules<A>(), f);
      },
      rule);
}

}  // namespace tsr
