// CPU doors of the hash family: checks, threads and blocks. The loop over integers is hash_loops.h, once per
// instruction set; the arithmetic is csrc/hash.h.
#include "../hash.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's AVX-512 functions read variables that they leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

#include "level.h"

namespace tsr {
namespace {

// Integers hashed at a time: their lists stay in the first-level cache.
constexpr int64_t kHashBlock = 512;
constexpr int64_t kHashPadding = 8;
// Strings that are worth a thread.
constexpr int64_t kStringGrain = 1024;

// AVX2 has no compress and expand: for every set of 4 lanes, the 32-bit halves that a permutation takes.
struct LaneMoves {
  alignas(32) uint32_t compress[16][8] = {};
  alignas(32) uint32_t expand[16][8] = {};
  alignas(32) uint32_t selected[16][8] = {};  // all ones in the lanes of the set

  constexpr LaneMoves() {
    for (uint32_t set = 0; set < 16; ++set) {
      uint32_t rank = 0;
      for (uint32_t lane = 0; lane < 4; ++lane) {
        if ((set >> lane & 1) == 0) continue;
        for (uint32_t half = 0; half < 2; ++half) {
          compress[set][2 * rank + half] = 2 * lane + half;
          expand[set][2 * lane + half] = 2 * rank + half;
          selected[set][2 * lane + half] = ~uint32_t{0};
        }
        ++rank;
      }
    }
  }
};
[[maybe_unused]] constexpr LaneMoves kMoves;

#define TSR_ISA_BODY "hash_loops.h"
#include "isa_foreach.h"

using HashBlock = void (*)(const uint64_t*, int64_t, bool, const BucketRemainder&, int64_t*);

HashBlock chosen_hash_block() {
  static const HashBlock chosen = pick_level<HashBlock>(&baseline::hash_block, &avx2::hash_block, &avx512::hash_block);
  return chosen;
}

// n integers, at most a block, into n buckets. Those of 64 bits are read and written in place if they fill the block;
// others go through padded buffers.
template <class T>
void hash_part(HashBlock hash_block, const T* x, int64_t n, const BucketRemainder& remainder, int64_t* out) {
  if (sizeof(T) == sizeof(uint64_t) && n == kHashBlock) {
    return hash_block(reinterpret_cast<const uint64_t*>(x), n, std::is_signed_v<T>, remainder, out);
  }
  uint64_t wide[kHashBlock];
  int64_t buckets[kHashBlock];
  for (int64_t i = 0; i < n; ++i) wide[i] = static_cast<uint64_t>(static_cast<widened_t<T>>(x[i]));
  for (int64_t i = n; i % kHashPadding != 0; ++i) wide[i] = 0;
  hash_block(wide, n, std::is_signed_v<T>, remainder, buckets);
  std::memcpy(out, buckets, static_cast<size_t>(n) * sizeof(int64_t));
}

template <class T>
void hash_integers(const T* x, int64_t n, const BucketRemainder& remainder, int64_t* out) {
  const HashBlock hash_block = chosen_hash_block();
  constexpr int64_t grain = 16;
  parallel_for(0, (n + kHashBlock - 1) / kHashBlock, grain, [=](int64_t begin, int64_t end) {
    const int64_t stop = std::min(end * kHashBlock, n);
    for (int64_t start = begin * kHashBlock; start < stop; start += kHashBlock) {
      hash_part(hash_block, x + start, std::min(kHashBlock, n - start), remainder, out + start);
    }
  });
}

// Whether string i may be read: each such look is enough for its own string, whatever the other offsets are.
bool string_is_valid(const int64_t* offsets, int64_t i, int64_t bytes) {
  return offsets[i] >= 0 && offsets[i + 1] >= offsets[i] && offsets[i + 1] <= bytes;
}

[[noreturn]] void throw_bad_offset(const int64_t* offsets, int64_t i, int64_t bytes) {
  const char* op = "string_to_hash_bucket_fast";
  TSR_CHECK_VALUE(offsets[i] >= 0, op, ": offsets must be >= 0, got ", offsets[i], " at position ", i);
  TSR_CHECK_VALUE(offsets[i + 1] >= offsets[i], op, ": offsets must not decrease, got ", offsets[i + 1],
                  " at position ", i + 1, " after ", offsets[i]);
  throw std::invalid_argument(message(op, ": offsets must be at most ", bytes, ", the number of bytes, got ",
                                      offsets[i + 1], " at position ", i + 1));
}

}  // namespace

Tensor to_hash_bucket_fast_cpu(const Tensor& x, int64_t num_buckets) {
  check_to_hash_bucket_fast(x, num_buckets);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < x.dim(); ++d) shape.push_back(x.size(d));
  const Tensor input = as_contiguous(x);
  Tensor out = new_empty(x, shape, ScalarType::Long);
  dispatch_integer(x.scalar_type(), "to_hash_bucket_fast", "x", [&](auto tag) {
    using T = typename decltype(tag)::type;
    hash_integers(input.const_data_ptr<T>(), input.numel(), BucketRemainder(num_buckets),
                  out.mutable_data_ptr<int64_t>());
  });
  return out;
}

Tensor string_to_hash_bucket_fast_cpu(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets) {
  check_string_to_hash_bucket_fast(bytes, offsets, num_buckets);
  const Tensor text = as_contiguous(bytes), bounds = as_contiguous(offsets);
  const uint8_t* s = text.const_data_ptr<uint8_t>();
  const int64_t* at = bounds.const_data_ptr<int64_t>();
  const int64_t n = bounds.size(0) - 1, size = text.size(0);
  if (n == 0) {
    TSR_CHECK_VALUE(at[0] >= 0 && at[0] <= size, "string_to_hash_bucket_fast: offsets must be in [0, ", size,
                    "], the number of bytes, got ", at[0], " at position 0");
  }
  Tensor out = new_empty(bytes, {n}, ScalarType::Long);
  int64_t* buckets = out.mutable_data_ptr<int64_t>();
  const BucketRemainder remainder(num_buckets);
  std::atomic<int64_t> first_bad{n};
  parallel_for(0, n, kStringGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!string_is_valid(at, i, size)) {
        int64_t known = first_bad.load();
        while (i < known && !first_bad.compare_exchange_weak(known, i)) {
        }
        return;
      }
      buckets[i] = remainder(fingerprint64(s + at[i], at[i + 1] - at[i]));
    }
  });
  if (first_bad < n) throw_bad_offset(at, first_bad, size);
  return out;
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "to_hash_bucket_fast", &tsr::to_hash_bucket_fast_cpu);
  TSR_IMPL(m, "string_to_hash_bucket_fast", &tsr::string_to_hash_bucket_fast_cpu);
}
