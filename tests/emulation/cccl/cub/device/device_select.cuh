// cub::DeviceSelect on the host: the chosen items, in order, and their number. The rest of `out`, which must have room
// for all items, is overwritten.
#pragma once
#include "../strict.h"

namespace cub {

struct DeviceSelect {
  template <class In, class Flags, class T, class Count>
  static cudaError_t Flagged(void* scratch, size_t& bytes, In in, Flags flags, T* out, Count* count, int64_t n,
                             cudaStream_t = 0) {
    return select("Flagged", scratch, bytes, in, out, count, n, memory_of(flags, n),
                  [&](int64_t i) { return static_cast<bool>(flags[i]); });
  }
  template <class In, class T, class Count, class Wanted>
  static cudaError_t If(void* scratch, size_t& bytes, In in, T* out, Count* count, int64_t n, Wanted wanted,
                        cudaStream_t = 0) {
    return select("If", scratch, bytes, in, out, count, n, {nullptr, 0},
                  [&](int64_t i) { return static_cast<bool>(wanted(in[i])); });
  }

 private:
  template <class In, class T, class Count, class Chosen>
  static cudaError_t select(const char* name, void* scratch, size_t& bytes, In in, T* out, Count* count, int64_t n,
                            Memory flags, const Chosen& chosen) {
    Call call(name, scratch, bytes, n, sizeof(T));
    if (call.asks_for_size()) return cudaSuccess;
    call.uses({memory_of(in, n), flags, memory_of(out, n), memory_of(count, 1)});
    // Overwritten first: a functor must not read what the call writes.
    Call::overwrite(memory_of(out, n));
    Call::overwrite(memory_of(count, 1));
    int64_t selected = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (chosen(i)) out[selected++] = in[i];
    }
    *count = static_cast<Count>(selected);
    return call.finish(/*launches=*/2);
  }
};

}  // namespace cub
