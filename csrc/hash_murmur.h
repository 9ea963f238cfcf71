// hash: MurmurHash64A of Austin Appleby (public domain), with the seed that TensorFlow's Hash64 gives it.
#pragma once
#include "hash_words.h"

namespace tsr {

constexpr uint64_t kMurmur = 0xc6a4a7935bd1e995ull;
constexpr uint64_t kMurmurSeed = 0xdecafcaffe;

TSR_HOST_DEVICE inline uint64_t murmur_shift_mix(uint64_t v) { return v ^ v >> 47; }

// The policy of to_hash_bucket.
struct MurmurHash {
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
    uint64_t hash = kMurmurSeed ^ n * kMurmur;
    for (uint64_t i = 0; i < n >> 3; ++i) hash = (hash ^ murmur_shift_mix(words.word(i) * kMurmur) * kMurmur) * kMurmur;
    if ((n & 7) != 0) hash = (hash ^ words.rest()) * kMurmur;
    return murmur_shift_mix(murmur_shift_mix(hash) * kMurmur);
  }
};

}  // namespace tsr
