// The optimizers adagrad, torch.optim.Adagrad, and rowwise_adagrad, FBGEMM's: one sum per row.
#pragma once
#include "row_optimizer_rule.h"

namespace tsr {

template <class A>
struct AdagradRule;
template <class A>
struct RowwiseAdagradRule;

template <bool kRowwise>
struct AdagradsOptimizer : OptimizerBase {
  double lr, lr_decay, eps, weight_decay, decay_seen;

  static constexpr const char* kName = kRowwise ? "rowwise_adagrad" : "adagrad";
  static constexpr Hyperparameter<AdagradsOptimizer> kHyperparameters[5] = {
      {"lr", &AdagradsOptimizer::lr},
      {"lr_decay", &AdagradsOptimizer::lr_decay},
      {"eps", &AdagradsOptimizer::eps},
      {"weight_decay", &AdagradsOptimizer::weight_decay},
      {"decay_seen", &AdagradsOptimizer::decay_seen, Range::kFlag},
  };
  template <class A>
  using Rules = RuleList<std::conditional_t<kRowwise, RowwiseAdagradRule<A>, AdagradRule<A>>>;
  static constexpr int kRowState = kRowwise ? 0 : -1;

  StateNames states() const { return {"sum"}; }
  IdleMotion motion() const { return weight_decay != 0 ? kDecayInSecondMoment : IdleMotion{IdleMotion::kNone}; }

  double rate(int64_t step) const { return lr / (1 + static_cast<double>(step - 1) * lr_decay); }
};
using AdagradOptimizer = AdagradsOptimizer<false>;
using RowwiseAdagradOptimizer = AdagradsOptimizer<true>;

template <class A>
struct AdagradRule : ElementRule<A> {
  using Map = NoMap;
  static constexpr int kStates = 1;
  A lr, eps, decay;
  AdagradRule(const AdagradOptimizer& h, int64_t step)
      : lr(static_cast<A>(h.rate(step))), eps(static_cast<A>(h.eps)), decay(static_cast<A>(h.weight_decay)) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A grad, A) const {
    const A g = decayed(grad, w, decay);
    state[0] += g * g;
    w -= lr * g / (std::sqrt(state[0]) + eps);
  }
};

template <class A>
struct RowwiseAdagradRule {
  using Map = NoMap;
  static constexpr int kStates = 0;
  static constexpr bool kRowState = true;
  static constexpr int kRowSums = 1;
  static constexpr bool kGatherWrites = false;
  A lr, eps, decay;
  RowwiseAdagradRule(const RowwiseAdagradOptimizer& h, int64_t step)
      : lr(static_cast<A>(h.rate(step))), eps(static_cast<A>(h.eps)), decay(static_cast<A>(h.weight_decay)) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void gather(A w, A*, A grad, A* sums) const {
    const A g = decayed(grad, w, decay);
    sums[0] += g * g;
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A row(const A* sums, int64_t dim, A* row_state) const {
    *row_state += mean_of(sums[0], dim);
    return lr / (std::sqrt(*row_state) + eps);
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A*, A grad, A rate) const { w -= rate * decayed(grad, w, decay); }
};

}  // namespace tsr
