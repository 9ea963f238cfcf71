// cuda/primitives.cuh on the host, as strict as CUB: what CUB leaves undefined is overwritten, and aliases are refused.
#include "cuda/primitives.cuh"

#include <algorithm>
#include <numeric>
#include <utility>

#include "memory.h"

namespace tsr {
namespace {

using Range = std::pair<const void*, size_t>;

void refuse_overlap(const char* primitive, std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    const uint8_t* const end = static_cast<const uint8_t*>(ranges[i - 1].first) + ranges[i - 1].second;
    if (end > ranges[i].first) throw std::logic_error(message("emulated CUDA: ", primitive, ": buffers overlap"));
  }
}

template <class K>
KeyedPositions<K> sort_pairs_of(KeyedPositions<K> from, KeyedPositions<K> spare, int64_t n, int bits) {
  const size_t bytes = static_cast<size_t>(n) * sizeof(K);
  refuse_overlap("sort_pairs",
                 {{from.keys, bytes}, {from.positions, bytes}, {spare.keys, bytes}, {spare.positions, bytes}});
  if (bits < 1 || bits > static_cast<int>(8 * sizeof(K))) {
    throw std::logic_error(message("emulated CUDA: sort_pairs: ", bits, " bits of a key of ", 8 * sizeof(K)));
  }
  const K mask = static_cast<K>(~K{0}) >> (8 * sizeof(K) - bits);
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return (from.keys[a] & mask) < (from.keys[b] & mask); });
  std::vector<K> keys(static_cast<size_t>(n)), positions(static_cast<size_t>(n));
  for (int64_t j = 0; j < n; ++j) {
    keys[j] = from.keys[order[j]];
    positions[j] = from.positions[order[j]];
  }
  // Each pass of 8 bits moves the pairs to the other buffer.
  const bool in_spare = (bits + 7) / 8 % 2 != 0;
  const KeyedPositions<K> result = in_spare ? spare : from, garbage = in_spare ? from : spare;
  std::copy(keys.begin(), keys.end(), result.keys);
  std::copy(positions.begin(), positions.end(), result.positions);
  std::fill_n(garbage.keys, n, static_cast<K>(~K{0}));
  std::fill_n(garbage.positions, n, static_cast<K>(~K{0}));
  emulated::check_guards();
  return result;
}

}  // namespace

KeyedPositions<uint32_t> sort_pairs(DeviceCall&, KeyedPositions<uint32_t> from, KeyedPositions<uint32_t> spare,
                                    int64_t n, int bits) {
  return sort_pairs_of(from, spare, n, bits);
}

KeyedPositions<uint64_t> sort_pairs(DeviceCall&, KeyedPositions<uint64_t> from, KeyedPositions<uint64_t> spare,
                                    int64_t n, int bits) {
  return sort_pairs_of(from, spare, n, bits);
}

void count_before(DeviceCall&, const uint8_t* flags, int64_t n, int64_t* before) {
  refuse_overlap("count_before", {{flags, n + 1}, {before, (n + 1) * sizeof(int64_t)}});
  int64_t count = 0;
  for (int64_t i = 0; i <= n; ++i) {
    before[i] = count;
    if (i < n) count += flags[i];
  }
  emulated::check_guards();
}

void count_bits_before(DeviceCall&, const uint32_t* words, int64_t n, int64_t* before) {
  refuse_overlap("count_bits_before", {{words, (n + 1) * sizeof(uint32_t)}, {before, (n + 1) * sizeof(int64_t)}});
  int64_t count = 0;
  for (int64_t w = 0; w <= n; ++w) {
    before[w] = count;
    if (w < n) count += __builtin_popcount(words[w]);
  }
  emulated::check_guards();
}

void select_positions(DeviceCall&, const uint8_t* flags, int64_t n, int64_t* positions, int64_t* count) {
  // Room for all of them: CUB may write as many before it knows.
  refuse_overlap("select_positions", {{flags, n}, {positions, n * sizeof(int64_t)}, {count, sizeof(int64_t)}});
  int64_t selected = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (flags[i] != 0) positions[selected++] = i;
  }
  std::fill_n(positions + selected, n - selected, int64_t{-1});
  *count = selected;
  emulated::check_guards();
}

}  // namespace tsr
