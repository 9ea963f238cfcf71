// The CPU loops of the table under ThreadSanitizer, which does not know OpenMP's threads: here they run on std::thread.
//
// Every program of insertions, erasures, lookups and rehashes runs with one thread and with several, and must leave the
// same bits. `table race` counts without atomics instead, which must be reported.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace test_threads {

int64_t threads = 1;

inline int64_t get_num_threads() { return threads; }

// Like torch's parallel_for: one range for each thread, of at least `grain` items.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  const int64_t n = end - begin;
  const int64_t most = grain > 0 ? (n + grain - 1) / grain : n;
  const int64_t size = (n + std::min(threads, most) - 1) / std::min(threads, most);
  std::vector<std::thread> running;
  for (int64_t first = begin + size; first < end; first += size) {
    running.emplace_back([&f, first, size, end] { f(first, std::min(first + size, end)); });
  }
  f(begin, std::min(begin + size, end));
  for (std::thread& thread : running) thread.join();
}

}  // namespace test_threads

#define TSR_THREADS ::test_threads
#include "cpu/table_insert.h"

namespace {

using tsr::kBucketWords;
using tsr::kFreeEntry;

using Bits = std::vector<int64_t>;

// One program of calls.
struct Program {
  const char* name;
  int64_t ids;   // of each insertion
  int64_t keys;  // different ones to draw from
  int64_t rows;
  int64_t buckets;
  bool allowed, frequencies, count;
  int64_t frequency;  // that rows already have
  int64_t hot;        // one id in so many is the same key; 0: none
};

// A full table has 9 keys to a bucket; more keys make regions overflow.
// Each program has enough ids to keep six threads busy.
const Program kPrograms[] = {
    {"distinct keys", 80000, 1 << 30, 200000, 23000, false, false, true, 0, 0},
    {"many duplicates", 80000, 8000, 12000, 1400, false, false, true, 0, 0},
    {"one hot key", 80000, 30000, 40000, 4500, false, false, true, 0, 2},
    {"nothing counted", 60000, 20000, 30000, 3400, false, false, false, 0, 0},
    {"frequencies that are full", 80000, 8000, 12000, 1400, false, false, true, (int64_t{1} << 31) - 5, 3},
    {"some not allowed", 100000, 30000, 40000, 4500, true, false, true, 0, 4},
    {"not allowed, with frequencies", 100000, 30000, 40000, 4500, true, true, true, 0, 4},
    {"too few rows", 80000, 30000, 10000, 4500, true, true, true, 0, 4},
    {"full regions", 80000, 30000, 40000, 800, false, false, true, 0, 4},
    {"one region", 60000, 1000, 2000, 100, true, false, true, 0, 4},
};

class Table {
 public:
  explicit Table(const Program& program)
      : program_(program),
        index_(static_cast<size_t>(program.buckets * kBucketWords)),
        entries_(static_cast<size_t>(2 * program.rows), kFreeEntry),
        counters_(tsr::kTableCounters) {}

  // Every result of the operators, and the state that they left.
  template <class Id>
  Bits run() {
    for (int64_t step = 0; step < 2; ++step) {
      const std::vector<Id> ids = some_ids<Id>();
      insert(ids, step);
      find(ids);
      if (step == 0) have_frequencies();
      erase(some_ids<Id>(), 2000);
      find(ids);
      if (step == 0) rehash(program_.buckets + program_.buckets / 2);
    }
    append(index_);
    append(entries_);
    append(counters_);
    append(free_rows_);
    return bits_;
  }

 private:
  template <class T>
  void append(const std::vector<T>& values) {
    bits_.insert(bits_.end(), values.begin(), values.end());
  }

  tsr::TableView view() {
    return {index_.data(), tsr::TableShape(static_cast<int64_t>(index_.size()) / kBucketWords), entries_.data(),
            program_.rows};
  }

  template <class Id>
  std::vector<Id> some_ids() {
    std::vector<Id> ids(static_cast<size_t>(program_.ids));
    for (Id& id : ids) {
      const int64_t key = static_cast<int64_t>(random_() % static_cast<uint64_t>(program_.keys)) - program_.keys / 2;
      const bool hot = program_.hot != 0 && random_() % static_cast<uint64_t>(program_.hot) == 0;
      id = static_cast<Id>(hot ? 7 : key);
    }
    return ids;
  }

  template <class Id>
  void insert(const std::vector<Id>& ids, int64_t version) {
    const size_t n = ids.size();
    std::vector<uint8_t> allowed(n);
    std::vector<int32_t> frequencies(n);
    for (size_t i = 0; i < n; ++i) {
      allowed[i] = random_() % 3 == 0;
      frequencies[i] = static_cast<int32_t>(random_() % 100);
    }
    std::vector<int64_t> rows(n), born(n);
    tsr::Inserter<Id>(
        {view(), counters_.data(), free_rows_.data(), static_cast<int64_t>(free_rows_.size()), ids.data(),
         static_cast<int64_t>(n), program_.allowed ? reinterpret_cast<const bool*>(allowed.data()) : nullptr,
         program_.frequencies ? frequencies.data() : nullptr, version + 1, program_.count, rows.data(), born.data()})
        .run();
    append(rows);
    append(born);
  }

  template <class Id>
  void find(const std::vector<Id>& ids) {
    std::vector<int64_t> rows(ids.size());
    const int64_t grain = tsr::kWorkPerThread / tsr::kWorkPerKey;
    tsr::parallel_for(0, static_cast<int64_t>(ids.size()), grain, [&](int64_t begin, int64_t end) {
      tsr::find_each(view(), ids.data(), begin, end,
                     [&](int64_t i, int64_t row) { rows[static_cast<size_t>(i)] = row; });
    });
    append(rows);
  }

  void have_frequencies() {
    for (size_t row = 0; row < static_cast<size_t>(program_.rows); ++row) {
      int64_t& numbers = entries_[2 * row + 1];
      if (numbers == kFreeEntry) continue;
      numbers = tsr::pack_entry(tsr::entry_version(numbers), tsr::entry_frequency(numbers) + program_.frequency);
    }
  }

  // Like table_erase_, which uses one thread.
  template <class Id>
  void erase(const std::vector<Id>& ids, size_t most) {
    const tsr::TableView table = view();
    std::vector<int32_t> free(free_rows_.begin() + counters_[tsr::kReused], free_rows_.end());
    for (size_t i = 0; i < std::min(most, ids.size()); ++i) {
      const int64_t key = static_cast<int64_t>(ids[i]);
      const tsr::KeyPlace place = table.place(key);
      int32_t* slot = tsr::find_slot(table, place, [&](int32_t row) { return table.has(row, key); });
      if (slot == nullptr) continue;
      const int32_t row = *slot;
      tsr::erase_slot(table, place, slot);
      entries_[2 * static_cast<size_t>(row)] = 0;
      entries_[2 * static_cast<size_t>(row) + 1] = kFreeEntry;
      free.push_back(row);
    }
    std::sort(free.begin(), free.end());
    free_rows_ = free;
    counters_[tsr::kReused] = 0;
  }

  void rehash(int64_t buckets) {
    index_.assign(static_cast<size_t>(buckets * kBucketWords), 0);
    counters_[tsr::kFailed] += tsr::fill_index(view());
  }

  const Program& program_;
  std::mt19937_64 random_{1};
  std::vector<int32_t> index_;
  std::vector<int64_t> entries_, counters_;
  std::vector<int32_t> free_rows_;
  Bits bits_;
};

constexpr int64_t kThreads = 6;

template <class Id>
bool agrees(const Program& program) {
  test_threads::threads = 1;
  const Bits alone = Table(program).run<Id>();
  test_threads::threads = kThreads;
  if (Table(program).run<Id>() == alone) return true;
  std::printf("%s: several threads give other bits than one\n", program.name);
  return false;
}

int64_t count_without_atomics() {
  test_threads::threads = kThreads;
  int64_t count = 0;
  tsr::parallel_tasks(kThreads, [&](int64_t) { ++count; });
  return count;
}

}  // namespace

int main(int arguments, char** values) {
  if (arguments > 1 && std::string(values[1]) == "race") return count_without_atomics() == 0;
  bool same = true;
  for (const Program& program : kPrograms) same = agrees<int64_t>(program) && same;
  same = agrees<int32_t>(kPrograms[1]) && same;
  std::printf("%d programs\n", static_cast<int>(std::size(kPrograms)));
  return same ? 0 : 1;
}
