#include "embedding_bags.h"

#include <numeric>

#include "../embedding.h"

namespace tsr {

template <class T, class R>
BagScratch<T, R>::BagScratch(int64_t items, bool with_positions)
    : rows(items),
      weights(items),
      positions(with_positions ? items : 0),
      starts(Bags<T, int64_t>::kBlockBags + 1),
      divisors(Bags<T, int64_t>::kBlockBags) {}

void throw_bad_bags(const char* op, const Tensor& indices, int64_t num_embeddings, const FirstPosition& first_bad,
                    const FirstPosition& first_nan) {
  if (first_bad.found()) throw_bad_index(op, "indices", indices, first_bad.position(), num_embeddings);
  TSR_CHECK_VALUE(!first_nan.found(), op, ": per_sample_weights[", first_nan.position(), "] must be a number, got nan");
}

Buffer<int64_t> bag_starts(const char* op, const Tensor& indices, const std::optional<Tensor>& offsets,
                           bool include_last_offset) {
  if (offsets) return checked_offsets(op, *offsets, indices.size(0), include_last_offset);
  Buffer<int64_t> starts(indices.size(0) + 1);
  std::iota(starts.data(), starts.data() + indices.size(0) + 1, int64_t{0});
  return starts;
}

template <class T, class I>
Bags<T, I>::Bags(const char* op, const Tensor& indices, const std::optional<Tensor>& offsets,
                 const std::optional<Tensor>& per_sample_weights, int64_t padding_idx, int64_t block_items,
                 bool include_last_offset)
    : Bags(indices.const_data_ptr<I>(), per_sample_weights ? per_sample_weights->const_data_ptr<T>() : nullptr,
           padding_idx, bag_starts(op, indices, offsets, include_last_offset),
           offsets ? bag_count(*offsets, include_last_offset) : indices.size(0), block_items) {}

template <class T, class I>
Bags<T, I>::Bags(const I* indices, const T* weights, int64_t padding_idx, Buffer<int64_t> starts, int64_t count,
                 int64_t block_items)
    : Bags(indices, weights, padding_idx, starts.data(), count, block_items) {
  own_offsets_ = std::move(starts);
  scratch_items_ = std::min(block_items_, items());
  for (int64_t b = 0; b < count_; ++b) scratch_items_ = std::max(scratch_items_, offsets_[b + 1] - offsets_[b]);
}

template <class T, class I>
int64_t Bags<T, I>::block_end(int64_t b, int64_t end) const {
  const int64_t most = std::min(end, b + kBlockBags);
  int64_t next = b + 1;
  while (next < most && offsets_[next + 1] - offsets_[b] <= block_items_) ++next;
  return next;
}

template <class T, class I>
bool Bags<T, I>::check(int64_t b, int64_t end, int64_t num_embeddings, FirstPosition& first_bad,
                       FirstPosition& first_nan) const {
  report_bad_ids(indices_, offsets_[b], offsets_[end], index_bound(num_embeddings, padding_), first_bad);
  if (weights_ != nullptr) {
    for (int64_t i = offsets_[b]; i < offsets_[end]; ++i) {
      const A weight = static_cast<A>(weights_[i]);
      if (weight != weight) {
        first_nan.report(i);
        break;
      }
    }
  }
  return !first_bad.found() && !first_nan.found();
}

template <class T, class I>
bool Bags<T, I>::has_padding(int64_t b, int64_t end) const {
  if (padding_ < 0) return false;
  // Neither is negative: one less than their difference in bits is so only where they are equal.
  uint64_t signs = 0;
  for (int64_t i = offsets_[b]; i < offsets_[end]; ++i) {
    signs |= (static_cast<uint64_t>(indices_[i]) ^ static_cast<uint64_t>(padding_)) - 1;
  }
  return signs >> 63 != 0;
}

template <class T, class I>
typename Bags<T, I>::A Bags<T, I>::divisor(int64_t b, Reduction reduction, bool may_pad) const {
  if (!is_divided(reduction)) return A(1);
  if (weights_ == nullptr && !may_pad) {
    const A n = static_cast<A>(offsets_[b + 1] - offsets_[b]);
    return denominator(reduction, n, n);
  }
  double total = 0, total_squares = 0;
  for (int64_t begin = offsets_[b], end; begin < offsets_[b + 1]; begin = end) {
    end = sum_block_end<A>(begin, offsets_[b + 1]);
    A sum = 0, squares = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (is_padding(i)) continue;
      const A w = weight(i);
      sum += w;
      squares += w * w;
    }
    total += static_cast<double>(sum);
    total_squares += static_cast<double>(squares);
  }
  return denominator(reduction, static_cast<A>(total), static_cast<A>(total_squares));
}

template <class T, class I>
PoolArguments<T, typename Bags<T, I>::Row> Bags<T, I>::decode(int64_t b, int64_t end, Reduction reduction,
                                                              BagScratch<T, Row>& scratch) const {
  const bool divided = is_divided(reduction), extreme = is_extreme(reduction);
  const bool pads = has_padding(b, end);
  if (divided) {
    for (int64_t bag = b; bag < end; ++bag) scratch.divisors[bag - b] = divisor(bag, reduction, pads);
  }
  const A* divisors = divided ? scratch.divisors.data() : nullptr;
  const Row* rows = reinterpret_cast<const Row*>(indices_);
  if (!pads && !extreme && (weights_ == nullptr || std::is_same_v<T, A>)) {
    // The caller's own arrays serve as they are.
    return {nullptr,
            0,
            rows,
            reinterpret_cast<const A*>(weights_),
            offsets_ + b,
            divisors,
            end - b,
            nullptr,
            /*stream=*/false,
            /*stride=*/0,
            /*out_stride=*/0,
            /*fetch_end=*/offsets_[count_]};
  }
  int64_t kept = 0;
  for (int64_t bag = b; bag < end; ++bag) {
    scratch.starts[bag - b] = kept;
    for (int64_t i = offsets_[bag]; i < offsets_[bag + 1]; ++i) {
      if (is_padding(i)) continue;
      scratch.rows[kept] = rows[i];
      scratch.weights[kept] = weight(i);
      if (extreme) scratch.positions[kept] = i;
      ++kept;
    }
  }
  scratch.starts[end - b] = kept;
  return {nullptr,
          0,
          scratch.rows.data(),
          weights_ != nullptr ? scratch.weights.data() : nullptr,
          scratch.starts.data(),
          divisors,
          end - b,
          nullptr,
          /*stream=*/false};
}

template <class T, class I>
void Bags<T, I>::coefficients(int64_t b, int64_t end, Reduction reduction, A* by_item) const {
  for (int64_t bag = b; bag < end; ++bag) {
    const A by = divisor(bag, reduction);
    for (int64_t i = offsets_[bag]; i < offsets_[bag + 1]; ++i) by_item[i] = by == A(0) ? A(0) : weight(i) / by;
  }
}

template <class T, class I>
typename Bags<T, I>::A Bags<T, I>::coefficient(int64_t b, Reduction reduction) const {
  const A by = divisor(b, reduction);
  return by == A(0) ? A(0) : A(1) / by;
}

#define TSR_INSTANTIATE(T)                 \
  template struct BagScratch<T, uint32_t>; \
  template struct BagScratch<T, int64_t>;  \
  template class Bags<T, int32_t>;         \
  template class Bags<T, int64_t>;
TSR_INSTANTIATE(float)
TSR_INSTANTIATE(double)
TSR_INSTANTIATE(Half)
TSR_INSTANTIATE(BFloat16)
#undef TSR_INSTANTIATE

}  // namespace tsr
