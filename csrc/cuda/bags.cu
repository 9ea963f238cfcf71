#include "bags.cuh"

namespace tsr {
namespace {

// One thread per offset checks it and copies it, kept within [0, entries]. What is not given is the end.
template <class O>
__global__ void bag_offsets_kernel(const O* given, int64_t count, int64_t bags, int64_t entries, ErrorSink errors,
                                   int64_t* offsets) {
  for (int64_t b = thread_index(); b <= bags; b += thread_count()) {
    const int64_t offset = b < count ? static_cast<int64_t>(given[b]) : entries;
    if (b == 0 && offset != 0) {
      errors.report(Argument::kOffsets, Fault::kNotFirst, b, offset, 0);
    } else if (b > 0 && offset < given[b - 1]) {
      errors.report(Argument::kOffsets, Fault::kDecreasing, b, offset, given[b - 1]);
    } else if (b == bags && offset != entries) {
      errors.report(Argument::kOffsets, Fault::kNotLast, b, offset, entries);
    }
    offsets[b] = offset < 0 ? 0 : offset > entries ? entries : offset;
  }
}

// One thread per entry: neighbours search along the same path.
__global__ void entry_bags_kernel(BagOf bag_of, int64_t entries, int64_t* bags) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) bags[i] = bag_of(i);
}

}  // namespace

const int64_t* bag_offsets(DeviceCall& call, const Tensor& offsets, int64_t entries, bool include_last_offset) {
  const int64_t count = offsets.size(0), bags = count - (include_last_offset ? 1 : 0);
  int64_t* const checked = call.workspace<int64_t>(bags + 1);
  dispatch_index(offsets.scalar_type(), call.op(), "offsets", [&](auto tag) {
    using O = typename decltype(tag)::type;
    launch(call, one_thread_each(bags + 1), bag_offsets_kernel<O>, call.data<O>(offsets), count, bags, entries,
           call.errors(), checked);
  });
  return checked;
}

const int64_t* entry_bags(DeviceCall& call, const BagOf& bag_of, int64_t entries) {
  int64_t* const bags = call.workspace<int64_t>(entries);
  launch(call, one_thread_each(entries), entry_bags_kernel, bag_of, entries, bags);
  return bags;
}

}  // namespace tsr
