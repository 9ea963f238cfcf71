// Gradients with respect to per_sample_weights, and the divisors that all gradients need.
#include "embedding_collection.cuh"
#include "pool_parts_kernels.cuh"
#include "pool_weighted.cuh"
#include "table_shards.cuh"
#include "weight_products.cuh"

namespace tsr {

CollectionDivisors collection_divisors(DeviceCall& call, const Collection& c, const CollectionInput& input,
                                       ScalarType dtype, const void* weights, const std::vector<bool>& wanted) {
  const auto has_divisors = [&](const CollectionLookup& lookup) {
    return wanted[static_cast<size_t>(lookup.table)] && divisor_of(lookup.mode) != Divisor::kOne;
  };
  CollectionDivisors result{nullptr, std::vector<int64_t>(c.lookups.size(), -1)};
  int64_t bags = 0;
  for (size_t l = 0; l < c.lookups.size(); ++l) {
    if (!has_divisors(c.lookups[l])) continue;
    result.first[l] = bags;
    bags += c.lookups[l].bags;
  }
  if (bags == 0) return result;
  dispatch_float(dtype, call.op(), "grad", [&](auto tag) {
    using T = typename decltype(tag)::type;
    acc_t<T>* const divisors = call.workspace<acc_t<T>>(bags);
    result.divisors = divisors;
    const std::vector<int64_t> bounds = index_bounds(c);
    PartList list(1, 16 / sizeof(T));
    for (size_t l = 0; l < c.lookups.size(); ++l) {
      if (result.first[l] < 0) continue;
      Part part = part_of(c, c.lookups[l], bounds[l]);
      part.divisor = divisor_of(c.lookups[l].mode);
      part.out = divisors + result.first[l];
      list.add(part);
    }
    PartInputs<T> in = inputs_of<T>(call, input);
    in.weights = static_cast<const T*>(weights);
    launch_parts<DivisorOnly<T>, PartView<T>>(call, list, in, most_entries(c, input.items, has_divisors));
  });
  return result;
}

namespace {

// A lookup, in words of 8 bytes. Its teams share the columns as those of embedding_weights_backward.
struct WeightedLookup {
  const void* table;
  int64_t rows;
  int64_t index_bound;
  int64_t padding_idx;
  int64_t columns;
  int64_t first_bag;
  int64_t output, stride;
  int64_t divisor;  // where its bags' divisors begin, or -1
  int32_t is_mean;
  int32_t is_wide;  // whether lanes take as many columns as 16 bytes hold
  int32_t aligned;
  int32_t lanes;
};

template <class T>
struct WeightsBackward {
  Integers indices;
  int64_t items;
  const int64_t* bags;           // [items], of all keys
  const int64_t* key_bags;       // [keys]: the first of each key's
  int64_t keys;
  const int64_t* first_lookups;  // [keys + 1]
  const WeightedLookup* lookups;  // those of key 0, then those of key 1 ...
  const T* grad;
  const T* output;
  const T* weights;
  const acc_t<T>* divisors;
  ErrorSink errors;
};

// <grad, row> or what becomes of it in a bag that is divided: every lane of the team has it.
template <int width, class T>
__device__ acc_t<T> lookup_weight_gradient(const WeightsBackward<T>& w, const WeightedLookup& lookup, int64_t index,
                                           int64_t bag, acc_t<T> weight, int lane, unsigned team) {
  using A = acc_t<T>;
  const int64_t at = lookup.output + bag * lookup.stride;
  const T* const x = static_cast<const T*>(lookup.table) + index * lookup.columns;
  const bool is_divided = lookup.divisor >= 0, aligned = lookup.aligned != 0;
  Products<A> products;
  if (lane < lookup.lanes) {
    products = lane_products<width, false>(w.grad + at, is_divided ? w.output + at : nullptr, lookup.columns, aligned,
                                           lane, lookup.lanes,
                                           [&](int64_t c) { return load_columns<T, width>(x + c, aligned); });
  }
  for (int step = lookup.lanes / 2; step > 0; step /= 2) {
    products.with_row += __shfl_xor_sync(team, products.with_row, step);
    products.with_output += __shfl_xor_sync(team, products.with_output, step);
  }
  if (!is_divided) return products.with_row;
  return divided_weight_gradient(products.with_row, products.with_output, weight, w.divisors[lookup.divisor + bag],
                                 lookup.is_mean != 0);
}

// A team, of as many lanes as the widest lookup asks for, owns out[i]: it takes the lookups of the item's key one after
// the other.
template <class T>
__global__ void collection_weights_backward_kernel(WeightsBackward<T> w, RowTiling tiling, T* out) {
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
      const A gradient = lookup.is_wide != 0
                             ? lookup_weight_gradient<wide>(w, lookup, index, of_key, weight, lane, team)
                             : lookup_weight_gradient<1>(w, lookup, index, of_key, weight, lane, team);
      result = l == begin ? gradient : result + gradient;
    }
    if (lane == 0) out[i] = static_cast<T>(result);
  }
}

// The lookups by key; first_lookups is filled with [keys + 1].
template <class T>
std::vector<WeightedLookup> lookups_by_key(DeviceCall& call, const Collection& c, const std::vector<Tensor>& weights,
                                           const void* grad, const void* output, const CollectionDivisors& divisors,
                                           std::vector<int64_t>& first_lookups) {
  constexpr int wide = 16 / sizeof(T);
  const std::vector<int64_t> bounds = index_bounds(c);
  std::vector<std::vector<size_t>> of_key(c.key_bags.size());
  for (size_t l = 0; l < c.lookups.size(); ++l) of_key[static_cast<size_t>(c.lookups[l].key)].push_back(l);
  std::vector<const void*> tables(weights.size());
  std::vector<WeightedLookup> sorted;
  for (const std::vector<size_t>& lookups : of_key) {
    first_lookups.push_back(static_cast<int64_t>(sorted.size()));
    for (const size_t l : lookups) {
      const CollectionLookup& lookup = c.lookups[l];
      const size_t k = static_cast<size_t>(lookup.table);
      if (tables[k] == nullptr) tables[k] = call.data(weights[k]);
      const bool is_wide = lookup.dim % wide == 0;
      const int width = is_wide ? wide : 1;
      const RowTiling tiling(1, std::min<int64_t>(lookup.dim, kWarp * width), width);
      const bool aligned = vector_width<T>(lookup.dim, {tables[k], grad, output}) == wide && lookup.output % wide == 0 &&
                           lookup.stride % wide == 0;
      sorted.push_back({tables[k], c.num_embeddings[k], bounds[l], c.padding_idx[k], lookup.dim, lookup.first_bag,
                        lookup.output, lookup.stride, divisors.first[l], lookup.mode == Reduction::kMean, is_wide,
                        aligned, 1 << tiling.lanes_log2});
    }
  }
  first_lookups.push_back(static_cast<int64_t>(sorted.size()));
  return sorted;
}

Tensor embedding_collection_weights_backward_cuda(
    const Tensor& grad, const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
    const std::vector<Tensor>& last_steps, const std::optional<Tensor>& history, const Tensor& indices,
    const std::optional<Tensor>& offsets, const Tensor& per_sample_weights, const Tensor& output,
    const std::vector<int64_t>& tables, const std::vector<int64_t>& keys, const std::vector<int64_t>& modes,
    const std::vector<int64_t>& bags, const std::vector<int64_t>& padding_idx, bool side_by_side, int64_t rule,
    const std::vector<double>& hyperparameters, int64_t step, int64_t base) {
  const CollectionLists lists{tables, keys, modes, bags, padding_idx, side_by_side};
  const Collection c = check_embedding_collection_weights_backward(grad, weights, indices, offsets, per_sample_weights,
                                                                   output, lists);
  DeviceCall call(c.op, weights[0]);
  const Tensor out = call.empty({indices.size(0)}, weights[0].scalar_type());
  const CollectionInput input = collection_input(call, indices, offsets);
  const void* const item_weights = call.data(per_sample_weights);
  const CollectionDivisors divisors = collection_divisors(call, c, input, weights[0].scalar_type(), item_weights,
                                                          std::vector<bool>(weights.size(), true));
  const int64_t* const item_bags = entry_bags(call, BagOf{input.offsets, c.bags}, input.items);
  std::vector<int64_t> key_bags, first_lookups;
  for (const KeyBags& key : c.key_bags) key_bags.push_back(key.first);
  const void *const grads = call.data(grad), *const outputs = call.data(output);
  dispatch_float(weights[0].scalar_type(), call.op(), "weights", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::vector<WeightedLookup> by_key =
        lookups_by_key<T>(call, c, weights, grads, outputs, divisors, first_lookups);
    int32_t most_lanes = 1;
    for (const WeightedLookup& lookup : by_key) most_lanes = std::max(most_lanes, lookup.lanes);
    const RowTiling tiling(input.items, most_lanes, 1);
    const WeightsBackward<T> w{{input.indices, input.index_dtype == ScalarType::Long},
                               input.items,
                               item_bags,
                               upload(call, key_bags),
                               static_cast<int64_t>(key_bags.size()),
                               upload(call, first_lookups),
                               upload_all(call, by_key),
                               static_cast<const T*>(grads),
                               static_cast<const T*>(outputs),
                               static_cast<const T*>(item_weights),
                               static_cast<const acc_t<T>*>(divisors.divisors),
                               call.errors()};
    launch(call, tiling.shape(), collection_weights_backward_kernel<T>, w, tiling, static_cast<T*>(out.data_ptr()));
  });
  return out;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding_collection_weights_backward", &tsr::embedding_collection_weights_backward_cuda);
}
