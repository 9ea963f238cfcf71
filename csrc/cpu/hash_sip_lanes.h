// SipHash of byte strings on the lanes of hash_lanes.h. No include guard: it is part of a body of isa_foreach.h.
//
// How long a string takes depends on its whole words, and strings side by side must take equally long. So those of a
// block are sorted by that number, and their words laid out side by side: by ordinary loads without a branch, which are
// faster than the processor's gather, and than its guesses at the lengths.

// SipState on lanes.
struct SipLanes {
  Lanes v0, v1, v2, v3;

  inline __attribute__((always_inline)) void round() {
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
};

// Vectors hashed side by side: a round waits for its own results more often than not.
constexpr int kSipVectors = 2;
constexpr int64_t kSipBlock = 512;
// Strings of more whole words are hashed one by one.
constexpr int64_t kSipWords = 4;

// The strings of a block by their number of whole words; last those of more than kSipWords, without their words.
struct SipLists {
  // For each list: the first words of all strings, the second words, and so on, and last the word that SipHash takes
  // last.
  uint64_t words[kSipWords + 2][kSipWords + 1][kSipBlock + kSipVectors * kLanes];
  int64_t positions[kSipWords + 2][kSipBlock];
  int64_t counts[kSipWords + 2];
};

// All strings end at byte 8 or later: words that a string lacks are read at its end, and not used.
static inline void sort_by_words(const ByteStrings& strings, int64_t begin, int64_t end, SipLists& lists) {
  for (int64_t& count : lists.counts) count = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = strings.offsets[i], behind = strings.offsets[i + 1];
    const uint64_t n = static_cast<uint64_t>(behind - at);
    const int64_t whole = static_cast<int64_t>(n >> 3);
    const int64_t list = whole <= kSipWords ? whole : kSipWords + 1;
    const int64_t place = lists.counts[list]++;
    const uint64_t last = load64(strings.bytes + behind - 8);
    for (int64_t word = 0; word < kSipWords; ++word) {
      const int64_t from = at + word * 8 < behind - 8 ? at + word * 8 : behind - 8;
      lists.words[list][word][place] = load64(strings.bytes + from);
    }
    const uint64_t rest = last >> 1 >> (63 - (n & 7) * 8);
    lists.words[list][whole <= kSipWords ? whole : kSipWords][place] = rest | n << 56;
    lists.positions[list][place] = i;
  }
}

// The hashes of a list, with `whole` words in every string, replace the first words.
template <class ResultLanes>
static inline void sip_hash_list(const SipLanes& start, const ResultLanes& result_of, int64_t whole, SipLists& lists) {
  uint64_t (*const words)[kSipBlock + kSipVectors * kLanes] = lists.words[whole];
  for (int64_t i = 0; i < lists.counts[whole]; i += kSipVectors * kLanes) {
    SipLanes a = start, b = start;
    for (int64_t word = 0; word <= whole; ++word) {
      const Lanes text_a = load(words[word] + i), text_b = load(words[word] + i + kLanes);
      a.v3 ^= text_a;
      b.v3 ^= text_b;
      for (int round = 0; round < 2; ++round) {
        a.round();
        b.round();
      }
      a.v0 ^= text_a;
      b.v0 ^= text_b;
    }
    a.v2 ^= splat(0xff);
    b.v2 ^= splat(0xff);
    for (int round = 0; round < 4; ++round) {
      a.round();
      b.round();
    }
    store(words[0] + i, result_of(a.v0 ^ a.v1 ^ a.v2 ^ a.v3));
    store(words[0] + i + kLanes, result_of(b.v0 ^ b.v1 ^ b.v2 ^ b.v3));
  }
}

template <class Result>
static void hash_strings(const SipHash& hash, const Result& result, const ByteStrings& strings, int64_t begin,
                         int64_t end, int64_t* out) {
  static_assert(kSipVectors == 2);
  const auto result_of = lanes_of(result);
  const SipLanes start{splat(kSip0 ^ hash.key0), splat(kSip1 ^ hash.key1), splat(kSip2 ^ hash.key0),
                       splat(kSip3 ^ hash.key1)};
  // The first few may end before byte 8.
  for (; begin < end && strings.offsets[begin] < 8; ++begin) {
    hash_one_by_one(hash, result, strings, begin, begin + 1, out);
  }
  SipLists lists;
  for (; begin < end; begin += kSipBlock) {
    sort_by_words(strings, begin, begin + kSipBlock < end ? begin + kSipBlock : end, lists);
    for (int64_t whole = 0; whole <= kSipWords; ++whole) {
      sip_hash_list(start, result_of, whole, lists);
      for (int64_t i = 0; i < lists.counts[whole]; ++i) {
        out[lists.positions[whole][i]] = static_cast<int64_t>(lists.words[whole][0][i]);
      }
    }
    for (int64_t i = 0; i < lists.counts[kSipWords + 1]; ++i) {
      const int64_t position = lists.positions[kSipWords + 1][i];
      hash_one_by_one(hash, result, strings, position, position + 1, out);
    }
  }
}
