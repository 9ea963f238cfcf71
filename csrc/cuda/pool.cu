#include "device.cuh"
#include "pool.cuh"

namespace tsr {
namespace {

// Entries whose rows are loaded before the first is added: enough reads in flight to hide the memory's latency.
constexpr int kInFlight = 4;

template <class T, class I>
struct PoolView {
  const T* table;
  int64_t rows;
  int64_t columns;
  const I* indices;
  const int64_t* offsets;
  const acc_t<T>* weights;
  int64_t padding_idx;
  Divisor divisor;
  bool report;
  ErrorSink errors;
  T* out;
};

// Entry j, if it is before the end of its bag.
template <class T, int width>
struct Entry {
  int64_t index;
  bool present;
  bool used;
  acc_t<T> weight;
  Vector<T, width> row;  // the lane's columns
};

template <class T, class I, int width>
__device__ void load_row(const PoolView<T, I>& p, int64_t j, const RowTile& tile, Entry<T, width>& entry) {
  entry.used = entry.present && entry.index >= 0 && entry.index < p.rows && entry.index != p.padding_idx;
  if (!entry.used) return;
  entry.weight = p.weights == nullptr ? acc_t<T>(1) : p.weights[j];
  if (tile.column < p.columns) {
    entry.row = *reinterpret_cast<const Vector<T, width>*>(p.table + entry.index * p.columns + tile.column);
  }
}

template <class T, class I, int width>
__device__ void report_unused(const PoolView<T, I>& p, int64_t j, const RowTile& tile, const Entry<T, width>& entry) {
  const bool in_range = entry.index >= 0 && entry.index < p.rows;
  if (p.report && entry.present && !in_range && tile.first_lane) {
    p.errors.report(Argument::kIndices, Fault::kOutOfRange, j, entry.index, p.rows);
  }
}

// What a run of entries adds up to. The sum is of the lane's own columns.
template <class A, int width>
struct Total {
  A sum[width] = {};
  A weights = 0;
  A squares = 0;
  int64_t count = 0;
};

// Adds up the entries [begin, end) in their order.
template <class T, class I, int width>
__device__ Total<acc_t<T>, width> add_entries(const PoolView<T, I>& p, int64_t begin, int64_t end,
                                              const RowTile& tile) {
  using A = acc_t<T>;
  Total<A, width> total;
  for (int64_t j = begin; j < end; j += kInFlight) {
    Entry<T, width> entries[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      entries[k].present = j + k < end;
      entries[k].index = entries[k].present ? static_cast<int64_t>(p.indices[j + k]) : 0;
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) load_row<T, I, width>(p, j + k, tile, entries[k]);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (!entries[k].used) {
        report_unused<T, I, width>(p, j + k, tile, entries[k]);
        continue;
      }
      const A weight = entries[k].weight;
      ++total.count;
      total.weights += weight;
      total.squares += weight * weight;
#pragma unroll
      for (int c = 0; c < width; ++c) total.sum[c] += weight * static_cast<A>(entries[k].row.at[c]);
    }
  }
  return total;
}

// Writes a bag's sum, divided, to out[b, column : column + width].
template <class T, class I, int width>
__device__ void store_bag(const PoolView<T, I>& p, const RowTile& tile, const Total<acc_t<T>, width>& total) {
  using A = acc_t<T>;
  if (tile.column >= p.columns) return;
  const A count = static_cast<A>(total.count);
  const A weights = p.weights == nullptr ? count : total.weights;
  const A squares = p.weights == nullptr ? count : total.squares;
  const A divisor = p.divisor == Divisor::kOne       ? A(1)
                    : p.divisor == Divisor::kCount   ? count
                    : p.divisor == Divisor::kWeights ? weights
                                                     : sqrt(squares);
  Vector<T, width> result;
#pragma unroll
  for (int c = 0; c < width; ++c) result.at[c] = static_cast<T>(divisor == A(0) ? A(0) : total.sum[c] / divisor);
  *reinterpret_cast<Vector<T, width>*>(p.out + tile.row * p.columns + tile.column) = result;
}

// ---- Long bags ------------------------------------------------------------------------------------------------------
// A popular row of a gradient may own a tenth of all entries. Bags of more than kPiece entries are cut into pieces of
// kPiece, which many teams add up side by side; then one team per bag adds the pieces' totals in their order. Where the
// cuts are depends on the bag alone, so that the bits do not depend on the device.

constexpr int64_t kPiece = 256;

struct LongBag {
  int64_t bag;
  int64_t first_piece;
  int64_t pieces;
};

template <class A>
struct Piece {
  int64_t begin;
  int64_t end;
  // Written when it has been added up; its sum is in LongBags::sums.
  A weights;
  A squares;
  int64_t count;
};

template <class A>
struct LongBags {
  unsigned long long* found;  // [2]: bags and pieces
  LongBag* bags;              // [capacity]
  Piece<A>* pieces;           // [capacity]
  A* sums;                    // [capacity, columns]
  int64_t capacity;
};

// Offsets that decrease (reported before) can make more pieces than entries allow: then the bag stays zero.
template <class A>
__device__ void enlist(const LongBags<A>& all, int64_t bag, int64_t begin, int64_t end) {
  const int64_t pieces = (end - begin + kPiece - 1) / kPiece;
  const int64_t first = static_cast<int64_t>(atomicAdd(&all.found[1], static_cast<unsigned long long>(pieces)));
  for (int64_t k = 0; k < pieces && first + k < all.capacity; ++k) {
    const int64_t from = begin + k * kPiece;
    all.pieces[first + k].begin = from;
    all.pieces[first + k].end = from + kPiece < end ? from + kPiece : end;
  }
  if (first + pieces > all.capacity) return;
  all.bags[atomicAdd(&all.found[0], 1ull)] = {bag, first, pieces};
}

// A team owns a tile of one piece's sum.
template <class T, class I, int width>
__global__ void pieces_kernel(PoolView<T, I> p, LongBags<acc_t<T>> all, RowTiling tiling) {
  const int64_t found = static_cast<int64_t>(all.found[1]);
  const int64_t tiles = (found < all.capacity ? found : all.capacity) * tiling.tiles_per_row;
  for (int64_t t = tiling.first(); t < tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    Piece<acc_t<T>>& piece = all.pieces[tile.row];
    const Total<acc_t<T>, width> total = add_entries<T, I, width>(p, piece.begin, piece.end, tile);
    if (tile.first_lane) {
      piece.weights = total.weights;
      piece.squares = total.squares;
      piece.count = total.count;
    }
    for (int c = 0; c < width && tile.column + c < p.columns; ++c) {
      all.sums[tile.row * p.columns + tile.column + c] = total.sum[c];
    }
  }
}

// A team owns a tile of one long bag: it adds up the bag's pieces in their order.
template <class T, class I, int width>
__global__ void long_bags_kernel(PoolView<T, I> p, LongBags<acc_t<T>> all, RowTiling tiling) {
  const int64_t tiles = static_cast<int64_t>(all.found[0]) * tiling.tiles_per_row;
  for (int64_t t = tiling.first(); t < tiles; t += tiling.stride()) {
    RowTile tile = tiling.at(t);
    const LongBag bag = all.bags[tile.row];
    tile.row = bag.bag;
    Total<acc_t<T>, width> total;
#pragma unroll 4
    for (int64_t k = bag.first_piece; k < bag.first_piece + bag.pieces; ++k) {
      total.weights += all.pieces[k].weights;
      total.squares += all.pieces[k].squares;
      total.count += all.pieces[k].count;
      for (int c = 0; c < width && tile.column + c < p.columns; ++c) {
        total.sum[c] += all.sums[k * p.columns + tile.column + c];
      }
    }
    store_bag<T, I, width>(p, tile, total);
  }
}

// ---- All bags -------------------------------------------------------------------------------------------------------

// A team owns a tile of out[b, :]: each lane walks the bag's entries in order and adds up its own columns.
template <class T, class I, int width>
__global__ void pool_kernel(PoolView<T, I> p, LongBags<acc_t<T>> all, RowTiling tiling) {
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const int64_t begin = p.offsets[tile.row], end = p.offsets[tile.row + 1];
    const bool is_long = end - begin > kPiece;
    if (is_long && tile.first_lane) enlist(all, tile.row, begin, end);
    store_bag<T, I, width>(p, tile, add_entries<T, I, width>(p, begin, is_long ? begin : end, tile));
  }
}

template <class T, class I, int width>
void launch_pool(DeviceCall& call, const PoolView<T, I>& view, int64_t bags, int64_t entries) {
  using A = acc_t<T>;
  const RowTiling tiling(bags, view.columns, width);
  LongBags<A> all{};
  if (entries > kPiece) {
    // A long bag of n entries has at most 2 n / kPiece pieces.
    all.capacity = 2 * entries / kPiece;
    all.found = call.workspace<unsigned long long>(2);
    all.bags = call.workspace<LongBag>(all.capacity);
    all.pieces = call.workspace<Piece<A>>(all.capacity);
    all.sums = call.workspace<A>(all.capacity * view.columns);
    fill_bytes(call.stream(), all.found, 0, 2 * sizeof(*all.found));
  }
  launch(call, tiling.shape(), pool_kernel<T, I, width>, view, all, tiling);
  if (entries > kPiece) {
    const RowTiling piece_tiling(all.capacity, view.columns, width);
    launch(call, piece_tiling.shape(), pieces_kernel<T, I, width>, view, all, piece_tiling);
    const RowTiling bag_tiling(std::min(entries / kPiece, bags), view.columns, width);
    launch(call, bag_tiling.shape(), long_bags_kernel<T, I, width>, view, all, bag_tiling);
  }
}

template <class T, class I>
void pool_rows_of(DeviceCall& call, const Pooling& p) {
  const PoolView<T, I> view{static_cast<const T*>(p.table),
                            p.rows,
                            p.columns,
                            static_cast<const I*>(p.indices),
                            p.offsets,
                            static_cast<const acc_t<T>*>(p.weights),
                            p.padding_idx,
                            p.divisor,
                            p.report,
                            call.errors(),
                            static_cast<T*>(p.out)};
  constexpr int wide = 16 / sizeof(T);
  if (vector_width<T>(p.columns, {p.table, p.out}) == wide) {
    launch_pool<T, I, wide>(call, view, p.bags, p.entries);
  } else {
    launch_pool<T, I, 1>(call, view, p.bags, p.entries);
  }
}

}  // namespace

void pool_rows(DeviceCall& call, const Pooling& p) {
  dispatch_float(p.dtype, call.op(), "values", [&](auto value_tag) {
    dispatch_index(p.index_dtype, call.op(), "indices", [&](auto index_tag) {
      pool_rows_of<typename decltype(value_tag)::type, typename decltype(index_tag)::type>(call, p);
    });
  });
}

}  // namespace tsr
