#include "bags.h"

namespace tsr {
namespace {

// The element of a contiguous tensor, int32 or int64.
int64_t element(const Tensor& ids, int64_t position) {
  return ids.scalar_type() == ScalarType::Int ? ids.const_data_ptr<int32_t>()[position]
                                              : ids.const_data_ptr<int64_t>()[position];
}

// Reports the first id of [begin, end) that is outside [0, num_segments) or smaller than the one before it.
template <class I>
void report_bad_segment_ids(const I* ids, int64_t begin, int64_t end, int64_t num_segments, FirstPosition& first_bad) {
  bool sorted = true;
  for (int64_t i = std::max<int64_t>(begin, 1); i < end; ++i) sorted &= ids[i - 1] <= ids[i];
  if (sorted && all_below(ids + begin, end - begin, num_segments)) return;
  int64_t i = begin;
  while (all_below(ids + i, 1, num_segments) && (i == 0 || ids[i - 1] <= ids[i])) ++i;
  first_bad.report(i);
}

[[noreturn]] void throw_bad_segment_id(const char* op, const Tensor& segment_ids, int64_t i, int64_t num_segments,
                                       bool given) {
  // An id beyond the last one is not itself at fault: some id after it is smaller.
  if (!given && element(segment_ids, i) >= num_segments) {
    while (element(segment_ids, i) >= element(segment_ids, i - 1 < 0 ? 0 : i - 1)) ++i;
  }
  const int64_t id = element(segment_ids, i);
  TSR_CHECK_VALUE(id >= 0, op, ": segment_ids[", i, "] must be >= 0, got ", id);
  TSR_CHECK_VALUE(i == 0 || id >= element(segment_ids, i - 1), op, ": segment_ids must be sorted, got ",
                  element(segment_ids, i - 1), " followed by ", id, " at position ", i);
  throw std::invalid_argument(
      message(op, ": segment_ids[", i, "] must be below num_segments = ", num_segments, ", got ", id));
}

}  // namespace

void throw_bad_index(const char* op, const char* argument, const Tensor& indices, int64_t position, int64_t bound) {
  throw std::out_of_range(
      message(op, ": ", argument, "[", position, "] must be in [0, ", bound, "), got ", element(indices, position)));
}

Buffer<int64_t> offsets_of_sorted_ids(const char* op, const Tensor& segment_ids, int64_t num_segments, bool given) {
  const int64_t n = segment_ids.size(0);
  Buffer<int64_t> offsets(num_segments + 1, asked_segments(op, given, num_segments));
  int64_t* starts = offsets.data();
  std::fill_n(starts, num_segments + 1, 0);
  FirstPosition first_bad;
  dispatch_index(segment_ids.scalar_type(), op, "segment_ids", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const I* ids = segment_ids.const_data_ptr<I>();
    parallel_for(0, n, kItemGrain, [&, ids, starts, n](int64_t begin, int64_t end) {
      report_bad_segment_ids(ids, begin, end, num_segments, first_bad);
      if (first_bad.found()) return;
      // A segment that spans two threads' parts belongs to the one in whose part it begins.
      while (begin > 0 && begin < end && ids[begin] == ids[begin - 1]) ++begin;
      while (begin < end && end < n && ids[end] == ids[end - 1]) ++end;
      // Where each segment ends: its last item writes last. No branch on whether an id repeats, which mispredicts.
      for (int64_t i = begin; i < end; ++i) starts[static_cast<int64_t>(ids[i]) + 1] = i + 1;
    });
  });
  if (first_bad.found()) throw_bad_segment_id(op, segment_ids, first_bad.position(), num_segments, given);
  for (int64_t s = 1; s <= num_segments; ++s) starts[s] = std::max(starts[s], starts[s - 1]);
  return offsets;
}

Buffer<int64_t> checked_offsets(const char* op, const Tensor& offsets_, int64_t items, bool include_last_offset) {
  const Tensor offsets = as_contiguous(offsets_);
  const int64_t given = offsets.size(0), n = given + (include_last_offset ? 0 : 1);
  Buffer<int64_t> copy(n);
  int64_t* starts = copy.data();
  FirstPosition first_bad;
  dispatch_index(offsets.scalar_type(), op, "offsets", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const I* from = offsets.const_data_ptr<I>();
    parallel_for(0, given, kItemGrain, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        starts[b] = from[b];
        if (b == 0 ? from[b] != 0 : from[b] < from[b - 1]) return first_bad.report(b);
      }
    });
  });
  if (given < n && !first_bad.found()) {
    starts[given] = items;
    if (given == 0 ? items != 0 : items < starts[given - 1]) first_bad.report(given);
  }
  if (first_bad.found()) {
    // All up to the first bad one have been copied.
    const int64_t b = first_bad.position();
    TSR_CHECK_VALUE(b != 0, op, ": offsets[0] must be 0, got ", starts[0]);
    TSR_CHECK_VALUE(false, op, ": offsets must not decrease, got ", starts[b - 1], " followed by ", starts[b],
                    " at position ", b);
  }
  TSR_CHECK_VALUE(starts[n - 1] == items, op, ": offsets[", n - 1, "], the last, must be the number of indices, ",
                  items, ", got ", starts[n - 1]);
  return copy;
}

std::vector<int64_t> balanced_ranges(const int64_t* offsets, int64_t bags, int64_t tasks) {
  std::vector<int64_t> boundaries{0};
  const int64_t first = offsets[0], cost = offsets[bags] - first + bags;
  for (int64_t task = 1; task < tasks; ++task) {
    // cost * task may exceed 64 bits only beyond 2^63 / tasks items.
    const int64_t wanted = cost / tasks * task;
    int64_t low = boundaries.back(), high = bags;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (offsets[middle] - first + middle < wanted) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    boundaries.push_back(low);
  }
  boundaries.push_back(bags);
  return boundaries;
}

}  // namespace tsr
