// Optimizer steps on rows, and up-to-date values of stale rows, on the CPU: for row_optimizer.cpp and the updates of
// embedding collections.
//
//   OptimizerStep<A>  one call's step, the same for all its tables
//   StepWorker<A>     what one thread keeps during the call, for all tables
//   RowStepper<T>     one table: step(), current(), catch_up() of some rows
#pragma once
#include <array>
#include <unordered_map>

#include "../row_optimizer.h"
#include "../stochastic_rounding.h"

namespace tsr {

// ---- Loops over rows, compiled per instruction set ------------------------------------------------------------------

// What a row has missed, ready for its elements: the parts that its rule's Map has.
template <class A>
struct IdleSteps {
  LinearIdle<A> linear;
  AdamIdle<A> adam;
  // S: one term, or several from IdleMemo::terms() + first_term.
  AdamTerm<A> term;
  int32_t terms, first_term;
};

// Some rows of a table and their gradients.
template <class A>
struct RowBlock {
  // Row i is at weight + weight_rows[i] * weight_stride: in the table, or in scratch memory.
  A* weight;
  const int64_t* weight_rows;
  int64_t weight_stride;
  // And its states at state[s] + rows[i] * state_stride[s]: dim values, or one where the state has one per row.
  A* state[kMostOptimizerStates];
  const int64_t* rows;
  int64_t state_stride[kMostOptimizerStates];
  const A* grad;     // [count, dim]; null where there is no step
  A scale;           // what grad is multiplied by
  bool skips_zeros;  // leaves rows alone whose gradient is zero
  int64_t dim, count;
  const IdleSteps<A>* const* idle;  // [count], null for a row that is not stale; null: none is
  const AdamTerm<A>* terms;
  A* scratch;     // [2, dim]
  int64_t ahead;  // how far ahead to fetch rows
};

template <class A>
struct OptimizerLoops {
  void (*step)(const void* rule, const RowBlock<A>& block);
  bool by_element;  // an element's step depends on nothing else of its row
  // Only the idle steps, of rows that are all stale; null for rules without. current writes the weights alone.
  void (*catch_up)(const void* rule, const RowBlock<A>& block);
  void (*current)(const void* rule, const RowBlock<A>& block);
};

// Writes the rule with its scalars to `rule`, of kRuleBytes.
constexpr size_t kRuleBytes = 128;
template <class A>
OptimizerLoops<A> make_rule(const OptimizerRule& rule, int64_t step, void* bytes);

// A row of weights to and from the accumulator's type.
template <class T>
struct RowConversions {
  void (*widen)(const T* from, acc_t<T>* to, int64_t dim);
  void (*narrow)(const acc_t<T>* from, T* to, int64_t dim);
  void (*narrow_by_chance)(const acc_t<T>* from, T* to, int64_t dim, const RowBits& bits);
};
template <class T>
const RowConversions<T>& row_conversions();

// ---- A call ---------------------------------------------------------------------------------------------------------

template <class A>
class OptimizerStep {
 public:
  // Rows are flushed through step `now`: step - 1 for an update, step for what only reads or flushes. Arguments must
  // have been checked; history (null: no row is stale) must outlive this, scale multiplies every gradient.
  OptimizerStep(const OptimizerRule& rule, int64_t step, int64_t base, int64_t now, const Tensor* history, double scale)
      : loops(make_rule<A>(rule, step, rule_)),
        rule(rule),
        history(history != nullptr ? history->data_ptr() : nullptr),
        now(now - base),
        then(step - base),
        number(step),
        states(static_cast<int>(state_names(rule).size())),
        row_state(tsr::row_state(rule)),
        scale(static_cast<A>(scale)),
        skips_zeros(history == nullptr && must_skip_zeros(rule)) {
    if (const auto zeros = rule_of_zeros(rule)) {
      make_rule<A>(*zeros, step, rule_of_zeros_);
      has_rule_of_zeros_ = true;
    }
  }
  OptimizerStep(const OptimizerStep&) = delete;
  OptimizerStep& operator=(const OptimizerStep&) = delete;

  const void* policy() const { return rule_; }
  // Null: policy() is theirs too.
  const void* policy_of_zeros() const { return has_rule_of_zeros_ ? rule_of_zeros_ : nullptr; }

 private:
  alignas(16) unsigned char rule_[kRuleBytes], rule_of_zeros_[kRuleBytes];
  bool has_rule_of_zeros_ = false;

 public:
  const OptimizerLoops<A> loops;
  const OptimizerRule rule;
  const void* const history;
  const int64_t now, then;  // counted from the base; then: what last_step becomes
  const int64_t number;
  const int states, row_state;
  const A scale;
  const bool skips_zeros;  // among named rows
};

// Rows whose last steps are looked up together.
constexpr int64_t kBlockRows = 256;

// The idle steps by how many a row has missed, each found when a row first needs it. The maps of the last kRecent steps
// come from the end backwards, one composition each, which is quicker than to look for the ones that are needed; older
// ones from history's tree. So they are a function of the two steps alone, whatever else is in the call.
template <class A>
class IdleMemo {
 public:
  explicit IdleMemo(const OptimizerStep<A>& step) : step_(step) {}

  // What at most kBlockRows rows have missed that are stale by gaps[i] steps, 0 <= gaps[i] <= now; null for 0. Valid
  // until the next call.
  void find(const int64_t* gaps, int64_t count, const IdleSteps<A>** missed);
  const AdamTerm<A>* terms() const { return terms_.data(); }

 private:
  static constexpr int64_t kRecent = 1024;

  template <class Map>
  void chain_maps(int64_t furthest);
  template <class Map>
  void add_steps(int64_t gap);

  const OptimizerStep<A>& step_;
  std::vector<std::array<double, kHistoryColumns>> maps_;  // [gap - 1], as history has them, of the rule's kind
  // By gap: where in steps_, from 1; 0: not yet.
  std::vector<int32_t> recent_;
  std::unordered_map<int64_t, int32_t> old_;
  std::vector<IdleSteps<A>> steps_;
  std::vector<AdamTerm<A>> terms_;
};

template <class A>
class StepWorker {
 public:
  explicit StepWorker(const OptimizerStep<A>& step) : memo(step) {}

  // Scratch of at least n elements.
  A* weights(int64_t n) { return grown(weights_, n); }
  A* sums(int64_t n) { return grown(sums_, n); }
  A* grads(int64_t n) { return grown(grads_, n); }

  IdleMemo<A> memo;
  std::vector<A> values;  // for callers that must convert their gradients

 private:
  static A* grown(std::vector<A>& x, int64_t n) {
    if (static_cast<int64_t>(x.size()) < n) x.resize(static_cast<size_t>(n));
    return x.data();
  }
  std::vector<A> weights_, sums_, grads_;
};

// ---- A table --------------------------------------------------------------------------------------------------------

template <class T>
class RowStepper {
 public:
  using A = acc_t<T>;

  // states: those of this table, in their order; last_step null: no row is stale. What is only read may be const.
  RowStepper(const OptimizerStep<A>& step, const Tensor& weight, const Tensor* states, const Tensor* last_step,
             std::optional<int64_t> rounding_seed = std::nullopt);

  int64_t dim() const { return dim_; }
  int64_t rows() const { return rows_; }
  bool behind(int64_t row) const { return last_step_ != nullptr && last_step_[row] < step_->now; }

  // Flushes the rows and makes the step with their gradients, values [count, dim], but for rows that it leaves alone
  // because they are zero. R: int64_t or uint32_t. A row must not occur twice, nor be another thread's.
  template <class R>
  void step(StepWorker<A>& worker, const R* rows, const A* values, int64_t count) const;

  // Asks for rows that step() will soon be given.
  template <class R>
  void fetch(const R* rows, int64_t count) const;

  // Writes the rows' up-to-date values to out [count, dim], and nothing else.
  template <class R>
  void current(StepWorker<A>& worker, const R* rows, int64_t count, T* out) const;

  // Flushes the rows [begin, end).
  void catch_up(StepWorker<A>& worker, int64_t begin, int64_t end) const;
  // The step of the rows [begin, end), whose gradients are values [end - begin, dim].
  void step_all(StepWorker<A>& worker, const A* values, int64_t begin, int64_t end) const;
  // The same where only `count` of these rows, which increase, have a gradient, values [count, dim].
  void step_all(StepWorker<A>& worker, const int64_t* rows, const A* values, int64_t count, int64_t begin,
                int64_t end) const;

 private:
  int64_t gap(int64_t row) const;
  RowBlock<A> block(StepWorker<A>& worker, const int64_t* rows, int64_t count) const;
  void step_block(StepWorker<A>& worker, const int64_t* rows, const A* values, int64_t count, bool skips_zeros) const;
  void step_by_kind(const RowBlock<A>& rows) const;
  bool step_as_one(StepWorker<A>& worker, const A* values, int64_t begin, int64_t end) const;
  void current_block(StepWorker<A>& worker, const int64_t* rows, int64_t count, T* out) const;
  void catch_up_block(StepWorker<A>& worker, const int64_t* rows, const int64_t* gaps, int64_t count) const;
  // For weights in a type of their own: the rows into scratch memory, as rows 0 .. count - 1 of the block; and back.
  void widen(StepWorker<A>& worker, const int64_t* rows, RowBlock<A>& block) const;
  void narrow(const int64_t* rows, const RowBlock<A>& block) const;

  const OptimizerStep<A>* step_;
  T* weight_;
  A* state_[kMostOptimizerStates] = {};
  int32_t* last_step_;
  int64_t weight_stride_;
  int64_t state_stride_[kMostOptimizerStates] = {};
  int64_t rows_, dim_;
  std::optional<int64_t> rounding_seed_;
};

// The steppers of K tables that are stepped together; states and last_steps table after table.
template <class T>
std::vector<RowStepper<T>> steppers_of(const OptimizerStep<acc_t<T>>& step, const std::vector<Tensor>& weights,
                                       const std::vector<Tensor>& states, const std::vector<Tensor>& last_steps,
                                       const std::vector<int64_t>& rounding_seeds) {
  std::vector<RowStepper<T>> steppers;
  steppers.reserve(weights.size());
  for (size_t k = 0; k < weights.size(); ++k) {
    steppers.emplace_back(step, weights[k], states.data() + k * static_cast<size_t>(step.states),
                          last_steps.empty() ? nullptr : &last_steps[k],
                          rounding_seeds.empty() ? std::nullopt : std::optional<int64_t>(rounding_seeds[k]));
  }
  return steppers;
}

// What a call multiplies its gradients by.
inline double scale_of(const std::optional<Tensor>& grad_scale, bool maximize) {
  double scale = 1;
  if (grad_scale) {
    scale = grad_scale->scalar_type() == ScalarType::Double ? *grad_scale->const_data_ptr<double>()
                                                            : static_cast<double>(*grad_scale->const_data_ptr<float>());
  }
  return maximize ? -scale : scale;
}

}  // namespace tsr
