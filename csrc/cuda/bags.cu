#include "bags.cuh"

namespace tsr {
namespace {

// One thread per offset of the bags [first, last) checks it and copies it, kept within [0, entries]. What is not given
// is the end. all: the number of all bags, of which the offsets are.
template <class O>
__global__ void bag_offsets_kernel(const O* given, int64_t count, int64_t first, int64_t last, int64_t all,
                                   int64_t entries, ErrorSink errors, int64_t* offsets) {
  for (int64_t b = first + thread_index(); b <= last; b += thread_count()) {
    const int64_t offset = b < count ? static_cast<int64_t>(given[b]) : entries;
    if (b == 0 && offset != 0) {
      errors.report(Argument::kOffsets, Fault::kNotFirst, b, offset, 0);
    } else if (b > 0 && offset < given[b - 1]) {
      errors.report(Argument::kOffsets, Fault::kDecreasing, b, offset, given[b - 1]);
    } else if (b == all && offset != entries) {
      errors.report(Argument::kOffsets, Fault::kNotLast, b, offset, entries);
    }
    offsets[b - first] = offset < 0 ? 0 : offset > entries ? entries : offset;
  }
}

// One thread per entry: neighbours search along the same path.
__global__ void entry_bags_kernel(BagOf bag_of, int64_t entries, int64_t* bags) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) bags[i] = bag_of(i);
}

}  // namespace

const int64_t* bag_offsets(DeviceCall& call, const Tensor& offsets, int64_t entries, bool include_last_offset) {
  return bag_offsets(call, offsets, entries, 0, offsets.size(0) - (include_last_offset ? 1 : 0), include_last_offset);
}

const int64_t* bag_offsets(DeviceCall& call, const Tensor& offsets, int64_t entries, int64_t first, int64_t bags,
                           bool include_last_offset) {
  const int64_t count = offsets.size(0), all = count - (include_last_offset ? 1 : 0);
  int64_t* const checked = call.workspace<int64_t>(bags + 1);
  dispatch_index(offsets.scalar_type(), call.op(), "offsets", [&](auto tag) {
    using O = typename decltype(tag)::type;
    launch(call, one_thread_each(bags + 1), bag_offsets_kernel<O>, call.data<O>(offsets), count, first, first + bags,
           all, entries, call.errors(), checked);
  });
  return checked;
}

const int64_t* entry_bags(DeviceCall& call, const BagOf& bag_of, int64_t entries) {
  int64_t* const bags = call.workspace<int64_t>(entries);
  launch(call, one_thread_each(entries), entry_bags_kernel, bag_of, entries, bags);
  return bags;
}

}  // namespace tsr
