#include "pool_parts.cuh"

#include <cstring>

#include "table_shards.cuh"

namespace tsr {

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
