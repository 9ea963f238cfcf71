// The optimizer lion (Chen et al., "Symbolic Discovery of Optimization Algorithms"): its steps have one length, lr.
#pragma once
#include "row_optimizer_rule.h"

namespace tsr {

template <class A>
struct LionRule;

struct LionOptimizer : OptimizerBase {
  double lr, beta1, beta2, weight_decay;

  static constexpr const char* kName = "lion";
  static constexpr Hyperparameter<LionOptimizer> kHyperparameters[] = {
      {"lr", &LionOptimizer::lr},
      {"beta1", &LionOptimizer::beta1, Range::kBelowOne},
      {"beta2", &LionOptimizer::beta2, Range::kBelowOne},
      {"weight_decay", &LionOptimizer::weight_decay},
  };
  template <class A>
  using Rules = RuleList<LionRule<A>>;
  using Map = LinearMap;

  StateNames states() const { return {"exp_avg"}; }
  IdleMotion motion() const { return {beta1 != 0 || weight_decay != 0 ? IdleMotion::kWeight : IdleMotion::kStates}; }
  // Without gradient the average keeps its sign, which stands for the momentum: it is gone only where beta2 is 0.
  LinearMap leaf(int64_t) const {
    LinearMap leaf;
    leaf.w_w = 1 - lr * weight_decay;
    leaf.w_b = beta1 == 0 ? 0 : -lr;
    leaf.b_b = beta2 == 0 ? 0 : 1;
    leaf.p = beta2;
    return leaf;
  }
};

template <class A>
struct LionRule : ElementRule<A> {
  using Map = LinearMap;
  static constexpr int kStates = 1;
  A lr, beta1, incoming1, beta2, incoming2, kept;
  LionRule(const LionOptimizer& h, int64_t)
      : lr(static_cast<A>(h.lr)),
        beta1(static_cast<A>(h.beta1)),
        incoming1(static_cast<A>(1 - h.beta1)),
        beta2(static_cast<A>(h.beta2)),
        incoming2(static_cast<A>(1 - h.beta2)),
        kept(static_cast<A>(1 - h.lr * h.weight_decay)) {}

  // As torch.sign has it: 0 for NaN.
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE static A sign(A x) { return static_cast<A>((x > A(0)) - (x < A(0))); }
  // An average that fades keeps its sign: it stops at the smallest number with all its bits, or where it is if it is
  // smaller already. Else how a row moves would depend on how often it is caught up.
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE static A faded(A average, A left) {
    const A size = std::abs(average), least = std::numeric_limits<A>::min();
    const A floor = size < least ? size : least;
    return std::abs(left) < floor ? (average < A(0) ? -floor : floor) : left;
  }

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A grad, A) const {
    w = kept * w - lr * sign(beta1 * state[0] + incoming1 * grad);
    const A left = beta2 * state[0];
    state[0] = grad == A(0) && beta2 > A(0) ? faded(state[0], left) : left + incoming2 * grad;
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void catch_up(const LinearIdle<A>& idle, A& w, A* state) const {
    w = idle.w_w * w + idle.w_b * sign(state[0]);
    // A step with beta2 = 0 leaves 0, or NaN of what is not finite.
    state[0] = idle.b_b == A(0) ? idle.b_b * state[0] : faded(state[0], idle.faded(state[0]));
  }
};

}  // namespace tsr
