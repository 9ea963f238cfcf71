#include "row_groups.h"

#include <cstring>

#include "../embedding.h"

namespace tsr {
namespace {

constexpr int64_t kBucketItems = 4096;       // a bucket and its scratch fit the second-level cache
constexpr int64_t kMaxBuckets = 4096;        // more would cost the scatter a page per bucket
constexpr int64_t kSliceItems = 8192;        // cuts buckets that many ids fall into
constexpr int64_t kSliceElements = 1 << 20;  // cuts long stretches of a dense gradient without items
constexpr int64_t kInsertionSortItems = 32;
constexpr int kMostDigitBits = 12;

int bits_of(int64_t n) {
  int bits = 0;
  while (bits < 62 && (int64_t{1} << bits) < n) ++bits;
  return bits;
}

template <class U>
void insertion_sort(Item<U>* items, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    const Item<U> item = items[i];
    int64_t to = i;
    for (; to > 0 && items[to - 1].row > item.row; --to) items[to] = items[to - 1];
    items[to] = item;
  }
}

// One stable pass by digit (row >> low) & (radix - 1).
template <class U>
void counting_pass(const Item<U>* from, Item<U>* to, int64_t n, int low, int64_t radix, Buffer<int64_t>& counts) {
  const U mask = static_cast<U>(radix - 1);
  std::fill_n(counts.data(), radix, 0);
  for (int64_t i = 0; i < n; ++i) ++counts[static_cast<int64_t>((from[i].row >> low) & mask)];
  int64_t sum = 0;
  for (int64_t digit = 0; digit < radix; ++digit) {
    const int64_t count = counts[digit];
    counts[digit] = sum;
    sum += count;
  }
  for (int64_t i = 0; i < n; ++i) to[counts[static_cast<int64_t>((from[i].row >> low) & mask)]++] = from[i];
}

// Digits for the radix passes: few passes, but no more counters than items.
int digit_bits(int64_t n, int bits) {
  const int most = std::clamp(bits_of(n), 4, kMostDigitBits);
  const int passes = (bits + most - 1) / most;
  return passes == 0 ? 0 : (bits + passes - 1) / passes;
}

// Sorts a bucket's items by the low `bits` of their rows, stably.
template <class U>
void sort_items(Item<U>* items, int64_t n, int bits, Item<U>* scratch, Buffer<int64_t>& counts) {
  if (n <= kInsertionSortItems) return insertion_sort(items, n);
  const int digit = digit_bits(n, bits);
  Item<U>*from = items, *to = scratch;
  for (int low = 0; low < bits; low += digit) {
    counting_pass(from, to, n, low, int64_t{1} << std::min(digit, bits - low), counts);
    std::swap(from, to);
  }
  if (from != items) std::memcpy(static_cast<void*>(items), from, static_cast<size_t>(n) * sizeof(Item<U>));
}

// The distinct rows among sorted items. Without branches: whether a row repeats is hard to predict.
template <class U>
int64_t count_rows(const Item<U>* items, int64_t n) {
  int64_t rows = n > 0;
  for (int64_t i = 1; i < n; ++i) rows += items[i].row != items[i - 1].row;
  return rows;
}

}  // namespace

template <class U>
RowGroups<U>::RowGroups(const char* op, const Tensor& indices, const U* payloads, int64_t num_rows, int64_t padding,
                        int64_t row_elements, GradientRows written)
    : num_rows_(num_rows) {
  const int64_t n = indices.size(0);
  plan(n, padding, row_elements, written);
  FirstPosition first_bad;
  dispatch_index(indices.scalar_type(), op, "indices", [&](auto tag) {
    group(indices.const_data_ptr<typename decltype(tag)::type>(), n, payloads, padding, &first_bad);
  });
  if (first_bad.found()) throw_bad_index(op, "indices", indices, first_bad.position(), num_rows_);
}

template <class U>
template <class I>
RowGroups<U>::RowGroups(const I* ids, int64_t n, const U* payloads, int64_t num_rows, int64_t padding,
                        int64_t row_elements, GradientRows written)
    : num_rows_(num_rows) {
  plan(n, padding, row_elements, written);
  group(ids, n, payloads, padding, nullptr);
}

// How many buckets and threads.
template <class U>
void RowGroups<U>::plan(int64_t n, int64_t padding, int64_t row_elements, GradientRows written) {
  int64_t work = n * row_elements;
  slice_rows_ = INT64_MAX;
  if (written == GradientRows::kAll && row_elements > 0) {
    work += num_rows_ * row_elements;
    slice_rows_ = std::max<int64_t>(1, kSliceElements / row_elements);
  }
  workers_ = workers_for(work);
  const int64_t for_cache = n / kBucketItems;
  const int64_t for_threads = workers_ == 1 ? 1 : std::min(workers_ * 4, n / 64);
  const int bucket_bits = bits_of(std::clamp<int64_t>(std::max(for_cache, for_threads), 1, kMaxBuckets));
  shift_ = std::max(0, bits_of(num_rows_) - bucket_bits);
  // Padding that is no row has its place among the buckets, empty.
  const int64_t bound = index_bound(num_rows_, padding);
  buckets_ = bound == 0 ? 0 : ((bound - 1) >> shift_) + 1;
}

// Does nothing but report a bad id, if there is one; first_bad is null where ids have been checked. Few items are a
// bucket of their own, without the arrays that buckets and threads need: of a hundred small tables those cost the most.
template <class U>
template <class I>
void RowGroups<U>::group(const I* rows, int64_t n, const U* payloads, int64_t padding, FirstPosition* first_bad) {
  if (n > kInsertionSortItems) {
    distribute(rows, n, payloads, padding, first_bad);
    if (first_bad == nullptr || !first_bad->found()) sort_buckets();
    return;
  }
  if (first_bad != nullptr) {
    report_bad_ids(rows, 0, n, index_bound(num_rows_, padding), *first_bad);
    if (first_bad->found()) return;
  }
  items_ = Buffer<Item<U>>(n);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] == padding) continue;
    items_[count++] = {static_cast<U>(rows[i]), payloads ? payloads[i] : static_cast<U>(i)};
  }
  insertion_sort(items_.data(), count);
  std::vector<std::vector<Slice>> slices(1);
  cut(0, count, slices[0]);
  number_slices(slices);
}

// Stable counting sort into buckets: each thread counts, then places, its own consecutive part of the items. Does
// nothing if it reports a bad id to first_bad, which is null where ids have been checked.
template <class U>
template <class I>
void RowGroups<U>::distribute(const I* rows, int64_t n, const U* payloads, int64_t padding, FirstPosition* first_bad) {
  const int64_t parts = workers_for(n);
  std::vector<int64_t> cursors(static_cast<size_t>(parts * buckets_), 0);
  const int shift = shift_;
  const int64_t bound = index_bound(num_rows_, padding);
  parallel_tasks(parts, [&, n, parts, padding](int64_t part) {
    int64_t* count = cursors.data() + part * buckets_;
    const int64_t begin = n * part / parts, end = n * (part + 1) / parts;
    if (first_bad != nullptr) {
      report_bad_ids(rows, begin, end, bound, *first_bad);
      if (first_bad->found()) return;
    }
    for (int64_t i = begin; i < end; ++i) count[static_cast<int64_t>(rows[i]) >> shift] += rows[i] != padding;
  });
  if (first_bad != nullptr && first_bad->found()) return;
  bucket_starts_.resize(static_cast<size_t>(buckets_ + 1));
  int64_t total = 0;
  for (int64_t bucket = 0; bucket < buckets_; ++bucket) {
    bucket_starts_[static_cast<size_t>(bucket)] = total;
    for (int64_t part = 0; part < parts; ++part) {
      int64_t& cursor = cursors[static_cast<size_t>(part * buckets_ + bucket)];
      const int64_t count = cursor;
      cursor = total;
      total += count;
    }
  }
  bucket_starts_[static_cast<size_t>(buckets_)] = total;
  items_ = Buffer<Item<U>>(total);
  Item<U>* items = items_.data();
  parallel_tasks(parts, [&, items, n, parts, padding, payloads](int64_t part) {
    int64_t* cursor = cursors.data() + part * buckets_;
    const int64_t begin = n * part / parts, end = n * (part + 1) / parts;
    for (int64_t i = begin; i < end; ++i) {
      if (rows[i] == padding) continue;
      items[cursor[static_cast<int64_t>(rows[i]) >> shift]++] = {static_cast<U>(rows[i]),
                                                                 payloads ? payloads[i] : static_cast<U>(i)};
    }
  });
}

template <class U>
void RowGroups<U>::sort_buckets() {
  int64_t largest = 0;
  for (int64_t b = 0; b < buckets_; ++b) {
    largest = std::max(largest, bucket_starts_[static_cast<size_t>(b + 1)] - bucket_starts_[static_cast<size_t>(b)]);
  }
  std::vector<Buffer<Item<U>>> scratch;
  std::vector<Buffer<int64_t>> counts;
  const int64_t workers = workers_for(bucket_starts_[static_cast<size_t>(buckets_)] * 4);
  for (int64_t worker = 0; worker < workers; ++worker) {
    scratch.emplace_back(largest);
    counts.emplace_back(largest <= kInsertionSortItems ? 0 : int64_t{1} << kMostDigitBits);
  }
  std::vector<std::vector<Slice>> by_bucket(static_cast<size_t>(buckets_));
  parallel_dynamic(buckets_, workers, [&](int64_t worker, int64_t bucket) {
    const int64_t begin = bucket_starts_[static_cast<size_t>(bucket)];
    const int64_t n = bucket_starts_[static_cast<size_t>(bucket + 1)] - begin;
    sort_items(items_.data() + begin, n, shift_, scratch[static_cast<size_t>(worker)].data(),
               counts[static_cast<size_t>(worker)]);
    cut(begin, begin + n, by_bucket[static_cast<size_t>(bucket)]);
  });
  number_slices(by_bucket);
}

// Cuts a bucket's sorted items [begin, end) into slices of whole rows, none with many more items or rows than wanted.
template <class U>
void RowGroups<U>::cut(int64_t begin, int64_t end, std::vector<Slice>& slices) const {
  const Item<U>* items = items_.data();
  for (int64_t next; begin < end; begin = next) {
    const int64_t row = static_cast<int64_t>(items[begin].row);
    next = std::min(end, begin + kSliceItems);
    if (static_cast<int64_t>(items[next - 1].row) - row >= slice_rows_) {
      const auto within = [&](const Item<U>& item) { return static_cast<int64_t>(item.row) - row < slice_rows_; };
      next = std::partition_point(items + begin, items + next, within) - items;
    }
    while (next < end && items[next].row == items[next - 1].row) ++next;
    slices.push_back({begin, next, count_rows(items + begin, next - begin), 0, row, 0});
  }
}

// Joins the buckets' slices: numbers their groups, and shares out the rows between them. Long stretches without items
// become slices of their own.
template <class U>
void RowGroups<U>::number_slices(const std::vector<std::vector<Slice>>& by_bucket) {
  int64_t row = 0;  // rows below it are shared out
  const auto fill_to = [&](int64_t end_row) {
    while (end_row - row > slice_rows_) {
      slices_.push_back({0, 0, 0, groups_, row, row + slice_rows_});
      row += slice_rows_;
    }
  };
  for (const std::vector<Slice>& slices : by_bucket) {
    for (Slice slice : slices) {
      fill_to(slice.first_row);
      slice.first_row = row;
      slice.first_group = groups_;
      slice.end_row = row = static_cast<int64_t>(items_[slice.end - 1].row) + 1;
      groups_ += slice.groups;
      slices_.push_back(slice);
    }
  }
  fill_to(num_rows_);
  if (row < num_rows_) slices_.push_back({0, 0, 0, groups_, row, num_rows_});
  for (const Slice& slice : slices_) {
    most_items_ = std::max(most_items_, slice.end - slice.begin);
    most_rows_ = std::max(most_rows_, slice.end_row - slice.first_row);
  }
}

#define TSR_INSTANTIATE(U)                                                                                      \
  template class RowGroups<U>;                                                                                  \
  template RowGroups<U>::RowGroups(const int32_t*, int64_t, const U*, int64_t, int64_t, int64_t, GradientRows); \
  template RowGroups<U>::RowGroups(const int64_t*, int64_t, const U*, int64_t, int64_t, int64_t, GradientRows);
TSR_INSTANTIATE(uint32_t)
TSR_INSTANTIATE(int64_t)
#undef TSR_INSTANTIATE

}  // namespace tsr
