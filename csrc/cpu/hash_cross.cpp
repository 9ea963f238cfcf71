// CPU door of cross_hashed: counts the crosses of every row, then writes them where those of the rows before it end.
#include "../hash_cross.h"

#include "hash_moves.h"
#include "level.h"

namespace tsr {
namespace {

#define TSR_ISA_BODY "hash_cross_loops.h"
#include "isa_foreach.h"

// Rows that are counted and written at a time.
constexpr int64_t kCrossBlock = 1024;

// Counts of rows [begin, end) of all columns into counts; the first row that cannot be counted, else end.
int64_t count_crosses(const std::vector<CrossColumn>& columns, int64_t begin, int64_t end, int64_t most,
                      int64_t* counts) {
  for (int64_t row = begin; row < end; ++row) {
    int64_t count = 1;
    for (const CrossColumn& column : columns) {
      if (!column.is_valid(row)) return row;
      count = product_up_to(count, column.end(row) - column.begin(row), most + 1);
    }
    if (count > most) return row;
    counts[row] = count;
  }
  return end;
}

[[noreturn]] void throw_bad_row(const std::vector<CrossColumn>& columns, int64_t row, int64_t most) {
  const char* op = "cross_hashed";
  for (size_t c = 0; c < columns.size(); ++c) {
    const CrossColumn& column = columns[c];
    if (column.is_valid(row)) continue;
    const bool first = column.begin(row) < 0;
    throw std::invalid_argument(message(op, ": offsets[", c, "]", kColumnOffsetsRule, ", got ",
                                        first ? column.begin(row) : column.end(row), " at position ",
                                        first ? row : row + 1));
  }
  throw std::invalid_argument(too_many_crosses(most, row));
}

// Writes the crosses of one row by the columns from `column` on, where those before it gave `hash`; returns where they
// end.
int64_t* write_crosses(const CrossColumn* column, const CrossColumn* last, int64_t row, const CrossHash& hash,
                       const BucketRemainder& bucket, int64_t* out) {
  const int64_t begin = column->begin(row), end = column->end(row);
  for (int64_t i = begin; i < end; ++i) {
    const CrossHash next = hash.with(column->values[i]);
    if (column == last) {
      *out++ = bucket(next.value);
    } else {
      out = write_crosses(column + 1, last, row, next, bucket, out);
    }
  }
  return out;
}

// Whether each of the rows [begin, end) has one cross: then every column has one value in each.
bool all_have_one(const int64_t* starts, int64_t begin, int64_t end) {
  bool others = false;
  for (int64_t row = begin; row < end; ++row) others |= starts[row + 1] - starts[row] != 1;
  return !others;
}

// counts[row] becomes the place of the row's first cross; the number of all.
int64_t counts_to_offsets(int64_t* counts, int64_t rows) {
  int64_t total = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t count = counts[row];
    counts[row] = total;
    total += count;
  }
  counts[rows] = total;
  return total;
}

}  // namespace

std::tuple<Tensor, Tensor> cross_hashed_cpu(const std::vector<Tensor>& values, const std::vector<Tensor>& offsets,
                                            int64_t num_buckets, std::optional<int64_t> hash_key) {
  const int64_t rows = check_cross_hashed(values, offsets, num_buckets), most = most_crosses(rows);
  std::vector<Tensor> kept;
  std::vector<CrossColumn> columns;
  for (size_t c = 0; c < values.size(); ++c) {
    columns.push_back(cross_column(values[c], offsets[c], [&](const Tensor& x) {
      kept.push_back(as_contiguous(x));
      return kept.back().const_data_ptr<int64_t>();
    }));
  }
  Tensor bounds = new_empty(values[0], {rows + 1}, ScalarType::Long);
  int64_t* const starts = bounds.mutable_data_ptr<int64_t>();
  FirstPosition first_bad;
  parallel_for(0, rows, kCrossBlock, [&](int64_t begin, int64_t end) {
    const int64_t counted = count_crosses(columns, begin, end, most, starts);
    if (counted < end) first_bad.report(counted);
  });
  if (first_bad.found()) throw_bad_row(columns, first_bad.position(), most);
  const int64_t crosses_in_all = counts_to_offsets(starts, rows);
  Tensor out = new_empty(values[0], {crosses_in_all}, ScalarType::Long,
                         {"cross_hashed", "the crosses of values", crosses_in_all});
  int64_t* const crosses = out.mutable_data_ptr<int64_t>();
  const BucketRemainder bucket = cross_buckets(num_buckets);
  const CrossColumn* const first = columns.data();
  const CrossColumn* const last = first + (columns.size() - 1);
  using Loop =
      void (*)(const std::vector<CrossColumn>&, const CrossHash&, const BucketRemainder&, int64_t, int64_t, int64_t*);
  const Loop cross_rows = pick_level<Loop>(&baseline::cross_rows, &avx2::cross_rows, &avx512::cross_rows);
  const CrossHash start(hash_key);
  // Rows of few or no crosses next to rows of many: threads take what is left.
  const int64_t blocks = (rows + kCrossBlock - 1) / kCrossBlock;
  parallel_dynamic(blocks, workers_for(starts[rows] + rows), [&](int64_t, int64_t block) {
    const int64_t begin = block * kCrossBlock, end = std::min(begin + kCrossBlock, rows);
    if (all_have_one(starts, begin, end)) {
      return cross_rows(columns, start, bucket, begin, end - begin, crosses + starts[begin]);
    }
    for (int64_t row = begin; row < end; ++row) {
      if (starts[row] != starts[row + 1]) write_crosses(first, last, row, start, bucket, crosses + starts[row]);
    }
  });
  return {out, bounds};
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) { TSR_IMPL(m, "cross_hashed", &tsr::cross_hashed_cpu); }
