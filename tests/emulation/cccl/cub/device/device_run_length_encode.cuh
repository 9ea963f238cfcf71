// cub::DeviceRunLengthEncode on the host: each run's value and length, and their number. The rest of the outputs, which
// must have room for n runs, is overwritten.
#pragma once
#include "../strict.h"

namespace cub {

struct DeviceRunLengthEncode {
  template <class In, class T, class Length, class Count>
  static cudaError_t Encode(void* scratch, size_t& bytes, In in, T* values, Length* lengths, Count* count, int64_t n,
                            cudaStream_t = 0) {
    Call call("Encode", scratch, bytes, n, sizeof(T) + sizeof(Length));
    if (call.asks_for_size()) return cudaSuccess;
    call.uses({memory_of(in, n), memory_of(values, n), memory_of(lengths, n), memory_of(count, 1)});
    Call::overwrite(memory_of(values, n));
    Call::overwrite(memory_of(lengths, n));
    int64_t runs = 0;
    for (int64_t i = 0, begin = 0; i < n; ++i) {
      if (i + 1 < n && in[i + 1] == in[i]) continue;
      values[runs] = in[i];
      lengths[runs++] = static_cast<Length>(i + 1 - begin);
      begin = i + 1;
    }
    *count = static_cast<Count>(runs);
    return call.finish(/*launches=*/2);
  }
};

}  // namespace cub
