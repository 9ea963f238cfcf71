// How a team of lanes brings one row of a table up to date, and steps it: csrc/row_optimizer.h on the device.
//
// The rule is chosen at run time, inside the kernel: it costs a few comparisons per row, and saves some seventeen times
// the kernels. All of a row is one team's, whatever its width: the lanes take `width` neighbouring columns each, tile
// after tile. A row's gradient comes from the caller, `width` columns at a time, who may have it in memory or compute it.
//
//   step_row(call, table, row, team, gradient)     catches the row up, steps it, and writes it
//   make_row_current(call, table, row, team)       catches the row up and writes it
//   row_idle(call, table, row), then columns_now(call, table, row, idle, column)
//                                                  what some of its columns are as of now; nothing is written
#pragma once
#include "row_optimizer_columns.cuh"

namespace tsr {

// ---- Catching up ----------------------------------------------------------------------------------------------------

// What a row has missed, the same for all its columns.
template <class A>
struct RowIdle {
  bool behind = false;
  bool in_parts = false;  // Adam's sum is not one term: its parts are looked up column by column
  int64_t from = 0;
  A scalars[8] = {};

  __device__ LinearIdle<A> linear() const { return {scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]}; }
  __device__ AdamIdle<A> adam() const { return {scalars[0], scalars[1], scalars[2]}; }
  __device__ AdamTerm<A> term() const { return {scalars[3], scalars[4], scalars[5], scalars[6], scalars[7]}; }

  __device__ void set(const LinearIdle<A>& x) {
    scalars[0] = x.w_w, scalars[1] = x.w_b, scalars[2] = x.b_w, scalars[3] = x.b_b, scalars[4] = x.p;
  }
  __device__ void set(const AdamIdle<A>& x, const AdamTerm<A>& term) {
    scalars[0] = x.d, scalars[1] = x.p1, scalars[2] = x.p2;
    scalars[3] = term.a, scalars[4] = term.m0, scalars[5] = term.m2, scalars[6] = term.m3, scalars[7] = term.d;
  }
};

template <bool kShrinks, class A>
__device__ void find_adam_idle(const OptimizerCall<A>& call, RowIdle<A>& idle) {
  using Map = AdamMap<kShrinks>;
  const AdamTerms<kShrinks> terms(static_cast<const Map*>(call.history), kIdleTolerance<A>);
  const Map whole = idle_map(static_cast<const Map*>(call.history), idle.from, call.now);
  idle.in_parts = !terms.is_one(whole);
  idle.set(AdamIdle<A>::of(whole), as_term<A>(terms.term(whole, 1, 1)));
}

template <class A>
__device__ RowIdle<A> row_idle(const OptimizerCall<A>& call, const OptimizerTable& table, int64_t row) {
  RowIdle<A> idle;
  if (table.last_step == nullptr) return idle;
  idle.from = max(int64_t{0}, static_cast<int64_t>(table.last_step[row]));
  idle.behind = idle.from < call.now;
  if (!idle.behind) return idle;
  if (call.idle == IdleKind::kLinear) {
    idle.set(LinearIdle<A>::of(idle_map(static_cast<const LinearMap*>(call.history), idle.from, call.now)));
  } else if (call.idle == IdleKind::kAdam) {
    find_adam_idle<true>(call, idle);
  } else {
    find_adam_idle<false>(call, idle);
  }
  return idle;
}

// S of Adam's family where it has parts. Asks for no more of the row than that needs, before the row is loaded: walking
// over the parts takes many registers.
template <bool kShrinks, int width, class A>
__device__ void sum_parts(const OptimizerCall<A>& call, const OptimizerTable& table, int64_t row,
                          const RowIdle<A>& idle, A row_value, int64_t column, A (&sums)[width]) {
  using Map = AdamMap<kShrinks>;
  A roots[width] = {};
  if (table.row_state == nullptr) {
    const int s = call.states - 1;
    load_each<width>(static_cast<const A*>(table.states[s]) + row * table.state_strides[s] + column,
                     table.columns - column, table.is_aligned<width>(), [&](int c, A x) { roots[c] = std::sqrt(x); });
  } else {
#pragma unroll
    for (int c = 0; c < width; ++c) roots[c] = std::sqrt(row_value);
  }
  const AdamTerms<kShrinks> terms(static_cast<const Map*>(call.history), kIdleTolerance<A>);
  terms.walk_blocks(idle.from, call.now, [&](const AdamTerm<double>& wide) {
    const AdamTerm<A> term = as_term<A>(wide);
#pragma unroll
    for (int c = 0; c < width; ++c) sums[c] = term.d * sums[c] + term.of(roots[c], call.eps);
  });
}

// A lane's columns, and S of Adam's family for them where it has parts. row_value: the row's own state, as it was.
template <int width, class A>
__device__ void load_behind(const OptimizerCall<A>& call, const OptimizerTable& table, int64_t row,
                            const RowIdle<A>& idle, A row_value, int64_t column, RowColumns<A, width>& columns,
                            A (&sums)[width]) {
#pragma unroll
  for (int c = 0; c < width; ++c) sums[c] = 0;
  if (idle.in_parts) {
    if (call.idle == IdleKind::kAdam) {
      sum_parts<true>(call, table, row, idle, row_value, column, sums);
    } else {
      sum_parts<false>(call, table, row, idle, row_value, column, sums);
    }
  }
  columns = load_row<width>(call, table, row, column);
}

template <int width, class A>
__device__ void catch_up(const OptimizerCall<A>& call, const RowIdle<A>& idle, A row_value, const A (&sums)[width],
                         RowColumns<A, width>& columns) {
  with_rule(call, [&](const auto& rule) {
    using Rule = std::decay_t<decltype(rule)>;
    constexpr IdleKind kind = idle_kind<Rule>();
#pragma unroll
    for (int c = 0; c < width; ++c) {
      if constexpr (kind == IdleKind::kLinear) rule.catch_up(idle.linear(), columns.weight[c], columns.state[c]);
      if constexpr (is_adam(kind)) {
        A sum = sums[c];
        if constexpr (Rule::kRowState) {
          if (!idle.in_parts) sum = idle.term().of(std::sqrt(row_value), rule.eps());
        } else {
          if (!idle.in_parts) sum = idle.term().of(rule.root(columns.state[c]), rule.eps());
        }
        rule.catch_up(idle.adam(), sum, columns.weight[c], columns.state[c]);
      }
    }
  });
}

// The row's own state as of now.
template <class A>
__device__ A caught_up_row_value(const RowIdle<A>& idle, A row_value) {
  return idle.behind ? row_value * idle.adam().p2 : row_value;
}

template <class A>
__device__ A* row_value_of(const OptimizerTable& table, int64_t row) {
  return table.row_state == nullptr ? nullptr : static_cast<A*>(table.row_state) + row * table.row_state_stride;
}

// ---- Sums over a row ------------------------------------------------------------------------------------------------

template <int width, class A>
__device__ void gather(const OptimizerCall<A>& call, RowColumns<A, width>& columns, const A (&grad)[width],
                       int64_t count, A (&sums)[2]) {
  with_rule(call, [&](const auto& rule) {
    if constexpr (std::decay_t<decltype(rule)>::kRowSums > 0) {
#pragma unroll
      for (int c = 0; c < width; ++c) {
        if (c < count) rule.gather(columns.weight[c], columns.state[c], grad[c], sums);
      }
    }
  });
}

// What the step of every column needs of the lanes' sums. Changes the row's own state.
template <class A>
__device__ A value_of_row(const OptimizerCall<A>& call, const RowTeam& team, A (&sums)[2], int64_t dim, A& row_value) {
  for (A& sum : sums) sum = team.sum(sum);
  A value = 0;
  with_rule(call, [&](const auto& rule) {
    if constexpr (std::decay_t<decltype(rule)>::kRowSums > 0) value = rule.row(sums, dim, &row_value);
  });
  return value;
}

// ---- What kernels call ----------------------------------------------------------------------------------------------

// Columns [column, column + width) of the row as of now, not rounded to the weights' type; zero beyond the last.
template <int width, class A>
__device__ void columns_now(const OptimizerCall<A>& call, const OptimizerTable& table, int64_t row,
                            const RowIdle<A>& idle, int64_t column, A (&weight)[width]) {
  RowColumns<A, width> columns;
  A sums[width];
  const A* const row_value_at = row_value_of<A>(table, row);
  const A row_value = row_value_at == nullptr ? A(0) : *row_value_at;
  load_behind(call, table, row, idle, row_value, column, columns, sums);
  if (idle.behind) catch_up(call, idle, row_value, sums, columns);
#pragma unroll
  for (int c = 0; c < width; ++c) weight[c] = columns.weight[c];
}

// Catches the row up, and writes it if it was behind. All lanes of the team call it together.
template <class A>
__device__ void make_row_current(const OptimizerCall<A>& call, const OptimizerTable& table, int64_t row,
                                 const RowTeam& team) {
  constexpr int width = kLaneColumns<A>;
  const RowIdle<A> idle = row_idle(call, table, row);
  if (!idle.behind) return;
  A* const row_value_at = row_value_of<A>(table, row);
  const A row_value = row_value_at == nullptr ? A(0) : *row_value_at;
  team.wait();  // until all lanes have read what one of them writes
  for (int64_t column = team.lane() * width; column < table.columns; column += team.lanes() * width) {
    RowColumns<A, width> columns;
    A sums[width];
    load_behind(call, table, row, idle, row_value, column, columns, sums);
    catch_up(call, idle, row_value, sums, columns);
    store_weights(call, table, row, column, columns);
    store_states(call, table, row, column, columns);
  }
  if (team.lane() != 0) return;
  table.last_step[row] = static_cast<int32_t>(call.done);
  if (row_value_at != nullptr) *row_value_at = caught_up_row_value(idle, row_value);
}

// Catches the row up, makes the step with its gradient, and writes it. All lanes of the team call it together.
//
// gradient(column, to) writes the gradient of columns [column, column + width) to `to`, an A[width] of zeros, before it is
// scaled; beyond the last column it may write what it likes. All lanes call it together, those beyond the last column too. Where the rule
// needs sums over the row and a team's lanes cannot hold it (more than kWarp * width columns), it is called twice for
// every column, and must give the same both times.
template <class A, class Gradient>
__device__ void step_row(const OptimizerCall<A>& call, const OptimizerTable& table, int64_t row, const RowTeam& team,
                         const Gradient& gradient) {
  constexpr int width = kLaneColumns<A>;
  const RowIdle<A> idle = row_idle(call, table, row);
  A* const row_value_at = row_value_of<A>(table, row);
  const A row_value = row_value_at == nullptr ? A(0) : *row_value_at, scale = call.scale();
  team.wait();  // until all lanes have read what one of them writes
  A new_row_value = caught_up_row_value(idle, row_value);
  A of_row = 0;
  RowColumns<A, width> columns;
  A grad[width], parts[width];
  const int64_t tile = team.lanes() * width;
  const bool is_held = call.row_sums > 0 && table.columns <= tile;
  // The first pass adds up, the second steps.
  for (int pass = call.row_sums > 0 ? 0 : 1; pass < 2; ++pass) {
    A sums[2] = {};
    for (int64_t first = 0; first < table.columns; first += tile) {
      const int64_t column = first + team.lane() * width;
      if (pass == 0 || !is_held) {
        load_behind(call, table, row, idle, row_value, column, columns, parts);
#pragma unroll
        for (int c = 0; c < width; ++c) grad[c] = 0;
        gradient(column, grad);
#pragma unroll
        for (int c = 0; c < width; ++c) grad[c] *= scale;
      }
      if (pass == 0) {
        gather(call, columns, grad, table.columns - column, sums);
        if (call.gather_writes && !is_held) store_states(call, table, row, column, columns);
        continue;
      }
      if (idle.behind) catch_up(call, idle, row_value, parts, columns);
      with_rule(call, [&](const auto& rule) {
#pragma unroll
        for (int c = 0; c < width; ++c) rule.step(columns.weight[c], columns.state[c], grad[c], of_row);
      });
      store_weights(call, table, row, column, columns);
      store_states(call, table, row, column, columns);
    }
    if (pass == 0) of_row = value_of_row(call, team, sums, table.columns, new_row_value);
  }
  if (team.lane() != 0) return;
  if (table.last_step != nullptr) table.last_step[row] = static_cast<int32_t>(call.done);
  if (row_value_at != nullptr) *row_value_at = new_row_value;
}

}  // namespace tsr
