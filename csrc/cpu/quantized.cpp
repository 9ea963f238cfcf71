#include "../quantized.h"

#include "embedding_bags.h"
#include "quantized_loops.h"

namespace tsr {
namespace {

const uint8_t* bytes_of(const Tensor& weight) { return static_cast<const uint8_t*>(weight.data_ptr()); }

// The loop for rows of a half type, whose sums are not rounded.
template <class F, class R>
void pool_halves(const PoolArguments<float, R>& a, const uint8_t* table) {
  if constexpr (!kIsScaled<F>) {
    PoolArguments<F, R> halves{reinterpret_cast<const F*>(table),
                               a.dim,
                               a.rows,
                               a.weights,
                               a.starts,
                               a.divisors,
                               a.bags,
                               nullptr,
                               /*stream=*/false};
    halves.fetch_end = a.fetch_end;
    halves.wide = a.out;
    row_loops<F, R>().pool(halves);
  }
}

// The offsets of the chosen bags, checked: [count + 1].
Buffer<int64_t> chosen_offsets(const char* op, const Tensor& offsets, int64_t items, bool include_last_offset,
                               const ChosenBags& chosen) {
  if (chosen.first == 0 && chosen.count == bag_count(offsets, include_last_offset)) {
    return checked_offsets(op, offsets, items, include_last_offset);
  }
  const Tensor given = as_contiguous(offsets);
  Buffer<int64_t> starts(chosen.count + 1);
  dispatch_index(given.scalar_type(), op, "offsets", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const I* from = given.const_data_ptr<I>();
    int64_t before = 0;
    for (int64_t b = 0; b <= chosen.count; ++b) {
      const int64_t position = chosen.first + b;
      const int64_t start = position < given.size(0) ? static_cast<int64_t>(from[position]) : items;
      TSR_CHECK_VALUE(position > 0 || start == 0, op, ": offsets[0] must be 0, got ", start);
      TSR_CHECK_VALUE(start >= before, op, ": offsets must not decrease, got ", before, " followed by ", start,
                      " at position ", position);
      TSR_CHECK_VALUE(start <= items, op, ": offsets[", position, "] must be at most the number of indices, ", items,
                      ", got ", start);
      TSR_CHECK_VALUE(position < bag_count(given, include_last_offset) || start == items, op, ": offsets[", position,
                      "], the last, must be the number of indices, ", items, ", got ", start);
      starts[b] = before = start;
    }
  });
  return starts;
}

}  // namespace

Tensor quantized_embedding_cpu(const Tensor& weight_, const Tensor& indices_, int64_t bits) {
  const char* op = "quantized_embedding";
  const int64_t dim = check_quantized_embedding(weight_, indices_, bits);
  const Tensor weight = as_contiguous(weight_), indices = as_contiguous(indices_);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < indices.dim(); ++d) shape.push_back(indices.size(d));
  shape.push_back(dim);
  const Tensor out = new_empty(weight, shape, ScalarType::Float);
  FirstPosition first_bad;
  dispatch_rows(weight, bits, [&](auto format) {
    using F = typename decltype(format)::type;
    dispatch_index(indices.scalar_type(), op, "indices", [&](auto tag) {
      using I = typename decltype(tag)::type;
      using R = typename Bags<float, I>::Row;
      const I* ids = indices.const_data_ptr<I>();
      const auto& loops = quantized_loops<F, R>();
      parallel_for(0, indices.numel(), kWorkPerThread / std::max<int64_t>(dim, 1) + 1, [&](int64_t begin, int64_t end) {
        report_bad_ids(ids, begin, end, weight.size(0), first_bad);
        if (first_bad.found() || dim == 0) return;
        loops.gather(bytes_of(weight), dim, reinterpret_cast<const R*>(ids), begin, end, out.mutable_data_ptr<float>());
      });
    });
  });
  if (first_bad.found()) throw_bad_index(op, "indices", indices, first_bad.position(), weight.size(0));
  return out;
}

Tensor quantized_embedding_bag_cpu(const Tensor& weight_, const Tensor& indices_, const Tensor& offsets,
                                   const std::optional<Tensor>& per_sample_weights_, int64_t bits, int64_t mode,
                                   int64_t padding_idx, bool include_last_offset, int64_t first_bag,
                                   std::optional<int64_t> bags) {
  const char* op = "quantized_embedding_bag";
  const ChosenBags chosen = check_quantized_embedding_bag(weight_, indices_, offsets, per_sample_weights_, bits, mode,
                                                          padding_idx, include_last_offset, first_bag, bags);
  const Tensor weight = as_contiguous(weight_), indices = as_contiguous(indices_);
  const std::optional<Tensor> weights = as_contiguous(per_sample_weights_);
  const int64_t dim = chosen.dim;
  const Tensor out = new_empty(weight, {chosen.count, dim}, ScalarType::Float);
  Buffer<int64_t> starts = chosen_offsets(op, offsets, indices.size(0), include_last_offset, chosen);
  FirstPosition first_bad, first_nan;
  dispatch_rows(weight, bits, [&](auto format) {
    using F = typename decltype(format)::type;
    dispatch_index(indices.scalar_type(), op, "indices", [&](auto tag) {
      using I = typename decltype(tag)::type;
      using R = typename Bags<float, I>::Row;
      const Bags<float, I> pooled(indices.const_data_ptr<I>(), weights ? weights->const_data_ptr<float>() : nullptr,
                                  padding_idx, std::move(starts), chosen.count);
      const auto& loops = quantized_loops<F, R>();
      const auto pool = is_extreme(chosen.reduction) ? loops.pool_extremes[chosen.reduction]
                        : loops.pool != nullptr      ? loops.pool
                                                     : pool_halves<F, R>;
      for_each_block(pooled, dim, weight.size(0), chosen.reduction, first_bad, first_nan,
                     [&](int64_t, int64_t b, PoolArguments<float, R> arguments, const BagScratch<float, R>&) {
                       arguments.out = out.mutable_data_ptr<float>() + b * dim;
                       pool(arguments, bytes_of(weight));
                     });
    });
  });
  throw_bad_bags(op, indices, weight.size(0), first_bad, first_nan);
  return out;
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "quantized_embedding", &tsr::quantized_embedding_cpu);
  TSR_IMPL(m, "quantized_embedding_bag", &tsr::quantized_embedding_bag_cpu);
}
