// The host's version of what csrc/cuda.h takes from CUDA: with it, g++ compiles the .cu files and runs them.
//
// A block's threads are fibers of one host thread. Each runs until it waits (at a barrier or in a warp's collective) or
// touches an atomic; then another one is resumed, in the order that set_order() sets. Several blocks are in flight.
// A call that hardware would refuse, or whose result is undefined, throws: see emulation.cpp. CUB is in folder cccl.
#pragma once
#include <new>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "arithmetic.h"
#include "collectives.h"
#include "engine.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ TSR_EMULATED_INLINE
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
// The coordinates of the running thread.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace tsr::emulated {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::logic_error(message("emulated CUDA: ", parts...));
}

}  // namespace tsr::emulated

// ---- What cuda.h defines from CUDA ----------------------------------------------------------------------------------

#define TSR_SHARED(T, name, n)      \
  static const char name##_key = 0; \
  T* const name = static_cast<T*>(::tsr::emulated::shared_array(&name##_key, (n) * sizeof(T)))

enum cudaError_t { cudaSuccess };
using cudaStream_t = int;
// Errors are thrown, so there is nothing to check. torch's own macro asks the CUDA runtime.
#undef STD_CUDA_CHECK
#define STD_CUDA_CHECK(call) static_cast<void>(call)

#define TSR_CUDA_KERNELS(m) STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec_emulated, CPU, m)

namespace tsr {

struct ErrorRecord;

using std::sqrt;

using Stream = cudaStream_t;
// Exists for the time of an operator's call.
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
  ~DeviceGuard();
};

// Few blocks, so that grid-stride loops take several steps.
constexpr int64_t kMaxBlocks = 6;
constexpr int64_t kFullDevice = 64;

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(emulated::dynamic_shared_bytes());
}

inline void prefetch(const void*) {}
inline Stream current_stream(int32_t) { return 0; }
bool is_capturing(Stream stream);
void fill_bytes(Stream stream, void* to, int value, size_t bytes);
inline void wait_for(Stream) {}
void copy_to_host(int32_t device, void* to, const void* from, size_t bytes);
ErrorRecord* new_record();
// TORCHSPARSE_REC_EMULATED_OLD_GPU pretends that there is such a device.
std::optional<std::string> device_without_code(int32_t device);

// The tensor is filled with ones (NaN), between two guards that are checked after every launch while it exists.
Tensor device_empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype, const Asked& asked);

// Allocates every array by itself, so that its own ends are watched.
class Scratch {
 public:
  void* take(const Tensor& like, int64_t bytes, const Asked& asked) {
    kept_.push_back(device_empty(like, {bytes}, ScalarType::Byte, asked));
    return kept_.back().data_ptr();
  }

 private:
  std::vector<Tensor> kept_;
};

template <class... Parameters, class... Arguments>
void start_kernel(Stream, int64_t blocks, int64_t threads, size_t shared_bytes, void (*kernel)(Parameters...),
                  const Arguments&... arguments) {
  emulated::run(blocks, threads, shared_bytes, [&] { kernel(arguments...); });
}

}  // namespace tsr
