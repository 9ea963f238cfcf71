// sparse_fill_empty_rows and its gradient.
//
// Where the rows are sorted, one pass over them checks them and counts how many there are, and one pass writes
// everything: an entry goes after all before it and after one more for each empty row before its own. Other entries
// are counted by row, and then each goes to the next place of its row.
#include <utility>

#include "../sparse_tensor.h"
#include "row_groups.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tsr {
namespace {

constexpr const char* kFillOp = "sparse_fill_empty_rows";
constexpr const char* kGradOp = "sparse_fill_empty_rows_grad";

// ---- Rows -----------------------------------------------------------------------------------------------------------

// Entries taken at a time: what a pass has read of them is still in the first-level cache when they are read again.
constexpr int64_t kBlockEntries = 128;

// Reports the first of the rows [begin, end) outside [0, num_rows), if any; returns whether there was none.
bool check_rows(Column<int64_t> rows, int64_t begin, int64_t end, int64_t num_rows, FirstPosition& first_bad) {
  const uint64_t last = static_cast<uint64_t>(num_rows) - 1;
  uint64_t outside = 0;  // signs add up without branches
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t row = static_cast<uint64_t>(rows[i]);
    outside |= row | (last - row);
  }
  if (outside >> 63 == 0) return true;
  while (rows[begin] >= 0 && rows[begin] < num_rows) ++begin;
  first_bad.report(begin);
  return false;
}

void throw_bad_row(Column<int64_t> rows, int64_t num_rows, const FirstPosition& first_bad) {
  const int64_t bad = first_bad.position();
  throw std::out_of_range(message(kFillOp, ": indices[", bad, ", 0] must be in [0, ", num_rows, "), got ", rows[bad]));
}

struct SortedRows {
  bool sorted;
  // Where sorted: how many rows have entries, and consecutive parts of the entries with the rows that end in them.
  int64_t distinct;
  std::vector<Slice> slices;
};

// Where a part of the entries begins.
int64_t part_begin(int64_t entries, int64_t parts, int64_t part) {
  return part == parts ? entries : entries / parts * part;
}

// Throws IndexError for the first row outside [0, num_rows), but leaves some of that to count_rows where the rows are
// found not to be sorted, which ends the scan.
SortedRows scan_rows(Column<int64_t> rows, int64_t entries, int64_t num_rows) {
  const int64_t parts = workers_for(2 * entries);
  std::vector<Slice> slices(static_cast<size_t>(parts));
  std::atomic<bool> sorted{true};
  FirstPosition first_bad;
  parallel_tasks(parts, [&, rows, entries, parts](int64_t part) {
    const int64_t begin = part_begin(entries, parts, part), end = part_begin(entries, parts, part + 1);
    int64_t before = begin == 0 ? -1 : rows[begin - 1], distinct = 0;
    for (int64_t block = begin; block < end && sorted.load(std::memory_order_relaxed); block += kBlockEntries) {
      const int64_t block_end = std::min(block + kBlockEntries, end);
      if (!check_rows(rows, block, block_end, num_rows, first_bad)) return;
      uint64_t decreasing = 0;
      for (int64_t i = block; i < block_end; ++i) {
        const int64_t row = rows[i];
        decreasing |= static_cast<uint64_t>(row) - static_cast<uint64_t>(before);
        distinct += row != before;
        before = row;
      }
      if (decreasing >> 63 != 0) sorted = false;
    }
    slices[static_cast<size_t>(part)] = {begin, end, distinct, 0, begin == 0 ? 0 : rows[begin - 1] + 1, 0};
  });
  if (!sorted) {
    // Rows that are not sorted are checked as they are counted, but for when there are so many of them that memory for
    // the counters, or for the results by row, may not be had.
    if (num_rows / 4 > entries && !check_rows(rows, 0, entries, num_rows, first_bad)) {
      throw_bad_row(rows, num_rows, first_bad);
    }
    return {false, 0, {}};
  }
  if (first_bad.found()) throw_bad_row(rows, num_rows, first_bad);
  int64_t distinct = 0;
  for (size_t part = 0; part < slices.size(); ++part) {
    slices[part].first_group = distinct;
    distinct += slices[part].groups;
    slices[part].end_row = part + 1 < slices.size() ? slices[part + 1].first_row : num_rows;
  }
  return {true, distinct, std::move(slices)};
}

// Entries in any order: how many each row has in each of some consecutive parts of the entries.
struct RowCounts {
  int64_t parts;
  int64_t distinct;
  Buffer<int64_t> counts;  // [parts, num_rows]
};

// Throws IndexError for the first row outside [0, num_rows).
RowCounts count_rows(Column<int64_t> rows, int64_t entries, int64_t num_rows) {
  // No more counters than a few per entry, but for those of one part.
  const int64_t most = std::max<int64_t>(1, 4 * entries / std::max<int64_t>(num_rows, 1));
  const int64_t parts = std::min(workers_for(8 * entries), most);
  RowCounts result{parts, 0, Buffer<int64_t>(parts * num_rows, {kFillOp, "num_rows", num_rows})};
  int64_t* counts = result.counts.data();
  FirstPosition first_bad;
  parallel_tasks(parts, [&, rows, entries, num_rows, parts, counts](int64_t part) {
    int64_t* mine = counts + part * num_rows;
    std::fill(mine, mine + num_rows, 0);
    const int64_t end = part_begin(entries, parts, part + 1);
    for (int64_t block = part_begin(entries, parts, part); block < end; block += kBlockEntries) {
      const int64_t block_end = std::min(block + kBlockEntries, end);
      if (!check_rows(rows, block, block_end, num_rows, first_bad)) return;
      for (int64_t i = block; i < block_end; ++i) ++mine[rows[i]];
    }
  });
  if (first_bad.found()) throw_bad_row(rows, num_rows, first_bad);
  for (int64_t row = 0; row < num_rows; ++row) {
    bool present = false;
    for (int64_t part = 0; part < parts; ++part) present |= counts[part * num_rows + row] != 0;
    result.distinct += present;
  }
  return result;
}

// ---- Filling --------------------------------------------------------------------------------------------------------

// How results are stored: plainly, or past the caches where they are larger than these.
struct Plain {
  template <class T>
  void operator()(T* to, T value) const {
    *to = value;
  }
  void finish() const {}
};
struct Streaming {
  template <class T>
  void operator()(T* to, T value) const {
#if defined(__SSE2__)
    if constexpr (sizeof(T) == 8) {
      return _mm_stream_si64(reinterpret_cast<long long*>(to), static_cast<long long>(value));
    } else if constexpr (sizeof(T) == 4) {
      return _mm_stream_si32(reinterpret_cast<int*>(to), static_cast<int>(value));
    }
#endif
    *to = value;
  }
  void finish() const {
#if defined(__SSE2__)
    _mm_sfence();
#endif
  }
};

template <class T>
struct Entries {
  int64_t rank;
  const int64_t* indices;
  const T* values;
  T default_value;
  int64_t* out_indices;
  T* out_values;
  bool* is_empty;        // by row
  int64_t* reverse_map;  // by entry
};

template <class T, class Store>
void write_entry(const Entries<T>& e, int64_t rank, int64_t from, int64_t out, Store store) {
  for (int64_t d = 0; d < rank; ++d) store(e.out_indices + out * rank + d, e.indices[from * rank + d]);
  store(e.out_values + out, e.values[from]);
  store(e.reverse_map + from, out);
}

template <class T, class Store>
void write_default(const Entries<T>& e, int64_t rank, int64_t row, int64_t out, Store store) {
  for (int64_t d = 0; d < rank; ++d) store(e.out_indices + out * rank + d, d == 0 ? row : int64_t{0});
  store(e.out_values + out, e.default_value);
  e.is_empty[row] = true;
}

// Writes the rows of a slice of sorted entries. A row's entries may begin in the slice before, which then has said
// already that it is not empty.
template <int kRank, class T, class Store>
void fill_slice(const Entries<T>& e, const Slice& slice, Store store) {
  const int64_t rank = kRank ? kRank : e.rank;
  int64_t row = slice.first_row;  // rows below it are done
  int64_t out = slice.begin + slice.first_row - slice.first_group;
  const auto fill_to = [&](int64_t end_row) {
    for (; row < end_row; ++row, ++out) write_default(e, rank, row, out, store);
  };
  for (int64_t i = slice.begin; i < slice.end; ++i, ++out) {
    const int64_t entry_row = e.indices[i * rank];
    if (entry_row > row) fill_to(entry_row);
    if (entry_row >= slice.first_row) e.is_empty[entry_row] = false;
    row = entry_row + 1;
    write_entry(e, rank, i, out, store);
  }
  fill_to(slice.end_row);
  store.finish();
}

template <class T, class Store>
void fill_sorted(const Entries<T>& entries, const std::vector<Slice>& slices, Store store) {
  parallel_tasks(static_cast<int64_t>(slices.size()), [&](int64_t s) {
    const Slice& slice = slices[static_cast<size_t>(s)];
    const Entries<T> local = entries;
    local.rank == 1   ? fill_slice<1>(local, slice, store)
    : local.rank == 2 ? fill_slice<2>(local, slice, store)
                      : fill_slice<0>(local, slice, store);
  });
}

// Writes the entries [begin, end), each to the next place of its row. Places are far from one another: those of a block
// are found, and fetched, before any of them is written, so that the processor waits for many of them at a time.
template <int kRank, class T>
void place_entries(const Entries<T>& e, int64_t begin, int64_t end, int64_t* cursors) {
  const int64_t rank = kRank ? kRank : e.rank;
  for (int64_t block = begin; block < end; block += kBlockEntries) {
    const int64_t block_end = std::min(block + kBlockEntries, end);
    for (int64_t i = block; i < block_end; ++i) {
      const int64_t out = cursors[e.indices[i * rank]]++;
      e.reverse_map[i] = out;
      __builtin_prefetch(e.out_indices + out * rank, 1);
      __builtin_prefetch(e.out_values + out, 1);
    }
    for (int64_t i = block; i < block_end; ++i) write_entry(e, rank, i, e.reverse_map[i], Plain{});
  }
}

// Rows get their places in order, the parts' entries of a row one after the other; then each part writes its entries.
template <class T>
void fill_unsorted(const Entries<T>& entries, RowCounts& counted, int64_t count, int64_t num_rows) {
  const int64_t parts = counted.parts;
  int64_t* cursors = counted.counts.data();
  int64_t out = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t first = out;
    for (int64_t part = 0; part < parts; ++part) {
      int64_t& cursor = cursors[part * num_rows + row];
      out += std::exchange(cursor, out);
    }
    entries.is_empty[row] = false;
    if (out == first) write_default(entries, entries.rank, row, out++, Plain{});
  }
  parallel_tasks(parts, [&entries, cursors, count, num_rows, parts](int64_t part) {
    const Entries<T> local = entries;
    int64_t* mine = cursors + part * num_rows;
    const int64_t begin = part_begin(count, parts, part), end = part_begin(count, parts, part + 1);
    local.rank == 1   ? place_entries<1>(local, begin, end, mine)
    : local.rank == 2 ? place_entries<2>(local, begin, end, mine)
                      : place_entries<0>(local, begin, end, mine);
  });
}

// ---- Gradient -------------------------------------------------------------------------------------------------------

// Positions that are added up by themselves, before the sums are: the order does not depend on the threads.
constexpr int64_t kSumBlock = 4096;

template <class T>
T sum_unvisited(const T* grad, const uint8_t* visited, int64_t n) {
  using A = sum_t<T>;
  const int64_t blocks = (n + kSumBlock - 1) / kSumBlock;
  std::vector<A> sums(static_cast<size_t>(blocks), A(0));
  parallel_for(0, blocks, kItemGrain / kSumBlock, [&, grad, visited](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      A sum(0);
      for (int64_t j = block * kSumBlock; j < std::min(n, (block + 1) * kSumBlock); ++j) {
        if (!visited[j]) sum += static_cast<A>(grad[j]);
      }
      sums[static_cast<size_t>(block)] = sum;
    }
  });
  A total(0);
  for (const A& sum : sums) total += sum;
  return static_cast<T>(total);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> sparse_fill_empty_rows_cpu(const Tensor& indices_, const Tensor& values_,
                                                                      int64_t num_rows, const Tensor& default_value) {
  check_sparse_fill_empty_rows(indices_, values_, num_rows, default_value);
  const Tensor indices = as_contiguous(indices_), values = as_contiguous(values_);
  const int64_t entries = indices.size(0), rank = indices.size(1);
  const Column<int64_t> column{indices.const_data_ptr<int64_t>(), rank};
  const Asked asked{kFillOp, "num_rows", num_rows};
  const SortedRows scanned = scan_rows(column, entries, num_rows);
  const Tensor is_empty = new_empty(indices, {num_rows}, ScalarType::Bool, asked);
  RowCounts counted{0, scanned.distinct, {}};
  if (!scanned.sorted) counted = count_rows(column, entries, num_rows);
  const int64_t filled = entries + num_rows - counted.distinct;
  const Tensor out_indices = new_empty(indices, {filled, rank}, ScalarType::Long, asked);
  const Tensor out_values = new_empty(indices, {filled}, values.scalar_type(), asked);
  const Tensor reverse_map = new_empty(indices, {entries}, ScalarType::Long);
  dispatch_element(kFillOp, values, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Entries<T> all{rank,
                         indices.const_data_ptr<int64_t>(),
                         static_cast<const T*>(values.const_data_ptr()),
                         *static_cast<const T*>(default_value.const_data_ptr()),
                         out_indices.mutable_data_ptr<int64_t>(),
                         static_cast<T*>(out_values.mutable_data_ptr()),
                         is_empty.mutable_data_ptr<bool>(),
                         reverse_map.mutable_data_ptr<int64_t>()};
    if (!scanned.sorted) {
      fill_unsorted(all, counted, entries, num_rows);
    } else if (filled * rank * static_cast<int64_t>(sizeof(int64_t)) >= kLargeBytes) {
      fill_sorted(all, scanned.slices, Streaming{});
    } else {
      fill_sorted(all, scanned.slices, Plain{});
    }
  });
  return {out_values, out_indices, is_empty, reverse_map};
}

std::tuple<Tensor, Tensor> sparse_fill_empty_rows_grad_cpu(const Tensor& reverse_index_map, const Tensor& grad_values) {
  check_sparse_fill_empty_rows_grad(reverse_index_map, grad_values);
  const Tensor map = as_contiguous(reverse_index_map), grad = as_contiguous(grad_values);
  const int64_t entries = map.size(0), filled = grad.size(0);
  const Tensor d_values = new_empty(grad, {entries}, grad.scalar_type());
  const Tensor d_default = new_empty(grad, {}, grad.scalar_type());
  dispatch_number(grad.scalar_type(), kGradOp, "grad_values", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t* positions = map.const_data_ptr<int64_t>();
    const T* from = static_cast<const T*>(grad.const_data_ptr());
    T* to = static_cast<T*>(d_values.mutable_data_ptr());
    std::vector<uint8_t> visited(static_cast<size_t>(filled), 0);
    FirstPosition first_bad;
    parallel_for(0, entries, kItemGrain, [&, positions, from, to, filled](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = positions[i];
        if (at < 0 || at >= filled) return first_bad.report(i);
        to[i] = from[at];
        // Threads that write the same byte write the same number.
        __atomic_store_n(visited.data() + at, uint8_t{1}, __ATOMIC_RELAXED);
      }
    });
    if (first_bad.found()) throw_bad_index(kGradOp, "reverse_index_map", map, first_bad.position(), filled);
    *static_cast<T*>(d_default.mutable_data_ptr()) = sum_unvisited(from, visited.data(), filled);
  });
  return {d_values, d_default};
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "sparse_fill_empty_rows", &tsr::sparse_fill_empty_rows_cpu);
  TSR_IMPL(m, "sparse_fill_empty_rows_grad", &tsr::sparse_fill_empty_rows_grad_cpu);
}
