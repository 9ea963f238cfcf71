#include "../scores.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "bags.h"
#include "level.h"

namespace tsr {
namespace {

// The loops over a sample's scores in float32, compiled per instruction set.
struct ScoresLoops {
  // The largest of n scores and `most`; of NaN nothing is said.
  float (*largest)(const float* scores, int64_t n, float most);
  // The sum of exp(scores - base).
  double (*sum_of_exponentials)(const float* scores, int64_t n, float base);
  // scores = exp(scores - base) * factor.
  void (*exponentials)(float* scores, int64_t n, float base, float factor);
  // Where the first kScoresLanes scores begin of which one is above the bar, or NaN; n if none is.
  int64_t (*first_above)(const float* scores, int64_t n, float bar);
};

#define TSR_ISA_BODY "scores_body.h"
#include "isa_foreach.h"

const ScoresLoops& loops() { return pick_level(baseline::kScoresLoops, avx2::kScoresLoops, avx512::kScoresLoops); }

// Those in float64, by the C library.
double largest(const double* scores, int64_t n, double most) {
  for (int64_t c = 0; c < n; ++c) most = scores[c] > most ? scores[c] : most;
  return most;
}
double sum_of_exponentials(const double* scores, int64_t n, double base) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += std::exp(scores[c] - base);
  return sum;
}
void exponentials(double* scores, int64_t n, double base, double factor) {
  for (int64_t c = 0; c < n; ++c) scores[c] = std::exp(scores[c] - base) * factor;
}
int64_t first_above(const double* scores, int64_t n, double bar) {
  int64_t c = 0;
  while (c < n && scores[c] <= bar) ++c;
  return c;
}

float largest(const float* scores, int64_t n, float most) { return loops().largest(scores, n, most); }
double sum_of_exponentials(const float* scores, int64_t n, float base) {
  return loops().sum_of_exponentials(scores, n, base);
}
void exponentials(float* scores, int64_t n, float base, float factor) { loops().exponentials(scores, n, base, factor); }
int64_t first_above(const float* scores, int64_t n, float bar) { return loops().first_above(scores, n, bar); }

// Calls f(n) for every sample; an exponential costs about eight times what moving an element does.
template <class F>
void for_samples(const Tensor& scores, const F& f) {
  parallel_for(0, scores.size(0), kWorkPerThread / (8 * scores.size(1) + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) f(n);
  });
}

// Calls f with the tag of the scores' type.
template <class F>
void dispatch_scores(const Tensor& scores, const F& f) {
  scores.scalar_type() == ScalarType::Double ? f(type_tag<double>{}) : f(type_tag<float>{});
}

// ---- The best rows --------------------------------------------------------------------------------------------------

template <class T>
struct Scored {
  T value;
  int64_t row;
  bool operator<(const Scored& other) const { return is_better(value, row, other.value, other.row); }
};

// The k best scores of a sample, in order. Most blocks hold none that is better than the k-th, which a look at each
// score finds. Those that are better gather until there are k, and are sorted and merged.
template <class T>
struct Best {
  T* values;
  int64_t* rows;
  int64_t k;
  Scored<T>* found;  // [k + kScoresLanes]

  void add(const T* scores, int64_t columns, int64_t first_row) const {
    for (int64_t c = 0; c < columns;) {
      const T last = values[k - 1];
      const int64_t last_row = rows[k - 1];
      // A row before the k-th's may be better with the same score, and no score is above NaN.
      const T bar = last_row < first_row + c && last == last ? last : -std::numeric_limits<T>::infinity();
      int64_t n = 0;
      while (n < k && (c += first_above(scores + c, columns - c, bar)) < columns) {
        for (const int64_t end = std::min(c + kScoresLanes, columns); c < end; ++c) {
          if (is_better(scores[c], first_row + c, last, last_row)) found[n++] = {scores[c], first_row + c};
        }
      }
      merge(n);
    }
  }

 private:
  void merge(int64_t n) const {
    std::sort(found, found + n);
    // How many of both are among the k best.
    int64_t old = k, taken = 0;
    while (taken < n && old > 0 && is_better(found[taken].value, found[taken].row, values[old - 1], rows[old - 1])) {
      --old;
      ++taken;
    }
    // From the last place on: what is before the best of the new ones stays where it is.
    for (int64_t to = k - 1; taken > 0; --to) {
      const Scored<T>& mine = found[taken - 1];
      const bool is_old = old > 0 && is_better(mine.value, mine.row, values[old - 1], rows[old - 1]);
      values[to] = is_old ? values[old - 1] : mine.value;
      rows[to] = is_old ? rows[old - 1] : mine.row;
      is_old ? --old : --taken;
    }
  }
};

}  // namespace

Tensor scores_targets_cpu(const Tensor& target_, int64_t rows, int64_t ignore_index, bool excluded) {
  check_scores_targets(target_, rows);
  const Tensor target = as_contiguous(target_), out = new_empty(target, {target.size(0)}, ScalarType::Long);
  int64_t* const to = out.mutable_data_ptr<int64_t>();
  dispatch_index(target.scalar_type(), "scores_targets", "target", [&](auto tag) {
    const auto* from = target.const_data_ptr<typename decltype(tag)::type>();
    for (int64_t n = 0; n < target.size(0); ++n) {
      const int64_t value = from[n];
      const bool is_ignored = value == ignore_index;
      if (!is_ignored && (value < 0 || value >= rows)) {
        throw std::out_of_range(bad_target(excluded ? "excluded" : "target", n, value, rows, ignore_index, excluded));
      }
      to[n] = is_ignored ? -1 : value;
    }
  });
  return out;
}

void scores_exclude_cpu(const Tensor& scores, const Tensor& row_ids_, const Tensor& samples_, int64_t first_row) {
  check_scores_exclude(scores, row_ids_, samples_, first_row);
  const Tensor row_ids = as_contiguous(row_ids_), samples = as_contiguous(samples_);
  const int64_t *row = row_ids.const_data_ptr<int64_t>(), *sample = samples.const_data_ptr<int64_t>();
  const int64_t columns = scores.size(1), end = row_ids.size(0);
  dispatch_scores(scores, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const to = scores.mutable_data_ptr<T>();
    for (int64_t e = std::lower_bound(row, row + end, first_row) - row; e < end && row[e] < first_row + columns; ++e) {
      if (sample[e] < 0 || sample[e] >= scores.size(0)) {
        throw_bad_index("scores_exclude_", "samples", samples, e, scores.size(0));
      }
      // Rows that do not ascend may lie before the block.
      if (row[e] < first_row) continue;
      to[sample[e] * columns + row[e] - first_row] = -std::numeric_limits<T>::infinity();
    }
  });
}

void scores_lse_cpu(const Tensor& scores_, const Tensor& target_, int64_t first_row, const Tensor& maximum,
                    const Tensor& sum, const Tensor& own) {
  check_scores_lse(scores_, target_, first_row, maximum, sum, own);
  const Tensor scores = as_contiguous(scores_), targets = as_contiguous(target_);
  const int64_t columns = scores.size(1);
  dispatch_scores(scores, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t* const target = targets.const_data_ptr<int64_t>();
    T *const most = maximum.mutable_data_ptr<T>(), *const of_target = own.mutable_data_ptr<T>();
    double* const sums = sum.mutable_data_ptr<double>();
    for_samples(scores, [&](int64_t n) {
      const T* const row = scores.const_data_ptr<T>() + n * columns;
      const T top = largest(row, columns, most[n]), base = base_of(top);
      if (top != most[n]) sums[n] *= std::exp(static_cast<double>(most[n]) - base);
      sums[n] += sum_of_exponentials(row, columns, base);
      most[n] = sums[n] == sums[n] ? top : std::numeric_limits<T>::quiet_NaN();
      if (is_in_block(target[n], first_row, columns)) of_target[n] = row[target[n] - first_row];
    });
  });
}

void scores_softmax_cpu(const Tensor& scores, const Tensor& maximum_, const Tensor& target_, int64_t first_row,
                        const Tensor& factor_, const Tensor& own_factor_) {
  check_scores_softmax(scores, maximum_, target_, first_row, factor_, own_factor_);
  const Tensor maximum = as_contiguous(maximum_), targets = as_contiguous(target_), factors = as_contiguous(factor_);
  const Tensor own_factors = as_contiguous(own_factor_);
  const int64_t columns = scores.size(1);
  dispatch_scores(scores, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t* const target = targets.const_data_ptr<int64_t>();
    const T *const most = maximum.const_data_ptr<T>(), *const factor = factors.const_data_ptr<T>();
    const T* const own_factor = own_factors.const_data_ptr<T>();
    for_samples(scores, [&](int64_t n) {
      T* const row = scores.mutable_data_ptr<T>() + n * columns;
      exponentials(row, columns, base_of(most[n]), factor[n]);
      if (is_in_block(target[n], first_row, columns)) row[target[n] - first_row] += own_factor[n];
    });
  });
}

void scores_top_k_cpu(const Tensor& scores_, int64_t first_row, const Tensor& values, const Tensor& rows) {
  check_scores_top_k(scores_, first_row, values, rows);
  const Tensor scores = as_contiguous(scores_);
  const int64_t columns = scores.size(1), k = values.size(1);
  if (k == 0) return;
  dispatch_scores(scores, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const value = values.mutable_data_ptr<T>();
    int64_t* const row = rows.mutable_data_ptr<int64_t>();
    const int64_t workers = workers_for(scores.numel());
    std::vector<Buffer<Scored<T>>> found;
    for (int64_t w = 0; w < workers; ++w) found.emplace_back(k + kScoresLanes);
    parallel_dynamic(scores.size(0), workers, [&](int64_t worker, int64_t n) {
      const Best<T> best{value + n * k, row + n * k, k, found[static_cast<size_t>(worker)].data()};
      best.add(scores.const_data_ptr<T>() + n * columns, columns, first_row);
    });
  });
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "scores_targets", &tsr::scores_targets_cpu);
  TSR_IMPL(m, "scores_exclude_", &tsr::scores_exclude_cpu);
  TSR_IMPL(m, "scores_lse_", &tsr::scores_lse_cpu);
  TSR_IMPL(m, "scores_softmax_", &tsr::scores_softmax_cpu);
  TSR_IMPL(m, "scores_top_k_", &tsr::scores_top_k_cpu);
}
