// Lanes: one vector register of unsigned 64-bit numbers, for the loops at TSR_ISA_LEVEL 1 (AVX2) and 2 (AVX-512).
// Operators are the compiler's own on vectors; what they cannot say is a function here. No include guard: it is part of
// a body of isa_foreach.h.

#if TSR_ISA_LEVEL == 2

constexpr int kLanes = 8;
typedef unsigned long long Lanes __attribute__((vector_size(64)));
typedef long long SignedLanes __attribute__((vector_size(64)));

static inline Lanes splat(uint64_t v) { return (Lanes)_mm512_set1_epi64(static_cast<long long>(v)); }
static inline Lanes load(const uint64_t* p) { return (Lanes)_mm512_loadu_si512(p); }
static inline void store(uint64_t* p, Lanes v) { _mm512_storeu_si512(p, (__m512i)v); }

// The product of the lower halves of the lanes.
static inline Lanes multiply32(Lanes a, Lanes b) { return (Lanes)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
// Products of 16-bit numbers, four to a lane: their upper and their lower halves.
static inline Lanes multiply16_high(Lanes a, Lanes b) { return (Lanes)_mm512_mulhi_epu16((__m512i)a, (__m512i)b); }
static inline Lanes multiply16(Lanes a, Lanes b) { return (Lanes)_mm512_mullo_epi16((__m512i)a, (__m512i)b); }

// Shifts by a count per lane; counts of 64 and more give 0, unlike the operators.
static inline Lanes shift_left(Lanes v, Lanes bits) { return (Lanes)_mm512_sllv_epi64((__m512i)v, (__m512i)bits); }
static inline Lanes shift_right(Lanes v, Lanes bits) { return (Lanes)_mm512_srlv_epi64((__m512i)v, (__m512i)bits); }

static inline Lanes rotate_right(Lanes v, uint64_t bits) {
  return (Lanes)_mm512_rorv_epi64((__m512i)v, (__m512i)splat(bits));
}

// The sum of each lane's 8 bytes.
static inline Lanes sum_of_bytes(Lanes v) { return (Lanes)_mm512_sad_epu8((__m512i)v, _mm512_setzero_si512()); }

static inline Lanes minimum(Lanes a, Lanes b) { return (Lanes)_mm512_min_epu64((__m512i)a, (__m512i)b); }

// One bit per lane: whether a < b.
static inline unsigned lanes_below(Lanes a, Lanes b) { return _mm512_cmplt_epu64_mask((__m512i)a, (__m512i)b); }

// The 8 bytes at base + at, in the lanes whose `where` is all ones; elsewhere those of `others`, and nothing is read.
static inline Lanes gather(Lanes others, Lanes where, const uint8_t* base, Lanes at) {
  return (Lanes)_mm512_mask_i64gather_epi64((__m512i)others, _mm512_movepi64_mask((__m512i)where), (__m512i)at, base,
                                            1);
}

// The lanes named by the bits of `which`, moved to the front.
static inline Lanes compress(unsigned which, Lanes v) {
  return (Lanes)_mm512_maskz_compress_epi64(static_cast<__mmask8>(which), (__m512i)v);
}
// The reverse: the front of v in the lanes named by `which`; elsewhere the lanes of `others`.
static inline Lanes expand(Lanes others, unsigned which, Lanes v) {
  return (Lanes)_mm512_mask_expand_epi64((__m512i)others, static_cast<__mmask8>(which), (__m512i)v);
}

#else

constexpr int kLanes = 4;
typedef unsigned long long Lanes __attribute__((vector_size(32)));
typedef long long SignedLanes __attribute__((vector_size(32)));

static inline Lanes splat(uint64_t v) { return (Lanes)_mm256_set1_epi64x(static_cast<long long>(v)); }
static inline Lanes load(const uint64_t* p) { return (Lanes)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline void store(uint64_t* p, Lanes v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)v); }

static inline Lanes multiply32(Lanes a, Lanes b) { return (Lanes)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
static inline Lanes multiply16_high(Lanes a, Lanes b) { return (Lanes)_mm256_mulhi_epu16((__m256i)a, (__m256i)b); }
static inline Lanes multiply16(Lanes a, Lanes b) { return (Lanes)_mm256_mullo_epi16((__m256i)a, (__m256i)b); }

static inline Lanes shift_left(Lanes v, Lanes bits) { return (Lanes)_mm256_sllv_epi64((__m256i)v, (__m256i)bits); }
static inline Lanes shift_right(Lanes v, Lanes bits) { return (Lanes)_mm256_srlv_epi64((__m256i)v, (__m256i)bits); }

static inline Lanes rotate_right(Lanes v, uint64_t bits) { return v >> bits | v << (64 - bits); }

static inline Lanes sum_of_bytes(Lanes v) { return (Lanes)_mm256_sad_epu8((__m256i)v, _mm256_setzero_si256()); }

// AVX2 compares signed numbers only: with the top bits flipped their order is the unsigned one.
static inline __m256i below(Lanes a, Lanes b) {
  const Lanes top = splat(uint64_t{1} << 63);
  return _mm256_cmpgt_epi64((__m256i)(b ^ top), (__m256i)(a ^ top));
}
static inline Lanes minimum(Lanes a, Lanes b) { return (Lanes)_mm256_blendv_epi8((__m256i)b, (__m256i)a, below(a, b)); }
static inline unsigned lanes_below(Lanes a, Lanes b) {
  return static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(below(a, b))));
}

static inline Lanes gather(Lanes others, Lanes where, const uint8_t* base, Lanes at) {
  return (Lanes)_mm256_mask_i64gather_epi64((__m256i)others, reinterpret_cast<const long long*>(base), (__m256i)at,
                                            (__m256i)where, 1);
}

static inline __m256i row_of(const uint32_t (&table)[16][8], unsigned which) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(table[which]));
}
static inline Lanes compress(unsigned which, Lanes v) {
  return (Lanes)_mm256_permutevar8x32_epi32((__m256i)v, row_of(kMoves.compress, which));
}
static inline Lanes expand(Lanes others, unsigned which, Lanes v) {
  const __m256i moved = _mm256_permutevar8x32_epi32((__m256i)v, row_of(kMoves.expand, which));
  return (Lanes)_mm256_blendv_epi8((__m256i)others, moved, row_of(kMoves.selected, which));
}

#endif

// The upper 64 bits of the products.
static inline Lanes multiply_high(Lanes a, Lanes b) {
  const Lanes a1 = a >> 32, b1 = b >> 32;
  const Lanes cross = multiply32(a, b1);
  const Lanes middle = (multiply32(a, b) >> 32) + (cross & splat(0xffffffff)) + multiply32(a1, b);
  return multiply32(a1, b1) + (cross >> 32) + (middle >> 32);
}

// ---- The results of csrc/hash.h -------------------------------------------------------------------------------------

struct HashBitsLanes {
  Lanes operator()(Lanes hash) const { return hash; }
};
struct BucketRemainderLanes {
  Lanes divisor, reciprocal;
  Lanes operator()(Lanes hash) const {
    const Lanes rest = hash - multiply_high(hash, reciprocal) * divisor;
    return minimum(rest, rest - divisor);  // rest - divisor wraps around where rest < divisor
  }
};
static inline HashBitsLanes lanes_of(const HashBits&) { return {}; }
static inline BucketRemainderLanes lanes_of(const BucketRemainder& result) {
  return {splat(result.divisor), splat(result.reciprocal)};
}
