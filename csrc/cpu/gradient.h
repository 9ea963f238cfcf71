// The gradient of a lookup with respect to its table, dense or only the rows that occur: one pass over items grouped by
// row (row_groups.h) with the lookups' own loop (row_loops.h).
#pragma once
#include <cstring>

#include "memory.h"
#include "row_groups.h"
#include "row_loops.h"

namespace tsr {

// What the items of a RowGroups<U> mean. Null pointers: not used.
template <class T, class U>
struct ItemMeaning {
  const U* segments = nullptr;                 // of an item, when payloads are positions; null: payloads are segments
  const acc_t<T>* item_weights = nullptr;      // by item: then payloads must be positions
  const acc_t<T>* segment_weights = nullptr;   // by segment
  const int64_t* winners = nullptr;            // argmax [segments, dim] of mode max: then payloads must be positions
  bool scale_by_count = false;                 // divide a row's items by their number

  bool weighted() const { return item_weights != nullptr || segment_weights != nullptr || scale_by_count; }
};

// One thread's arrays for one slice, in the form row_loops takes.
template <class T, class U>
struct SliceScratch {
  SliceScratch(int64_t items, bool weighted, bool with_positions)
      : segments(items), starts(items + 1), rows(items), weights(weighted ? items : 0),
        positions(with_positions ? items : 0) {}
  Buffer<U> segments;
  Buffer<int64_t> starts;
  Buffer<U> rows;
  Buffer<acc_t<T>> weights;
  Buffer<int64_t> positions;
};

template <class T, class U>
void describe_slice(const Item<U>* items, const Slice& slice, const ItemMeaning<T, U>& meaning,
                    SliceScratch<T, U>& scratch) {
  using A = acc_t<T>;
  const int64_t n = slice.end - slice.begin;
  items += slice.begin;
  int64_t group = 0;
  for (int64_t e = 0; e < n; ++e) {
    const int64_t payload = static_cast<int64_t>(items[e].payload);
    scratch.segments[e] = meaning.segments != nullptr ? meaning.segments[payload] : items[e].payload;
    if (e == 0 || items[e].row != items[e - 1].row) {
      scratch.rows[group] = items[e].row;
      scratch.starts[group++] = e;
    }
  }
  scratch.starts[group] = n;
  if (meaning.weighted()) {
    for (int64_t e = 0; e < n; ++e) {
      A weight = 1;
      if (meaning.item_weights != nullptr) weight *= meaning.item_weights[items[e].payload];
      if (meaning.segment_weights != nullptr) weight *= meaning.segment_weights[scratch.segments[e]];
      scratch.weights[e] = weight;
    }
  }
  if (meaning.scale_by_count) {
    for (int64_t g = 0; g < group; ++g) {
      const A count = static_cast<A>(scratch.starts[g + 1] - scratch.starts[g]);
      for (int64_t e = scratch.starts[g]; e < scratch.starts[g + 1]; ++e) scratch.weights[e] /= count;
    }
  }
  if (meaning.winners != nullptr) {
    for (int64_t e = 0; e < n; ++e) scratch.positions[e] = static_cast<int64_t>(items[e].payload);
  }
}

// Zeroes the rows of the slice that no item falls into.
template <class T, class U>
void clear_gaps(const Slice& slice, const SliceScratch<T, U>& scratch, int64_t dim, T* out) {
  int64_t row = slice.first_row;
  for (int64_t g = 0; g <= slice.groups; ++g) {
    const int64_t next = g < slice.groups ? static_cast<int64_t>(scratch.rows[g]) : slice.end_row;
    if (next > row) std::memset(static_cast<void*>(out + row * dim), 0, static_cast<size_t>((next - row) * dim) * sizeof(T));
    row = next + 1;
  }
}

enum class OutputMemory { kFresh, kReused };

// Writes the gradient: dense, row v at out + v * dim; or compact, group g at out + g * dim with its row in rows_out
// (type I, null when dense).
template <class T, class U, class I>
void write_gradient(const RowGroups<U>& groups, const ItemMeaning<T, U>& meaning, const T* grad, int64_t dim, T* out,
                    I* rows_out, int64_t out_rows, OutputMemory memory) {
  const std::vector<Slice>& slices = groups.slices();
  const int64_t tasks = static_cast<int64_t>(slices.size());
  std::vector<SliceScratch<T, U>> scratch;
  for (int64_t worker = 0; worker < std::min(max_workers(), tasks); ++worker) {
    scratch.emplace_back(groups.largest_slice(), meaning.weighted(), meaning.winners != nullptr);
  }
  const bool large = out_rows * dim * static_cast<int64_t>(sizeof(T)) >= kFreshBytes;
  const bool fresh = large && memory == OutputMemory::kFresh, stream = large && memory == OutputMemory::kReused;
  const bool dense = rows_out == nullptr;
  const RowLoops<T, U>& loops = row_loops<T, U>();
  parallel_dynamic(tasks, [&, grad, dim, out, rows_out, fresh, stream, dense](int64_t worker, int64_t task) {
    const Slice slice = slices[static_cast<size_t>(task)];
    SliceScratch<T, U>& mine = scratch[static_cast<size_t>(worker)];
    describe_slice<T, U>(groups.items(), slice, meaning, mine);
    const int64_t first = dense ? slice.first_row : slice.first_group;
    const int64_t count = dense ? slice.end_row - slice.first_row : slice.groups;
    if (fresh) map_pages(out + first * dim, count * dim * static_cast<int64_t>(sizeof(T)));
    if (dense) clear_gaps(slice, mine, dim, out);
    const PoolArguments<T, U> arguments{grad, dim, mine.segments.data(),
                                        meaning.weighted() ? mine.weights.data() : nullptr, mine.starts.data(), nullptr,
                                        slice.groups, out + first * dim, dense ? mine.rows.data() : nullptr, first,
                                        stream};
    if (meaning.winners != nullptr) {
      loops.pool_won(arguments, mine.positions.data(), meaning.winners);
    } else {
      loops.pool(arguments);
    }
    if (!dense) {
      for (int64_t g = 0; g < slice.groups; ++g) rows_out[slice.first_group + g] = static_cast<I>(mine.rows[g]);
    }
  });
}

// Rows of a dense gradient that one task writes: about 4 MB, so that long stretches without items are shared out too.
inline int64_t dense_slice_rows(int64_t row_bytes) { return std::max<int64_t>(1, (int64_t{4} << 20) / std::max<int64_t>(row_bytes, 1)); }

// Whether rows, items and segments all fit 32 bits.
inline bool fits_32_bits(int64_t rows, int64_t items, int64_t segments) {
  return std::max({rows, items, segments}) < (int64_t{1} << 32);
}

template <class F>
decltype(auto) dispatch_width(bool fits_32_bits, F&& f) {
  return fits_32_bits ? f(type_tag<uint32_t>{}) : f(type_tag<int64_t>{});
}

}  // namespace tsr
