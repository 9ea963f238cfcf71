// The optimizer adamax: torch.optim.Adamax.
#pragma once
#include "row_optimizer_rule.h"

namespace tsr {

template <class A>
struct AdamaxRule;

struct AdamaxOptimizer : OptimizerBase {
  double lr, beta1, beta2, eps, weight_decay;

  static constexpr const char* kName = "adamax";
  static constexpr Hyperparameter<AdamaxOptimizer> kHyperparameters[] = {
      {"lr", &AdamaxOptimizer::lr},
      {"beta1", &AdamaxOptimizer::beta1, Range::kBelowOne},
      {"beta2", &AdamaxOptimizer::beta2, Range::kBelowOne},
      {"eps", &AdamaxOptimizer::eps},
      {"weight_decay", &AdamaxOptimizer::weight_decay},
  };
  template <class A>
  using Rules = RuleList<AdamaxRule<A>>;

  StateNames states() const { return {"exp_avg", "exp_inf"}; }
  // Every element's divisor stops fading, at eps, in a step of its own.
  IdleMotion motion() const { return {IdleMotion::kNoClosedForm, "a maximum that fades"}; }
};

template <class A>
struct AdamaxRule : ElementRule<A> {
  using Map = NoMap;
  static constexpr int kStates = 2;
  A incoming1, beta2, step_size, eps, decay;
  AdamaxRule(const AdamaxOptimizer& h, int64_t step)
      : incoming1(static_cast<A>(1 - h.beta1)),
        beta2(static_cast<A>(h.beta2)),
        step_size(static_cast<A>(h.lr / (1 - std::pow(h.beta1, static_cast<double>(step))))),
        eps(static_cast<A>(h.eps)),
        decay(static_cast<A>(h.weight_decay)) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A grad, A) const {
    const A g = decayed(grad, w, decay);
    state[0] += incoming1 * (g - state[0]);
    const A left = beta2 * state[1], size = std::abs(g) + eps;
    // A NaN wins, as in torch.maximum.
    state[1] = left > size || left != left ? left : size;
    w -= step_size * state[0] / state[1];
  }
};

}  // namespace tsr
