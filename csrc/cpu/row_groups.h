// Grouping items by table row: the plan of every gradient.
//
// N items, item i pointing at row rows[i] of a table, are sorted by row, stably, so that a row's items keep their order
// and each row can be summed by one thread. A stable counting sort into buckets of 2^shift neighbouring rows
// (parallel), then each bucket in cache: by counting where it is dense, else by radix. Then the sorted items are cut
// into slices at row boundaries: the tasks of the pass that writes the gradient.
//
// Memory: 8 bytes an item (16 beyond 2^32 rows or items), and the scratch of one bucket per thread.
#pragma once
#include "bags.h"

namespace tsr {

// U is uint32_t where rows, items and segments fit, else int64_t.
template <class U>
struct Item {
  U row;
  U payload;  // the item's position, or its segment where the position is not needed
};

// Sorted items [begin, end): whole rows. `groups` distinct rows, the first of them number first_group of the table.
// In a dense gradient the slice writes the rows [first_row, end_row).
struct Slice {
  int64_t begin, end;
  int64_t groups, first_group;
  int64_t first_row, end_row;
};

// What is to be written: every row, or only those that have items.
enum class GradientRows { kAll, kPresent };

template <class U>
class RowGroups {
 public:
  // indices [N], contiguous, in [0, num_rows), are the items' rows, `padding` left out (padding < 0: none); payloads:
  // per item, or null for the item's position. row_elements: of one row of the gradient. Throws IndexError for a bad
  // index.
  RowGroups(const char* op, const Tensor& indices, const U* payloads, int64_t num_rows, int64_t padding,
            int64_t row_elements, GradientRows written);
  // Groups ids [n] that have been checked; it throws nothing.
  template <class I>
  RowGroups(const I* ids, int64_t n, const U* payloads, int64_t num_rows, int64_t padding, int64_t row_elements,
            GradientRows written);

  const Item<U>* items() const { return items_.data(); }
  const std::vector<Slice>& slices() const { return slices_; }
  int64_t groups() const { return groups_; }
  // The most items, and the most rows [first_row, end_row), that any slice has.
  int64_t most_items() const { return most_items_; }
  int64_t most_rows() const { return most_rows_; }
  // Threads worth using to write the gradient.
  int64_t workers() const { return workers_; }

 private:
  void plan(int64_t n, int64_t padding, int64_t row_elements, GradientRows written);
  template <class I>
  void group(const I* rows, int64_t n, const U* payloads, int64_t padding, FirstPosition* first_bad);
  template <class I>
  void distribute(const I* rows, int64_t n, const U* payloads, int64_t padding, FirstPosition* first_bad);
  void sort_buckets();
  void cut(int64_t begin, int64_t end, std::vector<Slice>& slices) const;
  void number_slices(const std::vector<std::vector<Slice>>& by_bucket);

  int64_t num_rows_;
  int64_t slice_rows_;  // the most rows a slice should write
  int64_t workers_;
  int shift_;
  int64_t buckets_;
  std::vector<int64_t> bucket_starts_;  // [buckets + 1]
  Buffer<Item<U>> items_;
  std::vector<Slice> slices_;
  int64_t groups_ = 0;
  int64_t most_items_ = 0;
  int64_t most_rows_ = 0;
};

}  // namespace tsr
