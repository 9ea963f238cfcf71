#include "embedding_collection_forward.cuh"

namespace tsr {
namespace {

std::tuple<Tensor, Tensor> look_up(KeptUploads* uploads, const std::vector<Tensor>& weights,
                                   const CollectionBags& given) {
  const char* op = "embedding_collection";
  const std::optional<Tensor>& per_sample_weights = given.per_sample_weights;
  const Collection c =
      check_collection_lookups(op, weights, given.indices, given.offsets, per_sample_weights, given.lists);
  DeviceCall call(op, weights[0], uploads);
  Forward f = start_forward(call, c, weights[0].scalar_type(), given.indices, given.offsets);
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
      pool_lookups<WeightedSum<T, wide>, View>(call, f, in, /*of_extremes=*/false);
    } else {
      pool_lookups<Sum<T, wide>, View>(call, f, in, /*of_extremes=*/false);
    }
    pool_lookups<Extreme<T, wide>, View>(call, f, in, /*of_extremes=*/true);
  });
  return {f.out, f.argmax};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  using LookUp = tsr::LookUpDoors<tsr::KeptUploads, tsr::look_up>;
  TSR_IMPL(m, "embedding_collection", &LookUp::by_lists);
  TSR_IMPL(m, "collection_plan", &tsr::collection_plan<tsr::KeptUploads>);
  TSR_IMPL(m, "collection_plan_free", &tsr::collection_plan_free<tsr::KeptUploads>);
  TSR_IMPL(m, "planned_collection", &LookUp::by_plan);
}
