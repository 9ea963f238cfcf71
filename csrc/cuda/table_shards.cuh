// A table that is split over several tensors, as kernels read it.
#pragma once
#include "device.cuh"
#include "uploads.cuh"

namespace tsr {

// Row r of the table is in the first shard s with r < ends[s]. Trivially copyable.
struct ShardedTable {
  int64_t shards = 0;
  const int64_t* ends = nullptr;     // [shards]: rows of the shards up to this one
  const int64_t* origins = nullptr;  // [shards]: the address that row 0 would have if the shard were the whole table
  const void* alignment = nullptr;   // as aligned as the least aligned shard

  template <class T>
  __device__ const T* row(int64_t r, int64_t columns) const {
    const int64_t shard = shards == 1 ? 0 : lower_bound(ends, shards, r + 1);
    return reinterpret_cast<const T*>(static_cast<uintptr_t>(origins[shard]) +
                                      static_cast<uintptr_t>(r * columns) * sizeof(T));
  }
};

ShardedTable upload_table(DeviceCall& call, const std::vector<Tensor>& params);

// ---- Rows read by teams ---------------------------------------------------------------------------------------------

// `width` neighbouring columns. Which of them a lane adds up must not depend on the address: the same bits everywhere.
template <class T, int width>
__device__ Vector<T, width> load_columns(const T* from, bool aligned) {
  if (aligned) return load_vector<T, width>(from);
  Vector<T, width> columns;
#pragma unroll
  for (int c = 0; c < width; ++c) columns.at[c] = from[c];
  return columns;
}

// The sum over the lanes of a team, in a fixed tree; every lane has it.
template <class A>
__device__ A team_sum(const RowTiling& tiling, A value) {
  for (int step = (1 << tiling.lanes_log2) / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(tiling.team_mask(), value, step);
  }
  return value;
}

}  // namespace tsr
