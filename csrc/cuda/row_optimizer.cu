#include "row_optimizer.cuh"

namespace tsr {
namespace {

// ---- Blocks dealt to tables -----------------------------------------------------------------------------------------

// The rows of one table that a call takes. In words of 8 bytes: they are uploaded as such.
struct TableWork {
  const int64_t* rows;  // null: all
  const void* values;   // [count, columns]; null: no gradients
  int64_t count;
  int64_t first_block;   // the first that takes rows of this table
  int64_t first_item;    // rows of the tables before it
  int32_t values_dtype;  // a ScalarType
  int32_t values_vector;
};

// Small blocks, and a bound on registers that no kernel must spill for: 16 to 24 warps of a processor are busy.
constexpr int kRowThreads = 128;
template <class Rules, class A>
constexpr int blocks_at_once() {
  return (sizeof(A) == sizeof(float) ? 6 : 5) - RuleNeeds<Rules>::kAdam;
}

// One launch for all tables: each has blocks of its own, for teams of its own width.
struct AllTables {
  const OptimizerTable* tables;
  const TableWork* work;
  int64_t count;
  int64_t blocks;
};

// The last table whose first block is not beyond the given one.
__device__ int64_t table_of(const AllTables& all, int64_t block) {
  int64_t begin = 0, end = all.count;
  while (end - begin > 1) {
    const int64_t middle = begin + (end - begin) / 2;
    if (all.work[middle].first_block <= block) {
      begin = middle;
    } else {
      end = middle;
    }
  }
  return begin;
}

// f(k, team, u): item u of table k's work is the team's. All of a team's lanes call f together.
template <class F>
__device__ __forceinline__ void for_rows(const AllTables& all, const F& f) {
  for (int64_t block = blockIdx.x; block < all.blocks; block += gridDim.x) {
    const int64_t k = table_of(all, block);
    const RowTeam team(all.tables[k].lanes_log2);
    const int64_t teams = kRowThreads >> all.tables[k].lanes_log2;
    const int64_t u = (block - all.work[k].first_block) * teams + team.in_block();
    if (u < all.work[k].count) f(k, team, u);
  }
}

// ---- Updates --------------------------------------------------------------------------------------------------------

// The row that item u of table k names; -1 if it is bad: outside the table, or not above its predecessor.
__device__ int64_t checked_row(const AllTables& all, int64_t k, int64_t u, bool report, const ErrorSink& errors) {
  const TableWork& work = all.work[k];
  if (work.rows == nullptr) return u;
  const int64_t row = work.rows[u], rows = all.tables[k].rows, before = u > 0 ? work.rows[u - 1] : -1;
  const ListItem item{static_cast<int32_t>(k), work.first_item};
  if (row < 0 || row >= rows) {
    if (report) errors.report(Argument::kRows, Fault::kOutOfRange, work.first_item + u, row, rows, -1, item);
    return -1;
  }
  if (row <= before) {
    if (report) errors.report(Argument::kRows, Fault::kNotIncreasing, work.first_item + u, row, before, -1, item);
    return -1;
  }
  return row;
}

// A gradient that lies in memory is looked at before its row is: TableRow's step has no registers left for both.
template <class A, class Gradient>
__device__ bool is_zero(const OptimizerCall<A>& call, const RowTeam& team, int64_t columns, const Gradient& gradient) {
  constexpr int width = kLaneColumns<A>;
  for (int64_t first = 0; first < columns; first += team.lanes() * width) {
    const int64_t column = first + team.lane() * width;
    A grad[width] = {};
    gradient(column, grad);
#pragma unroll
    for (int c = 0; c < width; ++c) grad[c] *= call.scale();
    if (!are_zeros(team, grad, columns - column)) return false;
  }
  return true;
}

template <class Rules, class A>
__global__ void __launch_bounds__(kRowThreads, blocks_at_once<Rules, A>())
    row_optimizer_update_kernel(const __grid_constant__ OptimizerCall<A> call, const __grid_constant__ AllTables all,
                                ErrorSink errors) {
  for_rows(all, [&](int64_t k, const RowTeam& team, int64_t u) {
    const int64_t row = checked_row(all, k, u, team.lane() == 0, errors);
    if (row < 0) return;
    const OptimizerTable& table = all.tables[k];
    const TableWork& work = all.work[k];
    const auto gradient = [&](int64_t column, A* to) {
      constexpr int width = kLaneColumns<A>;
      load_as<width>(static_cast<ScalarType>(work.values_dtype), work.values, u * table.columns + column,
                     table.columns - column, width <= work.values_vector, to);
    };
    const bool skips = work.rows != nullptr && skips_zeros(call, table);
    const bool zero = (skips || call.has_rule_of_zeros) && is_zero(call, team, table.columns, gradient);
    if (zero && skips) return;
    TableRow<A, Rules>(call, table, row).template step</*kLooks=*/false>(team, gradient, zero);
  });
}

template <class Rules, class A>
__global__ void __launch_bounds__(kRowThreads, blocks_at_once<Rules, A>())
    row_optimizer_make_current_kernel(const __grid_constant__ OptimizerCall<A> call,
                                      const __grid_constant__ AllTables all) {
  for_rows(all, [&](int64_t k, const RowTeam& team, int64_t row) {
    TableRow<A, Rules>(call, all.tables[k], row).make_current(team);
  });
}

// ---- Up-to-date values ----------------------------------------------------------------------------------------------

// A bad row's values are zero.
template <class Rules, class A>
__global__ void __launch_bounds__(kRowThreads, blocks_at_once<Rules, A>())
    row_optimizer_current_kernel(const __grid_constant__ OptimizerCall<A> call, const __grid_constant__ AllTables all,
                                 ErrorSink errors, void* out) {
  for_rows(all, [&](int64_t k, const RowTeam& team, int64_t u) {
    constexpr int width = kLaneColumns<A>;
    const OptimizerTable& table = all.tables[k];
    const auto store = [&](int64_t column, const A(&x)[width]) {
      with_weight_type<A>(call.weight_dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        store_each<width>(static_cast<T*>(out) + u * table.columns + column, table.columns - column,
                          width <= all.work[k].values_vector, [&](int c) { return static_cast<T>(x[c]); });
      });
    };
    const int64_t row = all.work[k].rows[u], first = team.lane() * width, tile = team.lanes() * width;
    if (row < 0 || row >= table.rows) {
      if (team.lane() == 0) errors.report(Argument::kRows, Fault::kOutOfRange, u, row, table.rows);
      const A zeros[width] = {};
      for (int64_t column = first; column < table.columns; column += tile) store(column, zeros);
      return;
    }
    const TableRow<A, Rules> current(call, table, row);
    for (int64_t column = first; column < table.columns; column += tile) {
      A x[width];
      current.now(column, x);
      store(column, x);
    }
  });
}

// ---- The history ----------------------------------------------------------------------------------------------------

// One thread: a block waits for those that it is made of.
template <class Map>
__global__ void row_optimizer_advance_kernel(Map* history, int64_t at, Map leaf) {
  append_map(history, at, leaf);
}

// ---- On the host ----------------------------------------------------------------------------------------------------

// Columns of T that one load moves, where x's rows of `columns` elements, `stride` apart, allow `wanted` of them.
bool allows(const Tensor& x, int64_t stride, int64_t columns, int wanted) {
  const int64_t load = std::min<int64_t>(wanted * static_cast<int64_t>(x.element_size()), 16);
  return columns % wanted == 0 && stride * static_cast<int64_t>(x.element_size()) % load == 0 &&
         reinterpret_cast<uintptr_t>(x.data_ptr()) % static_cast<uintptr_t>(load) == 0;
}

int vector_of(const Tensor& x, int64_t stride, int64_t columns) {
  for (const int wanted : {8, 4, 2}) {
    if (allows(x, stride, columns, wanted)) return wanted;
  }
  return 1;
}

// Deals blocks to the tables, whose work has its count and is without its places.
AllTables deal(DeviceCall& call, const std::vector<OptimizerTable>& tables, std::vector<TableWork>& work) {
  int64_t blocks = 0, items = 0;
  for (size_t k = 0; k < tables.size(); ++k) {
    const int64_t teams = kRowThreads >> tables[k].lanes_log2;
    work[k].first_block = blocks;
    work[k].first_item = items;
    blocks += work[k].count / teams + (work[k].count % teams != 0);
    items += work[k].count;
  }
  const OptimizerTable* const uploaded = upload(call, tables);
  return {uploaded, upload(call, work), static_cast<int64_t>(tables.size()), blocks};
}

LaunchShape shape_of(const AllTables& all) { return {std::min(all.blocks, kMaxBlocks), kRowThreads}; }

}  // namespace

template <class A>
OptimizerCall<A> optimizer_call(DeviceCall& call, const OptimizerArguments& arguments) {
  OptimizerCall<A> result;
  dispatch_optimizer_rule<A>(arguments.rule, arguments.step, [&](const auto& rule) {
    using Rule = std::decay_t<decltype(rule)>;
    static_assert(std::is_trivially_copyable_v<Rule> && sizeof(Rule) <= sizeof(result.scalars));
    result.idle = idle_kind<Rule>();
    with_rules(result, [&](auto rules) { result.rule = index_of<Rule>(rules); });
    result.states = Rule::kStates;
    result.row_sums = Rule::kRowSums;
    if constexpr (is_adam(idle_kind<Rule>())) result.eps = rule.eps();
    std::memcpy(result.scalars, &rule, sizeof(rule));
  });
  if (const auto zeros = rule_of_zeros(arguments.rule)) {
    result.has_rule_of_zeros = true;
    dispatch_optimizer_rule<A>(*zeros, arguments.step,
                               [&](const auto& rule) { std::memcpy(result.scalars_of_zeros, &rule, sizeof(rule)); });
  }
  result.weight_dtype = arguments.weight_dtype;
  result.rounds_by_chance = arguments.rounds_by_chance;
  result.skips_zeros = must_skip_zeros(arguments.rule);
  result.sign = arguments.maximize ? A(-1) : A(1);
  if (arguments.grad_scale) {
    if (arguments.grad_scale->scalar_type() == ScalarType::Float) {
      result.float_scale = call.data<float>(*arguments.grad_scale);
    } else {
      result.grad_scale = call.data<A>(*arguments.grad_scale);
    }
  }
  if (arguments.history) result.history = call.data(*arguments.history);
  result.now = arguments.now - arguments.base;
  result.done = arguments.step - arguments.base;
  result.step = arguments.step;
  return result;
}
template OptimizerCall<float> optimizer_call<float>(DeviceCall&, const OptimizerArguments&);
template OptimizerCall<double> optimizer_call<double>(DeviceCall&, const OptimizerArguments&);

OptimizerTable optimizer_table(const OptimizerArguments& arguments, const Tensor& weight, const Tensor* states,
                               const Tensor* last_step, int64_t seed) {
  const int64_t columns = weight.size(1);
  const int own_state = row_state(arguments.rule);
  OptimizerTable table{};
  table.weight = weight.data_ptr();
  table.weight_stride = row_stride(weight);
  table.vector = vector_of(weight, table.weight_stride, columns);
  const int count = static_cast<int>(state_names(arguments.rule).size());
  for (int s = 0, k = 0; s < count; ++s) {
    if (s == own_state) {
      table.row_state = states[s].data_ptr();
      table.row_state_stride = row_stride(states[s]);
      continue;
    }
    table.states[k] = states[s].data_ptr();
    table.state_strides[k] = row_stride(states[s]);
    table.vector = std::min(table.vector, vector_of(states[s], table.state_strides[k++], columns));
  }
  if (last_step != nullptr) table.last_step = static_cast<int32_t*>(last_step->data_ptr());
  table.rows = weight.size(0);
  table.columns = columns;
  table.seed = seed;
  const int width = weight.scalar_type() == ScalarType::Double ? kLaneColumns<double> : kLaneColumns<float>;
  table.lanes_log2 = RowTiling(1, std::min<int64_t>(columns, kWarp * width), width).lanes_log2;
  return table;
}

namespace {

// ---- Operators ------------------------------------------------------------------------------------------------------

void row_optimizer_update_cuda(const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
                               const std::vector<Tensor>& last_steps, const std::optional<Tensor>& history,
                               const std::vector<Tensor>& rows, const std::vector<Tensor>& values,
                               const std::optional<Tensor>& grad_scale, int64_t rule_value,
                               const std::vector<double>& hyperparameters, int64_t step, int64_t base, bool maximize,
                               const std::vector<int64_t>& rounding_seeds, const std::vector<int64_t>& whole) {
  const OptimizerRule rule = check_row_optimizer_update(weights, states, last_steps, history, rows, values, grad_scale,
                                                        rule_value, hyperparameters, step, base, rounding_seeds, whole);
  if (weights.empty()) return;
  DeviceCall call("row_optimizer_update_", weights[0]);
  const OptimizerArguments arguments{
      rule, step, base, step - 1, weights[0].scalar_type(), history, grad_scale, maximize, !rounding_seeds.empty()};
  const std::vector<OptimizerTable> tables = optimizer_tables(arguments, weights, states, last_steps, rounding_seeds);
  std::vector<TableWork> work(tables.size());
  for (size_t k = 0; k < tables.size(); ++k) {
    const Tensor value = as_contiguous(values[k]);
    work[k].rows = rows.empty() ? nullptr : call.data<int64_t>(rows[k]);
    work[k].values = call.data(value);
    work[k].count = value.size(0);
    work[k].values_dtype = static_cast<int32_t>(value.scalar_type());
    work[k].values_vector = vector_of(value, tables[k].columns, tables[k].columns);
  }
  const AllTables all = deal(call, tables, work);
  with_accumulator(arguments.weight_dtype, [&](auto tag) {
    using A = typename decltype(tag)::type;
    const OptimizerCall<A> step_call = optimizer_call<A>(call, arguments);
    with_rules(step_call, [&](auto rules) {
      launch(call, shape_of(all), row_optimizer_update_kernel<decltype(rules), A>, step_call, all, call.errors());
    });
  });
}

void row_optimizer_advance_cuda(const Tensor& history, int64_t rule_value, const std::vector<double>& hyperparameters,
                                int64_t step, int64_t base) {
  const OptimizerRule rule = check_row_optimizer_advance(history, rule_value, hyperparameters, step, base);
  DeviceCall call("row_optimizer_advance_", history);
  dispatch_map(rule, [&](const auto& optimizer) {
    using Map = typename std::decay_t<decltype(optimizer)>::Map;
    launch(call, {1, 1}, row_optimizer_advance_kernel<Map>, static_cast<Map*>(history.data_ptr()), step - base - 1,
           optimizer.leaf(step));
  });
}

Tensor row_optimizer_current_cuda(const Tensor& given_weight, const std::vector<Tensor>& given_states,
                                  const Tensor& given_last_step, const Tensor& history, const Tensor& rows,
                                  int64_t rule_value, const std::vector<double>& hyperparameters, int64_t step,
                                  int64_t base) {
  const OptimizerRule rule = check_row_optimizer_current(given_weight, given_states, given_last_step, history, rows,
                                                         rule_value, hyperparameters, step, base);
  DeviceCall call("row_optimizer_current", given_weight);
  const Tensor weight = readable_rows(given_weight), last_step = as_contiguous(given_last_step);
  const std::vector<Tensor> states = readable_rows(given_states);
  const std::optional<Tensor> given_history(history), no_scale;
  const OptimizerArguments arguments{rule,          step,     base,  step, weight.scalar_type(),
                                     given_history, no_scale, false, false};
  const std::vector<OptimizerTable> tables{optimizer_table(arguments, weight, states.data(), &last_step, /*seed=*/0)};
  const Tensor out = call.empty({rows.size(0), weight.size(1)}, weight.scalar_type());
  std::vector<TableWork> work(1);
  work[0].rows = call.data<int64_t>(rows);
  work[0].count = rows.size(0);
  work[0].values_vector = vector_of(out, weight.size(1), weight.size(1));
  const AllTables all = deal(call, tables, work);
  with_accumulator(arguments.weight_dtype, [&](auto tag) {
    using A = typename decltype(tag)::type;
    const OptimizerCall<A> step_call = optimizer_call<A>(call, arguments);
    with_idle_rules(step_call, [&](auto rules) {
      launch(call, shape_of(all), row_optimizer_current_kernel<decltype(rules), A>, step_call, all, call.errors(),
             out.data_ptr());
    });
  });
  return out;
}

void row_optimizer_make_current_cuda(const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
                                     const std::vector<Tensor>& last_steps, const std::optional<Tensor>& history,
                                     int64_t rule_value, const std::vector<double>& hyperparameters, int64_t step,
                                     int64_t base, const std::vector<int64_t>& rounding_seeds) {
  const OptimizerRule rule = check_row_optimizer_make_current(weights, states, last_steps, history, rule_value,
                                                              hyperparameters, step, base, rounding_seeds);
  if (last_steps.empty()) return;
  DeviceCall call("row_optimizer_make_current_", weights[0]);
  const std::optional<Tensor> no_scale;
  const OptimizerArguments arguments{
      rule, step, base, step, weights[0].scalar_type(), history, no_scale, false, !rounding_seeds.empty()};
  const std::vector<OptimizerTable> tables = optimizer_tables(arguments, weights, states, last_steps, rounding_seeds);
  std::vector<TableWork> work(tables.size());
  for (size_t k = 0; k < tables.size(); ++k) work[k].count = tables[k].rows;
  const AllTables all = deal(call, tables, work);
  with_accumulator(arguments.weight_dtype, [&](auto tag) {
    using A = typename decltype(tag)::type;
    const OptimizerCall<A> step_call = optimizer_call<A>(call, arguments);
    with_idle_rules(step_call, [&](auto rules) {
      launch(call, shape_of(all), row_optimizer_make_current_kernel<decltype(rules), A>, step_call, all);
    });
  });
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "row_optimizer_update_", &tsr::row_optimizer_update_cuda);
  TSR_IMPL(m, "row_optimizer_advance_", &tsr::row_optimizer_advance_cuda);
  TSR_IMPL(m, "row_optimizer_current", &tsr::row_optimizer_current_cuda);
  TSR_IMPL(m, "row_optimizer_make_current_", &tsr::row_optimizer_make_current_cuda);
}
