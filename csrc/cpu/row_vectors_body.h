// Part of the bodies that isa_foreach.h compiles once per instruction set: vectors of accumulators. No include guard.

// ---- Vectors --------------------------------------------------------------------------------------------------------

// The compiler's own vectors: on any target, wider ones than the machine has become several.
template <class A, int kBytes>
struct VectorOf {
  typedef A type __attribute__((vector_size(kBytes)));
  typedef A unaligned __attribute__((vector_size(kBytes), aligned(alignof(A)), may_alias));
  static constexpr int kLanes = kBytes / sizeof(A);
};
template <class A, int kBytes>
using Vector = typename VectorOf<A, kBytes>::type;

static constexpr int kVectorBytes = TSR_ISA_LEVEL == 2 ? 64 : TSR_ISA_LEVEL == 1 ? 32 : 16;

// Whether x takes the place of best, of numbers or vectors of them; a NaN, of which x != x, wins over all. One
// expression of all comparisons is one branch.
template <Reduction mode, class V>
static inline __attribute__((always_inline)) auto is_better(const V& x, const V& best) {
  const V& more = mode == Reduction::kMin ? best : x;
  const V& less = mode == Reduction::kMin ? x : best;
  if constexpr (std::is_arithmetic_v<V>) {
    return more > less || (x != x && best == best);
  } else {
    return (more > less) | ((x != x) & (best == best));
  }
}

// Half types are widened and narrowed by whole vectors, as torch's own conversions do it element by element: one by one
// they are longer code than all the rest of a loop.
template <int kBytes>
static inline __attribute__((always_inline)) Vector<float, kBytes> widened(const BFloat16* from) {
  // A bfloat16 is the upper half of a float32.
  using Bits = typename VectorOf<uint16_t, kBytes / 2>::unaligned;
  const auto wide = __builtin_convertvector(*reinterpret_cast<const Bits*>(from), Vector<uint32_t, kBytes>) << 16;
  return (Vector<float, kBytes>)wide;  // the same bits: a cast between vectors of one size
}

template <int kBytes>
static inline __attribute__((always_inline)) Vector<uint16_t, kBytes / 2> narrowed(const Vector<float, kBytes>& from,
                                                                                   const BFloat16*) {
  const auto bits = (Vector<uint32_t, kBytes>)from;
  const auto rounded = (bits + (((bits >> 16) & 1u) + 0x7fffu)) >> 16;
  return __builtin_convertvector(from != from ? Vector<uint32_t, kBytes>{} + 0x7fc0u : rounded,
                                 Vector<uint16_t, kBytes / 2>);
}

#if TSR_ISA_LEVEL >= 1
template <int kBytes>
static inline __attribute__((always_inline)) Vector<float, kBytes> widened(const Half* from) {
#if TSR_ISA_LEVEL == 2
  if constexpr (kBytes == 64) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
#endif
  if constexpr (kBytes == 32) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  if constexpr (kBytes == 16) return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

template <int kBytes>
static inline __attribute__((always_inline)) Vector<uint16_t, kBytes / 2> narrowed(const Vector<float, kBytes>& from,
                                                                                   const Half*) {
  // torch knows one NaN of either sign.
  const auto nan = ((Vector<uint32_t, kBytes>)from & 0x80000000u) | 0x7fc00000u;
  const Vector<float, kBytes> x = from != from ? (Vector<float, kBytes>)nan : from;
#if TSR_ISA_LEVEL == 2
  if constexpr (kBytes == 64) {
    return (Vector<uint16_t, 32>)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  }
#endif
  if constexpr (kBytes == 32) return (Vector<uint16_t, 16>)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  if constexpr (kBytes == 16) {
    return (Vector<uint16_t, 8>)_mm_cvtsi128_si64(_mm_cvtps_ph((__m128)x, _MM_FROUND_TO_NEAREST_INT));
  }
}
#elif defined(__x86_64__)
// As torch does it: fp16_ieee_to_fp32_value and fp16_ieee_from_fp32_value.
template <int kBytes>
static inline __attribute__((always_inline)) Vector<float, kBytes> widened(const Half* from) {
  using Bits = Vector<uint32_t, kBytes>;
  using Values = Vector<float, kBytes>;
  using Halves = typename VectorOf<uint16_t, kBytes / 2>::unaligned;
  const auto w = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits) << 16;
  const auto doubled = w + w;
  const auto normal = (Bits)((Values)((doubled >> 4) + (0xe0u << 23)) * 0x1.0p-112f);
  const auto subnormal = (Bits)((Values)((doubled >> 17) | (126u << 23)) - 0.5f);
  return (Values)((w & 0x80000000u) | (doubled < (1u << 27) ? subnormal : normal));
}

template <int kBytes>
static inline __attribute__((always_inline)) Vector<uint16_t, kBytes / 2> narrowed(const Vector<float, kBytes>& from,
                                                                                   const Half*) {
  using Bits = Vector<uint32_t, kBytes>;
  using Values = Vector<float, kBytes>;
  const Bits w = (Bits)from, doubled = w + w, least = Bits{} + 0x71000000u;
  const Bits bias = (doubled & 0xff000000u) < least ? least : doubled & 0xff000000u;
  const Values base = ((Values)(w & 0x7fffffffu) * 0x1.0p+112f) * 0x1.0p-110f;
  const auto bits = (Bits)((Values)((bias >> 1) + 0x07800000u) + base);
  const Bits rounded = ((bits >> 13) & 0x7c00u) + (bits & 0x0fffu);
  const Bits half = ((w & 0x80000000u) >> 16) | (doubled > 0xff000000u ? Bits{} + 0x7e00u : rounded);
  return __builtin_convertvector(half, Vector<uint16_t, kBytes / 2>);
}
#else
template <int kBytes>
static inline __attribute__((always_inline)) Vector<float, kBytes> widened(const Half* from) {
  Vector<float, kBytes> to;
  for (int k = 0; k < VectorOf<float, kBytes>::kLanes; ++k) to[k] = static_cast<float>(from[k]);
  return to;
}

template <int kBytes>
static inline __attribute__((always_inline)) Vector<uint16_t, kBytes / 2> narrowed(const Vector<float, kBytes>& from,
                                                                                   const Half*) {
  Vector<uint16_t, kBytes / 2> to;
  for (int k = 0; k < VectorOf<float, kBytes>::kLanes; ++k) to[k] = Half(static_cast<float>(from[k])).x;
  return to;
}
#endif

// kBytes of accumulators from as many elements of a table row.
template <int kBytes, class T>
static inline __attribute__((always_inline)) void load(const T* from, Vector<acc_t<T>, kBytes>& to) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    to = *reinterpret_cast<const typename VectorOf<T, kBytes>::unaligned*>(from);
  } else {
    to = widened<kBytes>(from);
  }
}

template <int kBytes, class T>
static inline __attribute__((always_inline)) void store(T* to, const Vector<acc_t<T>, kBytes>& from) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    *reinterpret_cast<typename VectorOf<T, kBytes>::unaligned*>(to) = from;
  } else {
    *reinterpret_cast<typename VectorOf<uint16_t, kBytes / 2>::unaligned*>(to) = narrowed<kBytes>(from, to);
  }
}

// Past the caches: of whole vectors, aligned.
template <class A>
static inline __attribute__((always_inline)) void stream(A* to, const Vector<A, kVectorBytes>& from) {
#if TSR_ISA_LEVEL == 2
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)from);
#elif TSR_ISA_LEVEL == 1
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)from);
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)from);
#else
  store<kVectorBytes>(to, from);
#endif
}

// ---- Columns --------------------------------------------------------------------------------------------------------

// Some columns of a row: kCount whole vectors, or the last few in one vector whose other lanes are zero. get and put
// take the address of the first of them: so that what does not change is added outside of loops over rows.
template <class T, int kBytes_, int kCount_>
struct WholeColumns {
  static constexpr int kBytes = kBytes_, kCount = kCount_;
  using V = Vector<acc_t<T>, kBytes>;
  static constexpr int kLanes = VectorOf<acc_t<T>, kBytes>::kLanes;
  int64_t first;

  void get(const T* from, V (&x)[kCount]) const {
    for (int k = 0; k < kCount; ++k) load<kBytes>(from + k * kLanes, x[k]);
  }
  template <class Out>
  void put(Out* to, const V (&x)[kCount]) const {
    for (int k = 0; k < kCount; ++k) store<kBytes>(to + k * kLanes, x[k]);
  }
};

template <class T>
struct LastColumns {
  static constexpr int kBytes = 16, kCount = 1;
  using V = Vector<acc_t<T>, kBytes>;
  int64_t first, count;

  void get(const T* from, V (&x)[1]) const {
    x[0] = V{};
    x[0][0] = static_cast<acc_t<T>>(from[0]);
    if constexpr (kLanes == 4) {  // where a lane's number is a constant, nothing goes by way of memory
      if (count > 1) x[0][1] = static_cast<acc_t<T>>(from[1]);
      if (count > 2) x[0][2] = static_cast<acc_t<T>>(from[2]);
    } else {
      for (int64_t k = 1; k < count; ++k) x[0][k] = static_cast<acc_t<T>>(from[k]);
    }
  }
  template <class Out>
  void put(Out* to, const V (&x)[1]) const {
    to[0] = static_cast<Out>(static_cast<acc_t<T>>(x[0][0]));
    if constexpr (kLanes == 4) {
      if (count > 1) to[1] = static_cast<Out>(static_cast<acc_t<T>>(x[0][1]));
      if (count > 2) to[2] = static_cast<Out>(static_cast<acc_t<T>>(x[0][2]));
    } else {
      for (int64_t k = 1; k < count; ++k) to[k] = static_cast<Out>(static_cast<acc_t<T>>(x[0][k]));
    }
  }

 private:
  static constexpr int kLanes = VectorOf<acc_t<T>, kBytes>::kLanes;
};

// The rest of for_columns, from column d on, by vectors of at most 32 bytes: longer ones that begin anywhere lie in two
// cache lines most of the time.
template <class T, int kBytes, class F>
static inline __attribute__((always_inline)) void rest_of_columns(int64_t first, int64_t d, int64_t last, const F& f) {
  constexpr int kLanes = VectorOf<acc_t<T>, kBytes>::kLanes;
  if (last - first >= kLanes) {
    for (; d < last; d += kLanes) f(WholeColumns<T, kBytes, 1>{d + kLanes <= last ? d : last - kLanes});
  } else if constexpr (kBytes > 16) {
    rest_of_columns<T, kBytes / 2>(first, d, last, f);
  } else if (d < last) {
    f(LastColumns<T>{d, last - d});
  }
}

// Calls f with the columns [first, last): tiles of kMost vectors, at most one of half as many, then single vectors, of
// which the last begins early where columns are left over. That computes some of them twice, to the same bits, but
// needs no narrower ones. Those are for what has fewer columns than a vector.
template <class T, int kMost, class F>
static inline __attribute__((always_inline)) void for_columns(int64_t first, int64_t last, const F& f) {
  constexpr int kLanes = VectorOf<acc_t<T>, kVectorBytes>::kLanes;
  int64_t d = first;
  for (; d + kMost * kLanes <= last; d += kMost * kLanes) f(WholeColumns<T, kVectorBytes, kMost>{d});
  if constexpr (kMost > 2) {
    if (d + kMost / 2 * kLanes <= last) {
      f(WholeColumns<T, kVectorBytes, kMost / 2>{d});
      d += kMost / 2 * kLanes;
    }
  }
  for (; d + kLanes <= last; d += kLanes) f(WholeColumns<T, kVectorBytes, 1>{d});
  if (d < last) rest_of_columns<T, (kVectorBytes > 32 ? 32 : kVectorBytes)>(first, d, last, f);
}

// ---- Fetches of rows at random places -------------------------------------------------------------------------------

// The bytes of a row that one walk along the rows fetches, for itself and for the walks over other columns that follow.
// Rows from memory arrive a third sooner so than where one walk fetches and adds them whole.
static constexpr int64_t kFetchedBytes = 1024;

// What the walk over the columns from `first` on fetches of a row of so many columns.
template <class T>
static inline __attribute__((always_inline)) int64_t fetched_bytes(int64_t first, int64_t columns) {
  const int64_t begin = first * static_cast<int64_t>(sizeof(T)), end = columns * static_cast<int64_t>(sizeof(T));
  return begin % kFetchedBytes == 0 ? std::min(kFetchedBytes, end - begin) : 0;
}

// How many rows ahead.
template <class T>
static inline __attribute__((always_inline)) int64_t fetched_ahead(int64_t columns) {
  return columns * static_cast<int64_t>(sizeof(T)) < 256 ? 32 : 40;
}

// Into the second-level cache: unlike the first, it does not run out of places for what is under way.
static inline __attribute__((always_inline)) void fetch_later(const char* row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
}

// ---- Sums of many rows ----------------------------------------------------------------------------------------------

// What loops over bags are made for: sums of at most a block, and longer ones.
enum class SumLength { kBlock, kLong };

// Whether such a loop leaves a bag of so many terms to the other. Short bags among longer ones stay.
template <SumLength kLength, class A>
static inline bool leaves(int64_t terms) {
  if (!kSumsInBlocks<A>) return false;
  return kLength == SumLength::kBlock ? terms > kSumBlock : terms == 0;
}

// What parts add up to: zeros between sums. A part comes in and goes out by way of memory, so that those who sum it
// have it in registers.
template <int kMostLanes = 64>
class PartSums {
 public:
  template <class V, int kCount>
  inline __attribute__((always_inline)) void add(const V (&part)[kCount]) {
    constexpr int kLanes = sizeof(V) / sizeof(float);
    float lanes[kCount * kLanes];
    for (int k = 0; k < kCount; ++k) store<sizeof(V)>(lanes + k * kLanes, part[k]);
    add_lanes(lanes, kCount * kLanes);
  }
  template <class V, int kCount>
  inline __attribute__((always_inline)) void round(V (&to)[kCount]) {
    constexpr int kLanes = sizeof(V) / sizeof(float);
    static_assert(kCount * kLanes <= kMostLanes);
    float lanes[kCount * kLanes];
    round_lanes(lanes, kCount * kLanes);
    for (int k = 0; k < kCount; ++k) load<sizeof(V)>(lanes + k * kLanes, to[k]);
  }

 private:
  __attribute__((noinline)) void add_lanes(const float* lanes, int count) {
    for (int k = 0; k < count; ++k) total_[k] += static_cast<double>(lanes[k]);
  }
  __attribute__((noinline)) void round_lanes(float* lanes, int count) {
    for (int k = 0; k < count; ++k) lanes[k] = static_cast<float>(total_[k]);
    for (int k = 0; k < count; ++k) total_[k] = 0;
  }

  double total_[kMostLanes] = {};
};
