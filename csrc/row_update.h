// row_update: an optimizer's step on the rows of a table that a batch names.
//
// row_update(weight [V, ...], state0, state1, state2 [V, ...]?, grad [N, ...], indices [N], rule, hyperparameters):
//   for i in 0 .. N - 1: rule(weight[indices[i]], state[indices[i]], grad[i]), element by element, in place.
// The rule is one of RowRule; its policy below holds the formula. It says how many states there are and which
// hyperparameters, in which order.
// * Duplicates: items of one row are processed one after another, in the order of i, each seeing what its predecessor
//   left: the result is that of N calls with one item each, bit for bit. Rows that no item names are not touched.
// * dtypes: weight, states and grad float16, bfloat16, float32 or float64, all the same; indices int32 or int64. Half
//   types are computed in float32 and rounded when stored, after every item.
// * Layout: weight and states of rank >= 1 and one shape. Their rows may be any number of elements apart, but the
//   elements of a row must be contiguous, and no memory may be shared between them or with grad or indices. N, V and
//   the elements of a row may be 0.
// * Errors: ValueError for shapes, dtypes, layouts, a number of states or hyperparameters that is not the rule's, and
//   hyperparameters outside their range; IndexError for an index outside [0, V). After an error nothing is written. On
//   CUDA an item with a bad index is skipped and reported, and the others are applied.
// * NaN and infinite gradients follow the formulas: a NaN makes its own elements NaN, and no others.
//
// Determinism: one thread owns a row, so that the bits are the same on every run, for every number of threads and, on
// the CPU, every instruction set. CUDA's differ from the CPU's: products are fused with additions.
// Not differentiable: an update happens outside the graph.
// Source: TensorFlow's ResourceSparseApply* operators and ResourceScatterSub.
#pragma once
#include <cmath>

#include "checks.h"
#include "shared_memory.h"

namespace tsr {

// ---- Rules ----------------------------------------------------------------------------------------------------------

// The values of `rule` in the schema; torchsparse_rec/ops/row_update.py mirrors them.
enum class RowRule : int64_t {
  kGradientDescent = 0,
  kMomentum = 1,
  kNesterovMomentum = 2,
  kKerasMomentum = 3,
  kKerasNesterovMomentum = 4,
  kAdagrad = 5,
  kAdagradFrozen = 6,
  kAdagradDualAveraging = 7,
  kAdadelta = 8,
  kFtrl = 9,
  kFtrlScaledLinear = 10,
  kProximalAdagrad = 11,
  kProximalGradientDescent = 12,
  kRmsProp = 13,
  kCenteredRmsProp = 14,
};
constexpr int64_t kRowRules = 15;
constexpr int kMostStates = 3;

// What the checks know of a rule: the operator's name in errors, its hyperparameters, its states.
struct RowRuleWords {
  const char* op;
  std::vector<const char*> hyperparameters;
  std::vector<const char*> states;
};

inline const RowRuleWords& words_of(RowRule rule) {
  static const std::array<RowRuleWords, kRowRules> words{{
      {"sparse_apply_gradient_descent_", {"lr"}, {}},
      {"sparse_apply_momentum_", {"lr", "momentum"}, {"momentum_buffer"}},
      {"sparse_apply_momentum_", {"lr", "momentum"}, {"momentum_buffer"}},
      {"sparse_apply_keras_momentum_", {"lr", "momentum"}, {"momentum_buffer"}},
      {"sparse_apply_keras_momentum_", {"lr", "momentum"}, {"momentum_buffer"}},
      {"sparse_apply_adagrad_", {"lr", "eps"}, {"accumulator"}},
      {"sparse_apply_adagrad_", {"lr", "eps"}, {"accumulator"}},
      {"sparse_apply_adagrad_da_", {"lr", "l1", "l2", "step"}, {"grad_sum", "square_sum"}},
      {"sparse_apply_adadelta_", {"lr", "rho", "eps"}, {"square_avg", "acc_delta"}},
      {"sparse_apply_ftrl_", {"lr", "l1", "l2", "l2_shrinkage", "lr_power"}, {"accumulator", "linear"}},
      {"sparse_apply_ftrl_", {"lr", "l1", "l2", "l2_shrinkage", "lr_power"}, {"accumulator", "linear"}},
      {"sparse_apply_proximal_adagrad_", {"lr", "l1", "l2"}, {"accumulator"}},
      {"sparse_apply_proximal_gradient_descent_", {"lr", "l1", "l2"}, {}},
      {"sparse_apply_rmsprop_", {"lr", "rho", "momentum", "eps"}, {"square_avg", "momentum_buffer"}},
      {"sparse_apply_centered_rmsprop_",
       {"lr", "rho", "momentum", "eps"},
       {"grad_avg", "square_avg", "momentum_buffer"}},
  }};
  return words[static_cast<size_t>(rule)];
}

// ---- Policies -------------------------------------------------------------------------------------------------------
//
// A policy is one element's step, in the accumulator's type A (float or double): rule(weight, state, grad) changes
// weight and state[0 .. kStates). The order of operations is TensorFlow's. Policies hold their hyperparameters, taken
// from a list in the order of words_of, and nothing else: kernels take them by value.

template <class A>
struct GradientDescent {
  static constexpr int kStates = 0;
  A lr;
  explicit GradientDescent(const double* h) : lr(static_cast<A>(h[0])) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A*, A grad) const { weight -= lr * grad; }
};

template <class A, bool kNesterov>
struct Momentum {
  static constexpr int kStates = 1;
  A lr, momentum;
  explicit Momentum(const double* h) : lr(static_cast<A>(h[0])), momentum(static_cast<A>(h[1])) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A* state, A grad) const {
    state[0] = state[0] * momentum + grad;
    weight -= kNesterov ? lr * grad + lr * momentum * state[0] : lr * state[0];
  }
};

template <class A, bool kNesterov>
struct KerasMomentum {
  static constexpr int kStates = 1;
  A lr, momentum;
  explicit KerasMomentum(const double* h) : lr(static_cast<A>(h[0])), momentum(static_cast<A>(h[1])) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A* state, A grad) const {
    state[0] = state[0] * momentum - grad * lr;
    weight += kNesterov ? state[0] * momentum - grad * lr : state[0];
  }
};

template <class A, bool kAccumulate>
struct Adagrad {
  static constexpr int kStates = 1;
  A lr, eps;
  explicit Adagrad(const double* h) : lr(static_cast<A>(h[0])), eps(static_cast<A>(h[1])) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A* state, A grad) const {
    if (kAccumulate) state[0] += grad * grad;
    weight -= lr * grad / (std::sqrt(state[0]) + eps);
  }
};

// What is left of x when its magnitude shrinks by `by` >= 0: zero at least. A NaN stays one.
template <class A>
TSR_HOST_DEVICE TSR_ALWAYS_INLINE A shrunk(A x, A by) {
  const A size = std::fabs(x) - by;
  const A left = size <= A(0) ? A(0) : size;
  return x < A(0) ? -left : left;
}

template <class A>
struct AdagradDualAveraging {
  static constexpr int kStates = 2;
  A l1, l2, step, step_lr;
  explicit AdagradDualAveraging(const double* h)
      : l1(static_cast<A>(h[1])), l2(static_cast<A>(h[2])), step(static_cast<A>(h[3])) {
    step_lr = step * static_cast<A>(h[0]);
  }

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A* state, A grad) const {
    state[0] += grad;
    state[1] += grad * grad;
    const A mean = state[0] / step;
    weight = -(l1 > A(0) ? shrunk(mean, l1) : mean) / (l2 + std::sqrt(state[1]) / step_lr);
  }
};

template <class A>
struct Adadelta {
  static constexpr int kStates = 2;
  A lr, rho, eps;
  explicit Adadelta(const double* h) : lr(static_cast<A>(h[0])), rho(static_cast<A>(h[1])), eps(static_cast<A>(h[2])) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A* state, A grad) const {
    state[0] = state[0] * rho + grad * grad * (A(1) - rho);
    const A delta = std::sqrt(state[1] + eps) / std::sqrt(state[0] + eps) * grad;
    weight -= delta * lr;
    state[1] = state[1] * rho + delta * delta * (A(1) - rho);
  }
};

// kSquareRoot: lr_power is -1/2. kScaledLinear: `linear` holds lr times what it holds otherwise.
template <class A, bool kSquareRoot>
struct Ftrl {
  static constexpr int kStates = 2;
  // Where linear is scaled, grad_scale and the penalties carry lr, and nothing is divided by it; else the reverse.
  A grad_scale, divisor, l1, twice_l2, twice_shrinkage, power;
  Ftrl(const double* h, bool scaled_linear) : power(-static_cast<A>(h[4])) {
    const A lr = static_cast<A>(h[0]), penalty_scale = scaled_linear ? lr : A(1);
    grad_scale = penalty_scale;
    divisor = scaled_linear ? A(1) : lr;
    l1 = static_cast<A>(h[1]) * penalty_scale;
    twice_l2 = A(2) * static_cast<A>(h[2]) * penalty_scale;
    twice_shrinkage = A(2) * static_cast<A>(h[3]);
  }

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A raised(A x) const { return kSquareRoot ? std::sqrt(x) : std::pow(x, power); }

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A* state, A grad) const {
    const A accumulated = state[0] + grad * grad;
    const A after = raised(accumulated), before = raised(state[0]);
    const A shrinking = twice_shrinkage == A(0) ? grad : grad + twice_shrinkage * weight;
    const A linear = state[1] + (shrinking * grad_scale - (after - before) / divisor * weight);
    const A below = linear > l1 ? l1 : linear;
    const A clamped = below < -l1 ? -l1 : below;
    weight = (clamped - linear) / (after / divisor + twice_l2);
    state[0] = accumulated;
    state[1] = linear;
  }
};

// A gradient step of size lr, then the step towards zero that l1 and l2 ask for.
template <class A>
TSR_HOST_DEVICE TSR_ALWAYS_INLINE A proximal_step(A weight, A grad, A lr, A l1, A l2) {
  const A moved = weight - grad * lr;
  return (l1 > A(0) ? shrunk(moved, lr * l1) : moved) / (A(1) + l2 * lr);
}

template <class A>
struct ProximalAdagrad {
  static constexpr int kStates = 1;
  A lr, l1, l2;
  explicit ProximalAdagrad(const double* h)
      : lr(static_cast<A>(h[0])), l1(static_cast<A>(h[1])), l2(static_cast<A>(h[2])) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A* state, A grad) const {
    state[0] += grad * grad;
    weight = proximal_step(weight, grad, lr / std::sqrt(state[0]), l1, l2);
  }
};

template <class A>
struct ProximalGradientDescent {
  static constexpr int kStates = 0;
  A lr, l1, l2;
  explicit ProximalGradientDescent(const double* h)
      : lr(static_cast<A>(h[0])), l1(static_cast<A>(h[1])), l2(static_cast<A>(h[2])) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A*, A grad) const {
    weight = proximal_step(weight, grad, lr, l1, l2);
  }
};

template <class A>
struct RmsProp {
  static constexpr int kStates = 2;
  A lr, rho, momentum, eps;
  explicit RmsProp(const double* h)
      : lr(static_cast<A>(h[0])),
        rho(static_cast<A>(h[1])),
        momentum(static_cast<A>(h[2])),
        eps(static_cast<A>(h[3])) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A* state, A grad) const {
    state[0] = state[0] * rho + grad * grad * (A(1) - rho);
    state[1] = state[1] * momentum + lr / std::sqrt(state[0] + eps) * grad;
    weight -= state[1];
  }
};

template <class A>
struct CenteredRmsProp {
  static constexpr int kStates = 3;
  A lr, rho, momentum, eps;
  explicit CenteredRmsProp(const double* h)
      : lr(static_cast<A>(h[0])),
        rho(static_cast<A>(h[1])),
        momentum(static_cast<A>(h[2])),
        eps(static_cast<A>(h[3])) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void operator()(A& weight, A* state, A grad) const {
    state[1] = state[1] * rho + grad * grad * (A(1) - rho);
    state[0] = state[0] * rho + grad * (A(1) - rho);
    const A variance = state[1] + eps - state[0] * state[0];
    state[2] = state[2] * momentum + lr / std::sqrt(variance) * grad;
    weight -= state[2];
  }
};

// Calls f with the rule's policy in the accumulator's type A.
template <class A, class F>
void dispatch_rule(RowRule rule, const std::vector<double>& hyperparameters, F&& f) {
  const double* h = hyperparameters.data();
  const auto ftrl = [&](bool scaled_linear) {
    if (h[4] == -0.5) return f(Ftrl<A, true>(h, scaled_linear));
    f(Ftrl<A, false>(h, scaled_linear));
  };
  switch (rule) {
    case RowRule::kGradientDescent:
      return f(GradientDescent<A>(h));
    case RowRule::kMomentum:
      return f(Momentum<A, false>(h));
    case RowRule::kNesterovMomentum:
      return f(Momentum<A, true>(h));
    case RowRule::kKerasMomentum:
      return f(KerasMomentum<A, false>(h));
    case RowRule::kKerasNesterovMomentum:
      return f(KerasMomentum<A, true>(h));
    case RowRule::kAdagrad:
      return f(Adagrad<A, true>(h));
    case RowRule::kAdagradFrozen:
      return f(Adagrad<A, false>(h));
    case RowRule::kAdagradDualAveraging:
      return f(AdagradDualAveraging<A>(h));
    case RowRule::kAdadelta:
      return f(Adadelta<A>(h));
    case RowRule::kFtrl:
      return ftrl(/*scaled_linear=*/false);
    case RowRule::kFtrlScaledLinear:
      return ftrl(/*scaled_linear=*/true);
    case RowRule::kProximalAdagrad:
      return f(ProximalAdagrad<A>(h));
    case RowRule::kProximalGradientDescent:
      return f(ProximalGradientDescent<A>(h));
    case RowRule::kRmsProp:
      return f(RmsProp<A>(h));
    case RowRule::kCenteredRmsProp:
      return f(CenteredRmsProp<A>(h));
  }
}

// ---- Checks ---------------------------------------------------------------------------------------------------------

using RowStates = std::array<std::optional<Tensor>, kMostStates>;

// The hyperparameters' ranges, which are TensorFlow's. Written so that a NaN is outside.
inline void check_hyperparameters(RowRule rule, const std::vector<double>& h) {
  const RowRuleWords& words = words_of(rule);
  const auto must = [&](bool holds, size_t k, const char* what) {
    TSR_CHECK_VALUE(holds, words.op, ": ", words.hyperparameters[k], " must be ", what, ", got ", h[k]);
  };
  TSR_CHECK_VALUE(h.size() == words.hyperparameters.size(), words.op, ": hyperparameters must be ",
                  words.hyperparameters.size(), ", got ", h.size());
  const bool is_ftrl = rule == RowRule::kFtrl || rule == RowRule::kFtrlScaledLinear;
  if (!is_ftrl && rule != RowRule::kProximalAdagrad) return;
  if (rule == RowRule::kFtrlScaledLinear) {
    must(h[0] >= 0, 0, ">= 0");
  } else {
    must(h[0] > 0, 0, "> 0");
  }
  must(h[1] >= 0, 1, ">= 0");
  must(h[2] >= 0, 2, ">= 0");
  if (!is_ftrl) return;
  must(h[3] >= 0, 3, ">= 0");
  must(h[4] <= 0, 4, "<= 0");
}

inline void check_row_tensors(const char* op, const Tensor& weight, const RowStates& states,
                              const std::vector<const char*>& names, const Tensor& grad, const Tensor& indices) {
  check_written_rows(op, "weight", weight);
  CallMemory memory;
  memory.add_written(Place{"weight"}, weight);
  for (size_t k = 0; k < names.size(); ++k) {
    const Tensor& state = *states[k];
    TSR_CHECK_VALUE(state.sizes().equals(weight.sizes()), op, ": ", names[k], " must have the shape of weight, ",
                    shape_text(weight), ", got ", shape_text(state));
    TSR_CHECK_VALUE(state.scalar_type() == weight.scalar_type(), op, ": ", names[k], " must have the dtype of weight, ",
                    dtype_name(weight.scalar_type()), ", got ", dtype_name(state.scalar_type()));
    check_same_device(op, names[k], state, "weight", weight);
    check_written_rows(op, names[k], state);
    memory.add_written(Place{names[k]}, state);
  }
  memory.add_read(Place{"grad"}, grad);
  memory.add_read(Place{"indices"}, indices);
  memory.check(op);
}

inline RowRule check_row_update(const Tensor& weight, const RowStates& states, const Tensor& grad,
                                const Tensor& indices, int64_t rule_value, const std::vector<double>& hyperparameters) {
  TSR_CHECK_VALUE(rule_value >= 0 && rule_value < kRowRules, "row_update: rule must be in [0, ", kRowRules, "), got ",
                  rule_value);
  const RowRule rule = static_cast<RowRule>(rule_value);
  const RowRuleWords& words = words_of(rule);
  const char* op = words.op;
  size_t given = 0;
  while (given < states.size() && states[given]) ++given;
  TSR_CHECK_VALUE(given == words.states.size(), op, ": states must be ", words.states.size(), ", got ", given);
  check_float_dtype(op, "weight", weight);
  TSR_CHECK_VALUE(weight.dim() >= 1, op, ": weight must have rank >= 1, got a scalar");
  check_vector(op, "indices", indices);
  check_index_dtype(op, "indices", indices);
  check_same_device(op, "indices", indices, "weight", weight);
  TSR_CHECK_VALUE(grad.scalar_type() == weight.scalar_type(), op, ": grad must have the dtype of weight, ",
                  dtype_name(weight.scalar_type()), ", got ", dtype_name(grad.scalar_type()));
  check_same_device(op, "grad", grad, "weight", weight);
  bool fits = grad.dim() == weight.dim() && grad.size(0) == indices.size(0);
  for (int64_t d = 1; fits && d < weight.dim(); ++d) fits = grad.size(d) == weight.size(d);
  TSR_CHECK_VALUE(fits, op, ": grad must have one row of weight, whose shape is ", shape_text(weight),
                  ", for each of the ", indices.size(0), " indices, got shape ", shape_text(grad));
  check_row_tensors(op, weight, states, words.states, grad, indices);
  check_hyperparameters(rule, hyperparameters);
  return rule;
}

}  // namespace tsr
