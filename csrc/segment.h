// segment: reductions of whole tensors by segment, without indices, and their gradients.
//
// Forward, segment_reduce(data [N, ...], segment_ids [N] or offsets [S + 1], num_segments, reduction) -> [S, ...]:
//   out[s] = the reduction of the rows data[i] with segment_ids[i] == s (offsets[s] <= i < offsets[s + 1])
// * segment_ids must be sorted and >= 0; S = num_segments, or the last id + 1 when it is None (0 if N == 0): on CUDA
//   that is one read-back, refused while a graph is captured. Exactly one of segment_ids and offsets is given;
//   num_segments must be None with offsets, which must go from 0 to N without decreasing.
// * A segment without rows: 0 for sum, mean, sqrt_n, max and min, 1 for prod.
// unsorted_segment_reduce(data [I..., R...], segment_ids [I...], num_segments, reduction) -> [S, R...]:
// * segment_ids has any rank, 0 too, and a shape that data's begins with; ids in any order. Rows with a negative id are
//   left out. A segment without rows: 0 for sum, mean and sqrt_n, 1 for prod, and for max and min the number that
//   never wins: the lowest and the highest finite value of the dtype.
// Both:
// * dtypes: float16, bfloat16 (accumulated in float32, rounded once), float32, float64 and all integers, which wrap;
//   sqrt_n takes no integers. The mean of integers is the wrapped sum divided by the number of rows, which wraps
//   likewise, cut towards zero; 0 where that number wraps to 0. segment ids and offsets are int32 or int64.
// * max and min: a NaN wins over all.
// * Order: rows are taken in the order of i. On the CPU the first is taken as it is: a single -0.0 stays.
// * Errors: ValueError for unsorted or negative ids (segment_reduce), for ids >= num_segments, for offsets that are not
//   as above, and for wrong shapes and dtypes. Positions in segment_ids of rank > 1 count through them row by row.
//
// Gradient, (unsorted_)segment_reduce_backward(grad [S, ...], data, segment_ids or offsets, ...) -> as data:
//   sum: grad[s(i)]; mean: grad[s(i)] / n_s; sqrt_n: grad[s(i)] / sqrt(n_s), n_s = the number of rows of s
//   max, min: grad[s(i)] / k where data[i] is the extreme of s and k rows of s are equal to it, else 0: ties share.
//     Where the extreme is NaN nothing is equal to it.
//   prod: grad[s(i)] times the product of the others: with one zero in s only that row receives something, with two
//     none does. It is the product of all numbers but zeros, divided by the row's own: what overflows there is not
//     finite.
// * Rows with a negative id receive 0. Floating dtypes only. data may be None but for max, min and prod.
// * segment_reduce_backward takes the rows N of its result as rows, for data may be None.
//
// Determinism: every element of the result is computed by one thread in the order above: the same bits on every run,
// for every number of threads and every instruction set. On CUDA too the bits are the same on every run; there the rows
// of a segment are taken in pieces of 128, and then the pieces in their order. Precision of sums: as in sparse_segment.h.
// Source: tf.math.segment_{sum,mean,max,min,prod}, tf.math.unsorted_segment_{sum,mean,sqrt_n,max,min,prod}.
#pragma once
#include <limits>

#include "checks.h"

namespace tsr {

// ---- Checks ---------------------------------------------------------------------------------------------------------

inline bool is_float_dtype(ScalarType t) {
  return t == ScalarType::Float || t == ScalarType::Double || t == ScalarType::Half || t == ScalarType::BFloat16;
}

inline Reduction check_row_reduction(const char* op, int64_t reduction) {
  const int64_t last = static_cast<int64_t>(Reduction::kProd);
  TSR_CHECK_VALUE(reduction >= 0 && reduction <= last, op, ": reduction must be in [0, ", last, "], got ", reduction);
  return static_cast<Reduction>(reduction);
}

inline Reduction check_reduced_data(const char* op, const Tensor& data, int64_t reduction_) {
  const Reduction reduction = check_row_reduction(op, reduction_);
  if (is_float_dtype(data.scalar_type())) return reduction;
  dispatch_integer(data.scalar_type(), op, "data, if not floating,", [](auto) {});
  TSR_CHECK_VALUE(reduction != Reduction::kSqrtN, op, ": data must be floating for sqrt_n, got ",
                  dtype_name(data.scalar_type()));
  return reduction;
}

// segment_ids or offsets of `rows` rows.
inline void check_segments(const char* op, const std::optional<Tensor>& segment_ids,
                           const std::optional<Tensor>& offsets, int64_t rows, const char* like_name,
                           const Tensor& like) {
  TSR_CHECK_VALUE(segment_ids.has_value() != offsets.has_value(), op,
                  ": exactly one of segment_ids and offsets must be given, got ", segment_ids ? "both" : "neither");
  const char* name = segment_ids ? "segment_ids" : "offsets";
  const Tensor& given = segment_ids ? *segment_ids : *offsets;
  check_vector(op, name, given);
  check_index_dtype(op, name, given);
  check_same_device(op, name, given, like_name, like);
  TSR_CHECK_VALUE(!segment_ids || given.size(0) == rows, op, ": segment_ids must have one id for each of the ", rows,
                  " rows, got ", given.size(0));
  TSR_CHECK_VALUE(!offsets || given.size(0) >= 1, op, ": offsets must not be empty");
}

inline Reduction check_segment_reduce(const Tensor& data, const std::optional<Tensor>& segment_ids,
                                      const std::optional<Tensor>& offsets, std::optional<int64_t> num_segments,
                                      int64_t reduction) {
  const char* op = "segment_reduce";
  TSR_CHECK_VALUE(data.dim() >= 1, op, ": data must have rank >= 1, got a scalar");
  check_segments(op, segment_ids, offsets, data.size(0), "data", data);
  TSR_CHECK_VALUE(!num_segments || !offsets, op, ": num_segments must be None when offsets say it, got ",
                  *num_segments);
  if (num_segments) check_count(op, "num_segments", *num_segments);
  return check_reduced_data(op, data, reduction);
}

inline void check_prefix(const char* op, const char* name, const Tensor& values, const Tensor& segment_ids) {
  check_index_dtype(op, "segment_ids", segment_ids);
  check_same_device(op, "segment_ids", segment_ids, name, values);
  bool is_prefix = segment_ids.dim() <= values.dim();
  for (int64_t d = 0; is_prefix && d < segment_ids.dim(); ++d) is_prefix = segment_ids.size(d) == values.size(d);
  TSR_CHECK_VALUE(is_prefix, op, ": the shape of ", name, ", ", shape_text(values),
                  ", must begin with that of segment_ids, ", shape_text(segment_ids));
}

inline Reduction check_unsorted_segment_reduce(const Tensor& data, const Tensor& segment_ids, int64_t num_segments,
                                               int64_t reduction) {
  const char* op = "unsorted_segment_reduce";
  check_prefix(op, "data", data, segment_ids);
  check_count(op, "num_segments", num_segments);
  return check_reduced_data(op, data, reduction);
}

inline bool needs_data(Reduction reduction) { return is_extreme(reduction) || reduction == Reduction::kProd; }

// What both gradients share; `shape` is that of the result.
inline Reduction check_reduce_backward(const char* op, const Tensor& grad, const std::optional<Tensor>& data,
                                       const std::vector<int64_t>& shape, int64_t reduction_) {
  const Reduction reduction = check_row_reduction(op, reduction_);
  check_float_dtype(op, "grad", grad);
  TSR_CHECK_VALUE(data || !needs_data(reduction), op, ": data must be given for max, min and prod");
  if (!data || !needs_data(reduction)) return reduction;
  TSR_CHECK_VALUE(data->scalar_type() == grad.scalar_type(), op, ": data must have the dtype of grad, ",
                  dtype_name(grad.scalar_type()), ", got ", dtype_name(data->scalar_type()));
  check_same_device(op, "data", *data, "grad", grad);
  bool same = data->dim() == static_cast<int64_t>(shape.size());
  for (int64_t d = 0; same && d < data->dim(); ++d) same = data->size(d) == shape[static_cast<size_t>(d)];
  TSR_CHECK_VALUE(same, op, ": data must have the segment ids' shape followed by a row of grad's, got ",
                  shape_text(*data), " with grad ", shape_text(grad));
  return reduction;
}

inline Reduction check_segment_reduce_backward(const Tensor& grad, const std::optional<Tensor>& data,
                                               const std::optional<Tensor>& segment_ids,
                                               const std::optional<Tensor>& offsets, int64_t rows, int64_t reduction) {
  const char* op = "segment_reduce_backward";
  TSR_CHECK_VALUE(grad.dim() >= 1, op, ": grad must have rank >= 1, got a scalar");
  TSR_CHECK_VALUE(rows >= 0, op, ": rows must be >= 0, got ", rows);
  check_segments(op, segment_ids, offsets, rows, "grad", grad);
  TSR_CHECK_VALUE(!offsets || offsets->size(0) == grad.size(0) + 1, op,
                  ": offsets must have one more entry than grad has rows, ", grad.size(0), ", got ", offsets->size(0));
  return check_reduce_backward(op, grad, data, shape_with_rows(grad, rows), reduction);
}

// The shape of ids, then that of a row of grad.
inline std::vector<int64_t> shape_of_rows(const Tensor& segment_ids, const Tensor& grad) {
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < segment_ids.dim(); ++d) shape.push_back(segment_ids.size(d));
  for (int64_t d = 1; d < grad.dim(); ++d) shape.push_back(grad.size(d));
  return shape;
}

inline Reduction check_unsorted_segment_reduce_backward(const Tensor& grad, const std::optional<Tensor>& data,
                                                        const Tensor& segment_ids, int64_t reduction) {
  const char* op = "unsorted_segment_reduce_backward";
  TSR_CHECK_VALUE(grad.dim() >= 1, op, ": grad must have rank >= 1, got a scalar");
  check_index_dtype(op, "segment_ids", segment_ids);
  check_same_device(op, "segment_ids", segment_ids, "grad", grad);
  return check_reduce_backward(op, grad, data, shape_of_rows(segment_ids, grad), reduction);
}

// ---- Sizes ----------------------------------------------------------------------------------------------------------

// The rows that segment_ids, of data's first dimensions, tell apart, and the elements of each.
struct RowShape {
  int64_t rows = 1;
  int64_t elements = 1;

  RowShape(const Tensor& data, int64_t id_dimensions) {
    for (int64_t d = 0; d < data.dim(); ++d) (d < id_dimensions ? rows : elements) *= data.size(d);
  }
};

inline std::vector<int64_t> shape_of_segments(const Tensor& data, int64_t id_dimensions, int64_t segments) {
  std::vector<int64_t> shape{segments};
  for (int64_t d = id_dimensions; d < data.dim(); ++d) shape.push_back(data.size(d));
  return shape;
}

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

// Integers are handled as the unsigned type of their width: sums and products wrap.
template <class T>
using wrapping_t = std::conditional_t<
    sizeof(T) == 1, uint8_t,
    std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

template <class T>
constexpr bool is_integer_v = std::is_integral_v<T>;

// What makes a minimum, and a maximum of signed integers, a maximum of what the loops compare: floats are multiplied by
// it, unsigned integers take its exclusive or. Both undo themselves.
template <class T>
acc_t<T> order_of(Reduction reduction, bool is_signed) {
  if constexpr (is_integer_v<T>) {
    constexpr T kTop = static_cast<T>(T(1) << (8 * sizeof(T) - 1));
    return static_cast<T>((is_signed ? kTop : T(0)) ^ (reduction == Reduction::kMin ? static_cast<T>(~T(0)) : T(0)));
  } else {
    (void)is_signed;
    return reduction == Reduction::kMin ? acc_t<T>(-1) : acc_t<T>(1);
  }
}

template <class A>
TSR_HOST_DEVICE inline A ordered(A x, A order) {
  if constexpr (is_integer_v<A>) {
    return static_cast<A>(x ^ order);
  } else {
    return x * order;
  }
}

// The mean of integers: both wrap in T; quotients of signed ones are cut towards zero.
template <class T>
TSR_HOST_DEVICE inline T integer_mean(T sum, T count, bool is_signed) {
  if (count == T(0)) return T(0);
  if (!is_signed) return static_cast<T>(sum / count);
  constexpr T kTop = static_cast<T>(T(1) << (8 * sizeof(T) - 1));
  const bool negative_sum = (sum & kTop) != 0, negative_count = (count & kTop) != 0;
  const T size = negative_sum ? static_cast<T>(T(0) - sum) : sum;
  const T by = negative_count ? static_cast<T>(T(0) - count) : count;
  const T quotient = static_cast<T>(size / by);
  return negative_sum == negative_count ? quotient : static_cast<T>(T(0) - quotient);
}

inline bool is_signed_dtype(ScalarType t) {
  return t == ScalarType::Char || t == ScalarType::Short || t == ScalarType::Int || t == ScalarType::Long;
}

// The result of a segment without rows. T: floats, or the unsigned type of an integer's width.
template <class T>
T empty_segment(Reduction reduction, bool unsorted, bool is_signed) {
  if (reduction == Reduction::kProd) return static_cast<T>(1);
  if (!unsorted || !needs_data(reduction)) return static_cast<T>(0);
  if constexpr (is_integer_v<T>) {
    return ordered(T(0), order_of<T>(reduction, is_signed));
  } else {
    using Limits = std::numeric_limits<T>;
    return reduction == Reduction::kMax ? Limits::lowest() : Limits::max();
  }
}

// Calls f with the tag of the type that stands for the dtype: floats themselves, integers as unsigned ones.
template <class F>
decltype(auto) dispatch_reduced(ScalarType t, const char* op, F&& f) {
  if (is_float_dtype(t)) return dispatch_float(t, op, "data", f);
  return dispatch_integer(t, op, "data",
                          [&](auto tag) { return f(type_tag<wrapping_t<typename decltype(tag)::type>>{}); });
}

}  // namespace tsr
