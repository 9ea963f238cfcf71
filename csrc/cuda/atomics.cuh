// Words that several threads of a kernel read and write: each access for itself is whole, and no other one waits for
// it.
#pragma once
#include <cuda/atomic>

#include "../cuda.h"

namespace tsr {

template <class T>
__device__ __forceinline__ T relaxed_load(T* from) {
  return cuda::atomic_ref<T, cuda::thread_scope_device>(*from).load(cuda::memory_order_relaxed);
}
template <class T>
__device__ __forceinline__ void relaxed_store(T* to, T value) {
  cuda::atomic_ref<T, cuda::thread_scope_device>(*to).store(value, cuda::memory_order_relaxed);
}

}  // namespace tsr
