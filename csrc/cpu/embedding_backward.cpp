// Gradients of the lookups with respect to the table.
#include "../embedding.h"
#include "embedding_bags.h"
#include "gradient.h"

namespace tsr {
namespace {

constexpr const char* kBackwardOp = "embedding_backward";

// The bags of a backward as ItemMeaning wants them: each item's bag, and coefficients by item or by bag.
template <class T, class U>
struct BagTable {
  Buffer<U> bag_of_item;
  Buffer<acc_t<T>> by_item;
  Buffer<acc_t<T>> by_bag;

  template <class I>
  void fill(const Bags<T, I>& bags, Reduction reduction) {
    bag_of_item = Buffer<U>(bags.items());
    const bool by_items = bags.weighted(), by_bags = !by_items && is_divided(reduction);
    if (by_items) by_item = Buffer<acc_t<T>>(bags.items());
    if (by_bags) by_bag = Buffer<acc_t<T>>(bags.count());
    U* to = bag_of_item.data();
    const int64_t items_per_bag = bags.items() / std::max<int64_t>(bags.count(), 1) + 1;
    parallel_for(0, bags.count(), kItemGrain / items_per_bag + 1, [&, to](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        for (int64_t i = bags.offsets()[b]; i < bags.offsets()[b + 1]; ++i) to[i] = static_cast<U>(b);
        if (by_bags) by_bag[b] = bags.coefficient(b, reduction);
      }
      if (by_items) bags.coefficients(begin, end, reduction, by_item.data());
    });
  }
};

// Everything both gradients share. write(groups, meaning, T()) is called once, with the types chosen.
struct BackwardInputs {
  Tensor grad, indices;
  std::optional<Tensor> offsets, per_sample_weights, argmax;
  int64_t num_embeddings;
  Reduction reduction;
  int64_t padding_idx;
  bool scale_grad_by_freq, include_last_offset;

  int64_t dim() const { return grad.size(1); }

  template <class F>
  void with_groups(GradientRows written, const F& write) const {
    dispatch_float(grad.scalar_type(), kBackwardOp, "grad", [&](auto value_tag) {
      using T = typename decltype(value_tag)::type;
      dispatch_width(fits_32_bits(num_embeddings, indices.size(0), grad.size(0)),
                     [&](auto width_tag) { group<T, typename decltype(width_tag)::type>(written, write); });
    });
  }

 private:
  template <class T, class U, class F>
  void group(GradientRows written, const F& write) const {
    BagTable<T, U> table;
    ItemMeaning<T, U> meaning{grad.const_data_ptr<T>(), dim()};
    const U* payloads = nullptr;
    if (offsets) {
      dispatch_index(indices.scalar_type(), kBackwardOp, "indices", [&](auto tag) {
        using ItsBags = Bags<T, typename decltype(tag)::type>;
        const ItsBags bags(kBackwardOp, indices, *offsets, per_sample_weights, padding_idx, ItsBags::kBlockItems,
                           include_last_offset);
        table.fill(bags, reduction);
        if (bags.weighted()) meaning.item_weights = table.by_item.data();
      });
      if (is_divided(reduction)) {
        if (!per_sample_weights) meaning.segment_weights = table.by_bag.data();
      }
      if (is_extreme(reduction)) meaning.winners = argmax->const_data_ptr<int64_t>();
      // Positions are needed for weights and winners; else an item's bag says it all.
      const bool by_position = meaning.item_weights != nullptr || meaning.winners != nullptr;
      payloads = by_position ? nullptr : table.bag_of_item.data();
      meaning.segments = by_position ? table.bag_of_item.data() : nullptr;
    }
    meaning.scale_by_count = scale_grad_by_freq;
    const RowGroups<U> groups(kBackwardOp, indices, payloads, num_embeddings, padding_idx, dim(), written);
    write(groups, meaning, T());
  }
};

BackwardInputs checked_inputs(const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
                              const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
                              int64_t num_embeddings, int64_t mode, int64_t padding_idx, bool scale_grad_by_freq,
                              bool include_last_offset) {
  const Reduction reduction = check_embedding_backward(grad, indices, offsets, per_sample_weights, argmax,
                                                       num_embeddings, mode, padding_idx, include_last_offset);
  return {as_contiguous(grad),   as_contiguous(indices), offsets,   as_contiguous(per_sample_weights),
          as_contiguous(argmax), num_embeddings,         reduction, padding_idx,
          scale_grad_by_freq,    include_last_offset};
}

}  // namespace

Tensor embedding_dense_backward_cpu(const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
                                    const std::optional<Tensor>& per_sample_weights,
                                    const std::optional<Tensor>& argmax, int64_t num_embeddings, int64_t mode,
                                    int64_t padding_idx, bool scale_grad_by_freq, bool include_last_offset) {
  const BackwardInputs inputs = checked_inputs(grad, indices, offsets, per_sample_weights, argmax, num_embeddings, mode,
                                               padding_idx, scale_grad_by_freq, include_last_offset);
  const Tensor out = new_empty(grad, {num_embeddings, inputs.dim()}, grad.scalar_type(),
                               {kBackwardOp, "num_embeddings", num_embeddings});
  inputs.with_groups(GradientRows::kAll, [&](const auto& groups, const auto& meaning, auto element) {
    using T = decltype(element);
    const GradientOutput<T, int64_t> to{out.mutable_data_ptr<T>(), nullptr, num_embeddings};
    write_gradient(groups, meaning, to);
  });
  return out;
}

std::tuple<Tensor, Tensor> embedding_sparse_backward_cpu(const Tensor& grad, const Tensor& indices,
                                                         const std::optional<Tensor>& offsets,
                                                         const std::optional<Tensor>& per_sample_weights,
                                                         const std::optional<Tensor>& argmax, int64_t num_embeddings,
                                                         int64_t mode, int64_t padding_idx, bool scale_grad_by_freq,
                                                         bool include_last_offset) {
  const BackwardInputs inputs = checked_inputs(grad, indices, offsets, per_sample_weights, argmax, num_embeddings, mode,
                                               padding_idx, scale_grad_by_freq, include_last_offset);
  Tensor out, rows;
  inputs.with_groups(GradientRows::kPresent, [&](const auto& groups, const auto& meaning, auto element) {
    using T = decltype(element);
    out = new_empty(grad, {groups.groups(), inputs.dim()}, grad.scalar_type());
    rows = new_empty(grad, {groups.groups()}, ScalarType::Long);
    const GradientOutput<T, int64_t> to{out.mutable_data_ptr<T>(), rows.mutable_data_ptr<int64_t>(), groups.groups()};
    write_gradient(groups, meaning, to);
  });
  return {out, rows};
}

Tensor embedding_coo_backward_cpu(const Tensor& grad, const Tensor& indices, const std::optional<Tensor>& offsets,
                                  const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
                                  int64_t num_embeddings, int64_t mode, int64_t padding_idx, bool scale_grad_by_freq,
                                  bool include_last_offset) {
  const auto [values, rows] =
      embedding_sparse_backward_cpu(grad, indices, offsets, per_sample_weights, argmax, num_embeddings, mode,
                                    padding_idx, scale_grad_by_freq, include_last_offset);
  return coo_gradient("embedding_coo_backward", "num_embeddings", values, rows, num_embeddings);
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "embedding_dense_backward", &tsr::embedding_dense_backward_cpu);
  TSR_IMPL(m, "embedding_sparse_backward", &tsr::embedding_sparse_backward_cpu);
  TSR_IMPL(m, "embedding_coo_backward", &tsr::embedding_coo_backward_cpu);
}
