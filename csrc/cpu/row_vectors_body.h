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

// kBytes of accumulators from as many elements of a table row; the half types are widened.
template <int kBytes, class T>
static inline __attribute__((always_inline)) void load(const T* from, Vector<acc_t<T>, kBytes>& to) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    // A bfloat16 is the upper half of a float32.
    using Bits = typename VectorOf<uint16_t, kBytes / 2>::unaligned;
    using Wide = Vector<uint32_t, kBytes>;
    const Wide wide = __builtin_convertvector(*reinterpret_cast<const Bits*>(from), Wide) << 16;
    to = (Vector<float, kBytes>)wide;  // the same bits: a cast between vectors of one size
  } else if constexpr (std::is_same_v<T, Half>) {
#if TSR_ISA_LEVEL == 2
    if constexpr (kBytes == 64) {
      to = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      return;
    }
#endif
#if TSR_ISA_LEVEL >= 1
    if constexpr (kBytes == 32) {
      to = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      return;
    } else if constexpr (kBytes == 16) {
      to = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
      return;
    }
#endif
    for (int k = 0; k < VectorOf<float, kBytes>::kLanes; ++k) to[k] = static_cast<float>(from[k]);
  } else {
    to = *reinterpret_cast<const typename VectorOf<T, kBytes>::unaligned*>(from);
  }
}

template <bool kStream, int kBytes, class T>
static inline __attribute__((always_inline)) void store(T* to, const Vector<acc_t<T>, kBytes>& from) {
  if constexpr (!std::is_same_v<T, acc_t<T>>) {
    for (int k = 0; k < VectorOf<float, kBytes>::kLanes; ++k) to[k] = static_cast<T>(static_cast<float>(from[k]));
    return;
  } else {
#if defined(__x86_64__)
    if constexpr (kStream && kBytes == kVectorBytes) {
#if TSR_ISA_LEVEL == 2
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)from);
#elif TSR_ISA_LEVEL == 1
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)from);
#else
      _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)from);
#endif
      return;
    }
#endif
    *reinterpret_cast<typename VectorOf<T, kBytes>::unaligned*>(to) = from;
  }
}

// ---- Sums of many rows ----------------------------------------------------------------------------------------------

// What loops over bags are made for: sums of at most a block, of at most a part, of several parts.
enum class SumLength { kBlock, kPart, kParts };

// Whether such a loop leaves a bag of so many terms to another. Short bags among longer ones stay.
template <SumLength kLength, class A>
static inline bool leaves(int64_t terms) {
  if (!kSumsInBlocks<A>) return false;
  if (kLength == SumLength::kBlock) return terms > kSumBlock;
  return kLength == SumLength::kPart ? terms == 0 || terms > kSumPart : terms <= kSumPart;
}

// What parts add up to. A part comes in by way of memory, so that those who sum it have it in registers.
template <int kBytes, int kCount>
struct PartSums {
  static constexpr int kLanes = VectorOf<float, kBytes>::kLanes;
  double total[kCount * kLanes] = {};

  void add(const Vector<float, kBytes> (&part)[kCount]) {
    float lanes[kCount * kLanes];
    for (int k = 0; k < kCount; ++k) store<false, kBytes>(lanes + k * kLanes, part[k]);
    for (int k = 0; k < kCount * kLanes; ++k) total[k] += static_cast<double>(lanes[k]);
  }
  void round(Vector<float, kBytes> (&to)[kCount]) const {
    float lanes[kCount * kLanes];
    for (int k = 0; k < kCount * kLanes; ++k) lanes[k] = static_cast<float>(total[k]);
    for (int k = 0; k < kCount; ++k) load<kBytes>(lanes + k * kLanes, to[k]);
  }
};
