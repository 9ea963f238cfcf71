// sparse_tensor: tensors of which only some elements are kept, and conversions between their forms.
//
// A sparse tensor of rank R is indices [N, R] (int64), values [N] and a shape of R sizes. Entries may come in any order
// and repeat. R is at most kMaxDimensions.
//
// sparse_reshape(indices [N, R], shape, new_shape) -> int64 [N, Q]: where each entry is in a tensor of shape new_shape
// with the same elements in row-major order. Entries keep their order. Indices are not checked: the result is the same
// arithmetic (modulo 2^64, division toward zero) for all of them; equal shapes change nothing.
// * Errors: ValueError for a negative size, for a shape of 2^63 elements or more, for shapes of different numbers of
//   elements, and for entries in a shape without elements.
//
// sparse_fill_empty_rows(indices [N, R], values [N], num_rows, default_value []) ->
//     (values [M], indices [M, R], empty_row_indicator bool [num_rows], reverse_index_map int64 [N]):
// gives every row (first index) without entries one entry, default_value at [row, 0, ...]. Entries are grouped by row,
// in increasing order of rows; those of one row keep their order and their columns, which are not checked.
// reverse_index_map[i] is where entry i went.
// * values: any dtype of 1, 2, 4, 8 or 16 bytes. R >= 1. Differentiable in values and default_value.
// * Errors: IndexError for a row outside [0, num_rows).
// * CPU memory beyond the outputs: none where the rows are sorted, else 8 bytes a row and thread, at most 32 an entry
//   or 8 a row.
//
// sparse_fill_empty_rows_grad(reverse_index_map [N], grad_values [M]) -> (d_values [N], d_default_value []):
// d_values[i] = grad_values[reverse_index_map[i]]; d_default_value = the sum of grad_values at the positions that are
// not in the map. Positions may repeat.
// * grad_values: float16, bfloat16 (summed in float32), float32, float64, or any integer dtype, which wraps.
// * Errors: IndexError for a position outside [0, M).
//
// sparse_reorder(indices [N, R]) -> (indices [N, R], permutation int64 [N]): the indices in lexicographic order, and
// where each came from. Stable. Indices are not checked: negative ones come first.
//
// sparse_to_dense(indices [N, R], shape, values [N], default_value [], validate) -> [*shape]: values at their indices,
// default_value elsewhere. Of several entries with one index the last counts; validate refuses them.
// * values: as sparse_fill_empty_rows. Differentiable in values (of which only those that count) and default_value.
// * Errors: IndexError for an index outside the shape; with validate also ValueError for indices that are not in
//   increasing lexicographic order. ValueError for a negative size or a shape of 2^63 elements or more.
//
// row_ids_to_offsets(row_ids [N], num_rows) -> int64 [num_rows + 1]: where each row begins, and where the last ends.
// * row_ids: int32 or int64, sorted, gaps allowed; read in place whatever their stride (a column of indices).
// * Errors: IndexError for an id outside [0, num_rows), ValueError for ids that decrease.
//
// offsets_to_row_ids(offsets [S + 1], num_items) -> int64 [num_items]: the row of each item.
// * offsets: int32 or int64, from 0 to num_items, never decreasing; else ValueError.
//
// All are deterministic: the same bits on every run and for every number of threads. On CUDA a bad index is recorded,
// and no memory outside the given tensors is touched; sparse_fill_empty_rows reads back how many rows are empty, so it
// raises at once.
// Source: tf.sparse.{reshape, fill_empty_rows, reorder, to_dense}, SparseFillEmptyRowsGrad.
#pragma once
#include "checks.h"
#include "hash.h"

namespace tsr {

constexpr int64_t kMaxDimensions = 64;

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

// n / divisor and its remainder by a multiplication: see BucketRemainder.
struct FastQuotient {
  uint64_t divisor;
  uint64_t reciprocal;

  // The quotient; n becomes the remainder.
  TSR_HOST_DEVICE uint64_t divide(uint64_t& n) const {
    uint64_t quotient = multiply_high(n, reciprocal);
    n -= quotient * divisor;
    if (n >= divisor) {
      n -= divisor;
      ++quotient;
    }
    return quotient;
  }
};

// The same element's index in another shape. Neither shape is without elements.
struct Reshape {
  int64_t from_rank;
  int64_t to_rank;
  uint64_t from_strides[kMaxDimensions];
  FastQuotient to_strides[kMaxDimensions];

  Reshape(const std::vector<int64_t>& from, const std::vector<int64_t>& to)
      : from_rank(static_cast<int64_t>(from.size())), to_rank(static_cast<int64_t>(to.size())) {
    uint64_t stride = 1;
    for (size_t d = from.size(); d-- > 0; stride *= static_cast<uint64_t>(from[d])) from_strides[d] = stride;
    stride = 1;
    for (size_t d = to.size(); d-- > 0; stride *= static_cast<uint64_t>(to[d])) {
      to_strides[d] = {stride, ~uint64_t{0} / stride};
    }
  }

  // Ranks known to the compiler, or 0, make the loops straight code.
  template <int kFrom, int kTo>
  TSR_HOST_DEVICE void move(const int64_t* from, int64_t* to) const {
    const int64_t from_size = kFrom ? kFrom : from_rank, to_size = kTo ? kTo : to_rank;
    uint64_t element = 0;
    for (int64_t d = 0; d < from_size; ++d) element += static_cast<uint64_t>(from[d]) * from_strides[d];
    const bool negative = element >> 63 != 0;
    uint64_t rest = negative ? 0 - element : element;
    for (int64_t d = 0; d < to_size; ++d) {
      const uint64_t index = d == to_size - 1 ? rest : to_strides[d].divide(rest);
      to[d] = static_cast<int64_t>(negative ? 0 - index : index);
    }
  }
};

// A dense tensor's elements in row-major order.
struct DenseShape {
  int64_t rank;
  int64_t sizes[kMaxDimensions];

  explicit DenseShape(const std::vector<int64_t>& shape) : rank(static_cast<int64_t>(shape.size())) {
    std::copy(shape.begin(), shape.end(), sizes);
  }

  // The element at an index, or -1 where it is outside; then `column` is the first dimension at fault.
  TSR_HOST_DEVICE int64_t element(const int64_t* index, int64_t& column) const {
    int64_t result = 0;
    for (int64_t d = 0; d < rank; ++d) {
      if (index[d] < 0 || index[d] >= sizes[d]) {
        column = d;
        return -1;
      }
      result = result * sizes[d] + index[d];
    }
    return result;
  }
};

// A column of a matrix, or a vector of any stride.
template <class T>
struct Column {
  const T* data;
  int64_t stride;
  TSR_HOST_DEVICE T operator[](int64_t i) const { return data[i * stride]; }
  TSR_HOST_DEVICE Column operator+(int64_t i) const { return {data + i * stride, stride}; }
};

// Values are moved as bits.
struct Bits128 {
  uint64_t low, high;
};

template <class F>
void dispatch_element(const char* op, const Tensor& x, const F& f) {
  switch (x.element_size()) {
    case 1:
      return f(type_tag<uint8_t>{});
    case 2:
      return f(type_tag<uint16_t>{});
    case 4:
      return f(type_tag<uint32_t>{});
    case 8:
      return f(type_tag<uint64_t>{});
    case 16:
      return f(type_tag<Bits128>{});
    default:
      throw std::invalid_argument(
          message(op, ": values must have elements of 1, 2, 4, 8 or 16 bytes, got ", dtype_name(x.scalar_type())));
  }
}

// What sums of a gradient are made in: integers wrap whatever their sign.
template <class T>
using sum_t = std::conditional_t<std::is_integral_v<T>, uint64_t, acc_t<T>>;

template <class F>
void dispatch_number(ScalarType t, const char* op, const char* argument, const F& f) {
  switch (t) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return dispatch_float(t, op, argument, f);
    default:
      return dispatch_integer(t, op, argument, f);
  }
}

// ---- Checks ---------------------------------------------------------------------------------------------------------

inline std::string sizes_text(const std::vector<int64_t>& sizes) {
  std::ostringstream text;
  for (size_t d = 0; d < sizes.size(); ++d) text << (d ? ", " : "[") << sizes[d];
  return sizes.empty() ? "[]" : text.str() + "]";
}

// The number of elements, which must fit an int64 at every step from the left.
inline int64_t check_sizes(const char* op, const char* argument, const std::vector<int64_t>& sizes) {
  TSR_CHECK_VALUE(static_cast<int64_t>(sizes.size()) <= kMaxDimensions, op, ": ", argument, " must have at most ",
                  kMaxDimensions, " dimensions, got ", sizes.size());
  int64_t elements = 1;
  for (const int64_t size : sizes) {
    TSR_CHECK_VALUE(size >= 0, op, ": ", argument, " must not be negative, got ", sizes_text(sizes));
    TSR_CHECK_VALUE(size == 0 || elements <= INT64_MAX / size, op, ": ", argument,
                    " must have fewer than 2^63 elements, got ", sizes_text(sizes));
    elements *= size;
  }
  return elements;
}

inline void check_matrix(const char* op, const Tensor& indices) {
  TSR_CHECK_VALUE(indices.dim() == 2, op, ": indices must have rank 2, got shape ", shape_text(indices));
  TSR_CHECK_VALUE(indices.scalar_type() == ScalarType::Long, op, ": indices must be int64, got ",
                  dtype_name(indices.scalar_type()));
}

inline void check_columns(const char* op, const Tensor& indices, const char* argument,
                          const std::vector<int64_t>& shape) {
  TSR_CHECK_VALUE(indices.size(1) == static_cast<int64_t>(shape.size()), op, ": indices must have a column for each ",
                  "dimension of ", argument, " ", sizes_text(shape), ", got shape ", shape_text(indices));
}

inline void check_entries(const char* op, const Tensor& indices, const Tensor& values, const Tensor& default_value) {
  check_matrix(op, indices);
  TSR_CHECK_VALUE(values.dim() == 1 && values.size(0) == indices.size(0), op, ": values must have shape [",
                  indices.size(0), "], one for each row of indices, got ", shape_text(values));
  TSR_CHECK_VALUE(default_value.dim() == 0, op, ": default_value must be a scalar, got shape ",
                  shape_text(default_value));
  TSR_CHECK_VALUE(default_value.scalar_type() == values.scalar_type(), op,
                  ": default_value must have the dtype of values, ", dtype_name(values.scalar_type()), ", got ",
                  dtype_name(default_value.scalar_type()));
  check_same_device(op, "values", values, "indices", indices);
  check_same_device(op, "default_value", default_value, "indices", indices);
  dispatch_element(op, values, [](auto) {});
}

inline void check_sparse_reshape(const Tensor& indices, const std::vector<int64_t>& shape,
                                 const std::vector<int64_t>& new_shape) {
  const char* op = "sparse_reshape";
  check_matrix(op, indices);
  check_columns(op, indices, "shape", shape);
  const int64_t elements = check_sizes(op, "shape", shape), wanted = check_sizes(op, "new_shape", new_shape);
  TSR_CHECK_VALUE(elements == wanted, op, ": new_shape must have the ", elements, " elements of shape ",
                  sizes_text(shape), ", got ", sizes_text(new_shape), " with ", wanted);
  TSR_CHECK_VALUE(elements > 0 || indices.size(0) == 0, op, ": shape must have elements where there are entries, got ",
                  sizes_text(shape), " for ", indices.size(0), " entries");
}

inline void check_sparse_fill_empty_rows(const Tensor& indices, const Tensor& values, int64_t num_rows,
                                         const Tensor& default_value) {
  const char* op = "sparse_fill_empty_rows";
  check_entries(op, indices, values, default_value);
  TSR_CHECK_VALUE(indices.size(1) >= 1, op, ": indices must have at least one column, got shape ", shape_text(indices));
  TSR_CHECK_VALUE(num_rows >= 0, op, ": num_rows must be >= 0, got ", num_rows);
}

inline void check_sparse_fill_empty_rows_grad(const Tensor& reverse_index_map, const Tensor& grad_values) {
  const char* op = "sparse_fill_empty_rows_grad";
  check_vector(op, "reverse_index_map", reverse_index_map);
  check_vector(op, "grad_values", grad_values);
  TSR_CHECK_VALUE(reverse_index_map.scalar_type() == ScalarType::Long, op, ": reverse_index_map must be int64, got ",
                  dtype_name(reverse_index_map.scalar_type()));
  check_same_device(op, "reverse_index_map", reverse_index_map, "grad_values", grad_values);
  dispatch_number(grad_values.scalar_type(), op, "grad_values", [](auto) {});
}

inline void check_sparse_reorder(const Tensor& indices) { check_matrix("sparse_reorder", indices); }

// Returns the number of elements.
inline int64_t check_sparse_to_dense(const Tensor& indices, const std::vector<int64_t>& shape, const Tensor& values,
                                     const Tensor& default_value) {
  const char* op = "sparse_to_dense";
  check_entries(op, indices, values, default_value);
  check_columns(op, indices, "shape", shape);
  return check_sizes(op, "shape", shape);
}

inline void check_row_ids_to_offsets(const Tensor& row_ids, int64_t num_rows) {
  const char* op = "row_ids_to_offsets";
  check_vector(op, "row_ids", row_ids);
  check_index_dtype(op, "row_ids", row_ids);
  TSR_CHECK_VALUE(num_rows >= 0 && num_rows < INT64_MAX, op, ": num_rows must be in [0, 2^63 - 1), got ", num_rows);
}

inline void check_offsets_to_row_ids(const Tensor& offsets, int64_t num_items) {
  const char* op = "offsets_to_row_ids";
  TSR_CHECK_VALUE(offsets.dim() == 1 && offsets.size(0) >= 1, op,
                  ": offsets must be a vector of at least one element, got shape ", shape_text(offsets));
  check_index_dtype(op, "offsets", offsets);
  TSR_CHECK_VALUE(num_items >= 0, op, ": num_items must be >= 0, got ", num_items);
}

}  // namespace tsr
