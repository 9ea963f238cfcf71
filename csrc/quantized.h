// quantized: lookups in tables of fewer bytes, for inference: rows are decoded as they are added up.
//
// quantized_embedding(weight, indices [...], bits) -> [..., D] float32: out[i] = row indices[i].
// quantized_embedding_bag(weight, indices [N], offsets [B + 1], per_sample_weights [N]?, bits, mode) -> [B, D] float32:
//   embedding_bag (embedding.h) of the decoded table, with its meaning of modes, padding, empty bags and offsets without
//   the last. first_bag and bags choose some of the bags that the offsets describe: these alone are read.
// A row of weight [V, bytes] is one of
//   bits 8,  uint8:                D numbers q, then float32 scale and bias: torch's embedding_bag_byte_prepack
//   bits 4,  uint8:                D / 2 bytes, the first q in the lower half, then float16 scale and bias: torch's
//                                  embedding_bag_4bit_prepack
//   bits 16, float16 or bfloat16:  D numbers
// and stands for scale * q + bias in float32, rounded after each of the two, or for the numbers themselves.
// * On the CPU a pooled result has the bits of embedding_bag of the decoded table: sums are taken in the same order.
// * indices and offsets are int32 or int64; per_sample_weights are float32.
// * Errors: IndexError for an index outside [0, V); ValueError for shapes, dtypes, offsets and NaN weights.
// * Not differentiable. Determinism and precision of sums: as in sparse_segment.h.
// Source: torch.ops.quantized.embedding_bag_byte_rowwise_offsets and embedding_bag_4bit_rowwise_offsets.
#pragma once
#include <type_traits>

#include "embedding.h"

namespace tsr {

// The formats of a row, beside Half and BFloat16.
struct Int8 {};
struct Int4 {};

// Whether a row ends with a scale and a bias.
template <class F>
constexpr bool kIsScaled = std::is_same_v<F, Int8> || std::is_same_v<F, Int4>;

// The bytes of a row of dim elements; without its scale and bias: where these begin.
template <class F>
TSR_HOST_DEVICE constexpr int64_t bytes_of_numbers(int64_t dim) {
  return std::is_same_v<F, Int8> ? dim : std::is_same_v<F, Int4> ? dim / 2 : 2 * dim;
}
template <class F>
TSR_HOST_DEVICE constexpr int64_t bytes_of_row(int64_t dim) {
  return bytes_of_numbers<F>(dim) + (std::is_same_v<F, Int8> ? 8 : std::is_same_v<F, Int4> ? 4 : 0);
}

// Calls f with the tag of the format of a table that check_quantized has passed.
template <class F>
decltype(auto) dispatch_rows(const Tensor& weight, int64_t bits, F&& f) {
  if (bits == 8) return f(type_tag<Int8>{});
  if (bits == 4) return f(type_tag<Int4>{});
  return weight.scalar_type() == ScalarType::Half ? f(type_tag<Half>{}) : f(type_tag<BFloat16>{});
}

// Returns the number of elements of a row.
inline int64_t check_quantized(const char* op, const Tensor& weight, int64_t bits) {
  TSR_CHECK_VALUE(bits == 4 || bits == 8 || bits == 16, op, ": bits must be 4, 8 or 16, got ", bits);
  TSR_CHECK_VALUE(weight.dim() == 2, op, ": weight must have rank 2, got shape ", shape_text(weight));
  const ScalarType dtype = weight.scalar_type();
  if (bits == 16) {
    TSR_CHECK_VALUE(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, op,
                    ": weight must be float16 or bfloat16 where bits is 16, got ", dtype_name(dtype));
    return weight.size(1);
  }
  const int64_t scales = bits == 8 ? 8 : 4;  // bytes
  TSR_CHECK_VALUE(dtype == ScalarType::Byte, op, ": weight must be uint8 where bits is ", bits, ", got ",
                  dtype_name(dtype));
  TSR_CHECK_VALUE(weight.size(1) >= scales, op, ": rows of weight must have at least ", scales, " bytes where bits is ",
                  bits, ", got shape ", shape_text(weight));
  return (weight.size(1) - scales) * (bits == 8 ? 1 : 2);
}

inline int64_t check_quantized_embedding(const Tensor& weight, const Tensor& indices, int64_t bits) {
  const char* op = "quantized_embedding";
  const int64_t dim = check_quantized(op, weight, bits);
  check_index_dtype(op, "indices", indices);
  check_same_device(op, "indices", indices, "weight", weight);
  return dim;
}

// The bags that a pooled lookup is asked for, of those that its offsets describe.
struct ChosenBags {
  Reduction reduction;
  int64_t dim;
  int64_t first;
  int64_t count;
};

inline ChosenBags check_quantized_embedding_bag(const Tensor& weight, const Tensor& indices, const Tensor& offsets,
                                                const std::optional<Tensor>& per_sample_weights, int64_t bits,
                                                int64_t mode, int64_t padding_idx, bool include_last_offset,
                                                int64_t first_bag, std::optional<int64_t> bags) {
  const char* op = "quantized_embedding_bag";
  const int64_t dim = check_quantized(op, weight, bits);
  check_bags(op, "weight", weight, indices, offsets, std::nullopt, include_last_offset);
  if (per_sample_weights) {
    const Tensor& x = *per_sample_weights;
    TSR_CHECK_VALUE(x.dim() == 1 && x.size(0) == indices.size(0) && x.scalar_type() == ScalarType::Float, op,
                    ": per_sample_weights must be float32 of shape [", indices.size(0), "], as indices, got ",
                    dtype_name(x.scalar_type()), " of shape ", shape_text(x));
    check_same_device(op, "per_sample_weights", x, "weight", weight);
  }
  check_bag_padding(op, padding_idx, weight.size(0));
  const Reduction reduction = check_reduction(op, mode, /*weighted=*/false);
  TSR_CHECK_VALUE(!(per_sample_weights && is_extreme(reduction)), op, ": per_sample_weights must be None in mode ",
                  extreme_word(reduction));
  const int64_t all = bag_count(offsets, include_last_offset);
  TSR_CHECK_VALUE(first_bag >= 0 && first_bag <= all, op, ": first_bag must be in [0, ", all, "], got ", first_bag);
  const int64_t count = bags.value_or(all - first_bag);
  TSR_CHECK_VALUE(count >= 0 && count <= all - first_bag, op, ": bags must be in [0, ", all - first_bag,
                  "], those from first_bag on, got ", count);
  return {reduction, dim, first_bag, count};
}

}  // namespace tsr
