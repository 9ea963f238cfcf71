// CPU doors of the hash family's operators on byte strings: checks and threads. The loop over strings is
// hash_string_loops.h, once per instruction set; the arithmetic is csrc/hash_<function>.h.
#include "../hash.h"
#include "hash_moves.h"
#include "level.h"

namespace tsr {
namespace {

// Strings whose offsets are checked, then hashed: the offsets stay in the first-level cache.
constexpr int64_t kStringBlock = 1024;

struct ByteStrings {
  const uint8_t* bytes;
  int64_t size;
  const int64_t* offsets;
};

#define TSR_ISA_BODY "hash_string_loops.h"
#include "isa_foreach.h"

// Whether string i may be read: each such look is enough for its own string, whatever the other offsets are.
bool string_is_valid(const ByteStrings& s, int64_t i) {
  return s.offsets[i] >= 0 && s.offsets[i + 1] >= s.offsets[i] && s.offsets[i + 1] <= s.size;
}

bool strings_are_valid(const ByteStrings& s, int64_t begin, int64_t end) {
  bool decreasing = false;
  for (int64_t i = begin; i < end; ++i) decreasing |= s.offsets[i + 1] < s.offsets[i];
  return !decreasing && s.offsets[begin] >= 0 && s.offsets[end] <= s.size;
}

[[noreturn]] void throw_bad_offset(const char* op, const ByteStrings& s, int64_t i) {
  TSR_CHECK_VALUE(s.offsets[i] >= 0, op, ": offsets must be >= 0, got ", s.offsets[i], " at position ", i);
  TSR_CHECK_VALUE(s.offsets[i + 1] >= s.offsets[i], op, ": offsets must not decrease, got ", s.offsets[i + 1],
                  " at position ", i + 1, " after ", s.offsets[i]);
  throw std::invalid_argument(message(op, ": offsets must be at most ", s.size, ", the number of bytes, got ",
                                      s.offsets[i + 1], " at position ", i + 1));
}

template <class Hash, class Result>
Tensor hash_byte_strings(const char* op, const Tensor& bytes, const Tensor& offsets, const Hash& hash,
                         const Result& result) {
  check_hash_strings(op, bytes, offsets);
  const Tensor text = as_contiguous(bytes), bounds = as_contiguous(offsets);
  const ByteStrings strings{text.const_data_ptr<uint8_t>(), text.size(0), bounds.const_data_ptr<int64_t>()};
  const int64_t n = bounds.size(0) - 1, only = strings.offsets[0];
  TSR_CHECK_VALUE(n > 0 || (only >= 0 && only <= strings.size), op, ": offsets must be in [0, ", strings.size,
                  "], the number of bytes, got ", only, " at position 0");
  Tensor out = new_empty(bytes, {n}, ScalarType::Long);
  int64_t* const results = out.mutable_data_ptr<int64_t>();
  using Loop = void (*)(const Hash&, const Result&, const ByteStrings&, int64_t, int64_t, int64_t*);
  const Loop hash_strings = pick_level<Loop>(&baseline::hash_strings, &avx2::hash_strings, &avx512::hash_strings);
  FirstPosition first_bad;
  parallel_for(0, n, kStringBlock, [&](int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += kStringBlock) {
      const int64_t stop = std::min(start + kStringBlock, end);
      if (strings_are_valid(strings, start, stop)) {
        hash_strings(hash, result, strings, start, stop, results);
        continue;
      }
      while (start < stop && string_is_valid(strings, start)) ++start;
      return first_bad.report(start);
    }
  });
  if (first_bad.found()) throw_bad_offset(op, strings, first_bad.position());
  return out;
}

}  // namespace

Tensor string_fingerprint64_cpu(const Tensor& bytes, const Tensor& offsets) {
  return hash_byte_strings("string_fingerprint64", bytes, offsets, FarmHash(), HashBits());
}

Tensor string_to_hash_bucket_fast_cpu(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets) {
  const char* op = "string_to_hash_bucket_fast";
  return hash_byte_strings(op, bytes, offsets, FarmHash(), checked_buckets(op, num_buckets));
}

Tensor string_to_hash_bucket_strong_cpu(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets, int64_t key0,
                                        int64_t key1) {
  const char* op = "string_to_hash_bucket_strong";
  return hash_byte_strings(op, bytes, offsets, SipHash(key0, key1), checked_buckets(op, num_buckets));
}

Tensor string_to_hash_bucket_cpu(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets) {
  const char* op = "string_to_hash_bucket";
  return hash_byte_strings(op, bytes, offsets, MurmurHash(), checked_buckets(op, num_buckets));
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "string_fingerprint64", &tsr::string_fingerprint64_cpu);
  TSR_IMPL(m, "string_to_hash_bucket_fast", &tsr::string_to_hash_bucket_fast_cpu);
  TSR_IMPL(m, "string_to_hash_bucket_strong", &tsr::string_to_hash_bucket_strong_cpu);
  TSR_IMPL(m, "string_to_hash_bucket", &tsr::string_to_hash_bucket_cpu);
}
