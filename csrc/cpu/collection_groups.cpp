// Grouping the entries of a collection's tables, and describing what they mean to each table.
#include "collection_groups.h"

#include <map>

namespace tsr {
namespace {

// Entries, for which the tables' dtype is of no account.
template <class I, class U>
class EntryGrouping {
 public:
  EntryGrouping(const CollectionIds<I>& input, bool weighted)
      : input_(input), weighted_(weighted), one_each_(one_entry_each()) {}

  bool one_each(const CollectionLookup& lookup) const { return one_each_[static_cast<size_t>(lookup.key)]; }

  // Which of the groups are those of table k, with these lookups.
  int64_t add(int64_t k, const std::vector<const CollectionLookup*>& lookups) {
    const size_t at = static_cast<size_t>(k);
    const Collection& c = input_.c;
    bool by_entry = weighted_;
    std::vector<int64_t> keys;
    for (const CollectionLookup* lookup : lookups) {
      by_entry |= is_extreme(lookup->mode);
      keys.push_back(lookup->key);
    }
    std::vector<int64_t> name = keys;
    name.insert(name.end(), {c.num_embeddings[at], c.padding_idx[at], by_entry});
    const auto [found, is_new] = known_.emplace(std::move(name), static_cast<int64_t>(groups_.size()));
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
    return found->second;
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

  std::vector<EntryGroups<U>> take() { return std::move(groups_); }

 private:
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

  const CollectionIds<I>& input_;
  const bool weighted_;
  const std::vector<bool> one_each_;  // by key
  std::map<std::vector<int64_t>, int64_t> known_;
  std::vector<EntryGroups<U>> groups_;
};

// What the entries mean to each table.
template <class T, class I, class U>
class TableDescription {
 public:
  using A = acc_t<T>;

  TableDescription(const CollectionInput<T, I>& input, const EntryGrouping<I, U>& grouping, CollectionTables<T, U>& all)
      : input_(input), grouping_(grouping), all_(all) {}

  void describe(const T* grad, const int64_t* argmax) {
    int64_t work = 0;
    for (const TableEntries<T, U>& table : all_.tables) work += group_of(table).entries + group_of(table).bags;
    parallel_dynamic(static_cast<int64_t>(all_.tables.size()), workers_for(work * 4),
                     [&](int64_t, int64_t t) { describe_table(all_.tables[static_cast<size_t>(t)], grad, argmax); });
  }

  void find_windows() {
    for (TableEntries<T, U>& table : all_.tables) {
      const ItemMeaning<T, U>& meaning = table.meaning;
      if (table.lookups.size() != 1) continue;
      const int64_t rows = table.lookups[0]->bags;
      if (!GradColumns<T>::pay(meaning.stride, rows, meaning.dim, group_of(table).entries)) continue;
      if (all_.windows.empty() || !all_.windows.back().takes(meaning.grad, meaning.stride, rows, meaning.dim)) {
        all_.windows.push_back({meaning.grad, meaning.stride, rows});
      }
      all_.windows.back().add(meaning.dim);
      table.window = static_cast<int64_t>(all_.windows.size()) - 1;
    }
  }

 private:
  const EntryGroups<U>& group_of(const TableEntries<T, U>& table) const {
    return all_.groups[static_cast<size_t>(table.group)];
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
                    [](const CollectionLookup* lookup) { return is_extreme(lookup->mode); })) {
      describe_winners(table, argmax);
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
      return is_divided(lookup->mode) && !grouping_.one_each(*lookup);
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
      const bool extreme = is_extreme(lookup->mode);
      for (int64_t b = 0; b < lookup->bags; ++b, ++number) {
        table.winner_places[number] = extreme ? lookup->argmax + b * lookup->dim : -1;
        table.position_shifts[number] = input_.starts[lookup->first_bag] - entry;
      }
      entry += input_.items(*lookup);
    }
  }

  const CollectionInput<T, I>& input_;
  const EntryGrouping<I, U>& grouping_;
  CollectionTables<T, U>& all_;
};

}  // namespace

template <class U, class T, class I>
CollectionTables<T, U> group_tables(const CollectionInput<T, I>& input, const T* grad, const int64_t* argmax,
                                    const std::vector<bool>& wanted, GradientRows written) {
  const Collection& c = input.c;
  std::vector<std::vector<const CollectionLookup*>> of_table(static_cast<size_t>(c.tables()));
  for (const CollectionLookup& lookup : c.lookups) of_table[static_cast<size_t>(lookup.table)].push_back(&lookup);
  EntryGrouping<I, U> grouping(input, input.weights != nullptr);
  CollectionTables<T, U> all;
  for (int64_t k = 0; k < c.tables(); ++k) {
    const size_t at = static_cast<size_t>(k);
    if (!wanted[at] || (written == GradientRows::kPresent && of_table[at].empty())) continue;
    all.tables.push_back({k, of_table[at], grouping.add(k, of_table[at])});
  }
  grouping.build_groups(written);
  all.groups = grouping.take();
  TableDescription<T, I, U> description(input, grouping, all);
  description.describe(grad, argmax);
  description.find_windows();
  return all;
}

#define TSR_INSTANTIATE_WIDTHS(T, I, U)                                                                         \
  template CollectionTables<T, U> group_tables<U, T, I>(const CollectionInput<T, I>&, const T*, const int64_t*, \
                                                        const std::vector<bool>&, GradientRows);
#define TSR_INSTANTIATE(T)                     \
  TSR_INSTANTIATE_WIDTHS(T, int32_t, uint32_t) \
  TSR_INSTANTIATE_WIDTHS(T, int32_t, int64_t)  \
  TSR_INSTANTIATE_WIDTHS(T, int64_t, uint32_t) \
  TSR_INSTANTIATE_WIDTHS(T, int64_t, int64_t)
TSR_INSTANTIATE(float)
TSR_INSTANTIATE(double)
TSR_INSTANTIATE(Half)
TSR_INSTANTIATE(BFloat16)
#undef TSR_INSTANTIATE
#undef TSR_INSTANTIATE_WIDTHS

}  // namespace tsr
