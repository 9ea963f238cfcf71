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
#include "pool_plan.cuh"

namespace tsr {

// Entries whose rows are loaded before the first is added: enough reads in flight to hide the memory's latency.
constexpr int kInFlight = 4;

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

// Adds the n entries from `begin` on to the total in their order; before(j) is called ahead of entry begin +
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

// ---- Pieces ---------------------------------------------------------------------------------------------------------

// A team owns a tile of one piece (pool_plan.cuh).
template <class Total, class T, class I>
__device__ void pool_piece(const PoolView<T, I>& p, const Piece& piece, const RowTiling& tiling, const RowTile& tile,
                           Total* totals) {
  Total total;
  add_entries(p, tile, piece.begin, static_cast<int>(piece.end - piece.begin), total, [](int) {});
  if (piece.bag >= 0) {
    total.store(p, piece.bag, tile);
  } else {
    totals[piece.total * tiling.lanes_per_row() + tile.column / Total::width] = total;
  }
}

// A block owns a tile of one long bag: its teams take equal shares of the pieces' totals, and the first team merges
// what they come to.
template <class Total, class T, class I>
__global__ void long_bags_kernel(PoolView<T, I> p, PoolPlan plan, const Total* totals, RowTiling tiling) {
  TSR_SHARED(Total, shares, kThreads);
  const int lanes = 1 << tiling.lanes_log2;
  const int64_t teams = blockDim.x / lanes, team = threadIdx.x / lanes;
  const int64_t tiles = plan.long_bag_count() * tiling.tiles_per_row;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const RowTile tile = tiling.at(t);
    const LongBag bag = plan.long_bags[tile.row];
    const int64_t share = (bag.pieces + teams - 1) / teams;
    const int64_t begin = team * share, end = begin + share < bag.pieces ? begin + share : bag.pieces;
    const Total* const first = totals + bag.first_total * tiling.lanes_per_row() + tile.column / Total::width;
    Total total;
#pragma unroll 4
    for (int64_t k = begin; k < end; ++k) total.merge(first[k * tiling.lanes_per_row()]);
    shares[threadIdx.x] = total;
    __syncthreads();
    if (team == 0) {
      for (int64_t other = 1; other < teams; ++other) total.merge(shares[other * lanes + threadIdx.x]);
      total.store(p, bag.bag, tile);
    }
    __syncthreads();
  }
}

// ---- Bags -----------------------------------------------------------------------------------------------------------

// A team owns a tile of one bag, or of a piece; each of its lanes adds up its own columns.
template <class Total, class T, class I>
__global__ void bags_kernel(PoolView<T, I> p, PoolPlan plan, Total* totals, RowTiling tiling) {
  const int64_t pieces = plan.piece_count();
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const int64_t bag = tile.row - pieces;
    if (bag < 0) {
      pool_piece(p, plan.pieces[tile.row], tiling, tile, totals);
    } else if (bag < p.bags) {
      const int64_t begin = p.offsets[bag], end = p.offsets[bag + 1];
      if (end - begin > kPiece && !plan.failed()) continue;
      Total total;
      if (end - begin <= kPiece) {
        add_entries(p, tile, begin, static_cast<int>(end - begin), total, [](int) {});
      }
      total.store(p, bag, tile);
    }
  }
}

// Pools the bags [first, last) as one run of entries.
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

// A team owns a tile of plan.run neighbouring bags, but for those that the plan has made pieces of.
template <class Total, class T, class I>
__global__ void short_bags_kernel(PoolView<T, I> p, PoolPlan plan, Total* totals, RowTiling tiling) {
  const int64_t pieces = plan.piece_count();
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    if (tile.row < pieces) {
      pool_piece(p, plan.pieces[tile.row], tiling, tile, totals);
      continue;
    }
    const int64_t first = (tile.row - pieces) * plan.run;
    const int64_t last = first + plan.run < p.bags ? first + plan.run : p.bags;
    if (first >= last) continue;
    const bool together = plan.is_one_teams(p.offsets, first, last);
    for (int64_t bag = first, next; bag < last; bag = next) {
      next = together ? last : bag;
      while (next < last && p.offsets[next + 1] - p.offsets[next] <= kEntriesPerTeam) ++next;
      if (next > bag) {
        pool_run<Total>(p, tile, bag, next);
      } else {
        next = bag + 1;
        if (plan.failed()) Total().store(p, bag, tile);
      }
    }
  }
}

template <class Total, class T, class I>
void launch_pool(DeviceCall& call, const PoolView<T, I>& view, int64_t entries) {
  const RowTiling bag_tiling(view.bags, view.columns, Total::width);
  const PoolPlan plan = plan_pool(call, view.offsets, view.bags, entries, bag_tiling);
  const int64_t runs = (view.bags + plan.run - 1) / plan.run;
  // Pieces come first: they take longest. There are few as a rule, so the runs' teams take them too, unless these are
  // too few to fill the device.
  const RowTiling tiling(plan.piece_capacity + runs, view.columns, Total::width);
  LaunchShape shape = tiling.shape();
  shape.blocks = std::min(
      shape.blocks, std::max(RowTiling(runs, view.columns, Total::width).shape().blocks, kFullDevice / kThreads + 1));
  Total* const totals = call.workspace<Total>(plan.total_capacity * tiling.lanes_per_row());
  if (plan.run == 1) {
    launch(call, shape, bags_kernel<Total, T, I>, view, plan, totals, tiling);
  } else {
    launch(call, shape, short_bags_kernel<Total, T, I>, view, plan, totals, tiling);
  }
  const int64_t long_bags = std::min(plan.total_capacity, view.bags) * tiling.tiles_per_row;
  const LaunchShape one_block_each{std::min(long_bags, kMaxBlocks)};
  launch(call, one_block_each, long_bags_kernel<Total, T, I>, view, plan, static_cast<const Total*>(totals), tiling);
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
