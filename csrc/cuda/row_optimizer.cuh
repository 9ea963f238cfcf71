// How a team of lanes brings one row of a table up to date, and steps it: csrc/row_optimizer.h on the device.
//
// The rule is chosen at run time, inside the kernel, among those of a list: that costs a few comparisons per row and
// saves most of the kernels. All of a row is one team's, whatever its width: lanes take `width` neighbouring columns
// each, tile after tile. A row's gradient comes from the caller, a lane's columns at a time: from memory, or computed
// there.
//
//   TableRow<A, Rules> row(call, table, number);
//   row.step<kLooks>(team, gradient)    flushes the row, makes the step, and writes it
//   row.make_current(team)              flushes the row, and writes it
//   row.now(column, weight)             some columns, up to date; nothing is written
#pragma once
#include "row_optimizer_columns.cuh"

namespace tsr {

// A: the accumulator's type. Rules: a list that has the call's rule.
template <class A, class Rules>
class TableRow {
 public:
  static constexpr int kWidth = kLaneColumns<A>;

  // Asks the history what the row has missed: each lane by itself.
  __device__ TableRow(const OptimizerCall<A>& call, const OptimizerTable& table, int64_t row)
      : call_(call), table_(table), row_(row) {
    if constexpr (Needs::kRowState) {
      if (table.row_state != nullptr) own_ = static_cast<const A*>(table.row_state)[row * table.row_state_stride];
    }
    if constexpr (Needs::kLinear || Needs::kAdam) {
      if (table.last_step == nullptr) return;
      from_ = max(int64_t{0}, static_cast<int64_t>(table.last_step[row]));
      behind_ = from_ < call.now;
      if (behind_) ask_history();
    }
  }

  __device__ bool behind() const { return behind_; }

  // Columns [column, column + width), up to date, not rounded to the weights' type; zero beyond the last.
  template <int width>
  __device__ void now(int64_t column, A (&weight)[width]) const {
    RowColumns<A, width> x;
    load(column, x);
    if (behind_) catch_up(x);
#pragma unroll
    for (int c = 0; c < width; ++c) weight[c] = x.weight[c];
  }

  // Flushes the row if it is stale. All lanes of the team call it together.
  __device__ void make_current(const RowTeam& team) const {
    team.wait();  // until all lanes have read what one of them writes
    if (!behind_) return;
    for (int64_t column = team.lane() * kWidth; column < table_.columns; column += team.lanes() * kWidth) {
      RowColumns<A, kWidth> x;
      load(column, x);
      catch_up(x);
      store_weights(column, x);
      store_states(column, x);
    }
    if (team.lane() == 0) finish(caught_up_own());
  }

  // All lanes of the team call it together. kLooks: whether it finds out if the gradient is zero, where that matters,
  // and leaves such a row alone where zeros are skipped; else the caller says `is_zero`.
  //
  // gradient(column, to) writes the gradient of columns [column, column + kWidth), before it is scaled, to `to`, an
  // A[kWidth] of zeros; beyond the last column it may write what it likes. All lanes call it together, those beyond the
  // last column too. Where the row is wider than what a team's lanes hold at once, it may be called several times for a
  // column, and must give the same each time.
  template <bool kLooks, class Gradient>
  __device__ void step(const RowTeam& team, const Gradient& gradient, bool is_zero = false) const {
    const int64_t tile = team.lanes() * kWidth;
    const bool adds_up = Needs::kRowSums && call_.row_sums > 0;
    const bool skips = kLooks && skips_zeros(call_, table_);
    if (kLooks) is_zero = skips || call_.has_rule_of_zeros;  // as far as the row has been seen
    bool is_held = false;
    team.wait();  // until all lanes have read
    A own = caught_up_own(), of_row = 0;
    RowColumns<A, kWidth> x;
    A grad[kWidth];
    // The first pass adds up and looks for anything but zeros; it writes nothing. The second steps.
    for (int pass = adds_up || (kLooks && is_zero) ? 0 : 1; pass < 2; ++pass) {
      A sums[2] = {};
      for (int64_t first = 0; first < table_.columns; first += tile) {
        const int64_t column = first + team.lane() * kWidth;
        if (!is_held) {
          // First, as it may take many registers: of the row's columns there are none yet.
#pragma unroll
          for (int c = 0; c < kWidth; ++c) grad[c] = 0;
          gradient(column, grad);
#pragma unroll
          for (int c = 0; c < kWidth; ++c) grad[c] *= call_.scale();
          load(column, x);
          gather(column, grad, x, sums);
        }
        if (pass == 0) {
          if (kLooks) is_zero = is_zero && are_zeros(team, grad, table_.columns - column);
          if (!is_zero && !adds_up) break;
          continue;
        }
        if (behind_) catch_up(x);
        const auto step_columns = [&](const auto& rule) {
#pragma unroll
          for (int c = 0; c < kWidth; ++c) rule.step(x.weight[c], x.state[c], grad[c], of_row);
        };
        with_rule(call_, Rules(), step_columns, is_zero);
        store_weights(column, x);
        store_states(column, x);
      }
      if (pass == 1) break;
      if (is_zero && skips) return;
      if (is_zero) sums[0] = sums[1] = 0;  // without what decay has added
      if (adds_up) of_row = value_of_row(team, sums, own);
      is_held = table_.columns <= tile;
    }
    if (team.lane() == 0) finish(own);
  }

 private:
  using Needs = RuleNeeds<Rules>;

  // ---- What the row has missed ----

  // scalars_: a LinearIdle, or an AdamIdle and the term of S.
  __device__ LinearIdle<A> linear() const {
    return {scalars_[0], scalars_[1], scalars_[2], scalars_[3], {scalars_[4], scalars_[5]}};
  }
  __device__ AdamIdle<A> adam() const { return {scalars_[0], {scalars_[1], scalars_[2]}, {scalars_[3], scalars_[4]}}; }
  __device__ AdamTerm<A> term() const { return {scalars_[5], scalars_[6], scalars_[7], scalars_[8], A(0)}; }

  __device__ void ask_history() {
    if constexpr (Needs::kLinear) {
      if (call_.idle == IdleKind::kLinear) {
        const auto idle = LinearIdle<A>::of(idle_map(static_cast<const LinearMap*>(call_.history), from_, call_.now));
        scalars_[0] = idle.w_w, scalars_[1] = idle.w_b, scalars_[2] = idle.b_w, scalars_[3] = idle.b_b;
        scalars_[4] = idle.faded.kept, scalars_[5] = idle.faded.rest;
      }
    }
    if constexpr (Needs::kAdam) {
      if (call_.idle == IdleKind::kAdam) ask_for_adam<true>();
      if (call_.idle == IdleKind::kAmsgrad) ask_for_adam<false>();
    }
  }

  template <bool kShrinks>
  __device__ AdamTerms<kShrinks> terms() const {
    return {static_cast<const AdamMap<kShrinks>*>(call_.history), kIdleTolerance<A>};
  }

  template <bool kShrinks>
  __device__ void ask_for_adam() {
    const auto whole = idle_map(static_cast<const AdamMap<kShrinks>*>(call_.history), from_, call_.now);
    in_parts_ = !terms<kShrinks>().is_one(whole);
    const auto idle = AdamIdle<A>::of(whole);
    const AdamTerm<A> one = as_term<A>(terms<kShrinks>().term(whole, 1, 1));
    scalars_[0] = idle.d, scalars_[1] = idle.first.kept, scalars_[2] = idle.first.rest;
    scalars_[3] = idle.second.kept, scalars_[4] = idle.second.rest;
    scalars_[5] = one.a, scalars_[6] = one.m0, scalars_[7] = one.m2, scalars_[8] = one.m3;
  }

  // S of Adam's family from its parts.
  template <bool kShrinks, int width>
  __device__ void sum_parts(int64_t column, A (&sums)[width]) const {
    A roots[width] = {};
    if (table_.row_state == nullptr) {
      const int s = call_.states - 1;
      load_each<width>(static_cast<const A*>(table_.states[s]) + row_ * table_.state_strides[s] + column,
                       table_.columns - column, table_.is_aligned<width>(),
                       [&](int c, A x) { roots[c] = std::sqrt(x); });
    } else {
#pragma unroll
      for (int c = 0; c < width; ++c) roots[c] = std::sqrt(own_);
    }
    terms<kShrinks>().walk_blocks(from_, call_.now, [&](const AdamTerm<double>& wide) {
      const AdamTerm<A> term = as_term<A>(wide);
#pragma unroll
      for (int c = 0; c < width; ++c) sums[c] = term.d * sums[c] + term.of(roots[c], call_.eps);
    });
  }

  template <int width>
  __device__ void catch_up(RowColumns<A, width>& x) const {
    with_rule(call_, Rules(), [&](const auto& rule) {
      using Rule = std::decay_t<decltype(rule)>;
      constexpr IdleKind kind = idle_kind<Rule>();
#pragma unroll
      for (int c = 0; c < width; ++c) {
        if constexpr (kind == IdleKind::kLinear) rule.catch_up(linear(), x.weight[c], x.state[c]);
        if constexpr (is_adam(kind)) {
          A sum = x.sums[c];
          if (!in_parts_) {
            if constexpr (Rule::kRowState) {
              sum = term().of(std::sqrt(own_), rule.eps());
            } else {
              sum = term().of(rule.root(x.state[c]), rule.eps());
            }
          }
          rule.catch_up(adam(), sum, x.weight[c], x.state[c]);
        }
      }
    });
  }

  // The row's own state, up to date.
  __device__ A caught_up_own() const {
    if constexpr (Needs::kRowState && Needs::kAdam) {
      if (behind_) return adam().second(own_);
    }
    return own_;
  }

  // ---- Sums over the row ----

  __device__ void gather(int64_t column, const A (&grad)[kWidth], RowColumns<A, kWidth>& x, A (&sums)[2]) const {
    with_rule(call_, Rules(), [&](const auto& rule) {
      if constexpr (std::decay_t<decltype(rule)>::kRowSums > 0) {
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          if (column + c < table_.columns) rule.gather(x.weight[c], x.state[c], grad[c], sums);
        }
      }
    });
  }

  // What the step of every column needs of the lanes' sums. Changes the row's own state.
  __device__ A value_of_row(const RowTeam& team, A (&sums)[2], A& own) const {
    for (A& sum : sums) sum = team.sum(sum);
    A value = 0;
    with_rule(call_, Rules(), [&](const auto& rule) {
      if constexpr (std::decay_t<decltype(rule)>::kRowSums > 0) value = rule.row(sums, table_.columns, &own);
    });
    return value;
  }

  // ---- Memory ----

  // Columns beyond the last are zero. S, where it has parts, comes first: walking over them takes many registers.
  template <int width>
  __device__ void load(int64_t column, RowColumns<A, width>& x) const {
    x = RowColumns<A, width>();
    if constexpr (Needs::kAdam) {
      if (in_parts_) {
        if (call_.idle == IdleKind::kAdam) {
          sum_parts<true>(column, x.sums);
        } else {
          sum_parts<false>(column, x.sums);
        }
      }
    }
    const int64_t count = table_.columns - column;
    const bool aligned = table_.is_aligned<width>();
    load_as<width>(call_.weight_dtype, table_.weight, row_ * table_.weight_stride + column, count, aligned, x.weight);
#pragma unroll
    for (int s = 0; s < Needs::kStates; ++s) {
      if (s >= call_.states) continue;
      load_each<width>(static_cast<const A*>(table_.states[s]) + row_ * table_.state_strides[s] + column, count,
                       aligned, [&](int c, A state) { x.state[c][s] = state; });
    }
  }

  __device__ void store_states(int64_t column, const RowColumns<A, kWidth>& x) const {
#pragma unroll
    for (int s = 0; s < Needs::kStates; ++s) {
      if (s >= call_.states) continue;
      store_each<kWidth>(static_cast<A*>(table_.states[s]) + row_ * table_.state_strides[s] + column,
                         table_.columns - column, table_.is_aligned<kWidth>(), [&](int c) { return x.state[c][s]; });
    }
  }

  __device__ void store_weights(int64_t column, const RowColumns<A, kWidth>& x) const {
    with_weight_type<A>(call_.weight_dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      T* const to = static_cast<T*>(table_.weight) + row_ * table_.weight_stride + column;
      const int64_t count = table_.columns - column;
      const bool aligned = table_.is_aligned<kWidth>();
      if constexpr (!std::is_same_v<A, T>) {
        if (call_.rounds_by_chance) {
          const RowBits bits(table_.seed, call_.step, row_);
          store_each<kWidth>(to, count, aligned, [&](int c) {
            return static_cast<T>(rounded_by<T>(x.weight[c], bits.of(static_cast<uint32_t>(column + c))));
          });
          return;
        }
      }
      store_each<kWidth>(to, count, aligned, [&](int c) { return static_cast<T>(x.weight[c]); });
    });
  }

  // One lane's part of a written row.
  __device__ void finish(A own) const {
    if (table_.last_step != nullptr) table_.last_step[row_] = static_cast<int32_t>(call_.done);
    if constexpr (Needs::kRowState) {
      if (table_.row_state != nullptr) static_cast<A*>(table_.row_state)[row_ * table_.row_state_stride] = own;
    }
  }

  const OptimizerCall<A>& call_;
  const OptimizerTable& table_;
  int64_t row_;
  int64_t from_ = 0;
  bool behind_ = false;
  bool in_parts_ = false;  // S of Adam's family is not one term: its parts are looked up column by column
  A own_ = 0;              // the row's own state, as it was
  A scalars_[9] = {};
};

}  // namespace tsr
