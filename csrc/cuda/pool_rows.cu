#include "pool_sum.cuh"

namespace tsr {

void pool_rows(DeviceCall& call, const Pooling& pooling) {
  if (pooling.weights != nullptr || pooling.scales != nullptr) return pool_weighted_rows(call, pooling);
  dispatch_pooling(call, pooling, [&](auto value_tag, auto index_tag, auto width) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    launch_pool<Sum<T, width.value>>(call, view_of<T, I>(call, pooling), pooling.entries);
  });
}

}  // namespace tsr
