// From sparse ids to bags.
#include "../cuda.h"
#include "../embedding_ids.h"
#include "row_groups.cuh"
#include "table_shards.cuh"

namespace tsr {
namespace {

// ---- shard_rows -----------------------------------------------------------------------------------------------------

// One thread per id.
template <Partition kStrategy, class I>
__global__ void shard_rows_kernel(const I* ids, int64_t n, ShardMap map, const int64_t* sizes, const int64_t* firsts,
                                  int64_t total, bool keep_padding, ErrorSink errors, I* rows) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    const int64_t id = ids[i];
    int64_t shard = 0, row = 0;
    const bool is_left_out = keep_padding && id == total;
    if (id >= 0 && !is_left_out) map.locate<kStrategy>(id, shard, row);
    const bool is_row = id >= 0 && !is_left_out && shard < map.shards && row < sizes[shard];
    if (!is_row && !is_left_out) errors.report(Argument::kIds, Fault::kNoRow, i, id, 0);
    rows[i] = static_cast<I>(is_row ? firsts[shard] + row : total);
  }
}

Tensor shard_rows_cuda(const Tensor& ids, const std::vector<int64_t>& shard_sizes, int64_t strategy,
                       bool keep_padding) {
  const Partition partition = check_shard_rows(ids, shard_sizes, strategy);
  DeviceCall call("shard_rows", ids);
  const int64_t n = ids.numel(), shards = static_cast<int64_t>(shard_sizes.size());
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < ids.dim(); ++d) shape.push_back(ids.size(d));
  const Tensor out = call.empty(shape, ids.scalar_type());
  std::vector<int64_t> words(shard_sizes);
  int64_t total = 0;
  for (const int64_t size : shard_sizes) {
    words.push_back(total);
    total += size;
  }
  const int64_t* const sizes = upload(call, words);
  dispatch_index(ids.scalar_type(), call.op(), "ids", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const auto kernel =
        partition == Partition::kMod ? shard_rows_kernel<Partition::kMod, I> : shard_rows_kernel<Partition::kDiv, I>;
    launch(call, one_thread_each(n), kernel, call.data<I>(ids), n, shard_map(shard_sizes), sizes, sizes + shards, total,
           keep_padding, call.errors(), static_cast<I*>(out.data_ptr()));
  });
  return out;
}

// ---- pruned_bags ----------------------------------------------------------------------------------------------------

// What stands in for the weights of entries that have none.
struct NoWeights {};

template <class I, class W>
struct PrunedBags {
  const I* ids;
  const W* weights;  // not read for NoWeights
  int64_t entries;
  int64_t bags;
  int64_t num_embeddings;  // the index of entries that are left out
  bool prune_weights;
  bool has_default;
  int64_t default_id;
  const int64_t* starts;  // [bags + 1], among the sorted entries; those after the last have no bag
  ErrorSink errors;
  I* indices_out;
  W* weights_out;
  int64_t* offsets_out;
  int64_t* positions_out;  // null: not wanted

  __device__ bool counts(int64_t i) const {
    if constexpr (!std::is_same_v<W, NoWeights>) {
      // A NaN is not greater.
      if (prune_weights && !(static_cast<acc_t<W>>(weights[i]) > acc_t<W>(0))) return false;
    }
    return ids[i] >= 0;
  }
  __device__ void write(int64_t to, int64_t index, float weight) const {
    indices_out[to] = static_cast<I>(index);
    if constexpr (!std::is_same_v<W, NoWeights>) weights_out[to] = static_cast<W>(weight);
  }
};

// One thread per sorted entry: keys are bags, `bags` for entries with a bad row, which come last.
template <class I, class W>
__global__ void place_entries_kernel(PrunedBags<I, W> p, SortedPairs sorted) {
  for (int64_t k = thread_index(); k < p.entries; k += thread_count()) {
    const int64_t i = sorted.value(k), bag = sorted.key(k);
    const int64_t to = k + (p.has_default ? bag : 0);
    bool kept = bag < p.bags && p.counts(i);
    if (kept && p.ids[i] >= p.num_embeddings) {
      p.errors.report(Argument::kIds, Fault::kOutOfRange, i, p.ids[i], p.num_embeddings);
      kept = false;
    }
    p.write(to, kept ? static_cast<int64_t>(p.ids[i]) : p.num_embeddings, 0.0f);
    if constexpr (!std::is_same_v<W, NoWeights>) {
      if (kept) p.weights_out[to] = p.weights[i];
    }
    if (p.positions_out != nullptr) p.positions_out[i] = to;
  }
}

// One thread per bag: where it begins, and its default. All entries belong to the offsets, so that lookups take them;
// those without a bag are left out wherever they are.
template <class I, class W>
__global__ void finish_bags_kernel(PrunedBags<I, W> p) {
  for (int64_t b = thread_index(); b <= p.bags; b += thread_count()) {
    const int64_t begin = p.starts[b] + (p.has_default ? b : 0);
    p.offsets_out[b] = b < p.bags || p.bags == 0 ? begin : p.entries + (p.has_default ? b : 0);
    if (!p.has_default || b == p.bags) continue;
    const int64_t end = p.starts[b + 1] + b;
    int64_t to = begin;
    while (to < end && static_cast<int64_t>(p.indices_out[to]) == p.num_embeddings) ++to;
    const bool is_empty = to == end;
    p.write(end, is_empty ? p.default_id : p.num_embeddings, is_empty ? 1.0f : 0.0f);
  }
}

template <class F>
void dispatch_weights(const char* op, const std::optional<Tensor>& weights, const F& f) {
  if (!weights) return f(type_tag<NoWeights>{});
  dispatch_float(weights->scalar_type(), op, "weights", f);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> pruned_bags_cuda(const Tensor& ids, const Tensor& row_ids,
                                                            const std::optional<Tensor>& weights, int64_t num_bags,
                                                            int64_t num_embeddings, bool prune_weights,
                                                            const std::optional<int64_t>& default_id,
                                                            bool with_positions) {
  check_pruned_bags(ids, row_ids, weights, num_bags, num_embeddings, prune_weights, default_id);
  DeviceCall call("pruned_bags", ids);
  call.asks("num_bags", num_bags);
  const Tensor offsets = call.empty({num_bags + 1}, ScalarType::Long);
  const int64_t n = ids.size(0), total = n + (default_id ? num_bags : 0);
  const Tensor indices = call.empty({total}, ids.scalar_type());
  const Tensor weights_out = weights ? call.empty({total}, weights->scalar_type()) : call.empty({0}, ScalarType::Float);
  const Tensor positions = call.empty({with_positions ? n : 0}, ScalarType::Long);

  const Indices rows{row_ids.scalar_type(), call.data(row_ids), n, num_bags, -1, /*report=*/true, Argument::kRowIds};
  const RowGroups groups = group_by_row(call, rows, n, EntryItself());
  const int64_t* const starts = dense_offsets(call, groups);
  dispatch_index(ids.scalar_type(), call.op(), "ids", [&](auto index_tag) {
    using I = typename decltype(index_tag)::type;
    dispatch_weights(call.op(), weights, [&](auto weight_tag) {
      using W = typename decltype(weight_tag)::type;
      PrunedBags<I, W> bags{call.data<I>(ids),
                            nullptr,
                            n,
                            num_bags,
                            num_embeddings,
                            prune_weights,
                            default_id.has_value(),
                            default_id.value_or(0),
                            starts,
                            call.errors(),
                            static_cast<I*>(indices.data_ptr()),
                            nullptr,
                            static_cast<int64_t*>(offsets.data_ptr()),
                            with_positions ? static_cast<int64_t*>(positions.data_ptr()) : nullptr};
      if constexpr (!std::is_same_v<W, NoWeights>) {
        bags.weights = call.data<W>(*weights);
        bags.weights_out = static_cast<W*>(weights_out.data_ptr());
      }
      launch(call, one_thread_each(n), place_entries_kernel<I, W>, bags, groups.sorted());
      launch(call, one_thread_each(num_bags + 1), finish_bags_kernel<I, W>, bags);
    });
  });
  return {weights_out, indices, offsets, positions};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "shard_rows", &tsr::shard_rows_cuda);
  TSR_IMPL(m, "pruned_bags", &tsr::pruned_bags_cuda);
}
