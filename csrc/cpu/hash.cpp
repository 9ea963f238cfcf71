// CPU doors of the hash family's operators on integers: checks, threads and blocks. The loop over integers is
// hash_loops.h, once per instruction set; the arithmetic is csrc/hash_<function>.h.
#include "../hash.h"

#include <algorithm>
#include <cstring>

#include "hash_moves.h"
#include "level.h"

namespace tsr {
namespace {

// Integers hashed at a time: their lists stay in the first-level cache.
constexpr int64_t kHashBlock = 512;
constexpr int64_t kHashPadding = 8;

#define TSR_ISA_BODY "hash_loops.h"
#include "isa_foreach.h"

template <class Hash, class Result>
using HashBlock = void (*)(const Hash&, const Result&, const uint64_t*, int64_t, bool, int64_t*);

// n integers, at most a block. Those of 64 bits are read and written in place if they fill the block; others go through
// padded buffers.
template <class T, class Hash, class Result>
void hash_part(HashBlock<Hash, Result> hash_block, const Hash& hash, const Result& result, const T* x, int64_t n,
               int64_t* out) {
  if (sizeof(T) == sizeof(uint64_t) && n == kHashBlock) {
    return hash_block(hash, result, reinterpret_cast<const uint64_t*>(x), n, std::is_signed_v<T>, out);
  }
  uint64_t wide[kHashBlock];
  int64_t results[kHashBlock];
  for (int64_t i = 0; i < n; ++i) wide[i] = static_cast<uint64_t>(static_cast<widened_t<T>>(x[i]));
  for (int64_t i = n; i % kHashPadding != 0; ++i) wide[i] = 0;
  hash_block(hash, result, wide, n, std::is_signed_v<T>, results);
  std::memcpy(out, results, static_cast<size_t>(n) * sizeof(int64_t));
}

template <class T, class Hash, class Result>
void hash_vector(const Hash& hash, const Result& result, const T* x, int64_t n, int64_t* out) {
  const auto hash_block =
      pick_level<HashBlock<Hash, Result>>(&baseline::hash_block, &avx2::hash_block, &avx512::hash_block);
  constexpr int64_t grain = 16;
  parallel_for(0, (n + kHashBlock - 1) / kHashBlock, grain, [=](int64_t begin, int64_t end) {
    const int64_t stop = std::min(end * kHashBlock, n);
    for (int64_t start = begin * kHashBlock; start < stop; start += kHashBlock) {
      hash_part<T, Hash, Result>(hash_block, hash, result, x + start, std::min(kHashBlock, n - start), out + start);
    }
  });
}

template <class Hash, class Result>
Tensor hash_integers(const char* op, const Tensor& x, const Hash& hash, const Result& result) {
  check_hash_integers(op, x);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < x.dim(); ++d) shape.push_back(x.size(d));
  const Tensor input = as_contiguous(x);
  Tensor out = new_empty(x, shape, ScalarType::Long);
  dispatch_integer(x.scalar_type(), op, "x", [&](auto tag) {
    using T = typename decltype(tag)::type;
    hash_vector(hash, result, input.const_data_ptr<T>(), input.numel(), out.mutable_data_ptr<int64_t>());
  });
  return out;
}

}  // namespace

Tensor fingerprint64_cpu(const Tensor& x) { return hash_integers("fingerprint64", x, FarmHash(), HashBits()); }

Tensor to_hash_bucket_fast_cpu(const Tensor& x, int64_t num_buckets) {
  const char* op = "to_hash_bucket_fast";
  return hash_integers(op, x, FarmHash(), checked_buckets(op, num_buckets));
}

Tensor to_hash_bucket_strong_cpu(const Tensor& x, int64_t num_buckets, int64_t key0, int64_t key1) {
  const char* op = "to_hash_bucket_strong";
  return hash_integers(op, x, SipHash(key0, key1), checked_buckets(op, num_buckets));
}

Tensor to_hash_bucket_cpu(const Tensor& x, int64_t num_buckets) {
  const char* op = "to_hash_bucket";
  return hash_integers(op, x, MurmurHash(), checked_buckets(op, num_buckets));
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "fingerprint64", &tsr::fingerprint64_cpu);
  TSR_IMPL(m, "to_hash_bucket_fast", &tsr::to_hash_bucket_fast_cpu);
  TSR_IMPL(m, "to_hash_bucket_strong", &tsr::to_hash_bucket_strong_cpu);
  TSR_IMPL(m, "to_hash_bucket", &tsr::to_hash_bucket_cpu);
}
