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

template <class T, int width>
struct Entry {
  bool used;
  acc_t<T> weight;
  Vector<T, width> row;
};

// Entry j of the bag whose entries end at `end`, with the lane's columns of its row.
template <class T, class I, int width>
__device__ Entry<T, width> load_entry(const PoolView<T, I>& p, int64_t j, int64_t end, const RowTile& tile) {
  Entry<T, width> entry;
  entry.used = false;
  if (j >= end) return entry;
  const int64_t index = p.indices[j];
  if (index < 0 || index >= p.rows) {
    if (p.report && tile.first_lane) p.errors.report(Argument::kIndices, Fault::kOutOfRange, j, index, p.rows);
    return entry;
  }
  entry.used = index != p.padding_idx;
  entry.weight = p.weights == nullptr ? acc_t<T>(1) : p.weights[j];
  if (entry.used && tile.column < p.columns) {
    entry.row = *reinterpret_cast<const Vector<T, width>*>(p.table + index * p.columns + tile.column);
  }
  return entry;
}

// A team owns a tile of out[b, :]: each lane walks the bag's entries in order and adds up its own columns.
template <class T, class I, int width>
__global__ void pool_kernel(PoolView<T, I> p, RowTiling tiling) {
  using A = acc_t<T>;
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    A sum[width] = {};
    A weights = 0, squares = 0;
    int64_t count = 0;
    const int64_t end = p.offsets[tile.row + 1];
    for (int64_t j = p.offsets[tile.row]; j < end; j += kInFlight) {
      Entry<T, width> entries[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) entries[k] = load_entry<T, I, width>(p, j + k, end, tile);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (!entries[k].used) continue;
        const A weight = entries[k].weight;
        ++count;
        weights += weight;
        squares += weight * weight;
#pragma unroll
        for (int c = 0; c < width; ++c) sum[c] += weight * static_cast<A>(entries[k].row.at[c]);
      }
    }
    if (tile.column >= p.columns) continue;
    if (p.weights == nullptr) weights = squares = static_cast<A>(count);
    const A divisor = p.divisor == Divisor::kOne       ? A(1)
                      : p.divisor == Divisor::kCount   ? static_cast<A>(count)
                      : p.divisor == Divisor::kWeights ? weights
                                                       : sqrt(squares);
    Vector<T, width> result;
#pragma unroll
    for (int c = 0; c < width; ++c) result.at[c] = static_cast<T>(divisor == A(0) ? A(0) : sum[c] / divisor);
    // out[b, column : column + width]
    *reinterpret_cast<Vector<T, width>*>(p.out + tile.row * p.columns + tile.column) = result;
  }
}

template <class T, class I>
void pool_rows_of(const DeviceCall& call, const Pooling& p) {
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
  const int width = vector_width<T>(p.columns, {p.table, p.out});
  const RowTiling tiling(p.bags, p.columns, width);
  launch(call, tiling.shape(), width == wide ? pool_kernel<T, I, wide> : pool_kernel<T, I, 1>, view, tiling);
}

}  // namespace

void pool_rows(const DeviceCall& call, const Pooling& p) {
  dispatch_float(p.dtype, call.op(), "values", [&](auto value_tag) {
    dispatch_index(p.index_dtype, call.op(), "indices", [&](auto index_tag) {
      pool_rows_of<typename decltype(value_tag)::type, typename decltype(index_tag)::type>(call, p);
    });
  });
}

}  // namespace tsr
