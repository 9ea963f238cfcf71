// Checks that several families share: of ranks, dtypes, counts and rows, and the reductions of their schemas.
#pragma once
#include <sstream>

#include "abi.h"
#include "dispatch.h"

namespace tsr {

// The values of `reduction` (segments) and `mode` (embedding) in the schemas; torchsparse_rec/_reduction.py mirrors
// them.
enum class Reduction : int64_t { kSum = 0, kMean = 1, kSqrtN = 2, kMax = 3, kMin = 4, kProd = 5 };
// The last of those that bags take, and of those that take weights.
constexpr Reduction kLastOfBags = Reduction::kMin, kLastWeighted = Reduction::kSqrtN;

// Whether a sum is divided: by the number of its terms or their weights, or by a root.
constexpr bool is_divided(Reduction reduction) {
  return reduction == Reduction::kMean || reduction == Reduction::kSqrtN;
}

// Whether each element comes from one row alone, which the backward has to know.
constexpr bool is_extreme(Reduction reduction) { return reduction == Reduction::kMax || reduction == Reduction::kMin; }

// The word of a mode that is an extreme.
inline const char* extreme_word(Reduction reduction) { return reduction == Reduction::kMax ? "max" : "min"; }

inline Reduction check_reduction(const char* op, int64_t reduction, bool weighted) {
  const int64_t last = static_cast<int64_t>(weighted ? kLastWeighted : kLastOfBags);
  TSR_CHECK_VALUE(reduction >= 0 && reduction <= last, op, ": reduction must be in [0, ", last, "], got ", reduction);
  return static_cast<Reduction>(reduction);
}

// `argument` is a name, or anything else that prints as one: it is only read when there is something to say.
template <class Name>
void check_vector(const char* op, const Name& argument, const Tensor& x) {
  TSR_CHECK_VALUE(x.dim() == 1, op, ": ", argument, " must have rank 1, got shape ", shape_text(x));
}

inline void check_index_dtype(const char* op, const char* argument, const Tensor& x) {
  dispatch_index(x.scalar_type(), op, argument, [](auto) {});
}

inline void check_float_dtype(const char* op, const char* argument, const Tensor& x) {
  dispatch_float(x.scalar_type(), op, argument, [](auto) {});
}

// A number of rows, segments or bags that offsets, one more, are made of.
inline void check_count(const char* op, const char* argument, int64_t count) {
  TSR_CHECK_VALUE(count >= 0, op, ": ", argument, " must be >= 0, got ", count);
  TSR_CHECK_VALUE(count < INT64_MAX, op, ": ", argument, " must be below 2^63 - 1, got ", count);
}

// The number of segments where the last of sorted ids says it.
inline int64_t segments_up_to(const char* op, int64_t last_id, int64_t position) {
  TSR_CHECK_VALUE(last_id >= 0 && last_id < INT64_MAX - 1, op, ": segment_ids[", position,
                  "] must be in [0, 2^63 - 2), got ", last_id);
  return last_id + 1;
}

// What asks for as many segments: num_segments, or without it the last id.
inline Asked asked_segments(const char* op, bool given, int64_t segments) {
  return given ? Asked{op, "num_segments", segments} : Asked{op, "the last of segment_ids", segments - 1};
}

// Elements of memory from one row of x to the next.
inline int64_t row_stride(const Tensor& x) { return x.size(0) > 1 ? x.stride(0) : row_elements(x); }

inline std::string strides_text(const Tensor& x) {
  std::ostringstream text;
  for (int64_t d = 0; d < x.dim(); ++d) text << (d ? ", " : "[") << x.stride(d);
  return text.str() + "]";
}

// Whether each row is contiguous and apart from the others, whatever the distance between them.
inline bool has_whole_rows(const Tensor& x) {
  if (x.numel() == 0) return true;
  int64_t expected = 1;
  bool contiguous = true;
  for (int64_t d = x.dim() - 1; d > 0; --d) {
    contiguous = contiguous && (x.size(d) == 1 || x.stride(d) == expected);
    expected *= x.size(d);
  }
  return contiguous && row_stride(x) >= expected;
}

// A tensor that is written row by row. `argument` is a name, or anything else that prints as one.
template <class Name>
void check_written_rows(const char* op, const Name& argument, const Tensor& x) {
  TSR_CHECK_VALUE(has_whole_rows(x), op, ": ", argument,
                  " must have rows that are contiguous and do not overlap, as it is written in place, got strides ",
                  strides_text(x), " of shape ", shape_text(x));
}

}  // namespace tsr
