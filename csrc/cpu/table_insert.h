// Find or insert: the loops, over pointers.
//
// Three passes. All threads look every key up, unless the table is empty. Those that are missing get a slot, each
// region's by one thread, in the order of their positions: until rows are known a slot holds the complement of the
// position that took it. Then the positions that took one get rows, in their order, and all others read theirs from the
// slots.
#pragma once
#include <numeric>

#include "table_find.h"

namespace tsr {

// What table_find_or_insert_ is asked.
template <class Id>
struct Insertion {
  TableView table;
  int64_t* counters;
  const int32_t* free_rows;
  int64_t num_free;
  const Id* ids;
  int64_t n;
  const bool* allowed;         // [n], or null
  const int32_t* frequencies;  // [n], or null
  int64_t version;
  bool count;
  int64_t* rows;  // [n]
  int64_t* born;  // [n]
  int64_t most_threads = INT64_MAX;

  int64_t threads(int64_t work) const { return std::min(workers_for(work), most_threads); }
};

// Adds to a frequency, up to the most. Threads may do so at the same time, unless this one is alone.
inline void count_occurrences(int64_t* entry, uint32_t count, bool alone = false) {
  uint32_t* frequency = reinterpret_cast<uint32_t*>(entry + 1);
  // From far below the most, no number of threads that add so few each goes beyond it.
  constexpr uint32_t kMost = static_cast<uint32_t>(kMostFrequency), kFar = kMost - (1u << 30), kFew = 1u << 16;
  if (alone) {
    if (*frequency < kMost) *frequency += std::min(count, kMost - *frequency);
    return;
  }
  uint32_t known = __atomic_load_n(frequency, __ATOMIC_RELAXED);
  if (known < kFar && count <= kFew) {
    __atomic_fetch_add(frequency, count, __ATOMIC_RELAXED);
    return;
  }
  while (known < kMost && !__atomic_compare_exchange_n(frequency, &known, known + std::min(count, kMost - known), true,
                                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

inline void set_version(int64_t* entry, int64_t version) {
  __atomic_store_n(reinterpret_cast<uint32_t*>(entry + 1) + 1, static_cast<uint32_t>(version), __ATOMIC_RELAXED);
}

// What one thread notes of rows that occur: at once if it is alone, and needs no atomics. Otherwise a few rows at a
// time, so that rows which occur all the time are not written by all threads all the time; all rows of a small table,
// all of which do.
class Occurrences {
 public:
  // rows, keys: how many the table has, and about how many will be noted. alone: no other thread notes any.
  Occurrences(int64_t* entries, int64_t version, bool count, int64_t rows, int64_t keys, bool alone)
      : entries_(entries),
        version_(version),
        count_(count),
        alone_(alone),
        last_((rows <= kRows && rows < keys ? kRows : kFew) - 1) {
    std::fill_n(rows_, last_ + 1, Row{-1, 0});
  }
  Occurrences(const Occurrences&) = delete;
  Occurrences& operator=(const Occurrences&) = delete;
  ~Occurrences() {
    for (int64_t k = 0; k <= last_; ++k) write(rows_[k]);
  }

  void add(int64_t row) {
    if (alone_) return write({static_cast<int32_t>(row), 1});
    Row& its = rows_[row & last_];
    if (its.number != row) {
      write(its);
      its = {static_cast<int32_t>(row), 0};
    }
    ++its.count;
  }

 private:
  struct Row {
    int32_t number;
    uint32_t count;
  };

  void write(const Row& row) const {
    if (row.number < 0) return;
    int64_t* entry = entries_ + 2 * int64_t{row.number};
    if (count_) count_occurrences(entry, row.count, alone_);
    if (version_ >= 0) set_version(entry, version_);
  }

  static constexpr int64_t kRows = 1024, kFew = 64;  // powers of two

  int64_t* const entries_;
  const int64_t version_;
  const bool count_, alone_;
  const int64_t last_;
  Row rows_[kRows];
};

template <class Id>
class Inserter {
 public:
  explicit Inserter(const Insertion<Id>& what) : a_(what) {}

  void run() {
    // All keys of an empty table are missing.
    num_missing_ = a_.n;
    if (a_.counters[kUsed] > 0 || a_.allowed != nullptr) list_missing();
    if (num_missing_ == 0) return;
    slots_ = Buffer<int32_t*>(num_missing_);
    is_first_ = Buffer<uint8_t>(num_missing_);
    take_slots();
    give_rows();
    if (a_.allowed != nullptr) find_not_allowed();
  }

 private:
  // Looks every key up, and lists the missing ones that may be inserted.
  void list_missing() {
    const int64_t chunks = a_.threads(a_.n * kWorkPerKey);
    std::vector<std::vector<int32_t>> lists(static_cast<size_t>(chunks));
    parallel_tasks(chunks, [&](int64_t chunk) {
      std::vector<int32_t>& missing = lists[static_cast<size_t>(chunk)];
      Occurrences occurrences(a_.table.entries, a_.version, a_.count, a_.counters[kUsed], a_.n / chunks, chunks == 1);
      const auto found = [&](int64_t i, int64_t row) {
        a_.rows[i] = row;
        a_.born[i] = -1;
        if (row >= 0) {
          occurrences.add(row);
        } else if (a_.allowed == nullptr || a_.allowed[i]) {
          missing.push_back(static_cast<int32_t>(i));
        }
      };
      find_each(a_.table, a_.ids, a_.n * chunk / chunks, a_.n * (chunk + 1) / chunks, found);
    });
    num_missing_ = 0;
    for (const std::vector<int32_t>& list : lists) num_missing_ += static_cast<int64_t>(list.size());
    positions_.reserve(static_cast<size_t>(num_missing_));
    for (const std::vector<int32_t>& list : lists) positions_.insert(positions_.end(), list.begin(), list.end());
  }

  // The position of the j-th missing key.
  int64_t position_of(int64_t j) const { return positions_.empty() ? j : positions_[static_cast<size_t>(j)]; }

  int64_t key(int64_t position) const { return static_cast<int64_t>(a_.ids[position]); }

  // Each thread goes through all positions and takes slots in regions of its own.
  void take_slots() {
    const int64_t regions = a_.table.shape.regions;
    const int64_t workers = std::min(a_.threads(num_missing_ * 4 * kWorkPerKey), regions);
    const KeyFactors factors = a_.table.factors;  // of its own: in registers, whatever the loop writes
    parallel_tasks(workers, [&](int64_t worker) {
      const int64_t begin = regions * worker / workers, end = regions * (worker + 1) / workers;
      // Those of its regions, gathered without a branch that nobody can foresee.
      int32_t mine[kGathered];
      uint64_t hashes[kGathered];
      KeyPlace places[kGathered];
      for (int64_t first = 0; first < num_missing_; first += kGathered) {
        const int64_t size = std::min(kGathered, num_missing_ - first);
        // The keys of the next ones: among so many buckets the processor does not foresee them by itself.
        for (int64_t k = kGathered; k < 2 * kGathered; k += kIdsOfLine) {
          __builtin_prefetch(a_.ids + position_of(std::min(first + k, num_missing_ - 1)));
        }
        int64_t n = 0;
        for (int64_t k = 0; k < size; ++k) {
          const uint64_t hash = hash_key(key(position_of(first + k)), factors);
          const int64_t region = region_of(a_.table.shape, hash);
          mine[n] = static_cast<int32_t>(k);
          hashes[n] = hash;
          n += region >= begin && region < end;
        }
        for (int64_t k = 0; k < n; ++k) {
          places[k] = place_of(a_.table.shape, hashes[k]);
          __builtin_prefetch(a_.table.bucket(places[k].region + places[k].home), 1);
        }
        for (int64_t k = 0; k < n; ++k) take_slot(first + mine[k], places[k]);
      }
    });
  }

  void take_slot(int64_t j, const KeyPlace& place) {
    const int64_t position = position_of(j);
    const int64_t wanted = key(position);
    // A key of the table is not met again here: it would have been found.
    const auto is_key = [&](int32_t row) { return row < 0 && ~row < a_.n && key(~row) == wanted; };
    int32_t* slot = find_slot(a_.table, place, is_key);
    const bool is_new = slot == nullptr;
    if (is_new) slot = insert_slot(a_.table, place, static_cast<int32_t>(~position));
    is_first_[j] = is_new && slot != nullptr;
    slots_[j] = slot;
  }

  // The k-th row that is free, or -1.
  int64_t free_row(int64_t k) const {
    const int64_t reusable = a_.num_free - a_.counters[kReused];
    if (k < reusable) return a_.free_rows[a_.counters[kReused] + k];
    const int64_t row = a_.counters[kUsed] + (k - reusable);
    return row < a_.table.rows ? row : -1;
  }

  void give_rows() {
    const int64_t chunks = a_.threads(num_missing_ * kWorkPerKey);
    std::vector<int64_t> firsts(static_cast<size_t>(chunks) + 1), failed(static_cast<size_t>(chunks));
    const auto begin_of = [&](int64_t chunk) { return num_missing_ * chunk / chunks; };
    parallel_tasks(chunks, [&](int64_t chunk) {
      const uint8_t* first = is_first_.data();
      firsts[static_cast<size_t>(chunk) + 1] =
          std::accumulate(first + begin_of(chunk), first + begin_of(chunk + 1), int64_t{0});
    });
    for (size_t chunk = 0; chunk < static_cast<size_t>(chunks); ++chunk) firsts[chunk + 1] += firsts[chunk];
    const int64_t wanted = firsts.back();
    check_free_rows(wanted);
    int64_t given = wanted;  // rows that there are
    if (wanted > 0 && free_row(wanted - 1) < 0) {
      given = a_.num_free - a_.counters[kReused] + a_.table.rows - a_.counters[kUsed];
    }
    parallel_tasks(chunks, [&](int64_t chunk) {
      int64_t k = firsts[static_cast<size_t>(chunk)];
      for (int64_t j = begin_of(chunk), end = begin_of(chunk + 1); j < end; ++j) {
        __builtin_prefetch(slots_[std::min(j + kSlotsAhead, end - 1)], 1);
        if (is_first_[j] && k < given) {
          give_row(j, free_row(k++));
        } else {
          a_.rows[position_of(j)] = a_.born[position_of(j)] = -1;
        }
      }
    });
    if (given < num_missing_) {
      parallel_tasks(chunks, [&](int64_t chunk) {
        for (int64_t j = begin_of(chunk); j < begin_of(chunk + 1); ++j) {
          if (a_.born[position_of(j)] < 0) failed[static_cast<size_t>(chunk)] += !read_row(j);
        }
      });
    }
    if (given < wanted) give_back_slots();
    const int64_t reused = std::min(given, a_.num_free - a_.counters[kReused]);
    a_.counters[kReused] += reused;
    a_.counters[kUsed] += given - reused;
    a_.counters[kInserted] += given;
    for (const int64_t of_chunk : failed) a_.counters[kFailed] += of_chunk;
  }

  // The caller's word, too: no row has two keys, and nothing is written outside of the table.
  void check_free_rows(int64_t wanted) {
    const int64_t first = a_.counters[kReused], end = std::min(first + wanted, a_.num_free);
    for (int64_t k = first; k < end; ++k) {
      if (is_reusable(a_.table.entries, a_.free_rows, k, first, a_.counters[kUsed])) continue;
      for (int64_t j = 0; j < num_missing_; ++j) {
        if (is_first_[j]) erase(j);
      }
      throw std::invalid_argument(message("table_find_or_insert_: free_rows[", k, "] must be in [0, ",
                                          a_.counters[kUsed], "), without a key and more than the one before it, got ",
                                          a_.free_rows[k]));
    }
  }

  void erase(int64_t j) {
    const int64_t its = key(position_of(j));
    erase_slot(a_.table, a_.table.place(its), slots_[j]);
  }

  void give_row(int64_t j, int64_t row) {
    const int64_t position = position_of(j);
    int64_t* entry = a_.table.entries + 2 * row;
    entry[0] = key(position);
    entry[1] = pack_entry(std::max<int64_t>(a_.version, 0),
                          a_.frequencies == nullptr ? a_.count : std::max(a_.frequencies[position], 0));
    *slots_[j] = static_cast<int32_t>(row);
    a_.rows[position] = a_.born[position] = row;
  }

  // Reads the row of a position that has not inserted its key; false where there was no room.
  bool read_row(int64_t j) {
    const int32_t* slot = slots_[j];
    if (slot == nullptr || *slot < 0) return false;
    a_.rows[position_of(j)] = *slot;
    if (a_.count && a_.frequencies == nullptr) count_occurrences(a_.table.entries + 2 * static_cast<int64_t>(*slot), 1);
    return true;
  }

  // Gives back the slots of keys for which there was no row. No key has come after them.
  void give_back_slots() {
    for (int64_t j = 0; j < num_missing_; ++j) {
      if (is_first_[j] && *slots_[j] < 0) erase(j);
    }
  }

  // Positions that were not allowed to insert have the rows that others have inserted.
  void find_not_allowed() {
    const int64_t chunks = a_.threads(a_.n * kWorkPerKey);
    parallel_tasks(chunks, [&](int64_t chunk) {
      Occurrences occurrences(a_.table.entries, a_.version, a_.count && a_.frequencies == nullptr, a_.counters[kUsed],
                              a_.n / chunks, chunks == 1);
      for (int64_t i = a_.n * chunk / chunks; i < a_.n * (chunk + 1) / chunks; ++i) {
        if (a_.rows[i] >= 0 || a_.allowed[i]) continue;
        a_.rows[i] = find_row(a_.table, a_.table.place(key(i)), key(i));
        if (a_.rows[i] >= 0) occurrences.add(a_.rows[i]);
      }
    });
  }

  static constexpr int64_t kGathered = 128, kSlotsAhead = 32, kIdsOfLine = 64 / sizeof(Id);

  const Insertion<Id> a_;
  int64_t num_missing_ = 0;         // keys, as often as they come
  std::vector<int32_t> positions_;  // of missing keys that are allowed, ascending
  Buffer<int32_t*> slots_;          // of each of them; null where the region is full
  Buffer<uint8_t> is_first_;        // whether it took its slot
};

// An index of the rows that are not free: each thread inserts those of its regions, in the order of rows. Returns how
// many found no room. The index must be zeros.
inline int64_t fill_index(const TableView& table) {
  const int64_t workers = std::min(workers_for(table.rows * kWorkPerKey), table.shape.regions);
  std::vector<int64_t> failed(static_cast<size_t>(workers));
  parallel_tasks(workers, [&](int64_t worker) {
    const int64_t begin = table.shape.regions * worker / workers, end = table.shape.regions * (worker + 1) / workers;
    constexpr int64_t kAhead = 16;
    int64_t queue[kAhead], taken = 0, queued = 0;
    const auto take = [&](int64_t row) {
      const KeyPlace place = table.place(table.entries[2 * row]);
      failed[static_cast<size_t>(worker)] += insert_slot(table, place, static_cast<int32_t>(row)) == nullptr;
    };
    for (int64_t row = 0; row < table.rows; ++row) {
      if (table.entries[2 * row + 1] == kFreeEntry) continue;
      const uint64_t hash = table.hash(table.entries[2 * row]);
      const int64_t region = region_of(table.shape, hash);
      if (region < begin || region >= end) continue;
      if (queued - taken == kAhead) take(queue[taken++ % kAhead]);
      queue[queued++ % kAhead] = row;
      const KeyPlace place = place_of(table.shape, hash);
      __builtin_prefetch(table.bucket(place.region + place.home), 1);
    }
    for (; taken < queued; ++taken) take(queue[taken % kAhead]);
  });
  int64_t all = 0;
  for (const int64_t of_worker : failed) all += of_worker;
  return all;
}

}  // namespace tsr
