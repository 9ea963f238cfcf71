// Segment ids as kernels read them: checked, searched and counted.
#pragma once
#include "../checks.h"
#include "../cuda.h"
#include "device.cuh"

namespace tsr {

// One thread per entry checks its segment id, then every segment's first entry is found. Where the last id gave the
// number of segments, a larger one is only out of order.
template <class S>
__global__ void segment_offsets_kernel(const S* segment_ids, int64_t entries, int64_t segments, bool is_given,
                                       ErrorSink errors, int64_t* offsets) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const int64_t id = segment_ids[i];
    if (id < 0) {
      errors.report(Argument::kSegmentIds, Fault::kNegative, i, id, 0);
    } else if (i > 0 && id < segment_ids[i - 1]) {
      errors.report(Argument::kSegmentIds, Fault::kUnsorted, i, id, segment_ids[i - 1]);
    } else if (is_given && id >= segments) {
      errors.report(Argument::kSegmentIds, Fault::kTooLarge, i, id, segments);
    }
  }
  write_offsets(segment_ids, entries, segments, offsets);
}

// num_segments, or the last id + 1: what the call asks for memory for from now on.
inline int64_t segment_count(DeviceCall& call, const Tensor& segment_ids, std::optional<int64_t> num_segments) {
  const int64_t entries = segment_ids.size(0);
  if (num_segments || entries == 0) {
    const int64_t segments = num_segments.value_or(0);
    call.asks(asked_segments(call.op(), /*given=*/true, segments));
    return segments;
  }
  const int64_t last = dispatch_index(segment_ids.scalar_type(), call.op(), "segment_ids", [&](auto tag) -> int64_t {
    using S = typename decltype(tag)::type;
    return call.read_back(static_cast<const S*>(segment_ids.data_ptr()) + entries - 1,
                          "the last segment id, which num_segments=None asks for,");
  });
  const int64_t segments = segments_up_to(call.op(), last, entries - 1);
  call.asks(asked_segments(call.op(), /*given=*/false, segments));
  return segments;
}

// One thread per entry counts it for its segment, or one for all its neighbours in the warp that are in the same one:
// segment ids are sorted as a rule. Integers: the order does not matter.
template <class S>
__global__ void segment_counts_kernel(const S* segment_ids, int64_t entries, int64_t segments,
                                      unsigned long long* counts) {
  // Every lane of a warp takes every step: they talk to each other.
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int64_t first = thread_index() - lane; first < entries; first += thread_count()) {
    const int64_t i = first + lane;
    const int64_t id = i < entries ? static_cast<int64_t>(segment_ids[i]) : -1;
    const int64_t before = __shfl_up_sync(~0u, id, 1);
    const bool begins = lane == 0 || id != before;
    // The lanes at which a run begins; above the last one, as if there were another.
    const unsigned begin_lanes = __ballot_sync(~0u, begins);
    if (!begins || id < 0 || id >= segments) continue;
    const unsigned later = lane == kWarp - 1 ? 0 : begin_lanes >> (lane + 1);
    const int run = later == 0 ? kWarp - lane : __ffs(static_cast<int>(later));
    atomicAdd(&counts[id], static_cast<unsigned long long>(run));
  }
}

}  // namespace tsr
