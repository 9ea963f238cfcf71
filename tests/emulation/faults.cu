// Kernels with one planted fault each, and correct ones beside them: they show that the emulation notices faults.
#include "faults.h"

namespace tsr {
namespace {

// Writes behind the end of a tensor's memory when `at` is its size.
__global__ void write_kernel(float* out, int64_t at) { out[at] = 1; }

// Reverses a block's values through shared memory.
template <bool with_barrier>
__global__ void reverse_kernel(float* out) {
  TSR_SHARED(float, values, 64);
  values[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (with_barrier) __syncthreads();
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

__global__ void write_shared_kernel(int64_t at) {
  TSR_SHARED(float, values, 8);
  values[at] = 1;
}

__global__ void diverging_barrier_kernel() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

// Threads that return early are no longer waited for.
__global__ void partial_barrier_kernel(float* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

// A barrier that one thread leaves out for ever, waiting in its warp instead.
__global__ void mixed_wait_kernel() {
  if (threadIdx.x == 0) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Every lane takes its left neighbour's number; `mask` says which lanes take part.
__global__ void shuffle_kernel(float* out, unsigned mask, int source_step) {
  if ((mask >> threadIdx.x & 1) == 0) return;
  const int value = __shfl_sync(mask, static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.x) + source_step);
  out[threadIdx.x] = static_cast<float>(value);
}

__global__ void foreign_mask_kernel() { __shfl_sync(1u, 0, 0); }

// The warp's sum, and the lanes whose number is below 5, by every collective there is.
__global__ void collectives_kernel(float* out) {
  int sum = static_cast<int>(threadIdx.x);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const int total = __shfl_sync(~0u, sum, 7);
  const unsigned small = __ballot_sync(~0u, threadIdx.x < 5);
  const int up = __shfl_up_sync(~0u, static_cast<int>(threadIdx.x), 1);
  const int down = __shfl_down_sync(~0u, static_cast<int>(threadIdx.x), 1);
  const bool all = __all_sync(~0u, total == 496) != 0, any = __any_sync(~0u, threadIdx.x == 31) != 0;
  __syncwarp();
  out[threadIdx.x] = static_cast<float>(total + __popc(small) + (all ? 1000 : 0) + (any ? 2000 : 0) + up + down);
}

// Each block adds its number to a running value: the result depends on which block comes first.
__global__ void block_race_kernel(float* out) { out[0] = out[0] * 2 + static_cast<float>(blockIdx.x); }

// The same by an atomic operation that commutes, so that the order does not matter.
__global__ void block_count_kernel(unsigned* count, float* out) {
  atomicAdd(count, 1u);
  out[blockIdx.x] = 1;
}

__global__ void dynamic_shared_kernel(float* out) {
  float* const values = dynamic_shared<float>();
  values[threadIdx.x] = 3;
  __syncthreads();
  out[threadIdx.x] = values[(threadIdx.x + 1) % blockDim.x];
}

__global__ void large_shared_kernel() {
  TSR_SHARED(float, values, (48 << 10) / 4 + 1);
  values[0] = 0;
}

// The first block takes the record's contents while the others report errors, the smallest positions last. out[0] is
// the smallest position that it took.
__global__ void take_beside_reports_kernel(ErrorSink sink, int times, float* out) {
  if (blockIdx.x > 0) {
    sink.report(Argument::kIndices, Fault::kNegative, 100 - blockIdx.x, 0, 0);
    return;
  }
  for (int k = 0; k < times; ++k) {
    take_fault(sink.record);
    const uint64_t key = sink.record->taken.key;
    if (key != kNoError) out[0] = min(out[0], static_cast<float>(key & 0xff));
  }
}

void take_beside_reports(Bench& b) {
  ErrorRecord record;
  const ErrorSink sink{&record, 0, "fault"};
  b.out[0] = 1000;
  launch(b.call, {8, 1}, take_beside_reports_kernel, sink, 6, b.out);
  launch(b.call, {1, 1}, take_beside_reports_kernel, sink, 1, b.out);
}

}  // namespace

const Cases& kernel_cases() {
  static const Cases all{
      {"write_inside", [](Bench& b) { launch(b.call, {1, 1}, write_kernel, b.out, int64_t{63}); }},
      {"write_behind", [](Bench& b) { launch(b.call, {1, 1}, write_kernel, b.out, int64_t{64}); }},
      {"write_before", [](Bench& b) { launch(b.call, {1, 1}, write_kernel, b.out, int64_t{-1}); }},
      {"shared_inside", [](Bench& b) { launch(b.call, {1, 1}, write_shared_kernel, int64_t{7}); }},
      {"shared_behind", [](Bench& b) { launch(b.call, {1, 1}, write_shared_kernel, int64_t{8}); }},
      {"reverse", [](Bench& b) { launch(b.call, {1, 64}, reverse_kernel<true>, b.out); }},
      {"missing_barrier", [](Bench& b) { launch(b.call, {1, 64}, reverse_kernel<false>, b.out); }},
      {"partial_barrier", [](Bench& b) { launch(b.call, {1, 64}, partial_barrier_kernel, b.out); }},
      {"diverging_barrier", [](Bench& b) { launch(b.call, {1, 64}, diverging_barrier_kernel); }},
      {"mixed_wait", [](Bench& b) { launch(b.call, {1, 64}, mixed_wait_kernel); }},
      {"shuffle", [](Bench& b) { launch(b.call, {1, 32}, shuffle_kernel, b.out, 0xffffffffu, -1); }},
      {"shuffle_outside_mask", [](Bench& b) { launch(b.call, {1, 32}, shuffle_kernel, b.out, 0x0000ffffu, -1); }},
      {"shuffle_from_returned", [](Bench& b) { launch(b.call, {1, 8}, shuffle_kernel, b.out, 0xffffffffu, 1); }},
      {"foreign_mask", [](Bench& b) { launch(b.call, {1, 32}, foreign_mask_kernel); }},
      {"collectives", [](Bench& b) { launch(b.call, {1, 32}, collectives_kernel, b.out); }},
      {"block_race", [](Bench& b) { launch(b.call, {4, 1}, block_race_kernel, b.out); }},
      {"block_count",
       [](Bench& b) { launch(b.call, {4, 1}, block_count_kernel, reinterpret_cast<unsigned*>(b.out + 8), b.out); }},
      {"dynamic_shared", [](Bench& b) { launch(b.call, {1, 64, 64 * sizeof(float)}, dynamic_shared_kernel, b.out); }},
      {"take_beside_reports", take_beside_reports},
      {"large_shared", [](Bench& b) { launch(b.call, {1, 1}, large_shared_kernel); }},
      {"large_dynamic_shared", [](Bench& b) { launch(b.call, {1, 64, (48 << 10) + 1}, dynamic_shared_kernel, b.out); }},
      {"large_block", [](Bench& b) { launch(b.call, {1, 1025}, reverse_kernel<true>, b.out); }},
      {"large_grid", [](Bench& b) { launch(b.call, {int64_t{1} << 31, 1}, block_race_kernel, b.out); }},
  };
  return all;
}

}  // namespace tsr

// Runs the case and copies the bench's 256 bytes to `out`. Returns what was refused, or "".
extern "C" __attribute__((visibility("default"))) const char* tsr_emulated_fault(const char* name, uint8_t* out) {
  static std::string text;
  for (const tsr::Cases* cases :
       {&tsr::kernel_cases(), &tsr::builtin_cases(), &tsr::primitive_cases(), &tsr::race_cases()}) {
    const auto found = cases->find(name);
    if (found == cases->end()) continue;
    text.clear();
    try {
      const tsr::Tensor like = torch::stable::empty({0}, tsr::ScalarType::Float);
      tsr::Bench bench(like);
      found->second(bench);
      std::copy_n(bench.out_as<uint8_t>(), 256, out);
    } catch (const std::exception& error) {
      text = error.what();
    }
    return text.c_str();
  }
  return "no such case";
}
