// The optimizers adam and amsgrad, torch.optim's Adam and AdamW, and partial_rowwise_adam, FBGEMM's: one second moment
// per row.
#pragma once
#include "row_optimizer_rule.h"

namespace tsr {

template <class A, bool kAmsgrad>
struct AdamRule;
template <class A>
struct PartialRowwiseAdamRule;

// kept: what a step leaves of the weight.
template <class Map, class Optimizer>
Map adam_leaf(const Optimizer& h, double kept, bool tensorflow_eps, int64_t step) {
  const double t = static_cast<double>(step);
  Map leaf;
  leaf.p1 = h.beta1;
  leaf.root2 = std::sqrt(h.beta2);
  leaf.d = kept;
  const double root = std::sqrt(1 - std::pow(h.beta2, t));
  // Where eps stands before the correction of the bias, the root is the weight's instead of A's.
  const double factor = leaf.shrinking() / (tensorflow_eps ? 1 : root);
  double weight = h.lr / (1 - std::pow(h.beta1, t)) * h.beta1 * (tensorflow_eps ? root : 1);
  for (double& n : leaf.n) {
    n = weight;
    weight *= factor;
  }
  return leaf;
}

template <bool kAmsgrad>
struct AdamsOptimizer : OptimizerBase {
  double lr, beta1, beta2, eps, weight_decay, decoupled, tensorflow_eps, decay_seen;

  static constexpr const char* kName = kAmsgrad ? "amsgrad" : "adam";
  static constexpr Hyperparameter<AdamsOptimizer> kHyperparameters[8] = {
      {"lr", &AdamsOptimizer::lr},
      {"beta1", &AdamsOptimizer::beta1, Range::kBelowOne},
      {"beta2", &AdamsOptimizer::beta2, Range::kBelowOne},
      {"eps", &AdamsOptimizer::eps},
      {"weight_decay", &AdamsOptimizer::weight_decay},
      {"decoupled", &AdamsOptimizer::decoupled, Range::kFlag},
      {"tensorflow_eps", &AdamsOptimizer::tensorflow_eps, Range::kFlag},
      {"decay_seen", &AdamsOptimizer::decay_seen, Range::kFlag},
  };
  template <class A>
  using Rules = RuleList<AdamRule<A, kAmsgrad>>;
  using Map = AdamMap<!kAmsgrad>;

  StateNames states() const {
    return kAmsgrad ? StateNames{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} : StateNames{"exp_avg", "exp_avg_sq"};
  }
  IdleMotion motion() const {
    return weight_decay != 0 && decoupled == 0 ? kDecayInSecondMoment : IdleMotion{IdleMotion::kWeight};
  }
  bool shrinks_weights() const { return decoupled != 0; }
  Map leaf(int64_t step) const {
    return adam_leaf<Map>(*this, decoupled != 0 ? 1 - lr * weight_decay : 1, tensorflow_eps != 0, step);
  }
};
using AdamOptimizer = AdamsOptimizer<false>;
using AmsgradOptimizer = AdamsOptimizer<true>;

struct PartialRowwiseAdamOptimizer : OptimizerBase {
  double lr, beta1, beta2, eps, weight_decay;

  static constexpr const char* kName = "partial_rowwise_adam";
  static constexpr Hyperparameter<PartialRowwiseAdamOptimizer> kHyperparameters[] = {
      {"lr", &PartialRowwiseAdamOptimizer::lr},
      {"beta1", &PartialRowwiseAdamOptimizer::beta1, Range::kBelowOne},
      {"beta2", &PartialRowwiseAdamOptimizer::beta2, Range::kBelowOne},
      {"eps", &PartialRowwiseAdamOptimizer::eps},
      {"weight_decay", &PartialRowwiseAdamOptimizer::weight_decay},
  };
  template <class A>
  using Rules = RuleList<PartialRowwiseAdamRule<A>>;
  using Map = AdamMap<true>;
  static constexpr int kRowState = 1;

  StateNames states() const { return {"exp_avg", "exp_avg_sq"}; }
  IdleMotion motion() const { return {IdleMotion::kWeight}; }
  bool shrinks_weights() const { return true; }
  Map leaf(int64_t step) const { return adam_leaf<Map>(*this, 1 - lr * weight_decay, /*tensorflow_eps=*/false, step); }
};

// What the rules of Adam's family compute once a step. The first moment moves towards the gradient by a share of what
// is between them, as torch's lerp does: beta1 and 1 - beta1, once rounded, do not add up to 1, which it would
// remember.
template <class A>
struct AdamScalars {
  A beta2, incoming1, incoming2, step_size, inverse_root, eps, kept, decay;
  // tensorflow_eps: eps is added to sqrt(v), not to the root of v without its bias.
  template <class Optimizer>
  AdamScalars(const Optimizer& h, int64_t step, bool decoupled, bool tensorflow_eps = false)
      : beta2(static_cast<A>(h.beta2)),
        incoming1(static_cast<A>(1 - h.beta1)),
        incoming2(static_cast<A>(1 - h.beta2)),
        step_size(static_cast<A>(h.lr / (1 - std::pow(h.beta1, static_cast<double>(step))))),
        inverse_root(static_cast<A>(1 / std::sqrt(1 - std::pow(h.beta2, static_cast<double>(step))))),
        eps(static_cast<A>(h.eps)),
        kept(static_cast<A>(decoupled ? 1 - h.lr * h.weight_decay : 1)),
        decay(static_cast<A>(decoupled ? 0 : h.weight_decay)) {
    if (!tensorflow_eps) return;
    const double t = static_cast<double>(step);
    step_size = static_cast<A>(h.lr * std::sqrt(1 - std::pow(h.beta2, t)) / (1 - std::pow(h.beta1, t)));
    inverse_root = A(1);
  }

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A divisor(A v) const { return std::sqrt(v) * inverse_root + eps; }
};

template <class A, bool kAmsgrad>
struct AdamRule : ElementRule<A> {
  using Map = AdamMap<!kAmsgrad>;
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  AdamScalars<A> at;
  AdamRule(const AdamsOptimizer<kAmsgrad>& h, int64_t step) : at(h, step, h.decoupled != 0, h.tensorflow_eps != 0) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A eps() const { return at.eps; }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A root(const A* state) const { return std::sqrt(state[kStates - 1]); }

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A grad, A) const {
    const A g = decayed(grad, w, at.decay);
    state[0] += at.incoming1 * (g - state[0]);
    state[1] = at.beta2 * state[1] + at.incoming2 * (g * g);
    // A NaN wins, as in torch.maximum.
    if constexpr (kAmsgrad) state[2] = state[1] > state[2] || state[1] != state[1] ? state[1] : state[2];
    w = at.kept * w - at.step_size * state[0] / at.divisor(state[kStates - 1]);
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void catch_up(const AdamIdle<A>& idle, A sum, A& w, A* state) const {
    w = idle.d * w - state[0] * sum;
    state[0] = idle.first(state[0]);
    state[1] = idle.second(state[1]);
  }
};

// v is one number per row, the average of mean(g^2). So S is one number per row too.
template <class A>
struct PartialRowwiseAdamRule {
  using Map = AdamMap<true>;
  static constexpr int kStates = 1;
  static constexpr bool kRowState = true;
  static constexpr int kRowSums = 1;
  static constexpr bool kGatherWrites = false;
  AdamScalars<A> at;
  PartialRowwiseAdamRule(const PartialRowwiseAdamOptimizer& h, int64_t step) : at(h, step, /*decoupled=*/true) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A eps() const { return at.eps; }

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void gather(A, A*, A grad, A* sums) const { sums[0] += grad * grad; }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A row(const A* sums, int64_t dim, A* row_state) const {
    const A mean = mean_of(sums[0], dim);
    // An infinite average stays, or becomes NaN by the mean alone.
    *row_state += *row_state <= std::numeric_limits<A>::max() ? at.incoming2 * (mean - *row_state) : mean;
    return at.step_size / at.divisor(*row_state);
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A grad, A rate) const {
    state[0] += at.incoming1 * (grad - state[0]);
    w = at.kept * w - rate * state[0];
  }
  // The row's state is the caller's to let fade, once.
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void catch_up(const AdamIdle<A>& idle, A sum, A& w, A* state) const {
    w = idle.d * w - state[0] * sum;
    state[0] = idle.first(state[0]);
  }
};

}  // namespace tsr
