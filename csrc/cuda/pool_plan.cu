#include <cstring>

#include "atomics.cuh"
#include "pool_plan.cuh"
#include "table_shards.cuh"

namespace tsr {
namespace {

__device__ int64_t reserve(unsigned long long* found, int64_t n) {
  return static_cast<int64_t>(atomicAdd(found, static_cast<unsigned long long>(n)));
}

// The pieces that one bag is cut into.
struct Cut {
  int64_t part = 0;
  int64_t bag = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t pieces = 0;
  int64_t first_piece = 0;
  int64_t first_total = 0;
};

// Finds room for the bag's pieces. Where they are in the list depends on the order of threads; what they are does not.
__device__ Cut reserve_pieces(const PoolPlan& plan, int64_t part, int64_t bag, int64_t number, int64_t begin,
                              int64_t end) {
  Cut cut{part, bag, begin, end, (end - begin + kPiece - 1) / kPiece, 0, 0};
  cut.first_piece = reserve(&plan.found[0], cut.pieces);
  if (cut.pieces > 1) cut.first_total = reserve(&plan.found[2], cut.pieces);
  if (cut.first_piece + cut.pieces > plan.piece_capacity ||
      (cut.pieces > 1 && cut.first_total + cut.pieces > plan.total_capacity)) {
    relaxed_store(&plan.found[3], 1ull);
    cut.pieces = 0;
  } else if (cut.pieces > 1) {
    const int64_t slot = reserve(&plan.found[1], 1);
    plan.long_bags[slot] = {bag, cut.first_total, cut.pieces, part};
    if (plan.slots != nullptr) plan.slots[number] = slot;
  }
  return cut;
}

// number: of the bag, among those of all parts.
__device__ Cut cut_of(const PoolPlan& plan, int64_t part, const int64_t* offsets, int64_t bags, int64_t bag,
                      int64_t number) {
  const int64_t begin = offsets[bag], end = offsets[bag + 1];
  if (end - begin <= kEntriesPerTeam) return Cut{};
  const int64_t first = bag / plan.run * plan.run;
  const int64_t last = first + plan.run < bags ? first + plan.run : bags;
  return plan.is_one_teams(offsets, first, last) ? Cut{} : reserve_pieces(plan, part, bag, number, begin, end);
}

struct PlainBags {
  const int64_t* offsets;
  int64_t bags;

  __device__ int64_t count() const { return bags; }
  __device__ Cut cut(const PoolPlan& plan, int64_t bag) const { return cut_of(plan, 0, offsets, bags, bag, bag); }
};

// The bags of all parts, one part after the other.
struct PartBags {
  const int64_t* offsets;
  Parts parts;

  __device__ int64_t count() const { return parts.first_bags[parts.count]; }
  __device__ Cut cut(const PoolPlan& plan, int64_t bag) const {
    const int64_t part = lower_bound(parts.first_bags, parts.count, bag + 1) - 1;
    const Part& p = parts.parts[part];
    return cut_of(plan, part, offsets + p.first_offset, p.bags, bag - parts.first_bags[part], bag);
  }
};

// Bags that one block plans: it makes the counts zero itself.
constexpr int64_t kOneBlocksBags = 4096;
constexpr int64_t kOneBlocksThreads = 1024;

// One thread per bag decides on it; a warp writes the pieces of each of its bags together.
template <class Bags>
__global__ void plan_kernel(Bags all, PoolPlan plan) {
  if (gridDim.x == 1) {
    if (threadIdx.x < 4) plan.found[threadIdx.x] = 0;
    __syncthreads();
  }
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int64_t bags = all.count();
  for (int64_t first = thread_index() - lane; first < bags; first += thread_count()) {
    const Cut mine = first + lane < bags ? all.cut(plan, first + lane) : Cut{};
    for (unsigned waiting = __ballot_sync(~0u, mine.pieces > 0); waiting != 0; waiting &= waiting - 1) {
      const int owner = __ffs(static_cast<int>(waiting)) - 1;
      const int64_t part = __shfl_sync(~0u, mine.part, owner), bag = __shfl_sync(~0u, mine.bag, owner);
      const int64_t begin = __shfl_sync(~0u, mine.begin, owner);
      const int64_t end = __shfl_sync(~0u, mine.end, owner), pieces = __shfl_sync(~0u, mine.pieces, owner);
      const int64_t first_piece = __shfl_sync(~0u, mine.first_piece, owner);
      const int64_t first_total = __shfl_sync(~0u, mine.first_total, owner);
      for (int64_t k = lane; k < pieces; k += kWarp) {
        const int64_t from = begin + k * kPiece, to = from + kPiece < end ? from + kPiece : end;
        plan.pieces[first_piece + k] = {from, to, pieces > 1 ? -1 : bag, first_total + k, part};
      }
    }
  }
}

// The plan for so many bags at most, cut by `all`.
template <class Bags>
PoolPlan plan_bags(DeviceCall& call, const Bags& all, int64_t bags, int64_t entries, int64_t run,
                   const RowTiling& tiling, int64_t* slots) {
  PoolPlan plan;
  plan.run = run;
  plan.slots = slots;
  if (entries <= kPiece || bags == 0) return plan;
  // A long bag of n entries has at most 2 n / kPiece pieces; other pieces have more than kEntriesPerTeam entries each.
  plan.total_capacity = 2 * entries / kPiece;
  plan.piece_capacity = plan.total_capacity + (plan.run > 1 ? entries / kEntriesPerTeam : 0);
  const int64_t blocks = tiling.blocks_for(plan.piece_capacity * tiling.tiles_per_row);
  plan.piece_blocks = std::min(blocks, kFullDevice / kThreads + 1);
  plan.pieces = call.workspace<Piece>(plan.piece_capacity);
  plan.long_bags = call.workspace<LongBag>(plan.total_capacity);
  plan.found = call.workspace<unsigned long long>(4);
  if (bags <= kOneBlocksBags) {
    launch(call, {1, kOneBlocksThreads}, plan_kernel<Bags>, all, plan);
  } else {
    fill_bytes(call.stream(), plan.found, 0, 4 * sizeof(*plan.found));
    launch(call, one_thread_each(bags), plan_kernel<Bags>, all, plan);
  }
  return plan;
}

}  // namespace

int64_t bags_per_team(int64_t bags, int64_t entries, int64_t lanes) {
  int64_t run = 1;
  while (run < kEntriesPerTeam && run * entries < kEntriesPerTeam * bags && lanes / (2 * run) >= kFullDevice) run *= 2;
  return run;
}

PoolPlan plan_pool(DeviceCall& call, const int64_t* offsets, int64_t bags, int64_t entries, const RowTiling& tiling) {
  const int64_t run = bags_per_team(bags, entries, tiling.tiles << tiling.lanes_log2);
  return plan_bags(call, PlainBags{offsets, bags}, bags, entries, run, tiling, nullptr);
}

PoolPlan plan_parts(DeviceCall& call, const Parts& parts, const int64_t* offsets, int64_t entries, int64_t run,
                    const RowTiling& tiling, int64_t* slots) {
  const int64_t bags = tiling.tiles / tiling.tiles_per_row;
  return plan_bags(call, PartBags{offsets, parts}, bags, entries, run, tiling, slots);
}

// ---- Parts ----------------------------------------------------------------------------------------------------------

void deal_lanes(Part& part, int width, int wide) {
  const RowTiling tiling(1, part.columns, width), alone(1, part.columns, part.columns % wide == 0 ? wide : 1);
  part.lanes_log2 = tiling.lanes_log2;
  part.tiles_per_row = static_cast<int32_t>(tiling.tiles_per_row);
  part.merging_teams = static_cast<int32_t>(kThreads >> alone.lanes_log2);
}

void PartList::add(Part part) {
  deal_lanes(part, width_, wide_);
  bags_ += part.bags;
  lanes_ += part.bags * (int64_t{part.tiles_per_row} << part.lanes_log2);
  columns_ = std::max(columns_, part.columns);
  parts_.push_back(part);
}

Parts PartList::upload(DeviceCall& call, int64_t run) {
  const int64_t count = static_cast<int64_t>(parts_.size());
  constexpr int64_t words_per_part = sizeof(Part) / sizeof(int64_t);
  std::vector<int64_t> words(static_cast<size_t>((2 + words_per_part) * count + 2));
  int64_t* const first_blocks = words.data();
  int64_t* const first_bags = first_blocks + count + 1;
  for (int64_t p = 0; p < count; ++p) {
    const Part& part = parts_[static_cast<size_t>(p)];
    const int64_t tiles = (part.bags + run - 1) / run * part.tiles_per_row, teams = kPartThreads >> part.lanes_log2;
    first_blocks[p + 1] = first_blocks[p] + (tiles + teams - 1) / teams;
    first_bags[p + 1] = first_bags[p] + part.bags;
  }
  blocks_ = first_blocks[count];
  std::memcpy(first_bags + count + 1, parts_.data(), parts_.size() * sizeof(Part));
  const int64_t* const uploaded = tsr::upload(call, words);
  return {count, uploaded, uploaded + count + 1, reinterpret_cast<const Part*>(uploaded + 2 * (count + 1))};
}

}  // namespace tsr
