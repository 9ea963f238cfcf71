// The optimizer sgd: torch.optim.SGD.
#pragma once
#include "row_optimizer_rule.h"

namespace tsr {

enum class SgdKind { kPlain, kMomentum, kNesterov };
template <class A, SgdKind kKind>
struct SgdRule;

struct SgdOptimizer : OptimizerBase {
  double lr, momentum, dampening, nesterov, weight_decay;

  static constexpr const char* kName = "sgd";
  static constexpr Hyperparameter<SgdOptimizer> kHyperparameters[] = {
      {"lr", &SgdOptimizer::lr},
      {"momentum", &SgdOptimizer::momentum},
      {"dampening", &SgdOptimizer::dampening, Range::kNumber},
      {"nesterov", &SgdOptimizer::nesterov, Range::kFlag},
      {"weight_decay", &SgdOptimizer::weight_decay},
  };
  template <class A>
  using Rules = RuleList<SgdRule<A, SgdKind::kPlain>, SgdRule<A, SgdKind::kMomentum>, SgdRule<A, SgdKind::kNesterov>>;
  using Map = LinearMap;

  int choice() const { return momentum == 0 ? 0 : nesterov == 0 ? 1 : 2; }
  void check(const char* op) const {
    TSR_CHECK_VALUE(nesterov == 0 || (momentum > 0 && dampening == 0), op,
                    ": nesterov must come with momentum > 0 and dampening 0");
  }
  StateNames states() const { return momentum != 0 ? StateNames{"momentum_buffer"} : StateNames{}; }
  IdleMotion motion() const { return {momentum != 0 || weight_decay != 0 ? IdleMotion::kWeight : IdleMotion::kNone}; }

  // b' = kept b + decay w; w' = w - lr (nesterov ? weight_decay w + momentum b' : b').
  LinearMap leaf(int64_t step) const {
    LinearMap leaf;
    if (momentum == 0) {
      leaf.w_w = 1 - lr * weight_decay;
      return leaf;
    }
    const double ahead = nesterov != 0 ? momentum : 1;
    leaf.b_b = step == 1 ? 0 : momentum;
    leaf.b_w = step == 1 ? weight_decay : (1 - dampening) * weight_decay;
    leaf.w_b = -lr * ahead * leaf.b_b;
    leaf.w_w = 1 - lr * (ahead * leaf.b_w + (nesterov != 0 ? weight_decay : 0));
    return leaf;
  }
};

template <class A, SgdKind kKind>
struct SgdRule : ElementRule<A> {
  using Map = LinearMap;
  static constexpr int kStates = kKind == SgdKind::kPlain ? 0 : 1;
  A lr, momentum, incoming, decay;
  SgdRule(const SgdOptimizer& h, int64_t step)
      : lr(static_cast<A>(h.lr)),
        // torch begins with the first gradient as the buffer.
        momentum(static_cast<A>(step == 1 ? 0 : h.momentum)),
        incoming(static_cast<A>(step == 1 ? 1 : 1 - h.dampening)),
        decay(static_cast<A>(h.weight_decay)),
        ahead_(static_cast<A>(h.momentum)) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A grad, A) const {
    A g = decayed(grad, w, decay);
    if constexpr (kKind != SgdKind::kPlain) {
      state[0] = momentum * state[0] + incoming * g;
      g = kKind == SgdKind::kNesterov ? g + ahead_ * state[0] : state[0];
    }
    w -= lr * g;
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void catch_up(const LinearIdle<A>& idle, A& w, A* state) const {
    if constexpr (kKind == SgdKind::kPlain) {
      w *= idle.w_w;
    } else {
      idle.move(w, state[0]);
    }
  }

 private:
  A ahead_;
};

}  // namespace tsr
