// CPU doors of TFRecord's framing. A record in a file: length (8 bytes), masked crc of those (4), the data, masked crc
// of the data (4); little endian.
#include "../record.h"
#include "crc32c.h"
#include "record_bytes.h"

namespace tsr {
namespace {

constexpr int64_t kHeader = 12, kFooter = 4;
// Bytes whose checksum is one task of a thread.
constexpr int64_t kFrameBlock = int64_t{1} << 18;
// Bytes that are checked in the time of one element of kWorkPerThread.
constexpr int64_t kCheckedBytesPerElement = 16;

uint32_t masked(const uint8_t* data, int64_t size) { return masked_crc32c(crc32c(data, size)); }

struct Frames {
  std::vector<int64_t> ranges;  // begin and end of each record's data
  FrameStatus status;

  int64_t size() const { return static_cast<int64_t>(ranges.size()) / 2; }
  int64_t begin(int64_t i) const { return ranges[static_cast<size_t>(2 * i)]; }
  int64_t end(int64_t i) const { return ranges[static_cast<size_t>(2 * i) + 1]; }
};

// From header to header, up to the first record that is not whole.
Frames find_frames(const uint8_t* bytes, int64_t size, bool verify) {
  Frames frames;
  FrameStatus& status = frames.status;
  while (status.end < size) {
    const int64_t left = size - status.end;
    const uint8_t* const header = bytes + status.end;
    status.needed = kHeader + kFooter;
    status.fault = FrameFault::kIncomplete;
    if (left < kHeader) return frames;
    const uint64_t length = load<uint64_t>(header);
    if (verify && load<uint32_t>(header + 8) != masked(header, 8)) {
      status.fault = FrameFault::kLengthCrc;
      return frames;
    }
    // Saturated: no buffer holds that many.
    constexpr uint64_t kMost = INT64_MAX - kHeader - kFooter;
    status.needed = static_cast<int64_t>(std::min(length, kMost)) + kHeader + kFooter;
    if (left < status.needed) return frames;
    frames.ranges.push_back(status.end + kHeader);
    frames.ranges.push_back(status.end + status.needed - kFooter);
    status.end += status.needed;
  }
  status.fault = FrameFault::kNone;
  status.needed = 0;
  return frames;
}

// Drops the first record whose data do not fit their checksum, and all after it.
void verify_data(const uint8_t* bytes, Frames& frames) {
  FirstPosition first_bad;
  const int64_t n = frames.size();
  const int64_t average = n > 0 ? frames.status.end / n : 1;
  const int64_t block = std::max<int64_t>(kFrameBlock / average, 1);
  parallel_dynamic((n + block - 1) / block, workers_for(frames.status.end / kCheckedBytesPerElement),
                   [&](int64_t, int64_t task) {
                     for (int64_t i = task * block; i < std::min((task + 1) * block, n); ++i) {
                       const int64_t begin = frames.begin(i), end = frames.end(i);
                       if (load<uint32_t>(bytes + end) != masked(bytes + begin, end - begin))
                         return first_bad.report(i);
                     }
                   });
  if (!first_bad.found()) return;
  const int64_t bad = first_bad.position();
  frames.status = {FrameFault::kDataCrc, frames.begin(bad) - kHeader,
                   frames.end(bad) - frames.begin(bad) + kHeader + kFooter};
  frames.ranges.resize(static_cast<size_t>(2 * bad));
}

}  // namespace

std::tuple<Tensor, Tensor> tfrecord_frames_cpu(const Tensor& bytes, bool verify) {
  check_bytes("tfrecord_frames", bytes);
  const Tensor input = as_contiguous(bytes);
  const uint8_t* const data = input.const_data_ptr<uint8_t>();
  Frames frames = find_frames(data, input.size(0), verify);
  if (verify) verify_data(data, frames);
  Tensor ranges = new_empty(bytes, {frames.size(), 2}, ScalarType::Long);
  std::copy(frames.ranges.begin(), frames.ranges.end(), ranges.mutable_data_ptr<int64_t>());
  Tensor status = new_empty(bytes, {3}, ScalarType::Long);
  int64_t* const numbers = status.mutable_data_ptr<int64_t>();
  numbers[0] = static_cast<int64_t>(frames.status.fault);
  numbers[1] = frames.status.end;
  numbers[2] = frames.status.needed;
  return {ranges, status};
}

Tensor tfrecord_framed_cpu(const Tensor& bytes, const Tensor& offsets) {
  const char* op = "tfrecord_framed";
  check_bytes(op, bytes);
  check_offsets(op, "offsets", offsets, bytes.size(0));
  const Tensor input = as_contiguous(bytes), bounds = as_contiguous(offsets);
  const uint8_t* const data = input.const_data_ptr<uint8_t>();
  const int64_t* const at = bounds.const_data_ptr<int64_t>();
  const int64_t n = bounds.size(0) - 1, total = at[n] - at[0];
  Tensor out = new_empty(bytes, {total + n * (kHeader + kFooter)}, ScalarType::Byte);
  uint8_t* const framed = out.mutable_data_ptr<uint8_t>();
  const int64_t grain = std::max<int64_t>(kFrameBlock * n / (total + n * kHeader + 1), 1);
  parallel_for(0, n, grain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t size = at[i + 1] - at[i];
      uint8_t* const frame = framed + at[i] - at[0] + i * (kHeader + kFooter);
      store(frame, static_cast<uint64_t>(size));
      store(frame + 8, masked(frame, 8));
      if (size > 0) std::memcpy(frame + kHeader, data + at[i], static_cast<size_t>(size));
      store(frame + kHeader + size, masked(frame + kHeader, size));
    }
  });
  return out;
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "tfrecord_frames", &tsr::tfrecord_frames_cpu);
  TSR_IMPL(m, "tfrecord_framed", &tsr::tfrecord_framed_cpu);
}
