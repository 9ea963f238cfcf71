#include "embedding_collection_groups.cuh"
#include "pool_weighted.cuh"
#include "table_shards.cuh"

namespace tsr {

CollectionDivisors collection_divisors(DeviceCall& call, const Collection& c, const CollectionInput& input,
                                       ScalarType dtype, const void* weights, const std::vector<bool>& wanted) {
  const auto has_divisors = [&](const CollectionLookup& lookup) {
    return wanted[static_cast<size_t>(lookup.table)] && is_divided(lookup.mode);
  };
  CollectionDivisors result{nullptr, std::vector<int64_t>(c.lookups.size(), -1)};
  int64_t bags = 0;
  for (size_t l = 0; l < c.lookups.size(); ++l) {
    if (!has_divisors(c.lookups[l])) continue;
    result.first[l] = bags;
    bags += c.lookups[l].bags;
  }
  if (bags == 0) return result;
  with_accumulator(dtype, [&](auto tag) {
    using A = typename decltype(tag)::type;
    A* const divisors = call.workspace<A>(bags);
    result.divisors = divisors;
    const std::vector<int64_t> bounds = index_bounds(c);
    PartList list(1, 1);
    for (size_t l = 0; l < c.lookups.size(); ++l) {
      if (result.first[l] < 0) continue;
      Part part = part_of(c, c.lookups[l], bounds[l]);
      part.divisor = divisor_of(c.lookups[l].mode);
      part.out = result.first[l] * static_cast<int64_t>(sizeof(A));
      list.add(part);
    }
    PartInputs<A> in = inputs_of<A>(call, input);
    in.weights = static_cast<const A*>(weights);
    in.out = reinterpret_cast<uintptr_t>(divisors);
    launch_parts<DivisorOnly<A>, PartView<A>>(call, list, in, most_entries(c, input.items, has_divisors));
  });
  return result;
}

namespace {

// In words of 8 bytes: they are uploaded as such.
struct GroupedLookup {
  int64_t first_bag, bags;
  int64_t first_row;  // of its table, among those of the wanted tables
  int64_t rows;
  int64_t index_bound;
  int64_t padding_idx;
  int64_t output, stride;
  int64_t argmax;  // where the winners of its extremes begin, or -1
  int64_t dim;
  int64_t divisor;  // where its divisors begin, or -1
};

// Where entries come from. [lookups + 1]: first_entries, of which the last is the number of entries.
struct Entries {
  const GroupedLookup* lookups;
  int64_t lookup_count;
  const int64_t* first_entries;
  const int64_t* offsets;  // null: bags of one item each
  Integers indices;
  int64_t capacity;
  int64_t rows;  // of all wanted tables: the key of what counts for none

  __device__ int64_t offset(int64_t bag) const { return offsets == nullptr ? bag : offsets[bag]; }
};

// One block writes those of e.
__global__ void first_entries_kernel(Entries e, int64_t* first_entries) {
  const auto items_of = [&](int64_t l) {
    const GroupedLookup& lookup = e.lookups[l];
    const int64_t items = e.offset(lookup.first_bag + lookup.bags) - e.offset(lookup.first_bag);
    return items > 0 ? items : 0;
  };
  write_sums_before(e.lookup_count, items_of, first_entries);
}

// What is written of each entry. Null: not needed. If only its source is, that is its value, else its own number.
template <class A>
struct EntryOutputs {
  void* keys;
  void* values;
  bool wide;  // whether keys and values are
  int64_t* sources;
  A* coefficients;
  int64_t* won_at;
  int64_t* positions;

  __device__ void write_pair(int64_t entry, int64_t key, int64_t value) const {
    if (wide) {
      static_cast<uint64_t*>(keys)[entry] = static_cast<uint64_t>(key);
      static_cast<uint64_t*>(values)[entry] = static_cast<uint64_t>(value);
    } else {
      static_cast<uint32_t*>(keys)[entry] = static_cast<uint32_t>(key);
      static_cast<uint32_t*>(values)[entry] = static_cast<uint32_t>(value);
    }
  }
};

template <class A>
__device__ A coefficient_of(const A* weights, const A* divisors, int64_t item, int64_t divisor_at,
                            const ErrorSink& errors) {
  const A weight = weights == nullptr ? A(1) : weights[item];
  const bool is_nan = weight != weight;
  if (is_nan) errors.report(Argument::kWeights, Fault::kNotANumber, item, 0, 0);
  const A divisor = divisor_at < 0 ? A(1) : divisors[divisor_at];
  return is_nan || divisor == A(0) ? A(0) : weight / divisor;
}

// One thread per entry, and for what may come after the last of them: that counts for no row.
template <class A>
__global__ void entries_kernel(Entries e, const A* weights, const A* divisors, ErrorSink errors, EntryOutputs<A> out) {
  for (int64_t entry = thread_index(); entry < e.capacity; entry += thread_count()) {
    int64_t key = e.rows, source = -1, won_at = -1, item = -1;
    A coefficient = 0;
    if (entry < e.first_entries[e.lookup_count]) {
      const int64_t l = lower_bound(e.first_entries, e.lookup_count, entry + 1) - 1;
      const GroupedLookup& lookup = e.lookups[l];
      item = e.offset(lookup.first_bag) + entry - e.first_entries[l];
      int64_t bag = item - lookup.first_bag;
      if (e.offsets != nullptr) bag = BagOf{e.offsets + lookup.first_bag, lookup.bags}(item);
      const int64_t index = e.indices[item];
      const bool in_range = index >= 0 && index < lookup.rows;
      const bool is_left_out = index == lookup.rows && lookup.padding_idx == lookup.rows;
      if (!in_range && !is_left_out) {
        errors.report(Argument::kIndices, Fault::kOutOfRange, item, index, lookup.index_bound);
      }
      if (in_range && index != lookup.padding_idx) key = lookup.first_row + index;
      if (bag >= 0) {
        source = lookup.output + bag * lookup.stride;
        if (lookup.argmax >= 0) won_at = lookup.argmax + bag * lookup.dim;
      }
      if (out.coefficients != nullptr) {
        const int64_t divisor_at = lookup.divisor < 0 || bag < 0 ? -1 : lookup.divisor + bag;
        coefficient = coefficient_of(weights, divisors, item, divisor_at, errors);
      }
    }
    out.write_pair(entry, key, out.sources == nullptr ? source : entry);
    if (out.sources != nullptr) out.sources[entry] = source;
    if (out.coefficients != nullptr) out.coefficients[entry] = coefficient;
    if (out.won_at != nullptr) out.won_at[entry] = won_at;
    if (out.positions != nullptr) out.positions[entry] = item;
  }
}

// to[j] = from[order[j]]. One thread per sorted entry; those that are null are not there.
template <class A>
struct Moved {
  const A* from;
  A* to;
  __device__ void move(int64_t j, int64_t entry) const {
    if (from != nullptr) to[j] = from[entry];
  }
};

template <class A>
__global__ void move_entries_kernel(Integers order, int64_t entries, Moved<int64_t> sources, Moved<A> coefficients,
                                    Moved<int64_t> won_at, Moved<int64_t> positions) {
  for (int64_t j = thread_index(); j < entries; j += thread_count()) {
    const int64_t entry = order[j];
    sources.move(j, entry);
    coefficients.move(j, entry);
    won_at.move(j, entry);
    positions.move(j, entry);
  }
}

// The wanted tables' lookups.
std::vector<GroupedLookup> grouped_lookups(const CollectionGradient& in, const CollectionGroups& groups,
                                           const CollectionDivisors& divisors) {
  const std::vector<int64_t> bounds = index_bounds(in.c);
  std::vector<int64_t> first_rows(static_cast<size_t>(in.c.tables()));
  for (size_t w = 0; w < groups.tables.size(); ++w) {
    first_rows[static_cast<size_t>(groups.tables[w])] = groups.first_rows[w];
  }
  std::vector<GroupedLookup> grouped;
  for (size_t l = 0; l < in.c.lookups.size(); ++l) {
    const CollectionLookup& lookup = in.c.lookups[l];
    const size_t table = static_cast<size_t>(lookup.table);
    if (!in.wanted[table]) continue;
    grouped.push_back({lookup.first_bag, lookup.bags, first_rows[table], in.c.num_embeddings[table], bounds[l],
                       in.c.padding_idx[table], lookup.output, lookup.stride,
                       is_extreme(lookup.mode) ? lookup.argmax : -1, lookup.dim, divisors.first[l]});
  }
  return grouped;
}

template <class K>
Pairs<K> pairs_of(DeviceCall& call, int64_t n) {
  return {call.workspace<K>(n), call.workspace<K>(n)};
}

// Sorts the pairs that write(keys, values) writes.
template <class K, class F>
Pairs<K> sorted_pairs_of(DeviceCall& call, const RowGroups& groups, const F& write) {
  const Pairs<K> pairs = pairs_of<K>(call, groups.entries), spare = pairs_of<K>(call, groups.entries);
  write(pairs.keys, pairs.values);
  int bits = 1;
  while (bits < 64 && (groups.rows >> bits) != 0) ++bits;
  return sort_pairs(call, pairs, spare, groups.entries, bits);
}

template <class A>
void group_entries_of(DeviceCall& call, const CollectionGradient& in, const CollectionInput& input,
                      CollectionGroups& groups, Uploads& uploads) {
  const A* const weights = static_cast<const A*>(accumulated(call, in.per_sample_weights));
  const CollectionDivisors of_bags = collection_divisors(call, in.c, input, in.grad.scalar_type(), weights, in.wanted);
  const A* const divisors = static_cast<const A*>(of_bags.divisors);
  const std::vector<GroupedLookup> grouped = grouped_lookups(in, groups, of_bags);
  bool has_extremes = false;
  for (const GroupedLookup& lookup : grouped) has_extremes = has_extremes || lookup.argmax >= 0;

  const int64_t n = groups.groups.entries, count = static_cast<int64_t>(grouped.size());
  int64_t* const first_entries = call.workspace<int64_t>(count + 1);
  const size_t lookups = uploads.add(grouped);
  uploads.send(call);
  const Entries entries{uploads.at<GroupedLookup>(lookups),
                        count,
                        first_entries,
                        input.offsets,
                        {input.indices, input.index_dtype == ScalarType::Long},
                        n,
                        groups.groups.rows};
  launch(call, {1}, first_entries_kernel, entries, first_entries);

  EntryOutputs<A> out{};
  const bool has_coefficients = weights != nullptr || divisors != nullptr;
  if (has_coefficients || has_extremes) out.sources = call.workspace<int64_t>(n);
  if (has_coefficients) out.coefficients = call.workspace<A>(n);
  if (has_extremes) {
    out.won_at = call.workspace<int64_t>(n);
    out.positions = call.workspace<int64_t>(n);
  }
  out.wide = groups.groups.wide;
  const auto write = [&](void* keys, void* values) {
    out.keys = keys;
    out.values = values;
    launch(call, one_thread_each(n), entries_kernel<A>, entries, weights, divisors, call.errors(), out);
  };
  if (out.wide) {
    groups.groups.wide_pairs = sorted_pairs_of<uint64_t>(call, groups.groups, write);
  } else {
    groups.groups.narrow_pairs = sorted_pairs_of<uint32_t>(call, groups.groups, write);
  }
  groups.sources = {groups.groups.sources(), out.wide};
  if (out.sources == nullptr) return;

  const auto moved = [&](const auto* from) {
    using E = std::remove_cv_t<std::remove_pointer_t<decltype(from)>>;
    return Moved<E>{from, from == nullptr ? nullptr : call.workspace<E>(n)};
  };
  const auto sources = moved(out.sources), won_at = moved(out.won_at), positions = moved(out.positions);
  const auto coefficients = moved(out.coefficients);
  launch(call, one_thread_each(n), move_entries_kernel<A>, groups.sources, n, sources, coefficients, won_at, positions);
  groups.sources = {sources.to, /*are_long=*/true};
  groups.coefficients = coefficients.to;
  groups.won_at = won_at.to;
  groups.positions = positions.to;
  if (has_extremes) groups.winners = call.data<int64_t>(*in.argmax);
}

// One thread per wanted table, and one for the end.
template <class K>
__global__ void table_groups_kernel(const K* keys, RowRuns runs, const int64_t* first_rows, int64_t tables,
                                    int64_t* bounds) {
  for (int64_t w = thread_index(); w <= tables; w += thread_count()) {
    bounds[w] = first_group(runs, first_rows[w], [&](int64_t j) { return static_cast<int64_t>(keys[j]); });
  }
}

}  // namespace

const int64_t* first_groups_of_tables(DeviceCall& call, const CollectionGroups& groups, const RowRuns& runs) {
  const int64_t tables = static_cast<int64_t>(groups.tables.size());
  int64_t* const bounds = call.workspace<int64_t>(tables + 1);
  with_pairs(groups.groups, [&](const auto& pairs) {
    using K = std::remove_pointer_t<decltype(pairs.keys)>;
    launch(call, one_thread_each(tables + 1), table_groups_kernel<K>, static_cast<const K*>(pairs.keys), runs,
           groups.first_rows_there, tables, bounds);
  });
  return bounds;
}

Part part_of_groups(const CollectionGradient& in, const CollectionGroups& groups, size_t w) {
  Part part;
  part.rows = groups.grad;
  part.row_stride = 1;  // a source is an element
  part.row_count = in.c.output_elements;
  part.columns = static_cast<int32_t>(in.c.dims[static_cast<size_t>(groups.tables[w])]);
  bool aligned = true;
  for (const CollectionLookup& lookup : in.c.lookups) {
    if (lookup.table != groups.tables[w]) continue;
    const uint8_t* const first = static_cast<const uint8_t*>(groups.grad) + lookup.output * in.grad.element_size();
    aligned = aligned && moves_wide(first, lookup.stride, lookup.dim, in.grad.element_size());
  }
  part.rows_aligned = aligned;
  return part;
}

CollectionGroups start_groups(DeviceCall& call, const CollectionGradient& in, int64_t items) {
  CollectionGroups groups{};
  groups.grad = call.data(in.grad);
  groups.first_rows.push_back(0);
  for (int64_t table = 0; table < in.c.tables(); ++table) {
    if (!in.wanted[static_cast<size_t>(table)]) continue;
    groups.tables.push_back(table);
    groups.first_rows.push_back(groups.first_rows.back() + in.c.num_embeddings[static_cast<size_t>(table)]);
  }
  const int64_t rows = groups.first_rows.back();
  const int64_t entries = most_entries(
      in.c, items, [&](const CollectionLookup& lookup) { return in.wanted[static_cast<size_t>(lookup.table)]; });
  constexpr int64_t kLargestKey = std::numeric_limits<uint32_t>::max();
  constexpr int64_t kLargestSource = std::numeric_limits<int32_t>::max();
  const bool wide = rows > kLargestKey || std::max(entries, in.c.output_elements) > kLargestSource;
  groups.groups = RowGroups{entries, rows, wide};
  return groups;
}

void group_entries(DeviceCall& call, const CollectionGradient& in, const CollectionInput& input,
                   CollectionGroups& groups, Uploads& uploads) {
  const size_t first_rows = uploads.add(groups.first_rows);
  with_accumulator(in.grad.scalar_type(),
                   [&](auto tag) { group_entries_of<typename decltype(tag)::type>(call, in, input, groups, uploads); });
  groups.first_rows_there = uploads.at<int64_t>(first_rows);
}

}  // namespace tsr
