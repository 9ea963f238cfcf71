// embedding_collection: the lookups of many features in many tables, pooled, in one call; their gradients; and the
// optimizer's step on the rows that were looked up.
//
// weights: K tables [V_k, D_k] of one dtype and device, each in memory of its own. The input has features, called keys:
// key k owns bags[k] consecutive bags of offsets [sum(bags) + 1], and their items (KeyedJaggedTensor's order: all of
// key 0, then all of key 1). offsets None: every id is a bag of its own, bags[k] says how many ids key k has (modes are
// sum, per_sample_weights None), and the padding row is read as any other, but gets no gradient. Lookup l pools the
// bags of key keys[l] in table tables[l] by modes[l] (Reduction). Several lookups may share a table or a key; keys and
// tables may be without lookups. padding_idx [K]: by table.
//
// embedding_collection(weights, indices [N], offsets?, per_sample_weights [N]?, tables [L], keys [L], modes [L], bags,
//   padding_idx, side_by_side, sparse) -> (output, argmax): each lookup is embedding_bag (embedding.h) of its bags,
//   bit for bit.
//   side_by_side: all looked up keys have B bags; output [B, sum of D_tables[l]], lookups from left to right.
//   Else: output is flat, the [bags[keys[l]], D_tables[l]] of lookup after lookup.
//   argmax: int64, flat, the [bags[keys[l]], D_tables[l]] of the lookups of modes max and min, in their order;
//   positions count in indices. [0] without such lookups. per_sample_weights do not go with these modes.
// embedding_collection_current(weights, states, last_steps, history, ...): the lookups of embedding_collection in the
//   tables as they would be if every stale row had been flushed to `step` (row_optimizer.h: states, last_steps,
//   history, rule, hyperparameters, base, of all tables). Nothing is written.
//
// Gradients, from grad, which has the shape of output:
//   embedding_collection_dense_backward(grad, indices, offsets?, per_sample_weights?, argmax?, num_embeddings [K],
//   dims [K], ..., wanted [K]) -> K times [V_k, D_k]; embedding_collection_sparse_backward -> K times values
//   [U_k, D_k], and K times rows [U_k] int64, sorted and unique; embedding_collection_coo_backward -> these as K
//   coalesced COO tensors [V_k, D_k]. Table k's gradient is that of one embedding_bag over the bags of its lookups, one
//   lookup after the other, bit for bit: a row's entries are added in the order of lookups, then of items. Tables that
//   are not wanted: empty, [0, D_k], as COO tensors without rows. argmax: None without lookups of max or min.
//   embedding_collection_weights_backward(grad, weights, states, last_steps, history?, ..., output, ...) -> [N]: of
//   per_sample_weights; an item that several lookups read gets the sum over them, in their order, added in the
//   accumulator's dtype. history None: the tables are as they are, states and last_steps are empty.
//
// embedding_collection_update_(weights, states, last_steps, history?, grad, ..., wanted, grad_scale?, rule,
//   hyperparameters, step, base, maximize, rounding_seeds): row_optimizer_update_ (row_optimizer.h) of the wanted
//   tables with the rows and values of embedding_collection_sparse_backward, which are not materialised: values are in
//   the accumulator's dtype here. A row that occurs in several lookups is stepped once. states, last_steps and
//   rounding_seeds hold the wanted tables', one after the other.
//
// * dtypes, order of ids and sums, padding, zero denominators, offsets: as embedding_bag.
// * Errors: as embedding_bag; ValueError for what names no table, key or mode, for counts of bags that do not fit
//   offsets, and for unequal ones side by side. Ids of keys without lookups are not looked at. On CPU an error comes
//   before anything is written.
// Determinism and precision of sums: as in sparse_segment.h.
// Source: fbgemm's table-batched embeddings (the idea); torch.nn.functional.embedding_bag (the meaning).
#pragma once
#include "embedding.h"
#include "row_optimizer.h"

namespace tsr {

// One lookup: the bags [first_bag, first_bag + bags) of the input, in one table. Row b of its result begins at element
// output + b * stride of the output, and of argmax (of extremes) at argmax + b * dim.
struct CollectionLookup {
  int64_t table, key;
  Reduction mode;
  int64_t dim;
  int64_t first_bag, bags;
  int64_t output, stride;
  int64_t argmax;
};

// The bags [first, first + bags) of the input, which are a key's.
struct KeyBags {
  int64_t first, bags;
};

struct Collection {
  const char* op = nullptr;
  std::vector<CollectionLookup> lookups;
  std::vector<int64_t> num_embeddings, dims, padding_idx;  // by table
  std::vector<KeyBags> key_bags;
  std::vector<int64_t> output_shape;
  int64_t bags = 0;  // of all keys
  int64_t output_elements = 0;
  int64_t argmax_elements = 0;
  bool has_extremes = false;
  CallMemory read;  // what an update reads, while it writes the tables

  int64_t tables() const { return static_cast<int64_t>(dims.size()); }
};

// The lists that say which lookups there are: every operator of the family takes them.
struct CollectionLists {
  const std::vector<int64_t>&tables, &keys, &modes, &bags, &padding_idx;
  bool side_by_side;
};

inline void check_collection_lists(const char* op, const CollectionLists& lists, int64_t tables) {
  const auto must_have = [op](const char* argument, const std::vector<int64_t>& list, int64_t wanted, const char* per) {
    TSR_CHECK_VALUE(static_cast<int64_t>(list.size()) == wanted, op, ": ", argument, " must have one entry for each ",
                    per, ", ", wanted, ", got ", list.size());
  };
  const int64_t lookups = static_cast<int64_t>(lists.tables.size());
  TSR_CHECK_VALUE(lookups > 0, op, ": tables must hold at least one lookup's table, got none");
  must_have("keys", lists.keys, lookups, "lookup");
  must_have("modes", lists.modes, lookups, "lookup");
  must_have("padding_idx", lists.padding_idx, tables, "table");
  int64_t bags = 0;
  for (size_t k = 0; k < lists.bags.size(); ++k) {
    TSR_CHECK_VALUE(lists.bags[k] >= 0, op, ": bags[", k, "] must be >= 0, got ", lists.bags[k]);
    TSR_CHECK_VALUE(lists.bags[k] <= INT64_MAX - bags, op, ": bags must add up to less than 2^63, got ", lists.bags[k],
                    " in bags[", k, "] after ", bags);
    bags += lists.bags[k];
  }
  const auto must_be_below = [op](const char* argument, const std::vector<int64_t>& list, size_t l, int64_t bound) {
    TSR_CHECK_VALUE(list[l] >= 0 && list[l] < bound, op, ": ", argument, "[", l, "] must be in [0, ", bound, "), got ",
                    list[l]);
  };
  for (size_t l = 0; l < lists.tables.size(); ++l) {
    must_be_below("tables", lists.tables, l, tables);
    must_be_below("keys", lists.keys, l, static_cast<int64_t>(lists.bags.size()));
    must_be_below("modes", lists.modes, l, static_cast<int64_t>(kLastOfBags) + 1);
  }
}

// Where every lookup's bags and results are.
inline Collection describe_collection(const char* op, std::vector<int64_t> num_embeddings, std::vector<int64_t> dims,
                                      const CollectionLists& lists) {
  Collection c;
  c.op = op;
  c.num_embeddings = std::move(num_embeddings);
  c.dims = std::move(dims);
  c.padding_idx = lists.padding_idx;
  check_collection_lists(op, lists, c.tables());
  for (size_t k = 0; k < c.dims.size(); ++k) {
    TSR_CHECK_VALUE(c.padding_idx[k] <= c.num_embeddings[k], op, ": padding_idx[", k,
                    "] must be <= ", c.num_embeddings[k], ", got ", c.padding_idx[k]);
  }
  c.key_bags.reserve(lists.bags.size());
  c.lookups.reserve(lists.tables.size());
  for (const int64_t count : lists.bags) {
    c.key_bags.push_back({c.bags, count});
    c.bags += count;
  }
  int64_t columns = 0;
  for (size_t l = 0; l < lists.tables.size(); ++l) {
    const int64_t dim = c.dims[static_cast<size_t>(lists.tables[l])];
    TSR_CHECK_VALUE(dim <= INT64_MAX - columns, op, ": the lookups must have less than 2^63 columns, got ", columns,
                    " before the ", dim, " of tables[", l, "]");
    columns += dim;
  }
  int64_t left = 0;
  const int64_t rows = lists.bags[static_cast<size_t>(lists.keys[0])];
  for (size_t l = 0; l < lists.tables.size(); ++l) {
    const size_t key = static_cast<size_t>(lists.keys[l]);
    CollectionLookup lookup{};
    lookup.table = lists.tables[l];
    lookup.key = lists.keys[l];
    lookup.mode = static_cast<Reduction>(lists.modes[l]);
    lookup.dim = c.dims[static_cast<size_t>(lookup.table)];
    lookup.first_bag = c.key_bags[key].first;
    lookup.bags = c.key_bags[key].bags;
    lookup.output = lists.side_by_side ? left : c.output_elements;
    lookup.stride = lists.side_by_side ? columns : lookup.dim;
    lookup.argmax = c.argmax_elements;
    TSR_CHECK_VALUE(!lists.side_by_side || lookup.bags == rows, op,
                    ": side by side, every key must have as many bags as", " keys[0], ", rows, ", got ", lookup.bags,
                    " of keys[", l, "]");
    TSR_CHECK_VALUE(lookup.dim == 0 || lookup.bags <= (INT64_MAX - c.output_elements) / lookup.dim, op,
                    ": the output must have less than 2^63 elements, got ", c.output_elements, " before the ",
                    lookup.bags, " bags of ", lookup.dim, " columns of tables[", l, "]");
    left += lookup.dim;
    c.output_elements += lookup.bags * lookup.dim;
    if (is_extreme(lookup.mode)) {
      c.has_extremes = true;
      c.argmax_elements += lookup.bags * lookup.dim;
    }
    c.lookups.push_back(lookup);
  }
  c.output_shape = lists.side_by_side ? std::vector<int64_t>{rows, columns} : std::vector<int64_t>{c.output_elements};
  return c;
}

// Checks the bags of the input against its tensors. values: the tensor that gives the dtype and the device.
inline void check_collection_input(const Collection& c, const char* values_name, const Tensor& values,
                                   const Tensor& indices, const std::optional<Tensor>& offsets,
                                   const std::optional<Tensor>& per_sample_weights) {
  const char* op = c.op;
  check_bags(op, values_name, values, indices, offsets, per_sample_weights);
  if (offsets) {
    TSR_CHECK_VALUE(offsets->size(0) - 1 == c.bags, op, ": bags must add up to the bags of offsets, ",
                    offsets->size(0) - 1, ", got ", c.bags);
  } else {
    TSR_CHECK_VALUE(indices.size(0) == c.bags, op, ": without offsets, bags must add up to the number of indices, ",
                    indices.size(0), ", got ", c.bags);
    TSR_CHECK_VALUE(!per_sample_weights, op, ": without offsets, per_sample_weights must be None");
  }
  for (size_t l = 0; l < c.lookups.size(); ++l) {
    const Reduction mode = c.lookups[l].mode;
    TSR_CHECK_VALUE(offsets || mode == Reduction::kSum, op, ": without offsets, modes must be sum, got ",
                    static_cast<int64_t>(mode), " in modes[", l, "]");
    TSR_CHECK_VALUE(!(per_sample_weights && is_extreme(mode)), op, ": per_sample_weights must be None with mode ",
                    extreme_word(mode), ", which modes[", l, "] is");
  }
}

// Tables of one dtype and device; their rows and columns are appended to the lists. There may be hundreds of tables,
// and each question to torch has its price.
inline void check_collection_weights(const char* op, const std::vector<Tensor>& weights,
                                     std::vector<int64_t>& num_embeddings, std::vector<int64_t>& dims) {
  TSR_CHECK_VALUE(!weights.empty(), op, ": weights must hold at least one table, got none");
  const ScalarType dtype = weights[0].scalar_type();
  check_float_dtype(op, "weights", weights[0]);
  const int32_t type = device_type(weights[0]), device = weights[0].get_device_index();
  num_embeddings.reserve(weights.size());
  dims.reserve(weights.size());
  for (size_t k = 0; k < weights.size(); ++k) {
    const Tensor& weight = weights[k];
    const auto sizes = weight.sizes();
    TSR_CHECK_VALUE(sizes.size() == 2, op, ": weights[", k, "] must have rank 2, got shape ", shape_text(weight));
    num_embeddings.push_back(sizes[0]);
    dims.push_back(sizes[1]);
    TSR_CHECK_VALUE(weight.scalar_type() == dtype, op, ": weights[", k, "] must have the dtype of weights[0], ",
                    dtype_name(dtype), ", got ", dtype_name(weight.scalar_type()));
    if (device_type(weight) != type || weight.get_device_index() != device) {
      check_same_device(op, Place{"weights", k}, weight, "weights[0]", weights[0]);
    }
  }
}

inline Collection check_embedding_collection(const char* op, const std::vector<Tensor>& weights, const Tensor& indices,
                                             const std::optional<Tensor>& offsets,
                                             const std::optional<Tensor>& per_sample_weights,
                                             const CollectionLists& lists) {
  std::vector<int64_t> num_embeddings, dims;
  check_collection_weights(op, weights, num_embeddings, dims);
  Collection c = describe_collection(op, std::move(num_embeddings), std::move(dims), lists);
  check_collection_input(c, "weights", weights[0], indices, offsets, per_sample_weights);
  return c;
}

// Checks the arguments of a forward: without offsets it reads the padding row as any other.
inline Collection check_collection_lookups(const char* op, const std::vector<Tensor>& weights, const Tensor& indices,
                                           const std::optional<Tensor>& offsets,
                                           const std::optional<Tensor>& per_sample_weights,
                                           const CollectionLists& lists) {
  Collection c = check_embedding_collection(op, weights, indices, offsets, per_sample_weights, lists);
  for (size_t k = 0; !offsets && k < c.padding_idx.size(); ++k) {
    if (c.padding_idx[k] < c.num_embeddings[k]) c.padding_idx[k] = -1;
  }
  return c;
}

inline void check_collection_grad(const Collection& c, const char* argument, const Tensor& grad) {
  bool fits = grad.dim() == static_cast<int64_t>(c.output_shape.size());
  for (int64_t d = 0; fits && d < grad.dim(); ++d) fits = grad.size(d) == c.output_shape[static_cast<size_t>(d)];
  if (fits) return;
  std::ostringstream wanted;
  for (size_t d = 0; d < c.output_shape.size(); ++d) wanted << (d ? ", " : "[") << c.output_shape[d];
  throw std::invalid_argument(
      message(c.op, ": ", argument, " must have the shape of the output, ", wanted.str(), "], got ", shape_text(grad)));
}

inline void check_collection_argmax(const Collection& c, const Tensor& grad, const std::optional<Tensor>& argmax) {
  if (!c.has_extremes) return;
  TSR_CHECK_VALUE(
      argmax && argmax->dim() == 1 && argmax->size(0) == c.argmax_elements && argmax->scalar_type() == ScalarType::Long,
      c.op, ": for these modes, argmax must be int64 of shape [", c.argmax_elements, "], got ",
      argmax ? message(dtype_name(argmax->scalar_type()), " of shape ", shape_text(*argmax)) : "None");
  check_same_device(c.op, "argmax", *argmax, "grad", grad);
}

// All backwards to tables. Returns the description of what they are the gradients of.
inline Collection check_embedding_collection_backward(const char* op, const Tensor& grad, const Tensor& indices,
                                                      const std::optional<Tensor>& offsets,
                                                      const std::optional<Tensor>& per_sample_weights,
                                                      const std::optional<Tensor>& argmax,
                                                      const std::vector<int64_t>& num_embeddings,
                                                      const std::vector<int64_t>& dims, const CollectionLists& lists,
                                                      const std::vector<bool>& wanted) {
  check_float_dtype(op, "grad", grad);
  const size_t tables = num_embeddings.size();
  TSR_CHECK_VALUE(dims.size() == tables && wanted.size() == tables, op,
                  ": num_embeddings, dims and wanted must have one entry for each table, got ", tables, ", ",
                  dims.size(), " and ", wanted.size());
  int64_t rows = 0;
  for (size_t k = 0; k < tables; ++k) {
    TSR_CHECK_VALUE(num_embeddings[k] >= 0, op, ": num_embeddings[", k, "] must be >= 0, got ", num_embeddings[k]);
    TSR_CHECK_VALUE(num_embeddings[k] < INT64_MAX - rows, op,
                    ": num_embeddings must add up to less than 2^63 - 1, got ", num_embeddings[k],
                    " in num_embeddings[", k, "] after ", rows);
    rows += num_embeddings[k];
    TSR_CHECK_VALUE(dims[k] >= 0, op, ": dims[", k, "] must be >= 0, got ", dims[k]);
  }
  Collection c = describe_collection(op, num_embeddings, dims, lists);
  check_collection_input(c, "grad", grad, indices, offsets, per_sample_weights);
  check_collection_grad(c, "grad", grad);
  check_collection_argmax(c, grad, argmax);
  return c;
}

// Rows and values of all tables, those as [1, U_k], as their gradients in COO tensors.
inline std::vector<Tensor> coo_gradients(const char* op, const std::vector<Tensor>& values,
                                         const std::vector<Tensor>& rows, const std::vector<int64_t>& num_embeddings) {
  std::vector<Tensor> result;
  result.reserve(values.size());
  for (size_t k = 0; k < values.size(); ++k) {
    result.push_back(coo_gradient(op, Place{"num_embeddings", k}, values[k], rows[k], num_embeddings[k]));
  }
  return result;
}

// Checks what brings stale rows up to date as they are read: the states and last_steps of all tables.
inline OptimizerRule check_collection_current(const char* op, const std::vector<Tensor>& weights,
                                              const std::vector<Tensor>& states, const std::vector<Tensor>& last_steps,
                                              const std::optional<Tensor>& history, int64_t rule_value,
                                              const std::vector<double>& hyperparameters, int64_t step, int64_t base) {
  const OptimizerRule rule = check_optimizer_rule(op, rule_value, hyperparameters);
  check_optimizer_steps(op, step, base, /*least=*/0);
  TSR_CHECK_VALUE(last_steps.size() == weights.size(), op, ": last_steps must be one for each of the ", weights.size(),
                  " tables, got ", last_steps.size());
  check_optimizer_tables(op, rule, weights, states, last_steps);
  check_catching_up(op, last_steps, history, step - base);
  return rule;
}

inline Collection check_embedding_collection_weights_backward(
    const Tensor& grad, const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
    const std::vector<Tensor>& last_steps, const std::optional<Tensor>& history, const Tensor& indices,
    const std::optional<Tensor>& offsets, const Tensor& per_sample_weights, const Tensor& output,
    const CollectionLists& lists) {
  const char* op = "embedding_collection_weights_backward";
  Collection c = check_embedding_collection(op, weights, indices, offsets, per_sample_weights, lists);
  for (const auto& [argument, x] : {std::pair<const char*, const Tensor&>{"grad", grad}, {"output", output}}) {
    check_collection_grad(c, argument, x);
    TSR_CHECK_VALUE(x.scalar_type() == weights[0].scalar_type(), op, ": ", argument,
                    " must have the dtype of weights, ", dtype_name(weights[0].scalar_type()), ", got ",
                    dtype_name(x.scalar_type()));
    check_same_device(op, argument, x, "weights", weights[0]);
  }
  TSR_CHECK_VALUE(history || (states.empty() && last_steps.empty()), op,
                  ": without history, states and last_steps must be none, got ", states.size(), " and ",
                  last_steps.size());
  return c;
}

// The step of an update: the wanted tables, with the states and last_steps of those alone.
struct CollectionStep {
  OptimizerRule rule;
  std::vector<Tensor> weights;
  std::vector<int64_t> places;  // by table: its place among weights; -1: not wanted
};

inline CollectionStep check_collection_step(const Collection& c, const std::vector<Tensor>& weights,
                                            const std::vector<Tensor>& states, const std::vector<Tensor>& last_steps,
                                            const std::optional<Tensor>& history, const std::vector<bool>& wanted,
                                            const std::optional<Tensor>& grad_scale, int64_t rule_value,
                                            const std::vector<double>& hyperparameters, int64_t step, int64_t base,
                                            const std::vector<int64_t>& rounding_seeds,
                                            const std::vector<int64_t>& whole) {
  CollectionStep result{check_optimizer_rule(c.op, rule_value, hyperparameters), {}, {}};
  for (size_t k = 0; k < weights.size(); ++k) {
    result.places.push_back(wanted[k] ? static_cast<int64_t>(result.weights.size()) : -1);
    if (wanted[k]) result.weights.push_back(weights[k]);
  }
  check_optimizer_steps(c.op, step, base, /*least=*/1);
  check_optimizer_tables(c.op, result.rule, result.weights, states, last_steps);
  CallMemory memory = c.read;
  memory.add_read(Place{"grad_scale"}, grad_scale);
  check_written_tables(c.op, result.rule, result.weights, states, last_steps, history, std::move(memory));
  check_catching_up(c.op, last_steps, history, step - 1 - base);
  if (!last_steps.empty()) check_idle_rows(c.op, result.rule);
  check_rounding_seeds(c.op, result.weights, rounding_seeds);
  check_whole(c.op, whole, last_steps);
  check_grad_scale(c.op, grad_scale, result.weights);
  return result;
}

inline Collection check_embedding_collection_update(const std::vector<Tensor>& weights, const Tensor& grad,
                                                    const Tensor& indices, const std::optional<Tensor>& offsets,
                                                    const std::optional<Tensor>& per_sample_weights,
                                                    const std::optional<Tensor>& argmax, const CollectionLists& lists,
                                                    const std::vector<bool>& wanted) {
  const char* op = "embedding_collection_update_";
  Collection c = check_embedding_collection(op, weights, indices, offsets, per_sample_weights, lists);
  TSR_CHECK_VALUE(grad.scalar_type() == weights[0].scalar_type(), op, ": grad must have the dtype of weights, ",
                  dtype_name(weights[0].scalar_type()), ", got ", dtype_name(grad.scalar_type()));
  check_same_device(op, "grad", grad, "weights", weights[0]);
  check_collection_grad(c, "grad", grad);
  check_collection_argmax(c, grad, argmax);
  c.read.add_read(Place{"grad"}, grad);
  c.read.add_read(Place{"indices"}, indices);
  c.read.add_read(Place{"offsets"}, offsets);
  c.read.add_read(Place{"per_sample_weights"}, per_sample_weights);
  c.read.add_read(Place{"argmax"}, argmax);
  TSR_CHECK_VALUE(wanted.size() == weights.size(), op, ": wanted must have one entry for each table, ", weights.size(),
                  ", got ", wanted.size());
  return c;
}

}  // namespace tsr
