#include "embedding_collection.cuh"
#include "pool_weighted.cuh"

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

}  // namespace tsr
