// From sparse ids to bags.
#include "../embedding_ids.h"

#include <numeric>

#include "row_starts.h"

namespace tsr {
namespace {

template <class F>
decltype(auto) with_column(const Tensor& ids, const char* op, const char* argument, const F& f) {
  return dispatch_index(ids.scalar_type(), op, argument, [&](auto tag) {
    using I = typename decltype(tag)::type;
    return f(Column<I>{ids.const_data_ptr<I>(), ids.size(0) > 0 ? ids.stride(0) : 1});
  });
}

// Writes the starts of bags, as start_rows does, for rows in any order; and the stable order of the items: order[k] is
// the item at place k.
template <class I>
void group_by_bag(Column<I> rows, int64_t n, int64_t num_bags, int64_t* starts, int64_t* order,
                  FirstPosition& first_bad) {
  std::fill_n(starts, num_bags + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = rows[i];
    if (row < 0 || row >= num_bags) return first_bad.report(i);
    ++starts[row + 1];
  }
  std::partial_sum(starts, starts + num_bags + 1, starts);
  std::vector<int64_t> places(starts, starts + num_bags);
  for (int64_t i = 0; i < n; ++i) order[places[static_cast<size_t>(rows[i])]++] = i;
}

int64_t element(const Tensor& ids, int64_t position) {
  return with_column(ids, "", "", [&](auto column) { return static_cast<int64_t>(column[position]); });
}

template <class I, Partition kStrategy>
void map_to_shards(const I* ids, int64_t n, const std::vector<int64_t>& sizes, bool keep_padding, I* out,
                   FirstPosition& first_bad) {
  const ShardMap map = shard_map(sizes);
  std::vector<int64_t> firsts(sizes.size(), 0);
  std::partial_sum(sizes.begin(), sizes.end() - 1, firsts.begin() + 1);
  const int64_t padding = keep_padding ? firsts.back() + sizes.back() : -1;
  parallel_for(0, n, kItemGrain, [&, ids, out, map, padding](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = static_cast<int64_t>(ids[i]);
      if (id < 0) return first_bad.report(i);
      if (id == padding) {
        out[i] = ids[i];
        continue;
      }
      int64_t shard, row;
      map.locate<kStrategy>(id, shard, row);
      if (shard >= map.shards || row >= sizes[static_cast<size_t>(shard)]) return first_bad.report(i);
      out[i] = static_cast<I>(firsts[static_cast<size_t>(shard)] + row);
    }
  });
}

// What stands in for the weights of entries that have none.
struct NoWeights {};

template <class I, class W>
struct PrunedBags {
  const I* ids;
  const W* weights;      // not read for NoWeights
  const int64_t* order;  // null: the entries are sorted by bag
  I left_out;
  bool prune_weights;
  std::optional<int64_t> default_id;
  I* indices_out;
  W* weights_out;
  int64_t* positions_out;  // null: not wanted

  bool counts(int64_t i) const {
    if constexpr (!std::is_same_v<W, NoWeights>) {
      // A NaN is not greater.
      if (prune_weights && !(static_cast<acc_t<W>>(weights[i]) > acc_t<W>(0))) return false;
    }
    return ids[i] >= 0;
  }

  // Entry i, at place `to`; returns whether it counts.
  bool write_entry(int64_t i, int64_t to, FirstPosition& first_bad) const {
    const bool kept = counts(i);
    if (kept && ids[i] >= left_out) first_bad.report(i);
    indices_out[to] = kept ? ids[i] : left_out;
    if constexpr (!std::is_same_v<W, NoWeights>) weights_out[to] = kept ? weights[i] : static_cast<W>(0.0f);
    if (positions_out != nullptr) positions_out[i] = to;
    return kept;
  }

  // Whether every entry keeps its place, so that bags do not matter.
  bool in_place() const { return order == nullptr && !default_id; }

  // Bag b of the entries [begin, end) in order.
  void write(int64_t b, int64_t begin, int64_t end, FirstPosition& first_bad) const {
    int64_t to = begin + (default_id ? b : 0);
    bool empty = true;
    for (int64_t k = begin; k < end; ++k, ++to) {
      empty &= !write_entry(order != nullptr ? order[k] : k, to, first_bad);
    }
    if (!default_id) return;
    indices_out[to] = empty ? static_cast<I>(*default_id) : left_out;
    if constexpr (!std::is_same_v<W, NoWeights>) weights_out[to] = static_cast<W>(empty ? 1.0f : 0.0f);
  }
};

template <class F>
void dispatch_weights(const char* op, const std::optional<Tensor>& weights, const F& f) {
  if (!weights) return f(type_tag<NoWeights>{});
  dispatch_float(weights->scalar_type(), op, "weights", f);
}

}  // namespace

Tensor shard_rows_cpu(const Tensor& ids_, const std::vector<int64_t>& shard_sizes, int64_t strategy,
                      bool keep_padding) {
  const char* op = "shard_rows";
  const Partition partition = check_shard_rows(ids_, shard_sizes, strategy);
  const Tensor ids = as_contiguous(ids_);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < ids.dim(); ++d) shape.push_back(ids.size(d));
  const Tensor out = new_empty(ids, shape, ids.scalar_type());
  FirstPosition first_bad;
  dispatch_index(ids.scalar_type(), op, "ids", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const auto map =
        partition == Partition::kMod ? map_to_shards<I, Partition::kMod> : map_to_shards<I, Partition::kDiv>;
    map(ids.const_data_ptr<I>(), ids.numel(), shard_sizes, keep_padding, out.mutable_data_ptr<I>(), first_bad);
  });
  TSR_CHECK_INDEX(!first_bad.found(), op, ": ids[", first_bad.position(), "] must name a row that its shard has, got ",
                  element(torch::stable::reshape(ids, {-1}), first_bad.position()));
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> pruned_bags_cpu(const Tensor& ids_, const Tensor& row_ids,
                                                           const std::optional<Tensor>& weights_, int64_t num_bags,
                                                           int64_t num_embeddings, bool prune_weights,
                                                           const std::optional<int64_t>& default_id,
                                                           bool with_positions) {
  const char* op = "pruned_bags";
  check_pruned_bags(ids_, row_ids, weights_, num_bags, num_embeddings, prune_weights, default_id);
  const Tensor ids = as_contiguous(ids_);
  const std::optional<Tensor> weights = as_contiguous(weights_);
  const Asked asked{op, "num_bags", num_bags};
  const Tensor offsets = new_empty(ids, {num_bags + 1}, ScalarType::Long, asked);
  const int64_t n = ids.size(0), extra = default_id ? 1 : 0, total = n + extra * num_bags;
  const Tensor indices = new_empty(ids, {total}, ids.scalar_type(), asked);
  const Tensor weights_out =
      weights ? new_empty(ids, {total}, weights->scalar_type(), asked) : new_empty(ids, {0}, ScalarType::Float);
  const Tensor positions = new_empty(ids, {with_positions ? n : 0}, ScalarType::Long);

  int64_t* starts = offsets.mutable_data_ptr<int64_t>();
  Buffer<int64_t> order;
  FirstPosition first_bad;
  with_column(row_ids, op, "row_ids", [&](auto rows) {
    FirstPosition unsorted;
    start_rows(rows, n, num_bags, starts, unsorted);
    if (!unsorted.found()) return;
    order = Buffer<int64_t>(n);
    group_by_bag(rows, n, num_bags, starts, order.data(), first_bad);
  });
  TSR_CHECK_INDEX(!first_bad.found(), op, ": row_ids[", first_bad.position(), "] must be in [0, ", num_bags, "), got ",
                  element(row_ids, first_bad.position()));

  dispatch_index(ids.scalar_type(), op, "ids", [&](auto index_tag) {
    using I = typename decltype(index_tag)::type;
    dispatch_weights(op, weights, [&](auto weight_tag) {
      using W = typename decltype(weight_tag)::type;
      PrunedBags<I, W> bags{ids.const_data_ptr<I>(),
                            nullptr,
                            order.data(),
                            static_cast<I>(num_embeddings),
                            prune_weights,
                            default_id,
                            indices.mutable_data_ptr<I>(),
                            nullptr,
                            with_positions ? positions.mutable_data_ptr<int64_t>() : nullptr};
      if constexpr (!std::is_same_v<W, NoWeights>) {
        bags.weights = weights->const_data_ptr<W>();
        bags.weights_out = weights_out.mutable_data_ptr<W>();
      }
      const int64_t tasks = workers_for(n + num_bags);
      const std::vector<int64_t> ranges = balanced_ranges(starts, num_bags, tasks);
      parallel_tasks(tasks, [&, bags, starts](int64_t task) {
        const int64_t first = ranges[static_cast<size_t>(task)], end = ranges[static_cast<size_t>(task + 1)];
        if (bags.in_place()) {  // one long loop in place of many short ones, whose ends mispredict
          for (int64_t i = starts[first]; i < starts[end]; ++i) bags.write_entry(i, i, first_bad);
          return;
        }
        for (int64_t b = first; b < end; ++b) bags.write(b, starts[b], starts[b + 1], first_bad);
      });
    });
  });
  if (first_bad.found()) throw_bad_index(op, "ids", ids, first_bad.position(), num_embeddings);
  if (default_id) {
    for (int64_t b = 0; b <= num_bags; ++b) starts[b] += b;
  }
  return {weights_out, indices, offsets, positions};
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "shard_rows", &tsr::shard_rows_cpu);
  TSR_IMPL(m, "pruned_bags", &tsr::pruned_bags_cpu);
}
