// hash: FarmHash Fingerprint64 (farmhashna::Hash64, whose constants are Google's, MIT licence).
//
// One function per range of lengths. Those up to 32 bytes take the words they read, not their address: the text of an
// integer has at most 20 bytes and never needs to leave the registers. The others take the bytes as a Text: see
// TextWords.
#pragma once
#include "hash_words.h"

namespace tsr {

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

// The policy of fingerprint64 and to_hash_bucket_fast.
struct FarmHash {
  template <class Text>
  TSR_HOST_DEVICE uint64_t of_bytes(Text s, uint64_t n) const {
    return fingerprint64(s, n);
  }
  TSR_HOST_DEVICE uint64_t of_text(const DecimalText& text) const { return fingerprint64_of_text(text); }
};

}  // namespace tsr
