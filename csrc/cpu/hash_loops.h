// The hash family's loops over integers, a body of isa_foreach.h: hash_block(hash, result, x, n, is_signed, out) writes
// result(hash) of n <= kHashBlock integers, given as 64-bit numbers. x may be read, and out written, up to the next
// multiple of kHashPadding numbers.

// The bits of n integers together, by |: the sign says whether one is negative.
template <class T>
static T bits_of(const T* x, int64_t n) {
  T bits = 0;
  for (int64_t i = 0; i < n; ++i) bits = static_cast<T>(bits | x[i]);
  return bits;
}

// Writes n integers as ids; returns bits_of them.
template <class T>
static T copy_ids(const T* __restrict x, int64_t n, int64_t* __restrict ids) {
  T bits = 0;
  for (int64_t i = 0; i < n; ++i) {
    bits = static_cast<T>(bits | x[i]);
    ids[i] = id_of(static_cast<uint64_t>(static_cast<widened_t<T>>(x[i])), std::is_signed_v<T>);
  }
  return bits;
}

// Any hash, one integer after the other.
template <class Hash, class Result>
static void hash_block(const Hash& hash, const Result& result, const uint64_t* x, int64_t n, bool is_signed,
                       int64_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    const bool negative = is_signed && static_cast<int64_t>(x[i]) < 0;
    out[i] = result(hash.of_text(decimal_words(negative ? 0 - x[i] : x[i], negative)));
  }
}

#if TSR_ISA_LEVEL > 0

#include "hash_farm_lanes.h"

// ---- Decimal digits -------------------------------------------------------------------------------------------------

struct Integers {
  Lanes magnitude;
  Lanes negative;  // 1 or 0
};

// sign_bit: 2^63 for signed numbers, 0 for unsigned ones.
static inline Integers split_sign(Lanes x, Lanes sign_bit) {
  const Lanes negative = (x & sign_bit) >> 63;
  return {(x ^ (0 - negative)) + negative, negative};
}

// The text of 8 digits, given as two numbers below 10^4, the first in the lane's lower half: two digits to a quarter,
// then one to a byte. 5243 / 2^19 and 6554 / 2^16 are 1 / 100 and 1 / 10, near enough for numbers this small.
static inline Lanes text_of_fours(Lanes fours) {
  const Lanes hundreds = multiply16_high(fours, splat(0x147b147b147b147b)) >> 3 & splat(0x1fff1fff1fff1fff);
  const Lanes twos = hundreds | (fours - multiply16(hundreds, splat(0x0064006400640064))) << 16;
  const Lanes tens = multiply16_high(twos, splat(0x199a199a199a199a));
  return (tens | (twos - multiply16(tens, splat(0x000a000a000a000a))) << 8) | splat(kEightZeros);
}

static inline Lanes eight_digits(Lanes v) {
  const Lanes upper = multiply32(v, splat(3518437209)) >> 45;  // v / 10000
  return text_of_fours(upper | (v - multiply32(upper, splat(10000))) << 32);
}

// 8 bits for each '0' at the start of a word of digits. All bits below the first that differs from '0' are counted by
// one bit per byte, bit 3: a digit's own lowest bit is bit 3 or lower.
static inline Lanes zero_bits(Lanes digits) {
  const Lanes d = digits ^ splat(kEightZeros);
  return sum_of_bytes((d - 1) & ~d & splat(0x0808080808080808));
}

// Subtracts divisor from the lanes of value that reach it (both are below 2^63), adding 1 to their quotient.
static inline void correct_quotient(Lanes& quotient, Lanes& value, uint64_t divisor) {
  const Lanes reached = (Lanes)((SignedLanes)value >= (SignedLanes)splat(divisor));
  quotient -= reached;
  value -= reached & splat(divisor);
}

// v -> v / 10^16, leaving the remainder in v. The estimate from the upper half of v, with 10^-16 rounded down to 32
// bits, is the quotient or 1 less.
static inline Lanes divide_by_1e16(Lanes& v) {
  constexpr uint64_t divisor = 10000000000000000;
  Lanes quotient = multiply32(v >> 32, splat(3868562622)) >> 53;
  v -= multiply32(quotient, splat(divisor)) + (multiply32(quotient, splat(divisor >> 32)) << 32);
  correct_quotient(quotient, v, divisor);
  return quotient;
}

// v -> v / 10^8, leaving the remainder in v; v < 10^16.
static inline Lanes divide_by_1e8(Lanes& v) {
  constexpr uint64_t divisor = 100000000;
  Lanes quotient = multiply32(v >> 22, splat(2882303761)) >> 36;
  v -= multiply32(quotient, splat(divisor));
  correct_quotient(quotient, v, divisor);
  return quotient;
}

// ---- Hashes of integers by the length of their text -----------------------------------------------------------------
// In all three, `before` is the number of bits before the text in its words, the sign included in the text.

static inline Lanes sign_at(Lanes negative, Lanes bits) {
  return shift_left((0 - negative) & splat(kZeroToMinus), bits);
}

// 17 to 20 bytes.
static inline Lanes hash_long(Integers x) {
  Lanes last = x.magnitude;
  const Lanes upper = divide_by_1e16(last);
  const Lanes middle = divide_by_1e8(last);
  Lanes w0 = text_of_fours(upper << 32);  // at most 4 digits
  const Lanes w1 = eight_digits(middle), w2 = eight_digits(last);
  const Lanes before = zero_bits(w0) - (x.negative << 3);
  const Lanes rest = 64 - before;
  w0 ^= sign_at(x.negative, before);
  return farm_17_to_32(shift_right(w0, before) | shift_left(w1, rest), shift_right(w1, before) | shift_left(w2, rest),
                       w1, w2, 24 - (before >> 3));
}

// 8 to 16 bytes. With 8, before is 64: the text is the second word.
static inline Lanes hash_middle(Integers x) {
  Lanes last = x.magnitude;
  const Lanes upper = divide_by_1e8(last);
  Lanes w1 = eight_digits(upper), w2 = eight_digits(last);
  // Where all of w1 is zeros, w2 begins with at most one, in the sign's place.
  const Lanes zeros = zero_bits(w1);
  const Lanes before = zeros + (zero_bits(w2) & (Lanes)(zeros == 64)) - (x.negative << 3);
  w1 ^= sign_at(x.negative, before);
  w2 ^= sign_at(x.negative, before - 64);  // a huge count where before < 64
  return farm_8_to_16(shift_right(w1, before) | shift_left(w2, 64 - before), w2, 16 - (before >> 3));
}

// 1 to 7 bytes.
static inline Lanes hash_short(Integers x) {
  Lanes word = eight_digits(x.magnitude);
  // The last digit counts even if it is '0'.
  const Lanes before = zero_bits(word | splat(uint64_t{1} << 56)) - (x.negative << 3);
  word ^= sign_at(x.negative, before);
  const Lanes text = shift_right(word, before);
  const Lanes n = 8 - (before >> 3);
  const Lanes hash = farm_4_to_7(text & splat(0xffffffff), word >> 32, n);
  const Lanes below_4 = (Lanes)(n < 4);
  if (lanes_below(n, splat(4)) == 0) return hash;
  const Lanes byte = splat(0xff);
  const Lanes tiny = farm_1_to_3(text & byte, shift_right(text, n >> 1 << 3) & byte, word >> 56, n);
  return (hash & ~below_4) | (tiny & below_4);
}

// ---- Blocks ---------------------------------------------------------------------------------------------------------

// The integers of a block by the length of their text, in their order, and which lanes they came from.
struct Partition {
  uint64_t longs[kHashBlock + kLanes], middles[kHashBlock + kLanes], shorts[kHashBlock + kLanes];
  int64_t long_count, middle_count, short_count;
  uint8_t long_lanes[kHashBlock / kLanes], short_lanes[kHashBlock / kLanes];
};

static inline void append(uint64_t* list, int64_t& count, unsigned which, Lanes x) {
  store(list + count, compress(which, x));
  count += __builtin_popcount(which);
}

static inline void partition_by_length(const uint64_t* x, int64_t n, Lanes sign_bit, Partition& p) {
  constexpr unsigned all = (1u << kLanes) - 1;
  p.long_count = p.middle_count = p.short_count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Lanes value = load(x + i);
    const Integers integer = split_sign(value, sign_bit);
    // A sign takes one digit's place.
    const Lanes negative = 0 - integer.negative;
    const Lanes least_long = splat(10000000000000000) - (negative & splat(9000000000000000));
    const Lanes least_middle = splat(10000000) - (negative & splat(9000000));
    const unsigned longs = all & ~lanes_below(integer.magnitude, least_long);
    const unsigned shorts = lanes_below(integer.magnitude, least_middle);
    append(p.longs, p.long_count, longs, value);
    append(p.middles, p.middle_count, all & ~(longs | shorts), value);
    append(p.shorts, p.short_count, shorts, value);
    p.long_lanes[i / kLanes] = static_cast<uint8_t>(longs);
    p.short_lanes[i / kLanes] = static_cast<uint8_t>(shorts);
  }
}

// Hashes replace the integers. The last vector's spare lanes hold what an earlier one left: any number will do.
static inline void hash_lists(Partition& p, Lanes sign_bit) {
  for (int64_t i = 0; i < p.long_count; i += kLanes)
    store(p.longs + i, hash_long(split_sign(load(p.longs + i), sign_bit)));
  for (int64_t i = 0; i < p.middle_count; i += kLanes)
    store(p.middles + i, hash_middle(split_sign(load(p.middles + i), sign_bit)));
  for (int64_t i = 0; i < p.short_count; i += kLanes)
    store(p.shorts + i, hash_short(split_sign(load(p.shorts + i), sign_bit)));
}

// Puts the hashes back in the integers' order.
template <class Result>
static inline void write_results(const Partition& p, int64_t n, const Result& result, uint64_t* out) {
  constexpr unsigned all = (1u << kLanes) - 1;
  const auto result_of = lanes_of(result);
  const uint64_t *next_long = p.longs, *next_middle = p.middles, *next_short = p.shorts;
  for (int64_t i = 0; i < n; i += kLanes) {
    const unsigned longs = p.long_lanes[i / kLanes], shorts = p.short_lanes[i / kLanes];
    const unsigned middles = all & ~(longs | shorts);
    Lanes hash = expand(splat(0), middles, load(next_middle));
    hash = expand(hash, longs, load(next_long));
    hash = expand(hash, shorts, load(next_short));
    next_long += __builtin_popcount(longs);
    next_middle += __builtin_popcount(middles);
    next_short += __builtin_popcount(shorts);
    store(out + i, result_of(hash));
  }
}

// FarmHash: sorted by the length of their text, so that all lanes do the same.
template <class Result>
static void hash_block(const FarmHash&, const Result& result, const uint64_t* x, int64_t n, bool is_signed,
                       int64_t* out) {
  const Lanes sign_bit = splat(is_signed ? uint64_t{1} << 63 : 0);
  Partition p;
  partition_by_length(x, n, sign_bit, p);
  hash_lists(p, sign_bit);
  write_results(p, n, result, reinterpret_cast<uint64_t*>(out));
}

#endif
