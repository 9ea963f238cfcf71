// record: files of records, between bytes and columns: checksums, byte planes, TFRecord's framing. CPU only: a file's
// bytes are on the host. What is in the records is record_example.h.
//
// crc32c(buffers: n tensors) -> int64 [n]: the CRC-32C (Castagnoli; iSCSI's) of each tensor's bytes in memory order, in
//   [0, 2^32), not masked. An empty tensor's is 0.
//   * Any dtype, any shape; a tensor that is not contiguous is taken as its contiguous copy. n >= 1.
// to_byte_planes(x [...]) -> uint8 [s, N], s the bytes of an element and N the number of elements: out[k, i] is byte k
//   of element i, the lowest first. Any dtype, any shape.
// from_byte_planes(planes uint8 [s, N]) -> uint8 [N * s]: the bytes of the elements, element by element.
// join_byte_planes_(out uint8 [B], sources: uint8 vectors, planes int64 [P, 3], parts int64 [Q, 2]): from_byte_planes
//   for many arrays at once, whose planes lie anywhere. Part q has parts[q] = (bytes of an element, N); its planes are
//   the next so many rows of planes: (source, start, bits), bytes of sources[source] from start on. Every part begins
//   in out at the next multiple of 64 bytes; zeros lie between and after the last one, up to such a multiple. What is
//   beyond is left alone.
//   * bits 8: the plane's N bytes. bits 0: the one byte that all of them are. bits b of 1 to 7: bytes below 2^b as bit
//     planes, b * ceil(N / 8) bytes: for each block of 1024 bytes, or what is left, M = ceil(block / 8) bytes for each
//     bit; bit q of the block's byte r * M + t is bit r of its byte q * M + t.
//   * Elements have 1, 2, 4 or 8 bytes. A part without elements has its planes all the same.
//   * out is contiguous, has room for all, and lies in none of the sources.
// tfrecord_frames(bytes uint8 [M], verify) -> (ranges int64 [n, 2], status int64 [3]): the records that begin at byte
//   0, one after the other; record i's data are bytes[ranges[i, 0] : ranges[i, 1]]. status is
//   (FrameFault, end, needed): the byte after the last of them, which is where the first fault is, and the bytes that
//   the record there has with its frame, as far as is known (12 bytes of its header must be there, else 16).
//   * verify: both checksums of each record are compared; without it neither is.
// tfrecord_framed(bytes uint8 [M], offsets int64 [n + 1]) -> uint8: bytes[offsets[i] : offsets[i + 1]] with their
//   frames, one after the other; tfrecord_frames' inverse.
//
// Errors: ValueError for a wrong dtype or rank, offsets that decrease or leave [0, M]. What a file may hold is no
// error of these operators, but a status.
// Not differentiable. Deterministic: the same for every number of threads and every instruction set.
// Source: RFC 3720, appendix B.4; the shuffle filter of HDF5 and Blosc; tensorflow/core/lib/io/record_writer.h.
#pragma once
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "abi.h"
#include "dispatch.h"
#include "shared_memory.h"

namespace tsr {

// Why tfrecord_frames stopped. The numbers stand in torchsparse_rec/ops/record.py too.
enum class FrameFault : int64_t { kNone = 0, kIncomplete = 1, kLengthCrc = 2, kDataCrc = 3 };

struct FrameStatus {
  FrameFault fault = FrameFault::kNone;
  int64_t end = 0;
  int64_t needed = 0;
};

// ---- Checks ---------------------------------------------------------------------------------------------------------

inline void check_byte_planes(const Tensor& planes) {
  TSR_CHECK_VALUE(planes.dim() == 2 && planes.scalar_type() == ScalarType::Byte,
                  "from_byte_planes: planes must be a uint8 matrix, got ", dtype_name(planes.scalar_type()),
                  " of shape ", shape_text(planes));
}

inline void check_bytes(const char* op, const Tensor& bytes) {
  TSR_CHECK_VALUE(bytes.dim() == 1 && bytes.scalar_type() == ScalarType::Byte, op,
                  ": bytes must be a uint8 vector, got ", dtype_name(bytes.scalar_type()), " of shape ",
                  shape_text(bytes));
}

constexpr int64_t kPartAlignment = 64;
// Values whose bit planes lie together.
constexpr int64_t kPackedBlock = 1024;

inline int64_t aligned_part(int64_t bytes) { return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment; }

// What join_byte_planes_ has checked: its matrices, where each part's planes and its bytes begin, and all bytes.
struct PlaneDirectory {
  Tensor planes;
  Tensor parts;
  std::vector<std::pair<int64_t, int64_t>> begins;
  int64_t bytes = 0;
};

inline Tensor check_int64_rows(const char* op, const char* name, const Tensor& x, int64_t columns) {
  TSR_CHECK_VALUE(x.dim() == 2 && x.size(1) == columns && x.scalar_type() == ScalarType::Long, op, ": ", name,
                  " must be an int64 matrix of ", columns, " columns, got ", dtype_name(x.scalar_type()), " of shape ",
                  shape_text(x));
  return as_contiguous(x);
}

inline PlaneDirectory check_join_byte_planes(const Tensor& out, const std::vector<Tensor>& sources,
                                             const Tensor& planes, const Tensor& parts) {
  constexpr const char* kOp = "join_byte_planes_";
  constexpr int64_t kMostBytes = int64_t{1} << 62;
  TSR_CHECK_VALUE(out.dim() == 1 && out.scalar_type() == ScalarType::Byte && out.is_contiguous(), kOp,
                  ": out must be a contiguous uint8 vector, got ", dtype_name(out.scalar_type()), " of shape ",
                  shape_text(out));
  for (size_t i = 0; i < sources.size(); ++i) {
    TSR_CHECK_VALUE(sources[i].dim() == 1 && sources[i].scalar_type() == ScalarType::Byte, kOp, ": sources[", i,
                    "] must be a uint8 vector, got ", dtype_name(sources[i].scalar_type()), " of shape ",
                    shape_text(sources[i]));
  }
  CallMemory memory;
  memory.add_written(Place{"out"}, out);
  memory.add_read("sources", sources);
  memory.add_read(Place{"planes"}, planes);
  memory.add_read(Place{"parts"}, parts);
  memory.check(kOp);
  PlaneDirectory found;
  found.planes = check_int64_rows(kOp, "planes", planes, 3);
  found.parts = check_int64_rows(kOp, "parts", parts, 2);
  const int64_t* const plane = found.planes.const_data_ptr<int64_t>();
  const int64_t* const part = found.parts.const_data_ptr<int64_t>();
  const int64_t count = found.planes.size(0);
  int64_t next = 0;
  for (int64_t q = 0; q < found.parts.size(0); ++q) {
    const int64_t width = part[2 * q], n = part[2 * q + 1];
    TSR_CHECK_VALUE((width == 1 || width == 2 || width == 4 || width == 8) && n >= 0 && n <= kMostBytes / 8, kOp,
                    ": parts must be rows (1, 2, 4 or 8 bytes, elements), got (", width, ", ", n, ") at position ", q);
    TSR_CHECK_VALUE(width <= count - next, kOp, ": planes must have a row for each byte of the parts' elements, got ",
                    count, " rows, too few for part ", q);
    for (int64_t k = next; k < next + width; ++k) {
      const int64_t source = plane[3 * k], start = plane[3 * k + 1], bits = plane[3 * k + 2];
      TSR_CHECK_VALUE(source >= 0 && source < static_cast<int64_t>(sources.size()) && bits >= 0 && bits <= 8, kOp,
                      ": planes must be rows (source below ", sources.size(), ", start, bits up to 8), got (", source,
                      ", ", start, ", ", bits, ") at position ", k);
      const int64_t size = sources[static_cast<size_t>(source)].size(0);
      const int64_t needed = bits == 8 ? n : bits == 0 ? std::min<int64_t>(n, 1) : bits * ((n + 7) / 8);
      TSR_CHECK_VALUE(start >= 0 && start <= size && needed <= size - start, kOp, ": plane ", k, " of ", needed,
                      " bytes from ", start, " on must lie within its source's ", size);
    }
    found.begins.emplace_back(next, found.bytes);
    next += width;
    TSR_CHECK_VALUE(width * n <= kMostBytes - found.bytes, kOp, ": parts must have fewer than 2^62 bytes, got more at ",
                    "position ", q);
    found.bytes = aligned_part(found.bytes + width * n);
  }
  TSR_CHECK_VALUE(next == count, kOp, ": planes must have a row for each byte of the parts' elements, got ", count,
                  " rows for ", next, " bytes");
  TSR_CHECK_VALUE(found.bytes <= out.size(0), kOp, ": out must have room for ", found.bytes, " bytes, got ",
                  out.size(0));
  return found;
}

// An int64 vector of at least one element that does not decrease and stays in [0, limit].
inline void check_offsets(const char* op, const std::string& name, const Tensor& offsets, int64_t limit) {
  TSR_CHECK_VALUE(offsets.dim() == 1 && offsets.scalar_type() == ScalarType::Long && offsets.size(0) >= 1, op, ": ",
                  name, " must be an int64 vector of at least one element, got ", dtype_name(offsets.scalar_type()),
                  " of shape ", shape_text(offsets));
  const Tensor dense = as_contiguous(offsets);
  const int64_t* const at = dense.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < dense.size(0); ++i) {
    const int64_t least = i == 0 ? 0 : at[i - 1];
    TSR_CHECK_VALUE(at[i] >= least && at[i] <= limit, op, ": ", name, " must not decrease and stay in [0, ", limit,
                    "], got ", at[i], " at position ", i);
  }
}

}  // namespace tsr
