// The kernels of pooling, for any Total: what a bag's entries add up to. pool_*.cu bring the Totals.
//
// A Total belongs to one lane and covers the lane's own `width` columns. It has
//   Entry                   what is loaded of one entry: always prepare(view, j), where it counts load(view, tile,
//                           has_columns, index, j); is_bad() if it must be reported
//   add(entry, j)           takes in entry j
//   merge(later)            takes in what later entries of the bag add up to
//   store(view, bag, tile)  writes the bag's result
//
// A view says where bags, entries and rows are: PoolView, or that of one part of many (pool_parts_kernels.cuh).
#pragma once
#include "device.cuh"
#include "pool.cuh"
#include "pool_plan.cuh"
#include "table_shards.cuh"

namespace tsr {

// Entries whose rows are loaded before the first is added: enough reads in flight to hide the memory's latency.
constexpr int kInFlight = 4;

// All of a view but the indices, which long bags are merged without.
template <class T>
struct PoolRows {
  using Element = T;

  const T* table;
  int64_t rows;
  int64_t columns;
  const int64_t* offsets;
  int64_t bags;
  const T* weights;
  const acc_t<T>* coefficients;
  const acc_t<T>* scales;
  int64_t padding_idx;
  Divisor divisor;
  bool report;
  ErrorSink errors;
  T* out;
  // Only for the Totals that say so.
  acc_t<T>* divisors;        // [bags], written
  int64_t* argmax;           // [bags, columns], written
  const int64_t* winners;    // [rows, columns]
  const int64_t* positions;  // [entries]
  Reduction reduction{};
  acc_t<T> direction{};        // order_of the reduction (segment.h)
  bool is_signed = false;      // what the integers are that T stands for
  T empty{};                   // the result of a bag without entries
  acc_t<T>* values = nullptr;  // [bags, columns], written
  int64_t* counts = nullptr;   // [bags, columns], written
  ShardedTable shards{};       // in place of the table

  __device__ bool in_range(int64_t index) const { return static_cast<uint64_t>(index) < static_cast<uint64_t>(rows); }
  // Also what marks entries to leave out, where that is no row.
  __device__ bool is_allowed(int64_t index) const {
    return static_cast<uint64_t>(index) < static_cast<uint64_t>(rows + (padding_idx == rows));
  }
  // The tile's columns of the table's row, and of the bag's result.
  template <int width>
  __device__ Vector<T, width> load_row(int64_t index, const RowTile& tile) const {
    return load_vector<T, width>(table + index * columns + tile.column);
  }
  template <int width>
  __device__ void store_row(int64_t bag, const RowTile& tile, const Vector<T, width>& row) const {
    store_vector(out + bag * columns + tile.column, row);
  }
  template <int width>
  __device__ void store_winners(int64_t bag, const RowTile& tile, const int64_t (&winners_of)[width]) const {
#pragma unroll
    for (int c = 0; c < width; ++c) argmax[bag * columns + tile.column + c] = winners_of[c];
  }
};

template <class T, class I>
struct PoolView : PoolRows<T> {
  using Index = I;

  const I* indices;
};

template <class T, class I>
PoolView<T, I> view_of(const DeviceCall& call, const Pooling& p) {
  return {{static_cast<const T*>(p.table), p.rows, p.columns, p.offsets, p.bags, static_cast<const T*>(p.weights),
           static_cast<const acc_t<T>*>(p.coefficients), static_cast<const acc_t<T>*>(p.scales), p.padding_idx,
           p.divisor, p.report, call.errors(), static_cast<T*>(p.out), nullptr, nullptr, nullptr, nullptr},
          static_cast<const I*>(p.indices)};
}

// ---- Sums -----------------------------------------------------------------------------------------------------------

// Terms of a float32 sum that are added one by one, before what such blocks come to is: equal terms err alike, so that
// the error of one long sum would grow with their number.
constexpr int kSumBlock = 16;

// A lane's sums over the entries of at most a piece: of the present block, and of the blocks before it.
template <class A, int width>
struct Sums {
  A block[width] = {};
  A blocks[width] = {};

  __device__ void add(int c, A x) { block[c] += x; }
  // After every kSumBlock terms.
  __device__ void end_block() {
#pragma unroll
    for (int c = 0; c < width; ++c) {
      blocks[c] += block[c];
      block[c] = A(0);
    }
  }
  __device__ A value(int c) const { return blocks[c] + block[c]; }
  // Pieces, which may be many, are added up in float64: blocks becomes that sum rounded, block what the rounding left,
  // but for an infinity, which leaves nothing.
  __device__ void merge(const Sums& later) {
#pragma unroll
    for (int c = 0; c < width; ++c) {
      const double sum = (static_cast<double>(blocks[c]) + static_cast<double>(block[c])) +
                         (static_cast<double>(later.blocks[c]) + static_cast<double>(later.block[c]));
      blocks[c] = static_cast<A>(sum);
      block[c] = is_finite(blocks[c]) ? static_cast<A>(sum - static_cast<double>(blocks[c])) : A(0);
    }
  }

 private:
  __device__ static bool is_finite(A x) { return x - x == A(0); }
};

template <int width>
struct Sums<double, width> {
  double block[width] = {};

  __device__ void add(int c, double x) { block[c] += x; }
  __device__ void end_block() {}
  __device__ double value(int c) const { return block[c]; }
  __device__ void merge(const Sums& later) {
#pragma unroll
    for (int c = 0; c < width; ++c) block[c] += later.block[c];
  }
};

// Writes sums / by, zero where `by` is.
template <class View, class A, int width>
__device__ void store_quotient(const View& p, int64_t bag, const RowTile& tile, const Sums<A, width>& sums, A by) {
  using T = typename View::Element;
  if (tile.column >= p.columns) return;
  Vector<T, width> result;
  // Mostly: sums, and bags of one entry.
  if (by == A(1)) {
#pragma unroll
    for (int c = 0; c < width; ++c) result.at[c] = static_cast<T>(sums.value(c));
  } else {
#pragma unroll
    for (int c = 0; c < width; ++c) result.at[c] = static_cast<T>(by == A(0) ? A(0) : sums.value(c) / by);
  }
  p.store_row(bag, tile, result);
}

// ---- Entries --------------------------------------------------------------------------------------------------------

// Apart from the loop that loads: a report in its midst would make the loads wait for each other.
template <class T, class I>
__device__ void report_entries(const PoolView<T, I>& p, int64_t begin, int n) {
#pragma unroll 1
  for (int64_t j = begin; j < begin + n; ++j) {
    const int64_t index = p.indices[j];
    if (!p.is_allowed(index)) p.errors.report(Argument::kIndices, Fault::kOutOfRange, j, index, p.rows);
    if (p.weights == nullptr) continue;
    const acc_t<T> weight = static_cast<acc_t<T>>(p.weights[j]);
    if (weight != weight) p.errors.report(Argument::kWeights, Fault::kNotANumber, j, 0, 0);
  }
}

// The number of entries in [begin, end), which is backwards where offsets decrease (reported before).
__device__ inline int entry_count(int64_t begin, int64_t end) {
  return end > begin ? static_cast<int>(end - begin) : 0;
}

template <class Indices, class I>
__device__ void load_indices(const Indices& indices, int j, int n, I (&loaded)[kInFlight]) {
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) loaded[k] = j + k < n ? indices[j + k] : I(0);
}

// Adds the n entries from `begin` on to the total in their order; before(j) is called ahead of entry begin + j.
// The indices of the next rows are loaded before the present rows are waited for.
template <class Total, class View, class Before>
__device__ void add_entries(const View& p, const RowTile& tile, int64_t begin, int n, Total& total,
                            const Before& before) {
  using Entry = typename Total::Entry;
  using I = typename View::Index;
  const bool has_columns = tile.column < p.columns;
  const auto indices = p.indices + begin;
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
      any_bad = any_bad || !p.is_allowed(index);
      if (j + k < n) entry[k].prepare(p, begin + j + k);
      if (used[k]) entry[k].load(p, tile, has_columns, index, begin + j + k);
    }
    load_indices(indices, j + kInFlight, n, ahead);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      before(j + k);
      any_bad = any_bad || (j + k < n && entry[k].is_bad());
      if (used[k]) total.add(entry[k], begin + j + k);
    }
  }
  if (any_bad && p.report && tile.first_lane) report_entries(p, begin, n);
}

// ---- Pieces ---------------------------------------------------------------------------------------------------------

// The first blocks of a grid pool pieces (pool_plan.cuh), which take longest; a team owns a tile of one piece.
template <class Total, class T, class I>
__device__ void pool_pieces(const PoolView<T, I>& p, const PoolPlan& plan, const RowTiling& tiling, Total* totals) {
  const int64_t tiles = plan.piece_count() * tiling.tiles_per_row;
  for (int64_t t = tiling.first(); t < tiles; t += tiling.stride(plan.piece_blocks)) {
    const RowTile tile = tiling.at(t);
    const Piece piece = plan.pieces[tile.row];
    Total total;
    add_entries(p, tile, piece.begin, entry_count(piece.begin, piece.end), total, [](int) {});
    if (piece.bag >= 0) {
      total.store(p, piece.bag, tile);
    } else {
      totals[piece.total * tiling.lanes_per_row() + tile.column / Total::width] = total;
    }
  }
}

// A block owns a tile of one long bag: its teams take equal shares of the pieces' totals, and the first team merges
// what they come to.
template <class Total, class T>
__global__ void long_bags_kernel(PoolRows<T> p, PoolPlan plan, const Total* totals, RowTiling tiling) {
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

// A team owns a tile of one bag; each of its lanes adds up its own columns. pool_pieces is written out here: with one
// loop for both the kernel takes so few registers that a third more threads have reads in flight.
template <class Total, class T, class I>
__device__ void pool_bags(const PoolView<T, I>& p, const PoolPlan& plan, Total* totals, const RowTiling& tiling) {
  const bool takes_pieces = blockIdx.x < plan.piece_blocks;
  const int64_t first = takes_pieces ? 0 : plan.piece_blocks,
                blocks = takes_pieces ? plan.piece_blocks : gridDim.x - first;
  const int64_t tiles = takes_pieces ? plan.piece_count() * tiling.tiles_per_row : tiling.tiles;
  for (int64_t t = tiling.first(first); t < tiles; t += tiling.stride(blocks)) {
    const RowTile tile = tiling.at(t);
    const Piece piece =
        takes_pieces ? plan.pieces[tile.row] : Piece{p.offsets[tile.row], p.offsets[tile.row + 1], tile.row, 0};
    const bool is_long = piece.end - piece.begin > kPiece;
    if (is_long && !plan.failed()) continue;
    Total total;
    add_entries(p, tile, piece.begin, is_long ? 0 : entry_count(piece.begin, piece.end), total, [](int) {});
    if (piece.bag >= 0) {
      total.store(p, piece.bag, tile);
    } else {
      totals[piece.total * tiling.lanes_per_row() + tile.column / Total::width] = total;
    }
  }
}

template <class Total, class T, class I>
__global__ void bags_kernel(PoolView<T, I> p, PoolPlan plan, Total* totals, RowTiling tiling) {
  pool_bags(p, plan, totals, tiling);
}

// Where the compiler would take a few registers more than let four blocks be on a processor.
template <class Total, class T, class I>
__global__ void __launch_bounds__(kThreads, 4)
    four_blocks_bags_kernel(PoolView<T, I> p, PoolPlan plan, Total* totals, RowTiling tiling) {
  pool_bags(p, plan, totals, tiling);
}
template <class Total, class I>
constexpr bool kFourBlocks = false;

// Pools the bags [first, last) as one run of entries.
template <class Total, class View>
__device__ void pool_run(const View& p, const RowTile& tile, int64_t first, int64_t last) {
  const auto ends = p.offsets + (first + 1);
  const int64_t begin = p.offsets[first];
  const int bags = static_cast<int>(last - first);
  Total total;
  int bag = 0;
  int end = entry_count(begin, ends[0]);
  // The end of the next bag, loaded one bag ahead.
  int next_end = entry_count(begin, ends[bags > 1 ? 1 : 0]);
  const auto close = [&] {
    total.store(p, first + bag, tile);
    total = Total();
    ++bag;
    end = next_end;
    next_end = entry_count(begin, ends[bag + 1 < bags ? bag + 1 : bags - 1]);
  };
  add_entries(p, tile, begin, entry_count(begin, p.offsets[last]), total, [&](int j) {
    while (j >= end && bag + 1 < bags) close();
  });
  while (bag < bags) close();
}

// A team owns a tile of plan.run neighbouring bags, but for those that the plan has made pieces of.
template <class Total, class T, class I>
__global__ void short_bags_kernel(PoolView<T, I> p, PoolPlan plan, Total* totals, RowTiling tiling) {
  if (blockIdx.x < plan.piece_blocks) return pool_pieces(p, plan, tiling, totals);
  const int64_t stride = tiling.stride(gridDim.x - plan.piece_blocks);
  for (int64_t t = tiling.first(plan.piece_blocks); t < tiling.tiles; t += stride) {
    const RowTile tile = tiling.at(t);
    const int64_t first = tile.row * plan.run, last = first + plan.run < p.bags ? first + plan.run : p.bags;
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

// Merged: what the Total is derived from, if it has no members of its own and merges and stores in the same way.
template <class Total, class Merged = Total, class T, class I>
void launch_pool(DeviceCall& call, const PoolView<T, I>& view, int64_t entries) {
  static_assert(sizeof(Merged) == sizeof(Total));
  const RowTiling one_bag_each(view.bags, view.columns, Total::width);
  const PoolPlan plan = plan_pool(call, view.offsets, view.bags, entries, one_bag_each);
  Total* const totals = call.workspace<Total>(plan.total_capacity * one_bag_each.lanes_per_row());
  const RowTiling tiling((view.bags + plan.run - 1) / plan.run, view.columns, Total::width);
  const LaunchShape shape{tiling.shape().blocks + plan.piece_blocks};
  if (plan.run == 1) {
    if constexpr (kFourBlocks<Total, I>) {
      launch(call, shape, four_blocks_bags_kernel<Total, T, I>, view, plan, totals, tiling);
    } else {
      launch(call, shape, bags_kernel<Total, T, I>, view, plan, totals, tiling);
    }
  } else {
    launch(call, shape, short_bags_kernel<Total, T, I>, view, plan, totals, tiling);
  }
  // Long bags are few, if any.
  const int64_t long_bags = std::min(plan.total_capacity, view.bags) * tiling.tiles_per_row;
  const PoolRows<T>& rows = view;
  launch(call, {std::min(long_bags, kFullDevice / kThreads + 1)}, long_bags_kernel<Merged, T>, rows, plan,
         static_cast<const Merged*>(totals), one_bag_each);
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
