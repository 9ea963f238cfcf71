// The entries of a collection's tables, grouped by row: the plan of its gradients and of its update.
#pragma once
#include "collection.h"
#include "grad_columns.h"
#include "gradient.h"

namespace tsr {

// The entries of tables that have the same keys, rows and padding: the bags of their lookups one after the other, each
// entry with its row and, as payload, its number or the number of its bag.
template <class U>
struct EntryGroups {
  std::vector<int64_t> keys;
  int64_t rows, padding;
  bool by_entry;      // payloads are numbers of entries; else of bags
  int64_t most_dims;  // of the tables
  int64_t entries = 0, bags = 0;
  Buffer<U> bag_of_entry;  // empty where every bag is one entry
  std::unique_ptr<RowGroups<U>> groups;
};

// A table's share: what the entries of its groups mean.
template <class T, class U>
struct TableEntries {
  int64_t table;
  std::vector<const CollectionLookup*> lookups;
  int64_t group;  // which of EntryGroups
  ItemMeaning<T, U> meaning{};
  Buffer<acc_t<T>> by_entry{}, by_bag{};
  Buffer<U> places{};
  Buffer<int64_t> winner_places{}, position_shifts{};
  int64_t window = -1;  // which ColumnWindow its lookup's columns are copied with; -1: they are not copied
};

// All wanted tables, their entries grouped and described.
template <class T, class U>
struct CollectionTables {
  std::vector<EntryGroups<U>> groups;
  std::vector<TableEntries<T, U>> tables;
  std::vector<ColumnWindow<T>> windows;
};

// grad and argmax must be contiguous and outlive the result. written: kAll takes in the tables without entries. Throws
// IndexError for a bad id.
template <class U, class T, class I>
CollectionTables<T, U> group_tables(const CollectionInput<T, I>& input, const T* grad, const int64_t* argmax,
                                    const std::vector<bool>& wanted, GradientRows written);

// All wanted tables' groups, for callers that walk over them.
template <class T, class U>
class CollectionGroups {
 public:
  explicit CollectionGroups(CollectionTables<T, U>&& all) : all_(std::move(all)) {}

  const std::vector<TableEntries<T, U>>& tables() const { return all_.tables; }
  const RowGroups<U>& groups(const TableEntries<T, U>& table) const { return *group_of(table).groups; }

  // Runs f(worker, table, meaning, slice, scratch) over all slices of all tables, where meaning is the table's or the
  // same of a copy of its grad, and f starts with the slice's rows; prepare(workers) comes before. dense(table): room for
  // all rows of a slice, else for those that have entries; a table without columns has nothing dense.
  template <class Dense, class Prepare, class F>
  void for_each_slice(const Dense& dense, const Prepare& prepare, const F& f) const {
    int64_t work = 0, items = 0, rows = 0;
    bool weighted = false, max = false;
    for (const TableEntries<T, U>& table : all_.tables) {
      const RowGroups<U>& mine = groups(table);
      work += group_of(table).entries * std::max<int64_t>(table.meaning.dim, 1);
      if (dense(table)) work += group_of(table).rows * table.meaning.dim;
      items = std::max(items, mine.most_items());
      if (!dense(table)) rows = std::max(rows, mine.most_items());
      if (dense(table) && table.meaning.dim > 0) rows = std::max(rows, mine.most_rows());
      weighted |= table.meaning.weighted();
      max |= table.meaning.winners != nullptr;
    }
    const int64_t workers = workers_for(work);
    const SliceRuns runs = slice_runs(dense, work / (workers * 16) + 1);
    std::vector<SliceScratch<T, U>> scratch;
    for (int64_t worker = 0; worker < workers; ++worker) scratch.emplace_back(items, rows, weighted, max);
    std::vector<GradColumns<T>> columns(static_cast<size_t>(workers));
    prepare(workers);
    parallel_dynamic(static_cast<int64_t>(runs.begins.size()) - 1, workers, [&](int64_t worker, int64_t task) {
      const size_t mine = static_cast<size_t>(worker);
      for (size_t s = runs.begins[static_cast<size_t>(task)]; s < runs.begins[static_cast<size_t>(task + 1)]; ++s) {
        const auto& [table, slice] = runs.slices[s];
        ItemMeaning<T, U> meaning = table->meaning;
        if (table->window >= 0) {
          meaning.grad = columns[mine].of(all_.windows[static_cast<size_t>(table->window)], meaning.grad);
          meaning.stride = 0;
        }
        f(worker, *table, meaning, *slice, scratch[mine]);
      }
    });
  }

 private:
  const EntryGroups<U>& group_of(const TableEntries<T, U>& table) const {
    return all_.groups[static_cast<size_t>(table.group)];
  }

  // All slices, and where the runs begin of those that one thread takes one after the other: of one window, since every
  // thread that takes some of them has to copy it, but not beyond most_work elements.
  struct SliceRuns {
    std::vector<std::pair<const TableEntries<T, U>*, const Slice*>> slices;
    std::vector<size_t> begins;  // [runs + 1]
  };

  template <class Dense>
  SliceRuns slice_runs(const Dense& dense_tables, int64_t most_work) const {
    SliceRuns runs;
    int64_t window = -1, run_work = 0;
    for (const TableEntries<T, U>& table : all_.tables) {
      const bool dense = dense_tables(table);
      for (const Slice& slice : groups(table).slices()) {
        if (dense ? table.meaning.dim == 0 : slice.groups == 0) continue;
        const int64_t elements = slice.end - slice.begin + (dense ? slice.end_row - slice.first_row : 0);
        const int64_t work = elements * std::max<int64_t>(table.meaning.dim, 1);
        if (table.window < 0 || table.window != window || run_work + work > most_work) {
          runs.begins.push_back(runs.slices.size());
          run_work = 0;
        }
        window = table.window;
        run_work += work;
        runs.slices.emplace_back(&table, &slice);
      }
    }
    runs.begins.push_back(runs.slices.size());
    return runs;
  }

  CollectionTables<T, U> all_;
};

// Calls f(type_tag<U>) with the width that rows, entries and places of the tables need.
template <class I, class F>
void dispatch_collection_width(const CollectionIds<I>& input, const F& f) {
  const Collection& c = input.c;
  int64_t entries = 0, rows = 0;
  for (const CollectionLookup& lookup : c.lookups) entries += input.items(lookup);
  for (const int64_t count : c.num_embeddings) rows = std::max(rows, count);
  dispatch_width(fits_32_bits(rows, std::max(entries, c.bags), c.output_elements), f);
}

}  // namespace tsr
