// The loops between elements and byte planes, once per instruction set: included by isa_foreach.h. Words of one width
// and one shift at a time: compilers turn that into vector instructions. Elements that are read may be at any address:
// tensors over a file's bytes are.

// planes[k * stride + i] = byte k of x[i], for n elements.
template <class Word>
static void split_bytes(const uint8_t* x, int64_t n, uint8_t* planes, int64_t stride) {
  for (size_t k = 0; k < sizeof(Word); ++k) {
    uint8_t* const plane = planes + static_cast<int64_t>(k) * stride;
    for (int64_t i = 0; i < n; ++i) {
      plane[i] = static_cast<uint8_t>(load<Word>(x + i * static_cast<int64_t>(sizeof(Word))) >> (8 * k));
    }
  }
}

// The inverse, of planes that may lie anywhere: byte k of x[i] = planes[k][i]. Nothing of them lies in x.
template <class Word>
static void join_bytes(const uint8_t* const* planes, int64_t n, Word* __restrict x) {
  const uint8_t* plane[sizeof(Word)];
  for (size_t k = 0; k < sizeof(Word); ++k) plane[k] = planes[k];
  for (int64_t i = 0; i < n; ++i) {
    Word word = 0;
    for (size_t k = 0; k < sizeof(Word); ++k) {
      word = static_cast<Word>(word | static_cast<Word>(plane[k][i]) << (8 * k));
    }
    x[i] = word;
  }
}

// 8 * stride values of some bits each, from their bit planes: bit q of value r * stride + t is bit r of byte
// q * stride + t. That order, unlike neighbours in one byte, is one of whole vectors.
static void unpack_bits(const uint8_t* packed, int64_t stride, int64_t bits, uint8_t* __restrict values) {
  for (int64_t r = 0; r < 8; ++r) {
    const uint8_t mask = static_cast<uint8_t>(1 << r);
    uint8_t* const run = values + r * stride;
    for (int64_t t = 0; t < stride; ++t) run[t] = (packed[t] & mask) != 0 ? 1 : 0;
    for (int64_t q = 1; q < bits; ++q) {
      const uint8_t* const plane = packed + q * stride;
      const uint8_t bit = static_cast<uint8_t>(1 << q);
      for (int64_t t = 0; t < stride; ++t) run[t] |= (plane[t] & mask) != 0 ? bit : uint8_t{0};
    }
  }
}
