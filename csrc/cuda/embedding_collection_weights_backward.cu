#include "embedding_collection_current.cuh"
#include "table_shards.cuh"
#include "weight_products.cuh"

namespace tsr {
namespace {

// A lookup, in words of 8 bytes. Its teams share the columns as those of embedding_weights_backward.
struct WeightedLookup {
  const void* table;  // what Rows wants
  int64_t rows;
  int64_t index_bound;
  int64_t padding_idx;
  int64_t columns;
  int64_t first_bag;
  int64_t output, stride;
  int64_t divisor;  // where its bags' divisors begin, or -1
  int32_t mode;     // Reduction
  int32_t is_wide;  // whether lanes take as many columns as 16 bytes hold
  int32_t aligned;
  int32_t lanes;
};

template <class T>
struct WeightsBackward {
  Integers indices;
  int64_t items;
  const int64_t* bags;      // [items], of all keys
  const int64_t* key_bags;  // [keys]: the first of each key's
  int64_t keys;
  const int64_t* first_lookups;   // [keys + 1]
  const WeightedLookup* lookups;  // those of key 0, then those of key 1 ...
  const T* grad;
  const T* output;
  const T* weights;
  const acc_t<T>* divisors;
  ErrorSink errors;
};

// Rows of tables as they are. Rows::Row is one of them, whose columns a lane reads.
template <class T>
struct StoredRows {
  struct Row {
    const T* row;
    bool aligned;

    __device__ Row(const StoredRows&, const WeightedLookup& lookup, int64_t index)
        : row(static_cast<const T*>(lookup.table) + index * lookup.columns), aligned(lookup.aligned != 0) {}
    template <int width>
    __device__ Vector<T, width> load(int64_t column) const {
      return load_columns<T, width>(row + column, aligned);
    }
  };
};

// Up-to-date rows, as their tables would hold them once flushed. A lookup's table is an OptimizerTable.
template <class A, class Rules>
struct CurrentRows {
  OptimizerCall<A> optimizer;

  struct Row {
    const OptimizerCall<A>& optimizer;
    TableRow<A, Rules> row;

    __device__ Row(const CurrentRows& rows, const WeightedLookup& lookup, int64_t index)
        : optimizer(rows.optimizer), row(rows.optimizer, *static_cast<const OptimizerTable*>(lookup.table), index) {}
    template <int width>
    __device__ Vector<A, width> load(int64_t column) const {
      A now[width];
      row.now(column, now);
      Vector<A, width> columns;
#pragma unroll
      for (int c = 0; c < width; ++c) columns.at[c] = rounded_weight(optimizer, now[c]);
      return columns;
    }
  };
};

// <grad, row> or what becomes of it in a bag that is divided: the first lookup.lanes lanes of the team have it.
template <int width, class T, class Row>
__device__ acc_t<T> lookup_weight_gradient(const WeightsBackward<T>& w, const WeightedLookup& lookup, const Row& x,
                                           int64_t bag, acc_t<T> weight, int lane, unsigned team) {
  using A = acc_t<T>;
  const int64_t at = lookup.output + bag * lookup.stride;
  const bool divides = lookup.divisor >= 0, aligned = lookup.aligned != 0;
  Products<A> products;
  if (lane < lookup.lanes) {
    products = lane_products<width, false>(w.grad + at, divides ? w.output + at : nullptr, lookup.columns, aligned,
                                           lane, lookup.lanes, [&](int64_t c) { return x.template load<width>(c); });
  }
  for (int step = lookup.lanes / 2; step > 0; step /= 2) {
    products.with_row += __shfl_xor_sync(team, products.with_row, step);
    products.with_output += __shfl_xor_sync(team, products.with_output, step);
  }
  if (!divides) return products.with_row;
  return divided_weight_gradient(static_cast<Reduction>(lookup.mode), products.with_row, products.with_output, weight,
                                 w.divisors[lookup.divisor + bag]);
}

// A team, of as many lanes as the widest lookup asks for, owns out[i]: it takes the lookups of the item's key one after
// the other.
template <class T, class Rows>
__global__ void collection_weights_backward_kernel(WeightsBackward<T> w, const __grid_constant__ Rows rows,
                                                   RowTiling tiling, T* out) {
  using A = acc_t<T>;
  constexpr int wide = 16 / sizeof(T);
  const int lane = static_cast<int>(threadIdx.x) & ((1 << tiling.lanes_log2) - 1);
  const unsigned team = tiling.team_mask();
  for (int64_t i = tiling.first(); i < w.items; i += tiling.stride()) {
    const int64_t index = w.indices[i], bag = w.bags[i];
    const A weight = static_cast<A>(w.weights[i]);
    const int64_t key = bag < 0 ? 0 : lower_bound(w.key_bags, w.keys, bag + 1) - 1;
    const int64_t begin = bag < 0 ? 0 : w.first_lookups[key], end = bag < 0 ? 0 : w.first_lookups[key + 1];
    A result = 0;
    for (int64_t l = begin; l < end; ++l) {
      const WeightedLookup& lookup = w.lookups[l];
      const bool in_range = index >= 0 && index < lookup.rows;
      const bool is_left_out = index == lookup.rows && lookup.padding_idx == lookup.rows;
      if (lane == 0) {
        if (!in_range && !is_left_out) {
          w.errors.report(Argument::kIndices, Fault::kOutOfRange, i, index, lookup.index_bound);
        }
        if (weight != weight) w.errors.report(Argument::kWeights, Fault::kNotANumber, i, 0, 0);
      }
      if (!in_range || index == lookup.padding_idx) continue;
      const int64_t of_key = bag - lookup.first_bag;
      const typename Rows::Row x(rows, lookup, index);
      const A gradient = lookup.is_wide != 0 ? lookup_weight_gradient<wide>(w, lookup, x, of_key, weight, lane, team)
                                             : lookup_weight_gradient<1>(w, lookup, x, of_key, weight, lane, team);
      result = l == begin ? gradient : result + gradient;
    }
    if (lane == 0) out[i] = static_cast<T>(result);
  }
}

// The lookups by key; first_lookups is filled with [keys + 1]. tables: what Rows wants.
template <class T>
std::vector<WeightedLookup> lookups_by_key(const Collection& c, const std::vector<const void*>& tables,
                                           const void* grad, const void* output, const CollectionDivisors& divisors,
                                           std::vector<int64_t>& first_lookups) {
  constexpr int wide = 16 / sizeof(T);
  const std::vector<int64_t> bounds = index_bounds(c);
  std::vector<std::vector<size_t>> of_key(c.key_bags.size());
  for (size_t l = 0; l < c.lookups.size(); ++l) of_key[static_cast<size_t>(c.lookups[l].key)].push_back(l);
  std::vector<WeightedLookup> sorted;
  for (const std::vector<size_t>& lookups : of_key) {
    first_lookups.push_back(static_cast<int64_t>(sorted.size()));
    for (const size_t l : lookups) {
      const CollectionLookup& lookup = c.lookups[l];
      const size_t k = static_cast<size_t>(lookup.table);
      const bool is_wide = lookup.dim % wide == 0;
      const int width = is_wide ? wide : 1;
      const RowTiling tiling(1, std::min<int64_t>(lookup.dim, kWarp * width), width);
      const bool aligned = vector_width<T>(lookup.dim, {tables[k], grad, output}) == wide &&
                           lookup.output % wide == 0 && lookup.stride % wide == 0;
      sorted.push_back({tables[k], c.num_embeddings[k], bounds[l], c.padding_idx[k], lookup.dim, lookup.first_bag,
                        lookup.output, lookup.stride, divisors.first[l], static_cast<int32_t>(lookup.mode), is_wide,
                        aligned, 1 << tiling.lanes_log2});
    }
  }
  first_lookups.push_back(static_cast<int64_t>(sorted.size()));
  return sorted;
}

struct WeightsGradient {
  const Collection& c;
  const Tensor &grad, &indices;
  const std::optional<Tensor>& offsets;
  const Tensor &per_sample_weights, &output;
};

// T: the type of grad, output, weights and the result.
template <class T, class Rows>
Tensor weights_gradient(DeviceCall& call, const WeightsGradient& g, const Rows& rows,
                        const std::vector<const void*>& tables) {
  const Tensor out = call.empty({g.indices.size(0)}, g.grad.scalar_type());
  const CollectionInput input = collection_input(call, g.indices, g.offsets);
  const T* const weights = call.data<T>(g.per_sample_weights);
  const void* const accumulated_weights = accumulated(call, g.per_sample_weights);
  const CollectionDivisors divisors = collection_divisors(call, g.c, input, out.scalar_type(), accumulated_weights,
                                                          std::vector<bool>(tables.size(), true));
  const T *const grad = call.data<T>(g.grad), *const output = call.data<T>(g.output);
  std::vector<int64_t> key_bags, first_lookups;
  for (const KeyBags& key : g.c.key_bags) key_bags.push_back(key.first);
  const std::vector<WeightedLookup> by_key = lookups_by_key<T>(g.c, tables, grad, output, divisors, first_lookups);
  int32_t most_lanes = 1;
  for (const WeightedLookup& lookup : by_key) most_lanes = std::max(most_lanes, lookup.lanes);
  const RowTiling tiling(input.items, most_lanes, 1);
  const WeightsBackward<T> w{{input.indices, input.index_dtype == ScalarType::Long},
                             input.items,
                             entry_bags(call, BagOf{input.offsets, g.c.bags}, input.items),
                             upload(call, key_bags),
                             static_cast<int64_t>(key_bags.size()),
                             upload(call, first_lookups),
                             upload(call, by_key),
                             grad,
                             output,
                             weights,
                             static_cast<const acc_t<T>*>(divisors.divisors),
                             call.errors()};
  launch(call, tiling.shape(), collection_weights_backward_kernel<T, Rows>, w, rows, tiling,
         static_cast<T*>(out.data_ptr()));
  return out;
}

Tensor gradient_of_stored_rows(DeviceCall& call, const WeightsGradient& g, const std::vector<Tensor>& weights) {
  std::vector<const void*> tables;
  for (const Tensor& weight : weights) tables.push_back(call.data(weight));
  return dispatch_float(weights[0].scalar_type(), call.op(), "weights", [&](auto tag) {
    using T = typename decltype(tag)::type;
    return weights_gradient<T>(call, g, StoredRows<T>(), tables);
  });
}

// Computes in the accumulator's dtype: narrower tensors are copied, since this is rare.
Tensor gradient_of_current_rows(DeviceCall& call, const WeightsGradient& given, const CollectionOptimizer& optimizer) {
  const Tensor grad = accumulated(given.grad), per_sample_weights = accumulated(given.per_sample_weights);
  const Tensor output = accumulated(given.output);
  const WeightsGradient g{given.c, grad, given.indices, given.offsets, per_sample_weights, output};
  std::optional<Tensor> out;
  with_accumulator(grad.scalar_type(), [&](auto tag) {
    using A = typename decltype(tag)::type;
    with_current_tables<A>(call, optimizer, [&](const auto& step_call, auto rules, const OptimizerTable* on_device) {
      std::vector<const void*> tables;
      for (size_t k = 0; k < optimizer.weights.size(); ++k) tables.push_back(on_device + k);
      out = weights_gradient<A>(call, g, CurrentRows<A, decltype(rules)>{step_call}, tables);
    });
  });
  return torch::stable::to(*out, given.grad.scalar_type());
}

Tensor embedding_collection_weights_backward_cuda(
    const Tensor& grad, const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
    const std::vector<Tensor>& last_steps, const std::optional<Tensor>& history, const Tensor& indices,
    const std::optional<Tensor>& offsets, const Tensor& per_sample_weights, const Tensor& output,
    const std::vector<int64_t>& tables, const std::vector<int64_t>& keys, const std::vector<int64_t>& modes,
    const std::vector<int64_t>& bags, const std::vector<int64_t>& padding_idx, bool side_by_side, int64_t rule_value,
    const std::vector<double>& hyperparameters, int64_t step, int64_t base) {
  const CollectionLists lists{tables, keys, modes, bags, padding_idx, side_by_side};
  const Collection c = check_embedding_collection_weights_backward(grad, weights, states, last_steps, history, indices,
                                                                   offsets, per_sample_weights, output, lists);
  OptimizerRule rule;
  if (history) {
    rule =
        check_collection_current(c.op, weights, states, last_steps, history, rule_value, hyperparameters, step, base);
  }
  DeviceCall call(c.op, weights[0]);
  const WeightsGradient gradient{c, grad, indices, offsets, per_sample_weights, output};
  if (!history) return gradient_of_stored_rows(call, gradient, weights);
  return gradient_of_current_rows(call, gradient, {weights, states, last_steps, history, rule, step, base});
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding_collection_weights_backward", &tsr::embedding_collection_weights_backward_cuda);
}
