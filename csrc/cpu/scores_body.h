// Body of scores.cpp for one instruction set: see isa_foreach.h. No include guard, no includes.
//
// Scores are taken kScoresLanes at a time, in as many vectors as that is, so that all instruction sets add in the same
// order.

static constexpr int kScoresBytes = TSR_ISA_LEVEL == 2 ? 64 : TSR_ISA_LEVEL == 1 ? 32 : 16;
static constexpr int kScoresVectors = 4 * kScoresLanes / kScoresBytes;
typedef float Scores __attribute__((vector_size(kScoresBytes)));
typedef uint32_t ScoresBits __attribute__((vector_size(kScoresBytes)));

// exp(x) to 2 units in the last place, for x up to 80; 0 below -87. The constants are those of Cephes' expf.
static inline __attribute__((always_inline)) Scores exponential(Scores x) {
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the lowest bits.
  const Scores shifted = x * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f;
  const Scores r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Scores p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const ScoresBits power = ((ScoresBits)shifted + 127u) << 23;
  return x < -87.0f ? Scores{} : p * (Scores)power;
}

static inline __attribute__((always_inline)) Scores scores_at(const float* from) {
  Scores x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}

// Calls use(at, v) with all scores by vectors: where one lies, and which of its turn it is. The last turn is filled up
// with -inf in a copy, whose scores come back.
template <class T, class Use>
static inline __attribute__((always_inline)) void for_scores(T* scores, int64_t n, const Use& use) {
  const auto take = [&](T* turn) __attribute__((always_inline)) {
    for (int v = 0; v < kScoresVectors; ++v) use(turn + v * (kScoresBytes / 4), v);
  };
  int64_t c = 0;
  for (; c + kScoresLanes <= n; c += kScoresLanes) take(scores + c);
  if (c == n) return;
  float rest[kScoresLanes];
  for (int k = 0; k < kScoresLanes; ++k) rest[k] = c + k < n ? scores[c + k] : -INFINITY;
  take(rest);
  if constexpr (!std::is_const_v<T>) {
    for (int k = 0; c + k < n; ++k) scores[c + k] = rest[k];
  }
}

static float largest(const float* scores, int64_t n, float most) {
  Scores best[kScoresVectors];
  for (int v = 0; v < kScoresVectors; ++v) best[v] = Scores{} + most;
  for_scores(scores, n, [&](const float* at, int v) __attribute__((always_inline)) {
    const Scores x = scores_at(at);
    best[v] = best[v] > x ? best[v] : x;
  });
  float lanes[kScoresLanes];
  __builtin_memcpy(lanes, best, sizeof(lanes));
  for (const float x : lanes) most = x > most ? x : most;
  return most;
}

static double sum_of_exponentials(const float* scores, int64_t n, float base) {
  double all = 0;
  for (int64_t begin = 0; begin < n; begin += kScoresTile) {
    Scores sum[kScoresVectors] = {};
    for_scores(scores + begin, n - begin < kScoresTile ? n - begin : kScoresTile,
               [&](const float* at, int v)
                   __attribute__((always_inline)) { sum[v] += exponential(scores_at(at) - base); });
    float lanes[kScoresLanes];
    __builtin_memcpy(lanes, sum, sizeof(lanes));
    for (const float x : lanes) all += static_cast<double>(x);
  }
  return all;
}

static void exponentials(float* scores, int64_t n, float base, float factor) {
  for_scores(scores, n, [&](float* at, int) __attribute__((always_inline)) {
    const Scores share = exponential(scores_at(at) - base) * factor;
    __builtin_memcpy(at, &share, sizeof(share));
  });
}

static int64_t first_above(const float* scores, int64_t n, float bar) {
  constexpr int kWords = kScoresBytes / 8;
  int64_t c = 0;
  for (; c + kScoresLanes <= n; c += kScoresLanes) {
    ScoresBits none = ~ScoresBits{};
    for (int v = 0; v < kScoresVectors; ++v) {
      none &= (ScoresBits)(scores_at(scores + c + v * (kScoresBytes / 4)) <= bar);
    }
    uint64_t words[kWords], all = ~uint64_t{0};
    __builtin_memcpy(words, &none, sizeof(words));
    for (const uint64_t word : words) all &= word;
    if (all != ~uint64_t{0}) return c;
  }
  for (int64_t rest = c; rest < n; ++rest) {
    if (!(scores[rest] <= bar)) return c;
  }
  return n;
}

static const ScoresLoops kScoresLoops{largest, sum_of_exponentials, exponentials, first_above};
