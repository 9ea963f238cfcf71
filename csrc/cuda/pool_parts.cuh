// Parts: sets of bags that one kernel pools together, each with rows, results and a width of its own.
#pragma once
#include <vector>

#include "../cuda.h"
#include "device.cuh"
#include "pool.cuh"

namespace tsr {

// Threads of a block that pools: few, as each takes many registers and a block works on one part alone.
constexpr int64_t kPartThreads = 128;

struct Part {
  const void* rows = nullptr;  // row i begins at element i * row_stride; other views have other tables there
  int64_t row_count = 0;
  int64_t index_bound = 0;  // what a bad index is told to be below
  int64_t padding_idx = -1;
  // Results begin so many bytes after PartInputs::out, that of bag b at element b * out_stride; the winners of extremes,
  // [bags, columns], so many elements after PartInputs::argmax.
  int64_t out = 0;
  int64_t out_stride = 0;
  int64_t argmax = 0;
  int64_t first_offset = 0;  // where the offsets of the part's bags begin, [bags + 1]
  int64_t bags = 0;
  Reduction reduction{};  // only for the Totals that say so
  int32_t row_stride = 0;
  int32_t columns = 0;
  Divisor divisor = Divisor::kOne;
  // Whether rows and results can be moved 16 bytes at once.
  int32_t rows_aligned = 0;
  int32_t out_aligned = 0;
  // How a row is dealt to lanes, as in RowTiling.
  int32_t lanes_log2 = 0;
  int32_t tiles_per_row = 1;
  int32_t merging_teams = 1;  // that merge the pieces of a long bag
};
static_assert(sizeof(Part) % sizeof(int64_t) == 0, "parts travel as words");

// Parts in the device's memory.
struct Parts {
  int64_t count = 0;
  const int64_t* first_blocks = nullptr;  // [count + 1]: the first block of each part, and the number of all
  const int64_t* first_bags = nullptr;    // [count + 1]: the same of bags
  const Part* parts = nullptr;            // [count]
};

// Says how the part's rows are dealt to lanes. width: the columns that a lane owns; wide: those that pooling one table
// alone would let it own, where a row is a multiple of that. How long bags are merged, and so their last bit, depends
// on the latter alone.
void deal_lanes(Part& part, int width, int wide);

// On the host: what a call pools together.
class PartList {
 public:
  PartList(int width, int wide) : width_(width), wide_(wide) {}

  void add(Part part);
  bool empty() const { return parts_.empty(); }
  int64_t bags() const { return bags_; }
  int64_t lanes() const { return lanes_; }
  int64_t blocks() const { return blocks_; }
  // A bag per team in the part of the widest rows.
  RowTiling widest() const { return RowTiling(bags_, columns_, width_); }
  // The parts in the device's memory, with teams of `run` bags.
  Parts upload(DeviceCall& call, int64_t run);

 private:
  int width_, wide_;
  std::vector<Part> parts_;
  int64_t bags_ = 0, lanes_ = 0, blocks_ = 0;
  int32_t columns_ = 0;
};

// The last of n ascending numbers that is at most x; the first is. All lanes of a warp ask the same.
__device__ inline int64_t last_at_most(const int64_t* numbers, int64_t n, int64_t x) {
  const int64_t lane = threadIdx.x % kWarp;
  int64_t begin = 0;
  while (n > 1) {
    const int64_t step = (n + kWarp - 1) / kWarp, mine = lane * step;
    const bool is_at_most = mine < n && numbers[begin + mine] <= x;
    const int64_t skipped = (__popc(__ballot_sync(~0u, is_at_most)) - 1) * step;
    begin += skipped;
    n = step < n - skipped ? step : n - skipped;
  }
  return begin;
}

}  // namespace tsr
