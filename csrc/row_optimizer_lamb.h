// The optimizer lamb: FBGEMM's LAMB, whose steps are as long as the row.
#pragma once
#include "row_optimizer_adam.h"

namespace tsr {

template <class A>
struct LambRule;

struct LambOptimizer : OptimizerBase {
  double lr, beta1, beta2, eps, weight_decay;

  static constexpr const char* kName = "lamb";
  static constexpr Hyperparameter<LambOptimizer> kHyperparameters[] = {
      {"lr", &LambOptimizer::lr},
      {"beta1", &LambOptimizer::beta1, Range::kBelowOne},
      {"beta2", &LambOptimizer::beta2, Range::kBelowOne},
      {"eps", &LambOptimizer::eps},
      {"weight_decay", &LambOptimizer::weight_decay},
  };
  template <class A>
  using Rules = RuleList<LambRule<A>>;

  StateNames states() const { return {"exp_avg", "exp_avg_sq"}; }
  IdleMotion motion() const { return {IdleMotion::kNoClosedForm, "the trust ratio"}; }
};

// The trust ratio |w| / |r| is each row's own; 1 where either is 0.
template <class A>
struct LambRule {
  using Map = NoMap;
  static constexpr int kStates = 2;
  static constexpr bool kRowState = false;
  static constexpr int kRowSums = 2;
  static constexpr bool kGatherWrites = true;
  AdamScalars<A> at;
  A lr;
  LambRule(const LambOptimizer& h, int64_t step) : at(h, step, /*decoupled=*/false), lr(static_cast<A>(h.lr)) {
    at.step_size = static_cast<A>(1 / (1 - std::pow(h.beta1, static_cast<double>(step))));
  }

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A direction(A w, const A* state) const {
    return decayed(at.step_size * state[0] / at.divisor(state[1]), w, at.decay);
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void gather(A w, A* state, A grad, A* sums) const {
    state[0] += at.incoming1 * (grad - state[0]);
    state[1] = at.beta2 * state[1] + at.incoming2 * (grad * grad);
    const A r = direction(w, state);
    sums[0] += w * w;
    sums[1] += r * r;
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A row(const A* sums, int64_t, A*) const {
    const A size = std::sqrt(sums[0]), length = std::sqrt(sums[1]);
    return size == A(0) || length == A(0) ? lr : lr * (size / length);
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A, A rate) const { w -= rate * direction(w, state); }
};

}  // namespace tsr
