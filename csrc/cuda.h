// Everything a CUDA family file may use to reach the device: what abi.h is for the CPU.
//
// Kernels are started by launch() alone, take shared memory by TSR_SHARED and dynamic_shared alone, and leave sorting,
// scanning and selecting to cuda/primitives.cuh: with that, tests/emulation can compile the very same .cu files with a
// host compiler and run them without a GPU (TSR_EMULATED). An operator's door starts with a DeviceCall.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "abi.h"
#include "cuda/errors.h"
#include "dispatch.h"

#ifdef TSR_EMULATED
#include "emulation.h"
#else
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>

// An array of n elements of T that the block shares. Raw bytes: shared memory is never constructed.
#define TSR_SHARED(T, name, n)                                        \
  __shared__ alignas(16) unsigned char name##_bytes[(n) * sizeof(T)]; \
  T* const name = reinterpret_cast<T*>(name##_bytes)

#define TSR_CUDA_KERNELS(m) STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CUDA, m)
#endif

namespace tsr {

constexpr int kWarp = 32;
constexpr int64_t kThreads = 256;

// ---- The device: what tests/emulation/emulation.h has a host version of ---------------------------------------------

#ifndef TSR_EMULATED
using Stream = cudaStream_t;
using torch::stable::accelerator::DeviceGuard;

// Blocks of one launch at most: kernels are grid-stride loops, so more work than this only makes them longer.
constexpr int64_t kMaxBlocks = int64_t{1} << 20;
// Threads that keep every processor of a large device busy: where there are more, each may do more.
constexpr int64_t kFullDevice = int64_t{1} << 18;

// The bytes given to LaunchShape::shared_bytes.
template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char tsr_dynamic_shared[];
  return reinterpret_cast<T*>(tsr_dynamic_shared);
}

// Brings what lies there near, for a read to come.
__device__ inline void prefetch(const void* x) { asm volatile("prefetch.global.L2 [%0];" ::"l"(x)); }

inline Stream current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<Stream>(stream);
}

inline bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  STD_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

inline void wait_for(Stream stream) { STD_CUDA_CHECK(cudaStreamSynchronize(stream)); }

inline void fill_bytes(Stream stream, void* to, int value, size_t bytes) {
  if (bytes > 0) STD_CUDA_CHECK(cudaMemsetAsync(to, value, bytes, stream));
}

// From a device; waits for its stream. By torch's own copy, so that torch.cuda.set_sync_debug_mode sees it.
inline void copy_to_host(int32_t device, void* to, const void* from, size_t bytes) {
  using torch::headeronly::IntHeaderOnlyArrayRef;
  using torch::stable::Device;
  using torch::stable::DeviceType;
  const std::array<int64_t, 1> size{static_cast<int64_t>(bytes)}, stride{1};
  const auto wrap = [&](const void* data, const Device& place) {
    return torch::stable::from_blob(const_cast<void*>(data), IntHeaderOnlyArrayRef(size.data(), 1),
                                    IntHeaderOnlyArrayRef(stride.data(), 1), place, ScalarType::Byte);
  };
  Tensor target = wrap(to, Device(DeviceType::CPU));
  torch::stable::copy_(target, wrap(from, Device(DeviceType::CUDA, static_cast<torch::stable::DeviceIndex>(device))),
                       /*non_blocking=*/false);
}

// Uninitialised memory of the caching allocator, in order with the current stream.
inline Tensor device_empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype,
                           const Asked& asked) {
  return new_empty(like, sizes, dtype, asked);
}

// Scratch memory of one call. Small arrays share an allocation: to ask torch for each would take the host longer than
// the device takes for most kernels.
class Scratch {
 public:
  void* take(const Tensor& like, int64_t bytes, const Asked& asked) {
    constexpr int64_t kShared = int64_t{1} << 20, kAlignment = 512;
    // Whoever turns torch's cache off wants memory checkers to see the end of every array.
    static const bool apart = std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr;
    if (apart || bytes > kShared / 4) return allocate(like, bytes, asked);
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (bytes > left_) {
      next_ = allocate(like, kShared, asked);
      left_ = kShared;
    }
    left_ -= bytes;
    return std::exchange(next_, next_ + bytes);
  }

 private:
  uint8_t* allocate(const Tensor& like, int64_t bytes, const Asked& asked) {
    kept_.push_back(device_empty(like, {bytes}, ScalarType::Byte, asked));
    return static_cast<uint8_t*>(kept_.back().data_ptr());
  }

  std::vector<Tensor> kept_;
  uint8_t* next_ = nullptr;
  int64_t left_ = 0;
};

template <class... Parameters, class... Arguments>
void start_kernel(Stream stream, int64_t blocks, int64_t threads, size_t shared_bytes, void (*kernel)(Parameters...),
                  const Arguments&... arguments) {
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, stream>>>(arguments...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}
#endif

class KeptUploads;  // cuda/uploads.cuh

// ---- One operator call ----------------------------------------------------------------------------------------------

// Raises what the device's kernels have recorded, else gives the sink of a new call.
ErrorSink begin_errors(const char* op, int32_t device, Stream stream);

// One call of an operator on x's device: raises what earlier kernels recorded, selects the device and its current
// stream, and owns the call's scratch memory. Nothing here waits for the device but read_back.
class DeviceCall {
 public:
  // uploads: what earlier calls like this one have sent, or null.
  DeviceCall(const char* op, const Tensor& x, KeptUploads* uploads = nullptr)
      : op_(op),
        like_(x),
        uploads_(uploads),
        guard_(x.get_device_index()),
        stream_(current_stream(x.get_device_index())),
        errors_(begin_errors(op, x.get_device_index(), stream_)) {}
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  const char* op() const { return op_; }
  int32_t device() const { return like_.get_device_index(); }
  Stream stream() const { return stream_; }
  KeptUploads* uploads() const { return uploads_; }
  // How many have been asked for.
  size_t next_upload() { return next_upload_++; }
  // Where this call's kernels report bad values.
  const ErrorSink& errors() const { return errors_; }

  // What asks for the memory that is taken from now on.
  void asks(const Asked& asked) { asked_ = asked; }
  void asks(const char* argument, int64_t value) { asked_ = {op_, argument, value}; }

  Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype) const {
    return device_empty(like_, sizes, dtype, asked_);
  }

  // Scratch for n elements of T, valid until the call ends: the allocator hands it out again in stream order.
  template <class T>
  T* workspace(int64_t n) {
    constexpr int64_t kBytes = sizeof(T);
    if (n > INT64_MAX / kBytes) {
      throw_no_memory(asked_, like_.is_cuda(), message(n, " elements of ", kBytes, " bytes"));
    }
    return static_cast<T*>(scratch_.take(like_, std::max<int64_t>(n, 1) * kBytes, asked_));
  }

  // Keeps x alive until the call ends, for a contiguous copy whose pointer a kernel takes.
  const void* data(const Tensor& x) {
    kept_.push_back(as_contiguous(x));
    return kept_.back().data_ptr();
  }
  template <class T>
  const T* data(const Tensor& x) {
    return static_cast<const T*>(data(x));
  }

  // Values that only the device knows: waits for the stream, which a graph capture does not allow.
  template <class T>
  T read_back(const T* value, const char* what) const {
    return read_back(value, 1, what)[0];
  }
  template <class T>
  std::vector<T> read_back(const T* values, int64_t n, const char* what) const {
    TSR_CHECK_VALUE(!is_capturing(stream_), op_, ": ", what,
                    " is read back from the device, which must not happen while a CUDA graph is captured");
    std::vector<T> result(static_cast<size_t>(n));
    try {
      copy_to_host(like_.get_device_index(), result.data(), values, result.size() * sizeof(T));
    } catch (const std::exception&) {
      // torch's own text does not come through.
      throw std::runtime_error(message(op_, ": ", what, " could not be read back from the device: an earlier kernel",
                                       " failed, or torch.cuda.set_sync_debug_mode forbids to wait"));
    }
    return result;
  }

 private:
  const char* op_;
  Tensor like_;
  KeptUploads* uploads_;
  size_t next_upload_ = 0;
  DeviceGuard guard_;
  Stream stream_;
  ErrorSink errors_;
  Asked asked_;
  Scratch scratch_;
  std::vector<Tensor> kept_;
};

struct LaunchShape {
  int64_t blocks;
  int64_t threads = kThreads;
  size_t shared_bytes = 0;
};

// Enough blocks for `items` threads, or as many as are useful: the kernel is a grid-stride loop.
inline LaunchShape one_thread_each(int64_t items) {
  return {std::min(items / kThreads + (items % kThreads != 0), kMaxBlocks)};
}

// Starts a kernel on the call's stream; no blocks, no kernel.
template <class... Parameters, class... Arguments>
void launch(const DeviceCall& call, const LaunchShape& shape, void (*kernel)(Parameters...),
            const Arguments&... arguments) {
  if (shape.blocks > 0) {
    start_kernel(call.stream(), shape.blocks, shape.threads, shape.shared_bytes, kernel, arguments...);
  }
}

// ---- Inside kernels -------------------------------------------------------------------------------------------------

// Grid-stride loops: for (int64_t i = thread_index(); i < n; i += thread_count()).
__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// n elements moved by one load or store: the pointer must be aligned to sizeof(Vector).
template <class T, int n>
struct alignas(sizeof(T) * n) Vector {
  T at[n];
};

}  // namespace tsr
