// Body of row_loops.cpp for one instruction set: see isa_foreach.h. No include guard, no includes.

#include "row_vectors_body.h"

// ---- pool -----------------------------------------------------------------------------------------------------------

// Fetches kElements from column d on of the row that comes `ahead` entries later.
template <int kElements, class T, class R, class Out>
static inline __attribute__((always_inline)) void fetch_ahead(const PoolArguments<T, R, Out>& a, int64_t entry,
                                                              int64_t last, int64_t ahead, int64_t d) {
  const int64_t later = entry + ahead < last ? entry + ahead : entry;
  // Not as a pointer: what comes after the last bag may be no row.
  const uint64_t element = static_cast<uint64_t>(a.rows[later]) * static_cast<uint64_t>(a.stride);
  const char* row = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(a.table + d) + element * sizeof(T));
  for (int b = 0; b < kElements * static_cast<int>(sizeof(T)); b += 64) __builtin_prefetch(row + b);
}

// Where a bag's entries are, and how far ahead of them rows are fetched.
struct BagEntries {
  int64_t begin, end;
  int64_t last;  // of all bags of the call
  int64_t ahead;
};

// Adds columns [d, d + kCount vectors) of the entry to the sum.
template <int kBytes, int kCount, bool kWeighted, class T, class R, class Out>
static inline __attribute__((always_inline)) void add_columns(const PoolArguments<T, R, Out>& a, const BagEntries& bag,
                                                              int64_t e, int64_t d,
                                                              Vector<acc_t<T>, kBytes> (&sum)[kCount]) {
  constexpr int kLanes = VectorOf<acc_t<T>, kBytes>::kLanes;
  fetch_ahead<kLanes * kCount>(a, e, bag.last, bag.ahead, d);
  const T* row = a.table + static_cast<int64_t>(a.rows[e]) * a.stride + d;
  for (int k = 0; k < kCount; ++k) {
    Vector<acc_t<T>, kBytes> x;
    load<kBytes>(row + k * kLanes, x);
    if constexpr (kWeighted) x *= a.weights[e];
    sum[k] += x;
  }
}

// The sum of the entries [begin, end), held in registers: at most one block (row_loops.h), or at most one part.
template <SumLength kLength, int kBytes, int kCount, bool kWeighted, class T, class R, class Out>
static inline __attribute__((always_inline)) void sum_columns(const PoolArguments<T, R, Out>& a, const BagEntries& bag,
                                                              int64_t begin, int64_t end, int64_t d,
                                                              Vector<acc_t<T>, kBytes> (&sum)[kCount]) {
  Vector<acc_t<T>, kBytes> blocks[kCount] = {};
  if constexpr (kLength != SumLength::kBlock) {
    for (; end - begin > kSumBlock; begin += kSumBlock) {
      Vector<acc_t<T>, kBytes> block[kCount] = {};
#pragma GCC unroll 4
      for (int64_t e = 0; e < kSumBlock; ++e) add_columns<kBytes, kCount, kWeighted>(a, bag, begin + e, d, block);
      for (int k = 0; k < kCount; ++k) blocks[k] += block[k];
    }
  }
  for (int k = 0; k < kCount; ++k) sum[k] = Vector<acc_t<T>, kBytes>{};
  for (int64_t e = begin; e < end; ++e) add_columns<kBytes, kCount, kWeighted>(a, bag, e, d, sum);
  if constexpr (kLength != SumLength::kBlock) {
    for (int k = 0; k < kCount; ++k) sum[k] += blocks[k];
  }
}

// Columns [d, d + kCount vectors) of one bag.
template <SumLength kLength, int kBytes, int kCount, bool kWeighted, bool kStream, class T, class R, class Out>
static inline __attribute__((always_inline)) void pool_columns(const PoolArguments<T, R, Out>& a, const BagEntries& bag,
                                                               int64_t d, acc_t<T> divisor, Out* out) {
  using A = acc_t<T>;
  constexpr int kLanes = VectorOf<A, kBytes>::kLanes;
  Vector<A, kBytes> sum[kCount];
  if constexpr (kLength == SumLength::kParts) {
    PartSums<kBytes, kCount> parts;
    for (int64_t begin = bag.begin; begin < bag.end; begin += kSumPart) {
      const int64_t end = bag.end - begin > kSumPart ? begin + kSumPart : bag.end;
      sum_columns<kLength, kBytes, kCount, kWeighted>(a, bag, begin, end, d, sum);
      parts.add(sum);
    }
    parts.round(sum);
  } else {
    sum_columns<kLength, kBytes, kCount, kWeighted>(a, bag, bag.begin, bag.end, d, sum);
  }
  for (int k = 0; k < kCount; ++k) {
    if (a.divisors != nullptr) sum[k] /= divisor;
    store<kStream, kBytes>(out + d + k * kLanes, sum[k]);
  }
}

// Columns [d, dim) when fewer than a full register tile is left: ever narrower vectors, down to one element.
template <SumLength kLength, int kBytes, bool kWeighted, bool kStream, class T, class R, class Out>
static inline __attribute__((always_inline)) void pool_rest(const PoolArguments<T, R, Out>& a, const BagEntries& bag,
                                                            int64_t d, acc_t<T> divisor, Out* out) {
  using A = acc_t<T>;
  if constexpr (kBytes >= static_cast<int>(sizeof(A))) {
    constexpr int kLanes = VectorOf<A, kBytes>::kLanes;
    while (d + kLanes <= a.dim) {
      pool_columns<kLength, kBytes, 1, kWeighted, kStream>(a, bag, d, divisor, out);
      d += kLanes;
    }
    pool_rest<kLength, kBytes / 2, kWeighted, kStream>(a, bag, d, divisor, out);
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

// The bags from b on, up to one that is left to a loop for another length. Returns that bag. Several loops: what longer
// sums need would slow down the shortest.
template <SumLength kLength, bool kWeighted, bool kStream, class T, class R, class Out>
static __attribute__((noinline)) int64_t pool_run(const PoolArguments<T, R, Out>& arguments, int64_t b) {
  using A = acc_t<T>;
  PoolArguments<T, R, Out> a = arguments;  // a copy, so that the stores cannot alias it
  if (a.stride == 0) a.stride = a.dim;
  if (a.out_stride == 0) a.out_stride = a.dim;
  const int64_t last = a.starts[a.bags] > a.fetch_end ? a.starts[a.bags] : a.fetch_end;
  constexpr int kCount = 256 / kVectorBytes;
  constexpr int kLanes = VectorOf<A, kVectorBytes>::kLanes;
  const int64_t ahead = rows_ahead(a.dim * static_cast<int64_t>(sizeof(T)));
  for (; b < a.bags; ++b) {
    const BagEntries bag{a.starts[b], a.starts[b + 1], last, ahead};
    if (leaves<kLength, A>(bag.end - bag.begin)) break;
    Out* out = a.out + b * a.out_stride;
    const A divisor = a.divisors != nullptr ? a.divisors[b] : A(1);
    if (kLength == SumLength::kBlock && bag.begin == bag.end) {
      const int64_t first = b;  // of a run of empty bags, often long in a dense gradient
      while (a.out_stride == a.dim && b + 1 < a.bags && a.starts[b + 2] == bag.end) ++b;
      clear<kStream>(out, (b - first + 1) * a.dim);
      continue;
    }
    if (divisor == A(0)) {
      clear<kStream>(out, a.dim);
      continue;
    }
    int64_t d = 0;
    for (; d + kCount * kLanes <= a.dim; d += kCount * kLanes) {
      pool_columns<kLength, kVectorBytes, kCount, kWeighted, kStream>(a, bag, d, divisor, out);
    }
    if (d + kCount / 2 * kLanes <= a.dim) {
      pool_columns<kLength, kVectorBytes, kCount / 2, kWeighted, kStream>(a, bag, d, divisor, out);
      d += kCount / 2 * kLanes;
    }
    pool_rest<kLength, kVectorBytes, kWeighted, kStream>(a, bag, d, divisor, out);
  }
  return b;
}

template <bool kWeighted, bool kStream, class T, class R, class Out>
static void pool_rows(const PoolArguments<T, R, Out>& a) {
  for (int64_t b = 0; b < a.bags;) {
    b = pool_run<SumLength::kBlock, kWeighted, kStream>(a, b);
    if constexpr (kSumsInBlocks<acc_t<T>>) {
      b = pool_run<SumLength::kPart, kWeighted, kStream>(a, b);
      b = pool_run<SumLength::kParts, kWeighted, kStream>(a, b);
    }
  }
#if defined(__x86_64__)
  if constexpr (kStream) _mm_sfence();
#endif
}

template <class T, class R, class Out>
static void pool(const PoolArguments<T, R, Out>& a) {
  // Streaming stores need whole, aligned vectors; the half types are narrowed element by element.
  const bool whole = (reinterpret_cast<uintptr_t>(a.out) | static_cast<uintptr_t>((a.dim | a.out_stride) * sizeof(T))) %
                         kVectorBytes ==
                     0;
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    if (a.stream && whole) return a.weights ? pool_rows<true, true>(a) : pool_rows<false, true>(a);
  }
  return a.weights ? pool_rows<true, false>(a) : pool_rows<false, false>(a);
}

// ---- pool_max and its gradient --------------------------------------------------------------------------------------

template <class T, class R>
static void pool_max(const PoolArguments<T, R>& a, const int64_t* positions, int64_t* argmax) {
  using A = acc_t<T>;
  const int64_t stride = a.stride == 0 ? a.dim : a.stride, out_stride = a.out_stride == 0 ? a.dim : a.out_stride;
  for (int64_t bag = 0; bag < a.bags; ++bag) {
    const int64_t begin = a.starts[bag], end = a.starts[bag + 1];
    T* out = a.out + bag * out_stride;
    int64_t* winner = argmax + bag * a.dim;
    const T* first = begin < end ? a.table + static_cast<int64_t>(a.rows[begin]) * stride : nullptr;
    for (int64_t d = 0; d < a.dim; ++d) {
      out[d] = first != nullptr ? first[d] : T(0.0f);
      winner[d] = first != nullptr ? positions[begin] : -1;
    }
    for (int64_t e = begin + 1; e < end; ++e) {
      const T* row = a.table + static_cast<int64_t>(a.rows[e]) * stride;
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

template <class T, class R, class Out>
static void pool_won(const PoolArguments<T, R, Out>& a, const int64_t* positions, const int64_t* winners,
                     const int64_t* places) {
  using A = acc_t<T>;
  constexpr int64_t kTile = 64;
  const int64_t stride = a.stride == 0 ? a.dim : a.stride;
  for (int64_t bag = 0; bag < a.bags; ++bag) {
    Out* out = a.out + bag * a.dim;
    for (int64_t tile = 0; tile < a.dim; tile += kTile) {
      const int64_t width = tile + kTile < a.dim ? kTile : a.dim - tile;
      double total[kTile] = {};
      for (int64_t begin = a.starts[bag], end; begin < a.starts[bag + 1]; begin = end) {
        end = sum_block_end<A>(begin, a.starts[bag + 1]);
        A block[kTile] = {};
        for (int64_t e = begin; e < end; ++e) {
          const T* row = a.table + static_cast<int64_t>(a.rows[e]) * stride + tile;
          const int64_t place = places != nullptr ? places[e] : static_cast<int64_t>(a.rows[e]) * a.dim;
          const int64_t* winner = place >= 0 ? winners + place + tile : nullptr;
          const A weight = a.weights != nullptr ? a.weights[e] : A(1);
          for (int64_t k = 0; k < width; ++k) {
            if (winner == nullptr || winner[k] == positions[e]) block[k] += static_cast<A>(row[k]) * weight;
          }
        }
        for (int64_t k = 0; k < width; ++k) total[k] += static_cast<double>(block[k]);
      }
      for (int64_t k = 0; k < width; ++k) out[tile + k] = static_cast<Out>(static_cast<A>(total[k]));
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
static const RowLoops<T, R> kRowLoops = {pool<T, R, T>, pool<T, R, acc_t<T>>, pool_max<T, R>, pool_won<T, R, T>,
                                         pool_won<T, R, acc_t<T>>};
template <class T>
static const DotLoop<T> kDotLoop = {dot<T>};
