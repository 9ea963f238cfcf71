// What several families' kernels do the same way: deal rows to lanes, search sorted vectors.
#pragma once
#include "../cuda.h"

namespace tsr {

// ---- Rows dealt to teams of lanes -----------------------------------------------------------------------------------

// A tile: the columns of one row that one team owns, and the first of them that the asking lane owns.
struct RowTile {
  int64_t row;
  int64_t column;
  bool first_lane;  // the one lane that speaks for the row, in errors
};

// A matrix's rows are cut into tiles of (lanes * vector) columns, and each tile is owned by a team of `lanes`
// neighbouring lanes of a warp, a power of two: narrow rows share a warp, wide rows take several. Each lane owns
// `vector` neighbouring columns. A matrix without columns still has one tile per row, so that its ids are checked.
struct RowTiling {
  int64_t tiles;  // in all rows
  int64_t tiles_per_row;
  int lanes_log2 = 0;
  int vector;

  RowTiling(int64_t rows, int64_t columns, int vector_) : vector(vector_) {
    const int64_t parts = std::max<int64_t>((columns + vector - 1) / vector, 1);
    while ((1 << lanes_log2) < kWarp && (int64_t{1} << lanes_log2) < parts) ++lanes_log2;
    tiles_per_row = ((parts - 1) >> lanes_log2) + 1;
    tiles = rows * tiles_per_row;
  }

  // Lanes that own columns of one row, in all its tiles.
  __host__ __device__ int64_t lanes_per_row() const { return tiles_per_row << lanes_log2; }

  // Enough blocks for a team per tile, or as many as are useful.
  int64_t blocks_for(int64_t some_tiles) const {
    const int64_t teams = kThreads >> lanes_log2;
    return std::min(some_tiles / teams + (some_tiles % teams != 0), kMaxBlocks);
  }
  LaunchShape shape() const { return {blocks_for(tiles)}; }

  // for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) { const RowTile tile = tiling.at(t); ... }
  // Or the same with `blocks` of the grid's blocks, from block `first_block` on.
  __device__ int64_t first(int64_t first_block = 0) const {
    return (thread_index() - first_block * blockDim.x) >> lanes_log2;
  }
  __device__ int64_t stride() const { return stride(gridDim.x); }
  __device__ int64_t stride(int64_t blocks) const { return blocks * blockDim.x >> lanes_log2; }
  __device__ RowTile at(int64_t tile) const {
    const int64_t row = tiles_per_row == 1 ? tile : tile / tiles_per_row;
    const int64_t tile_in_row = tile - row * tiles_per_row;
    const int64_t lane = threadIdx.x & ((1 << lanes_log2) - 1);
    return {row, ((tile_in_row << lanes_log2) + lane) * vector, tile_in_row == 0 && lane == 0};
  }
  // The lanes of the asking lane's warp that form its team, as a mask for shuffles.
  __device__ unsigned team_mask() const {
    const int lanes = 1 << lanes_log2;
    const unsigned ones = lanes == kWarp ? ~0u : (1u << lanes) - 1;
    return ones << (threadIdx.x % kWarp / lanes * lanes);
  }
};

// One load, one store: the address must be aligned to the vector's size.
template <class T, int n>
__device__ Vector<T, n> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, n>*>(from);
}
template <class T, int n>
__device__ void store_vector(T* to, const Vector<T, n>& value) {
  *reinterpret_cast<Vector<T, n>*>(to) = value;
}

// Elements of T in the 16 bytes that one load can move, if rows of `columns` elements allow it, else 1.
template <class T>
int vector_width(int64_t columns, std::initializer_list<const void*> pointers) {
  constexpr int width = 16 / sizeof(T);
  bool aligned = columns % width == 0;
  for (const void* pointer : pointers) aligned = aligned && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  return aligned ? width : 1;
}

// ---- Integers -------------------------------------------------------------------------------------------------------

// Numbers of either width, used like a pointer to them.
struct Integers {
  const void* data;
  bool are_long;

  __device__ int64_t operator[](int64_t i) const {
    return are_long ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  __device__ Integers operator+(int64_t n) const {
    return {static_cast<const char*>(data) + (are_long ? 8 : 4) * n, are_long};
  }
};

// ---- Sorted vectors -------------------------------------------------------------------------------------------------

// The first position whose element is >= value, or n. Sorted is a pointer, or what is indexed and moved like one.
template <class Sorted, class U>
__device__ int64_t lower_bound(Sorted sorted, int64_t n, U value) {
  int64_t begin = 0;
  while (begin < n) {
    const int64_t middle = begin + (n - begin) / 2;
    if (static_cast<U>(sorted[middle]) < value) {
      begin = middle + 1;
    } else {
      n = middle;
    }
  }
  return begin;
}

// Values that one thread of write_offsets takes.
constexpr int64_t kOffsetsPerThread = 16;

// offsets[v] = the first position whose key is >= v, for v in [0, values]: [values + 1]. A block takes a chunk of
// values at a time: it searches all keys once for the chunk, and then only those of the chunk.
template <class Sorted>
__device__ void write_offsets(Sorted sorted, int64_t n, int64_t values, int64_t* offsets) {
  constexpr int64_t kChunk = kOffsetsPerThread * kThreads;
  for (int64_t first = blockIdx.x * kChunk; first <= values; first += gridDim.x * kChunk) {
    const int64_t begin = lower_bound(sorted, n, first);
    const int64_t keys = lower_bound(sorted + begin, n - begin, first + kChunk);
    for (int64_t v = first + threadIdx.x; v < first + kChunk && v <= values; v += blockDim.x) {
      offsets[v] = begin + lower_bound(sorted + begin, keys, v);
    }
  }
}

// sums[i] = f(0) + ... + f(i - 1): [n + 1], by one block of whole warps. For what is as many as tables are: more belong
// to sums_before().
template <class F>
__device__ void write_sums_before(int64_t n, const F& f, int64_t* sums) {
  TSR_SHARED(int64_t, of_warps, kWarp);
  const int64_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  int64_t before = 0;
  for (int64_t first = 0; first <= n; first += blockDim.x) {
    const int64_t i = first + threadIdx.x, mine = i < n ? f(i) : 0;
    int64_t sum = mine;  // of this warp's threads so far
    for (int step = 1; step < kWarp; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == kWarp - 1) of_warps[warp] = sum;
    __syncthreads();
    int64_t all = 0;
    for (int64_t w = 0; w < warps; ++w) {
      if (w == warp) sum += all;
      all += of_warps[w];
    }
    if (i <= n) sums[i] = before + sum - mine;
    before += all;
    __syncthreads();
  }
}

// Calls f with the tag of the type in which values of this dtype are added up: kernels that are not worth one for each
// dtype take what is small in that type, and rows by dtypes that are chosen as they run.
template <class F>
void with_accumulator(ScalarType dtype, const F& f) {
  dtype == ScalarType::Double ? f(type_tag<double>{}) : f(type_tag<float>{});
}

}  // namespace tsr
