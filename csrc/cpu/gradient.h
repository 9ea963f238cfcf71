// The gradient of a lookup with respect to its table, dense or only the rows that occur: one pass over items grouped by
// row (row_groups.h) with the lookups' own loop (row_loops.h).
#pragma once
#include "row_groups.h"
#include "row_loops.h"

namespace tsr {

// What the items of a RowGroups<U> mean, for one table. Null pointers: not used.
template <class T, class U>
struct ItemMeaning {
  const T* grad = nullptr;  // [segments, dim]
  int64_t dim = 0;
  const U* segments = nullptr;                // of an item, when payloads are positions; null: payloads are segments
  const acc_t<T>* item_weights = nullptr;     // by item: then payloads must be positions
  const acc_t<T>* segment_weights = nullptr;  // by segment
  const int64_t* winners = nullptr;           // argmax [segments, dim] of mode max: then payloads must be positions
  bool scale_by_count = false;                // divide a row's items by their number
  // Where grad is part of something larger: elements between its rows (0 stands for dim), or by segment, the element
  // where its row begins.
  int64_t stride = 0;
  const U* places = nullptr;
  // Likewise, where a segment's winners begin (-1: it is not of mode max), and what makes its items' payloads the
  // positions that winners hold.
  const int64_t* winner_places = nullptr;
  const int64_t* position_shifts = nullptr;

  bool weighted() const { return item_weights != nullptr || segment_weights != nullptr || scale_by_count; }
};

// One thread's arrays for one slice, in the form row_loops takes.
template <class T, class U>
struct SliceScratch {
  SliceScratch(int64_t items, int64_t rows, bool weighted, bool with_positions)
      : segments(items),
        starts(rows + 1),
        weights(weighted ? items : 0),
        positions(with_positions ? items : 0),
        places(with_positions ? items : 0) {}
  Buffer<U> segments;
  Buffer<int64_t> starts;
  Buffer<acc_t<T>> weights;
  Buffer<int64_t> positions, places;
};

// The starts of all rows [first_row, end_row) in the slice's items, empty ones too. Returns their number.
// Has no branches on whether a row repeats, which would be mispredicted time and again.
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
    for (int64_t e = 0; e < n; ++e) {
      const int64_t segment = static_cast<int64_t>(scratch.segments[e]);
      const int64_t shift = meaning.position_shifts != nullptr ? meaning.position_shifts[segment] : 0;
      scratch.positions[e] = static_cast<int64_t>(items[e].payload) + shift;
      scratch.places[e] = meaning.winner_places != nullptr ? meaning.winner_places[segment] : segment * meaning.dim;
    }
  }
  if (meaning.places != nullptr) {
    for (int64_t e = 0; e < n; ++e) scratch.segments[e] = meaning.places[scratch.segments[e]];
  }
}

// Writes what `count` rows of a described slice of `items` items add up to, from its row `first` on. Out: T or its
// accumulator.
template <class T, class U, class Out>
void pool_items(const ItemMeaning<T, U>& meaning, const SliceScratch<T, U>& scratch, int64_t first, int64_t count,
                int64_t items, Out* out, bool stream) {
  PoolArguments<T, U> arguments{meaning.grad,
                                meaning.dim,
                                scratch.segments.data(),
                                meaning.weighted() ? scratch.weights.data() : nullptr,
                                scratch.starts.data() + first,
                                nullptr,
                                count,
                                /*out=*/nullptr,
                                stream,
                                meaning.places != nullptr ? 1 : meaning.stride,
                                /*out_stride=*/0,
                                /*fetch_end=*/items};
  if constexpr (std::is_same_v<Out, T>) {
    arguments.out = out;
  } else {
    arguments.wide = out;
  }
  const RowLoops<T, U>& loops = row_loops<T, U>();
  if (meaning.winners == nullptr) return loops.pool(arguments);
  loops.pool_won(arguments, scratch.positions.data(), meaning.winners, scratch.places.data());
}

enum class OutputMemory { kFresh, kReused };

// Where a gradient goes. Dense (rows null): row v at out + v * dim; compact: group g at out + g * dim and its row, of
// type I, at rows + g.
template <class T, class I>
struct GradientOutput {
  T* out;
  I* rows;
  int64_t count;  // of rows
  OutputMemory memory = OutputMemory::kFresh;
};

// One slice's part of a gradient.
template <class T, class U, class I>
void write_slice(const Item<U>* all_items, const Slice& slice, const ItemMeaning<T, U>& meaning,
                 const GradientOutput<T, I>& to, SliceScratch<T, U>& scratch) {
  const bool dense = to.rows == nullptr;
  // Memory that is mapped already is best written past the caches; fresh memory is in them, freshly cleared.
  const bool stream =
      to.memory == OutputMemory::kReused && to.count * meaning.dim * static_cast<int64_t>(sizeof(T)) >= kLargeBytes;
  const Item<U>* items = all_items + slice.begin;
  const int64_t first = dense ? slice.first_row : slice.first_group;
  const int64_t count = dense ? start_all_rows(items, slice, scratch.starts.data())
                              : start_present_rows(items, slice, scratch.starts.data(), to.rows + first);
  describe_items(items, slice, meaning, count, scratch);
  pool_items(meaning, scratch, 0, count, slice.end - slice.begin, to.out + first * meaning.dim, stream);
}

// Writes the gradient of one table.
template <class T, class U, class I>
void write_gradient(const RowGroups<U>& groups, const ItemMeaning<T, U>& meaning, const GradientOutput<T, I>& to) {
  if (to.count == 0) return;  // the rows of an empty compact gradient are null too
  if (to.rows == nullptr && meaning.dim == 0) return;
  const std::vector<Slice>& slices = groups.slices();
  std::vector<SliceScratch<T, U>> scratch;
  for (int64_t worker = 0; worker < groups.workers(); ++worker) {
    scratch.emplace_back(groups.most_items(), to.rows == nullptr ? groups.most_rows() : groups.most_items(),
                         meaning.weighted(), meaning.winners != nullptr);
  }
  parallel_dynamic(static_cast<int64_t>(slices.size()), groups.workers(), [&](int64_t worker, int64_t task) {
    write_slice(groups.items(), slices[static_cast<size_t>(task)], meaning, to, scratch[static_cast<size_t>(worker)]);
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
