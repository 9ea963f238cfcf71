// What the gradients of pooled lookups share.
#pragma once
#include "bags.cuh"
#include "row_groups.cuh"

namespace tsr {

// The divisor of each bag in mode mean or sqrtn, in the accumulator's type: [bags].
const void* bag_divisors(DeviceCall& call, ScalarType dtype, const Indices& indices, const BagOf& bags,
                         const std::optional<Tensor>& per_sample_weights, Reduction reduction);

}  // namespace tsr
