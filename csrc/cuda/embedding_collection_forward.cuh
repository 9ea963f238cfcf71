// Pooling every lookup of a collection: in one launch, and one more where there are extremes.
#pragma once
#include "embedding_collection.cuh"
#include "pool_extremes.cuh"
#include "pool_weighted.cuh"

namespace tsr {

struct Forward {
  const Collection& c;
  CollectionInput input;
  Tensor out, argmax;
  std::vector<const void*> tables;  // what the view wants for a part's rows
};

inline Forward start_forward(DeviceCall& call, const Collection& c, ScalarType dtype, const Tensor& indices,
                             const std::optional<Tensor>& offsets) {
  return {c,
          collection_input(call, indices, offsets),
          call.empty(c.output_shape, dtype),
          call.empty({c.argmax_elements}, ScalarType::Long),
          {}};
}

template <class T>
PartInputs<T> inputs_of(const DeviceCall& call, const Forward& f) {
  PartInputs<T> in = inputs_of<T>(call, f.input);
  in.out = reinterpret_cast<uintptr_t>(f.out.data_ptr());
  in.argmax = static_cast<int64_t*>(f.argmax.data_ptr());
  return in;
}

// The lookups of extremes, or those of all other modes. width: the columns that a lane owns.
inline PartList forward_parts(const Forward& f, int width, bool of_extremes) {
  const size_t size = f.out.element_size();
  const uint8_t* const first = static_cast<const uint8_t*>(f.out.data_ptr());
  const std::vector<int64_t> bounds = index_bounds(f.c);
  PartList list(width, static_cast<int>(16 / size));
  for (size_t l = 0; l < f.c.lookups.size(); ++l) {
    const CollectionLookup& lookup = f.c.lookups[l];
    if (is_extreme(lookup.mode) != of_extremes) continue;
    Part part = part_of(f.c, lookup, bounds[l]);
    part.rows = f.tables[static_cast<size_t>(lookup.table)];
    part.row_stride = part.columns = static_cast<int32_t>(lookup.dim);
    part.out = lookup.output * static_cast<int64_t>(size);
    part.out_stride = lookup.stride;
    part.divisor = divisor_of(lookup.mode);
    part.rows_aligned = moves_wide(part.rows, lookup.dim, lookup.dim, size);
    part.out_aligned = moves_wide(first + part.out, lookup.stride, lookup.dim, size);
    part.reduction = lookup.mode;
    part.argmax = lookup.argmax;
    list.add(part);
  }
  return list;
}

// One launch: the lookups of extremes, whose Total is Extreme, or those of all other modes.
template <class Total, class View, class LongView = View>
void pool_lookups(DeviceCall& call, const Forward& f, const typename View::Inputs& in, bool of_extremes) {
  PartList list = forward_parts(f, Total::width, of_extremes);
  const int64_t entries = most_entries(
      f.c, f.input.items, [&](const CollectionLookup& lookup) { return is_extreme(lookup.mode) == of_extremes; });
  launch_parts<Total, View, LongView>(call, list, in, entries);
}

}  // namespace tsr
