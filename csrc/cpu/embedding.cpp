// Lookups; their gradients are in embedding_backward.cpp.
#include "../embedding.h"

#include <cstring>

#include "embedding_bags.h"
#include "row_loops.h"

namespace tsr {
namespace {

// Copies rows: bytes are all that matters, so there is one loop for all dtypes.
template <class I>
void copy_rows(const char* table, int64_t table_rows, int64_t row_bytes, const I* indices, int64_t n, char* out,
               FirstPosition& first_bad) {
  const int64_t grain = 4 * kWorkPerThread / std::max<int64_t>(row_bytes, 1) + 1;  // bytes of float32
  parallel_for(0, n, grain, [=, &first_bad](int64_t begin, int64_t end) {
    report_bad_ids(indices, begin, end, table_rows, first_bad);
    if (first_bad.found() || row_bytes == 0) return;  // without columns the table may be no memory at all
    const int64_t ahead = rows_ahead(row_bytes), fetched = std::min<int64_t>(row_bytes, 4096);
    for (int64_t i = begin; i < end; ++i) {
      if (i + ahead < end) {
        const char* row = table + static_cast<int64_t>(indices[i + ahead]) * row_bytes;
        for (int64_t b = 0; b < fetched; b += 64) __builtin_prefetch(row + b);
      }
      std::memcpy(out + i * row_bytes, table + static_cast<int64_t>(indices[i]) * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  });
}

template <class T, class I>
void pool_bags(const Tensor& weight, const Bags<T, I>& bags, Reduction reduction, T* out, int64_t* argmax,
               FirstPosition& first_bad, FirstPosition& first_nan) {
  using R = typename Bags<T, I>::Row;
  const int64_t dim = weight.size(1);
  const T* table = weight.const_data_ptr<T>();
  const RowLoops<T, R>& loops = row_loops<T, R>();
  for_each_block(bags, dim, weight.size(0), reduction, first_bad, first_nan,
                 [&](int64_t, int64_t b, PoolArguments<T, R> arguments, const BagScratch<T, R>& scratch) {
                   arguments.table = table;
                   arguments.out = out + b * dim;
                   if (is_extreme(reduction)) {
                     loops.pool_extremes[reduction](arguments, scratch.positions.data(), argmax + b * dim);
                   } else {
                     loops.pool(arguments);
                   }
                 });
}

}  // namespace

Tensor embedding_cpu(const Tensor& weight_, const Tensor& indices_, int64_t padding_idx, bool, bool) {
  check_embedding(weight_, indices_, padding_idx);
  const Tensor weight = as_contiguous(weight_), indices = as_contiguous(indices_);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < indices.dim(); ++d) shape.push_back(indices.size(d));
  shape.push_back(weight.size(1));
  const Tensor out = new_empty(weight, shape, weight.scalar_type());
  FirstPosition first_bad;
  dispatch_index(indices.scalar_type(), "embedding", "indices", [&](auto tag) {
    using I = typename decltype(tag)::type;
    copy_rows(static_cast<const char*>(weight.data_ptr()), weight.size(0),
              weight.size(1) * static_cast<int64_t>(weight.element_size()), indices.const_data_ptr<I>(),
              indices.numel(), static_cast<char*>(out.data_ptr()), first_bad);
  });
  if (first_bad.found()) throw_bad_index("embedding", "indices", indices, first_bad.position(), weight.size(0));
  return out;
}

std::tuple<Tensor, Tensor> embedding_bag_cpu(const Tensor& weight_, const Tensor& indices_, const Tensor& offsets,
                                             const std::optional<Tensor>& per_sample_weights_, int64_t mode,
                                             int64_t padding_idx, bool, bool, bool include_last_offset) {
  const char* op = "embedding_bag";
  const Reduction reduction =
      check_embedding_bag(weight_, indices_, offsets, per_sample_weights_, mode, padding_idx, include_last_offset);
  const Tensor weight = as_contiguous(weight_), indices = as_contiguous(indices_);
  const std::optional<Tensor> per_sample_weights = as_contiguous(per_sample_weights_);
  const int64_t count = bag_count(offsets, include_last_offset), dim = weight.size(1);
  const Tensor out = new_empty(weight, {count, dim}, weight.scalar_type());
  const Tensor argmax = new_empty(
      weight, is_extreme(reduction) ? std::vector<int64_t>{count, dim} : std::vector<int64_t>{0}, ScalarType::Long);
  FirstPosition first_bad, first_nan;
  dispatch_float(weight.scalar_type(), op, "weight", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    dispatch_index(indices.scalar_type(), op, "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const Bags<T, I> bags(op, indices, offsets, per_sample_weights, padding_idx, Bags<T, I>::kBlockItems,
                            include_last_offset);
      pool_bags<T, I>(weight, bags, reduction, out.mutable_data_ptr<T>(), argmax.mutable_data_ptr<int64_t>(), first_bad,
                      first_nan);
    });
  });
  throw_bad_bags(op, indices, weight.size(0), first_bad, first_nan);
  return {out, argmax};
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "embedding", &tsr::embedding_cpu);
  TSR_IMPL(m, "embedding_bag", &tsr::embedding_bag_cpu);
}
