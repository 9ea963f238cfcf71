// Lookups in tables that are split or clipped, and the clip's part of their gradients.
#include "embedding_bags.h"
#include "table_rows.h"

namespace tsr {
namespace {

// Rows of a block that are read for their norms are to be still in the cache when they are pooled.
constexpr int64_t kClippedBytes = 256 << 10;

// One thread's arrays for one block, in the form the pool loop takes.
template <class T>
struct ShardScratch {
  ShardScratch(int64_t items) : offsets(items), weights(items), starts(Bags<T, int64_t>::kBlockBags + 1) {}
  Buffer<int64_t> offsets;
  Buffer<acc_t<T>> weights;
  Buffer<int64_t> starts;
};

// Where the rows of a decoded block begin, and their weights times what clips them.
template <class T, class R>
PoolArguments<T, int64_t> locate(const ShardRows<T>& rows, const PoolArguments<T, R>& block, ShardScratch<T>& scratch) {
  const int64_t first = block.starts[0], n = block.starts[block.bags] - first;
  for (int64_t b = 0; b <= block.bags; ++b) scratch.starts[b] = block.starts[b] - first;
  for (int64_t e = 0; e < n; ++e) scratch.offsets[e] = rows.offset(static_cast<int64_t>(block.rows[first + e]));
  const acc_t<T>* weights = block.weights != nullptr ? block.weights + first : nullptr;
  if (rows.clips()) {
    const int64_t row_bytes = rows.dim() * static_cast<int64_t>(sizeof(T)), ahead = rows_ahead(row_bytes);
    for (int64_t e = 0; e < n; ++e) {
      const char* later = reinterpret_cast<const char*>(rows.base() + scratch.offsets[std::min(e + ahead, n - 1)]);
      for (int64_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(later + b);
      const acc_t<T> scale = rows.scale(rows.base() + scratch.offsets[e]);
      scratch.weights[e] = weights != nullptr ? weights[e] * scale : scale;
    }
    weights = scratch.weights.data();
  }
  return {rows.base(), rows.dim(), scratch.offsets.data(), weights,     scratch.starts.data(), block.divisors,
          block.bags,  nullptr,    block.stream,           /*stride=*/1};
}

template <class T, class I>
void pool_shards(const ShardRows<T>& rows, const Bags<T, I>& bags, int64_t num_embeddings, Reduction reduction, T* out,
                 FirstPosition& first_bad, FirstPosition& first_nan) {
  using R = typename Bags<T, I>::Row;
  std::vector<ShardScratch<T>> scratch;
  const int64_t workers = pool_workers(bags, rows.dim());
  for (int64_t worker = 0; worker < workers; ++worker) scratch.emplace_back(bags.scratch_items());
  const RowLoops<T, int64_t>& loops = row_loops<T, int64_t>();
  for_each_block(bags, rows.dim(), num_embeddings, reduction, first_bad, first_nan,
                 [&](int64_t worker, int64_t b, const PoolArguments<T, R>& block, const BagScratch<T, R>&) {
                   PoolArguments<T, int64_t> arguments = locate(rows, block, scratch[static_cast<size_t>(worker)]);
                   arguments.out = out + b * rows.dim();
                   loops.pool(arguments);
                 });
}

// A row in the accumulator's dtype: itself, or widened into `memory`.
template <class T>
const acc_t<T>* widened(const T* row, int64_t dim, Buffer<acc_t<T>>& memory) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    return row;
  } else {
    for (int64_t d = 0; d < dim; ++d) memory[d] = static_cast<acc_t<T>>(row[d]);
    return memory.data();
  }
}

// The clip's Jacobian at row x, applied to g.
template <class T>
void clip_backward(const acc_t<T>* g, const acc_t<T>* x, int64_t dim, acc_t<T> max_norm, T* out) {
  using A = acc_t<T>;
  if (std::all_of(g, g + dim, [](A value) { return value == A(0); })) {
    std::fill_n(out, dim, static_cast<T>(0.0f));
    return;
  }
  const auto dot = dot_loop<A>().dot;
  const A squares = dot(x, x, dim);
  if (std::sqrt(squares) < max_norm) {
    for (int64_t d = 0; d < dim; ++d) out[d] = static_cast<T>(g[d]);
    return;
  }
  const A factor = max_norm / std::sqrt(squares), along = dot(x, g, dim) / squares;
  for (int64_t d = 0; d < dim; ++d) out[d] = static_cast<T>(factor * (g[d] - x[d] * along));
}

}  // namespace

Tensor embedding_bag_shards_cpu(const std::vector<Tensor>& params_, const Tensor& indices_,
                                const std::optional<Tensor>& offsets, const std::optional<Tensor>& per_sample_weights_,
                                int64_t mode, int64_t padding_idx, double max_norm, bool) {
  const char* op = "embedding_bag_shards";
  const auto [reduction_, num_embeddings_] =
      check_embedding_bag_shards(params_, indices_, offsets, per_sample_weights_, mode, padding_idx, max_norm);
  const Reduction reduction = reduction_;  // C++17 lambdas cannot capture structured bindings
  const int64_t num_embeddings = num_embeddings_;
  const std::vector<Tensor> params = as_contiguous(params_);
  const Tensor indices = as_contiguous(indices_);
  const std::optional<Tensor> per_sample_weights = as_contiguous(per_sample_weights_);
  const int64_t count = offsets ? offsets->size(0) - 1 : indices.size(0), dim = params[0].size(1);
  const Tensor out = new_empty(params[0], {count, dim}, params[0].scalar_type());
  FirstPosition first_bad, first_nan;
  dispatch_float(out.scalar_type(), op, "params", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    dispatch_index(indices.scalar_type(), op, "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      using B = Bags<T, I>;
      const int64_t row_bytes = std::max<int64_t>(dim * static_cast<int64_t>(sizeof(T)), 1);
      const int64_t block_items =
          max_norm >= 0 ? std::clamp<int64_t>(kClippedBytes / row_bytes, 1, B::kBlockItems) : B::kBlockItems;
      const B bags(op, indices, offsets, per_sample_weights, padding_idx, block_items);
      pool_shards<T, I>(ShardRows<T>(params, max_norm), bags, num_embeddings, reduction, out.mutable_data_ptr<T>(),
                        first_bad, first_nan);
    });
  });
  throw_bad_bags(op, indices, num_embeddings, first_bad, first_nan);
  return out;
}

Tensor clip_rows_backward_cpu(const Tensor& grad_, const std::vector<Tensor>& params_,
                              const std::optional<Tensor>& rows_, double max_norm) {
  const char* op = "clip_rows_backward";
  const int64_t table_rows = check_clip_rows_backward(grad_, params_, rows_, max_norm);
  const std::vector<Tensor> params = as_contiguous(params_);
  const Tensor grad = as_contiguous(grad_);
  const std::optional<Tensor> rows = as_contiguous(rows_);
  const int64_t count = grad.size(0), dim = grad.size(1);
  const Tensor out = new_empty(grad, {count, dim}, params[0].scalar_type());
  FirstPosition first_bad;
  dispatch_float(out.scalar_type(), op, "params", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const ShardRows<T> table(params, max_norm);
    const A* grads = grad.const_data_ptr<A>();
    const int64_t* wanted = rows ? rows->const_data_ptr<int64_t>() : nullptr;
    T* to = out.mutable_data_ptr<T>();
    const int64_t grain = kWorkPerThread / std::max<int64_t>(dim, 1) + 1;
    parallel_for(0, count, grain, [&, grads, wanted, to, dim, table_rows](int64_t begin, int64_t end) {
      if (wanted != nullptr) report_bad_ids(wanted, begin, end, table_rows, first_bad);
      if (first_bad.found()) return;
      Buffer<A> memory(dim);
      for (int64_t u = begin; u < end; ++u) {
        const A* x = widened(table.row(wanted != nullptr ? wanted[u] : u), dim, memory);
        clip_backward(grads + u * dim, x, dim, static_cast<A>(max_norm), to + u * dim);
      }
    });
  });
  if (first_bad.found()) throw_bad_index(op, "rows", *rows, first_bad.position(), table_rows);
  return out;
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "embedding_bag_shards", &tsr::embedding_bag_shards_cpu);
  TSR_IMPL(m, "clip_rows_backward", &tsr::clip_rows_backward_cpu);
}
