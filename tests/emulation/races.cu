// Kernels with one race each, and similar ones without: they show that races.h finds the races, and no others. More of
// them are in faults.cu.
#include <cuda/atomic>

#include "faults.h"

namespace tsr {
namespace {

enum Wait { kNoWait, kShuffle, kWarpWait, kBlockWait };

template <int wait>
__device__ void wait_for_others() {
  if (wait == kShuffle) __shfl_xor_sync(~0u, 0, 1);
  if (wait == kWarpWait) __syncwarp();
  if (wait == kBlockWait) __syncthreads();
}

// Each lane takes what its neighbour has written.
template <int wait>
__global__ void lanes_kernel(float* out) {
  TSR_SHARED(float, values, 64);
  values[threadIdx.x] = 1;
  wait_for_others<wait>();
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}

// Each thread takes what a thread of the other warp has written, and writes again when all have taken.
template <int wait, int wait_again>
__global__ void warps_kernel(float* out) {
  out[threadIdx.x] = 1;
  wait_for_others<wait>();
  const float taken = out[threadIdx.x ^ 32];
  wait_for_others<wait_again>();
  out[threadIdx.x] = taken + 1;
}

// Threads may write different bytes of one word without a race.
__global__ void bytes_kernel(uint8_t* out) { out[threadIdx.x] = static_cast<uint8_t>(threadIdx.x); }

using Flag = cuda::atomic_ref<unsigned, cuda::thread_scope_device>;

// The first block hands a value over to the second one.
template <bool fence_before, bool fence_after>
__global__ void hand_over_kernel(float* value, unsigned* flag) {
  if (blockIdx.x == 0) {
    *value = 3;
    if (fence_before) __threadfence();
    Flag(*flag).store(1, cuda::memory_order_relaxed);
  } else {
    while (Flag(*flag).load(cuda::memory_order_relaxed) == 0) continue;
    if (fence_after) __threadfence();
    *value += 1;
  }
}

template <bool fences>
__global__ void volatile_kernel(float* value, volatile unsigned* flag) {
  if (blockIdx.x == 0) {
    *value = 3;
    if (fences) __threadfence();
    *flag = 1;
  } else {
    while (*flag == 0) __nanosleep(1);
    if (fences) __threadfence();
    *value += 1;
  }
}

// The same without fences.
__global__ void release_kernel(float* value, unsigned* flag, cuda::memory_order store, cuda::memory_order load) {
  if (blockIdx.x == 0) {
    *value = 3;
    Flag(*flag).store(1, store);
  } else {
    while (Flag(*flag).load(load) == 0) continue;
    *value += 1;
  }
}

// Each block takes a lock and adds to a sum.
template <bool fences>
__global__ void lock_kernel(float* sum, unsigned* lock) {
  while (atomicCAS(lock, 0u, 1u) != 0) continue;
  if (fences) __threadfence();
  *sum += 1;
  if (fences) __threadfence();
  atomicExch(lock, 0u);
}

template <bool is_atomic>
__global__ void read_kernel(float* out, unsigned* count) {
  atomicAdd(count, 1u);
  const unsigned known = is_atomic ? Flag(*count).load(cuda::memory_order_relaxed) : *count;
  out[blockIdx.x] = known > 0 ? 1 : 0;
}

}  // namespace

const Cases& race_cases() {
  constexpr auto relaxed = cuda::memory_order_relaxed, acquire = cuda::memory_order_acquire,
                 release = cuda::memory_order_release;
  const auto in_block = [](auto kernel) { return [=](Bench& b) { launch(b.call, {1, 64}, kernel, b.out); }; };
  const auto in_blocks = [](auto kernel, auto... more) {
    return [=](Bench& b) { launch(b.call, {2, 1}, kernel, b.out, b.out_as<unsigned>() + 8, more...); };
  };
  static const Cases all{
      {"lanes", in_block(lanes_kernel<kWarpWait>)},
      {"lanes_apart", in_block(lanes_kernel<kNoWait>)},
      {"lanes_after_shuffle", in_block(lanes_kernel<kShuffle>)},
      {"warps", in_block(warps_kernel<kBlockWait, kBlockWait>)},
      {"warps_apart", in_block(warps_kernel<kWarpWait, kBlockWait>)},
      {"warps_apart_later", in_block(warps_kernel<kBlockWait, kWarpWait>)},
      {"bytes", [](Bench& b) { launch(b.call, {1, 64}, bytes_kernel, b.out_as<uint8_t>()); }},
      {"hand_over", in_blocks(hand_over_kernel<true, true>)},
      {"hand_over_without_first_fence", in_blocks(hand_over_kernel<false, true>)},
      {"hand_over_without_last_fence", in_blocks(hand_over_kernel<true, false>)},
      {"volatile", in_blocks(volatile_kernel<true>)},
      {"volatile_without_fences", in_blocks(volatile_kernel<false>)},
      {"release", in_blocks(release_kernel, release, acquire)},
      {"relaxed_release", in_blocks(release_kernel, relaxed, acquire)},
      {"relaxed_acquire", in_blocks(release_kernel, release, relaxed)},
      {"lock", in_blocks(lock_kernel<true>)},
      {"lock_without_fences", in_blocks(lock_kernel<false>)},
      {"atomic_read", in_blocks(read_kernel<true>)},
      {"plain_read", in_blocks(read_kernel<false>)},
  };
  return all;
}

}  // namespace tsr
