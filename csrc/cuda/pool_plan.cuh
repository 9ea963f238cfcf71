// Which team pools what.
//
// A team of lanes pools one bag, or where bags are short a run of neighbouring ones, so that it has enough reads in
// flight. A popular row of a gradient may own a tenth of all entries: a bag of more than kPiece entries is cut into
// pieces of kPiece, which many teams add up side by side; then one block per bag merges the pieces' totals in their
// order. Where the cuts are depends on the bag alone, so that the bits do not depend on the device. Nor must a team be
// held up by one of its run, as popular rows are often neighbours: where a run has more than kPiece entries, each of
// its longer bags is a piece of its own.
#pragma once
#include "../cuda.h"
#include "device.cuh"
#include "pool_parts.cuh"

namespace tsr {

constexpr int64_t kPiece = 128;
// What a run of bags has on average, and the longest bag that stays in a run that has too much.
constexpr int64_t kEntriesPerTeam = 16;

struct Piece {
  int64_t begin;
  int64_t end;
  int64_t bag;    // the bag that it is all of, or -1
  int64_t total;  // else where its total goes
  int64_t part = 0;
};

struct LongBag {
  int64_t bag;
  int64_t first_total;
  int64_t pieces;
  int64_t part = 0;
};

// Written on the device, read by the kernels that follow.
struct PoolPlan {
  int64_t run = 1;           // bags per team
  int64_t piece_blocks = 0;  // blocks for pieces, ahead of those for bags
  int64_t piece_capacity = 0;
  int64_t total_capacity = 0;
  Piece* pieces = nullptr;       // [piece_capacity]
  LongBag* long_bags = nullptr;  // [total_capacity]
  int64_t* slots = nullptr;      // null, or by bag, those of all parts: which of long_bags it is, if it is one
  // [4], or null where there can be no pieces: the numbers of pieces, long bags and totals, and whether there was room
  // for all. There always is unless offsets decrease (reported before): then longer bags stay zero.
  unsigned long long* found = nullptr;

  __device__ bool failed() const { return found != nullptr && found[3] != 0; }
  __device__ int64_t piece_count() const { return found == nullptr || failed() ? 0 : static_cast<int64_t>(found[0]); }
  __device__ int64_t long_bag_count() const {
    return found == nullptr || failed() ? 0 : static_cast<int64_t>(found[1]);
  }
  // Whether one team takes all of the run [first, last).
  __device__ static bool is_one_teams(const int64_t* offsets, int64_t first, int64_t last) {
    return offsets[last] - offsets[first] <= kPiece;
  }
};

// The plan for bags of `entries` entries in all; tiling is that of one bag per team.
PoolPlan plan_pool(DeviceCall& call, const int64_t* offsets, int64_t bags, int64_t entries, const RowTiling& tiling);

// The plan for the bags of many parts, which are numbered within their part; no run spans two parts. tiling: one bag
// per team in the widest part, for as many bags as there may be; entries: at most that many.
PoolPlan plan_parts(DeviceCall& call, const Parts& parts, const int64_t* offsets, int64_t entries, int64_t run,
                    const RowTiling& tiling, int64_t* slots = nullptr);

// The bags that a team takes, where they are short and teams have enough to do.
int64_t bags_per_team(int64_t bags, int64_t entries, int64_t lanes);

}  // namespace tsr
