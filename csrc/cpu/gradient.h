// The gradient of a lookup with respect to its table, dense or only the rows that occur: one pass over items grouped by
// row (row_groups.h) with the lookups' own loop (row_loops.h).
#pragma once
#include "row_groups.h"
#include "row_loops.h"

namespace tsr {

// What the items of a RowGroups<U> mean. Null pointers: not used.
template <class T, class U>
struct ItemMeaning {
  const U* segments = nullptr;                // of an item, when payloads are positions; null: payloads are segments
  const acc_t<T>* item_weights = nullptr;     // by item: then payloads must be positions
  const acc_t<T>* segment_weights = nullptr;  // by segment
  const int64_t* winners = nullptr;           // argmax [segments, dim] of mode max: then payloads must be positions
  bool scale_by_count = false;                // divide a row's items by their number

  bool weighted() const { return item_weights != nullptr || segment_weights != nullptr || scale_by_count; }
};

// One thread's arrays for one slice, in the form row_loops takes.
template <class T, class U>
struct SliceScratch {
  SliceScratch(int64_t items, int64_t rows, bool weighted, bool with_positions)
      : segments(items), starts(rows + 1), weights(weighted ? items : 0), positions(with_positions ? items : 0) {}
  Buffer<U> segments;
  Buffer<int64_t> starts;
  Buffer<acc_t<T>> weights;
  Buffer<int64_t> positions;
};

// The starts of all rows [first_row, end_row) in the slice's items, empty ones too. Returns their number.
// As below, without branches on whether a row repeats, which would be mispredicted time and again.
template <class U>
int64_t start_all_rows(const Item<U>* items, const Slice& slice, int64_t* starts) {
  const int64_t n = slice.end - slice.begin, count = slice.end_row - slice.first_row;
  std::fill_n(starts, count + 1, 0);
  // Where each row that has items ends: its last item writes last.
  for (int64_t e = 0; e < n; ++e) starts[static_cast<int64_t>(items[e].row) - slice.first_row + 1] = e + 1;
  for (int64_t row = 1; row <= count; ++row) starts[row] = std::max(starts[row], starts[row - 1]);
  return count;
}

// The starts of the rows that have items, and those rows. Returns their number.
template <class U, class I>
int64_t start_present_rows(const Item<U>* items, const Slice& slice, int64_t* starts, I* rows) {
  const int64_t n = slice.end - slice.begin;
  int64_t row = -1;
  U previous = n > 0 ? static_cast<U>(items[0].row + 1) : U(0);
  for (int64_t e = 0; e < n; ++e) {
    row += items[e].row != previous;
    previous = items[e].row;
    rows[row] = static_cast<I>(previous);
    starts[row + 1] = e + 1;
  }
  starts[0] = 0;
  return slice.groups;
}

// Segments, weights and positions of the slice's items, once its `count` starts are there.
template <class T, class U>
void describe_items(const Item<U>* items, const Slice& slice, const ItemMeaning<T, U>& meaning, int64_t count,
                    SliceScratch<T, U>& scratch) {
  using A = acc_t<T>;
  const int64_t n = slice.end - slice.begin;
  for (int64_t e = 0; e < n; ++e) {
    scratch.segments[e] = meaning.segments != nullptr ? meaning.segments[items[e].payload] : items[e].payload;
  }
  if (meaning.weighted()) {
    for (int64_t e = 0; e < n; ++e) {
      A weight = 1;
      if (meaning.item_weights != nullptr) weight *= meaning.item_weights[items[e].payload];
      if (meaning.segment_weights != nullptr) weight *= meaning.segment_weights[scratch.segments[e]];
      scratch.weights[e] = weight;
    }
  }
  if (meaning.scale_by_count) {
    for (int64_t row = 0; row < count; ++row) {
      const A occurrences = static_cast<A>(scratch.starts[row + 1] - scratch.starts[row]);
      for (int64_t e = scratch.starts[row]; e < scratch.starts[row + 1]; ++e) scratch.weights[e] /= occurrences;
    }
  }
  if (meaning.winners != nullptr) {
    for (int64_t e = 0; e < n; ++e) scratch.positions[e] = static_cast<int64_t>(items[e].payload);
  }
}

enum class OutputMemory { kFresh, kReused };

// Writes the gradient: dense, row v at out + v * dim; or compact, group g at out + g * dim with its row in rows_out
// (type I, null when dense). out_rows: the rows of out.
template <class T, class U, class I>
void write_gradient(const RowGroups<U>& groups, const ItemMeaning<T, U>& meaning, const T* grad, int64_t dim, T* out,
                    I* rows_out, int64_t out_rows, OutputMemory memory) {
  if (out_rows == 0) return;  // the rows_out of an empty compact gradient is null too
  const std::vector<Slice>& slices = groups.slices();
  const int64_t tasks = static_cast<int64_t>(slices.size());
  const bool dense = rows_out == nullptr;
  std::vector<SliceScratch<T, U>> scratch;
  for (int64_t worker = 0; worker < groups.workers(); ++worker) {
    scratch.emplace_back(groups.most_items(), dense ? groups.most_rows() : groups.most_items(), meaning.weighted(),
                         meaning.winners != nullptr);
  }
  // Memory that is mapped already is best written past the caches; fresh memory is in them, freshly cleared.
  const bool stream =
      memory == OutputMemory::kReused && out_rows * dim * static_cast<int64_t>(sizeof(T)) >= kLargeBytes;
  const RowLoops<T, U>& loops = row_loops<T, U>();
  parallel_dynamic(tasks, groups.workers(), [&, grad, dim, out, rows_out, stream, dense](int64_t worker, int64_t task) {
    const Slice slice = slices[static_cast<size_t>(task)];
    SliceScratch<T, U>& mine = scratch[static_cast<size_t>(worker)];
    const Item<U>* items = groups.items() + slice.begin;
    const int64_t first = dense ? slice.first_row : slice.first_group;
    const int64_t count = dense ? start_all_rows(items, slice, mine.starts.data())
                                : start_present_rows(items, slice, mine.starts.data(), rows_out + first);
    describe_items(items, slice, meaning, count, mine);
    const PoolArguments<T, U> arguments{grad,
                                        dim,
                                        mine.segments.data(),
                                        meaning.weighted() ? mine.weights.data() : nullptr,
                                        mine.starts.data(),
                                        nullptr,
                                        count,
                                        out + first * dim,
                                        stream};
    if (meaning.winners != nullptr) {
      loops.pool_won(arguments, mine.positions.data(), meaning.winners);
    } else {
      loops.pool(arguments);
    }
  });
}

// Whether rows, items and segments all fit 32 bits.
inline bool fits_32_bits(int64_t rows, int64_t items, int64_t segments) {
  return std::max({rows, items, segments}) < (int64_t{1} << 32);
}

template <class F>
decltype(auto) dispatch_width(bool fits_32_bits, F&& f) {
  return fits_32_bits ? f(type_tag<uint32_t>{}) : f(type_tag<int64_t>{});
}

}  // namespace tsr
