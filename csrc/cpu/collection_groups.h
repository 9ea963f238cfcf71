// The entries of a collection's tables, grouped by row: the plan of its gradients and of its update.
#pragma once
#include <map>

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

// All wanted tables: their entries grouped and described. The constructor throws IndexError for a bad id.
template <class T, class I, class U>
class CollectionGroups {
 public:
  using A = acc_t<T>;

  // grad and argmax must be contiguous and outlive this. written: kAll takes in the tables without entries.
  CollectionGroups(const CollectionInput<T, I>& input, const T* grad, const int64_t* argmax,
                   const std::vector<bool>& wanted, GradientRows written)
      : input_(input), one_each_(one_entry_each()) {
    const Collection& c = input.c;
    std::vector<std::vector<const CollectionLookup*>> of_table(static_cast<size_t>(c.tables()));
    for (const CollectionLookup& lookup : c.lookups) of_table[static_cast<size_t>(lookup.table)].push_back(&lookup);
    std::map<std::vector<int64_t>, int64_t> known;
    for (int64_t k = 0; k < c.tables(); ++k) {
      const size_t at = static_cast<size_t>(k);
      if (wanted[at] && (written == GradientRows::kAll || !of_table[at].empty())) add(k, of_table[at], known);
    }
    build_groups(written);
    describe(grad, argmax);
    find_windows();
  }

  const std::vector<TableEntries<T, U>>& tables() const { return tables_; }
  const RowGroups<U>& groups(const TableEntries<T, U>& table) const {
    return *groups_[static_cast<size_t>(table.group)].groups;
  }

  // Runs f(worker, table, meaning, slice, scratch) over all slices of all tables, where meaning is the table's or the
  // same of a copy of its grad, and f starts with the slice's rows; prepare(workers) comes before. dense: room for all
  // rows of a slice, else for those that have entries.
  template <class Prepare, class F>
  void for_each_slice(bool dense, const Prepare& prepare, const F& f) const {
    int64_t work = 0, items = 0, rows = 0;
    bool weighted = false, max = false;
    for (const TableEntries<T, U>& table : tables_) {
      const RowGroups<U>& mine = groups(table);
      work += (group_of(table).entries + (dense ? group_of(table).rows : 0)) * std::max<int64_t>(table.meaning.dim, 1);
      items = std::max(items, mine.most_items());
      rows = std::max(rows, dense ? mine.most_rows() : mine.most_items());
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
          meaning.grad = columns[mine].of(windows_[static_cast<size_t>(table->window)], meaning.grad);
          meaning.stride = 0;
        }
        f(worker, *table, meaning, *slice, scratch[mine]);
      }
    });
  }

 private:
  // All slices, and where the runs begin of those that one thread takes one after the other: of one window, since every
  // thread that takes some of them has to copy it, but not beyond most_work elements.
  struct SliceRuns {
    std::vector<std::pair<const TableEntries<T, U>*, const Slice*>> slices;
    std::vector<size_t> begins;  // [runs + 1]
  };

  SliceRuns slice_runs(bool dense, int64_t most_work) const {
    SliceRuns runs;
    int64_t window = -1, run_work = 0;
    for (const TableEntries<T, U>& table : tables_) {
      for (const Slice& slice : groups(table).slices()) {
        if (!dense && slice.groups == 0) continue;
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

  // Which keys have bags of one entry each: there a mean is a sum, and an entry's number its bag's.
  std::vector<bool> one_entry_each() const {
    std::vector<bool> result(input_.c.key_bags.size());
    for (size_t key = 0; key < result.size(); ++key) {
      const auto [first, bags] = input_.c.key_bags[key];
      const int64_t* starts = input_.starts.data() + first;
      int64_t others = 0;
      for (int64_t b = 0; b < bags; ++b) others |= (starts[b + 1] - starts[b]) ^ 1;
      result[key] = others == 0;
    }
    return result;
  }

  bool one_each(const CollectionLookup& lookup) const { return one_each_[static_cast<size_t>(lookup.key)]; }
  const EntryGroups<U>& group_of(const TableEntries<T, U>& table) const {
    return groups_[static_cast<size_t>(table.group)];
  }

  void add(int64_t k, const std::vector<const CollectionLookup*>& lookups,
           std::map<std::vector<int64_t>, int64_t>& known) {
    const size_t at = static_cast<size_t>(k);
    const Collection& c = input_.c;
    bool by_entry = input_.weights != nullptr;
    std::vector<int64_t> keys;
    for (const CollectionLookup* lookup : lookups) {
      by_entry |= lookup->mode == Reduction::kMax;
      keys.push_back(lookup->key);
    }
    std::vector<int64_t> name = keys;
    name.insert(name.end(), {c.num_embeddings[at], c.padding_idx[at], by_entry});
    const auto [found, is_new] = known.emplace(std::move(name), static_cast<int64_t>(groups_.size()));
    if (is_new) {
      EntryGroups<U> groups{std::move(keys), c.num_embeddings[at], c.padding_idx[at], by_entry, 0};
      for (const CollectionLookup* lookup : lookups) {
        groups.entries += input_.items(*lookup);
        groups.bags += lookup->bags;
      }
      groups_.push_back(std::move(groups));
    }
    EntryGroups<U>& groups = groups_[static_cast<size_t>(found->second)];
    groups.most_dims = std::max(groups.most_dims, c.dims[at]);
    tables_.push_back({k, lookups, found->second});
  }

  // Several threads take a group each, or, where groups are few, all of them one after the other.
  void build_groups(GradientRows written) {
    const int64_t count = static_cast<int64_t>(groups_.size());
    int64_t entries = 0;
    for (const EntryGroups<U>& groups : groups_) entries += groups.entries;
    const int64_t workers = workers_for(entries * 8);
    FirstPosition first_bad;
    const auto build_one = [&](int64_t, int64_t g) { build(groups_[static_cast<size_t>(g)], written, first_bad); };
    if (count >= 2 * workers) {
      parallel_dynamic(count, workers, build_one);
    } else {
      for (int64_t g = 0; g < count; ++g) build_one(0, g);
    }
    input_.throw_if(first_bad, FirstPosition());
  }

  void build(EntryGroups<U>& groups, GradientRows written, FirstPosition& first_bad) const {
    const int64_t bound = index_bound(groups.rows, groups.padding);
    bool in_order = true, one_each = true;
    for (const int64_t key : groups.keys) {
      const auto [first, bags] = input_.c.key_bags[static_cast<size_t>(key)];
      const int64_t begin = input_.starts[first], end = input_.starts[first + bags];
      if (!all_below(input_.ids + begin, end - begin, bound)) {
        report_bad_ids(input_.ids, begin, end, bound, first_bad);
        in_order = false;
      }
      one_each = one_each && one_each_[static_cast<size_t>(key)];
    }
    if (!in_order) return;
    Buffer<I> joined;
    const I* ids = joined_ids(groups, joined);
    if (!one_each) number_bags(groups);
    const U* payloads = one_each || groups.by_entry ? nullptr : groups.bag_of_entry.data();
    groups.groups = std::make_unique<RowGroups<U>>(ids, groups.entries, payloads, groups.rows, groups.padding,
                                                   groups.most_dims, written);
  }

  // The entries' ids: the input's own where there is one key, else copied together.
  const I* joined_ids(const EntryGroups<U>& groups, Buffer<I>& joined) const {
    const auto ids_of = [&](int64_t key) {
      return input_.ids + input_.starts[input_.c.key_bags[static_cast<size_t>(key)].first];
    };
    if (groups.keys.empty()) return nullptr;
    if (groups.keys.size() == 1) return ids_of(groups.keys[0]);
    joined = Buffer<I>(groups.entries);
    I* to = joined.data();
    for (const int64_t key : groups.keys) {
      const auto [first, bags] = input_.c.key_bags[static_cast<size_t>(key)];
      to = std::copy_n(ids_of(key), input_.starts[first + bags] - input_.starts[first], to);
    }
    return joined.data();
  }

  void number_bags(EntryGroups<U>& groups) const {
    groups.bag_of_entry = Buffer<U>(groups.entries);
    U* to = groups.bag_of_entry.data();
    U number = 0;
    for (const int64_t key : groups.keys) {
      const auto [first, bags] = input_.c.key_bags[static_cast<size_t>(key)];
      for (int64_t b = first; b < first + bags; ++b, ++number) {
        for (int64_t i = input_.starts[b]; i < input_.starts[b + 1]; ++i) *to++ = number;
      }
    }
  }

  void describe(const T* grad, const int64_t* argmax) {
    int64_t work = 0;
    for (const TableEntries<T, U>& table : tables_) work += group_of(table).entries + group_of(table).bags;
    parallel_dynamic(static_cast<int64_t>(tables_.size()), workers_for(work * 4),
                     [&](int64_t, int64_t t) { describe_table(tables_[static_cast<size_t>(t)], grad, argmax); });
  }

  void describe_table(TableEntries<T, U>& table, const T* grad, const int64_t* argmax) const {
    const EntryGroups<U>& groups = group_of(table);
    ItemMeaning<T, U>& meaning = table.meaning;
    meaning.grad = grad;
    meaning.dim = input_.c.dims[static_cast<size_t>(table.table)];
    if (table.lookups.empty()) return;
    meaning.segments = groups.by_entry ? groups.bag_of_entry.data() : nullptr;
    if (table.lookups.size() == 1) {
      meaning.grad += table.lookups[0]->output;
      meaning.stride = table.lookups[0]->stride;
    } else {
      table.places = Buffer<U>(groups.bags);
      meaning.places = table.places.data();
      for_each_bag(table, [&](const CollectionLookup& lookup, int64_t b, int64_t number) {
        table.places[number] = static_cast<U>(lookup.output + b * lookup.stride);
      });
    }
    describe_weights(table);
    if (std::any_of(table.lookups.begin(), table.lookups.end(),
                    [](const CollectionLookup* lookup) { return lookup->mode == Reduction::kMax; })) {
      describe_winners(table, argmax);
    }
  }

  void find_windows() {
    for (TableEntries<T, U>& table : tables_) {
      const ItemMeaning<T, U>& meaning = table.meaning;
      if (table.lookups.size() != 1) continue;
      const int64_t rows = table.lookups[0]->bags;
      if (!GradColumns<T>::pay(meaning.stride, rows, meaning.dim, group_of(table).entries)) continue;
      if (windows_.empty() || !windows_.back().takes(meaning.grad, meaning.stride, rows, meaning.dim)) {
        windows_.push_back({meaning.grad, meaning.stride, rows});
      }
      windows_.back().add(meaning.dim);
      table.window = static_cast<int64_t>(windows_.size()) - 1;
    }
  }

  // f(lookup, its bag b, the bag's number among those of the table).
  template <class F>
  static void for_each_bag(const TableEntries<T, U>& table, const F& f) {
    int64_t number = 0;
    for (const CollectionLookup* lookup : table.lookups) {
      for (int64_t b = 0; b < lookup->bags; ++b) f(*lookup, b, number++);
    }
  }

  void describe_weights(TableEntries<T, U>& table) const {
    const EntryGroups<U>& groups = group_of(table);
    if (input_.weights != nullptr) {
      table.by_entry = Buffer<A>(groups.entries);
      table.meaning.item_weights = table.by_entry.data();
      int64_t entry = 0;
      for (const CollectionLookup* lookup : table.lookups) {
        // Coefficients are written at the items' positions.
        A* at_first_item = table.by_entry.data() + entry - input_.starts[lookup->first_bag];
        input_.bags(*lookup).coefficients(0, lookup->bags, lookup->mode, at_first_item);
        entry += input_.items(*lookup);
      }
      return;
    }
    const bool divides = std::any_of(table.lookups.begin(), table.lookups.end(), [&](const CollectionLookup* lookup) {
      return (lookup->mode == Reduction::kMean || lookup->mode == Reduction::kSqrtN) && !one_each(*lookup);
    });
    if (!divides) return;
    table.by_bag = Buffer<A>(groups.bags);
    table.meaning.segment_weights = table.by_bag.data();
    int64_t number = 0;
    for (const CollectionLookup* lookup : table.lookups) {
      const Bags<T, I> bags = input_.bags(*lookup);
      for (int64_t b = 0; b < lookup->bags; ++b) table.by_bag[number++] = bags.coefficient(b, lookup->mode);
    }
  }

  void describe_winners(TableEntries<T, U>& table, const int64_t* argmax) const {
    const EntryGroups<U>& groups = group_of(table);
    table.winner_places = Buffer<int64_t>(groups.bags);
    table.position_shifts = Buffer<int64_t>(groups.bags);
    table.meaning.winners = argmax;
    table.meaning.winner_places = table.winner_places.data();
    table.meaning.position_shifts = table.position_shifts.data();
    int64_t entry = 0, number = 0;
    for (const CollectionLookup* lookup : table.lookups) {
      const bool max = lookup->mode == Reduction::kMax;
      for (int64_t b = 0; b < lookup->bags; ++b, ++number) {
        table.winner_places[number] = max ? lookup->argmax + b * lookup->dim : -1;
        table.position_shifts[number] = input_.starts[lookup->first_bag] - entry;
      }
      entry += input_.items(*lookup);
    }
  }

  const CollectionInput<T, I>& input_;
  std::vector<bool> one_each_;  // by key
  std::vector<EntryGroups<U>> groups_;
  std::vector<TableEntries<T, U>> tables_;
  std::vector<ColumnWindow<T>> windows_;
};

// Calls f(type_tag<U>) with the width that rows, entries and places of the tables need.
template <class T, class I, class F>
void dispatch_collection_width(const CollectionInput<T, I>& input, const F& f) {
  const Collection& c = input.c;
  int64_t entries = 0, rows = 0;
  for (const CollectionLookup& lookup : c.lookups) entries += input.items(lookup);
  for (const int64_t count : c.num_embeddings) rows = std::max(rows, count);
  dispatch_width(fits_32_bits(rows, std::max(entries, c.bags), c.output_elements), f);
}

}  // namespace tsr
