// CUDA doors of the hash family's operators on integers.
#include "../cuda.h"
#include "../hash.h"
#include "hash_words.cuh"

namespace tsr {
namespace {

// ---- FarmHash of integers -------------------------------------------------------------------------------------------
// What decimal_words() and fingerprint64_of_text() of hash.h do, in 32-bit words: each step on a 64-bit one would take
// the device two instructions.

// The text of v < 10^4, its first digit lowest: two digits to a half, then one to a byte.
__device__ inline uint32_t four_digits(uint32_t v) {
  const uint32_t hundreds = v * 5243 >> 19;
  const uint32_t twos = (v << 16) - hundreds * ((100 << 16) - 1);  // hundreds | (v - hundreds * 100) << 16
  const uint32_t tens = (twos * 103 >> 10) & 0x000f000f;
  return (twos << 8) - tens * ((10 << 8) - 1) + static_cast<uint32_t>(kEightZeros);  // tens | (twos - tens * 10) << 8
}

__device__ inline uint64_t sign_at(bool negative, uint32_t bits) { return negative ? kZeroToMinus << bits : 0; }

// Text of 1 to 7 bytes.
__device__ inline uint64_t hash_short(uint32_t magnitude, bool negative) {
  const uint32_t upper = magnitude / 10000;
  const uint32_t n = 1 + negative + (magnitude >= 10) + (magnitude >= 100) + (magnitude >= 1000) +
                     (magnitude >= 10000) + (magnitude >= 100000) + (magnitude >= 1000000);
  const uint32_t last = four_digits(magnitude - upper * 10000);
  const uint32_t before = 64 - n * 8;  // bits of the two words before the text
  const uint64_t text = (pair(four_digits(upper), last) ^ sign_at(negative, before)) >> before;
  if (n >= 4) return farm_4_to_7(static_cast<uint32_t>(text), static_cast<uint32_t>(text >> (n * 8 - 32)), n);
  return farm_1_to_3(static_cast<uint8_t>(text), static_cast<uint8_t>(text >> (n / 2 * 8)),
                     static_cast<uint8_t>(last >> 24), n);
}

// Integers of 32 bits: at most 11 bytes of text.
__device__ inline uint64_t hash_narrow(uint32_t magnitude, bool negative) {
  if (magnitude < (negative ? 1000000 : 10000000)) return hash_short(magnitude, negative);
  const uint32_t upper = magnitude / 10000, top = upper / 10000;
  const uint32_t w0 = four_digits(top), w1 = four_digits(upper - top * 10000);
  const uint32_t w2 = four_digits(magnitude - upper * 10000);
  const uint32_t n = 7 + negative + (magnitude >= 10000000) + (magnitude >= 100000000) + (magnitude >= 1000000000);
  const uint32_t before = 96 - n * 8;  // 8 to 32
  const uint64_t sign = sign_at(negative, before);
  const uint32_t s0 = w0 ^ static_cast<uint32_t>(sign), s1 = w1 ^ static_cast<uint32_t>(sign >> 32);
  return farm_8_to_16(pair(word_at(s0, s1, before), word_at(s1, w2, before)), pair(s1, w2), n);
}

// v -> v / 10^16, leaving the remainder in v. The estimate from the upper half of v, with 10^-16 rounded down to 32
// bits, is the quotient or 1 less.
__device__ inline uint32_t divide_by_1e16(uint64_t& v) {
  constexpr uint64_t divisor = 10000000000000000;
  uint32_t quotient = static_cast<uint32_t>((v >> 32) * 3868562622 >> 53);
  v -= quotient * divisor;
  if (v >= divisor) {
    v -= divisor;
    ++quotient;
  }
  return quotient;
}

// v / 10^8 by the same means, and the remainder; v < 10^16.
__device__ inline uint32_t divide_by_1e8(uint64_t v, uint32_t& remainder) {
  constexpr uint32_t divisor = 100000000;
  uint32_t quotient = static_cast<uint32_t>((v >> 22) * 2882303761 >> 36);
  remainder = static_cast<uint32_t>(v) - quotient * divisor;
  if (remainder >= divisor) {
    remainder -= divisor;
    ++quotient;
  }
  return quotient;
}

// Integers beyond 32 bits: 10 to 20 bytes of text.
__device__ inline uint64_t hash_wide(uint64_t magnitude, bool negative) {
  const uint32_t top = divide_by_1e16(magnitude);
  uint32_t lower;
  const uint32_t upper = divide_by_1e8(magnitude, lower);
  const uint32_t upper_fours = upper / 10000, lower_fours = lower / 10000;
  const uint32_t w1 = four_digits(upper_fours), w2 = four_digits(upper - upper_fours * 10000);
  const uint32_t w3 = four_digits(lower_fours), w4 = four_digits(lower - lower_fours * 10000);
  const uint64_t last = pair(w3, w4);
  if (top != 0 || (negative && upper >= 10000000)) {
    const uint32_t n = 16 + negative + (top >= 1) + (top >= 10) + (top >= 100) + (top >= 1000);
    const uint32_t before = 160 - n * 8;  // 0 to 24
    const uint32_t w0 = four_digits(top) ^ static_cast<uint32_t>(sign_at(negative, before));
    return farm_17_to_32(pair(word_at(w0, w1, before), word_at(w1, w2, before)),
                         pair(word_at(w2, w3, before), word_at(w3, w4, before)), pair(w1, w2), last, n);
  }
  const uint64_t digits = pair(w1, w2);                              // not all '0'
  const uint32_t before = leading_zeros(digits) * 8 - negative * 8;  // 0 to 48
  const uint64_t text = digits ^ sign_at(negative, before);
  const uint64_t first = before == 0 ? text : text >> before | last << (64 - before);
  return farm_8_to_16(first, last, 16 - before / 8);
}

// An integer as its magnitude and its sign.
template <class Bits>
__device__ inline uint64_t farm_of_magnitude(Bits magnitude, bool negative) {
  if constexpr (sizeof(Bits) == 8) {
    if (magnitude >> 32 != 0) return hash_wide(magnitude, negative);
  }
  return hash_narrow(static_cast<uint32_t>(magnitude), negative);
}

template <class T>
__device__ inline uint64_t hash_of_integer(const FarmHash&, T x) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  bool negative = false;
  if constexpr (std::is_signed_v<T>) negative = x < 0;
  const Bits bits = static_cast<Bits>(x), magnitude = negative ? 0 - bits : bits;
  return farm_of_magnitude(magnitude, negative);
}

// ---- Any hash -------------------------------------------------------------------------------------------------------

template <class Hash, class T>
__device__ inline uint64_t hash_of_integer(const Hash& hash, T x) {
  const bool below_zero = std::is_signed_v<T> && x < T(0);
  const uint64_t word = static_cast<uint64_t>(static_cast<widened_t<T>>(x));
  return hash.of_text(decimal_words(below_zero ? 0 - word : word, below_zero));
}

// One thread per integer; its decimal text never leaves the registers.
template <class T, class Hash, class Result>
__global__ void hash_integers_kernel(const T* x, int64_t n, Hash hash, Result result, int64_t* out) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) out[i] = result(hash_of_integer(hash, x[i]));
}

template <class Hash, class Result>
Tensor hash_integers(const char* op, const Tensor& x, const Hash& hash, const Result& result) {
  check_hash_integers(op, x);
  DeviceCall call(op, x);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < x.dim(); ++d) shape.push_back(x.size(d));
  const Tensor out = call.empty(shape, ScalarType::Long);
  dispatch_integer(x.scalar_type(), call.op(), "x", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(call, one_thread_each(x.numel()), hash_integers_kernel<T, Hash, Result>, call.data<T>(x), x.numel(), hash,
           result, static_cast<int64_t*>(out.data_ptr()));
  });
  return out;
}

Tensor fingerprint64_cuda(const Tensor& x) { return hash_integers("fingerprint64", x, FarmHash(), HashBits()); }

Tensor to_hash_bucket_fast_cuda(const Tensor& x, int64_t num_buckets) {
  const char* op = "to_hash_bucket_fast";
  return hash_integers(op, x, FarmHash(), checked_buckets(op, num_buckets));
}

Tensor to_hash_bucket_strong_cuda(const Tensor& x, int64_t num_buckets, int64_t key0, int64_t key1) {
  const char* op = "to_hash_bucket_strong";
  return hash_integers(op, x, SipHash(key0, key1), checked_buckets(op, num_buckets));
}

Tensor to_hash_bucket_cuda(const Tensor& x, int64_t num_buckets) {
  const char* op = "to_hash_bucket";
  return hash_integers(op, x, MurmurHash(), checked_buckets(op, num_buckets));
}

// ---- Columns --------------------------------------------------------------------------------------------------------

// Values that a block takes at a time, of one column.
constexpr int64_t kColumnChunk = 8 * kThreads;
// A kernel takes its columns as one argument, of which it can have 4 kB.
constexpr int kColumnsPerLaunch = 60;

// An integer of any dtype, in 64 bits.
struct AnyInteger {
  uint64_t bits;
  bool is_signed;

  template <class T>
  __device__ static AnyInteger at(const void* values, int64_t i) {
    const T value = static_cast<const T*>(values)[i];
    return {static_cast<uint64_t>(static_cast<widened_t<T>>(value)), std::is_signed_v<T>};
  }
  __device__ bool is_negative() const { return is_signed && static_cast<int64_t>(bits) < 0; }
  __device__ uint64_t farm_hash() const {
    const bool negative = is_negative();
    return farm_of_magnitude(negative ? ~bits + 1 : bits, negative);
  }
};

struct IdColumn {
  const void* values;
  int64_t size;
  int64_t first;        // where its ids begin
  int64_t first_chunk;  // of the launch's chunks
  BucketRemainder bucket{1};
  Missing missing;
  ScalarType dtype;
  bool is_hashed;

  __device__ AnyInteger at(int64_t i) const {
    switch (dtype) {
      case ScalarType::Byte:
        return AnyInteger::at<uint8_t>(values, i);
      case ScalarType::Char:
        return AnyInteger::at<int8_t>(values, i);
      case ScalarType::Short:
        return AnyInteger::at<int16_t>(values, i);
      case ScalarType::Int:
        return AnyInteger::at<int32_t>(values, i);
      case ScalarType::UInt16:
        return AnyInteger::at<uint16_t>(values, i);
      case ScalarType::UInt32:
        return AnyInteger::at<uint32_t>(values, i);
      case ScalarType::UInt64:
        return AnyInteger::at<uint64_t>(values, i);
      default:
        return AnyInteger::at<int64_t>(values, i);
    }
  }
};

struct IdColumns {
  IdColumn at[kColumnsPerLaunch];
  int count = 0;

  // The column of a chunk: the last that begins at it or before.
  __device__ const IdColumn& of(int64_t chunk) const {
    int begin = 0, end = count;
    while (end - begin > 1) {
      const int middle = (begin + end) / 2;
      (at[middle].first_chunk <= chunk ? begin : end) = middle;
    }
    return at[begin];
  }
};

// A block takes a chunk of one column, a thread every kThreads-th value of it. keep may be null.
__global__ void column_ids_kernel(IdColumns columns, int64_t chunks, int64_t* ids, bool* keep,
                                  unsigned long long* num_missing) {
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const IdColumn& column = columns.of(chunk);
    const int64_t begin = (chunk - column.first_chunk) * kColumnChunk;
    const int64_t end = begin + kColumnChunk < column.size ? begin + kColumnChunk : column.size;
    unsigned long long missing = 0;
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
      const AnyInteger value = column.at(i);
      ids[column.first + i] = column.is_hashed ? column.bucket(value.farm_hash()) : id_of(value.bits, value.is_signed);
      if (keep == nullptr) continue;
      const bool gone = value.is_negative() && is_missing(column.missing, static_cast<int64_t>(value.bits));
      keep[column.first + i] = !gone;
      missing += gone;
    }
    // Few are missing: a sum over the warp first would cost the others more.
    if (missing > 0) atomicAdd(num_missing, missing);
  }
}

std::tuple<Tensor, Tensor, Tensor> column_ids_cuda(const std::vector<Tensor>& columns,
                                                   const std::vector<int64_t>& num_buckets,
                                                   const std::vector<int64_t>& missing) {
  const int64_t count = check_column_ids(columns, num_buckets, missing);
  DeviceCall call("column_ids", columns[0]);
  const bool marks = can_be_missing(missing);
  const Tensor ids = call.empty({count}, ScalarType::Long);
  const Tensor keep = call.empty({marks ? count : 0}, ScalarType::Bool);
  const Tensor num_missing = call.empty({}, ScalarType::Long);
  fill_bytes(call.stream(), num_missing.data_ptr(), 0, sizeof(int64_t));
  IdColumns part;
  int64_t first = 0, chunks = 0;
  for (size_t c = 0; c < columns.size(); ++c) {
    const Tensor& x = columns[c];
    part.at[part.count++] = {call.data(x),
                             x.numel(),
                             first,
                             chunks,
                             BucketRemainder(std::max<int64_t>(num_buckets[c], 1)),
                             static_cast<Missing>(missing[c]),
                             x.scalar_type(),
                             num_buckets[c] > 0};
    first += x.numel();
    chunks += (x.numel() + kColumnChunk - 1) / kColumnChunk;
    if (part.count == kColumnsPerLaunch || c + 1 == columns.size()) {
      launch(call, {std::min(chunks, kMaxBlocks)}, column_ids_kernel, part, chunks,
             static_cast<int64_t*>(ids.data_ptr()), marks ? static_cast<bool*>(keep.data_ptr()) : nullptr,
             static_cast<unsigned long long*>(num_missing.data_ptr()));
      part.count = 0;
      chunks = 0;
    }
  }
  return {ids, keep, num_missing};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "fingerprint64", &tsr::fingerprint64_cuda);
  TSR_IMPL(m, "to_hash_bucket_fast", &tsr::to_hash_bucket_fast_cuda);
  TSR_IMPL(m, "to_hash_bucket_strong", &tsr::to_hash_bucket_strong_cuda);
  TSR_IMPL(m, "to_hash_bucket", &tsr::to_hash_bucket_cuda);
  TSR_IMPL(m, "column_ids", &tsr::column_ids_cuda);
}
