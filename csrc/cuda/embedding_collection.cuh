// What the operators on collections of lookups share.
#pragma once
#include "../collection_plan.h"
#include "../cuda.h"
#include "bags.cuh"
#include "pool_parts_kernels.cuh"
#include "uploads.cuh"

namespace tsr {

// The input of a call, as kernels read it.
struct CollectionInput {
  const void* indices;
  ScalarType index_dtype;
  int64_t items;
  const int64_t* offsets;  // checked; null: bags of one item each
};

inline CollectionInput collection_input(DeviceCall& call, const Tensor& indices, const std::optional<Tensor>& offsets) {
  const int64_t items = indices.size(0);
  return {call.data(indices), indices.scalar_type(), items, offsets ? bag_offsets(call, *offsets, items) : nullptr};
}

// A contiguous copy in the accumulator's type, or x itself where that is its own.
inline Tensor accumulated(const Tensor& x) {
  const bool is_half = x.scalar_type() == ScalarType::Half || x.scalar_type() == ScalarType::BFloat16;
  return as_contiguous(is_half ? torch::stable::to(x, ScalarType::Float) : x);
}
inline const void* accumulated(DeviceCall& call, const std::optional<Tensor>& x) {
  return x ? call.data(accumulated(*x)) : nullptr;
}

// Whether rows of this many elements, `stride` apart from `first` on, can be moved 16 bytes at once.
inline bool moves_wide(const void* first, int64_t stride, int64_t columns, size_t element_size) {
  const int64_t size = static_cast<int64_t>(element_size);
  return reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride * size % 16 == 0 && columns * size % 16 == 0;
}

// The inputs that pool the items themselves, without weights.
template <class T>
PartInputs<T> inputs_of(const DeviceCall& call, const CollectionInput& input) {
  PartInputs<T> in;
  in.indices = {input.indices, input.index_dtype == ScalarType::Long};
  in.offsets = input.offsets;
  in.errors = call.errors();
  return in;
}

// What a bad index of each lookup is told to be below: the rows of the smallest table that the lookup's key is looked
// up in. Whichever lookup finds it, the error is the same.
inline std::vector<int64_t> index_bounds(const Collection& c) {
  std::vector<int64_t> of_key, of_lookup;
  for (const CollectionLookup& lookup : c.lookups) {
    const size_t key = static_cast<size_t>(lookup.key);
    if (of_key.size() <= key) of_key.resize(key + 1, INT64_MAX);
    of_key[key] = std::min(of_key[key], c.num_embeddings[static_cast<size_t>(lookup.table)]);
  }
  for (const CollectionLookup& lookup : c.lookups) of_lookup.push_back(of_key[static_cast<size_t>(lookup.key)]);
  return of_lookup;
}

// Items that the lookups for which counts(lookup) read, at most: an item is read by every lookup of its key.
template <class F>
int64_t most_entries(const Collection& c, int64_t items, const F& counts) {
  std::vector<int64_t> times;
  int64_t most = 0;
  for (const CollectionLookup& lookup : c.lookups) {
    const size_t key = static_cast<size_t>(lookup.key);
    if (times.size() <= key) times.resize(key + 1);
    if (counts(lookup)) most = std::max(most, ++times[key]);
  }
  return most * items;
}

// What a lookup's bags and ids are.
inline Part part_of(const Collection& c, const CollectionLookup& lookup, int64_t index_bound) {
  Part part;
  part.row_count = c.num_embeddings[static_cast<size_t>(lookup.table)];
  part.index_bound = index_bound;
  part.padding_idx = c.padding_idx[static_cast<size_t>(lookup.table)];
  part.first_offset = lookup.first_bag;
  part.bags = lookup.bags;
  return part;
}

// What bags of modes mean and sqrtn are divided by, in the accumulator's dtype.
struct CollectionDivisors {
  const void* divisors;        // null: there are none
  std::vector<int64_t> first;  // by lookup: where those of its bags begin; -1: it has none
};

// The divisors of the lookups in wanted tables of this dtype. weights: per_sample_weights in the accumulator's dtype,
// or null.
CollectionDivisors collection_divisors(DeviceCall& call, const Collection& c, const CollectionInput& input,
                                       ScalarType dtype, const void* weights, const std::vector<bool>& wanted);

}  // namespace tsr
