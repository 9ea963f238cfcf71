// CPU doors of crc32c and of the byte planes. The checksum itself is crc32c.cpp, the planes' loops are
// record_planes_body.h.
#include "../record.h"

#include <cstring>

#include "crc32c.h"
#include "level.h"
#include "record_bytes.h"

namespace tsr {
namespace {

// ---- Checksums ------------------------------------------------------------------------------------------------------

// A large buffer is cut, so that threads share it.
constexpr int64_t kCrcPiece = int64_t{1} << 20;
// Bytes in the time of one element of kWorkPerThread.
constexpr int64_t kBytesPerElement = 4;

struct CrcPiece {
  const uint8_t* data;
  int64_t size;
  uint32_t crc;
};

int64_t bytes_of(const Tensor& x) { return x.numel() * static_cast<int64_t>(x.element_size()); }

std::vector<CrcPiece> crc_pieces(const std::vector<Tensor>& buffers) {
  std::vector<CrcPiece> pieces;
  for (const Tensor& buffer : buffers) {
    const uint8_t* const data = static_cast<const uint8_t*>(buffer.data_ptr());
    const int64_t size = bytes_of(buffer);
    for (int64_t begin = 0; begin < size; begin += kCrcPiece) {
      pieces.push_back({data + begin, std::min(kCrcPiece, size - begin), 0});
    }
  }
  return pieces;
}

// ---- Byte planes ----------------------------------------------------------------------------------------------------

// Elements at a time: they stay in the first-level cache while their planes are written.
constexpr int64_t kPlaneBlock = 1024;

#define TSR_ISA_BODY "record_planes_body.h"
#include "isa_foreach.h"

template <class Word>
void split_elements(const uint8_t* x, int64_t n, uint8_t* planes) {
  using Split = void (*)(const uint8_t*, int64_t, uint8_t*, int64_t);
  const Split split =
      pick_level<Split>(&baseline::split_bytes<Word>, &avx2::split_bytes<Word>, &avx512::split_bytes<Word>);
  const int64_t blocks = (n + kPlaneBlock - 1) / kPlaneBlock, grain = kWorkPerThread / kPlaneBlock;
  parallel_for(0, blocks, grain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin * kPlaneBlock; i < std::min(end * kPlaneBlock, n); i += kPlaneBlock) {
      split(x + i * static_cast<int64_t>(sizeof(Word)), std::min(kPlaneBlock, n - i), planes + i, n);
    }
  });
}

template <class Word>
using Join = void (*)(const uint8_t* const*, int64_t, Word*);

template <class Word>
Join<Word> pick_join() {
  return pick_level<Join<Word>>(&baseline::join_bytes<Word>, &avx2::join_bytes<Word>, &avx512::join_bytes<Word>);
}

template <class Word>
void join_elements(const uint8_t* planes, int64_t n, Word* x) {
  const Join<Word> join = pick_join<Word>();
  parallel_for(0, n, kWorkPerThread, [=](int64_t begin, int64_t end) {
    const uint8_t* at[sizeof(Word)];
    for (size_t k = 0; k < sizeof(Word); ++k) at[k] = planes + static_cast<int64_t>(k) * n + begin;
    join(at, end - begin, x + begin);
  });
}

// A plane somewhere in memory, of values of so many bits; see join_byte_planes_.
struct Plane {
  const uint8_t* bytes;
  int64_t bits;
};

// The bytes of values [begin, begin + n) of a plane, which begin a block; in `block` unless they are stored as they
// are.
const uint8_t* block_of(const Plane& plane, int64_t begin, int64_t n, uint8_t* block) {
  using Unpack = void (*)(const uint8_t*, int64_t, int64_t, uint8_t*);
  static const Unpack unpack = pick_level<Unpack>(&baseline::unpack_bits, &avx2::unpack_bits, &avx512::unpack_bits);
  if (plane.bits == 8) return plane.bytes + begin;
  if (plane.bits > 0) {
    unpack(plane.bytes + begin / 8 * plane.bits, (n + 7) / 8, plane.bits, block);
  } else if (begin == 0) {
    std::memset(block, *plane.bytes, static_cast<size_t>(n));
  }
  return block;
}

// The elements of one part, of a word's width.
template <class Word>
void join_part(const Plane* planes, int64_t n, uint8_t* out) {
  const Join<Word> join = pick_join<Word>();
  uint8_t blocks[sizeof(Word)][kPackedBlock];
  const uint8_t* at[sizeof(Word)];
  for (int64_t i = 0; i < n; i += kPackedBlock) {
    const int64_t count = std::min(kPackedBlock, n - i);
    for (size_t k = 0; k < sizeof(Word); ++k) at[k] = block_of(planes[k], i, count, blocks[k]);
    join(at, count, reinterpret_cast<Word*>(out) + i);
  }
}

void join_part(int64_t width, const Plane* planes, int64_t n, uint8_t* out) {
  switch (width) {
    case 1:
      join_part<uint8_t>(planes, n, out);
      break;
    case 2:
      join_part<uint16_t>(planes, n, out);
      break;
    case 4:
      join_part<uint32_t>(planes, n, out);
      break;
    default:
      join_part<uint64_t>(planes, n, out);
  }
}

// Elements of a width that no word has.
void split_any(const uint8_t* x, int64_t n, int64_t width, uint8_t* planes) {
  parallel_for(0, n, std::max<int64_t>(kWorkPerThread / width, 1), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t k = 0; k < width; ++k) planes[k * n + i] = x[i * width + k];
    }
  });
}

void join_any(const uint8_t* planes, int64_t n, int64_t width, uint8_t* x) {
  parallel_for(0, n, std::max<int64_t>(kWorkPerThread / width, 1), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t k = 0; k < width; ++k) x[i * width + k] = planes[k * n + i];
    }
  });
}

}  // namespace

Tensor crc32c_cpu(const std::vector<Tensor>& buffers) {
  std::vector<Tensor> whole;
  for (const Tensor& buffer : buffers) whole.push_back(as_contiguous(buffer));
  std::vector<CrcPiece> pieces = crc_pieces(whole);
  const int64_t count = static_cast<int64_t>(pieces.size());
  int64_t total = 0;
  for (const CrcPiece& piece : pieces) total += piece.size;
  parallel_dynamic(count, workers_for(total / kBytesPerElement), [&](int64_t, int64_t i) {
    CrcPiece& piece = pieces[static_cast<size_t>(i)];
    piece.crc = crc32c(piece.data, piece.size);
  });
  Tensor out = new_empty(buffers.at(0), {static_cast<int64_t>(buffers.size())}, ScalarType::Long);
  int64_t* results = out.mutable_data_ptr<int64_t>();
  size_t next = 0;
  for (const Tensor& buffer : whole) {
    uint32_t crc = 0;
    for (int64_t left = bytes_of(buffer); left > 0; left -= pieces[next++].size) {
      crc = crc32c_joined(crc, pieces[next].crc, pieces[next].size);
    }
    *results++ = static_cast<int64_t>(crc);
  }
  return out;
}

Tensor to_byte_planes_cpu(const Tensor& x) {
  const Tensor input = as_contiguous(x);
  const int64_t n = input.numel(), width = static_cast<int64_t>(input.element_size());
  Tensor out = new_empty(x, {width, n}, ScalarType::Byte);
  const uint8_t* const elements = static_cast<const uint8_t*>(input.data_ptr());
  uint8_t* const planes = out.mutable_data_ptr<uint8_t>();
  switch (width) {
    case 1:
      if (n > 0) std::memcpy(planes, elements, static_cast<size_t>(n));
      break;
    case 2:
      split_elements<uint16_t>(elements, n, planes);
      break;
    case 4:
      split_elements<uint32_t>(elements, n, planes);
      break;
    case 8:
      split_elements<uint64_t>(elements, n, planes);
      break;
    default:
      split_any(elements, n, width, planes);
  }
  return out;
}

Tensor from_byte_planes_cpu(const Tensor& planes) {
  check_byte_planes(planes);
  const Tensor input = as_contiguous(planes);
  const int64_t width = input.size(0), n = input.size(1);
  Tensor out = new_empty(planes, {n * width}, ScalarType::Byte);
  const uint8_t* const bytes = input.const_data_ptr<uint8_t>();
  void* const elements = out.data_ptr();
  if (n == 0) return out;
  switch (width) {
    case 0:
      break;
    case 1:
      std::memcpy(elements, bytes, static_cast<size_t>(n));
      break;
    case 2:
      join_elements(bytes, n, static_cast<uint16_t*>(elements));
      break;
    case 4:
      join_elements(bytes, n, static_cast<uint32_t*>(elements));
      break;
    case 8:
      join_elements(bytes, n, static_cast<uint64_t*>(elements));
      break;
    default:
      join_any(bytes, n, width, static_cast<uint8_t*>(elements));
  }
  return out;
}

void join_byte_planes_cpu(const Tensor& out, const std::vector<Tensor>& sources, const Tensor& planes,
                          const Tensor& parts) {
  const PlaneDirectory directory = check_join_byte_planes(out, sources, planes, parts);
  std::vector<Tensor> whole;
  for (const Tensor& source : sources) whole.push_back(as_contiguous(source));
  std::vector<Plane> found;
  const int64_t* const at = directory.planes.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < directory.planes.size(0); ++i) {
    const uint8_t* const bytes = whole[static_cast<size_t>(at[3 * i])].const_data_ptr<uint8_t>();
    found.push_back({bytes + at[3 * i + 1], at[3 * i + 2]});
  }
  uint8_t* const elements = static_cast<uint8_t*>(out.data_ptr());
  const int64_t* const part = directory.parts.const_data_ptr<int64_t>();
  parallel_dynamic(directory.parts.size(0), workers_for(directory.bytes / kBytesPerElement), [&](int64_t, int64_t i) {
    const auto [first, offset] = directory.begins[static_cast<size_t>(i)];
    const int64_t width = part[2 * i], n = part[2 * i + 1];
    if (n == 0) return;
    join_part(width, &found[static_cast<size_t>(first)], n, elements + offset);
    const int64_t end = offset + width * n;
    std::memset(elements + end, 0, static_cast<size_t>(aligned_part(end) - end));
  });
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "crc32c", &tsr::crc32c_cpu);
  TSR_IMPL(m, "to_byte_planes", &tsr::to_byte_planes_cpu);
  TSR_IMPL(m, "from_byte_planes", &tsr::from_byte_planes_cpu);
  TSR_IMPL(m, "join_byte_planes_", &tsr::join_byte_planes_cpu);
}
