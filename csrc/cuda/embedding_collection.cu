#include "embedding_collection.cuh"

#include "pool_max.cuh"
#include "pool_parts_kernels.cuh"
#include "pool_weighted.cuh"

namespace tsr {
namespace {

struct Forward {
  const Collection& c;
  const CollectionInput input;
  const void* per_sample_weights;
  const Tensor out, argmax;
  std::vector<const void*> tables;  // null: not looked up
};

// The lookups of mode max, or those of all other modes.
template <class T>
PartList forward_parts(const Forward& f, bool of_max) {
  constexpr int wide = 16 / sizeof(T);
  const std::vector<int64_t> bounds = index_bounds(f.c);
  PartList list(wide, wide);
  for (size_t l = 0; l < f.c.lookups.size(); ++l) {
    const CollectionLookup& lookup = f.c.lookups[l];
    if ((lookup.mode == Reduction::kMax) != of_max) continue;
    Part part = part_of(f.c, lookup, bounds[l]);
    part.rows = f.tables[static_cast<size_t>(lookup.table)];
    part.row_stride = part.columns = static_cast<int32_t>(lookup.dim);
    part.out = static_cast<T*>(f.out.data_ptr()) + lookup.output;
    part.out_stride = lookup.stride;
    part.divisor = of_max ? Divisor::kOne : divisor_of(lookup.mode);
    part.rows_aligned = vector_width<T>(lookup.dim, {part.rows}) == wide;
    part.out_aligned = lookup.stride % wide == 0 && vector_width<T>(lookup.dim, {part.out}) == wide;
    if (of_max) part.argmax = static_cast<int64_t*>(f.argmax.data_ptr()) + lookup.argmax;
    list.add(part);
  }
  return list;
}

template <class T>
void pool_lookups(DeviceCall& call, const Forward& f) {
  constexpr int wide = 16 / sizeof(T);
  PartInputs<T> in = inputs_of<T>(call, f.input);
  in.weights = static_cast<const T*>(f.per_sample_weights);
  const auto entries = [&](bool of_max) {
    return most_entries(f.c, f.input.items, [&](const auto& l) { return (l.mode == Reduction::kMax) == of_max; });
  };
  PartList sums = forward_parts<T>(f, /*of_max=*/false);
  if (in.weights != nullptr) {
    launch_parts<WeightedSum<T, wide>>(call, sums, in, entries(false));
  } else {
    launch_parts<Sum<T, wide>>(call, sums, in, entries(false));
  }
  PartList maxima = forward_parts<T>(f, /*of_max=*/true);
  launch_parts<Max<T, wide>>(call, maxima, in, entries(true));
}

std::tuple<Tensor, Tensor> embedding_collection_cuda(
    const std::vector<Tensor>& weights, const Tensor& indices, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& per_sample_weights, const std::vector<int64_t>& tables,
    const std::vector<int64_t>& keys, const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
    const std::vector<int64_t>& padding_idx, bool side_by_side, bool) {
  const char* op = "embedding_collection";
  const CollectionLists lists{tables, keys, modes, bags, padding_idx, side_by_side};
  const Collection c = check_embedding_collection(op, weights, indices, offsets, per_sample_weights, lists);
  DeviceCall call(op, weights[0]);
  Forward f{c,
            collection_input(call, indices, offsets),
            per_sample_weights ? call.data(*per_sample_weights) : nullptr,
            call.empty(c.output_shape, weights[0].scalar_type()),
            call.empty({c.argmax_elements}, ScalarType::Long),
            std::vector<const void*>(weights.size())};
  for (const CollectionLookup& lookup : c.lookups) {
    const size_t table = static_cast<size_t>(lookup.table);
    if (f.tables[table] == nullptr) f.tables[table] = call.data(weights[table]);
  }
  dispatch_float(weights[0].scalar_type(), op, "weights", [&](auto tag) {
    pool_lookups<typename decltype(tag)::type>(call, f);
  });
  return {f.out, f.argmax};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) { TSR_IMPL(m, "embedding_collection", &tsr::embedding_collection_cuda); }
