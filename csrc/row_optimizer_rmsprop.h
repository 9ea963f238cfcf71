// The optimizer rmsprop: torch.optim.RMSprop.
#pragma once
#include "row_optimizer_rule.h"

namespace tsr {

template <class A, bool kMomentum, bool kCentered>
struct RmspropRule;

struct RmspropOptimizer : OptimizerBase {
  double lr, alpha, eps, weight_decay, momentum, centered, decay_seen;

  static constexpr const char* kName = "rmsprop";
  static constexpr Hyperparameter<RmspropOptimizer> kHyperparameters[] = {
      {"lr", &RmspropOptimizer::lr},
      {"alpha", &RmspropOptimizer::alpha},
      {"eps", &RmspropOptimizer::eps},
      {"weight_decay", &RmspropOptimizer::weight_decay},
      {"momentum", &RmspropOptimizer::momentum},
      {"centered", &RmspropOptimizer::centered, Range::kFlag},
      {"decay_seen", &RmspropOptimizer::decay_seen, Range::kFlag},
  };
  template <class A>
  using Rules = RuleList<RmspropRule<A, false, false>, RmspropRule<A, false, true>, RmspropRule<A, true, false>,
                         RmspropRule<A, true, true>>;
  using Map = LinearMap;

  int choice() const { return (momentum > 0 ? 2 : 0) + (centered != 0 ? 1 : 0); }
  StateNames states() const {
    StateNames names{"square_avg"};
    if (momentum > 0) names.add("momentum_buffer");
    if (centered != 0) names.add("grad_avg");
    return names;
  }
  IdleMotion motion() const {
    if (weight_decay != 0) return kDecayInSecondMoment;
    return {momentum > 0 ? IdleMotion::kWeight : IdleMotion::kStates};
  }
  LinearMap leaf(int64_t) const {
    LinearMap leaf;
    leaf.p = alpha;
    leaf.b_b = momentum;
    leaf.w_b = -lr * momentum;
    return leaf;
  }
};

template <class A, bool kMomentum, bool kCentered>
struct RmspropRule : ElementRule<A> {
  using Map = LinearMap;
  static constexpr int kStates = 1 + kMomentum + kCentered;
  static constexpr int kAverage = kStates - 1;  // grad_avg, the last
  A lr, alpha, incoming, eps, decay, momentum;
  RmspropRule(const RmspropOptimizer& h, int64_t)
      : lr(static_cast<A>(h.lr)),
        alpha(static_cast<A>(h.alpha)),
        incoming(static_cast<A>(1 - h.alpha)),
        eps(static_cast<A>(h.eps)),
        decay(static_cast<A>(h.weight_decay)),
        momentum(static_cast<A>(h.momentum)) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A grad, A) const {
    const A g = decayed(grad, w, decay);
    state[0] = alpha * state[0] + incoming * (g * g);
    A variance = state[0];
    if constexpr (kCentered) {
      state[kAverage] = alpha * state[kAverage] + incoming * g;
      // An infinite one stays, or becomes NaN by the average alone, not by its square.
      variance -= variance <= std::numeric_limits<A>::max() ? state[kAverage] * state[kAverage] : state[kAverage];
    }
    const A divisor = std::sqrt(variance) + eps;
    if constexpr (kMomentum) {
      state[1] = momentum * state[1] + g / divisor;
      w -= lr * state[1];
    } else {
      w -= lr * g / divisor;
    }
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void catch_up(const LinearIdle<A>& idle, A& w, A* state) const {
    state[0] = idle.faded(state[0]);
    if constexpr (kCentered) state[kAverage] = idle.faded(state[kAverage]);
    if constexpr (kMomentum) idle.move(w, state[1]);
  }
};

}  // namespace tsr
