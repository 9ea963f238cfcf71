// unique for keys in a narrow range [low, low + range): a table with one entry per possible value.
//
// Each chunk of x numbers its own values by first appearance in a table of its own; the tables are then merged value by
// value. A value belongs to the first chunk that has it, so ids follow from counting each chunk's own values in order.
#pragma once
#include "unique_common.h"

namespace tsr {

template <class Key, class Pos>
class DirectUnique {
 public:
  DirectUnique(const Tensor& x, Key low, int64_t range, bool with_counts)
      : x_(x),
        keys_(static_cast<const Key*>(x.const_data_ptr())),
        low_(low),
        range_(range),
        // Clearing and merging the tables is work on chunks * range entries: not more than a few times that on x.
        chunks_(x.numel(), std::min(workers_for(x.numel()), 4 * x.numel() / range)),
        capacity_(std::min(chunks_.length, range)),
        table_(chunks_.count * range),
        offset_(chunks_.count * capacity_),
        id_(chunks_.count * capacity_),
        counts_(with_counts ? chunks_.count * capacity_ : 0),
        with_counts_(with_counts),
        sizes_(chunks_.count),
        first_id_(chunks_.count + 1),
        inverse_(new_empty(x, {x.numel()}, ScalarType::Long)) {}

  UniqueResult run() {
    parallel_tasks(chunks_.count, [&](int64_t chunk) { number_chunk(chunk); });
    parallel_for(0, range_, kUniqueGrain, [&](int64_t begin, int64_t end) { merge(begin, end); });
    for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
      const Pos* id = id_.data() + chunk * capacity_;
      first_id_[chunk + 1] = first_id_[chunk] + std::count(id, id + sizes_[chunk], kOwn);
    }

    UniqueResult result{new_empty(x_, {first_id_.back()}, x_.scalar_type()), inverse_, std::nullopt};
    if (with_counts_) result.counts = new_empty(x_, {first_id_.back()}, ScalarType::Long);
    Key* values = static_cast<Key*>(result.values.mutable_data_ptr());
    int64_t* counts = with_counts_ ? static_cast<int64_t*>(result.counts->mutable_data_ptr()) : nullptr;
    parallel_tasks(chunks_.count, [&](int64_t chunk) { write_own(chunk, values, counts); });
    // The first chunk's ids are final as they are.
    parallel_for(chunks_.end(0), chunks_.n, kUniqueGrain, [&](int64_t begin, int64_t end) { renumber(begin, end); });
    return result;
  }

 private:
  // In id_ until ids are known: the entry is the first with its value; or the entry that is, with a mark.
  static constexpr Pos kBorrowed = Pos{1} << (8 * sizeof(Pos) - 1);
  static constexpr Pos kOwn = static_cast<Pos>(~Pos{0});

  // table[chunk, v] = 1 + the chunk's number for low + v, 0 if absent; offset[chunk, number] = v; inverse = numbers.
  void number_chunk(int64_t chunk) {
    Pos* table = table_.data() + chunk * range_;
    Pos* offset = offset_.data() + chunk * capacity_;
    Pos* counts = counts_.data() + (with_counts_ ? chunk * capacity_ : 0);
    int64_t* inverse = static_cast<int64_t*>(inverse_.mutable_data_ptr());
    const Key* keys = keys_;
    const Key low = low_;
    const int64_t begin = chunks_.begin(chunk), end = chunks_.end(chunk);
    std::fill_n(table, range_, Pos{0});
    Pos size = 0;
    for (int64_t i = begin; i < end; ++i) {
      const Pos v = static_cast<Pos>(static_cast<Key>(keys[i] - low));
      Pos number = table[v];
      if (number == 0) {
        offset[size] = v;
        if (with_counts_) counts[size] = 0;
        table[v] = number = ++size;
      }
      if (with_counts_) ++counts[number - 1];
      inverse[i] = static_cast<int64_t>(number) - 1;
    }
    sizes_[chunk] = size;
  }

  void merge(int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      Pos owner = kOwn;
      for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
        const Pos number = table_.data()[chunk * range_ + v];
        if (number == 0) continue;
        const Pos entry = static_cast<Pos>(chunk * capacity_) + number - 1;
        if (owner == kOwn) {
          owner = entry;
          id_.data()[entry] = kOwn;
        } else {
          id_.data()[entry] = kBorrowed | owner;
          if (with_counts_) counts_.data()[owner] += counts_.data()[entry];
        }
      }
    }
  }

  void write_own(int64_t chunk, Key* values, int64_t* counts) {
    int64_t next = first_id_[chunk];
    const int64_t begin = chunk * capacity_;
    for (int64_t entry = begin; entry < begin + sizes_[chunk]; ++entry) {
      if (id_.data()[entry] != kOwn) continue;
      values[next] = static_cast<Key>(low_ + static_cast<Key>(offset_.data()[entry]));
      if (counts != nullptr) counts[next] = static_cast<int64_t>(counts_.data()[entry]);
      id_.data()[entry] = static_cast<Pos>(next++);
    }
  }

  void renumber(int64_t begin, int64_t end) {
    int64_t* inverse = static_cast<int64_t*>(inverse_.mutable_data_ptr());
    while (begin < end) {
      const int64_t chunk = begin / chunks_.length;
      const int64_t stop = std::min(end, chunks_.end(chunk));
      const Pos* id = id_.data() + chunk * capacity_;
      for (; begin < stop; ++begin) {
        const Pos own = id[inverse[begin]];
        inverse[begin] = static_cast<int64_t>(own & kBorrowed ? id_.data()[own & ~kBorrowed] : own);
      }
    }
  }

  const Tensor& x_;
  const Key* keys_;
  const Key low_;
  const int64_t range_;
  const Chunks chunks_;
  const int64_t capacity_;  // most values one chunk can have
  Scratch<Pos> table_;      // [chunks, range]
  Scratch<Pos> offset_;     // [chunks, capacity]
  Scratch<Pos> id_;         // [chunks, capacity]
  Scratch<Pos> counts_;     // [chunks, capacity], or nothing
  const bool with_counts_;
  std::vector<int64_t> sizes_;     // [chunks]: values of each
  std::vector<int64_t> first_id_;  // [chunks + 1]: id of each chunk's first own value
  Tensor inverse_;
};

}  // namespace tsr
