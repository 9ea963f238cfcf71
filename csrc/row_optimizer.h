// row_optimizer: an optimizer's steps on tables of which a step sees few rows, as if it saw them all.
//
// row_optimizer_update_(weights, states, last_steps, history?, rows, values, grad_scale?, rule, hyperparameters, step,
//                       base, maximize, rounding_seeds, whole): for every table k and every u, in place,
//   row rows[k][u] of weights[k] and of its states is flushed through step - 1, and then makes step `step` with
//   g = (maximize ? -1 : 1) * grad_scale * values[k][u]
// * Steps are numbered from 1. A row that a step does not name has gradient zero in it, which for many rules still
//   moves it. Such idle steps are not done: the row is stale. last_steps[k][row] says through which step the row is up
//   to date, counted from `base`, and whoever needs the row flushes it by the idle map (row_optimizer_idle.h) of the
//   steps that it missed, whatever their number.
// * history: the idle maps of the steps since base, [>= 2 * (step - base), 8] float64, the same for all tables that
//   step together; at base all rows were up to date. row_optimizer_advance_ appends the map of step `step`, after its
//   updates: learning rates and all other hyperparameters but eps may differ from step to step.
// * last_steps empty: no rows are flushed. That is right where the rule does not move idle rows, where every step has
//   rows = all, and is the rule called lazy otherwise. A named row whose g is zero in every column (-0 is zero, NaN is
//   not) then counts as one that is not named: it is left alone, states and all.
// * Where decay is for rows with a gradient alone (decay_seen is 1), a row whose g is zero in every column makes the
//   step without decay, whether it is named or not: it moves as idle rows do.
// * whole: none, or with last_steps one number per table: a table of at most whole[k] times as many rows as the call
//   names of it is stepped whole: its other rows too are flushed and make the step, with gradient zero. That is what
//   later idle steps come to, to rounding, and costs less than to catch up with most of a table's rows time and again.
//   On CUDA no table is, as there the host does not know how many rows a lookup names.
// * row_optimizer_current(weight, states, last_step, history, rows, ...) -> [U, D]: what the rows of weight are as of
//   step `step`, all written steps and all idle ones; nothing is written. Rows in any order, repeated as one likes.
//   row_optimizer_make_current_ flushes all rows: it writes just that, weights and states.
// * row_optimizer_rule(rule?, hyperparameters) -> text [N], uint8, on the CPU: what a rule says of itself, whatever the
//   range of its hyperparameters. One line has the names of its states. The next says what an idle step changes:
//   "none", "states" or "weight"; or nothing, and the third says why many idle steps have no closed form. Without rule
//   there is a line for each rule, in the order of their numbers: its name and those of its hyperparameters.
// * Idle maps are exact for the rules that have a LinearMap. For those with an AdamMap the movement is a sum that is
//   expanded to within 3e-8 of it (float64: 1e-13). What a rule does to idle rows its motion() says. Where it has no
//   closed form, an update with last_steps and rows, and advance_, raise ValueError, as they do for a rule without
//   maps; where nothing moves, last_steps must be empty. A rule that keeps a sign (lion) moves by it however small the
//   average has become.
// * Tables: weights[k] [V_k, D_k], all of one dtype, float16, bfloat16, float32 or float64, and one device. states:
//   table after table those of the rule (its states()), [V_k, D_k] or [V_k], in the accumulator's dtype: float32,
//   for float64 weights float64. values[k]: [U_k, D_k] in the accumulator's dtype or the weights'. rows: one int64
//   vector per table, strictly increasing, or none for all tables: then values[k] is [V_k, D_k]. last_steps: none, or
//   one int32 [V_k] per table; numbers outside [0, step - base] count as the nearer end. grad_scale: one element of the
//   accumulator's dtype or float32, on the device. Written rows may be any distance apart, each of them contiguous; no
//   memory may be shared between what is written, nor with what is read (columns of one tensor share none).
// * A step is computed in the accumulator's dtype and the weight rounded once, after flush and step, to the nearest
//   number; or, with rounding_seeds (one per table, for half types only), to one of the two neighbours by a generator
//   of (seed, step, row, column), so that the mean is right (stochastic_rounding.h). A row that row_optimizer_current
//   reads is rounded to nearest: just what make_current_ stores without seeds.
// * Errors: ValueError for shapes, dtypes, layouts, hyperparameters outside their range and rows that do not increase;
//   IndexError for a row outside [0, V). After an error nothing is written. On CUDA a row that is outside, or not above
//   its predecessor, is skipped and reported.
// * NaN and infinite gradients follow the formulas. So does a second moment that has overflowed, in idle steps too: its
//   element stays where it is, but for decay, also where rmsprop takes the average's square from it. The mean over a
//   row without elements is 0.
//
// Determinism: one thread owns a row: the same bits on every run, for every number of threads and, on the CPU, every
// instruction set. CUDA's differ: products are fused with additions.
// Not differentiable: an update happens outside the graph, and up-to-date values are read by lookups, which have
// gradients of their own. Source: torch.optim's formulas, with all scalars computed in float64;
// tf.compat.v1.train.FtrlOptimizer; FBGEMM's row-wise Adagrad, partial row-wise Adam and LAMB; Lion's paper.
#pragma once
#include "row_optimizer_rules.h"

namespace tsr {

// A table that is only read may have any layout: where its rows are not whole, a copy.
inline Tensor readable_rows(const Tensor& x) { return has_whole_rows(x) ? x : as_contiguous(x); }

inline std::vector<Tensor> readable_rows(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  result.reserve(tensors.size());
  for (const Tensor& x : tensors) result.push_back(readable_rows(x));
  return result;
}

// ---- Checks ---------------------------------------------------------------------------------------------------------

inline void check_optimizer_steps(const char* op, int64_t step, int64_t base, int64_t least) {
  TSR_CHECK_VALUE(base >= 0, op, ": base must be >= 0, got ", base);
  TSR_CHECK_VALUE(step >= 0 && step - base >= least && step - base < INT32_MAX, op, ": step must be in [base + ", least,
                  ", base + 2^31), got ", step, " with base ", base);
}

// Checks that history has room for the idle maps of `steps` steps.
inline void check_history(const char* op, const Tensor& history, int64_t steps) {
  TSR_CHECK_VALUE(history.scalar_type() == ScalarType::Double, op, ": history must be Double, got ",
                  dtype_name(history.scalar_type()));
  TSR_CHECK_VALUE(history.dim() == 2 && history.size(1) == kHistoryColumns && history.size(0) >= 2 * steps, op,
                  ": history must have shape [at least ", 2 * steps, ", ", kHistoryColumns, "], got ",
                  shape_text(history));
}

inline ScalarType accumulator_dtype(ScalarType weight) {
  return weight == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// One tensor of table k.
inline void check_table_tensor(const char* op, const Place& name, const Tensor& x, const Tensor& weight, size_t k,
                               bool per_row, ScalarType dtype) {
  const bool fits = per_row ? x.dim() == 1 && x.size(0) == weight.size(0) : x.sizes().equals(weight.sizes());
  TSR_CHECK_VALUE(fits, op, ": ", name, " must have ", per_row ? "one value for each row" : "the shape", " of weights[",
                  k, "], ", shape_text(weight), ", got shape ", shape_text(x));
  TSR_CHECK_VALUE(x.scalar_type() == dtype, op, ": ", name, " must be ", dtype_name(dtype), ", got ",
                  dtype_name(x.scalar_type()));
  check_same_device(op, name, x, "weights[0]", weight);
}

// Weights, states and last_steps of K tables: what every operator that steps or flushes takes. The rule must have
// been checked.
inline void check_optimizer_tables(const char* op, const OptimizerRule& rule, const std::vector<Tensor>& weights,
                                   const std::vector<Tensor>& states, const std::vector<Tensor>& last_steps) {
  const StateNames names = state_names(rule);
  TSR_CHECK_VALUE(states.size() == names.size() * weights.size(), op, ": states must be ", names.size(),
                  " for each of the ", weights.size(), " tables, got ", states.size());
  TSR_CHECK_VALUE(last_steps.empty() || last_steps.size() == weights.size(), op,
                  ": last_steps must be none, or one for each of the ", weights.size(), " tables, got ",
                  last_steps.size());
  TSR_CHECK_VALUE(last_steps.empty() || has_idle_maps(rule), op,
                  ": last_steps must be none for a rule that has no idle maps, got ", last_steps.size());
  for (size_t k = 0; k < weights.size(); ++k) {
    const Tensor& weight = weights[k];
    check_float_dtype(op, "weights[0]", weights[0]);
    TSR_CHECK_VALUE(weight.dim() == 2, op, ": weights[", k, "] must have shape [V, D], got ", shape_text(weight));
    TSR_CHECK_VALUE(weight.scalar_type() == weights[0].scalar_type(), op, ": weights[", k, "] must be ",
                    dtype_name(weights[0].scalar_type()), ", got ", dtype_name(weight.scalar_type()));
    check_same_device(op, Place{"weights", k}, weight, "weights[0]", weights[0]);
    for (size_t s = 0; s < names.size(); ++s) {
      const Tensor& state = states[k * names.size() + s];
      const Place name{names[s], k};
      check_table_tensor(op, name, state, weight, k, static_cast<int>(s) == row_state(rule),
                         accumulator_dtype(weight.scalar_type()));
    }
    if (!last_steps.empty()) {
      check_table_tensor(op, Place{"last_steps", k}, last_steps[k], weight, k, /*per_row=*/true, ScalarType::Int);
    }
  }
}

// The same tables, for operators that write them: their layouts, and that they share no memory, neither with each other
// nor with what is read meanwhile, which `memory` holds.
inline void check_written_tables(const char* op, const OptimizerRule& rule, const std::vector<Tensor>& weights,
                                 const std::vector<Tensor>& states, const std::vector<Tensor>& last_steps,
                                 const std::optional<Tensor>& history, CallMemory memory) {
  const StateNames names = state_names(rule);
  for (size_t k = 0; k < weights.size(); ++k) {
    check_written_rows(op, Place{"weights", k}, weights[k]);
    memory.add_written(Place{"weights", k}, weights[k]);
    for (size_t s = 0; s < names.size(); ++s) {
      const Tensor& state = states[k * names.size() + s];
      check_written_rows(op, Place{names[s], k}, state);
      memory.add_written(Place{names[s], k}, state);
    }
    if (last_steps.empty()) continue;
    TSR_CHECK_VALUE(last_steps[k].is_contiguous(), op, ": last_steps[", k, "] must be contiguous");
    memory.add_written(Place{"last_steps", k}, last_steps[k]);
  }
  memory.add_read(Place{"history"}, history);
  memory.check(op);
}

inline void check_rounding_seeds(const char* op, const std::vector<Tensor>& weights,
                                 const std::vector<int64_t>& rounding_seeds) {
  if (rounding_seeds.empty()) return;
  TSR_CHECK_VALUE(rounding_seeds.size() == weights.size(), op, ": rounding_seeds must be none, or one for each of the ",
                  weights.size(), " tables, got ", rounding_seeds.size());
  for (const Tensor& weight : weights) {
    TSR_CHECK_VALUE(weight.scalar_type() == ScalarType::Half || weight.scalar_type() == ScalarType::BFloat16, op,
                    ": rounding_seeds must be none for weights that are ", dtype_name(weight.scalar_type()));
  }
}

inline void check_grad_scale(const char* op, const std::optional<Tensor>& grad_scale,
                             const std::vector<Tensor>& weights) {
  if (!grad_scale || weights.empty()) return;
  const ScalarType wide = accumulator_dtype(weights[0].scalar_type());
  TSR_CHECK_VALUE(grad_scale->numel() == 1, op, ": grad_scale must have one element, got shape ",
                  shape_text(*grad_scale));
  TSR_CHECK_VALUE(grad_scale->scalar_type() == wide || grad_scale->scalar_type() == ScalarType::Float, op,
                  ": grad_scale must be ", dtype_name(wide), " or Float, got ", dtype_name(grad_scale->scalar_type()));
  check_same_device(op, "grad_scale", *grad_scale, "weights[0]", weights[0]);
}

// A flush needs the maps of `steps` steps.
inline void check_catching_up(const char* op, const std::vector<Tensor>& last_steps,
                              const std::optional<Tensor>& history, int64_t steps) {
  if (last_steps.empty()) return;
  TSR_CHECK_VALUE(history.has_value(), op, ": history must be given with last_steps, got None");
  check_history(op, *history, steps);
  check_same_device(op, "history", *history, "last_steps", last_steps[0]);
}

// A step whose rows are named leaves the others idle: they must have a map.
inline void check_idle_rows(const char* op, const OptimizerRule& given) {
  const OptimizerRule rule = idle_rule(given);
  TSR_CHECK_VALUE(has_idle_maps(rule), op, ": rule must be one whose idle rows move by a map, got ", rule.index());
  dispatch_map(rule, [&](const auto& optimizer) {
    TSR_CHECK_VALUE(optimizer.motion().kind != IdleMotion::kNoClosedForm, op,
                    ": weight_decay must be 0 or decoupled, as it enters the second moment of idle rows, got ",
                    optimizer.weight_decay);
    if constexpr (!std::is_same_v<typename std::decay_t<decltype(optimizer)>::Map, LinearMap>) {
      TSR_CHECK_VALUE(!optimizer.shrinks_weights() || optimizer.lr * optimizer.weight_decay <= 1, op,
                      ": weight_decay must be at most 1 / lr, got ", optimizer.weight_decay, " with lr ", optimizer.lr);
    }
  });
}

// Tables that are stepped whole (above) need their rows' last steps.
inline void check_whole(const char* op, const std::vector<int64_t>& whole, const std::vector<Tensor>& last_steps) {
  TSR_CHECK_VALUE(whole.empty() || whole.size() == last_steps.size(), op,
                  ": whole must be none, or one for each of the ", last_steps.size(), " last_steps, got ",
                  whole.size());
  for (size_t k = 0; k < whole.size(); ++k) {
    TSR_CHECK_VALUE(whole[k] >= 0, op, ": whole[", k, "] must be >= 0, got ", whole[k]);
  }
}

// Whether table k is stepped whole if it has so many rows and so many are named.
inline bool is_stepped_whole(const std::vector<int64_t>& whole, size_t k, int64_t rows, int64_t named) {
  return !whole.empty() && whole[k] > 0 && rows > 0 && (rows - 1) / whole[k] < named;
}

inline OptimizerRule check_row_optimizer_update(
    const std::vector<Tensor>& weights, const std::vector<Tensor>& states, const std::vector<Tensor>& last_steps,
    const std::optional<Tensor>& history, const std::vector<Tensor>& rows, const std::vector<Tensor>& values,
    const std::optional<Tensor>& grad_scale, int64_t rule_value, const std::vector<double>& h, int64_t step,
    int64_t base, const std::vector<int64_t>& rounding_seeds, const std::vector<int64_t>& whole) {
  const char* op = "row_optimizer_update_";
  const OptimizerRule rule = check_optimizer_rule(op, rule_value, h);
  check_optimizer_steps(op, step, base, /*least=*/1);
  check_optimizer_tables(op, rule, weights, states, last_steps);
  CallMemory read;
  read.add_read("rows", rows);
  read.add_read("values", values);
  read.add_read(Place{"grad_scale"}, grad_scale);
  check_written_tables(op, rule, weights, states, last_steps, history, std::move(read));
  check_catching_up(op, last_steps, history, step - 1 - base);
  if (!last_steps.empty() && !rows.empty()) check_idle_rows(op, rule);
  check_rounding_seeds(op, weights, rounding_seeds);
  check_whole(op, whole, last_steps);
  check_grad_scale(op, grad_scale, weights);
  TSR_CHECK_VALUE(rows.empty() || rows.size() == weights.size(), op, ": rows must be none, or one for each of the ",
                  weights.size(), " tables, got ", rows.size());
  TSR_CHECK_VALUE(values.size() == weights.size(), op, ": values must be one for each of the ", weights.size(),
                  " tables, got ", values.size());
  for (size_t k = 0; k < weights.size(); ++k) {
    const Tensor& weight = weights[k];
    int64_t expected = weight.size(0);
    if (!rows.empty()) {
      const Place name{"rows", k};
      check_vector(op, name, rows[k]);
      TSR_CHECK_VALUE(rows[k].scalar_type() == ScalarType::Long, op, ": ", name, " must be Long, got ",
                      dtype_name(rows[k].scalar_type()));
      check_same_device(op, name, rows[k], "weights[0]", weight);
      expected = rows[k].size(0);
    }
    const Place name{"values", k};
    TSR_CHECK_VALUE(values[k].dim() == 2 && values[k].size(0) == expected && values[k].size(1) == weight.size(1), op,
                    ": ", name, " must have shape [", expected, ", ", weight.size(1), "], got ", shape_text(values[k]));
    const ScalarType wide = accumulator_dtype(weight.scalar_type()), dtype = values[k].scalar_type();
    TSR_CHECK_VALUE(dtype == wide || dtype == weight.scalar_type(), op, ": ", name, " must be ", dtype_name(wide),
                    " or the dtype of weights[", k, "], ", dtype_name(weight.scalar_type()), ", got ",
                    dtype_name(dtype));
    check_same_device(op, name, values[k], "weights[0]", weight);
  }
  return rule;
}

inline OptimizerRule check_row_optimizer_advance(const Tensor& history, int64_t rule_value,
                                                 const std::vector<double>& h, int64_t step, int64_t base) {
  const char* op = "row_optimizer_advance_";
  const OptimizerRule rule = check_optimizer_rule(op, rule_value, h);
  check_idle_rows(op, rule);
  check_optimizer_steps(op, step, base, /*least=*/1);
  check_history(op, history, step - base);
  TSR_CHECK_VALUE(history.is_contiguous(), op, ": history must be contiguous, as it is written in place");
  return idle_rule(rule);
}

inline OptimizerRule check_row_optimizer_current(const Tensor& weight, const std::vector<Tensor>& states,
                                                 const Tensor& last_step, const Tensor& history, const Tensor& rows,
                                                 int64_t rule_value, const std::vector<double>& h, int64_t step,
                                                 int64_t base) {
  const char* op = "row_optimizer_current";
  const OptimizerRule rule = check_optimizer_rule(op, rule_value, h);
  check_optimizer_steps(op, step, base, /*least=*/0);
  check_optimizer_tables(op, rule, {weight}, states, {last_step});
  check_catching_up(op, {last_step}, history, step - base);
  check_vector(op, "rows", rows);
  TSR_CHECK_VALUE(rows.scalar_type() == ScalarType::Long, op, ": rows must be Long, got ",
                  dtype_name(rows.scalar_type()));
  check_same_device(op, "rows", rows, "weight", weight);
  return rule;
}

inline OptimizerRule check_row_optimizer_make_current(const std::vector<Tensor>& weights,
                                                      const std::vector<Tensor>& states,
                                                      const std::vector<Tensor>& last_steps,
                                                      const std::optional<Tensor>& history, int64_t rule_value,
                                                      const std::vector<double>& h, int64_t step, int64_t base,
                                                      const std::vector<int64_t>& rounding_seeds) {
  const char* op = "row_optimizer_make_current_";
  const OptimizerRule rule = check_optimizer_rule(op, rule_value, h);
  check_optimizer_steps(op, step, base, /*least=*/0);
  check_optimizer_tables(op, rule, weights, states, last_steps);
  check_written_tables(op, rule, weights, states, last_steps, history, CallMemory());
  check_catching_up(op, last_steps, history, step - base);
  check_rounding_seeds(op, weights, rounding_seeds);
  return rule;
}

}  // namespace tsr
