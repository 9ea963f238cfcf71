#include "row_optimizer.h"

#include "bags.h"

namespace tsr {
namespace {

// Rows [begin, end) of a table's list of rows, or of the table.
struct TableSlice {
  size_t table;
  int64_t begin, end;
};

constexpr int64_t kSliceRows = 256;

// `rows` rows of each table, in slices.
std::vector<TableSlice> slices_of(const std::vector<int64_t>& rows) {
  std::vector<TableSlice> slices;
  for (size_t k = 0; k < rows.size(); ++k) {
    for (int64_t begin = 0; begin < rows[k]; begin += kSliceRows) {
      slices.push_back({k, begin, std::min(begin + kSliceRows, rows[k])});
    }
  }
  return slices;
}

// Runs f(worker's own StepWorker, slice) over slices whose rows move `elements` elements in all.
template <class A, class F>
void for_slices(const OptimizerStep<A>& step, const std::vector<TableSlice>& slices, int64_t elements, const F& f) {
  const int64_t tasks = static_cast<int64_t>(slices.size()), workers = std::min(workers_for(elements), tasks);
  std::vector<StepWorker<A>> scratch(static_cast<size_t>(workers), StepWorker<A>(step));
  parallel_dynamic(tasks, workers, [&](int64_t worker, int64_t task) {
    f(scratch[static_cast<size_t>(worker)], slices[static_cast<size_t>(task)]);
  });
}

void check_increasing(const char* op, const std::vector<Tensor>& rows, const std::vector<Tensor>& weights) {
  for (size_t k = 0; k < rows.size(); ++k) {
    const int64_t n = rows[k].size(0), bound = weights[k].size(0);
    const int64_t* row = rows[k].const_data_ptr<int64_t>();
    FirstPosition first_bad;
    report_bad_ids(row, 0, n, bound, first_bad);
    if (first_bad.found()) throw_bad_index(op, message(Place{"rows", k}).c_str(), rows[k], first_bad.position(), bound);
    bool increasing = true;
    for (int64_t u = 1; u < n; ++u) increasing &= row[u - 1] < row[u];
    for (int64_t u = 1; !increasing; ++u) {
      TSR_CHECK_VALUE(row[u - 1] < row[u], op, ": rows[", k, "] must increase strictly, got ", row[u], " after ",
                      row[u - 1], " at position ", u);
    }
  }
}

// values [begin, end) in the accumulator's type.
template <class T>
const acc_t<T>* wide_values(const Tensor& values, const TableSlice& slice, int64_t dim, std::vector<acc_t<T>>& buffer) {
  using A = acc_t<T>;
  if constexpr (!std::is_same_v<T, A>) {
    if (values.scalar_type() != ScalarType::Float) {
      const int64_t n = (slice.end - slice.begin) * dim;
      buffer.resize(static_cast<size_t>(n));
      row_conversions<T>().widen(values.const_data_ptr<T>() + slice.begin * dim, buffer.data(), n);
      return buffer.data();
    }
  }
  return values.const_data_ptr<A>() + slice.begin * dim;
}

Tensor text_tensor(const std::string& text) {
  const int64_t size = static_cast<int64_t>(text.size());
  Tensor result = torch::stable::empty(torch::headeronly::IntHeaderOnlyArrayRef(&size, 1), ScalarType::Byte);
  std::copy(text.begin(), text.end(), result.mutable_data_ptr<uint8_t>());
  return result;
}

}  // namespace

Tensor row_optimizer_rule(std::optional<int64_t> number, const std::vector<double>& hyperparameters) {
  std::string text;
  if (!number) {
    for (const OptimizerRule& rule : optimizer_rules()) {
      std::visit(
          [&](const auto& optimizer) {
            text += optimizer.kName;
            for (const auto& hyperparameter : optimizer.kHyperparameters) text += message(' ', hyperparameter.name);
          },
          rule);
      text += '\n';
    }
    return text_tensor(text);
  }
  // The errors bear the name of the function that asks.
  const OptimizerRule rule = named_optimizer_rule("idle_motion", *number, hyperparameters);
  const StateNames states = state_names(rule);
  for (size_t s = 0; s < states.size(); ++s) text += message(s > 0 ? " " : "", states[s]);
  const IdleMotion motion = idle_motion(rule);
  const char* const changed[] = {"none", "states", "weight", ""};  // by IdleMotion::Kind
  return text_tensor(message(text, '\n', changed[motion.kind], '\n', motion.reason));
}

void row_optimizer_update_cpu(const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
                              const std::vector<Tensor>& last_steps, const std::optional<Tensor>& given_history,
                              const std::vector<Tensor>& given_rows, const std::vector<Tensor>& given_values,
                              const std::optional<Tensor>& grad_scale, int64_t rule_value,
                              const std::vector<double>& hyperparameters, int64_t step, int64_t base, bool maximize,
                              const std::vector<int64_t>& rounding_seeds, const std::vector<int64_t>& whole) {
  const OptimizerRule rule =
      check_row_optimizer_update(weights, states, last_steps, given_history, given_rows, given_values, grad_scale,
                                 rule_value, hyperparameters, step, base, rounding_seeds, whole);
  if (weights.empty()) return;
  const std::optional<Tensor> history = as_contiguous(given_history);
  std::vector<Tensor> rows, values;
  for (const Tensor& x : given_rows) rows.push_back(as_contiguous(x));
  for (const Tensor& x : given_values) values.push_back(as_contiguous(x));
  const char* op = "row_optimizer_update_";
  check_increasing(op, rows, weights);
  dispatch_float(weights[0].scalar_type(), op, "weights[0]", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const OptimizerStep<A> call(rule, step, base, /*now=*/step - 1, last_steps.empty() ? nullptr : &*history,
                                scale_of(grad_scale, maximize));
    const std::vector<RowStepper<T>> steppers = steppers_of<T>(call, weights, states, last_steps, rounding_seeds);
    std::vector<int64_t> counts;  // of rows of the table, where it is stepped whole, else of rows that are named
    std::vector<bool> is_whole;
    int64_t elements = 0;
    for (size_t k = 0; k < values.size(); ++k) {
      const int64_t named = values[k].size(0), all = steppers[k].rows();
      is_whole.push_back(!rows.empty() && is_stepped_whole(whole, k, all, named));
      counts.push_back(is_whole[k] ? all : named);
      elements += counts[k] * steppers[k].dim() * (2 + call.states);
    }
    for_slices(call, slices_of(counts), elements, [&](StepWorker<A>& worker, const TableSlice& slice) {
      const RowStepper<T>& table = steppers[slice.table];
      const Tensor& its_values = values[slice.table];
      if (rows.empty()) {
        const A* grads = wide_values<T>(its_values, slice, table.dim(), worker.values);
        return table.step_all(worker, grads, slice.begin, slice.end);
      }
      const int64_t* its_rows = rows[slice.table].template const_data_ptr<int64_t>();
      TableSlice named = slice;
      if (is_whole[slice.table]) {
        const int64_t* end = its_rows + its_values.size(0);
        named.begin = std::lower_bound(its_rows, end, slice.begin) - its_rows;
        named.end = std::lower_bound(its_rows + named.begin, end, slice.end) - its_rows;
      }
      const int64_t count = named.end - named.begin;
      const A* grads = wide_values<T>(its_values, named, table.dim(), worker.values);
      if (is_whole[slice.table]) {
        table.step_all(worker, its_rows + named.begin, grads, count, slice.begin, slice.end);
      } else {
        table.step(worker, its_rows + named.begin, grads, count);
      }
    });
  });
}

void row_optimizer_advance_cpu(const Tensor& history, int64_t rule_value, const std::vector<double>& hyperparameters,
                               int64_t step, int64_t base) {
  const OptimizerRule rule = check_row_optimizer_advance(history, rule_value, hyperparameters, step, base);
  dispatch_map(rule, [&](const auto& optimizer) {
    using Map = typename std::decay_t<decltype(optimizer)>::Map;
    append_map(static_cast<Map*>(history.data_ptr()), step - base - 1, optimizer.leaf(step));
  });
}

Tensor row_optimizer_current_cpu(const Tensor& given_weight, const std::vector<Tensor>& given_states,
                                 const Tensor& given_last_step, const Tensor& given_history, const Tensor& given_rows,
                                 int64_t rule_value, const std::vector<double>& hyperparameters, int64_t step,
                                 int64_t base) {
  const OptimizerRule rule = check_row_optimizer_current(given_weight, given_states, given_last_step, given_history,
                                                         given_rows, rule_value, hyperparameters, step, base);
  const char* op = "row_optimizer_current";
  const Tensor weight = readable_rows(given_weight), last_step = as_contiguous(given_last_step);
  const Tensor history = as_contiguous(given_history), rows = as_contiguous(given_rows);
  const std::vector<Tensor> states = readable_rows(given_states);
  const int64_t* ids = rows.const_data_ptr<int64_t>();
  const int64_t n = rows.size(0), bound = weight.size(0);
  FirstPosition first_bad;
  report_bad_ids(ids, 0, n, bound, first_bad);
  if (first_bad.found()) throw_bad_index(op, "rows", rows, first_bad.position(), bound);
  Tensor out = new_empty(weight, {n, weight.size(1)}, weight.scalar_type());
  dispatch_float(weight.scalar_type(), op, "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const OptimizerStep<A> call(rule, step, base, /*now=*/step, &history, /*scale=*/1);
    const RowStepper<T> table(call, weight, states.data(), &last_step);
    T* to = out.mutable_data_ptr<T>();
    for_slices(call, slices_of({n}), out.numel() * (2 + call.states),
               [&](StepWorker<A>& worker, const TableSlice& slice) {
                 table.current(worker, ids + slice.begin, slice.end - slice.begin, to + slice.begin * table.dim());
               });
  });
  return out;
}

void row_optimizer_make_current_cpu(const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
                                    const std::vector<Tensor>& last_steps, const std::optional<Tensor>& given_history,
                                    int64_t rule_value, const std::vector<double>& hyperparameters, int64_t step,
                                    int64_t base, const std::vector<int64_t>& rounding_seeds) {
  const OptimizerRule rule = check_row_optimizer_make_current(weights, states, last_steps, given_history, rule_value,
                                                              hyperparameters, step, base, rounding_seeds);
  if (last_steps.empty()) return;
  const std::optional<Tensor> history = as_contiguous(given_history);
  dispatch_float(weights[0].scalar_type(), "row_optimizer_make_current_", "weights[0]", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const OptimizerStep<A> call(rule, step, base, /*now=*/step, &*history, /*scale=*/1);
    const std::vector<RowStepper<T>> steppers = steppers_of<T>(call, weights, states, last_steps, rounding_seeds);
    std::vector<int64_t> counts;
    int64_t elements = 0;
    for (const Tensor& x : weights) {
      counts.push_back(x.size(0));
      elements += x.numel() * (2 + call.states);
    }
    for_slices(call, slices_of(counts), elements, [&](StepWorker<A>& worker, const TableSlice& slice) {
      steppers[slice.table].catch_up(worker, slice.begin, slice.end);
    });
  });
}

}  // namespace tsr

// It has no tensor by which torch could choose a kernel.
STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CompositeExplicitAutograd, m) {
  TSR_IMPL(m, "row_optimizer_rule", &tsr::row_optimizer_rule);
}

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "row_optimizer_update_", &tsr::row_optimizer_update_cpu);
  TSR_IMPL(m, "row_optimizer_advance_", &tsr::row_optimizer_advance_cpu);
  TSR_IMPL(m, "row_optimizer_current", &tsr::row_optimizer_current_cpu);
  TSR_IMPL(m, "row_optimizer_make_current_", &tsr::row_optimizer_make_current_cpu);
}
