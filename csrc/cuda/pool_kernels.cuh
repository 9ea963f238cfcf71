// The kernels of pooling, for any Total: what a bag's entries add up to. pool_*.cu bring the Totals.
//
// A Total belongs to one lane and covers the lane's own `width` columns. It has
//   Entry                   what is loaded of one entry: load(view, tile, has_columns, index, j), and is_bad() for
//                           entries that must be reported
//   add(entry, j)           takes in entry j
//   merge(later)            takes in what later entries of the bag add up to
//   store(view, bag, tile)  writes the bag's result
#pragma once
#include "device.cuh"
#include "pool.cuh"

namespace tsr {

// Entries whose rows are loaded before the first is added: enough reads in flight to hide the memory's latency.
constexpr int kInFlight = 4;
// Longer bags are cut into pieces.
constexpr int64_t kPiece = 256;
// A team takes as many neighbouring bags as hold this many entries on average, so that short bags have reads in flight
// too.
constexpr int64_t kEntriesPerTeam = 16;

template <class T, class I>
struct PoolView {
  const T* table;
  int64_t rows;
  int64_t columns;
  const I* indices;
  const int64_t* offsets;
  int64_t bags;
  const T* weights;
  const acc_t<T>* scales;
  int64_t padding_idx;
  Divisor divisor;
  bool report;
  ErrorSink errors;
  T* out;
  // Only for the Totals that say so.
  acc_t<T>* reciprocals;     // [bags], written
  int64_t* argmax;           // [bags, columns], written
  const int64_t* winners;    // [rows, columns]
  const int64_t* positions;  // [entries]

  __device__ bool in_range(int64_t index) const { return static_cast<uint64_t>(index) < static_cast<uint64_t>(rows); }
};

template <class T, class I>
PoolView<T, I> view_of(const DeviceCall& call, const Pooling& p) {
  return {static_cast<const T*>(p.table),
          p.rows,
          p.columns,
          static_cast<const I*>(p.indices),
          p.offsets,
          p.bags,
          static_cast<const T*>(p.weights),
          static_cast<const acc_t<T>*>(p.scales),
          p.padding_idx,
          p.divisor,
          p.report,
          call.errors(),
          static_cast<T*>(p.out),
          nullptr,
          nullptr,
          nullptr,
          nullptr};
}

// Writes value / by, zero where `by` is; value itself where there is no divisor.
template <class T, class I, int width>
__device__ void store_quotient(const PoolView<T, I>& p, int64_t bag, const RowTile& tile,
                               const acc_t<T> (&value)[width], acc_t<T> by) {
  using A = acc_t<T>;
  if (tile.column >= p.columns) return;
  Vector<T, width> result;
  if (p.divisor == Divisor::kOne) {
#pragma unroll
    for (int c = 0; c < width; ++c) result.at[c] = static_cast<T>(value[c]);
  } else {
#pragma unroll
    for (int c = 0; c < width; ++c) result.at[c] = static_cast<T>(by == A(0) ? A(0) : value[c] / by);
  }
  store_vector(p.out + bag * p.columns + tile.column, result);
}

// ---- Entries --------------------------------------------------------------------------------------------------------

// Apart from the loop that loads: a report in its midst would make the loads wait for each other.
template <class T, class I>
__device__ void report_entries(const PoolView<T, I>& p, int64_t begin, int n) {
  for (int64_t j = begin; j < begin + n; ++j) {
    const int64_t index = p.indices[j];
    if (!p.in_range(index)) p.errors.report(Argument::kIndices, Fault::kOutOfRange, j, index, p.rows);
    if (p.weights == nullptr) continue;
    const acc_t<T> weight = static_cast<acc_t<T>>(p.weights[j]);
    if (weight != weight) p.errors.report(Argument::kWeights, Fault::kNotANumber, j, 0, 0);
  }
}

template <class I>
__device__ void load_indices(const I* indices, int j, int n, I (&loaded)[kInFlight]) {
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) loaded[k] = j + k < n ? indices[j + k] : I(0);
}

// Adds the n <= kPiece entries from `begin` on to the total in their order; before(j) is called ahead of entry begin +
// j. The indices of the next rows are loaded before the present rows are waited for.
template <class Total, class T, class I, class Before>
__device__ void add_entries(const PoolView<T, I>& p, const RowTile& tile, int64_t begin, int n, Total& total,
                            const Before& before) {
  using Entry = typename Total::Entry;
  const bool has_columns = tile.column < p.columns;
  const I* const indices = p.indices + begin;
  bool any_bad = false;
  I ahead[kInFlight];
  load_indices(indices, 0, n, ahead);
  for (int j = 0; j < n; j += kInFlight) {
    bool used[kInFlight];
    Entry entry[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t index = ahead[k];
      used[k] = j + k < n && p.in_range(index) && index != p.padding_idx;
      any_bad = any_bad || !p.in_range(index);
      if (used[k]) entry[k].load(p, tile, has_columns, index, begin + j + k);
    }
    load_indices(indices, j + kInFlight, n, ahead);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      before(j + k);
      if (!used[k]) continue;
      any_bad = any_bad || entry[k].is_bad();
      total.add(entry[k], begin + j + k);
    }
  }
  if (any_bad && p.report && tile.first_lane) report_entries(p, begin, n);
}

// ---- Work for later -------------------------------------------------------------------------------------------------
// A popular row of a gradient may own a tenth of all entries. Bags of more than kPiece entries are cut into pieces of
// kPiece, which many teams add up side by side; then one block per bag merges the pieces' totals in their order. Where
// the cuts are depends on the bag alone, so that the bits do not depend on the device.
//
// A team that has several bags must not be held up by one of them either, as popular rows are often neighbours: bags
// that are too much for it become one piece each.

struct LongBag {
  int64_t bag;
  int64_t first_total;
  int64_t pieces;
};

struct Piece {
  int64_t begin;
  int64_t end;
  int64_t bag;    // the bag that it is all of, or -1
  int64_t total;  // else where its total goes
};

template <class Total>
struct LaterWork {
  unsigned long long* found;  // [3]: pieces, long bags and totals
  Piece* pieces;              // [piece_capacity]
  LongBag* bags;              // [total_capacity]
  Total* totals;              // [total_capacity, lanes of a row]
  int64_t piece_capacity;
  int64_t total_capacity;
};

__device__ inline int64_t reserve(unsigned long long* found, int64_t n) {
  return static_cast<int64_t>(atomicAdd(found, static_cast<unsigned long long>(n)));
}

// Offsets that decrease (reported before) can make more pieces than entries allow: then the bag is left out.
template <class Total>
__device__ void postpone(const LaterWork<Total>& later, int64_t bag, int64_t begin, int64_t end) {
  const int64_t pieces = (end - begin + kPiece - 1) / kPiece;
  const int64_t first = reserve(&later.found[0], pieces);
  const int64_t first_total = pieces > 1 ? reserve(&later.found[2], pieces) : 0;
  const bool fits = first + pieces <= later.piece_capacity && first_total + pieces <= later.total_capacity;
  for (int64_t k = 0; k < pieces && first + k < later.piece_capacity; ++k) {
    const int64_t from = begin + k * kPiece, to = from + kPiece < end ? from + kPiece : end;
    later.pieces[first + k] = {from, fits ? to : from, pieces > 1 ? -1 : bag, first_total + k};
  }
  if (fits && pieces > 1) later.bags[reserve(&later.found[1], 1)] = {bag, first_total, pieces};
}

// A team owns a tile of one piece.
template <class Total, class T, class I>
__global__ void pieces_kernel(PoolView<T, I> p, LaterWork<Total> later, RowTiling tiling) {
  const int64_t found = static_cast<int64_t>(later.found[0]);
  const int64_t tiles = (found < later.piece_capacity ? found : later.piece_capacity) * tiling.tiles_per_row;
  for (int64_t t = tiling.first(); t < tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const Piece piece = later.pieces[tile.row];
    Total total;
    add_entries(p, tile, piece.begin, static_cast<int>(piece.end - piece.begin), total, [](int) {});
    if (piece.bag >= 0) {
      total.store(p, piece.bag, tile);
    } else if (piece.end > piece.begin) {
      later.totals[piece.total * tiling.lanes_per_row() + tile.column / Total::width] = total;
    }
  }
}

// A block owns a tile of one long bag: its teams take equal shares of the pieces, and the first team merges what they
// found.
template <class Total, class T, class I>
__global__ void long_bags_kernel(PoolView<T, I> p, LaterWork<Total> later, RowTiling tiling) {
  TSR_SHARED(Total, shares, kThreads);
  const int lanes = 1 << tiling.lanes_log2;
  const int64_t teams = blockDim.x / lanes, team = threadIdx.x / lanes;
  const int64_t tiles = static_cast<int64_t>(later.found[1]) * tiling.tiles_per_row;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const RowTile tile = tiling.at(t);
    const LongBag bag = later.bags[tile.row];
    const int64_t share = (bag.pieces + teams - 1) / teams;
    const int64_t begin = team * share, end = begin + share < bag.pieces ? begin + share : bag.pieces;
    const Total* const totals = later.totals + bag.first_total * tiling.lanes_per_row() + tile.column / Total::width;
    Total total;
#pragma unroll 4
    for (int64_t k = begin; k < end; ++k) total.merge(totals[k * tiling.lanes_per_row()]);
    shares[threadIdx.x] = total;
    __syncthreads();
    if (team == 0) {
      for (int64_t other = 1; other < teams; ++other) total.merge(shares[other * lanes + threadIdx.x]);
      total.store(p, bag.bag, tile);
    }
    __syncthreads();
  }
}

// ---- All bags -------------------------------------------------------------------------------------------------------

// Pools the bags [first, last), which have at most kPiece entries, as one run of entries.
template <class Total, class T, class I>
__device__ void pool_run(const PoolView<T, I>& p, const RowTile& tile, int64_t first, int64_t last) {
  const int64_t* const ends = p.offsets + first + 1;
  const int64_t begin = p.offsets[first];
  const int bags = static_cast<int>(last - first);
  Total total;
  int bag = 0;
  int end = static_cast<int>(ends[0] - begin);
  // The end of the bag behind, loaded one bag ahead.
  int next_end = static_cast<int>(ends[bags > 1 ? 1 : 0] - begin);
  const auto close = [&] {
    total.store(p, first + bag, tile);
    total = Total();
    ++bag;
    end = next_end;
    next_end = static_cast<int>(ends[bag + 1 < bags ? bag + 1 : bags - 1] - begin);
  };
  add_entries(p, tile, begin, static_cast<int>(p.offsets[last] - begin), total, [&](int j) {
    while (j >= end && bag + 1 < bags) close();
  });
  while (bag < bags) close();
}

template <class Total, class T, class I>
__device__ void pool_bag(const PoolView<T, I>& p, const RowTile& tile, int64_t bag, int64_t begin, int64_t end) {
  Total total;
  add_entries(p, tile, begin, static_cast<int>(end - begin), total, [](int) {});
  total.store(p, bag, tile);
}

// A team owns a tile of one bag; each of its lanes adds up its own columns.
template <class Total, class T, class I>
__global__ void bags_kernel(PoolView<T, I> p, LaterWork<Total> later, RowTiling tiling) {
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const int64_t begin = p.offsets[tile.row], end = p.offsets[tile.row + 1];
    const bool is_long = end - begin > kPiece;
    if (is_long && tile.first_lane) postpone(later, tile.row, begin, end);
    pool_bag<Total>(p, tile, tile.row, begin, is_long ? begin : end);
  }
}

// The same for `run` neighbouring bags at once, if they are short enough; else for the short ones among them.
template <class Total, class T, class I>
__global__ void short_bags_kernel(PoolView<T, I> p, LaterWork<Total> later, RowTiling tiling, int64_t run) {
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const int64_t first = tile.row * run, last = first + run < p.bags ? first + run : p.bags;
    const bool together = p.offsets[last] - p.offsets[first] <= kPiece;
    for (int64_t bag = first, next; bag < last; bag = next) {
      next = together ? last : bag + 1;
      const int64_t begin = p.offsets[bag], end = p.offsets[next];
      if (together || end - begin <= kEntriesPerTeam) {
        pool_run<Total>(p, tile, bag, next);
      } else {
        Total().store(p, bag, tile);
        if (tile.first_lane) postpone(later, bag, begin, end);
      }
    }
  }
}

// Bags per team: more than one where bags are short and many.
inline int64_t bags_per_team(int64_t bags, int64_t entries, const RowTiling& tiling) {
  int64_t run = 1;
  while (run < kEntriesPerTeam && run * entries < kEntriesPerTeam * bags &&
         (tiling.tiles << tiling.lanes_log2) / (2 * run) >= kFullDevice) {
    run *= 2;
  }
  return run;
}

template <class Total>
LaterWork<Total> later_work(DeviceCall& call, int64_t entries, int64_t run, const RowTiling& tiling) {
  LaterWork<Total> later{};
  // A long bag of n entries has at most 2 n / kPiece pieces, and others that are postponed more than kEntriesPerTeam
  // entries.
  later.total_capacity = 2 * entries / kPiece;
  later.piece_capacity = later.total_capacity + (run > 1 ? entries / kEntriesPerTeam : 0);
  later.found = call.workspace<unsigned long long>(3);
  later.pieces = call.workspace<Piece>(later.piece_capacity);
  later.bags = call.workspace<LongBag>(later.total_capacity);
  later.totals = call.workspace<Total>(later.total_capacity * tiling.lanes_per_row());
  fill_bytes(call.stream(), later.found, 0, 3 * sizeof(*later.found));
  return later;
}

template <class Total, class T, class I>
void launch_pool(DeviceCall& call, const PoolView<T, I>& view, int64_t entries) {
  const RowTiling bag_tiling(view.bags, view.columns, Total::width);
  const int64_t run = bags_per_team(view.bags, entries, bag_tiling);
  const RowTiling tiling((view.bags + run - 1) / run, view.columns, Total::width);
  // A bag, or several, of more than kPiece entries: not possible with fewer.
  const bool may_postpone = entries > kPiece;
  const LaterWork<Total> later = may_postpone ? later_work<Total>(call, entries, run, tiling) : LaterWork<Total>{};
  if (run == 1) {
    launch(call, tiling.shape(), bags_kernel<Total, T, I>, view, later, tiling);
  } else {
    launch(call, tiling.shape(), short_bags_kernel<Total, T, I>, view, later, tiling, run);
  }
  if (!may_postpone) return;
  const RowTiling piece_tiling(later.piece_capacity, view.columns, Total::width);
  launch(call, piece_tiling.shape(), pieces_kernel<Total, T, I>, view, later, piece_tiling);
  const int64_t long_bags = std::min(entries / kPiece, view.bags);
  const LaunchShape one_block_each{std::min(long_bags * tiling.tiles_per_row, kMaxBlocks)};
  launch(call, one_block_each, long_bags_kernel<Total, T, I>, view, later, tiling);
}

// Calls f with the tags of the value's and the index's type and of the columns per lane.
template <class F>
void dispatch_pooling(const DeviceCall& call, const Pooling& p, const F& f) {
  dispatch_float(p.dtype, call.op(), "values", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    constexpr int wide = 16 / sizeof(T);
    dispatch_index(p.index_dtype, call.op(), "indices", [&](auto index_tag) {
      if (vector_width<T>(p.columns, {p.table, p.out}) == wide) {
        f(value_tag, index_tag, std::integral_constant<int, wide>());
      } else {
        f(value_tag, index_tag, std::integral_constant<int, 1>());
      }
    });
  });
}

}  // namespace tsr
