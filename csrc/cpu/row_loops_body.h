// Body of row_loops.cpp for one instruction set: see isa_foreach.h. No include guard, no includes.

#include "row_vectors_body.h"

// ---- pool -----------------------------------------------------------------------------------------------------------

// Where a bag's entries are, and how far ahead of them rows are fetched.
struct BagEntries {
  int64_t begin, end;
  int64_t last;  // of all bags of the call
  int64_t ahead;
};

// Fetches these columns of the row that comes `ahead` entries later. table: from the first of them on.
template <class Columns, class T, class R>
static inline __attribute__((always_inline)) void fetch_ahead(const PoolArguments<T, R>& a, const T* table,
                                                              const BagEntries& bag, int64_t entry) {
  const int64_t later = entry + bag.ahead < bag.last ? entry + bag.ahead : entry;
  // Not as a pointer: what comes after the last bag may be no row.
  const uint64_t element = static_cast<uint64_t>(a.rows[later]) * static_cast<uint64_t>(a.stride);
  const char* row = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(table) + element * sizeof(T));
  constexpr int kElements = VectorOf<acc_t<T>, Columns::kBytes>::kLanes * Columns::kCount;
  for (int b = 0; b < kElements * static_cast<int>(sizeof(T)); b += 64) __builtin_prefetch(row + b);
}

// Adds these columns of the entry to the sum.
template <bool kWeighted, class Columns, class T, class R>
static inline __attribute__((always_inline)) void add_columns(const PoolArguments<T, R>& a, const T* table,
                                                              const BagEntries& bag, int64_t e, const Columns& columns,
                                                              typename Columns::V (&sum)[Columns::kCount]) {
  fetch_ahead<Columns>(a, table, bag, e);
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
                                                              typename Columns::V (&sum)[Columns::kCount]) {
  using V = typename Columns::V;
  constexpr int kCount = Columns::kCount;
  const T* table = a.table + columns.first;
  V blocks[kCount] = {};
  if constexpr (kLength == SumLength::kLong) {
    for (; end - begin > kSumBlock; begin += kSumBlock) {
      V block[kCount] = {};
#pragma GCC unroll 4
      for (int64_t e = 0; e < kSumBlock; ++e) add_columns<kWeighted>(a, table, bag, begin + e, columns, block);
      for (int k = 0; k < kCount; ++k) blocks[k] += block[k];
    }
  }
  for (int k = 0; k < kCount; ++k) sum[k] = V{};
  for (int64_t e = begin; e < end; ++e) add_columns<kWeighted>(a, table, bag, e, columns, sum);
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
                                                               PartSums<>& parts, const Columns& columns) {
  constexpr int kCount = Columns::kCount;
  typename Columns::V sum[kCount];
  if constexpr (kLength == SumLength::kLong) {
    for (int64_t begin = bag.begin, end;; begin = end) {
      end = bag.end - begin > kSumPart ? begin + kSumPart : bag.end;
      sum_columns<kLength, kWeighted>(a, bag, begin, end, columns, sum);
      if (end == bag.end && begin == bag.begin) break;
      parts.add(sum);
      if (end < bag.end) continue;
      parts.round(sum);
      break;
    }
  } else {
    sum_columns<kLength, kWeighted>(a, bag, bag.begin, bag.end, columns, sum);
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

// The bags from b on, up to one that is left to the loop for the other length. Returns that bag. Two loops: what longer
// sums need would slow down the shortest.
template <SumLength kLength, bool kWeighted, class T, class R>
static __attribute__((noinline)) int64_t pool_run(const PoolArguments<T, R>& arguments, int64_t b) {
  using A = acc_t<T>;
  constexpr int kMost = kVectorBytes == 16 ? 8 : 256 / kVectorBytes;  // vectors that leave registers for the rest
  // A copy, so that the stores cannot alias it: that no function is given which is not inlined.
  const PoolArguments<T, R> a = arguments;
  const int64_t last = a.starts[a.bags] > a.fetch_end ? a.starts[a.bags] : a.fetch_end;
  const int64_t ahead = rows_ahead(a.dim * static_cast<int64_t>(sizeof(T)));
  PartSums<> parts;
  for (; b < a.bags; ++b) {
    const BagEntries bag{a.starts[b], a.starts[b + 1], last, ahead};
    if (leaves<kLength, A>(bag.end - bag.begin)) break;
    const int64_t row = b * a.out_stride;
    const A divisor = a.divisors != nullptr ? a.divisors[b] : A(1);
    if (kLength == SumLength::kBlock && bag.begin == bag.end) {
      const int64_t first = b;  // of a run of empty bags, often long in a dense gradient
      while (a.out_stride == a.dim && b + 1 < a.bags && a.starts[b + 2] == bag.end) ++b;
      clear(arguments, first * a.out_stride, (b - first + 1) * a.dim);
      continue;
    }
    if (divisor == A(0)) {
      clear(arguments, row, a.dim);
      continue;
    }
    for_columns<T, kMost>(0, a.dim, [&](const auto& columns) __attribute__((always_inline)) {
      pool_columns<kLength, kWeighted>(a, row, bag, divisor, parts, columns);
    });
  }
  return b;
}

// ---- pool of 16, 32, 64 or 128 columns of float32 -------------------------------------------------------------------

// Vectors that are summed in registers: the whole row, or the most that leave registers for the rest.
static constexpr int kMostVectors = TSR_ISA_LEVEL == 0 ? 16 : 8;
// Rows of a block that the code is written out for.
static constexpr int kUnrolled = TSR_ISA_LEVEL == 2 ? 1 : 4;

// How many entries ahead rows are fetched. The first line of a row comes earlier: it brings the page's translation.
struct RowsAhead {
  int64_t line, rest;
};

// Fetches what comes later into the second-level cache: unlike the first, it does not run out of places for what is
// under way. Addresses are no pointers: what comes after the last bag may be no row.
template <int kVectors, class R>
static inline __attribute__((always_inline)) void fetch_whole(const PoolArguments<float, R>& a, int64_t entry,
                                                              const RowsAhead& ahead) {
  const auto row = [&](int64_t e) __attribute__((always_inline)) {
    const uint64_t element = static_cast<uint64_t>(a.rows[e]) * static_cast<uint64_t>(a.stride);
    return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(a.table) + element * sizeof(float));
  };
  __builtin_prefetch(row(entry + ahead.line), 0, 2);
  if constexpr (kVectors * kVectorBytes > 64) {
    const char* rest = row(entry + ahead.rest);
    for (int b = 64; b < kVectors * kVectorBytes; b += 64) __builtin_prefetch(rest + b, 0, 2);
  }
}

// Adds the first tile of columns of the entry to the sum, and fetches whole rows for all tiles; or adds another tile.
template <int kVectors, bool kWeighted, class Columns, class R>
static inline __attribute__((always_inline)) void add_tile(const PoolArguments<float, R>& a, int64_t e,
                                                           const RowsAhead& ahead, const Columns& columns,
                                                           typename Columns::V (&sum)[Columns::kCount]) {
  if (columns.first == 0) fetch_whole<kVectors>(a, e, ahead);
  typename Columns::V x[Columns::kCount];
  columns.get(a.table + columns.first + static_cast<int64_t>(a.rows[e]) * a.stride, x);
  for (int k = 0; k < Columns::kCount; ++k) {
    if constexpr (kWeighted) x[k] *= a.weights[e];
    sum[k] += x[k];
  }
}

// All bags. Rows are walked once, block by block, and not once for each tile of columns: memory is asked for in one
// order. The number of vectors is a constant, so that nothing is asked in the loop over bags but what a bag needs.
template <int kVectors, bool kWeighted, class R>
static __attribute__((noinline)) void pool_whole(const PoolArguments<float, R>& arguments) {
  constexpr int kTile = kVectors < kMostVectors ? kVectors : kMostVectors, kTiles = kVectors / kTile;
  constexpr int kRowBytes = kVectors * kVectorBytes, kLanes = kVectorBytes / static_cast<int>(sizeof(float));
  using Columns = WholeColumns<float, kVectorBytes, kTile>;
  using V = typename Columns::V;
  // A copy, so that the stores cannot alias it: that no function is given which is not inlined.
  const PoolArguments<float, R> a = arguments;
  const int64_t last = a.starts[a.bags] > a.fetch_end ? a.starts[a.bags] : a.fetch_end;
  constexpr int64_t kAhead = 32, kLineAhead = kRowBytes > 64 ? 40 : 32;
  PartSums<kTile * kLanes> parts[kTiles];
  for (int64_t b = 0; b < a.bags; ++b) {
    int64_t begin = a.starts[b];
    const int64_t end = a.starts[b + 1];
    if (a.divisors != nullptr && a.divisors[b] == 0.0f) {
      clear(arguments, b * a.out_stride, a.dim);
      continue;
    }
    // Near the end of all entries less far: one minimum for a bag, not one for an entry.
    const RowsAhead ahead{std::min(kLineAhead, last - end), std::min(kAhead, last - end)};
    const auto add = [&](int64_t e, const Columns& columns, V(&sum)[kTile])
                         __attribute__((always_inline)) { add_tile<kVectors, kWeighted>(a, e, ahead, columns, sum); };
    const auto put = [&](const Columns& columns, V(&sum)[kTile]) __attribute__((always_inline)) {
      if (a.divisors != nullptr) {
        for (int k = 0; k < kTile; ++k) sum[k] /= a.divisors[b];
      }
      put_columns(a, b * a.out_stride, columns, sum);
    };
    if (end - begin <= kSumBlock) {
      for (int t = 0; t < kTiles; ++t) {
        const Columns columns{t * kTile * kLanes};
        V sum[kTile] = {};
        for (int64_t e = begin; e < end; ++e) add(e, columns, sum);
        put(columns, sum);
      }
      continue;
    }
    const bool one_part = end - begin <= kSumPart;
    for (int64_t part_end = begin; part_end < end; begin = part_end) {
      part_end = std::min(begin + kSumPart, end);
      V blocks[kTiles][kTile] = {};
      for (; part_end - begin > kSumBlock; begin += kSumBlock) {
        for (int t = 0; t < kTiles; ++t) {
          V sum[kTile] = {};
#pragma GCC unroll kUnrolled
          for (int64_t e = 0; e < kSumBlock; ++e) add(begin + e, Columns{t * kTile * kLanes}, sum);
          for (int k = 0; k < kTile; ++k) blocks[t][k] += sum[k];
        }
      }
      for (int t = 0; t < kTiles; ++t) {
        const Columns columns{t * kTile * kLanes};
        V sum[kTile] = {};
        for (int64_t e = begin; e < part_end; ++e) add(e, columns, sum);
        for (int k = 0; k < kTile; ++k) sum[k] += blocks[t][k];
        if (!one_part) parts[t].add(sum);
        if (part_end < end) continue;
        if (!one_part) parts[t].round(sum);
        put(columns, sum);
      }
    }
  }
}

template <bool kWeighted, class T, class R>
static void pool_rows(const PoolArguments<T, R>& a) {
  if constexpr (std::is_same_v<T, float>) {
    constexpr int k16 = 64 / kVectorBytes;  // vectors of 16 columns
    if (a.dim == 16) return pool_whole<k16, kWeighted>(a);
    if (a.dim == 32) return pool_whole<2 * k16, kWeighted>(a);
    if (a.dim == 64) return pool_whole<4 * k16, kWeighted>(a);
    if (a.dim == 128) return pool_whole<8 * k16, kWeighted>(a);
  }
  for (int64_t b = 0; b < a.bags;) {
    b = pool_run<SumLength::kBlock, kWeighted>(a, b);
    if constexpr (kSumsInBlocks<acc_t<T>>) b = pool_run<SumLength::kLong, kWeighted>(a, b);
  }
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

template <class T, class R>
static const RowLoops<T, R> kRowLoops = {pool<T, R>, pool_max<T, R>, pool_won<T, R>};
template <class T>
static const DotLoop<T> kDotLoop = {dot<T>};
