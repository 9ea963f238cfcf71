// CPU kernels of the family candidates: Philox, the laws by which ids are drawn, and one loop for all of them.
#include "../candidates.h"

#include <tuple>

namespace tsr {
namespace {

// ---- Random words ---------------------------------------------------------------------------------------------------

// The words of Philox 4x32-10, one after the other, and numbers made of them as TensorFlow does.
class Philox {
 public:
  Philox(int64_t seed, int64_t seed2, int64_t place)
      : seed_(static_cast<uint64_t>(seed)),
        seed2_(static_cast<uint64_t>(seed2)),
        place_(static_cast<uint64_t>(place)) {}

  uint32_t word() {
    if (used_ == 4) fill();
    return words_[used_++];
  }

  // In [0, 1), of 52 bits.
  double real() {
    const uint64_t high = word() & 0xFFFFF;
    return static_cast<double>(high << 32 | word()) * 0x1p-52;
  }

  // In [0, 1), of 23 bits.
  float real32() { return static_cast<float>(word() & 0x7FFFFF) * 0x1p-23f; }

  // In [0, n), each number as likely as the others.
  template <class Word>
  Word below(Word n) {
    if ((n & (n - 1)) == 0) return next<Word>() & (n - 1);
    const Word left_over = static_cast<Word>(~Word{0} % n + 1);
    Word x = next<Word>();
    while (x < left_over) x = next<Word>();
    return x % n;
  }

 private:
  template <class Word>
  Word next() {
    if constexpr (sizeof(Word) == 4) return word();
    const uint64_t low = word();
    return static_cast<Word>(low | uint64_t{word()} << 32);
  }

  static uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }
  static uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

  void fill() {
    uint32_t key0 = low(seed_), key1 = high(seed_);
    uint32_t c0 = low(place_), c1 = high(place_), c2 = low(seed2_), c3 = high(seed2_);
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
      c0 = high(b) ^ c1 ^ key0;
      c1 = low(b);
      c2 = high(a) ^ c3 ^ key1;
      c3 = low(a);
      key0 += 0x9E3779B9;
      key1 += 0xBB67AE85;
    }
    words_ = {c0, c1, c2, c3};
    used_ = 0;
    ++place_;
  }

  uint64_t seed_, seed2_, place_;
  std::array<uint32_t, 4> words_{};
  size_t used_ = 4;
};

// ---- Laws -----------------------------------------------------------------------------------------------------------

// A law draws an id, says an id's probability, and how many ids it can draw at all.
struct Uniform {
  int64_t range_max;
  int64_t draw(Philox& words) const { return static_cast<int64_t>(words.below(static_cast<uint64_t>(range_max))); }
  float probability(int64_t) const { return static_cast<float>(1.0 / static_cast<double>(range_max)); }
  int64_t drawable() const { return range_max; }
};

struct LogUniform {
  int64_t range_max;
  double log_range = std::log1p(static_cast<double>(range_max));
  // The logarithm is rounded: without the remainder there would be a range_max now and then.
  int64_t draw(Philox& words) const {
    return (static_cast<int64_t>(std::exp(words.real() * log_range)) - 1) % range_max;
  }
  float probability(int64_t id) const {
    const double v = static_cast<double>(id);
    return static_cast<float>(std::log((v + 2.0) / (v + 1.0)) / log_range);
  }
  int64_t drawable() const { return range_max; }
};

struct FixedUnigram {
  int64_t range_max;
  const float* weights;
  const float* chances;
  const int32_t* aliases;
  float total;

  int64_t draw(Philox& words) const {
    const float r = words.real32();
    const int64_t id = words.below(static_cast<uint32_t>(range_max));
    return r < chances[id] ? id : alias(id);
  }
  float probability(int64_t id) const { return weights[id] / total; }
  int64_t drawable() const {
    constexpr float kGreatest = 1.0f - 0x1p-23f;  // of real32
    std::vector<bool> found(static_cast<size_t>(range_max));
    for (int64_t id = 0; id < range_max; ++id) {
      if (chances[id] > 0) found[static_cast<size_t>(id)] = true;
      if (!(kGreatest < chances[id])) found[static_cast<size_t>(alias(id))] = true;
    }
    return std::count(found.begin(), found.end(), true);
  }
  int64_t alias(int64_t id) const {
    TSR_CHECK_VALUE(aliases[id] >= 0 && aliases[id] < range_max, "candidates_: unigrams[2] must be ids in [0, ",
                    range_max, "), got ", aliases[id], " at position ", id);
    return aliases[id];
  }
};

// counts is the tree of candidates.h.
struct LearnedUnigram {
  int64_t range_max;
  const int32_t* counts;

  int64_t draw(Philox& words) const {
    const int64_t x = words.below(static_cast<uint32_t>(counts[0]));
    int64_t id = 0, before = 0, step = 1;
    while (step <= range_max / 2) step *= 2;
    for (; step > 0; step /= 2) {
      if (id + step <= range_max && before + counts[id + step] <= x) {
        id += step;
        before += counts[id];
      }
    }
    TSR_CHECK_VALUE(id < range_max, "candidates_: counts must begin with the sum of all, got ", counts[0]);
    return id;
  }
  float probability(int64_t id) const { return static_cast<float>(count(id)) / static_cast<float>(counts[0]); }
  int64_t drawable() const {
    int64_t found = 0;
    for (int64_t id = 0; id < range_max; ++id) found += count(id) > 0;
    return found;
  }
  int64_t count(int64_t id) const { return sum_before(id + 1) - sum_before(id); }
  int64_t sum_before(int64_t id) const {
    int64_t sum = 0;
    for (; id > 0; id &= id - 1) sum += counts[id];
    return sum;
  }
};

// ---- Draws ----------------------------------------------------------------------------------------------------------

// Ids that have been drawn: open addresses, at most half of them taken.
class Seen {
 public:
  explicit Seen(int64_t most, const Asked& asked) {
    while ((int64_t{1} << bits_) < 2 * most) ++bits_;
    ids_ = Buffer<int64_t>(int64_t{1} << bits_, asked);
    std::fill(ids_.data(), ids_.data() + (int64_t{1} << bits_), kNone);
  }

  // Whether the id is new.
  bool add(int64_t id) {
    const uint64_t mask = (uint64_t{1} << bits_) - 1;
    uint64_t at = (static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull) >> (64 - bits_);
    while (ids_[static_cast<int64_t>(at)] != kNone) {
      if (ids_[static_cast<int64_t>(at)] == id) return false;
      at = (at + 1) & mask;
    }
    ids_[static_cast<int64_t>(at)] = id;
    return true;
  }

 private:
  static constexpr int64_t kNone = -1;
  int bits_ = 1;
  Buffer<int64_t> ids_;
};

// Draws into sampled; returns how many draws there were.
template <class Law>
int64_t draw(const Law& law, Philox& words, bool unique, int64_t num_sampled, int64_t* sampled) {
  if (!unique) {
    for (int64_t i = 0; i < num_sampled; ++i) sampled[i] = law.draw(words);
    return num_sampled;
  }
  Seen seen(num_sampled, Asked{"candidates_", "num_sampled", num_sampled});
  int64_t tries = 0;
  for (int64_t i = 0; i < num_sampled;) {
    // Where too few ids can be drawn, this loop has no end. Now looking at all of them costs what the draws did.
    if (++tries == law.range_max + num_sampled) {
      const int64_t drawable = law.drawable();
      TSR_CHECK_VALUE(num_sampled <= drawable, "candidates_: num_sampled must be at most the number of ids whose ",
                      "weights are not zero, ", drawable, ", as ids are unique, got ", num_sampled);
    }
    const int64_t id = law.draw(words);
    if (seen.add(id)) sampled[i++] = id;
  }
  return tries;
}

// How often an id of probability p is expected. All of it is float32, by the C library's functions, as TensorFlow's is.
float expected_count(float p, int64_t num_sampled, int64_t tries) {
  if (tries == num_sampled) return p * static_cast<float>(num_sampled);
  return -std::expm1(static_cast<float>(tries) * std::log1p(-p));
}

Buffer<int64_t> checked_classes(const Tensor& true_classes, int64_t range_max) {
  const Tensor dense = as_contiguous(true_classes);
  Buffer<int64_t> classes(dense.numel());
  dispatch_index(dense.scalar_type(), "candidates_", "true_classes", [&](auto tag) {
    using Index = typename decltype(tag)::type;
    const Index* const given = dense.const_data_ptr<Index>();
    for (int64_t i = 0; i < dense.numel(); ++i) {
      const int64_t id = given[i];
      TSR_CHECK_INDEX(id >= 0 && id < range_max, "candidates_: true_classes[", i, "] must be in [0, ", range_max,
                      "), got ", id);
      classes[i] = id;
    }
  });
  return classes;
}

// Counts each class once more, while their sum is an int32.
void learn(int32_t* counts, int64_t range_max, const int64_t* classes, int64_t n) {
  n = std::min<int64_t>(n, INT32_MAX - counts[0]);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t at = classes[i] + 1; at <= range_max; at += at & -at) ++counts[at];
  }
  counts[0] += static_cast<int32_t>(n);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> candidates_cpu(const Tensor& generator, const std::optional<Tensor>& counts,
                                                  const std::vector<Tensor>& unigrams, const Tensor& true_classes,
                                                  int64_t range_max, int64_t num_sampled, bool unique,
                                                  int64_t kind_number) {
  const CandidateKind kind =
      check_candidates(generator, counts, unigrams, true_classes, range_max, num_sampled, unique, kind_number);
  const Buffer<int64_t> classes = checked_classes(true_classes, range_max);
  const int64_t n = true_classes.numel();
  const Asked asked{"candidates_", "num_sampled", num_sampled};
  Tensor sampled = new_empty(true_classes, {num_sampled}, ScalarType::Long, asked);
  Tensor sampled_count = new_empty(true_classes, {num_sampled}, ScalarType::Float, asked);
  const auto shape = true_classes.sizes();
  Tensor true_count = new_empty(true_classes, {shape.begin(), shape.end()}, ScalarType::Float);
  int64_t* const ids = sampled.mutable_data_ptr<int64_t>();
  float* const of_ids = sampled_count.mutable_data_ptr<float>();
  float* const of_classes = true_count.mutable_data_ptr<float>();
  int64_t* const state = generator.mutable_data_ptr<int64_t>();

  const auto run = [&](const auto& law) {
    Philox words(state[0], state[1], state[2]);
    const int64_t tries = draw(law, words, unique, num_sampled, ids);
    for (int64_t i = 0; i < n; ++i) {
      of_classes[i] = expected_count(law.probability(classes[i]), num_sampled, tries);
    }
    for (int64_t i = 0; i < num_sampled; ++i) {
      of_ids[i] = expected_count(law.probability(ids[i]), num_sampled, tries);
    }
  };
  switch (kind) {
    case CandidateKind::kUniform:
      run(Uniform{range_max});
      break;
    case CandidateKind::kLogUniform:
      run(LogUniform{range_max});
      break;
    case CandidateKind::kFixed: {
      const Tensor weights = as_contiguous(unigrams[0]), chances = as_contiguous(unigrams[1]);
      const Tensor aliases = as_contiguous(unigrams[2]);
      run(FixedUnigram{range_max, weights.const_data_ptr<float>(), chances.const_data_ptr<float>(),
                       aliases.const_data_ptr<int32_t>(), *unigrams[3].const_data_ptr<float>()});
      break;
    }
    case CandidateKind::kLearned:
      run(LearnedUnigram{range_max, counts->const_data_ptr<int32_t>()});
      learn(counts->mutable_data_ptr<int32_t>(), range_max, classes.data(), n);
      break;
    case CandidateKind::kAll:
      for (int64_t i = 0; i < num_sampled; ++i) ids[i] = i;
      std::fill(of_ids, of_ids + num_sampled, 1.0f);
      std::fill(of_classes, of_classes + n, 1.0f);
  }
  state[2] += places_of(num_sampled);
  return {sampled, true_count, sampled_count};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> candidates_unigrams_cpu(const Tensor& unigrams, int64_t reserved,
                                                                   double distortion) {
  check_candidates_unigrams(unigrams, reserved);
  const Tensor dense = as_contiguous(unigrams);
  const float* const given = dense.const_data_ptr<float>();
  const int64_t n = reserved + unigrams.size(0);
  const Asked asked{"candidates_unigrams", "reserved", reserved};
  Tensor weights = new_empty(unigrams, {n}, ScalarType::Float, asked);
  Tensor chances = new_empty(unigrams, {n}, ScalarType::Float, asked);
  Tensor aliases = new_empty(unigrams, {n}, ScalarType::Int, asked);
  Tensor total = new_empty(unigrams, {1}, ScalarType::Float);
  Buffer<double> left(n, asked);
  // Stacks of the ids that have less than a share of 1, and of the others.
  Buffer<int32_t> low(n, asked), high(n, asked);
  float* const w = weights.mutable_data_ptr<float>();
  float* const chance = chances.mutable_data_ptr<float>();
  int32_t* const alias = aliases.mutable_data_ptr<int32_t>();

  float sum = 0;
  double wide_sum = 0;
  std::fill(w, w + reserved, 0.0f);
  for (int64_t id = reserved; id < n; ++id) {
    const float unigram = given[id - reserved];
    w[id] = std::pow(unigram, static_cast<float>(distortion));
    TSR_CHECK_VALUE(unigram >= 0 && w[id] >= 0 && std::isfinite(w[id]), "candidates_unigrams: unigrams[", id - reserved,
                    "] must be at least 0, and finite after distortion, ", distortion, ", got ", unigram);
    sum += w[id];
    wide_sum += static_cast<double>(w[id]);
  }
  TSR_CHECK_VALUE(sum > 0 && std::isfinite(sum), "candidates_unigrams: unigrams must have a finite sum above 0, got ",
                  sum);
  *total.mutable_data_ptr<float>() = sum;

  int64_t lows = 0, highs = 0;
  const auto sort_in = [&](int64_t id) {
    if (left[id] < 1) {
      low[lows++] = static_cast<int32_t>(id);
    } else {
      high[highs++] = static_cast<int32_t>(id);
    }
  };
  for (int64_t id = 0; id < n; ++id) {
    left[id] = static_cast<double>(w[id] * static_cast<float>(n)) / wide_sum;
    sort_in(id);
  }
  while (lows > 0 && highs > 0) {
    const int32_t small = low[--lows], large = high[--highs];
    chance[small] = static_cast<float>(left[small]);
    alias[small] = large;
    left[large] -= 1.0 - left[small];
    sort_in(large);
  }
  // What is left on one side has its share but for rounding.
  for (int64_t i = 0; i < lows + highs; ++i) {
    const int32_t id = i < lows ? low[i] : high[i - lows];
    chance[id] = 1;
    alias[id] = id;
  }
  return {weights, chances, aliases, total};
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "candidates_", &tsr::candidates_cpu);
  TSR_IMPL(m, "candidates_unigrams", &tsr::candidates_unigrams_cpu);
}
