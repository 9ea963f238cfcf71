// hash: SipHash-2-4 of Aumasson and Bernstein, whose key keeps others from choosing texts that collide.
#pragma once
#include "hash_words.h"

namespace tsr {

// "somepseudorandomlygeneratedbytes"
constexpr uint64_t kSip0 = 0x736f6d6570736575ull;
constexpr uint64_t kSip1 = 0x646f72616e646f6dull;
constexpr uint64_t kSip2 = 0x6c7967656e657261ull;
constexpr uint64_t kSip3 = 0x7465646279746573ull;

struct SipState {
  uint64_t v0, v1, v2, v3;

  TSR_HOST_DEVICE void round() {
    v0 += v1;
    v1 = rotate_right(v1, 64 - 13) ^ v0;
    v0 = rotate_right(v0, 32);
    v2 += v3;
    v3 = rotate_right(v3, 64 - 16) ^ v2;
    v0 += v3;
    v3 = rotate_right(v3, 64 - 21) ^ v0;
    v2 += v1;
    v1 = rotate_right(v1, 64 - 17) ^ v2;
    v2 = rotate_right(v2, 32);
  }
  TSR_HOST_DEVICE void take(uint64_t word) {
    v3 ^= word;
    round();
    round();
    v0 ^= word;
  }
};

// The policy of to_hash_bucket_strong: the two words of the key.
struct SipHash {
  uint64_t key0, key1;

  SipHash(int64_t first, int64_t second) : key0(static_cast<uint64_t>(first)), key1(static_cast<uint64_t>(second)) {}

  template <class Text>
  TSR_HOST_DEVICE uint64_t of_bytes(Text s, uint64_t n) const {
    return of_words(TextWords<Text>(s, n), n);
  }
  TSR_HOST_DEVICE uint64_t of_text(const DecimalText& text) const {
    return of_words(DecimalWords(text), static_cast<uint64_t>(text.length));
  }

 private:
  template <class Words>
  TSR_HOST_DEVICE uint64_t of_words(const Words& words, uint64_t n) const {
    SipState state{kSip0 ^ key0, kSip1 ^ key1, kSip2 ^ key0, kSip3 ^ key1};
    for (uint64_t i = 0; i < n >> 3; ++i) state.take(words.word(i));
    state.take(words.rest() | n << 56);
    state.v2 ^= 0xff;
    for (int round = 0; round < 4; ++round) state.round();
    return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  }
};

}  // namespace tsr
