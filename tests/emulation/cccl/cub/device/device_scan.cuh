// cub::DeviceScan on the host. CUB adds in any order: only integers give the same bits in every order.
#pragma once
#include "../strict.h"

namespace cub {

struct DeviceScan {
  // out[i] = init + in[0] + ... + in[i - 1]. in may be out itself.
  template <class In, class T, class Add, class Init>
  static cudaError_t ExclusiveScan(void* scratch, size_t& bytes, In in, T* out, Add add, Init init, int64_t n,
                                   cudaStream_t = 0) {
    return scan("ExclusiveScan", scratch, bytes, in, out, add, init, n, /*inclusive=*/false);
  }
  template <class In, class T>
  static cudaError_t ExclusiveSum(void* scratch, size_t& bytes, In in, T* out, int64_t n, cudaStream_t = 0) {
    return scan("ExclusiveSum", scratch, bytes, in, out, cuda::std::plus<>(), T{}, n, /*inclusive=*/false);
  }
  template <class In, class T>
  static cudaError_t InclusiveSum(void* scratch, size_t& bytes, In in, T* out, int64_t n, cudaStream_t = 0) {
    return scan("InclusiveSum", scratch, bytes, in, out, cuda::std::plus<>(), T{}, n, /*inclusive=*/true);
  }

 private:
  template <class In, class T, class Add, class Init>
  static cudaError_t scan(const char* name, void* scratch, size_t& bytes, In in, T* out, const Add& add, Init init,
                          int64_t n, bool inclusive) {
    static_assert(std::is_integral_v<T> && std::is_integral_v<Init>, "a scan of floats has other bits on every run");
    Call call(name, scratch, bytes, n, sizeof(T));
    if (call.asks_for_size()) return cudaSuccess;
    const Memory read = memory_of(in, n), written = memory_of(out, n);
    const bool in_place = read.begin == written.begin && read.bytes == written.bytes;
    call.uses({in_place ? Memory{nullptr, 0} : read, written});
    Init total = init;
    for (int64_t i = 0; i < n; ++i) {
      const Init next = static_cast<Init>(add(total, in[i]));
      out[i] = static_cast<T>(inclusive ? next : total);
      total = next;
    }
    return call.finish(/*launches=*/2);
  }
};

}  // namespace cub
