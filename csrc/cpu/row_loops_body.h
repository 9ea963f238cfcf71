// Body of row_loops.cpp for one instruction set: see isa_foreach.h. No include guard, no includes.

#include "row_vectors_body.h"

// ---- pool -----------------------------------------------------------------------------------------------------------

// Fetches kElements from column d on of the row that comes `ahead` entries later.
template <int kElements, class T, class R>
static inline __attribute__((always_inline)) void fetch_ahead(const PoolArguments<T, R>& a, int64_t entry, int64_t last,
                                                              int64_t ahead, int64_t d) {
  const int64_t later = entry + ahead < last ? entry + ahead : entry;
  const char* row = reinterpret_cast<const char*>(a.table + static_cast<int64_t>(a.rows[later]) * a.stride + d);
  for (int b = 0; b < kElements * static_cast<int>(sizeof(T)); b += 64) __builtin_prefetch(row + b);
}

// Where a bag's entries are, and how far ahead of them rows are fetched.
struct BagEntries {
  int64_t begin, end;
  int64_t last;  // of all bags of the call
  int64_t ahead;
};

// Columns [d, d + kCount vectors) of one bag, held in registers over all its entries.
template <int kBytes, int kCount, bool kWeighted, bool kStream, class T, class R>
static inline __attribute__((always_inline)) void pool_columns(const PoolArguments<T, R>& a, const BagEntries& bag,
                                                               int64_t d, acc_t<T> divisor, T* out) {
  using A = acc_t<T>;
  constexpr int kLanes = VectorOf<A, kBytes>::kLanes;
  Vector<A, kBytes> sum[kCount] = {};
  for (int64_t e = bag.begin; e < bag.end; ++e) {
    fetch_ahead<kLanes * kCount>(a, e, bag.last, bag.ahead, d);
    const T* row = a.table + static_cast<int64_t>(a.rows[e]) * a.stride + d;
    for (int k = 0; k < kCount; ++k) {
      Vector<A, kBytes> x;
      load<kBytes>(row + k * kLanes, x);
      if constexpr (kWeighted) x *= a.weights[e];
      sum[k] += x;
    }
  }
  for (int k = 0; k < kCount; ++k) {
    if (a.divisors != nullptr) sum[k] /= divisor;
    store<kStream, kBytes>(out + d + k * kLanes, sum[k]);
  }
}

// Columns [d, dim) when fewer than a full register tile is left: ever narrower vectors, then single elements.
template <int kBytes, bool kWeighted, bool kStream, class T, class R>
static inline __attribute__((always_inline)) void pool_rest(const PoolArguments<T, R>& a, const BagEntries& bag,
                                                            int64_t d, acc_t<T> divisor, T* out) {
  using A = acc_t<T>;
  if constexpr (kBytes >= 16) {
    constexpr int kLanes = VectorOf<A, kBytes>::kLanes;
    while (d + kLanes <= a.dim) {
      pool_columns<kBytes, 1, kWeighted, kStream>(a, bag, d, divisor, out);
      d += kLanes;
    }
    pool_rest<kBytes / 2, kWeighted, kStream>(a, bag, d, divisor, out);
  } else {
    for (; d < a.dim; ++d) {
      A sum = 0;
      for (int64_t e = bag.begin; e < bag.end; ++e) {
        fetch_ahead<1>(a, e, bag.last, bag.ahead, d);
        A x = static_cast<A>(a.table[static_cast<int64_t>(a.rows[e]) * a.stride + d]);
        if constexpr (kWeighted) x *= a.weights[e];
        sum += x;
      }
      out[d] = static_cast<T>(a.divisors != nullptr ? sum / divisor : sum);
    }
  }
}

template <bool kStream, class T>
static inline __attribute__((always_inline)) void clear(T* out, int64_t dim) {
  constexpr int kLanes = VectorOf<acc_t<T>, kVectorBytes>::kLanes;
  const Vector<acc_t<T>, kVectorBytes> zero = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store<kStream, kVectorBytes>(out + d, zero);
  for (; d < dim; ++d) out[d] = T(0.0f);
}

template <bool kWeighted, bool kStream, class T, class R>
static void pool_rows(const PoolArguments<T, R>& arguments) {
  using A = acc_t<T>;
  PoolArguments<T, R> a = arguments;  // a copy, so that the stores cannot alias it
  if (a.stride == 0) a.stride = a.dim;
  constexpr int kCount = 256 / kVectorBytes;
  constexpr int kLanes = VectorOf<A, kVectorBytes>::kLanes;
  const int64_t ahead = rows_ahead(a.dim * static_cast<int64_t>(sizeof(T)));
  for (int64_t b = 0; b < a.bags; ++b) {
    const BagEntries bag{a.starts[b], a.starts[b + 1], a.starts[a.bags], ahead};
    T* out = a.out + b * a.dim;
    const A divisor = a.divisors != nullptr ? a.divisors[b] : A(1);
    if (bag.begin == bag.end) {
      const int64_t first = b;  // of a run of empty bags, often long in a dense gradient
      while (b + 1 < a.bags && a.starts[b + 2] == bag.end) ++b;
      clear<kStream>(out, (b - first + 1) * a.dim);
      continue;
    }
    if (divisor == A(0)) {
      clear<kStream>(out, a.dim);
      continue;
    }
    int64_t d = 0;
    for (; d + kCount * kLanes <= a.dim; d += kCount * kLanes) {
      pool_columns<kVectorBytes, kCount, kWeighted, kStream>(a, bag, d, divisor, out);
    }
    if (d + kCount / 2 * kLanes <= a.dim) {
      pool_columns<kVectorBytes, kCount / 2, kWeighted, kStream>(a, bag, d, divisor, out);
      d += kCount / 2 * kLanes;
    }
    pool_rest<kVectorBytes, kWeighted, kStream>(a, bag, d, divisor, out);
  }
#if defined(__x86_64__)
  if constexpr (kStream) _mm_sfence();
#endif
}

template <class T, class R>
static void pool(const PoolArguments<T, R>& a) {
  // Streaming stores need whole, aligned vectors; the half types are narrowed element by element.
  const bool whole =
      (reinterpret_cast<uintptr_t>(a.out) | static_cast<uintptr_t>(a.dim * sizeof(T))) % kVectorBytes == 0;
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    if (a.stream && whole) return a.weights ? pool_rows<true, true>(a) : pool_rows<false, true>(a);
  }
  return a.weights ? pool_rows<true, false>(a) : pool_rows<false, false>(a);
}

// ---- pool_max and its gradient --------------------------------------------------------------------------------------

template <class T, class R>
static void pool_max(const PoolArguments<T, R>& a, const int64_t* positions, int64_t* argmax) {
  using A = acc_t<T>;
  for (int64_t bag = 0; bag < a.bags; ++bag) {
    const int64_t begin = a.starts[bag], end = a.starts[bag + 1];
    T* out = a.out + bag * a.dim;
    int64_t* winner = argmax + bag * a.dim;
    const T* first = begin < end ? a.table + static_cast<int64_t>(a.rows[begin]) * a.dim : nullptr;
    for (int64_t d = 0; d < a.dim; ++d) {
      out[d] = first != nullptr ? first[d] : T(0.0f);
      winner[d] = first != nullptr ? positions[begin] : -1;
    }
    for (int64_t e = begin + 1; e < end; ++e) {
      const T* row = a.table + static_cast<int64_t>(a.rows[e]) * a.dim;
      for (int64_t d = 0; d < a.dim; ++d) {
        const A x = static_cast<A>(row[d]), best = static_cast<A>(out[d]);
        // x != x: x is NaN.
        if (x > best || (x != x && best == best)) {
          out[d] = row[d];
          winner[d] = positions[e];
        }
      }
    }
  }
}

template <class T, class R>
static void pool_won(const PoolArguments<T, R>& a, const int64_t* positions, const int64_t* winners) {
  using A = acc_t<T>;
  constexpr int64_t kTile = 64;
  for (int64_t bag = 0; bag < a.bags; ++bag) {
    T* out = a.out + bag * a.dim;
    for (int64_t tile = 0; tile < a.dim; tile += kTile) {
      const int64_t width = tile + kTile < a.dim ? kTile : a.dim - tile;
      A sum[kTile] = {};
      for (int64_t e = a.starts[bag]; e < a.starts[bag + 1]; ++e) {
        const int64_t from = static_cast<int64_t>(a.rows[e]) * a.dim + tile;
        const A weight = a.weights != nullptr ? a.weights[e] : A(1);
        for (int64_t k = 0; k < width; ++k) {
          if (winners[from + k] == positions[e]) sum[k] += static_cast<A>(a.table[from + k]) * weight;
        }
      }
      for (int64_t k = 0; k < width; ++k) out[tile + k] = static_cast<T>(sum[k]);
    }
  }
}

// ---- dot ------------------------------------------------------------------------------------------------------------

template <class T>
static acc_t<T> dot(const T* x, const T* y, int64_t dim) {
  using A = acc_t<T>;
  constexpr int kLanes = VectorOf<A, 64>::kLanes;
  // Pieces of the machine's own width; together always 64 bytes of partial sums, so that all levels agree.
  constexpr int kPieces = 64 / kVectorBytes;
  constexpr int kPieceLanes = VectorOf<A, kVectorBytes>::kLanes;
  Vector<A, kVectorBytes> sum[kPieces] = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    for (int p = 0; p < kPieces; ++p) {
      Vector<A, kVectorBytes> a, b;
      load<kVectorBytes>(x + d + p * kPieceLanes, a);
      load<kVectorBytes>(y + d + p * kPieceLanes, b);
      sum[p] += a * b;
    }
  }
  A lanes[kLanes];
  for (int k = 0; k < kLanes; ++k) lanes[k] = sum[k / kPieceLanes][k % kPieceLanes];
  for (int k = 0; d < dim; ++d, ++k) lanes[k] += static_cast<A>(x[d]) * static_cast<A>(y[d]);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

template <class T, class R>
static const RowLoops<T, R> kRowLoops = {pool<T, R>, pool_max<T, R>, pool_won<T, R>};
template <class T>
static const DotLoop<T> kDotLoop = {dot<T>};
