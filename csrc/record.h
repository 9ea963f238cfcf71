// record: files of records, between bytes and columns: checksums, byte planes, TFRecord's framing. CPU only: a file's
// bytes are on the host. What is in the records is record_example.h.
//
// crc32c(buffers: n tensors) -> int64 [n]: the CRC-32C (Castagnoli; iSCSI's) of each tensor's bytes in memory order, in
//   [0, 2^32), not masked. An empty tensor's is 0.
//   * Any dtype, any shape; a tensor that is not contiguous is taken as its contiguous copy. n >= 1.
// to_byte_planes(x [...]) -> uint8 [s, N], s the bytes of an element and N the number of elements: out[k, i] is byte k
//   of element i, the lowest first. Any dtype, any shape.
// from_byte_planes(planes uint8 [s, N]) -> uint8 [N * s]: the bytes of the elements, element by element.
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
#include <tuple>

#include "abi.h"
#include "dispatch.h"

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
