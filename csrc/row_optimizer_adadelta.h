// The optimizer adadelta: torch.optim.Adadelta.
#pragma once
#include "row_optimizer_rule.h"

namespace tsr {

template <class A>
struct AdadeltaRule;

struct AdadeltaOptimizer : OptimizerBase {
  double lr, rho, eps, weight_decay;

  static constexpr const char* kName = "adadelta";
  static constexpr Hyperparameter<AdadeltaOptimizer> kHyperparameters[] = {
      {"lr", &AdadeltaOptimizer::lr},
      {"rho", &AdadeltaOptimizer::rho, Range::kUpToOne},
      {"eps", &AdadeltaOptimizer::eps},
      {"weight_decay", &AdadeltaOptimizer::weight_decay},
  };
  template <class A>
  using Rules = RuleList<AdadeltaRule<A>>;
  using Map = LinearMap;

  StateNames states() const { return {"square_avg", "acc_delta"}; }
  IdleMotion motion() const { return weight_decay != 0 ? kDecayInSecondMoment : IdleMotion{IdleMotion::kStates}; }
  LinearMap leaf(int64_t) const {
    LinearMap leaf;
    leaf.p = rho;
    return leaf;
  }
};

template <class A>
struct AdadeltaRule : ElementRule<A> {
  using Map = LinearMap;
  static constexpr int kStates = 2;
  A lr, rho, incoming, eps, decay;
  AdadeltaRule(const AdadeltaOptimizer& h, int64_t)
      : lr(static_cast<A>(h.lr)),
        rho(static_cast<A>(h.rho)),
        incoming(static_cast<A>(1 - h.rho)),
        eps(static_cast<A>(h.eps)),
        decay(static_cast<A>(h.weight_decay)) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A grad, A) const {
    const A g = decayed(grad, w, decay);
    state[0] = rho * state[0] + incoming * (g * g);
    const A delta = std::sqrt(state[1] + eps) / std::sqrt(state[0] + eps) * g;
    state[1] = rho * state[1] + incoming * (delta * delta);
    w -= lr * delta;
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void catch_up(const LinearIdle<A>& idle, A&, A* state) const {
    state[0] = idle.faded(state[0]);
    state[1] = idle.faded(state[1]);
  }
};

}  // namespace tsr
