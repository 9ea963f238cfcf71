// The optimizer ftrl: tf.compat.v1.train.FtrlOptimizer.
#pragma once
#include "row_optimizer_rule.h"
#include "row_update.h"

namespace tsr {

template <class A, bool kSquareRoot>
struct FtrlRule;

struct FtrlOptimizer : OptimizerBase {
  double lr, lr_power, l1, l2, l2_shrinkage, beta;

  static constexpr const char* kName = "ftrl";
  static constexpr Hyperparameter<FtrlOptimizer> kHyperparameters[] = {
      {"lr", &FtrlOptimizer::lr, Range::kPositive},
      {"lr_power", &FtrlOptimizer::lr_power, Range::kNotPositive},
      {"l1", &FtrlOptimizer::l1},
      {"l2", &FtrlOptimizer::l2},
      {"l2_shrinkage", &FtrlOptimizer::l2_shrinkage},
      {"beta", &FtrlOptimizer::beta},
  };
  template <class A>
  using Rules = RuleList<FtrlRule<A, true>, FtrlRule<A, false>>;

  int choice() const { return lr_power == -0.5 ? 0 : 1; }
  StateNames states() const { return {"accumulator", "linear"}; }
  IdleMotion motion() const { return {IdleMotion::kNone}; }
};

// beta is one more l2 penalty.
template <class A, bool kSquareRoot>
struct FtrlRule : ElementRule<A> {
  using Map = NoMap;
  static constexpr int kStates = 2;
  Ftrl<A, kSquareRoot> rule;
  FtrlRule(const FtrlOptimizer& h, int64_t)
      : rule(std::array<double, 5>{h.lr, h.l1, h.l2 + h.beta / (2 * h.lr), h.l2_shrinkage, h.lr_power}.data(),
             /*scaled_linear=*/false) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A grad, A) const { rule(w, state, grad); }
};

}  // namespace tsr
