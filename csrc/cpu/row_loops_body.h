// Body of row_loops.cpp for one instruction set: see isa_foreach.h. No include guard, no includes.

#include "row_vectors_body.h"

// ---- pool -----------------------------------------------------------------------------------------------------------

// Where a bag's entries are, and how many entries ahead of each the rows are fetched.
struct BagEntries {
  int64_t begin, end;
  int64_t ahead;
};

// Fetches `bytes` of what comes later. table: from the walk's first column on.
template <class T, class R>
static inline __attribute__((always_inline)) void fetch_ahead(const PoolArguments<T, R>& a, const T* table,
                                                              const BagEntries& bag, int64_t entry, int64_t bytes) {
  // Not as a pointer: what comes after the last bag may be no row.
  const uint64_t element = static_cast<uint64_t>(a.rows[entry + bag.ahead]) * static_cast<uint64_t>(a.stride);
  fetch_later(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(table) + element * sizeof(T)), bytes);
}

// Adds these columns of the entry to the sum.
template <bool kWeighted, class Columns, class T, class R>
static inline __attribute__((always_inline)) void add_columns(const PoolArguments<T, R>& a, const T* table,
                                                              const BagEntries& bag, int64_t e, const Columns& columns,
                                                              int64_t fetched,
                                                              typename Columns::V (&sum)[Columns::kCount]) {
  if (fetched > 0) fetch_ahead(a, table, bag, e, fetched);
  typename Columns::V x[Columns::kCount];
  columns.get(table + static_cast<int64_t>(a.rows[e]) * a.stride, x);
  for (int k = 0; k < Columns::kCount; ++k) {
    if constexpr (kWeighted) x[k] *= a.weights[e];
    sum[k] += x[k];
  }
}

// The sum of the entries [begin, end), held in registers: at most one block (row_loops.h), or at most one part.
template <SumLength kLength, bool kWeighted, class Columns, class T, class R>
static inline __attribute__((always_inline)) void sum_columns(const PoolArguments<T, R>& a, const BagEntries& bag,
                                                              int64_t begin, int64_t end, const Columns& columns,
                                                              int64_t fetched,
                                                              typename Columns::V (&sum)[Columns::kCount]) {
  using V = typename Columns::V;
  constexpr int kCount = Columns::kCount;
  const T* table = a.table + columns.first;
  V blocks[kCount] = {};
  if constexpr (kLength == SumLength::kLong) {
    for (; end - begin > kSumBlock; begin += kSumBlock) {
      V block[kCount] = {};
      // Not written out, as compilers do where columns are few: all fetches would come at once.
#pragma GCC unroll 1
      for (int64_t e = 0; e < kSumBlock; ++e) add_columns<kWeighted>(a, table, bag, begin + e, columns, fetched, block);
      for (int k = 0; k < kCount; ++k) blocks[k] += block[k];
    }
  }
  for (int k = 0; k < kCount; ++k) sum[k] = V{};
  for (int64_t e = begin; e < end; ++e) add_columns<kWeighted>(a, table, bag, e, columns, fetched, sum);
  if constexpr (kLength == SumLength::kLong) {
    for (int k = 0; k < kCount; ++k) sum[k] += blocks[k];
  }
}

// Writes these columns of the row of the result that begins at `row`. How is asked here and not by loops of their own
// for each way: once for many sums costs nothing.
template <class Columns, class T, class R>
static inline __attribute__((always_inline)) void put_columns(const PoolArguments<T, R>& a, int64_t row,
                                                              const Columns& columns,
                                                              const typename Columns::V (&sum)[Columns::kCount]) {
  if constexpr (!std::is_same_v<T, acc_t<T>>) {
    if (a.wide != nullptr) return columns.put(a.wide + row + columns.first, sum);
  } else if constexpr (Columns::kBytes == kVectorBytes) {
    if (a.stream) {
      T* to = a.out + row + columns.first;
      for (int k = 0; k < Columns::kCount; ++k) stream(to + k * VectorOf<T, kVectorBytes>::kLanes, sum[k]);
      return;
    }
  }
  columns.put(a.out + row + columns.first, sum);
}

// These columns of a bag, whose result begins at `row`.
template <SumLength kLength, bool kWeighted, class Columns, class T, class R>
static inline __attribute__((always_inline)) void pool_columns(const PoolArguments<T, R>& a, int64_t row,
                                                               const BagEntries& bag, acc_t<T> divisor,
                                                               PartSums<>& parts, const Columns& columns,
                                                               int64_t fetched) {
  constexpr int kCount = Columns::kCount;
  typename Columns::V sum[kCount];
  if constexpr (kLength == SumLength::kLong) {
    for (int64_t begin = bag.begin, end;; begin = end) {
      end = bag.end - begin > kSumPart ? begin + kSumPart : bag.end;
      sum_columns<kLength, kWeighted>(a, bag, begin, end, columns, fetched, sum);
      if (end == bag.end && begin == bag.begin) break;
      parts.add(sum);
      if (end < bag.end) continue;
      parts.round(sum);
      break;
    }
  } else {
    sum_columns<kLength, kWeighted>(a, bag, bag.begin, bag.end, columns, fetched, sum);
  }
  if (a.divisors != nullptr) {
    for (int k = 0; k < kCount; ++k) sum[k] /= divisor;
  }
  put_columns(a, row, columns, sum);
}

// `count` elements of the result from `place` on become zero.
template <class T, class R>
static __attribute__((noinline)) void clear(const PoolArguments<T, R>& a, int64_t place, int64_t count) {
  for_columns<T, 1>(0, count,
                    [&](const auto& columns) __attribute__((always_inline)) { put_columns(a, place, columns, {}); });
}

// Calls f with the columns [kFirst, kDim) in tiles of kTile vectors, so that where each begins is a constant.
template <class T, int kTile, int kDim, int kFirst = 0, class F>
static inline __attribute__((always_inline)) void for_tiles(const F& f) {
  f(WholeColumns<T, kVectorBytes, kTile>{kFirst});
  constexpr int kNext = kFirst + kTile * kVectorBytes / static_cast<int>(sizeof(acc_t<T>));
  if constexpr (kNext < kDim) for_tiles<T, kTile, kDim, kNext>(f);
}

// Where a table's rows are: `stride` elements apart; end to end, so that the number of columns says it; and so in the
// cache (PoolArguments::near).
enum class Rows { kStrided, kPacked, kNear };

// The bags from b on, up to one that is left to the loop for the other length. Returns that bag. Two loops: what longer
// sums need would slow down the shortest. kDim: the number of columns where it is usual, so that nothing is asked in
// the loop over bags but what a bag needs; else 0, with kStrided.
template <SumLength kLength, bool kWeighted, int kDim, Rows kRows, class T, class R>
static __attribute__((noinline)) int64_t pool_run(const PoolArguments<T, R>& arguments, int64_t b) {
  using A = acc_t<T>;
  constexpr int kMost = kVectorBytes == 16 ? 8 : 256 / kVectorBytes;  // vectors that leave registers for the rest
  // A copy, so that the stores cannot alias it: that no function is given which is not inlined.
  PoolArguments<T, R> a = arguments;
  if (kRows != Rows::kStrided) a.stride = kDim;
  const int64_t dim = kDim > 0 ? kDim : a.dim;
  const int64_t last = std::max(a.starts[a.bags], a.fetch_end), ahead = fetched_ahead<T>(dim);
  PartSums<> parts;
  for (; b < a.bags; ++b) {
    // Near the end of all entries less far ahead: one minimum for a bag, not one for an entry.
    const BagEntries bag{a.starts[b], a.starts[b + 1], std::min(ahead, last - a.starts[b + 1])};
    const int64_t terms = bag.end - bag.begin, row = b * a.out_stride;
    if (leaves<kLength, A>(terms)) break;
    const A divisor = a.divisors != nullptr ? a.divisors[b] : A(1);
    if (kLength == SumLength::kBlock && terms == 0) {
      const int64_t first = b;  // of a run of empty bags, often long in a dense gradient
      while (a.out_stride == dim && b + 1 < a.bags && a.starts[b + 2] == bag.end) ++b;
      clear(arguments, first * a.out_stride, (b - first + 1) * dim);
      continue;
    }
    if (divisor == A(0)) {
      clear(arguments, row, dim);
      continue;
    }
    const auto pool_tile = [&](const auto& columns) __attribute__((always_inline)) {
      const bool fetches = kDim > 0 ? kRows != Rows::kNear : !a.near;
      const int64_t fetched = fetches ? fetched_bytes<T>(columns.first, dim) : 0;
      // Of the shortest rows a short bag among longer ones costs a tenth more by the way of these.
      if (kDim == 16 && terms <= kSumBlock) {
        pool_columns<SumLength::kBlock, kWeighted>(a, row, bag, divisor, parts, columns, fetched);
      } else {
        pool_columns<kLength, kWeighted>(a, row, bag, divisor, parts, columns, fetched);
      }
    };
    if constexpr (kDim > 0) {
      constexpr int kVectors = kDim * static_cast<int>(sizeof(A)) / kVectorBytes;
      for_tiles<T, (kVectors < kMost ? kVectors : kMost), kDim>(pool_tile);
    } else {
      for_columns<T, kMost>(0, dim, pool_tile);
    }
  }
  return b;
}

template <bool kWeighted, int kDim, Rows kRows, class T, class R>
static void pool_bags(const PoolArguments<T, R>& a) {
  for (int64_t b = 0; b < a.bags;) {
    b = pool_run<SumLength::kBlock, kWeighted, kDim, kRows>(a, b);
    if constexpr (kSumsInBlocks<acc_t<T>>) b = pool_run<SumLength::kLong, kWeighted, kDim, kRows>(a, b);
  }
}

template <bool kWeighted, int kDim, class T, class R>
static void pool_usual(const PoolArguments<T, R>& a) {
  if (a.stride != kDim) return pool_bags<kWeighted, kDim, Rows::kStrided>(a);
  a.near ? pool_bags<kWeighted, kDim, Rows::kNear>(a) : pool_bags<kWeighted, kDim, Rows::kPacked>(a);
}

template <bool kWeighted, class T, class R>
static void pool_rows(const PoolArguments<T, R>& a) {
  if constexpr (std::is_same_v<T, float>) {
    if (a.dim == 16) return pool_usual<kWeighted, 16>(a);
    if (a.dim == 32) return pool_usual<kWeighted, 32>(a);
    if (a.dim == 64) return pool_usual<kWeighted, 64>(a);
    if (a.dim == 128) return pool_usual<kWeighted, 128>(a);
  }
  pool_bags<kWeighted, 0, Rows::kStrided>(a);
}

template <class T, class R>
static void pool(const PoolArguments<T, R>& arguments) {
  PoolArguments<T, R> a = arguments;
  if (a.stride == 0) a.stride = a.dim;
  if (a.out_stride == 0) a.out_stride = a.dim;
  // Streaming stores need whole, aligned vectors; the half types are not streamed.
  const bool whole = (reinterpret_cast<uintptr_t>(a.out) | static_cast<uintptr_t>((a.dim | a.out_stride) * sizeof(T))) %
                         kVectorBytes ==
                     0;
  a.stream = a.stream && whole && std::is_same_v<T, acc_t<T>>;
  a.weights != nullptr ? pool_rows<true>(a) : pool_rows<false>(a);
#if defined(__x86_64__)
  if (a.stream) _mm_sfence();
#endif
}

// ---- Extremes and their gradient ------------------------------------------------------------------------------------

template <Reduction mode, class T, class R>
static void pool_extremes(const PoolArguments<T, R>& a, const int64_t* positions, int64_t* argmax) {
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
        if (is_better<mode>(x, best)) {
          out[d] = row[d];
          winner[d] = positions[e];
        }
      }
    }
  }
}

template <class T, class R>
static void pool_won(const PoolArguments<T, R>& a, const int64_t* positions, const int64_t* winners,
                     const int64_t* places) {
  using A = acc_t<T>;
  constexpr int64_t kTile = 64;
  const int64_t stride = a.stride == 0 ? a.dim : a.stride;
  for (int64_t bag = 0; bag < a.bags; ++bag) {
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
      for (int64_t k = 0; k < width; ++k) {
        const int64_t place = bag * a.dim + tile + k;
        if (a.wide != nullptr) {
          a.wide[place] = static_cast<A>(total[k]);
        } else {
          a.out[place] = static_cast<T>(static_cast<A>(total[k]));
        }
      }
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

template <class T, class R, size_t... k>
static constexpr RowLoops<T, R> loops(std::index_sequence<k...>) {
  return {pool<T, R>, {{pool_extremes<kExtremes[k], T, R>...}}, pool_won<T, R>};
}
template <class T, class R>
static const RowLoops<T, R> kRowLoops = loops<T, R>(std::make_index_sequence<std::size(kExtremes)>());
template <class T>
static const DotLoop<T> kDotLoop = {dot<T>};
