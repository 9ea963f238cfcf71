// The parts of row_optimizer.h: loops per instruction set, idle steps by gap, the rows of a table.
#include <cstring>

#include "level.h"
#include "row_loops.h"
#include "row_optimizer.h"

namespace tsr {
namespace {

#define TSR_ISA_BODY "row_optimizer_body.h"
#include "isa_foreach.h"

}  // namespace

template <class A>
OptimizerLoops<A> make_rule(const OptimizerRule& rule, int64_t step, void* bytes) {
  OptimizerLoops<A> loops{};
  dispatch_optimizer_rule<A>(rule, step, [&](const auto& policy) {
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
void IdleMemo<A>::chain_maps(int64_t furthest) {
  static_assert(std::is_trivially_copyable_v<Map>);
  Map map;
  if (!maps_.empty()) std::memcpy(static_cast<void*>(&map), maps_.back().data(), sizeof(map));
  for (int64_t gap = static_cast<int64_t>(maps_.size()) + 1; gap <= furthest; ++gap) {
    map = Map::composed(block_map(static_cast<const Map*>(step_.history), step_.now - gap, 0), map);
    std::memcpy(maps_.emplace_back().data(), &map, sizeof(map));
  }
}

template <class A>
template <class Map>
void IdleMemo<A>::add_steps(int64_t gap) {
  const Map* history = static_cast<const Map*>(step_.history);
  Map map;
  if (gap <= kRecent) {
    std::memcpy(static_cast<void*>(&map), maps_[static_cast<size_t>(gap - 1)].data(), sizeof(map));
  } else {
    map = idle_map(history, step_.now - gap, step_.now);
  }
  IdleSteps<A>& steps = steps_.emplace_back();
  if constexpr (std::is_same_v<Map, LinearMap>) {
    steps.linear = LinearIdle<A>::of(map);
  } else {
    const AdamTerms terms(history, kIdleTolerance<A>);
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
}

template <class A>
void IdleMemo<A>::find(const int64_t* gaps, int64_t count, const IdleSteps<A>** missed) {
  int64_t furthest = 0;
  for (int64_t i = 0; i < count; ++i) furthest = std::max(furthest, gaps[i] <= kRecent ? gaps[i] : 0);
  if (static_cast<int64_t>(recent_.size()) <= furthest) recent_.resize(static_cast<size_t>(furthest) + 1);
  // First which gaps are new, and then all of them at once: work in one go takes half of the time.
  int64_t unknown[kBlockRows];
  int32_t places[kBlockRows], known = static_cast<int32_t>(steps_.size()), added = 0;
  for (int64_t i = 0; i < count; ++i) {
    places[i] = 0;
    if (gaps[i] == 0) continue;
    int32_t& place = gaps[i] <= kRecent ? recent_[static_cast<size_t>(gaps[i])] : old_[gaps[i]];
    if (place == 0) {
      unknown[added++] = gaps[i];
      place = known + added;
    }
    places[i] = place;
  }
  if (added > 0) {
    dispatch_map(step_.rule, [&](const auto& optimizer) {
      using Map = typename std::decay_t<decltype(optimizer)>::Map;
      chain_maps<Map>(furthest);
      for (int32_t k = 0; k < added; ++k) add_steps<Map>(unknown[k]);
    });
  }
  for (int64_t i = 0; i < count; ++i) {
    missed[i] = places[i] == 0 ? nullptr : &steps_[static_cast<size_t>(places[i] - 1)];
  }
}

// ---- A table --------------------------------------------------------------------------------------------------------

template <class T>
RowStepper<T>::RowStepper(const OptimizerStep<A>& step, const Tensor& weight, const Tensor* states,
                          const Tensor* last_step, std::optional<int64_t> rounding_seed)
    : step_(&step),
      weight_(static_cast<T*>(weight.data_ptr())),
      last_step_(last_step != nullptr ? static_cast<int32_t*>(last_step->data_ptr()) : nullptr),
      weight_stride_(row_stride(weight)),
      rows_(weight.size(0)),
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
RowBlock<acc_t<T>> RowStepper<T>::block(StepWorker<A>& worker, const int64_t* rows, int64_t count) const {
  RowBlock<A> result{};
  if constexpr (std::is_same_v<T, A>) result.weight = weight_;
  result.weight_rows = rows;
  result.weight_stride = weight_stride_;
  for (int s = 0; s < kMostOptimizerStates; ++s) {
    result.state[s] = state_[s];
    result.state_stride[s] = state_stride_[s];
  }
  result.rows = rows;
  result.scale = step_->scale;
  result.dim = dim_;
  result.count = count;
  result.scratch = worker.sums(2 * dim_);
  result.ahead = rows_ahead((2 + step_->states) * dim_ * static_cast<int64_t>(sizeof(A)));
  return result;
}

// 0, 1, 2, ..: the rows of scratch memory.
static const int64_t* counting() {
  static const std::array<int64_t, kBlockRows> numbers = [] {
    std::array<int64_t, kBlockRows> result{};
    for (int64_t i = 0; i < kBlockRows; ++i) result[static_cast<size_t>(i)] = i;
    return result;
  }();
  return numbers.data();
}

template <class T>
void RowStepper<T>::widen(StepWorker<A>& worker, const int64_t* rows, RowBlock<A>& block) const {
  block.weight = worker.weights(block.count * dim_);
  block.weight_rows = counting();
  block.weight_stride = dim_;
  for (int64_t i = 0; i < block.count; ++i) {
    if (i + block.ahead < block.count) fetch_row(weight_ + rows[i + block.ahead] * weight_stride_, dim_);
    row_conversions<T>().widen(weight_ + rows[i] * weight_stride_, block.weight + i * dim_, dim_);
  }
}

template <class T>
void RowStepper<T>::narrow(const int64_t* rows, const RowBlock<A>& block) const {
  for (int64_t i = 0; i < block.count; ++i) {
    T* to = weight_ + rows[i] * weight_stride_;
    const A* from = block.weight + i * dim_;
    if (rounding_seed_) {
      row_conversions<T>().narrow_by_chance(from, to, dim_, RowBits(*rounding_seed_, step_->number, rows[i]));
    } else {
      row_conversions<T>().narrow(from, to, dim_);
    }
  }
}

template <class T>
void RowStepper<T>::step_block(StepWorker<A>& worker, const int64_t* rows, const A* values, int64_t count,
                               bool skips_zeros) const {
  RowBlock<A> at = block(worker, rows, count);
  at.grad = values;
  at.skips_zeros = skips_zeros;
  const IdleSteps<A>* idle[kBlockRows];
  if (last_step_ != nullptr) {
    int64_t gaps[kBlockRows], most = 0;
    for (int64_t i = 0; i < count; ++i) __builtin_prefetch(last_step_ + rows[i]);
    for (int64_t i = 0; i < count; ++i) most = std::max(most, gaps[i] = gap(rows[i]));
    if (most > 0) {
      worker.memo.find(gaps, count, idle);
      at.idle = idle;
      at.terms = worker.memo.terms();
    }
  }
  if constexpr (!std::is_same_v<T, A>) widen(worker, rows, at);
  if (step_->policy_of_zeros() == nullptr) {
    step_->loops.step(step_->policy(), at);
  } else {
    step_by_kind(at);
  }
  if constexpr (!std::is_same_v<T, A>) narrow(rows, at);
  if (last_step_ == nullptr) return;
  for (int64_t i = 0; i < count; ++i) last_step_[rows[i]] = static_cast<int32_t>(step_->then);
}

// Steps neighbours of one kind together: rows with a gradient, and rows of zeros.
template <class T>
void RowStepper<T>::step_by_kind(const RowBlock<A>& rows) const {
  const auto is_zero = [&](int64_t i) { return baseline::is_zero(rows.grad + i * dim_, rows.scale, dim_); };
  for (int64_t begin = 0, end = 0; begin < rows.count; begin = end) {
    const bool zeros = is_zero(begin);
    for (end = begin + 1; end < rows.count && is_zero(end) == zeros;) ++end;
    RowBlock<A> at = rows;
    at.weight_rows += begin, at.rows += begin, at.grad += begin * dim_, at.count = end - begin;
    if (at.idle != nullptr) at.idle += begin;
    step_->loops.step(zeros ? step_->policy_of_zeros() : step_->policy(), at);
  }
}

template <class T>
template <class R>
void RowStepper<T>::step(StepWorker<A>& worker, const R* rows, const A* values, int64_t count) const {
  int64_t block[kBlockRows];
  for (int64_t begin = 0; begin < count; begin += kBlockRows) {
    const int64_t n = std::min(kBlockRows, count - begin);
    for (int64_t i = 0; i < n; ++i) block[i] = static_cast<int64_t>(rows[begin + i]);
    step_block(worker, block, values + begin * dim_, n, step_->skips_zeros);
  }
}

// Steps neighbouring rows of which none is stale as one long row; false where they do not lie end to end, or where the
// rule knows rows, or rows of zeros.
template <class T>
bool RowStepper<T>::step_as_one(StepWorker<A>& worker, const A* values, int64_t begin, int64_t end) const {
  bool together = std::is_same_v<T, A> && step_->loops.by_element && weight_stride_ == dim_;
  together &= step_->policy_of_zeros() == nullptr;
  for (int s = 0; s < step_->states; ++s) together &= state_stride_[s] == dim_;
  if (!together) return false;
  if (last_step_ != nullptr) {
    bool stale = false;
    for (int64_t row = begin; row < end; ++row) stale |= behind(row);
    if (stale) return false;
  }
  RowBlock<A> at = block(worker, &begin, 1);
  at.grad = values;
  at.skips_zeros = false;
  at.dim = (end - begin) * dim_;
  step_->loops.step(step_->policy(), at);
  if (last_step_ != nullptr) std::fill(last_step_ + begin, last_step_ + end, static_cast<int32_t>(step_->then));
  return true;
}

template <class T>
template <class R>
void RowStepper<T>::fetch(const R* rows, int64_t count) const {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = static_cast<int64_t>(rows[i]);
    fetch_row(weight_ + row * weight_stride_, dim_);
    for (int s = 0; s < step_->states; ++s) {
      fetch_row(state_[s] + row * state_stride_[s], s == step_->row_state ? 1 : dim_);
    }
    if (last_step_ != nullptr) __builtin_prefetch(last_step_ + row);
  }
}

template <class T>
void RowStepper<T>::step_all(StepWorker<A>& worker, const A* values, int64_t begin, int64_t end) const {
  int64_t block[kBlockRows];
  for (int64_t first = begin; first < end; first += kBlockRows) {
    const int64_t n = std::min(kBlockRows, end - first);
    if (step_as_one(worker, values + (first - begin) * dim_, first, first + n)) continue;
    for (int64_t i = 0; i < n; ++i) block[i] = first + i;
    step_block(worker, block, values + (first - begin) * dim_, n, /*skips_zeros=*/false);
  }
}

template <class T>
void RowStepper<T>::step_all(StepWorker<A>& worker, const int64_t* rows, const A* values, int64_t count, int64_t begin,
                             int64_t end) const {
  int64_t u = 0;
  for (int64_t first = begin; first < end; first += kBlockRows) {
    const int64_t n = std::min(kBlockRows, end - first);
    A* dense = worker.grads(n * dim_);
    std::fill_n(dense, n * dim_, A(0));
    for (; u < count && rows[u] < first + n; ++u) {
      std::copy_n(values + u * dim_, dim_, dense + (rows[u] - first) * dim_);
    }
    step_all(worker, dense, first, first + n);
  }
}

template <class T>
void RowStepper<T>::current_block(StepWorker<A>& worker, const int64_t* rows, int64_t count, T* out) const {
  RowBlock<A> at = block(worker, rows, count);
  int64_t gaps[kBlockRows], most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, gaps[i] = gap(rows[i]));
  for (int64_t i = 0; i < count; ++i) {
    if (i + at.ahead < count) fetch_row(weight_ + rows[i + at.ahead] * weight_stride_, dim_);
    std::copy_n(weight_ + rows[i] * weight_stride_, dim_, out + i * dim_);
  }
  if (most == 0) return;
  const IdleSteps<A>* idle[kBlockRows];
  worker.memo.find(gaps, count, idle);
  at.idle = idle;
  at.terms = worker.memo.terms();
  at.weight_rows = counting();
  at.weight_stride = dim_;
  if constexpr (std::is_same_v<T, A>) {
    at.weight = out;
    step_->loops.current(step_->policy(), at);
  } else {
    at.weight = worker.weights(count * dim_);
    row_conversions<T>().widen(out, at.weight, count * dim_);
    step_->loops.current(step_->policy(), at);
    for (int64_t i = 0; i < count; ++i) {
      if (idle[i] != nullptr) row_conversions<T>().narrow(at.weight + i * dim_, out + i * dim_, dim_);
    }
  }
}

template <class T>
template <class R>
void RowStepper<T>::current(StepWorker<A>& worker, const R* rows, int64_t count, T* out) const {
  int64_t block[kBlockRows];
  for (int64_t begin = 0; begin < count; begin += kBlockRows) {
    const int64_t n = std::min(kBlockRows, count - begin);
    for (int64_t i = 0; i < n; ++i) block[i] = static_cast<int64_t>(rows[begin + i]);
    current_block(worker, block, n, out + begin * dim_);
  }
}

template <class T>
void RowStepper<T>::catch_up_block(StepWorker<A>& worker, const int64_t* rows, const int64_t* gaps,
                                   int64_t count) const {
  RowBlock<A> at = block(worker, rows, count);
  const IdleSteps<A>* idle[kBlockRows];
  worker.memo.find(gaps, count, idle);
  at.idle = idle;
  at.terms = worker.memo.terms();
  if constexpr (!std::is_same_v<T, A>) widen(worker, rows, at);
  step_->loops.catch_up(step_->policy(), at);
  if constexpr (!std::is_same_v<T, A>) narrow(rows, at);
  for (int64_t i = 0; i < count; ++i) last_step_[rows[i]] = static_cast<int32_t>(step_->now);
}

template <class T>
void RowStepper<T>::catch_up(StepWorker<A>& worker, int64_t begin, int64_t end) const {
  int64_t rows[kBlockRows], gaps[kBlockRows], count = 0;
  for (int64_t row = begin; row < end; ++row) {
    rows[count] = row;
    gaps[count] = gap(row);
    count += gaps[count] > 0;
    if (count == kBlockRows || (row + 1 == end && count > 0)) {
      catch_up_block(worker, rows, gaps, count);
      count = 0;
    }
  }
}

#define TSR_INSTANTIATE_ACCUMULATOR(A)                                           \
  template OptimizerLoops<A> make_rule<A>(const OptimizerRule&, int64_t, void*); \
  template class IdleMemo<A>;
TSR_INSTANTIATE_ACCUMULATOR(float)
TSR_INSTANTIATE_ACCUMULATOR(double)
#undef TSR_INSTANTIATE_ACCUMULATOR

#define TSR_INSTANTIATE(T)                                                                                   \
  template const RowConversions<T>& row_conversions<T>();                                                    \
  template class RowStepper<T>;                                                                              \
  template void RowStepper<T>::step(StepWorker<acc_t<T>>&, const uint32_t*, const acc_t<T>*, int64_t) const; \
  template void RowStepper<T>::step(StepWorker<acc_t<T>>&, const int64_t*, const acc_t<T>*, int64_t) const;  \
  template void RowStepper<T>::fetch(const uint32_t*, int64_t) const;                                        \
  template void RowStepper<T>::fetch(const int64_t*, int64_t) const;                                         \
  template void RowStepper<T>::current(StepWorker<acc_t<T>>&, const uint32_t*, int64_t, T*) const;           \
  template void RowStepper<T>::current(StepWorker<acc_t<T>>&, const int64_t*, int64_t, T*) const;
TSR_INSTANTIATE(float)
TSR_INSTANTIATE(double)
TSR_INSTANTIATE(Half)
TSR_INSTANTIATE(BFloat16)
#undef TSR_INSTANTIATE

}  // namespace tsr
