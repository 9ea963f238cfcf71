// cub::DeviceRadixSort on the host: sorts pairs in two buffers that take turns.
#pragma once
#include <numeric>

#include "../strict.h"

namespace cub {

template <class T>
struct DoubleBuffer {
  T* d_buffers[2];
  int selector = 0;

  DoubleBuffer(T* current, T* alternate) : d_buffers{current, alternate} {}
  T* Current() { return d_buffers[selector]; }
  T* Alternate() { return d_buffers[selector ^ 1]; }
};

struct DeviceRadixSort {
  template <class K, class V>
  static cudaError_t SortPairs(void* scratch, size_t& bytes, DoubleBuffer<K>& keys, DoubleBuffer<V>& values, int64_t n,
                               int begin_bit = 0, int end_bit = sizeof(K) * 8, cudaStream_t = 0) {
    static_assert(std::is_unsigned_v<K>, "the host's version sorts unsigned keys");
    Call call("SortPairs", scratch, bytes, n, sizeof(K) + sizeof(V));
    if (begin_bit < 0 || end_bit <= begin_bit || end_bit > static_cast<int>(8 * sizeof(K))) {
      refuse("SortPairs", "bits [", begin_bit, ", ", end_bit, ") of a key of ", 8 * sizeof(K));
    }
    if (call.asks_for_size()) return cudaSuccess;
    call.uses({memory_of(keys.Current(), n), memory_of(keys.Alternate(), n), memory_of(values.Current(), n),
               memory_of(values.Alternate(), n)});

    const K mask = static_cast<K>(~K{0}) >> (8 * sizeof(K) - (end_bit - begin_bit));
    const std::vector<K> old_keys(keys.Current(), keys.Current() + n);
    const std::vector<V> old_values(values.Current(), values.Current() + n);
    const auto digits = [&](int64_t i) { return static_cast<K>(old_keys[i] >> begin_bit & mask); };
    std::vector<int64_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return digits(a) < digits(b); });

    // Each pass moves the pairs to the other buffer. Few items are sorted in one pass, many by 8 bits at a time.
    const int passes = n <= 32 ? 1 : (end_bit - begin_bit + 7) / 8;
    keys.selector ^= passes & 1;
    values.selector ^= passes & 1;
    Call::overwrite(memory_of(keys.Alternate(), n));
    Call::overwrite(memory_of(values.Alternate(), n));
    for (int64_t i = 0; i < n; ++i) {
      keys.Current()[i] = old_keys[order[i]];
      values.Current()[i] = old_values[order[i]];
    }
    // One kernel for a single tile; else a histogram and its sums, each with memory set to zero, and a kernel a pass.
    const int64_t tile = sizeof(K) == 4 ? 4864 : 2304;
    return call.finish(n <= tile ? 1 : 4 + passes);
  }
};

}  // namespace cub
