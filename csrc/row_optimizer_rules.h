// The rules of row_optimizer.h: what one element of a row, its states and its gradient become, on CPU and CUDA alike.
//
// A rule holds its scalars for one step, computed in float64, and is passed to kernels by value. It has
//   Map                             what idle steps do (row_optimizer_idle.h); NoMap: nothing
//   kStates                         states with one value per element, in the order of the schema
//   kRowState                       whether there is one more, with one value per row
//   kRowSums                        sums over the row that a step needs first, by gather; 0: elements are independent
//   gather(w, state, g, sums)       adds one element's part to the sums
//   kGatherWrites                   whether it changes the element's states; then step does not
//   row(sums, dim, row_state)       what the step of every element needs of them; changes the row's state
//   step(w, state, g, row)          the step of one element
//   catch_up(idle, [S,] w, state)   the idle steps of one element; for AdamMap with S(q) of root(state)
#pragma once
#include <limits>
#include <vector>

#include "row_optimizer_idle.h"
#include "row_update.h"

namespace tsr {

constexpr int kMostOptimizerStates = 3;

// ---- Idle steps in the accumulator's type ---------------------------------------------------------------------------

struct NoMap {};

// What is left of an average: the sum of two factors times it. A factor near 1 is 1 and what is missing: rounded as one
// number it would be off by the same share each time, and the errors of a row that is often caught up would add up.
template <class A>
struct Fading {
  A kept, rest;

  TSR_HOST_DEVICE static Fading of(double factor) {
    return factor < 0.5 ? Fading{static_cast<A>(factor), A(0)} : Fading{A(1), static_cast<A>(factor - 1)};
  }
  // An infinite average stays, also where `kept` is 0 for being too small for A.
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A operator()(A average) const {
    const A left = kept * average + rest * average;
    return std::abs(average) <= std::numeric_limits<A>::max() ? left : average;
  }
};

template <class A>
struct LinearIdle {
  A w_w, w_b, b_w, b_b;
  Fading<A> faded;

  TSR_HOST_DEVICE static LinearIdle of(const LinearMap& map) {
    return {static_cast<A>(map.w_w), static_cast<A>(map.w_b), static_cast<A>(map.b_w), static_cast<A>(map.b_b),
            Fading<A>::of(map.p)};
  }
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void move(A& w, A& buffer) const {
    const A before = w;
    w = w_w * before + w_b * buffer;
    // Without decay the weight is none of the momentum's business, also where it is infinite.
    buffer = (b_w == 0 ? A(0) : b_w * before) + b_b * buffer;
  }
};

// All but S, whose terms come beside it.
template <class A>
struct AdamIdle {
  A d;
  Fading<A> first, second;  // of the moments

  template <bool kShrinks>
  TSR_HOST_DEVICE static AdamIdle of(const AdamMap<kShrinks>& map) {
    return {static_cast<A>(map.d), Fading<A>::of(map.p1), Fading<A>::of(map.root2 * map.root2)};
  }
};

// Where eps is 0, S divides by a alone, which must not vanish for being too small for float.
template <class A>
TSR_HOST_DEVICE AdamTerm<A> as_term(const AdamTerm<double>& term) {
  A a = static_cast<A>(term.a);
  if constexpr (std::is_same_v<A, float>) {
    if (term.a > 0 && a < std::numeric_limits<A>::min()) a = std::numeric_limits<A>::min();
  }
  return {a, static_cast<A>(term.m0), static_cast<A>(term.m2), static_cast<A>(term.m3), static_cast<A>(term.d)};
}

// ---- What rules share -----------------------------------------------------------------------------------------------

// A decay of 0 leaves the gradient alone, whatever the weight is.
template <class A>
TSR_HOST_DEVICE TSR_ALWAYS_INLINE A decayed(A grad, A weight, A decay) {
  return decay == A(0) ? grad : grad + decay * weight;
}

// The parts of a rule whose elements are independent.
template <class A>
struct ElementRule {
  static constexpr bool kRowState = false;
  static constexpr int kRowSums = 0;
  static constexpr bool kGatherWrites = false;
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void gather(A, A*, A, A*) const {}
  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A row(const A*, int64_t, A*) const { return A(0); }
};

template <class A>
TSR_HOST_DEVICE TSR_ALWAYS_INLINE A mean_of(A sum, int64_t dim) {
  return dim > 0 ? sum / static_cast<A>(dim) : A(0);
}

// ---- Rules ----------------------------------------------------------------------------------------------------------
//
// Constructors take the hyperparameters in the order of hyperparameter_names, and the number of the step, from 1.

enum class SgdKind { kPlain, kMomentum, kNesterov };

template <class A, SgdKind kKind>
struct SgdRule : ElementRule<A> {
  using Map = LinearMap;
  static constexpr int kStates = kKind == SgdKind::kPlain ? 0 : 1;
  A lr, momentum, incoming, decay;
  SgdRule(const double* h, int64_t step)
      : lr(static_cast<A>(h[0])),
        // torch begins with the first gradient as the buffer.
        momentum(static_cast<A>(step == 1 ? 0 : h[1])),
        incoming(static_cast<A>(step == 1 ? 1 : 1 - h[2])),
        decay(static_cast<A>(h[4])),
        ahead_(static_cast<A>(h[1])) {}

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

template <class A>
struct AdagradRule : ElementRule<A> {
  using Map = NoMap;
  static constexpr int kStates = 1;
  A lr, eps, decay;
  AdagradRule(const double* h, int64_t step)
      : lr(static_cast<A>(h[0] / (1 + static_cast<double>(step - 1) * h[1]))),
        eps(static_cast<A>(h[2])),
        decay(static_cast<A>(h[3])) {}

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
  RowwiseAdagradRule(const double* h, int64_t step)
      : lr(static_cast<A>(h[0] / (1 + static_cast<double>(step - 1) * h[1]))),
        eps(static_cast<A>(h[2])),
        decay(static_cast<A>(h[3])) {}

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

// What the rules of Adam's family compute once a step. The first moment moves towards the gradient by a share of what
// is between them, as torch's lerp does: beta1 and 1 - beta1, once rounded, do not add up to 1, which it would
// remember.
template <class A>
struct AdamScalars {
  A beta2, incoming1, incoming2, step_size, inverse_root, eps, kept, decay;
  // tensorflow_eps: eps is added to sqrt(v), not to the root of v without its bias.
  AdamScalars(const double* h, int64_t step, bool decoupled, bool tensorflow_eps = false)
      : beta2(static_cast<A>(h[2])),
        incoming1(static_cast<A>(1 - h[1])),
        incoming2(static_cast<A>(1 - h[2])),
        step_size(static_cast<A>(h[0] / (1 - std::pow(h[1], static_cast<double>(step))))),
        inverse_root(static_cast<A>(1 / std::sqrt(1 - std::pow(h[2], static_cast<double>(step))))),
        eps(static_cast<A>(h[3])),
        kept(static_cast<A>(decoupled ? 1 - h[0] * h[4] : 1)),
        decay(static_cast<A>(decoupled ? 0 : h[4])) {
    if (!tensorflow_eps) return;
    const double t = static_cast<double>(step);
    step_size = static_cast<A>(h[0] * std::sqrt(1 - std::pow(h[2], t)) / (1 - std::pow(h[1], t)));
    inverse_root = A(1);
  }

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A divisor(A v) const { return std::sqrt(v) * inverse_root + eps; }
};

template <class A, bool kAmsgrad>
struct AdamRule : ElementRule<A> {
  using Map = AdamMap<!kAmsgrad>;
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  AdamScalars<A> at;
  AdamRule(const double* h, int64_t step) : at(h, step, h[5] != 0, h[6] != 0) {}

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
  PartialRowwiseAdamRule(const double* h, int64_t step) : at(h, step, /*decoupled=*/true) {}

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

template <class A, bool kMomentum, bool kCentered>
struct RmspropRule : ElementRule<A> {
  using Map = LinearMap;
  static constexpr int kStates = 1 + kMomentum + kCentered;
  static constexpr int kAverage = kStates - 1;  // grad_avg, the last
  A lr, alpha, incoming, eps, decay, momentum;
  RmspropRule(const double* h, int64_t)
      : lr(static_cast<A>(h[0])),
        alpha(static_cast<A>(h[1])),
        incoming(static_cast<A>(1 - h[1])),
        eps(static_cast<A>(h[2])),
        decay(static_cast<A>(h[3])),
        momentum(static_cast<A>(h[4])) {}

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

// tf.compat.v1.train.FtrlOptimizer. Its beta is one more l2 penalty.
template <class A, bool kSquareRoot>
struct FtrlRule : ElementRule<A> {
  using Map = NoMap;
  static constexpr int kStates = 2;
  Ftrl<A, kSquareRoot> rule;
  FtrlRule(const double* h, int64_t)
      : rule(std::array<double, 5>{h[0], h[2], h[3] + h[5] / (2 * h[0]), h[4], h[1]}.data(), /*scaled_linear=*/false) {}

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE void step(A& w, A* state, A grad, A) const { rule(w, state, grad); }
};

template <class A>
struct AdadeltaRule : ElementRule<A> {
  using Map = LinearMap;
  static constexpr int kStates = 2;
  A lr, rho, incoming, eps, decay;
  AdadeltaRule(const double* h, int64_t)
      : lr(static_cast<A>(h[0])),
        rho(static_cast<A>(h[1])),
        incoming(static_cast<A>(1 - h[1])),
        eps(static_cast<A>(h[2])),
        decay(static_cast<A>(h[3])) {}

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
  LambRule(const double* h, int64_t step) : at(h, step, /*decoupled=*/false), lr(static_cast<A>(h[0])) {
    at.step_size = static_cast<A>(1 / (1 - std::pow(h[1], static_cast<double>(step))));
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

// Calls f with the rule in the accumulator's type A.
template <class A, class F>
void dispatch_optimizer_rule(OptimizerRule rule, const std::vector<double>& hyperparameters, int64_t step, F&& f) {
  const double* h = hyperparameters.data();
  switch (rule) {
    case OptimizerRule::kSgd:
      if (h[1] == 0) return f(SgdRule<A, SgdKind::kPlain>(h, step));
      if (h[3] == 0) return f(SgdRule<A, SgdKind::kMomentum>(h, step));
      return f(SgdRule<A, SgdKind::kNesterov>(h, step));
    case OptimizerRule::kAdagrad:
      return f(AdagradRule<A>(h, step));
    case OptimizerRule::kRowwiseAdagrad:
      return f(RowwiseAdagradRule<A>(h, step));
    case OptimizerRule::kAdam:
      return f(AdamRule<A, false>(h, step));
    case OptimizerRule::kAmsgrad:
      return f(AdamRule<A, true>(h, step));
    case OptimizerRule::kPartialRowwiseAdam:
      return f(PartialRowwiseAdamRule<A>(h, step));
    case OptimizerRule::kRmsprop:
      if (h[4] > 0) {
        if (h[5] != 0) return f(RmspropRule<A, true, true>(h, step));
        return f(RmspropRule<A, true, false>(h, step));
      }
      if (h[5] != 0) return f(RmspropRule<A, false, true>(h, step));
      return f(RmspropRule<A, false, false>(h, step));
    case OptimizerRule::kFtrl:
      if (h[1] == -0.5) return f(FtrlRule<A, true>(h, step));
      return f(FtrlRule<A, false>(h, step));
    case OptimizerRule::kAdadelta:
      return f(AdadeltaRule<A>(h, step));
    case OptimizerRule::kLamb:
      return f(LambRule<A>(h, step));
  }
}

}  // namespace tsr
