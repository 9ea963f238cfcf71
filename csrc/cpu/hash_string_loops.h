// The hash family's loop over byte strings, a body of isa_foreach.h: hash_strings(hash, result, strings, begin, end,
// out) writes result(hash) of the strings [begin, end), whose offsets are valid.

template <class Hash, class Result>
static void hash_one_by_one(const Hash& hash, const Result& result, const ByteStrings& strings, int64_t begin,
                            int64_t end, int64_t* out) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = strings.offsets[i];
    out[i] = result(hash.of_bytes(strings.bytes + at, static_cast<uint64_t>(strings.offsets[i + 1] - at)));
  }
}

// Any hash.
template <class Hash, class Result>
static void hash_strings(const Hash& hash, const Result& result, const ByteStrings& strings, int64_t begin, int64_t end,
                         int64_t* out) {
  hash_one_by_one(hash, result, strings, begin, end, out);
}

#if TSR_ISA_LEVEL > 0

#include "hash_farm_lanes.h"

// Where the strings of a vector begin and end, and their lengths.
struct Spans {
  Lanes begin, end, length;
};

static inline Spans spans_at(const int64_t* offsets) {
  const Lanes begin = load(reinterpret_cast<const uint64_t*>(offsets));
  const Lanes end = load(reinterpret_cast<const uint64_t*>(offsets + 1));
  return {begin, end, end - begin};
}

// All ones in the lanes where a < b; both are below 2^63.
static inline Lanes less(Lanes a, Lanes b) { return (Lanes)((SignedLanes)a < (SignedLanes)b); }
static inline Lanes choose(Lanes where, Lanes a, Lanes b) { return (where & a) | (~where & b); }
static inline bool any(Lanes where) { return lanes_below(splat(0), where) != 0; }

// The words of 8 bytes at the beginning and at the end of each string may be read whole, whatever its length.
static inline bool has_room(const ByteStrings& strings, int64_t i, int64_t count) {
  return strings.offsets[i] >= 8 && strings.offsets[i + count - 1] <= strings.size - 8;
}

// ---- FarmHash -------------------------------------------------------------------------------------------------------

// Strings of at most 32 bytes; for longer ones the lane holds anything.
static inline Lanes farm_up_to_32(const uint8_t* bytes, const Spans& s) {
  const Lanes n = s.length, everywhere = splat(~uint64_t{0}), byte = splat(0xff);
  const Lanes first = gather(splat(0), everywhere, bytes, s.begin);
  const Lanes last = gather(splat(0), everywhere, bytes, s.end - 8);
  Lanes hash = farm_8_to_16(first, last, n);
  const Lanes beyond_16 = less(splat(16), n);
  if (any(beyond_16)) {
    const Lanes second = gather(splat(0), beyond_16, bytes, s.begin + 8);
    const Lanes before_last = gather(splat(0), beyond_16, bytes, s.end - 16);
    hash = choose(beyond_16, farm_17_to_32(first, second, before_last, last, n), hash);
  }
  const Lanes below_8 = less(n, splat(8));
  if (any(below_8)) {
    hash = choose(below_8, farm_4_to_7(first & splat(0xffffffff), last >> 32, n), hash);
    const Lanes middle = shift_right(first, n >> 1 << 3) & byte;
    hash = choose(less(n, splat(4)), farm_1_to_3(first & byte, middle, last >> 56, n), hash);
    hash = choose((Lanes)(n == 0), splat(kFarm2), hash);
  }
  return hash;
}

template <class Result>
static void hash_strings(const FarmHash& hash, const Result& result, const ByteStrings& strings, int64_t begin,
                         int64_t end, int64_t* out) {
  const auto result_of = lanes_of(result);
  for (; begin + kLanes <= end; begin += kLanes) {
    if (!has_room(strings, begin, kLanes)) {
      hash_one_by_one(hash, result, strings, begin, begin + kLanes, out);
      continue;
    }
    const Spans s = spans_at(strings.offsets + begin);
    store(reinterpret_cast<uint64_t*>(out + begin), result_of(farm_up_to_32(strings.bytes, s)));
    for (unsigned longs = lanes_below(splat(32), s.length); longs != 0; longs &= longs - 1) {
      const int64_t i = begin + __builtin_ctz(longs);
      hash_one_by_one(hash, result, strings, i, i + 1, out);
    }
  }
  hash_one_by_one(hash, result, strings, begin, end, out);
}

#include "hash_sip_lanes.h"

#endif
