#include "device.cuh"
#include "row_groups.cuh"

namespace tsr {
namespace {

// One thread per entry.
template <class I, class K>
__global__ void pairs_kernel(const I* indices, int64_t entries, int64_t rows, int64_t padding_idx, ErrorSink errors,
                             KeyedPositions<K> pairs) {
  for (int64_t i = thread_index(); i < entries; i += thread_count()) {
    const int64_t index = indices[i];
    const bool in_range = index >= 0 && index < rows;
    if (!in_range) errors.report(Argument::kIndices, Fault::kOutOfRange, i, index, rows);
    pairs.keys[i] = static_cast<K>(in_range && index != padding_idx ? index : rows);
    pairs.positions[i] = static_cast<K>(i);
  }
}

template <class K>
KeyedPositions<K> sorted_pairs(DeviceCall& call, ScalarType index_dtype, const void* indices, int64_t entries,
                               int64_t rows, int64_t padding_idx) {
  const KeyedPositions<K> pairs{call.workspace<K>(entries), call.workspace<K>(entries)};
  const KeyedPositions<K> spare{call.workspace<K>(entries), call.workspace<K>(entries)};
  dispatch_index(index_dtype, call.op(), "indices", [&](auto tag) {
    using I = typename decltype(tag)::type;
    launch(call, one_thread_each(entries), pairs_kernel<I, K>, static_cast<const I*>(indices), entries, rows,
           padding_idx, call.errors(), pairs);
  });
  int bits = 1;
  while (bits < 64 && (rows >> bits) != 0) ++bits;
  return sort_pairs(call, pairs, spare, entries, bits);
}

// One thread per row finds where its entries begin.
template <class K>
__global__ void dense_offsets_kernel(const K* keys, int64_t entries, int64_t rows, int64_t* offsets) {
  for (int64_t row = thread_index(); row <= rows; row += thread_count()) {
    offsets[row] = lower_bound(keys, entries, static_cast<K>(row));
  }
}

// One thread per sorted entry flags the first one of each row, and the end of the last row: the first entry that counts
// for no row, or the position behind all.
template <class K>
__global__ void heads_kernel(const K* keys, int64_t entries, int64_t rows, uint8_t* heads) {
  for (int64_t j = thread_index(); j <= entries; j += thread_count()) {
    const K key = j < entries ? keys[j] : static_cast<K>(rows);
    heads[j] = j == 0 || key != keys[j - 1];
  }
}

// One thread per present row.
template <class K, class I>
__global__ void row_ids_kernel(const K* keys, PresentRows present, I* ids) {
  for (int64_t r = thread_index(); r < present.count; r += thread_count()) {
    ids[r] = static_cast<I>(keys[present.offsets[r]]);
  }
}

}  // namespace

RowGroups group_by_row(DeviceCall& call, ScalarType index_dtype, const void* indices, int64_t entries, int64_t rows,
                       int64_t padding_idx) {
  constexpr int64_t kNarrow = std::numeric_limits<uint32_t>::max();
  RowGroups groups{entries, rows, rows > kNarrow || entries > kNarrow};
  if (groups.wide) {
    groups.wide_pairs = sorted_pairs<uint64_t>(call, index_dtype, indices, entries, rows, padding_idx);
  } else {
    groups.narrow_pairs = sorted_pairs<uint32_t>(call, index_dtype, indices, entries, rows, padding_idx);
  }
  return groups;
}

const int64_t* dense_offsets(DeviceCall& call, const RowGroups& groups) {
  int64_t* const offsets = call.workspace<int64_t>(groups.rows + 1);
  with_pairs(groups, [&](const auto& pairs) {
    using K = std::remove_pointer_t<decltype(pairs.keys)>;
    launch(call, one_thread_each(groups.rows + 1), dense_offsets_kernel<K>, pairs.keys, groups.entries, groups.rows,
           offsets);
  });
  return offsets;
}

PresentRows present_rows(DeviceCall& call, const RowGroups& groups) {
  const int64_t flags = groups.entries + 1;
  uint8_t* const heads = call.workspace<uint8_t>(flags);
  int64_t* const offsets = call.workspace<int64_t>(flags);
  int64_t* const count = call.workspace<int64_t>(1);
  with_pairs(groups, [&](const auto& pairs) {
    using K = std::remove_pointer_t<decltype(pairs.keys)>;
    launch(call, one_thread_each(flags), heads_kernel<K>, pairs.keys, groups.entries, groups.rows, heads);
  });
  select_positions(call, heads, flags, offsets, count);
  return {call.read_back(count, "the number of rows that have entries") - 1, offsets};
}

void write_row_ids(const DeviceCall& call, const RowGroups& groups, const PresentRows& present, const Tensor& ids) {
  with_pairs(groups, [&](const auto& pairs) {
    using K = std::remove_pointer_t<decltype(pairs.keys)>;
    dispatch_index(ids.scalar_type(), call.op(), "rows", [&](auto tag) {
      using I = typename decltype(tag)::type;
      launch(call, one_thread_each(present.count), row_ids_kernel<K, I>, pairs.keys, present,
             static_cast<I*>(ids.data_ptr()));
    });
  });
}

}  // namespace tsr
