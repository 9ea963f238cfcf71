#include "pool_plan.cuh"

namespace tsr {
namespace {

__device__ int64_t reserve(unsigned long long* found, int64_t n) {
  return static_cast<int64_t>(atomicAdd(found, static_cast<unsigned long long>(n)));
}

// Where pieces are in the list depends on the order of threads; what they are does not.
__device__ void cut(const PoolPlan& plan, int64_t bag, int64_t begin, int64_t end) {
  const int64_t count = (end - begin + kPiece - 1) / kPiece;
  const int64_t first = reserve(&plan.found[0], count);
  const int64_t first_total = count > 1 ? reserve(&plan.found[2], count) : 0;
  if (first + count > plan.piece_capacity || (count > 1 && first_total + count > plan.total_capacity)) {
    plan.found[3] = 1;
    return;
  }
  for (int64_t k = 0; k < count; ++k) {
    const int64_t from = begin + k * kPiece;
    plan.pieces[first + k] = {from, from + kPiece < end ? from + kPiece : end, count > 1 ? -1 : bag, first_total + k};
  }
  if (count > 1) plan.long_bags[reserve(&plan.found[1], 1)] = {bag, first_total, count};
}

// One thread per bag.
__global__ void plan_kernel(const int64_t* offsets, int64_t bags, PoolPlan plan) {
  for (int64_t bag = thread_index(); bag < bags; bag += thread_count()) {
    const int64_t begin = offsets[bag], end = offsets[bag + 1];
    if (end - begin <= kEntriesPerTeam) continue;
    const int64_t first = bag / plan.run * plan.run;
    const int64_t last = first + plan.run < bags ? first + plan.run : bags;
    if (!plan.is_one_teams(offsets, first, last)) cut(plan, bag, begin, end);
  }
}

int64_t bags_per_team(int64_t bags, int64_t entries, const RowTiling& tiling) {
  int64_t run = 1;
  while (run < kEntriesPerTeam && run * entries < kEntriesPerTeam * bags &&
         (tiling.tiles << tiling.lanes_log2) / (2 * run) >= kFullDevice) {
    run *= 2;
  }
  return run;
}

}  // namespace

PoolPlan plan_pool(DeviceCall& call, const int64_t* offsets, int64_t bags, int64_t entries, const RowTiling& tiling) {
  PoolPlan plan;
  plan.run = bags_per_team(bags, entries, tiling);
  if (entries <= kPiece || bags == 0) return plan;
  // A long bag of n entries has at most 2 n / kPiece pieces; other pieces have more than kEntriesPerTeam entries each.
  plan.total_capacity = 2 * entries / kPiece;
  plan.piece_capacity = plan.total_capacity + (plan.run > 1 ? entries / kEntriesPerTeam : 0);
  plan.pieces = call.workspace<Piece>(plan.piece_capacity);
  plan.long_bags = call.workspace<LongBag>(plan.total_capacity);
  plan.found = call.workspace<unsigned long long>(4);
  fill_bytes(call.stream(), plan.found, 0, 4 * sizeof(*plan.found));
  launch(call, one_thread_each(bags), plan_kernel, offsets, bags, plan);
  return plan;
}

}  // namespace tsr
