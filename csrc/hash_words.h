// hash: what the hash functions of the family read: the words of byte strings, and the decimal text of integers;
// and the hash of an integer itself, for tables.
#pragma once
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

// ---- Integers -------------------------------------------------------------------------------------------------------

// What hash_key multiplies with: two odd numbers.
struct KeyFactors {
  uint64_t first = 0xFF51AFD7ED558CCDull, second = 0xC4CEB9FE1A85EC53ull;
};

// murmur3's finalizer: a bijection, all of whose bits depend on all of the key's.
TSR_HOST_DEVICE TSR_ALWAYS_INLINE uint64_t hash_key(int64_t key, const KeyFactors& factors = {}) {
  uint64_t x = static_cast<uint64_t>(key);
  x = (x ^ x >> 33) * factors.first;
  x = (x ^ x >> 33) * factors.second;
  return x ^ x >> 33;
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

// ---- Words of a text ------------------------------------------------------------------------------------------------
// What a hash that reads a text front to back needs of it: its whole words, and its last n % 8 bytes as a word that is
// padded with zeros.

// Text: a pointer, or what has a pointer's `s + k`, `s[k]`, load32(s) and load64(s).
template <class Text>
class TextWords {
 public:
  TSR_HOST_DEVICE TextWords(Text s, uint64_t n) : s_(s), n_(n) {}
  TSR_HOST_DEVICE uint64_t word(uint64_t i) const { return load64(s_ + i * 8); }
  TSR_HOST_DEVICE uint64_t rest() const {
    const uint64_t bytes = n_ & 7;
    if (bytes == 0) return 0;
    // The last word of the text, without what comes before the rest: the words overlap.
    if (n_ >= 8) return load64(s_ + (n_ - 8)) >> (64 - bytes * 8);
    if (bytes >= 4) return load32(s_) | static_cast<uint64_t>(load32(s_ + (bytes - 4))) << (bytes - 4) * 8;
    const uint64_t middle = static_cast<uint64_t>(s_[bytes >> 1]) << (bytes >> 1) * 8;
    return s_[0] | middle | static_cast<uint64_t>(s_[bytes - 1]) << (bytes - 1) * 8;
  }

 private:
  Text s_;
  uint64_t n_;
};

// The words of an integer's decimal text, in registers.
class DecimalWords {
 public:
  TSR_HOST_DEVICE explicit DecimalWords(const DecimalText& text) {
    const int before = 24 - text.length;  // bytes before the text: 4 to 23
    const int bits = (before & 7) * 8;
    const uint64_t w0 = before >= 16 ? text.words[2] : before >= 8 ? text.words[1] : text.words[0];
    const uint64_t w1 = before >= 16 ? 0 : before >= 8 ? text.words[2] : text.words[1];
    const uint64_t w2 = before >= 8 ? 0 : text.words[2];
    first_ = joined(w0, w1, bits);
    second_ = joined(w1, w2, bits);
    third_ = w2 >> bits;
    whole_ = text.length >> 3;
  }
  TSR_HOST_DEVICE uint64_t word(uint64_t i) const { return i == 0 ? first_ : second_; }
  TSR_HOST_DEVICE uint64_t rest() const { return whole_ == 0 ? first_ : whole_ == 1 ? second_ : third_; }

 private:
  // The word that begins `bits` after the start of low.
  static TSR_HOST_DEVICE uint64_t joined(uint64_t low, uint64_t high, int bits) {
    return bits == 0 ? low : low >> bits | high << (64 - bits);
  }

  uint64_t first_, second_, third_;
  int whole_;
};

}  // namespace tsr
