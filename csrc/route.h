// route: which rank has the row of each id, where a table's rows are split over ranks.
//
// A table of V rows lies in S blocks, S a power of two: row v is in block reverse(v % S), which turns the log2(S) bits
// of a number round, at place v / S. Of W ranks each has ceil(S / W) consecutive blocks, the last ones fewer or none; a
// rank that has b of them, from block s on, keeps row v as its row (v / S) * b + block - s. So S = 1 is a table that
// rank 0 has as it is. Ids that are sorted by frequency fall evenly on any number of ranks, and a rank's rows are a box
// of [ceil(V / S), S], which torch's DTensor knows as Shard(1).
//
// route(ids [N], starts [T + 1], sizes [T], blocks [T], ranks, distinct)
//   -> (rows [U], counts [ranks, T], places [N]):
//   ids[starts[t] : starts[t + 1]] are of table t, which has sizes[t] rows in blocks[t] blocks. rows, int32, are those of
//   rank 0 (of table 0, of table 1, ...), then those of rank 1, ..., as their ranks keep them; counts, int64 and on the
//   CPU whatever the device, says how many. With distinct an id of a table is one row, however often it occurs, and a
//   rank's rows of a table are in the order of first appearance; else each id is a row, in the order of ids.
//   rows[places[i]] is the row of ids[i]; places are int64.
// route_keys(keys [N], starts [T + 1], ranks, distinct)
//   -> (keys [U], occurrences [U], counts [ranks, T], places [N]):
//   the same of tables that grow: 4096 blocks, a key's the low 12 bits of mix(key), the finalizer of SplitMix64 of the
//   key as an int64. The rank gets the key itself, in its dtype, and how often it occurs (without distinct: 1), int32.
// * ids, keys: int32 or int64, fewer than 2^31. blocks: powers of two in [1, 4096]. sizes: in [0, 2^31).
// * No ids or no tables: empty results. Nothing is differentiable.
// * Errors: IndexError for the first id outside [0, sizes[t]); ValueError for starts, sizes, blocks, ranks.
// * Deterministic: the result is a function of the arguments alone.
// * CUDA: counts, and whether an id is bad, are read back in one copy, after which nothing waits.
// * CPU memory beyond the outputs: 8 bytes an id and ranks * T * 16 bytes; with distinct, for each thread, 4 bytes a row
//   of the largest table that has not more than 4 rows for each id of the call, and a hash table of at most 16 bytes an
//   id of the largest other one. Time is linear in N; ids made to collide in a hash table cost a sort.
// Source: this library's design of tables over several ranks; mix: Steele, Lea, Flood, "Fast splittable pseudorandom
// number generators" (2014).
#pragma once
#include <vector>

#include "checks.h"

namespace tsr {

constexpr int kMostBlocksLog2 = 12;

TSR_HOST_DEVICE inline uint64_t mix_route(uint64_t key) {
  key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9;
  key = (key ^ key >> 27) * 0x94d049bb133111eb;
  return key ^ key >> 31;
}

template <class Id>
TSR_HOST_DEVICE inline int32_t block_of_key(Id key) {
  return static_cast<int32_t>(mix_route(static_cast<uint64_t>(static_cast<int64_t>(key))) &
                              ((1u << kMostBlocksLog2) - 1));
}

// The lowest `log2` bits turned round, log2 <= 16; the others count for nothing.
TSR_HOST_DEVICE inline int32_t reversed_bits(uint32_t number, int log2) {
  number = (number & 0x5555) << 1 | (number >> 1 & 0x5555);
  number = (number & 0x3333) << 2 | (number >> 2 & 0x3333);
  number = (number & 0x0f0f) << 4 | (number >> 4 & 0x0f0f);
  number = (number & 0x00ff) << 8 | (number >> 8 & 0x00ff);
  return static_cast<int32_t>(number >> (16 - log2));
}

// The blocks of a table over ranks.
struct BlockSplit {
  int32_t blocks;
  int32_t each;  // of a rank, but for the last ones

  BlockSplit(int64_t blocks_, int64_t ranks)
      : blocks(static_cast<int32_t>(blocks_)), each(static_cast<int32_t>((blocks_ - 1) / ranks + 1)) {}
  // Ranks up to this one have blocks.
  int32_t last_rank() const { return (blocks - 1) / each; }
  TSR_HOST_DEVICE int32_t count_of(int32_t rank) const {
    const int32_t left = blocks - rank * each;
    return left < each ? left : each;
  }
};

inline void check_route_ids(const char* op, const char* argument, const Tensor& ids, const std::vector<int64_t>& starts,
                            int64_t ranks) {
  check_vector(op, argument, ids);
  check_index_dtype(op, argument, ids);
  const int64_t n = ids.numel();
  TSR_CHECK_VALUE(n <= INT32_MAX, op, ": ", argument, " must be fewer than 2^31, got ", n);
  TSR_CHECK_VALUE(ranks >= 1 && ranks <= INT32_MAX, op, ": ranks must be in [1, 2^31), got ", ranks);
  TSR_CHECK_VALUE(!starts.empty(), op, ": starts must have an entry more than there are tables, got none");
  TSR_CHECK_VALUE(starts.front() == 0, op, ": starts[0] must be 0, got ", starts.front());
  for (size_t t = 1; t < starts.size(); ++t) {
    TSR_CHECK_VALUE(starts[t] >= starts[t - 1], op, ": starts must not decrease, got ", starts[t - 1], " followed by ",
                    starts[t], " at position ", t);
  }
  TSR_CHECK_VALUE(starts.back() == n, op, ": starts[", starts.size() - 1, "], the last, must be the number of ",
                  argument, ", ", n, ", got ", starts.back());
  TSR_CHECK_VALUE(starts.size() == 1 || ranks <= INT32_MAX / static_cast<int64_t>(starts.size() - 1), op,
                  ": ranks times tables must be below 2^31, got ", ranks, " ranks and ", starts.size() - 1, " tables");
}

inline void check_route(const Tensor& ids, const std::vector<int64_t>& starts, const std::vector<int64_t>& sizes,
                        const std::vector<int64_t>& blocks, int64_t ranks) {
  const char* op = "route";
  check_route_ids(op, "ids", ids, starts, ranks);
  const size_t tables = starts.size() - 1;
  TSR_CHECK_VALUE(sizes.size() == tables, op, ": sizes must have an entry for each of the ", tables, " tables, got ",
                  sizes.size());
  TSR_CHECK_VALUE(blocks.size() == tables, op, ": blocks must have an entry for each of the ", tables, " tables, got ",
                  blocks.size());
  for (size_t t = 0; t < tables; ++t) {
    TSR_CHECK_VALUE(sizes[t] >= 0 && sizes[t] <= INT32_MAX, op, ": sizes[", t, "] must be in [0, 2^31), got ",
                    sizes[t]);
    const int64_t count = blocks[t];
    TSR_CHECK_VALUE(count >= 1 && count <= 1 << kMostBlocksLog2 && (count & (count - 1)) == 0, op, ": blocks[", t,
                    "] must be a power of two in [1, 4096], got ", count);
  }
}

inline int log2_of_blocks(int64_t blocks) {
  int log2 = 0;
  while (int64_t{1} << log2 < blocks) ++log2;
  return log2;
}

[[noreturn]] inline void throw_bad_routed_id(int64_t position, int64_t id, const std::vector<int64_t>& starts,
                                             const std::vector<int64_t>& sizes) {
  const auto table = std::upper_bound(starts.begin(), starts.end(), position) - starts.begin() - 1;
  throw std::out_of_range(message("route: ids[", position, "] must be in [0, ", sizes[static_cast<size_t>(table)],
                                  "), as of table ", table, ", got ", id));
}

}  // namespace tsr
