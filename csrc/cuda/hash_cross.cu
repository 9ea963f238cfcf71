// CUDA door of cross_hashed: counts the crosses of every row, then writes each of them by its own thread.
#include "../cuda.h"
#include "../hash_cross.h"
#include "device.cuh"
#include "primitives.cuh"

namespace tsr {
namespace {

// A kernel's argument.
struct CrossColumns {
  CrossColumn at[kMostColumns];
  int count = 0;

  __device__ int64_t width(int c, int64_t row) const { return at[c].end(row) - at[c].begin(row); }
};

// The first bad offset is told by the row before it, or by the first row.
__device__ inline void report_bad_offset(const CrossColumn& column, int c, int64_t row, const ErrorSink& errors) {
  const int64_t begin = column.begin(row), end = column.end(row);
  if (begin >= 0 || row == 0) {
    const bool first = begin < 0;
    errors.report(Argument::kOffsets, Fault::kColumnOffsets, first ? row : row + 1, first ? begin : end, c);
  }
}

// One thread per row. Rows that cannot be counted are reported, and left empty.
__global__ void count_crosses_kernel(CrossColumns columns, int64_t rows, int64_t most, ErrorSink errors,
                                     int64_t* counts) {
  for (int64_t row = thread_index(); row < rows; row += thread_count()) {
    int64_t count = 1;
    bool valid = true;
    for (int c = 0; c < columns.count && valid; ++c) {
      valid = columns.at[c].is_valid(row);
      if (valid) {
        count = product_up_to(count, columns.width(c, row), most + 1);
      } else {
        report_bad_offset(columns.at[c], c, row, errors);
      }
    }
    if (valid && count > most) {
      errors.report(Argument::kValues, Fault::kTooManyCrosses, row, count, most);
      valid = false;
    }
    counts[row] = valid ? count : 0;
  }
}

// Where all columns are matrices, all rows have as many crosses.
__global__ void even_offsets_kernel(int64_t rows, int64_t per_row, int64_t* offsets) {
  for (int64_t row = thread_index(); row <= rows; row += thread_count()) offsets[row] = row * per_row;
}

// a / b for numbers >= 0; most fit in 32 bits, which takes the device a fraction of the time.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// One thread per cross: its number within its row says which value of each column it takes.
__global__ void cross_kernel(CrossColumns columns, const int64_t* offsets, int64_t rows, int64_t n, CrossHash start,
                             BucketRemainder bucket, int64_t* out) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    const int64_t row = lower_bound(offsets, rows + 1, i + 1) - 1;
    int64_t number = i - offsets[row], inner = offsets[row + 1] - offsets[row];
    CrossHash hash = start;
    for (int c = 0; c < columns.count; ++c) {
      inner = quotient(inner, columns.width(c, row));
      const int64_t place = quotient(number, inner);
      number -= place * inner;
      hash = hash.with(columns.at[c].values[columns.at[c].begin(row) + place]);
    }
    out[i] = bucket(hash.value);
  }
}

// Crosses of each row of matrices, or nothing if a column is jagged.
std::optional<int64_t> even_crosses(const CrossColumns& columns, int64_t most) {
  int64_t count = 1;
  for (int c = 0; c < columns.count; ++c) {
    if (columns.at[c].offsets != nullptr) return std::nullopt;
    count = product_up_to(count, columns.at[c].width, most + 1);
  }
  return count;
}

std::tuple<Tensor, Tensor> cross_hashed_cuda(const std::vector<Tensor>& values, const std::vector<Tensor>& offsets,
                                             int64_t num_buckets, std::optional<int64_t> hash_key) {
  const int64_t rows = check_cross_hashed(values, offsets, num_buckets), most = most_crosses(rows);
  DeviceCall call("cross_hashed", values[0]);
  CrossColumns columns;
  for (size_t c = 0; c < values.size(); ++c) {
    columns.at[columns.count++] =
        cross_column(values[c], offsets[c], [&](const Tensor& x) { return call.data<int64_t>(x); });
  }
  const Tensor bounds = call.empty({rows + 1}, ScalarType::Long);
  int64_t* const starts = static_cast<int64_t*>(bounds.data_ptr());
  int64_t count;
  if (const auto per_row = even_crosses(columns, most)) {
    TSR_CHECK_VALUE(rows == 0 || *per_row <= most, too_many_crosses(most, 0));
    count = rows * (rows == 0 ? 0 : *per_row);
    launch(call, one_thread_each(rows + 1), even_offsets_kernel, rows, rows == 0 ? 0 : *per_row, starts);
  } else {
    int64_t* const counts = call.workspace<int64_t>(rows + 1);
    launch(call, one_thread_each(rows), count_crosses_kernel, columns, rows, most, call.errors(), counts);
    sums_before(call, counts, rows, starts);
    count = call.read_back(starts + rows, "the number of crosses");
  }
  call.asks("the crosses of values", count);
  const Tensor out = call.empty({count}, ScalarType::Long);
  launch(call, one_thread_each(count), cross_kernel, columns, starts, rows, count, CrossHash(hash_key),
         cross_buckets(num_buckets), static_cast<int64_t*>(out.data_ptr()));
  return {out, bounds};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) { TSR_IMPL(m, "cross_hashed", &tsr::cross_hashed_cuda); }
