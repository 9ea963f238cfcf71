#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_select.cuh>
#include <cuda/std/bit>

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
KeyedPositions<K> sort_pairs_of(DeviceCall& call, KeyedPositions<K> from, KeyedPositions<K> spare, int64_t n,
                                int bits) {
  if (n == 0) return from;
  cub::DoubleBuffer<K> keys(from.keys, spare.keys);
  cub::DoubleBuffer<K> positions(from.positions, spare.positions);
  with_scratch(call, [&](void* scratch, size_t& bytes) {
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, positions, n, 0, bits, call.stream());
  });
  return {keys.Current(), positions.Current()};
}

struct CountBits {
  TSR_HOST_DEVICE int64_t operator()(uint32_t word) const { return cuda::std::popcount(word); }
};

}  // namespace

KeyedPositions<uint32_t> sort_pairs(DeviceCall& call, KeyedPositions<uint32_t> from, KeyedPositions<uint32_t> spare,
                                    int64_t n, int bits) {
  return sort_pairs_of(call, from, spare, n, bits);
}

KeyedPositions<uint64_t> sort_pairs(DeviceCall& call, KeyedPositions<uint64_t> from, KeyedPositions<uint64_t> spare,
                                    int64_t n, int bits) {
  return sort_pairs_of(call, from, spare, n, bits);
}

void count_before(DeviceCall& call, const uint8_t* flags, int64_t n, int64_t* before) {
  with_scratch(call, [&](void* scratch, size_t& bytes) {
    return cub::DeviceScan::ExclusiveScan(scratch, bytes, flags, before, cuda::std::plus<int64_t>(), int64_t{0}, n + 1,
                                          call.stream());
  });
}

void count_bits_before(DeviceCall& call, const uint32_t* words, int64_t n, int64_t* before) {
  const auto counts = thrust::make_transform_iterator(words, CountBits{});
  with_scratch(call, [&](void* scratch, size_t& bytes) {
    return cub::DeviceScan::ExclusiveScan(scratch, bytes, counts, before, cuda::std::plus<int64_t>(), int64_t{0}, n + 1,
                                          call.stream());
  });
}

void select_positions(DeviceCall& call, const uint8_t* flags, int64_t n, int64_t* positions, int64_t* count) {
  with_scratch(call, [&](void* scratch, size_t& bytes) {
    return cub::DeviceSelect::Flagged(scratch, bytes, thrust::counting_iterator<int64_t>(0), flags, positions, count, n,
                                      call.stream());
  });
}

}  // namespace tsr
