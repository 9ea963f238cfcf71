// Bags as kernels read them: offsets checked once per call, and the bag of each entry.
#pragma once
#include "../cuda.h"
#include "device.cuh"

namespace tsr {

// The bag of entry i by its offsets [bags + 1], or -1 if no bag holds it (offsets that are not sorted, already
// reported).
struct BagOf {
  const int64_t* offsets;
  int64_t bags;
  __device__ int64_t operator()(int64_t i) const {
    const int64_t bag = lower_bound(offsets, bags + 1, i + 1) - 1;
    return bag >= 0 && bag < bags && offsets[bag] <= i && i < offsets[bag + 1] ? bag : -1;
  }
};

// The offsets [bags + 1] as int64, kept within [0, entries]; reports those that do not start at 0, decrease, or do not
// end at entries, which is appended unless it is the last.
const int64_t* bag_offsets(DeviceCall& call, const Tensor& offsets, int64_t entries, bool include_last_offset = true);
// Those of some bags alone, [bags + 1], from bag `first` on.
const int64_t* bag_offsets(DeviceCall& call, const Tensor& offsets, int64_t entries, int64_t first, int64_t bags,
                           bool include_last_offset);

// The bag of each entry: [entries]. For kernels that want it at random, or by several lanes.
const int64_t* entry_bags(DeviceCall& call, const BagOf& bag_of, int64_t entries);

}  // namespace tsr
