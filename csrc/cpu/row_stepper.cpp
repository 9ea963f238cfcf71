// The parts of row_optimizer.h: loops per instruction set, idle steps by gap, the rows of a table.
#include "level.h"
#include "row_loops.h"
#include "row_optimizer.h"

namespace tsr {
namespace {

#define TSR_ISA_BODY "row_optimizer_body.h"
#include "isa_foreach.h"

}  // namespace

template <class A>
OptimizerLoops<A> make_rule(OptimizerRule rule, const std::vector<double>& hyperparameters, int64_t step, void* bytes) {
  OptimizerLoops<A> loops{};
  dispatch_optimizer_rule<A>(rule, hyperparameters, step, [&](const auto& policy) {
    using Rule = std::decay_t<decltype(policy)>;
    static_assert(sizeof(Rule) <= kRuleBytes && std::is_trivially_copyable_v<Rule>);
    new (bytes) Rule(policy);
    loops = pick_level<OptimizerLoops<A> (*)()>(&baseline::optimizer_loops<Rule, A>, &avx2::optimizer_loops<Rule, A>,
                                                &avx512::optimizer_loops<Rule, A>)();
  });
  return loops;
}

template <class T>
const RowConversions<T>& row_conversions() {
  return pick_level(baseline::kRowConversions<T>, avx2::kRowConversions<T>, avx512::kRowConversions<T>);
}

// ---- Idle steps -----------------------------------------------------------------------------------------------------

template <class A>
template <class Map>
IdleSteps<A> IdleMemo<A>::steps_of(const Map& map, int64_t gap) {
  IdleSteps<A> steps{};
  if constexpr (std::is_same_v<Map, LinearMap>) {
    steps.linear = LinearIdle<A>::of(map);
  } else {
    const AdamTerms terms(static_cast<const Map*>(step_.history), kIdleTolerance<A>);
    steps.adam = AdamIdle<A>::of(map);
    steps.first_term = static_cast<int32_t>(terms_.size());
    if (terms.is_one(map)) {
      terms_.push_back(as_term<A>(terms.term(map, 1, 1)));
    } else {
      terms.walk(step_.now - gap, step_.now, [this](const auto& term) { terms_.push_back(as_term<A>(term)); });
    }
    steps.terms = static_cast<int32_t>(terms_.size()) - steps.first_term;
    steps.term = terms_.back();
  }
  return steps;
}

template <class A>
const IdleSteps<A>& IdleMemo<A>::computed(int64_t gap) {
  terms_.resize(recent_terms_);
  const IdleSteps<A>* result = nullptr;
  dispatch_map(step_.rule, [&](auto tag) {
    using Map = typename decltype(tag)::type;
    const Map* history = static_cast<const Map*>(step_.history);
    if (gap > kRecent) {
      old_ = steps_of(idle_map(history, step_.now - gap, step_.now), gap);
      result = &old_;
      return;
    }
    Map* map;
    if constexpr (std::is_same_v<Map, LinearMap>) {
      map = &linear_;
    } else if constexpr (std::is_same_v<Map, AdamMap<true>>) {
      map = &adam_;
    } else {
      map = &amsgrad_;
    }
    while (static_cast<int64_t>(recent_.size()) < gap) {
      const int64_t next = static_cast<int64_t>(recent_.size()) + 1;
      *map = Map::composed(block_map(history, step_.now - next, 0), *map);
      recent_.push_back(steps_of(*map, next));
    }
    recent_terms_ = terms_.size();
    result = &recent_.back();
  });
  return *result;
}

// ---- A table --------------------------------------------------------------------------------------------------------

template <class T>
RowStepper<T>::RowStepper(const OptimizerStep<A>& step, const Tensor& weight, const Tensor* states,
                          const Tensor* last_step, std::optional<int64_t> rounding_seed)
    : step_(&step),
      weight_(static_cast<T*>(weight.data_ptr())),
      last_step_(last_step != nullptr ? static_cast<int32_t*>(last_step->data_ptr()) : nullptr),
      weight_stride_(row_stride(weight)),
      dim_(row_elements(weight)),
      rounding_seed_(rounding_seed) {
  for (int s = 0; s < step.states; ++s) {
    state_[s] = static_cast<A*>(states[s].data_ptr());
    state_stride_[s] = row_stride(states[s]);
  }
}

template <class T>
int64_t RowStepper<T>::gap(int64_t row) const {
  return behind(row) ? std::min(step_->now - last_step_[row], step_->now) : 0;
}

template <class T>
RowArguments<acc_t<T>> RowStepper<T>::arguments(int64_t row) const {
  RowArguments<A> result{};
  for (int s = 0; s < step_->states; ++s) result.state[s] = state_[s] + row * state_stride_[s];
  result.scale = step_->scale;
  result.dim = dim_;
  return result;
}

template <class T>
void RowStepper<T>::fetch(int64_t row) const {
  fetch_row(weight_ + row * weight_stride_, dim_);
  for (int s = 0; s < step_->states; ++s) {
    fetch_row(state_[s] + row * state_stride_[s], s == step_->row_state ? 1 : dim_);
  }
}

template <class T>
void RowStepper<T>::store(int64_t row, const A* from) const {
  T* to = weight_ + row * weight_stride_;
  if (rounding_seed_) {
    row_conversions<T>().narrow_by_chance(from, to, dim_, RowBits(*rounding_seed_, step_->number, row));
  } else {
    row_conversions<T>().narrow(from, to, dim_);
  }
}

template <class T>
void RowStepper<T>::step_block(StepWorker<A>& worker, const int64_t* rows, const A* values, int64_t count) const {
  constexpr bool kWide = std::is_same_v<T, A>;
  int64_t gaps[kBlock];
  if (last_step_ != nullptr) {
    for (int64_t i = 0; i < count; ++i) __builtin_prefetch(last_step_ + rows[i]);
  }
  for (int64_t i = 0; i < count; ++i) gaps[i] = gap(rows[i]);
  const int64_t ahead = rows_ahead((2 + step_->states) * dim_ * static_cast<int64_t>(sizeof(A)));
  for (int64_t i = 0; i < count; ++i) {
    if (i + ahead < count) {
      fetch(rows[i + ahead]);
      fetch_row(values + (i + ahead) * dim_, dim_);
    }
    const int64_t row = rows[i];
    RowArguments<A> at = arguments(row);
    at.grad = values + i * dim_;
    if (gaps[i] > 0) {
      at.idle = &worker.memo.missed(gaps[i]);
      at.terms = worker.memo.terms();
      at.sums = worker.sums(dim_);
    }
    if constexpr (kWide) {
      at.weight = weight_ + row * weight_stride_;
      step_->loops.step(step_->policy(), at);
    } else {
      at.weight = worker.weights(dim_);
      row_conversions<T>().widen(weight_ + row * weight_stride_, at.weight, dim_);
      step_->loops.step(step_->policy(), at);
      store(row, at.weight);
    }
    if (last_step_ != nullptr) last_step_[row] = static_cast<int32_t>(step_->then);
  }
}

template <class T>
template <class R>
void RowStepper<T>::step(StepWorker<A>& worker, const R* rows, const A* values, int64_t count) const {
  int64_t block[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    for (int64_t i = 0; i < n; ++i) block[i] = static_cast<int64_t>(rows[begin + i]);
    step_block(worker, block, values + begin * dim_, n);
  }
}

template <class T>
void RowStepper<T>::step_all(StepWorker<A>& worker, const A* values, int64_t begin, int64_t end) const {
  int64_t block[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t n = std::min(kBlock, end - first);
    for (int64_t i = 0; i < n; ++i) block[i] = first + i;
    step_block(worker, block, values + (first - begin) * dim_, n);
  }
}

template <class T>
void RowStepper<T>::current_row(StepWorker<A>& worker, int64_t row, T* out) const {
  const T* weight = weight_ + row * weight_stride_;
  const int64_t missed = gap(row);
  if (missed == 0) {
    std::copy_n(weight, dim_, out);
    return;
  }
  RowArguments<A> at = arguments(row);
  at.idle = &worker.memo.missed(missed);
  at.terms = worker.memo.terms();
  at.sums = worker.sums(dim_);
  if constexpr (std::is_same_v<T, A>) {
    std::copy_n(weight, dim_, out);
    at.weight = out;
    step_->loops.current(step_->policy(), at);
  } else {
    at.weight = worker.weights(dim_);
    row_conversions<T>().widen(weight, at.weight, dim_);
    step_->loops.current(step_->policy(), at);
    row_conversions<T>().narrow(at.weight, out, dim_);
  }
}

template <class T>
template <class R>
void RowStepper<T>::current(StepWorker<A>& worker, const R* rows, int64_t count, T* out) const {
  const int64_t ahead = rows_ahead((1 + step_->states) * dim_ * static_cast<int64_t>(sizeof(A)));
  for (int64_t i = 0; i < count; ++i) {
    if (i + ahead < count) fetch(static_cast<int64_t>(rows[i + ahead]));
    current_row(worker, static_cast<int64_t>(rows[i]), out + i * dim_);
  }
}

template <class T>
void RowStepper<T>::catch_up(StepWorker<A>& worker, int64_t begin, int64_t end) const {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t missed = gap(row);
    if (missed == 0) continue;
    RowArguments<A> at = arguments(row);
    at.idle = &worker.memo.missed(missed);
    at.terms = worker.memo.terms();
    at.sums = worker.sums(dim_);
    T* weight = weight_ + row * weight_stride_;
    if constexpr (std::is_same_v<T, A>) {
      at.weight = weight;
      step_->loops.catch_up(step_->policy(), at);
    } else {
      at.weight = worker.weights(dim_);
      row_conversions<T>().widen(weight, at.weight, dim_);
      step_->loops.catch_up(step_->policy(), at);
      store(row, at.weight);
    }
    last_step_[row] = static_cast<int32_t>(step_->now);
  }
}

#define TSR_INSTANTIATE_ACCUMULATOR(A)                                                                \
  template OptimizerLoops<A> make_rule<A>(OptimizerRule, const std::vector<double>&, int64_t, void*); \
  template class IdleMemo<A>;
TSR_INSTANTIATE_ACCUMULATOR(float)
TSR_INSTANTIATE_ACCUMULATOR(double)
#undef TSR_INSTANTIATE_ACCUMULATOR

#define TSR_INSTANTIATE(T)                                                                                   \
  template const RowConversions<T>& row_conversions<T>();                                                    \
  template class RowStepper<T>;                                                                              \
  template void RowStepper<T>::step(StepWorker<acc_t<T>>&, const uint32_t*, const acc_t<T>*, int64_t) const; \
  template void RowStepper<T>::step(StepWorker<acc_t<T>>&, const int64_t*, const acc_t<T>*, int64_t) const;  \
  template void RowStepper<T>::current(StepWorker<acc_t<T>>&, const uint32_t*, int64_t, T*) const;           \
  template void RowStepper<T>::current(StepWorker<acc_t<T>>&, const int64_t*, int64_t, T*) const;
TSR_INSTANTIATE(float)
TSR_INSTANTIATE(double)
TSR_INSTANTIATE(Half)
TSR_INSTANTIATE(BFloat16)
#undef TSR_INSTANTIATE

}  // namespace tsr
