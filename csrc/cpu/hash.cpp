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

// ---- Columns --------------------------------------------------------------------------------------------------------

// Values of one column that are written at a time: they stay in the first-level cache.
constexpr int64_t kColumnBlock = 4 * kHashBlock;

struct IdColumn {
  // Writes the ids of n values from the position `begin` on, at most a block, and unless keep is null which of them are
  // kept; returns how many are missing.
  using Write = int64_t (*)(const IdColumn&, int64_t begin, int64_t n, int64_t* ids, bool* keep);

  const void* values;
  int64_t size;
  int64_t first;        // where its ids begin
  int64_t first_block;  // of all columns' blocks
  int64_t num_buckets;  // 0: its values are ids
  Missing missing;
  Write write;
};

template <class T>
int64_t write_ids(const IdColumn& column, int64_t begin, int64_t n, int64_t* ids, bool* keep) {
  using Block = HashBlock<FarmHash, BucketRemainder>;
  using Bits = T (*)(const T*, int64_t);
  const T* const x = static_cast<const T*>(column.values) + begin;
  T bits = 0;  // of all values, of which most blocks have no negative one
  if (column.num_buckets > 0) {
    const Block hash_block = pick_level<Block>(&baseline::hash_block, &avx2::hash_block, &avx512::hash_block);
    const BucketRemainder bucket(column.num_buckets);
    const Bits bits_of = pick_level<Bits>(&baseline::bits_of<T>, &avx2::bits_of<T>, &avx512::bits_of<T>);
    for (int64_t i = 0; i < n; i += kHashBlock) {
      const int64_t some = std::min(kHashBlock, n - i);
      if (keep != nullptr) bits = static_cast<T>(bits | bits_of(x + i, some));
      hash_part<T, FarmHash, BucketRemainder>(hash_block, FarmHash(), bucket, x + i, some, ids + i);
    }
  } else {
    using Copy = T (*)(const T*, int64_t, int64_t*);
    bits = pick_level<Copy>(&baseline::copy_ids<T>, &avx2::copy_ids<T>, &avx512::copy_ids<T>)(x, n, ids);
  }
  if (keep == nullptr) return 0;
  std::memset(keep, 1, static_cast<size_t>(n));
  int64_t count = 0;
  for (int64_t i = 0; bits < T(0) && i < n; ++i) {
    if (x[i] < T(0) && is_missing(column.missing, static_cast<int64_t>(x[i]))) {
      keep[i] = false;
      ++count;
    }
  }
  return count;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> column_ids_cpu(const std::vector<Tensor>& columns,
                                                  const std::vector<int64_t>& num_buckets,
                                                  const std::vector<int64_t>& missing) {
  const int64_t count = check_column_ids(columns, num_buckets, missing);
  std::vector<Tensor> kept;
  std::vector<IdColumn> parts;
  int64_t first = 0, blocks = 0;
  for (size_t c = 0; c < columns.size(); ++c) {
    kept.push_back(as_contiguous(columns[c]));
    const IdColumn::Write write =
        dispatch_integer(columns[c].scalar_type(), "column_ids", "columns",
                         [](auto tag) -> IdColumn::Write { return &write_ids<typename decltype(tag)::type>; });
    const int64_t size = columns[c].numel();
    parts.push_back(
        {kept.back().const_data_ptr(), size, first, blocks, num_buckets[c], static_cast<Missing>(missing[c]), write});
    first += size;
    blocks += (size + kColumnBlock - 1) / kColumnBlock;
  }
  Tensor ids = new_empty(columns[0], {count}, ScalarType::Long);
  Tensor keep = new_empty(columns[0], {can_be_missing(missing) ? count : 0}, ScalarType::Bool);
  Tensor num_missing = new_empty(columns[0], {}, ScalarType::Long);
  int64_t* const to = ids.mutable_data_ptr<int64_t>();
  bool* const marks = can_be_missing(missing) ? keep.mutable_data_ptr<bool>() : nullptr;
  std::atomic<int64_t> missing_in_all{0};
  const bool hashes = std::any_of(num_buckets.begin(), num_buckets.end(), [](int64_t each) { return each > 0; });
  parallel_for(0, blocks, hashes ? 4 : kWorkPerThread / kColumnBlock, [&](int64_t begin, int64_t end) {
    int64_t gone = 0;
    auto part = std::upper_bound(parts.begin(), parts.end(), begin,
                                 [](int64_t block, const IdColumn& each) { return block < each.first_block; }) -
                1;
    for (int64_t block = begin; block < end; ++block) {
      while (part + 1 != parts.end() && (part + 1)->first_block <= block) ++part;
      const int64_t start = (block - part->first_block) * kColumnBlock, at = part->first + start;
      const int64_t n = std::min(kColumnBlock, part->size - start);
      gone += part->write(*part, start, n, to + at, marks == nullptr ? nullptr : marks + at);
    }
    missing_in_all.fetch_add(gone, std::memory_order_relaxed);
  });
  *num_missing.mutable_data_ptr<int64_t>() = missing_in_all.load();
  return {ids, keep, num_missing};
}

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
  TSR_IMPL(m, "column_ids", &tsr::column_ids_cpu);
}
