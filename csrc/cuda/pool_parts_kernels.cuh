// The kernels of pooling, for many parts at once: a block works on one of them, so that each has a tiling of its own.
// Sums are those of pool_kernels.cuh bit for bit.
#pragma once
#include "pool_kernels.cuh"
#include "pool_parts.cuh"

namespace tsr {

// Offsets, used like a pointer to them; without data, those of bags of one entry each.
struct Offsets {
  const int64_t* data;
  int64_t at;

  __device__ int64_t operator[](int64_t i) const { return data == nullptr ? at + i : data[at + i]; }
  __device__ Offsets operator+(int64_t n) const { return {data, at + n}; }
};

// What all parts share.
template <class T>
struct PartInputs {
  Integers indices{};                // [entries]
  const int64_t* offsets = nullptr;  // of all parts; null: bags of one entry each
  // For the Totals that say so.
  const T* weights = nullptr;              // [entries]
  const acc_t<T>* coefficients = nullptr;  // [entries]
  const int64_t* winners = nullptr;        // what entries won of, as in argmax of embedding_collection
  const int64_t* won_at = nullptr;         // [entries]: where an entry's bag begins in winners; -1: it takes it all
  const int64_t* positions = nullptr;      // [entries]
  uintptr_t out = 0;                       // 0 where parts have results of their own
  int64_t* argmax = nullptr;
  bool report = true;
  ErrorSink errors{};
};

// One part, as a view of pool_kernels.cuh. Kernels are made for one kind of view, whose Inputs begin with PartInputs.
template <class T>
struct PartView {
  using Element = T;
  using Inputs = PartInputs<T>;
  // Threads that merge the pieces of a long bag: no fewer than its merging_teams have.
  static constexpr int64_t kMergingThreads = kThreads;
  using Index = int64_t;

  const PartInputs<T>& in;
  const Part& part;
  const T* rows_begin;
  int64_t rows;
  int row_stride;
  int columns;
  int64_t padding_idx;
  Divisor divisor;
  Reduction reduction;
  bool rows_aligned;
  Offsets offsets;
  Integers indices;
  const T* weights;
  bool report;
  acc_t<T>* divisors;  // [bags], written where they are what is wanted
  // A piece's total goes there if it is not all of its bag; bags are counted from the first here.
  void* slot = nullptr;
  int64_t first_bag = 0;

  __device__ PartView(const PartInputs<T>& in_, const Part& p, Offsets offsets_)
      : in(in_),
        part(p),
        rows_begin(static_cast<const T*>(p.rows)),
        rows(p.row_count),
        row_stride(p.row_stride),
        columns(p.columns),
        padding_idx(p.padding_idx),
        divisor(p.divisor),
        reduction(p.reduction),
        rows_aligned(p.rows_aligned != 0),
        offsets(offsets_),
        indices(in_.indices),
        weights(in_.weights),
        report(in_.report),
        divisors(results<acc_t<T>>()) {}

  template <class R>
  __device__ R* results() const {
    return reinterpret_cast<R*>(in.out + static_cast<uintptr_t>(part.out));
  }

  __device__ bool in_range(int64_t index) const { return static_cast<uint64_t>(index) < static_cast<uint64_t>(rows); }
  __device__ bool is_allowed(int64_t index) const {
    return static_cast<uint64_t>(index) < static_cast<uint64_t>(rows + (padding_idx == rows));
  }
  // The lane's columns; those after the row's last are neither read nor written.
  template <int width>
  __device__ Vector<T, width> load_row(int64_t index, const RowTile& tile) const {
    const T* const from = rows_begin + index * row_stride + tile.column;
    if (rows_aligned) return load_vector<T, width>(from);
    Vector<T, width> row{};
#pragma unroll
    for (int c = 0; c < width; ++c) {
      if (tile.column + c < columns) row.at[c] = from[c];
    }
    return row;
  }
  template <int width>
  __device__ void store_row(int64_t bag, const RowTile& tile, const Vector<T, width>& row) const {
    T* const to = results<T>() + bag * part.out_stride + tile.column;
    if (part.out_aligned != 0) return store_vector(to, row);
#pragma unroll
    for (int c = 0; c < width; ++c) {
      if (tile.column + c < columns) to[c] = row.at[c];
    }
  }
  template <int width>
  __device__ void store_winners(int64_t bag, const RowTile& tile, const int64_t (&winner)[width]) const {
#pragma unroll
    for (int c = 0; c < width; ++c) {
      if (tile.column + c < columns) in.argmax[part.argmax + bag * columns + tile.column + c] = winner[c];
    }
  }
};

template <class T>
__device__ void report_entries(const PartView<T>& p, int64_t begin, int n) {
#pragma unroll 1
  for (int64_t j = begin; j < begin + n; ++j) {
    const int64_t index = p.indices[j];
    if (!p.is_allowed(index)) {
      p.in.errors.report(Argument::kIndices, Fault::kOutOfRange, j, index, p.part.index_bound);
    }
    if (p.weights == nullptr) continue;
    const acc_t<T> weight = static_cast<acc_t<T>>(p.weights[j]);
    if (weight != weight) p.in.errors.report(Argument::kWeights, Fault::kNotANumber, j, 0, 0);
  }
}

// A Total that knows where it goes.
template <class Total>
struct Placed : Total {
  template <class View>
  __device__ void store(const View& p, int64_t bag, const RowTile& tile) const {
    if (p.slot != nullptr) {
      *static_cast<Total*>(p.slot) = *this;
    } else {
      Total::store(p, p.first_bag + bag, tile);
    }
  }
};

// How the widest part's rows are dealt to lanes: pieces of all parts are dealt like them.
struct WidestTiling {
  int lanes_log2;
  int64_t tiles_per_row;

  explicit WidestTiling(const RowTiling& tiling) : lanes_log2(tiling.lanes_log2), tiles_per_row(tiling.tiles_per_row) {}
  __host__ __device__ int64_t lanes_per_row() const { return tiles_per_row << lanes_log2; }
};

// The asking lane's columns in the tile-th tile of a row.
template <int width>
__device__ RowTile tile_of(int64_t row, int64_t tile, int lanes_log2) {
  const int64_t lane = threadIdx.x & ((1 << lanes_log2) - 1);
  return {row, ((tile << lanes_log2) + lane) * width, tile == 0 && lane == 0};
}

// A team owns a tile of a piece, as in pool_pieces. A piece's two ends are the offsets of its only bag.
template <class Total, class View>
__device__ void pool_pieces_of_parts(const Parts& parts, const typename View::Inputs& in, const PoolPlan& plan,
                                     Total* totals, const WidestTiling& widest) {
  const int64_t tiles = plan.piece_count() * widest.tiles_per_row;
  const int64_t stride = plan.piece_blocks * blockDim.x >> widest.lanes_log2;
  for (int64_t t = thread_index() >> widest.lanes_log2; t < tiles; t += stride) {
    const Piece& piece = plan.pieces[t / widest.tiles_per_row];
    const RowTile tile = tile_of<Total::width>(0, t % widest.tiles_per_row, widest.lanes_log2);
    View view(in, parts.parts[piece.part], Offsets{&piece.begin, 0});
    view.first_bag = piece.bag;
    if (piece.bag < 0) view.slot = totals + piece.total * widest.lanes_per_row() + tile.column / Total::width;
    pool_run<Placed<Total>>(view, tile, 0, 1);
  }
}

// A block's teams own tiles of plan.run neighbouring bags of one part, but for those that the plan has made pieces of.
template <class Total, class View>
__global__ void parts_kernel(Parts parts, const __grid_constant__ typename View::Inputs in, PoolPlan plan,
                             Total* totals, WidestTiling widest) {
  if (blockIdx.x < plan.piece_blocks) return pool_pieces_of_parts<Total, View>(parts, in, plan, totals, widest);
  const int64_t block = blockIdx.x - plan.piece_blocks;
  const int64_t number = last_at_most(parts.first_blocks, parts.count, block);
  const Part& part = parts.parts[number];
  const int64_t t = ((block - parts.first_blocks[number]) * blockDim.x + threadIdx.x) >> part.lanes_log2;
  const int64_t row = part.tiles_per_row == 1 ? t : t / part.tiles_per_row;
  const RowTile tile = tile_of<Total::width>(row, t - row * part.tiles_per_row, part.lanes_log2);
  const int64_t first = row * plan.run;
  const int bags = static_cast<int>(plan.run < part.bags - first ? plan.run : part.bags - first);
  if (bags <= 0) return;
  View view(in, part, Offsets{in.offsets, part.first_offset + first});
  view.first_bag = first;
  const bool together = view.offsets[bags] - view.offsets[0] <= kPiece;
  for (int bag = 0, next; bag < bags; bag = next) {
    next = together ? bags : bag;
    while (next < bags && view.offsets[next + 1] - view.offsets[next] <= kEntriesPerTeam) ++next;
    if (next > bag) {
      pool_run<Placed<Total>>(view, tile, bag, next);
    } else {
      next = bag + 1;
      if (plan.failed()) Placed<Total>().store(view, bag, tile);
    }
  }
}

// A block owns a tile of one long bag, as in long_bags_kernel.
template <class Total, class View>
__global__ void long_bags_of_parts_kernel(Parts parts, const __grid_constant__ typename View::Inputs in, PoolPlan plan,
                                          const Total* totals, WidestTiling widest) {
  TSR_SHARED(Total, shares, View::kMergingThreads);
  const int64_t tiles = plan.long_bag_count() * widest.tiles_per_row;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const LongBag bag = plan.long_bags[t / widest.tiles_per_row];
    const Part& part = parts.parts[bag.part];
    const int64_t tile_in_row = t % widest.tiles_per_row;
    if (tile_in_row >= part.tiles_per_row) continue;
    const int lanes = 1 << part.lanes_log2;
    const int64_t teams = part.merging_teams, team = threadIdx.x / lanes;
    const RowTile tile = tile_of<Total::width>(0, tile_in_row, part.lanes_log2);
    const int64_t share = (bag.pieces + teams - 1) / teams;
    const int64_t begin = team * share, end = begin + share < bag.pieces ? begin + share : bag.pieces;
    const Total* const first = totals + bag.first_total * widest.lanes_per_row() + tile.column / Total::width;
    Total total;
#pragma unroll 4
    for (int64_t k = begin; k < end; ++k) total.merge(first[k * widest.lanes_per_row()]);
    shares[threadIdx.x] = total;
    __syncthreads();
    if (team == 0) {
      for (int64_t other = 1; other < teams; ++other) total.merge(shares[other * lanes + threadIdx.x]);
      total.store(View(in, part, Offsets{}), bag.bag, tile);
    }
    __syncthreads();
  }
}

// Pools all parts; they have at most so many entries together. LongView: what stores results as View does, of the same
// Inputs.
template <class Total, class View, class LongView = View>
void launch_parts(DeviceCall& call, PartList& list, const typename View::Inputs& in, int64_t entries) {
  if (list.empty()) return;
  const RowTiling tiling = list.widest();
  const WidestTiling widest(tiling);
  const int64_t run = bags_per_team(list.bags(), entries, list.lanes());
  const Parts parts = list.upload(call, run);
  // Bags of one entry need no pieces.
  const PoolPlan plan = plan_parts(call, parts, in.offsets, in.offsets == nullptr ? 0 : entries, run, tiling);
  Total* const totals = call.workspace<Total>(plan.total_capacity * widest.lanes_per_row());
  launch(call, {list.blocks() + plan.piece_blocks, kPartThreads}, parts_kernel<Total, View>, parts, in, plan, totals,
         widest);
  const int64_t long_bags = std::min(plan.total_capacity, list.bags()) * widest.tiles_per_row;
  launch(call, {std::min(long_bags, kFullDevice / kThreads + 1), LongView::kMergingThreads},
         long_bags_of_parts_kernel<Total, LongView>, parts, in, plan, static_cast<const Total*>(totals), widest);
}

}  // namespace tsr
