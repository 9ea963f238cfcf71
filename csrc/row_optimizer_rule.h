// What the rules of row_optimizer.h are made of: how a rule describes itself, and the arithmetic that rules share.
//
// An optimizer is a struct of its hyperparameters, doubles with names, in the order of the schemas' lists. It has
//   kName, kHyperparameters   the words and ranges of the schemas
//   states()                  the states of a table, in their order
//   motion()                  what a step does to a row without gradient
//   Rules<A>, choice()        its rules (below) in the accumulator's type A, and which of them these hyperparameters use
// and where it differs from OptimizerBase
//   kRowState                 the place of the state that has one value per row
//   check(op)                 what ranges alone do not say
//   Map, leaf(step)           the map of an idle step (row_optimizer_idle.h); NoMap: history cannot hold it, or it
//                             changes nothing
//   shrinks_weights()         with AdamMap: whether an idle step takes lr * weight_decay of the weight away
// states() and motion() depend on which hyperparameters are 0, and on nothing else of them: Python remembers what they
// have said.
//
// A rule holds its scalars for one step, computed in float64, and is passed to kernels by value. It is made of an
// optimizer and the step's number, from 1, and has
//   Map                             the optimizer's
//   kStates                         states with one value per element, in the order of the schema
//   kRowState                       whether there is one more, with one value per row
//   kRowSums                        sums over the row that a step needs first, by gather; 0: elements are independent
//   gather(w, state, g, sums)       adds one element's part to the sums
//   kGatherWrites                   whether it changes the element's states; then step does not
//   row(sums, dim, row_state)       what the step of every element needs of them; changes the row's state
//   step(w, state, g, row)          the step of one element
//   catch_up(idle, [S,] w, state)   the idle steps of one element; for AdamMap with S(q) of root(state)
#pragma once
#include <initializer_list>
#include <limits>
#include <vector>

#include "row_optimizer_idle.h"

namespace tsr {

// ---- How a rule describes itself ------------------------------------------------------------------------------------

constexpr int kMostOptimizerStates = 3;

struct NoMap {};

// The ranges are torch's.
enum class Range { kNotNegative, kPositive, kNotPositive, kBelowOne, kUpToOne, kFlag, kNumber };

// A class template says how many it has: nvcc does not count them there.
template <class Optimizer>
struct Hyperparameter {
  const char* name;
  double Optimizer::* member;
  Range range = Range::kNotNegative;
};

class StateNames {
 public:
  StateNames(std::initializer_list<const char*> names) {
    for (const char* name : names) add(name);
  }
  void add(const char* name) { names_[size_++] = name; }

  size_t size() const { return size_; }
  const char* operator[](size_t s) const { return names_[s]; }

 private:
  std::array<const char*, kMostOptimizerStates> names_{};
  size_t size_ = 0;
};

struct IdleMotion {
  enum Kind { kNone, kStates, kWeight, kNoClosedForm };
  Kind kind;
  const char* reason = "";  // why many idle steps have no closed form
};

// Weight decay that is added to the gradient of a rule with a second moment.
constexpr IdleMotion kDecayInSecondMoment{IdleMotion::kNoClosedForm, "weight_decay in the second moment"};

template <class... Rules>
struct RuleList {};

struct OptimizerBase {
  using Map = NoMap;
  static constexpr int kRowState = -1;
  int choice() const { return 0; }
  void check(const char*) const {}
};

// ---- Idle steps in the accumulator's type ---------------------------------------------------------------------------

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

}  // namespace tsr
