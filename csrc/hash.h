// hash: FarmHash Fingerprint64 of integers' decimal text and of byte strings, reduced to buckets.
//
// to_hash_bucket_fast(x [...], num_buckets) -> int64 [...]: Fingerprint64(decimal text of x[i]) mod num_buckets, where
// the
//   text is what tf.strings.as_string gives ('-' for negatives, no padding); the dtype does not matter.
// string_to_hash_bucket_fast(bytes [M] uint8, offsets [N + 1] int64, num_buckets) -> int64 [N]: the same of
//   bytes[offsets[i] : offsets[i + 1]], raw (NUL and invalid UTF-8 count); this is Arrow's layout of strings.
// * x: every integer dtype, any shape. The hash is an unsigned 64-bit number and the remainder an unsigned one.
// * Errors: ValueError for num_buckets < 1, a wrong dtype or rank, offsets that decrease or leave [0, M].
// * Not differentiable. Deterministic; same on every machine (the text and the words are read as little-endian).
// Source: tf.strings.to_hash_bucket_fast (FarmHash, farmhashna::Hash64, whose constants are Google's, MIT licence).
#pragma once
#include "abi.h"
#include "dispatch.h"

namespace tsr {

// ---- Words ----------------------------------------------------------------------------------------------------------

TSR_HOST_DEVICE inline uint32_t load32(const uint8_t* s) {
  return static_cast<uint32_t>(s[0]) | static_cast<uint32_t>(s[1]) << 8 | static_cast<uint32_t>(s[2]) << 16 |
         static_cast<uint32_t>(s[3]) << 24;
}

// Little-endian on every machine; compilers make one load of it where that is right.
TSR_HOST_DEVICE inline uint64_t load64(const uint8_t* s) {
  return static_cast<uint64_t>(load32(s)) | static_cast<uint64_t>(load32(s + 4)) << 32;
}

TSR_HOST_DEVICE inline uint64_t rotate_right(uint64_t v, int bits) { return v >> bits | v << (64 - bits); }

// The position of the lowest bit that is set; v is not 0.
TSR_HOST_DEVICE inline int lowest_bit(uint64_t v) {
#ifdef __CUDA_ARCH__
  return __ffsll(static_cast<long long>(v)) - 1;
#else
  return __builtin_ctzll(v);
#endif
}

// The upper 64 bits of the product.
TSR_HOST_DEVICE inline uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// ---- FarmHash Fingerprint64 -----------------------------------------------------------------------------------------
// One function per range of lengths. Those up to 32 bytes take the words they read, not their address: the text of an
// integer has at most 20 bytes and never needs to leave the registers. The others take the bytes as a Text: a pointer,
// or what has a pointer's `s + k`, `s[k]`, load32(s) and load64(s).

constexpr uint64_t kFarm0 = 0xc3a5c85c97cb3127ull;
constexpr uint64_t kFarm1 = 0xb492b66fbe98f273ull;
constexpr uint64_t kFarm2 = 0x9ae16a3b2f90404full;

TSR_HOST_DEVICE inline uint64_t farm_shift_mix(uint64_t v) { return v ^ v >> 47; }

TSR_HOST_DEVICE inline uint64_t farm_mix16(uint64_t u, uint64_t v, uint64_t multiplier) {
  const uint64_t a = farm_shift_mix((u ^ v) * multiplier);
  const uint64_t b = farm_shift_mix((v ^ a) * multiplier);
  return b * multiplier;
}

TSR_HOST_DEVICE inline uint64_t farm_multiplier(uint64_t n) { return kFarm2 + n * 2; }

TSR_HOST_DEVICE inline uint64_t farm_1_to_3(uint8_t first, uint8_t middle, uint8_t last, uint64_t n) {
  const uint32_t y = first + (static_cast<uint32_t>(middle) << 8);
  const uint32_t z = static_cast<uint32_t>(n) + (static_cast<uint32_t>(last) << 2);
  return farm_shift_mix(y * kFarm2 ^ z * kFarm0) * kFarm2;
}

// first, last: the first and the last 4 bytes; they overlap below 8. Likewise below.
TSR_HOST_DEVICE inline uint64_t farm_4_to_7(uint32_t first, uint32_t last, uint64_t n) {
  return farm_mix16(n + (static_cast<uint64_t>(first) << 3), last, farm_multiplier(n));
}

TSR_HOST_DEVICE inline uint64_t farm_8_to_16(uint64_t first, uint64_t last, uint64_t n) {
  const uint64_t multiplier = farm_multiplier(n);
  const uint64_t a = first + kFarm2;
  const uint64_t c = rotate_right(last, 37) * multiplier + a;
  const uint64_t d = (rotate_right(a, 25) + last) * multiplier;
  return farm_mix16(c, d, multiplier);
}

// before_last: the 8 bytes that end where `last` begins.
TSR_HOST_DEVICE inline uint64_t farm_17_to_32(uint64_t first, uint64_t second, uint64_t before_last, uint64_t last,
                                              uint64_t n) {
  const uint64_t multiplier = farm_multiplier(n);
  const uint64_t a = first * kFarm1;
  const uint64_t c = last * multiplier;
  const uint64_t d = before_last * kFarm2;
  return farm_mix16(rotate_right(a + second, 43) + rotate_right(c, 30) + d, a + rotate_right(second + kFarm2, 18) + c,
                    multiplier);
}

template <class Text>
TSR_HOST_DEVICE inline uint64_t farm_33_to_64(Text s, uint64_t n) {
  const uint64_t multiplier = farm_multiplier(n);
  const uint64_t a = load64(s) * kFarm2;
  const uint64_t b = load64(s + 8);
  const uint64_t c = load64(s + (n - 8)) * multiplier;
  const uint64_t d = load64(s + (n - 16)) * kFarm2;
  const uint64_t y = rotate_right(a + b, 43) + rotate_right(c, 30) + d;
  const uint64_t z = farm_mix16(y, a + rotate_right(b + kFarm2, 18) + c, multiplier);
  const uint64_t e = load64(s + 16) * multiplier;
  const uint64_t f = load64(s + 24);
  const uint64_t g = (y + load64(s + (n - 32))) * multiplier;
  const uint64_t h = (z + load64(s + (n - 24))) * multiplier;
  return farm_mix16(rotate_right(e + f, 43) + rotate_right(g, 30) + h, e + rotate_right(f + a, 18) + g, multiplier);
}

// What farm_long carries from one block of 64 bytes to the next.
struct FarmState {
  uint64_t x, y, z;
  uint64_t v[2], w[2];
};

// Mixes 32 bytes into a pair of words that starts as (a, b).
template <class Text>
TSR_HOST_DEVICE inline void farm_mix32(Text s, uint64_t a, uint64_t b, uint64_t pair[2]) {
  a += load64(s);
  b = rotate_right(b + a + load64(s + 24), 21);
  const uint64_t c = a;
  a += load64(s + 8) + load64(s + 16);
  b += rotate_right(a, 44);
  pair[0] = a + load64(s + 24);
  pair[1] = b + c;
}

// One block of 64 bytes. The last block differs from the others in its multiplier and in counting two words 9 times.
template <class Text>
TSR_HOST_DEVICE inline void farm_block(Text s, FarmState& state, uint64_t multiplier, uint64_t weight) {
  uint64_t x = rotate_right(state.x + state.y + state.v[0] + load64(s + 8), 37) * multiplier;
  uint64_t y = rotate_right(state.y + state.v[1] + load64(s + 48), 42) * multiplier;
  uint64_t z = rotate_right(state.z + state.w[0], 33) * multiplier;
  x ^= state.w[1] * weight;
  y += state.v[0] * weight + load64(s + 40);
  const uint64_t w1 = state.w[1];
  farm_mix32(s, state.v[1] * multiplier, x + state.w[0], state.v);
  farm_mix32(s + 32, z + w1, y + load64(s + 16), state.w);
  state.x = z;
  state.y = y;
  state.z = x;
}

template <class Text>
TSR_HOST_DEVICE inline uint64_t farm_long(Text s, uint64_t n) {
  constexpr uint64_t seed = 81;
  const uint64_t y = seed * kFarm1 + 113;
  FarmState state{seed * kFarm2 + load64(s), y, farm_shift_mix(y * kFarm2 + 113) * kFarm2, {0, 0}, {0, 0}};
  const uint64_t rest = (n - 1) & 63;  // the last block holds 1 to 64 bytes that the others do not
  for (uint64_t at = 0; at < n - 1 - rest; at += 64) farm_block(s + at, state, kFarm1, 1);
  const uint64_t multiplier = kFarm1 + ((state.z & 0xff) << 1);
  state.w[0] += rest;
  state.v[0] += state.w[0];
  state.w[0] += state.v[0];
  farm_block(s + (n - 64), state, multiplier, 9);
  return farm_mix16(farm_mix16(state.v[0], state.w[0], multiplier) + farm_shift_mix(state.y) * kFarm0 + state.z,
                    farm_mix16(state.v[1], state.w[1], multiplier) + state.x, multiplier);
}

// FarmHash Fingerprint64 of the n bytes at s.
template <class Text>
TSR_HOST_DEVICE inline uint64_t fingerprint64(Text s, uint64_t n) {
  if (n > 64) return farm_long(s, n);
  if (n > 32) return farm_33_to_64(s, n);
  if (n > 16) return farm_17_to_32(load64(s), load64(s + 8), load64(s + (n - 16)), load64(s + (n - 8)), n);
  if (n >= 8) return farm_8_to_16(load64(s), load64(s + (n - 8)), n);
  if (n >= 4) return farm_4_to_7(load32(s), load32(s + (n - 4)), n);
  if (n > 0) return farm_1_to_3(s[0], s[n >> 1], s[n - 1], n);
  return kFarm2;
}

// ---- Decimal text ---------------------------------------------------------------------------------------------------

// The text of an integer, as the last `length` bytes of 24: words[0] holds the first 8, the first byte lowest. The
// bytes before the text are '0', but for the sign's.
struct DecimalText {
  uint64_t words[3];
  int length;
};

constexpr uint64_t kEightZeros = 0x3030303030303030ull;  // "00000000"
constexpr uint64_t kZeroToMinus = '0' ^ '-';

// The 8 decimal digits of v < 10^8 as text: four digits in each half, then two in each quarter, then one in each byte,
// by multiplications with rounded reciprocals.
TSR_HOST_DEVICE inline uint64_t eight_digits(uint64_t v) {
  const uint64_t upper = v * 3518437209u >> 45;  // v / 10000
  const uint64_t fours = upper | (v - upper * 10000) << 32;
  const uint64_t hundreds = (fours * 10486 >> 20) & 0x0000007f0000007full;
  const uint64_t twos = hundreds | (fours - hundreds * 100) << 16;
  const uint64_t tens = (twos * 103 >> 10) & 0x000f000f000f000full;
  return (tens | (twos - tens * 10) << 8) | kEightZeros;
}

// Leading '0' in a word of digits that are not all '0'.
TSR_HOST_DEVICE inline int leading_zeros(uint64_t digits) { return lowest_bit(digits ^ kEightZeros) >> 3; }

TSR_HOST_DEVICE inline DecimalText decimal_words(uint64_t magnitude, bool negative) {
  const uint64_t upper = magnitude / 10000000000000000ull;  // 10^16
  const uint64_t lower = magnitude - upper * 10000000000000000ull;
  const uint64_t middle = lower / 100000000u;
  const uint64_t last = lower - middle * 100000000u;
  DecimalText text{{eight_digits(upper), eight_digits(middle), eight_digits(last)}, 1};
  if (upper != 0) {
    text.length = 24 - leading_zeros(text.words[0]);
  } else if (middle != 0) {
    text.length = 16 - leading_zeros(text.words[1]);
  } else if (last != 0) {
    text.length = 8 - leading_zeros(text.words[2]);
  }
  if (negative) {
    const int place = 24 - ++text.length;
    const uint64_t flip = kZeroToMinus << ((place & 7) << 3);
    // Written out: an indexed word would move the text from registers to memory.
    text.words[0] ^= place < 8 ? flip : 0;
    text.words[1] ^= place >= 8 && place < 16 ? flip : 0;
    text.words[2] ^= place >= 16 ? flip : 0;
  }
  return text;
}

// 64 bits wide, keeping the sign: the text of an integer does not depend on its type.
template <class T>
using widened_t = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;

// fingerprint64 of the decimal text, without memory.
TSR_HOST_DEVICE inline uint64_t fingerprint64_of_text(const DecimalText& text) {
  const uint64_t n = static_cast<uint64_t>(text.length);
  const uint64_t w0 = text.words[0], w1 = text.words[1], w2 = text.words[2];
  if (n > 16) {
    const int before = (24 - text.length) * 8;  // bits of words[0] before the text: 32 to 56
    const int rest = 64 - before;
    return farm_17_to_32(w0 >> before | w1 << rest, w1 >> before | w2 << rest, w1, w2, n);
  }
  if (n > 8) {
    const int before = (16 - text.length) * 8;  // bits of words[1] before the text: 0 to 56
    return farm_8_to_16(before == 0 ? w1 : w1 >> before | w2 << (64 - before), w2, n);
  }
  if (n == 8) return farm_8_to_16(w2, w2, n);
  const uint64_t bytes = w2 >> ((8 - n) * 8);
  if (n >= 4) return farm_4_to_7(static_cast<uint32_t>(bytes), static_cast<uint32_t>(w2 >> 32), n);
  return farm_1_to_3(static_cast<uint8_t>(bytes), static_cast<uint8_t>(bytes >> ((n >> 1) * 8)),
                     static_cast<uint8_t>(w2 >> 56), n);
}

// ---- Buckets --------------------------------------------------------------------------------------------------------

// hash mod num_buckets by a multiplication. The estimated quotient is the true one or 1 less, since
// hash * floor((2^64 - 1) / d) / 2^64 > hash / d - 1: one correction is enough.
struct BucketRemainder {
  uint64_t divisor;
  uint64_t reciprocal;

  explicit BucketRemainder(int64_t num_buckets)
      : divisor(static_cast<uint64_t>(num_buckets)), reciprocal(~uint64_t{0} / divisor) {}

  TSR_HOST_DEVICE int64_t operator()(uint64_t hash) const {
    const uint64_t remainder = hash - multiply_high(hash, reciprocal) * divisor;
    return static_cast<int64_t>(remainder >= divisor ? remainder - divisor : remainder);
  }
};

// ---- Checks ---------------------------------------------------------------------------------------------------------

inline void check_num_buckets(const char* op, int64_t num_buckets) {
  TSR_CHECK_VALUE(num_buckets >= 1, op, ": num_buckets must be >= 1, got ", num_buckets);
}

inline void check_to_hash_bucket_fast(const Tensor& x, int64_t num_buckets) {
  const char* op = "to_hash_bucket_fast";
  dispatch_integer(x.scalar_type(), op, "x", [](auto) {});
  check_num_buckets(op, num_buckets);
}

inline void check_string_to_hash_bucket_fast(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets) {
  const char* op = "string_to_hash_bucket_fast";
  TSR_CHECK_VALUE(bytes.dim() == 1 && bytes.scalar_type() == ScalarType::Byte, op,
                  ": bytes must be a uint8 vector, got ", dtype_name(bytes.scalar_type()), " of shape ",
                  shape_text(bytes));
  TSR_CHECK_VALUE(offsets.dim() == 1 && offsets.scalar_type() == ScalarType::Long && offsets.size(0) >= 1, op,
                  ": offsets must be an int64 vector with one element more than there are strings, got ",
                  dtype_name(offsets.scalar_type()), " of shape ", shape_text(offsets));
  check_num_buckets(op, num_buckets);
}

}  // namespace tsr
