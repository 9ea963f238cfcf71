#include "../cuda.h"
#include "../hash.h"

namespace tsr {
namespace {

// ---- Integers -------------------------------------------------------------------------------------------------------
// What decimal_words() and fingerprint64_of_text() of hash.h do, in 32-bit words: each step on a 64-bit one would take
// the device two instructions.

// The text of v < 10^4, its first digit lowest: two digits to a half, then one to a byte.
__device__ inline uint32_t four_digits(uint32_t v) {
  const uint32_t hundreds = v * 5243 >> 19;
  const uint32_t twos = (v << 16) - hundreds * ((100 << 16) - 1);  // hundreds | (v - hundreds * 100) << 16
  const uint32_t tens = (twos * 103 >> 10) & 0x000f000f;
  return (twos << 8) - tens * ((10 << 8) - 1) + static_cast<uint32_t>(kEightZeros);  // tens | (twos - tens * 10) << 8
}

__device__ inline uint64_t pair(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }

// The word that begins `bits` after the start of low; at most 32.
__device__ inline uint32_t word_at(uint32_t low, uint32_t high, uint32_t bits) {
  return static_cast<uint32_t>(pair(low, high) >> bits);
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

template <class T>
__device__ inline uint64_t hash_of_text(T x) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  bool negative = false;
  if constexpr (std::is_signed_v<T>) negative = x < 0;
  const Bits bits = static_cast<Bits>(x), magnitude = negative ? 0 - bits : bits;
  if constexpr (sizeof(T) == 8) {
    if (magnitude >> 32 != 0) return hash_wide(magnitude, negative);
  }
  return hash_narrow(static_cast<uint32_t>(magnitude), negative);
}

// One thread per integer; its decimal text never leaves the registers.
template <class T>
__global__ void to_hash_bucket_kernel(const T* x, int64_t n, BucketRemainder bucket, int64_t* out) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) out[i] = bucket(hash_of_text(x[i]));
}

Tensor to_hash_bucket_fast_cuda(const Tensor& x, int64_t num_buckets) {
  DeviceCall call("to_hash_bucket_fast", x);
  check_to_hash_bucket_fast(x, num_buckets);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < x.dim(); ++d) shape.push_back(x.size(d));
  const Tensor out = call.empty(shape, ScalarType::Long);
  dispatch_integer(x.scalar_type(), call.op(), "x", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(call, one_thread_each(x.numel()), to_hash_bucket_kernel<T>, call.data<T>(x), x.numel(),
           BucketRemainder(num_buckets), static_cast<int64_t*>(out.data_ptr()));
  });
  return out;
}

// ---- Strings --------------------------------------------------------------------------------------------------------

// Bytes at any address, read by the aligned words that hold them, up to 3 bytes before and 4 behind what is asked for:
// the device would load one byte at a time. See Text in hash.h.
class AlignedText {
 public:
  __device__ explicit AlignedText(const uint8_t* s)
      : words_(reinterpret_cast<const uint32_t*>(s - reinterpret_cast<uintptr_t>(s) % 4)),
        offset_(reinterpret_cast<uintptr_t>(s) % 4) {}

  __device__ AlignedText operator+(uint64_t n) const { return {words_ + (offset_ + n) / 4, (offset_ + n) % 4}; }
  __device__ uint8_t operator[](uint64_t i) const { return reinterpret_cast<const uint8_t*>(words_)[offset_ + i]; }

  friend __device__ uint32_t load32(AlignedText s) { return s.word(0); }
  friend __device__ uint64_t load64(AlignedText s) { return pair(s.word(0), s.word(1)); }

 private:
  __device__ AlignedText(const uint32_t* words, uint64_t offset) : words_(words), offset_(offset) {}
  __device__ uint32_t word(int i) const {
    return word_at(words_[i], words_[i + 1], static_cast<uint32_t>(offset_) * 8);
  }

  const uint32_t* words_;
  uint64_t offset_;  // below 4
};

// Of bytes[begin : end]. Nothing outside bytes [size] is read: around the first and the last strings there may be no
// room for whole words.
__device__ inline uint64_t hash_of_bytes(const uint8_t* bytes, int64_t size, int64_t begin, int64_t end) {
  const uint64_t n = static_cast<uint64_t>(end - begin);
  if (begin >= 4 && end + 4 <= size) return fingerprint64(AlignedText(bytes + begin), n);
  return fingerprint64(bytes + begin, n);
}

// One thread per string. Offsets that decrease or leave the bytes are reported, and their string is not read.
__global__ void string_to_hash_bucket_kernel(const uint8_t* bytes, int64_t size, const int64_t* offsets, int64_t n,
                                             BucketRemainder bucket, ErrorSink errors, int64_t* out) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    const int64_t begin = offsets[i], end = offsets[i + 1];
    if (i == 0 && begin < 0) {
      errors.report(Argument::kOffsets, Fault::kBeforeBytes, i, begin, 0);
    } else if (end < begin) {
      errors.report(Argument::kOffsets, Fault::kUnsortedBytes, i + 1, end, begin);
    } else if (end > size) {
      errors.report(Argument::kOffsets, Fault::kBeyondBytes, i + 1, end, size);
    }
    const bool readable = begin >= 0 && begin <= end && end <= size;
    out[i] = readable ? bucket(hash_of_bytes(bytes, size, begin, end)) : 0;
  }
  if (n == 0 && thread_index() == 0 && (offsets[0] < 0 || offsets[0] > size)) {
    errors.report(Argument::kOffsets, Fault::kOutsideBytes, 0, offsets[0], size);
  }
}

Tensor string_to_hash_bucket_fast_cuda(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets) {
  DeviceCall call("string_to_hash_bucket_fast", bytes);
  check_string_to_hash_bucket_fast(bytes, offsets, num_buckets);
  TSR_CHECK_VALUE(offsets.is_cuda() == bytes.is_cuda() && offsets.get_device_index() == bytes.get_device_index(),
                  call.op(), ": offsets must be on the device of bytes");
  const int64_t n = offsets.size(0) - 1;
  const Tensor out = call.empty({n}, ScalarType::Long);
  launch(call, one_thread_each(std::max<int64_t>(n, 1)), string_to_hash_bucket_kernel, call.data<uint8_t>(bytes),
         bytes.size(0), call.data<int64_t>(offsets), n, BucketRemainder(num_buckets), call.errors(),
         static_cast<int64_t*>(out.data_ptr()));
  return out;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "to_hash_bucket_fast", &tsr::to_hash_bucket_fast_cuda);
  TSR_IMPL(m, "string_to_hash_bucket_fast", &tsr::string_to_hash_bucket_fast_cuda);
}
