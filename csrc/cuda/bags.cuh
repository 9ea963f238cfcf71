// Bags as kernels read them: offsets and weights checked once per call, and what a bag's sum is divided by.
#pragma once
#include "../cuda.h"
#include "../segment.h"

namespace tsr {

// The entries of bags as kernels see them.
template <class I>
struct BagsView {
  const I* indices;
  int64_t rows;
  int64_t padding_idx;
  const int64_t* offsets;
  int64_t bags;
  __device__ bool used(int64_t i) const {
    const int64_t index = indices[i];
    return index >= 0 && index < rows && index != padding_idx;
  }
};

// The offsets [bags + 1] as int64, kept within [0, entries]; reports those that do not start at 0, decrease, or do not
// end at entries.
const int64_t* bag_offsets(DeviceCall& call, const Tensor& offsets, int64_t entries);

// The weights in the accumulator's type, or null where there are none. Reports NaN, which counts as zero.
template <class T>
const acc_t<T>* entry_weights(DeviceCall& call, const std::optional<Tensor>& per_sample_weights);

// The divisor of each bag in mode mean or sqrtn, as pool_rows has it: [bags].
template <class A>
const A* bag_divisors(DeviceCall& call, const Tensor& indices, int64_t rows, int64_t padding_idx,
                      const int64_t* offsets, int64_t bags, const A* weights, Reduction reduction);

}  // namespace tsr
