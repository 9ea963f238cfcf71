#include "embedding_collection_forward.cuh"

namespace tsr {
namespace {

std::tuple<Tensor, Tensor> look_up(KeptUploads* uploads, const std::vector<Tensor>& weights, const Tensor& indices,
                                   const std::optional<Tensor>& offsets,
                                   const std::optional<Tensor>& per_sample_weights, const CollectionLists& lists) {
  const char* op = "embedding_collection";
  const Collection c = check_collection_lookups(op, weights, indices, offsets, per_sample_weights, lists);
  DeviceCall call(op, weights[0], uploads);
  Forward f = start_forward(call, c, weights[0].scalar_type(), indices, offsets);
  f.tables.resize(weights.size());
  for (const CollectionLookup& lookup : c.lookups) {
    const size_t table = static_cast<size_t>(lookup.table);
    if (f.tables[table] == nullptr) f.tables[table] = call.data(weights[table]);
  }
  dispatch_float(weights[0].scalar_type(), op, "weights", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using View = PartView<T>;
    constexpr int wide = 16 / sizeof(T);
    PartInputs<T> in = inputs_of<T>(call, f);
    if (per_sample_weights) {
      in.weights = call.data<T>(*per_sample_weights);
      pool_lookups<WeightedSum<T, wide>, View>(call, f, in, /*of_max=*/false);
    } else {
      pool_lookups<Sum<T, wide>, View>(call, f, in, /*of_max=*/false);
    }
    pool_lookups<Max<T, wide>, View>(call, f, in, /*of_max=*/true);
  });
  return {f.out, f.argmax};
}

std::tuple<Tensor, Tensor> embedding_collection_cuda(
    const std::vector<Tensor>& weights, const Tensor& indices, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& per_sample_weights, const std::vector<int64_t>& tables,
    const std::vector<int64_t>& keys, const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
    const std::vector<int64_t>& padding_idx, bool side_by_side, bool) {
  return look_up(nullptr, weights, indices, offsets, per_sample_weights,
                 {tables, keys, modes, bags, padding_idx, side_by_side});
}

std::tuple<Tensor, Tensor> planned_collection_cuda(const std::vector<Tensor>& weights, const Tensor& indices,
                                                   const std::optional<Tensor>& offsets,
                                                   const std::optional<Tensor>& per_sample_weights,
                                                   const std::vector<int64_t>& bags, bool side_by_side, int64_t plan) {
  const auto p = DevicePlans::all().at("planned_collection", plan);
  return look_up(&p->kept, weights, indices, offsets, per_sample_weights, p->lists(bags, side_by_side));
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "embedding_collection", &tsr::embedding_collection_cuda);
  TSR_IMPL(m, "collection_plan", &tsr::collection_plan<tsr::KeptUploads>);
  TSR_IMPL(m, "collection_plan_free", &tsr::collection_plan_free<tsr::KeptUploads>);
  TSR_IMPL(m, "planned_collection", &tsr::planned_collection_cuda);
}
