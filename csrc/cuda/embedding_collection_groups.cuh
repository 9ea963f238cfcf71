// The entries of many lookups grouped by table and row: the first half of every gradient with respect to the tables.
//
// An entry is an item as one lookup reads it. Entries are numbered lookup after lookup, so that a stable sort by
// (table, row), packed into one key, leaves a row's entries in the order of lookups, then of items.
#pragma once
#include "embedding_collection.cuh"
#include "pool_parts_kernels.cuh"
#include "pool_sum.cuh"
#include "row_groups.cuh"

namespace tsr {

struct CollectionGradient {
  const Collection& c;
  const Tensor& grad;
  const std::optional<Tensor>& per_sample_weights;
  const std::optional<Tensor>& argmax;
  const std::vector<bool>& wanted;
};

// The groups of the wanted tables, numbered as they come: table w has the keys [first_rows[w], first_rows[w + 1]).
struct CollectionGroups {
  std::vector<int64_t> tables;      // which they are
  std::vector<int64_t> first_rows;  // [wanted tables + 1]
  const int64_t* first_rows_there;  // on the device
  RowGroups groups;
  const void* grad;
  // By sorted entry: where in grad its bag's row begins, or -1; and what only some calls need, else null.
  Integers sources;
  const void* coefficients;  // in the accumulator's dtype
  const int64_t* winners;
  const int64_t* won_at;
  const int64_t* positions;
};

// In two steps: what the host knows of so many items; then their entries, with what else the caller has to upload,
// which is sent on the way.
CollectionGroups start_groups(DeviceCall& call, const CollectionGradient& in, int64_t items);
void group_entries(DeviceCall& call, const CollectionGradient& in, const CollectionInput& input,
                   CollectionGroups& groups, Uploads& uploads);

inline CollectionGroups group_collection(DeviceCall& call, const CollectionGradient& in, const CollectionInput& input) {
  CollectionGroups groups = start_groups(call, in, input.items);
  Uploads uploads;
  group_entries(call, in, input, groups, uploads);
  return groups;
}

// The first row of each group, among those of all tables. key(j): of sorted entry j.
template <class F>
struct GroupRows {
  const int64_t* starts;
  const F& key;
  __device__ int64_t operator[](int64_t group) const { return key(starts[group]); }
};

// The first group whose row is this one or a later one. The run after the last row is no group.
template <class F>
__device__ int64_t first_group(const RowRuns& runs, int64_t row, const F& key) {
  return lower_bound(GroupRows<F>{runs.starts, key}, *runs.count - 1, row);
}

// The first group of each wanted table, and the number of groups, on the device: [wanted tables + 1].
const int64_t* first_groups_of_tables(DeviceCall& call, const CollectionGroups& groups, const RowRuns& runs);

// The groups of table w as a part, all but its bags and its output.
Part part_of_groups(const CollectionGradient& in, const CollectionGroups& groups, size_t w);

// All but the offsets of the groups.
template <class T>
PartInputs<T> inputs_of_groups(const DeviceCall& call, const CollectionGroups& groups) {
  PartInputs<T> in;
  in.indices = groups.sources;
  in.coefficients = static_cast<const acc_t<T>*>(groups.coefficients);
  in.winners = groups.winners;
  in.won_at = groups.won_at;
  in.positions = groups.positions;
  in.report = false;  // sources are our own
  in.errors = call.errors();
  return in;
}

// What a row's entries add up to: rows of grad, each times its coefficient; of the entries of extremes only the
// columns that their position won.
template <class T, int width_>
struct GradientSum : Sum<T, width_> {
  using A = acc_t<T>;
  using Row = typename Sum<T, width_>::Entry;

  struct Entry : Row {
    A scale;

    template <class View>
    __device__ void load(const View& p, const RowTile& tile, bool has_columns, int64_t index, int64_t j) {
      Row::load(p, tile, has_columns, index, j);
      scale = p.in.coefficients != nullptr ? p.in.coefficients[j] : A(1);
      if (p.in.winners == nullptr || !has_columns) return;
      const int64_t won_at = p.in.won_at[j];
      if (won_at < 0) return;
#pragma unroll
      for (int c = 0; c < width_; ++c) {
        if (tile.column + c >= p.columns) break;
        if (p.in.winners[won_at + tile.column + c] != p.in.positions[j]) this->row.at[c] = T(0);
      }
    }
  };

  __device__ void add(const Entry& entry, int64_t) {
#pragma unroll
    for (int c = 0; c < width_; ++c) this->sums.add(c, entry.scale * static_cast<A>(entry.row.at[c]));
    this->count_entry();
  }
};

}  // namespace tsr
