// The host's version of what csrc/cuda.h takes from CUDA: with it, g++ compiles the .cu files and runs them.
//
// A block's threads are fibers of one host thread. Each runs until it waits (at a barrier or in a warp's collective) or
// touches an atomic; then another one is resumed, in the order that set_order() asks for. Several blocks are in flight.
// What hardware would refuse, or answer with anything, throws: see emulation.cpp.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "abi.h"

#define __global__
#define __device__
#define __host__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
// Those of the thread that is running.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace tsr {

struct ErrorRecord;

namespace emulated {

// Where in the source a thread waits: all threads that wait for each other must wait at one place.
struct Site {
  const char* file;
  int line;
};
// The last parameters of a function that waits: they take the caller's place in the source.
#define TSR_EMULATED_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

enum class Collective { kShuffle, kBallot, kSync };

void barrier(Site site);
// Waits for the lanes of `mask`; returns the value of lane `source` (kShuffle), or the lanes whose value is not 0
// (kBallot).
uint64_t collective(Collective kind, unsigned mask, uint64_t value, int source, Site site);
// Lets another thread run.
void switch_point();
int lane();

// The block's shared array of that key, allocated when its first thread asks.
void* shared_array(const void* key, size_t bytes);
void* dynamic_shared_bytes();

void run(int64_t blocks, int64_t threads, size_t shared_bytes, const std::function<void()>& body);

template <class T>
T shuffle(unsigned mask, T value, int source, Site site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = collective(Collective::kShuffle, mask, bits, source, site);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// The types that hardware has these atomics for.
template <class T>
constexpr bool is_atomic =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;

template <class T, class F>
T atomic(T* address, const F& next) {
  static_assert(is_atomic<T>);
  switch_point();
  const T old = *address;
  *address = next(old);
  switch_point();
  return old;
}

}  // namespace emulated
}  // namespace tsr

// ---- Kernels' builtins ----------------------------------------------------------------------------------------------

inline void __syncthreads(TSR_EMULATED_SITE) { tsr::emulated::barrier({file, line}); }
inline void __syncwarp(unsigned mask = ~0u, TSR_EMULATED_SITE) {
  tsr::emulated::collective(tsr::emulated::Collective::kSync, mask, 0, 0, {file, line});
}
inline void __threadfence_system() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, TSR_EMULATED_SITE) {
  return tsr::emulated::shuffle(mask, value, source & 31, {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step, TSR_EMULATED_SITE) {
  return tsr::emulated::shuffle(mask, value, (tsr::emulated::lane() ^ step) & 31, {file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step, TSR_EMULATED_SITE) {
  const int lane = tsr::emulated::lane();
  return tsr::emulated::shuffle(mask, value, lane >= step ? lane - step : lane, {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int step, TSR_EMULATED_SITE) {
  const int lane = tsr::emulated::lane();
  return tsr::emulated::shuffle(mask, value, lane + step < 32 ? lane + step : lane, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, TSR_EMULATED_SITE) {
  return static_cast<unsigned>(
      tsr::emulated::collective(tsr::emulated::Collective::kBallot, mask, predicate != 0, 0, {file, line}));
}
inline int __any_sync(unsigned mask, int predicate, TSR_EMULATED_SITE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, TSR_EMULATED_SITE) {
  return __ballot_sync(mask, !predicate, file, line) == 0;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __ffs(int x) { return __builtin_ffs(x); }

template <class T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  return tsr::emulated::atomic(address, [=](T old) { return old + value; });
}
template <class T>
T atomicMin(T* address, std::common_type_t<T> value) {
  return tsr::emulated::atomic(address, [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicMax(T* address, std::common_type_t<T> value) {
  return tsr::emulated::atomic(address, [=](T old) { return old < value ? value : old; });
}
template <class T>
T atomicExch(T* address, std::common_type_t<T> value) {
  return tsr::emulated::atomic(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  return tsr::emulated::atomic(address, [=](T old) { return old == expected ? value : old; });
}

// ---- What cuda.h defines from CUDA ----------------------------------------------------------------------------------

#define TSR_SHARED(T, name, n)      \
  static const char name##_key = 0; \
  T* const name = static_cast<T*>(::tsr::emulated::shared_array(&name##_key, (n) * sizeof(T)))

#define TSR_CUDA_KERNELS(m) STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec_emulated, CPU, m)

namespace tsr {

using std::sqrt;

using Stream = int;
// Lives as long as an operator's call.
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
  ~DeviceGuard();
};

// Few, so that grid-stride loops take several steps.
constexpr int64_t kMaxBlocks = 6;

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(emulated::dynamic_shared_bytes());
}

inline Stream current_stream(int32_t) { return 0; }
bool is_capturing(Stream stream);
void fill_bytes(Stream stream, void* to, int value, size_t bytes);
void copy_to_host(Stream stream, void* to, const void* from, size_t bytes);
ErrorRecord* new_record();

// Filled with ones (NaN), between two guards that are checked after every launch while the tensor lives.
Tensor device_empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype);

template <class... Parameters, class... Arguments>
void start_kernel(Stream, int64_t blocks, int64_t threads, size_t shared_bytes, void (*kernel)(Parameters...),
                  const Arguments&... arguments) {
  emulated::run(blocks, threads, shared_bytes, [&] { kernel(arguments...); });
}

}  // namespace tsr
