#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_select.cuh>

#include "primitives.cuh"

namespace tsr {
namespace {

// CUB's two phases: ask for the size of its scratch, then run with it.
template <class F>
void with_scratch(DeviceCall& call, const F& run) {
  size_t bytes = 0;
  STD_CUDA_CHECK(run(nullptr, bytes));
  STD_CUDA_CHECK(run(call.workspace<uint8_t>(static_cast<int64_t>(bytes)), bytes));
}

template <class K>
Pairs<K> sort_pairs_of(DeviceCall& call, Pairs<K> from, Pairs<K> spare, int64_t n, int bits) {
  if (n == 0) return from;
  cub::DoubleBuffer<K> keys(from.keys, spare.keys);
  cub::DoubleBuffer<K> values(from.values, spare.values);
  with_scratch(call, [&](void* scratch, size_t& bytes) {
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, values, n, 0, bits, call.stream());
  });
  return {keys.Current(), values.Current()};
}

template <class K>
struct IsRunStart {
  const K* keys;
  int64_t n;
  K end;
  __device__ bool operator()(int64_t j) const { return j == 0 || (j < n ? keys[j] : end) != keys[j - 1]; }
};

template <class K>
void select_run_starts_of(DeviceCall& call, const K* keys, int64_t n, K end, int64_t* starts, int64_t* count) {
  with_scratch(call, [&](void* scratch, size_t& bytes) {
    return cub::DeviceSelect::If(scratch, bytes, thrust::counting_iterator<int64_t>(0), starts, count, n + 1,
                                 IsRunStart<K>{keys, n, end}, call.stream());
  });
}

template <class Counts>
void sums_before_of(DeviceCall& call, Counts counts, int64_t n, int64_t* before) {
  with_scratch(call, [&](void* scratch, size_t& bytes) {
    return cub::DeviceScan::ExclusiveScan(scratch, bytes, counts, before, cuda::std::plus<int64_t>(), int64_t{0}, n + 1,
                                          call.stream());
  });
}

struct CountBits {
  __device__ int64_t operator()(uint32_t word) const { return __popc(word); }
};

}  // namespace

Pairs<uint32_t> sort_pairs(DeviceCall& call, Pairs<uint32_t> from, Pairs<uint32_t> spare, int64_t n, int bits) {
  return sort_pairs_of(call, from, spare, n, bits);
}

Pairs<uint64_t> sort_pairs(DeviceCall& call, Pairs<uint64_t> from, Pairs<uint64_t> spare, int64_t n, int bits) {
  return sort_pairs_of(call, from, spare, n, bits);
}

void select_run_starts(DeviceCall& call, const uint32_t* keys, int64_t n, uint32_t end, int64_t* starts,
                       int64_t* count) {
  select_run_starts_of(call, keys, n, end, starts, count);
}

void select_run_starts(DeviceCall& call, const uint64_t* keys, int64_t n, uint64_t end, int64_t* starts,
                       int64_t* count) {
  select_run_starts_of(call, keys, n, end, starts, count);
}

void count_bits_before(DeviceCall& call, const uint32_t* words, int64_t n, int64_t* before) {
  sums_before_of(call, thrust::make_transform_iterator(words, CountBits{}), n, before);
}

void sums_before(DeviceCall& call, const int64_t* counts, int64_t n, int64_t* before) {
  sums_before_of(call, counts, n, before);
}

}  // namespace tsr
