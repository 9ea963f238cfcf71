// Body of quantized_loops.cpp for one instruction set: see isa_foreach.h. No include guard, no includes.

#include "row_vectors_body.h"

// ---- Decoding -------------------------------------------------------------------------------------------------------

#if TSR_ISA_LEVEL >= 1
// The first lanes of a vector, from two or four bytes at any address.
template <class Bits>
static inline __attribute__((always_inline)) __m128i bits_at(const uint8_t* from) {
  Bits bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return _mm_cvtsi32_si128(bits);
}
#endif

// Numbers that are whole, or of a half type, as float32: kBytes of them, from element `first` of a row on.
template <class F, int kBytes>
static inline __attribute__((always_inline)) Vector<float, kBytes> numbers(const uint8_t* row, int64_t first) {
  constexpr int kLanes = kBytes / static_cast<int>(sizeof(float));
  if constexpr (!kIsScaled<F>) {
    return widened<kBytes>(reinterpret_cast<const F*>(row) + first);
  } else {
#if TSR_ISA_LEVEL >= 1
    __m128i bytes;
    if constexpr (std::is_same_v<F, Int8>) {
      const uint8_t* from = row + first;
      if constexpr (kLanes == 16) bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      if constexpr (kLanes == 8) bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
      if constexpr (kLanes == 4) bytes = bits_at<int32_t>(from);
    } else {
      const uint8_t* from = row + first / 2;
      if constexpr (kLanes == 16) bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
      if constexpr (kLanes == 8) bytes = bits_at<int32_t>(from);
      if constexpr (kLanes == 4) bytes = bits_at<int16_t>(from);
      const __m128i low = _mm_set1_epi8(15);
      bytes = _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    }
#if TSR_ISA_LEVEL == 2
    if constexpr (kLanes == 16) return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
#endif
    if constexpr (kLanes == 8) return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    if constexpr (kLanes == 4) return _mm_cvtepi32_ps(_mm_cvtepu8_epi32(bytes));
#else
    Vector<int32_t, kBytes> whole{};
    for (int k = 0; k < kLanes; ++k) {
      const int64_t d = first + k;
      whole[k] = std::is_same_v<F, Int8> ? row[d] : (row[d / 2] >> (d % 2 * 4)) & 15;
    }
    return __builtin_convertvector(whole, Vector<float, kBytes>);
#endif
  }
}

template <class F>
static inline __attribute__((always_inline)) float number(const uint8_t* row, int64_t d) {
  if constexpr (std::is_same_v<F, Int8>) return static_cast<float>(row[d]);
  if constexpr (std::is_same_v<F, Int4>) return static_cast<float>((row[d / 2] >> (d % 2 * 4)) & 15);
  if constexpr (!kIsScaled<F>) return static_cast<float>(reinterpret_cast<const F*>(row)[d]);
}

// What a row's numbers are multiplied by, and what is added then.
struct Scale {
  float scale, bias;
};

template <class F>
static inline __attribute__((always_inline)) Scale scale_of(const uint8_t* row, int64_t dim) {
  const uint8_t* from = row + bytes_of_numbers<F>(dim);
  Scale by{1.0f, 0.0f};
  if constexpr (std::is_same_v<F, Int8>) __builtin_memcpy(&by, from, sizeof(by));
  if constexpr (std::is_same_v<F, Int4>) {
#if TSR_ISA_LEVEL >= 1
    const __m128 both = _mm_cvtph_ps(bits_at<int32_t>(from));
    by = {both[0], both[1]};
#else
    Half both[2];
    __builtin_memcpy(both, from, sizeof(both));
    by = {static_cast<float>(both[0]), static_cast<float>(both[1])};
#endif
  }
  return by;
}

// Calls use(k, x) with vector k of these columns of a row.
template <class F, int kBytes, int kCount, class Use>
static inline __attribute__((always_inline)) void decode(const uint8_t* row, int64_t dim,
                                                         const WholeColumns<float, kBytes, kCount>& columns,
                                                         const Use& use) {
  constexpr int kLanes = WholeColumns<float, kBytes, kCount>::kLanes;
  const Scale by = scale_of<F>(row, dim);
  for (int k = 0; k < kCount; ++k) {
    auto x = numbers<F, kBytes>(row, columns.first + k * kLanes);
    if constexpr (kIsScaled<F>) x = x * by.scale + by.bias;
    use(k, x);
  }
}

template <class F, class Use>
static inline __attribute__((always_inline)) void decode(const uint8_t* row, int64_t dim,
                                                         const LastColumns<float>& columns, const Use& use) {
  const Scale by = scale_of<F>(row, dim);
  Vector<float, 16> x{};
  for (int64_t k = 0; k < columns.count; ++k) {
    const float whole = number<F>(row, columns.first + k);
    x[k] = kIsScaled<F> ? whole * by.scale + by.bias : whole;
  }
  use(0, x);
}

// ---- Rows -----------------------------------------------------------------------------------------------------------

// A row's address, as a number: what comes after the last bag may be no row.
template <class F, class R>
static inline __attribute__((always_inline)) const uint8_t* row_at(const uint8_t* table, int64_t dim, R row) {
  const uint64_t offset = static_cast<uint64_t>(row) * static_cast<uint64_t>(bytes_of_row<F>(dim));
  return reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(table) + offset);
}

// Fetches a whole row into the second-level cache: see row_loops_body.h. By its last byte, too, as a row seldom begins
// with a cache line; the place before it may be as far away as rows of whole words allow.
template <class F>
static inline __attribute__((always_inline)) void fetch_row_bytes(const uint8_t* row, int64_t dim) {
  const int64_t bytes = bytes_of_row<F>(dim);
  __builtin_prefetch(row, 0, 2);
  for (int64_t b = 64; b + 8 < bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
  __builtin_prefetch(row + bytes - 1, 0, 2);
}

template <class F, class R>
static void gather(const uint8_t* table, int64_t dim, const R* rows, int64_t begin, int64_t end, float* out) {
  const int64_t ahead = rows_ahead(dim * static_cast<int64_t>(sizeof(float)));
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) fetch_row_bytes<F>(row_at<F>(table, dim, rows[i + ahead]), dim);
    const uint8_t* row = row_at<F>(table, dim, rows[i]);
    for_columns<float, 4>(0, dim, [&](const auto& columns) __attribute__((always_inline)) {
      typename std::decay_t<decltype(columns)>::V x[std::decay_t<decltype(columns)>::kCount];
      decode<F>(row, dim, columns, [&](int k, auto number) __attribute__((always_inline)) { x[k] = number; });
      columns.put(out + i * dim + columns.first, x);
    });
  }
}

// ---- pool -----------------------------------------------------------------------------------------------------------

// Vectors that are summed in registers.
static constexpr int kMostVectors = TSR_ISA_LEVEL == 0 ? 16 : 8;
template <int kCount>
using Tile = WholeColumns<float, kVectorBytes, kCount>;

// Calls f with all columns, as for_columns does, but with as few tiles as can be: each is another walk along the rows.
// kDim: their number where it is a constant, else 0.
template <int kDim, class F>
static inline __attribute__((always_inline)) void for_tiles(int64_t dim, const F& f) {
  constexpr int kLanes = VectorOf<float, kVectorBytes>::kLanes;
  if constexpr (kDim > 0) {
    constexpr int kTile = std::min(kDim / kLanes, kMostVectors);
    for (int64_t d = 0; d < kDim; d += kTile * kLanes) f(Tile<kTile>{d});
    return;
  }
  int64_t d = 0;
  for (; d + kMostVectors * kLanes <= dim; d += kMostVectors * kLanes) f(Tile<kMostVectors>{d});
  const int64_t vectors = (dim - d) / kLanes;
  if constexpr (kMostVectors > 8) {
    if (vectors & 8) f(Tile<8>{d}), d += 8 * kLanes;
  }
  if (vectors & 4) f(Tile<4>{d}), d += 4 * kLanes;
  if (vectors & 2) f(Tile<2>{d}), d += 2 * kLanes;
  if (vectors & 1) f(Tile<1>{d}), d += kLanes;
  if (d < dim) rest_of_columns<float, (kVectorBytes > 32 ? 32 : kVectorBytes)>(0, d, dim, f);
}

template <class Columns, class R>
static inline __attribute__((always_inline)) void put_columns(const PoolArguments<float, R>& a, int64_t row,
                                                              const Columns& columns,
                                                              const typename Columns::V (&sum)[Columns::kCount]) {
  float* to = a.out + row + columns.first;
  if constexpr (Columns::kBytes == kVectorBytes) {
    if (a.stream) {
      for (int k = 0; k < Columns::kCount; ++k) stream(to + k * VectorOf<float, kVectorBytes>::kLanes, sum[k]);
      return;
    }
  }
  columns.put(to, sum);
}

template <class R>
static __attribute__((noinline)) void clear(const PoolArguments<float, R>& a, int64_t row) {
  for_columns<float, 1>(0, a.dim,
                        [&](const auto& columns) __attribute__((always_inline)) { put_columns(a, row, columns, {}); });
}

// The sum of the entries [begin, end), at most a part, in the order of row_loops.h. The first columns' walk along the
// entries fetches whole rows, `ahead` entries before they are added.
template <class F, bool kWeighted, class Columns, class R>
static inline __attribute__((always_inline)) void sum_part(const PoolArguments<float, R>& a, const uint8_t* table,
                                                           int64_t dim, int64_t begin, int64_t end, int64_t ahead,
                                                           const Columns& columns,
                                                           typename Columns::V (&sum)[Columns::kCount]) {
  using V = typename Columns::V;
  constexpr int kCount = Columns::kCount;
  const auto add = [&](int64_t e, V(&to)[kCount]) __attribute__((always_inline)) {
    if (columns.first == 0) fetch_row_bytes<F>(row_at<F>(table, dim, a.rows[e + ahead]), dim);
    decode<F>(row_at<F>(table, dim, a.rows[e]), dim, columns, [&](int k, V x) __attribute__((always_inline)) {
      if constexpr (kWeighted) x *= a.weights[e];
      to[k] += x;
    });
  };
  V blocks[kCount] = {};
  const bool is_long = end - begin > kSumBlock;
  for (; end - begin > kSumBlock; begin += kSumBlock) {
    V block[kCount] = {};
    for (int64_t e = begin; e < begin + kSumBlock; ++e) add(e, block);
    for (int k = 0; k < kCount; ++k) blocks[k] += block[k];
  }
  for (int k = 0; k < kCount; ++k) sum[k] = V{};
  for (int64_t e = begin; e < end; ++e) add(e, sum);
  if (is_long) {
    for (int k = 0; k < kCount; ++k) sum[k] += blocks[k];
  }
}

template <class F, bool kWeighted, int kDim, class R>
static __attribute__((noinline)) void pool_rows(const PoolArguments<float, R>& arguments, const uint8_t* table) {
  // A copy, so that the stores cannot alias it: that no function is given which is not inlined.
  const PoolArguments<float, R> a = arguments;
  const int64_t dim = kDim > 0 ? kDim : a.dim;
  const int64_t last = a.starts[a.bags] > a.fetch_end ? a.starts[a.bags] : a.fetch_end;
  const int64_t most_ahead = std::min<int64_t>(rows_ahead(bytes_of_row<F>(dim)), 32);
  PartSums<kMostVectors * kVectorBytes / 4> parts;
  for (int64_t b = 0; b < a.bags; ++b) {
    const int64_t first = a.starts[b], end = a.starts[b + 1], row = b * dim;
    const float divisor = a.divisors != nullptr ? a.divisors[b] : 1.0f;
    if (first == end || divisor == 0.0f) {
      clear(arguments, row);
      continue;
    }
    // Near the end of all entries less far: one minimum for a bag, not one for an entry.
    const int64_t ahead = std::min(most_ahead, last - end);
    for_tiles<kDim>(dim, [&](const auto& columns) __attribute__((always_inline)) {
      using Columns = std::decay_t<decltype(columns)>;
      typename Columns::V sum[Columns::kCount];
      if (end - first <= kSumPart) {
        sum_part<F, kWeighted>(a, table, dim, first, end, ahead, columns, sum);
      } else {
        for (int64_t begin = first, part_end; begin < end; begin = part_end) {
          part_end = std::min(begin + kSumPart, end);
          sum_part<F, kWeighted>(a, table, dim, begin, part_end, ahead, columns, sum);
          parts.add(sum);
        }
        parts.round(sum);
      }
      if (a.divisors != nullptr) {
        for (int k = 0; k < Columns::kCount; ++k) sum[k] /= divisor;
      }
      put_columns(a, row, columns, sum);
    });
  }
}

template <class F, bool kWeighted, class R>
static void pool_any(const PoolArguments<float, R>& a, const uint8_t* table) {
  if constexpr (std::is_same_v<F, Int8>) {
    if (a.dim == 16) return pool_rows<F, kWeighted, 16>(a, table);
    if (a.dim == 32) return pool_rows<F, kWeighted, 32>(a, table);
    if (a.dim == 64) return pool_rows<F, kWeighted, 64>(a, table);
    if (a.dim == 128) return pool_rows<F, kWeighted, 128>(a, table);
  }
  pool_rows<F, kWeighted, 0>(a, table);
}

template <class F, class R>
static void pool(const PoolArguments<float, R>& arguments, const uint8_t* table) {
  PoolArguments<float, R> a = arguments;
  // Streaming stores need whole, aligned vectors.
  a.stream = a.stream && (reinterpret_cast<uintptr_t>(a.out) | static_cast<uintptr_t>(a.dim * 4)) % kVectorBytes == 0;
  a.weights != nullptr ? pool_any<F, true>(a, table) : pool_any<F, false>(a, table);
#if defined(__x86_64__)
  if (a.stream) _mm_sfence();
#endif
}

template <Reduction mode, class F, class R>
static void pool_extremes(const PoolArguments<float, R>& a, const uint8_t* table) {
  for (int64_t b = 0; b < a.bags; ++b) {
    const int64_t begin = a.starts[b], end = a.starts[b + 1], row = b * a.dim;
    for_columns<float, 1>(0, a.dim, [&](const auto& columns) __attribute__((always_inline)) {
      using V = typename std::decay_t<decltype(columns)>::V;
      constexpr int kCount = std::decay_t<decltype(columns)>::kCount;
      V best[kCount] = {};
      for (int64_t e = begin; e < end; ++e) {
        decode<F>(row_at<F>(table, a.dim, a.rows[e]), a.dim, columns, [&](int k, V x) __attribute__((always_inline)) {
          const auto wins = is_better<mode>(x, best[k]);
          best[k] = e == begin ? x : wins ? x : best[k];
        });
      }
      columns.put(a.out + row + columns.first, best);
    });
  }
}

template <class F, class R, size_t... k>
static constexpr QuantizedLoops<F, R> loops(std::index_sequence<k...>) {
  if constexpr (kIsScaled<F>) return {gather<F, R>, pool<F, R>, {{pool_extremes<kExtremes[k], F, R>...}}};
  return {gather<F, R>, nullptr, {{pool_extremes<kExtremes[k], F, R>...}}};
}
template <class F, class R>
static const QuantizedLoops<F, R> kQuantizedLoops = loops<F, R>(std::make_index_sequence<std::size(kExtremes)>());
