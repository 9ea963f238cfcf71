// What a step without gradient does to a row, and many such steps at once: the idle maps of row_optimizer.h.
//
// A rule that moves rows whose gradient is zero moves them by a map that does not depend on the row. Maps of
// consecutive blocks of steps compose, so the history of the steps is a tree of them: the map of the aligned block of
// steps (base + i 2^l, base + (i + 1) 2^l] is row (2 i + 1) 2^l - 1 of history [2 * capacity, 8], float64. A step
// writes its own leaf and the blocks that it completes; the map from any step to any later one is the product of O(log)
// blocks.
#pragma once
#include <cmath>
#include <vector>

#include "dispatch.h"

namespace tsr {

constexpr int64_t kHistoryColumns = 8;

// ---- Linear maps ----------------------------------------------------------------------------------------------------

// (w, b) -> (w_w w + w_b b, b_w w + b_b b) for the weight and its momentum, and p times the averages.
struct LinearMap {
  double w_w = 1, w_b = 0, b_w = 0, b_b = 1, p = 1;
  double unused[3] = {};

  // `first`, then `second`.
  TSR_HOST_DEVICE static LinearMap composed(const LinearMap& first, const LinearMap& second) {
    LinearMap both;
    both.w_w = second.w_w * first.w_w + second.w_b * first.b_w;
    both.w_b = second.w_w * first.w_b + second.w_b * first.b_b;
    both.b_w = second.b_w * first.w_w + second.b_b * first.b_w;
    both.b_b = second.b_w * first.w_b + second.b_b * first.b_b;
    both.p = second.p * first.p;
    return both;
  }
};

// ---- Adam's maps ----------------------------------------------------------------------------------------------------

// From step s to step t an idle row moves by
//   m' = p1 m,   v' = root2^2 v,   w' = d w - m S(sqrt(v)),   S(q) = sum over the steps u of weight_u / (A_u q + eps)
//   weight_u = lr_u / (1 - beta1_u^u) * d(u, t) * p1(s, u),   A_u = root2(s, u) / sqrt(1 - beta2_u^u)
// with p1, root2 and d the products of beta1, sqrt(beta2) and 1 - lr * weight_decay (if decoupled, else 1) over the
// steps. n[k] is the sum of weight_u * A_u^k: the moments of A, from which a few terms give S (AdamTerm).
// kShrinks: false for amsgrad, whose divisor, the largest v so far, does not shrink in idle steps: A_u without root2.
template <bool kShrinks>
struct AdamMap {
  double p1 = 1, root2 = 1, d = 1;
  double n[5] = {};

  TSR_HOST_DEVICE double shrinking() const { return kShrinks ? root2 : 1.0; }

  TSR_HOST_DEVICE static AdamMap composed(const AdamMap& first, const AdamMap& second) {
    AdamMap both;
    both.p1 = first.p1 * second.p1;
    both.root2 = first.root2 * second.root2;
    both.d = first.d * second.d;
    double factor = first.p1;
    for (int k = 0; k < 5; ++k) {
      both.n[k] = second.d * first.n[k] + factor * second.n[k];
      factor *= first.shrinking();
    }
    return both;
  }
};
static_assert(sizeof(LinearMap) == kHistoryColumns * sizeof(double) && sizeof(AdamMap<true>) == sizeof(LinearMap),
              "a map is a row of history");

// A part of S: consecutive steps, expanded around their mean A. With x = a q / (a q + eps), in [0, 1]:
//   S <- d S + (m0 + x^2 (m2 - x m3)) / (a q + eps)
// a and the m count from the step where the row is, d is over this part's steps. An infinite q gives 0.
template <class A>
struct AdamTerm {
  A a, m0, m2, m3, d;

  TSR_HOST_DEVICE TSR_ALWAYS_INLINE A of(A q, A eps) const {
    const A shrunk = a * q;
    const A inverse = A(1) / (shrunk + eps);
    const A ratio = shrunk * inverse;
    const A x = ratio < A(1) ? ratio : A(1);  // also of infinity times 0
    return inverse * (m0 + x * x * (m2 - x * m3));
  }
};

// The fourth moment bounds what a term leaves out of S, relative to S: a part where it is larger is taken in pieces.
template <class A>
constexpr double kIdleTolerance = 3e-8;
template <>
constexpr double kIdleTolerance<double> = 1e-13;

// ---- The tree -------------------------------------------------------------------------------------------------------

TSR_HOST_DEVICE inline int64_t history_row(int64_t block, int level) { return ((2 * block + 1) << level) - 1; }

// The level of the largest aligned block that begins at step `from` and ends by `to`, both counted from the base.
TSR_HOST_DEVICE inline int block_level(int64_t from, int64_t to) {
  int level = 0;
  while ((from >> level & 1) == 0 && from + (int64_t{2} << level) <= to) ++level;
  return level;
}

template <class Map>
TSR_HOST_DEVICE const Map& block_map(const Map* history, int64_t from, int level) {
  return history[history_row(from >> level, level)];
}

// The map from step `from` to step `to`.
template <class Map>
TSR_HOST_DEVICE Map idle_map(const Map* history, int64_t from, int64_t to) {
  Map map;
  while (from < to) {
    const int level = block_level(from, to);
    map = Map::composed(map, block_map(history, from, level));
    from += int64_t{1} << level;
  }
  return map;
}

// Writes the leaf of step `at` (the first after the base is 0) and the blocks that it completes.
template <class Map>
TSR_HOST_DEVICE void append_map(Map* history, int64_t at, const Map& leaf) {
  Map map = leaf;
  history[history_row(at, 0)] = map;
  for (int level = 0; (at >> level & 1) != 0; ++level) {
    map = Map::composed(history[history_row((at >> level) - 1, level)], map);
    history[history_row(at >> (level + 1), level + 1)] = map;
  }
}

// ---- The terms of S -------------------------------------------------------------------------------------------------

// The moments of a part's A around their mean, as multiples of its powers. A part that moves nothing has mean 1, since
// S divides by it alone where eps is 0.
struct CentralMoments {
  double mean = 0, m2 = 0, m3 = 0, m4 = 0;

  template <class Map>
  TSR_HOST_DEVICE explicit CentralMoments(const Map& part) {
    mean = part.n[0] == 0 ? 1 : part.n[1] / part.n[0];
    if (mean == 0) return;
    const double scale = 1 / mean, scale2 = scale * scale;
    const double second = part.n[2] * scale2, third = part.n[3] * scale2 * scale;
    m2 = second - part.n[0];
    m3 = third - 3 * second + 2 * part.n[0];
    m4 = part.n[4] * scale2 * scale2 - 4 * third + 6 * second - 3 * part.n[0];
  }
};

// Cuts the steps from `from` to `to` into few parts that are one term each: f(AdamTerm<double>) for each of them, in
// their order. Deep enough every part is one step, whose term is exact.
template <bool kShrinks>
class AdamTerms {
 public:
  using Map = AdamMap<kShrinks>;
  TSR_HOST_DEVICE AdamTerms(const Map* history, double tolerance) : history_(history), tolerance_(tolerance) {}

  // Whether the whole way is one term: the usual case.
  TSR_HOST_DEVICE bool is_one(const Map& whole) const { return CentralMoments(whole).m4 <= tolerance_ * whole.n[0]; }

  // The term of a part to which p1 and shrinking lead from where the row is.
  TSR_HOST_DEVICE static AdamTerm<double> term(const Map& part, double p1, double shrinking) {
    const CentralMoments moments(part);
    return {shrinking * moments.mean, p1 * part.n[0], p1 * moments.m2, p1 * moments.m3, part.d};
  }

  template <class F>
  TSR_HOST_DEVICE void walk(int64_t from, int64_t to, const F& f) const {
    Map part;
    bool empty = true;
    // p1 and shrinking up to where the part begins, and how much S has by then, times that shrinking: terms are small
    // against what came before them, and need less accuracy.
    double p1 = 1, shrinking = 1, before = 0;
    while (from < to) {
      int level = block_level(from, to);
      for (;; --level) {
        const Map& block = block_map(history_, from, level);
        const Map longer = empty ? block : Map::composed(part, block);
        if (level == 0 && empty ? true : fits(longer, p1, before)) {
          part = longer;
          break;
        }
        if (!empty) {
          f(term(part, p1, shrinking));
          const CentralMoments moments(part);
          const double size = moments.mean > 0 ? p1 * part.n[0] / moments.mean : 0;
          before = (before + size) * part.shrinking();
          p1 *= part.p1;
          shrinking *= part.shrinking();
          empty = true;
          ++level;  // the same block again, on its own
        }
      }
      empty = false;
      from += int64_t{1} << level;
    }
    if (!empty) f(term(part, p1, shrinking));
  }

  // Walks over the terms without putting blocks together: more parts, and half of the registers.
  template <class F>
  TSR_HOST_DEVICE void walk_blocks(int64_t from, int64_t to, const F& f) const {
    double p1 = 1, shrinking = 1, before = 0;
    while (from < to) {
      int level = block_level(from, to);
      while (level > 0 && !fits(block_map(history_, from, level), p1, before)) --level;
      const Map& part = block_map(history_, from, level);
      const AdamTerm<double> whole = term(part, p1, shrinking);
      f(whole);
      const double mean = CentralMoments(part).mean;
      before = (before + (mean > 0 ? whole.m0 / mean : 0)) * part.shrinking();
      p1 *= part.p1;
      shrinking *= part.shrinking();
      from += int64_t{1} << level;
    }
  }

 private:
  TSR_HOST_DEVICE bool fits(const Map& part, double p1, double before) const {
    const CentralMoments moments(part);
    return p1 * moments.m4 <= tolerance_ * (before * moments.mean + p1 * part.n[0]);
  }

  const Map* history_;
  double tolerance_;
};

}  // namespace tsr
