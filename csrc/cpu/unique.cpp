#include "../unique.h"

#include <limits>
#include <tuple>

#include "unique_direct.h"
#include "unique_hashed.h"

namespace tsr {
namespace {

// Up to this many keys, one thread and one table.
constexpr int64_t kOnePartition = 16384;

// The number of values in [low, high], or more than `limit` where it is more (it may not fit any integer).
struct Range {
  uint64_t low;
  int64_t size;
};

// Stops early once the range is more than limit, which a sample of keys spread over 64 bits shows at once.
template <class T>
Range key_range(const T* keys, int64_t n, int64_t limit) {
  constexpr int64_t kBlock = 65536;
  const int64_t blocks = ceil_div(n, kBlock);
  std::vector<T> lows(blocks), highs(blocks);
  const auto narrow = [&](T low, T high) {
    return static_cast<uint64_t>(high) - static_cast<uint64_t>(low) < static_cast<uint64_t>(limit);
  };
  const auto scan = [&](int64_t block) {
    const int64_t begin = block * kBlock;
    T low = keys[begin], high = low;
    for (int64_t i = begin; i < std::min(n, begin + kBlock); ++i) {
      low = std::min(low, keys[i]);
      high = std::max(high, keys[i]);
    }
    lows[block] = low;
    highs[block] = high;
  };
  scan(0);
  if (!narrow(lows[0], highs[0])) return {0, limit + 1};
  parallel_for(1, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) scan(block);
  });
  const T low = *std::min_element(lows.begin(), lows.end());
  const T high = *std::max_element(highs.begin(), highs.end());
  if (!narrow(low, high)) return {0, limit + 1};
  return {static_cast<uint64_t>(low),
          static_cast<int64_t>(static_cast<uint64_t>(high) - static_cast<uint64_t>(low)) + 1};
}

template <class T, class Pos>
UniqueResult unique_any(const Tensor& x, bool with_counts) {
  using Key = std::make_unsigned_t<T>;
  const int64_t n = x.numel();
  const bool few = n <= kOnePartition;
  // A table entry per possible value is worth it while there are not more of them than keys, or few at all.
  const int64_t limit = few ? n : std::max<int64_t>(n, 65536);
  const Range range = key_range(static_cast<const T*>(x.const_data_ptr()), n, limit);
  if (range.size <= limit) return DirectUnique<Key, Pos>(x, static_cast<Key>(range.low), range.size, with_counts).run();
  if constexpr (sizeof(T) >= 4) {
    if (!few) return HashedUnique<Key, Pos>(x, with_counts).run();
  }
  return unique_one_partition<Key, Pos>(x, with_counts);
}

UniqueResult unique_checked(const char* op, const Tensor& given, bool with_counts) {
  check_unique(op, given);
  const Tensor x = tsr::as_contiguous(given);
  const int64_t n = x.numel();
  if (n == 0) {
    UniqueResult empty{new_empty(x, {0}, x.scalar_type()), new_empty(x, {0}, ScalarType::Long), std::nullopt};
    if (with_counts) empty.counts = new_empty(x, {0}, ScalarType::Long);
    return empty;
  }
  return dispatch_integer(x.scalar_type(), op, "x", [&](auto tag) {
    using T = typename decltype(tag)::type;
    return n < kMaxShort ? unique_any<T, uint32_t>(x, with_counts) : unique_any<T, uint64_t>(x, with_counts);
  });
}

}  // namespace

std::tuple<Tensor, Tensor> unique_cpu(const Tensor& x) {
  UniqueResult r = unique_checked("unique", x, false);
  return {r.values, r.inverse};
}

std::tuple<Tensor, Tensor, Tensor> unique_with_counts_cpu(const Tensor& x) {
  UniqueResult r = unique_checked("unique_with_counts", x, true);
  return {r.values, r.inverse, *r.counts};
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "unique", &tsr::unique_cpu);
  TSR_IMPL(m, "unique_with_counts", &tsr::unique_with_counts_cpu);
}
