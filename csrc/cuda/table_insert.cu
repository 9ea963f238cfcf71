// Find or insert, in one table or in several: each has a part of the keys, and all share one pass.
//
// Every key is looked up. The positions whose keys are missing and may be inserted enter a table of this call's keys,
// so that the first position of each key is known, and of a key's many occurrences only that one is inserted. The
// firsts take slots, each region's by one thread in their order; those that got one are numbered in the order of
// positions, and the number says which row is theirs. Where rows run out, the last ones give their slots back. At last
// all other positions read what their first one got. Where no key is missing, kernels that only insert return at once.
#include "table.cuh"
#include "table_shards.cuh"

namespace tsr {
namespace {

// In the table of the call's keys: an empty slot. As the number of a slot: the key had a row before.
constexpr uint32_t kNone = 0xffffffff;
// As the number of a slot: the key is missing and must not be inserted here, or no table has it.
constexpr uint32_t kNotAllowed = kNone - 1;

// A table, and the positions of its keys.
struct Part {
  TableView table;
  int64_t* counters;
  const int32_t* free_rows;
  int64_t num_free;
  int64_t version;
  int64_t begin, end;
  int64_t first_region;  // of the regions of all tables, its first

  __device__ bool has(int64_t position) const { return position >= begin && position < end; }
  __device__ int64_t reusable() const { return num_free - counters[kReused]; }
  // The k-th row that is free, or -1.
  __device__ int64_t free_row(int64_t k) const {
    if (k < reusable()) return free_rows[counters[kReused] + k];
    const int64_t row = counters[kUsed] + (k - reusable());
    return row < table.rows ? row : -1;
  }
};

// The call's keys that are missing: a slot holds the first position of one. There are at most 2^32 - 2 slots.
struct MissingKeys {
  Keys ids;
  uint32_t* slots;    // [capacity]
  uint32_t* slot_of;  // [n]: that of the key at each position, or kNone or kNotAllowed
  uint64_t capacity;

  __device__ bool is_missing(int64_t i) const { return slot_of[i] < kNotAllowed; }
  __device__ int64_t first_of(int64_t i) const { return slots[slot_of[i]]; }

  // What a slot holds may be out of date: a later position of the same key, or none yet.
  __device__ void enter(int64_t i, int64_t key, const Part& part) const {
    const uint32_t position = static_cast<uint32_t>(i);
    // Keys of different tables are different.
    const uint64_t mixed = static_cast<uint64_t>(key) ^ static_cast<uint64_t>(part.begin) * 0x9E3779B97F4A7C15ull;
    uint64_t slot = __umul64hi(hash_key(static_cast<int64_t>(mixed)), capacity);
    for (;; slot = slot + 1 == capacity ? 0 : slot + 1) {
      uint32_t found = relaxed_load(&slots[slot]);
      if (found == kNone) found = atomicCAS(&slots[slot], kNone, position);
      if (found == kNone) break;
      if (ids[found] != key || !part.has(found)) continue;
      if (found > position) atomicMin(&slots[slot], position);
      break;
    }
    slot_of[i] = static_cast<uint32_t>(slot);
  }
};

struct Insertion {
  const Part* parts;  // ascending
  int64_t num_parts;
  Keys ids;
  int64_t n;
  MissingKeys missing;
  int64_t regions;             // of all tables
  const bool* allowed;         // null: all are
  const int32_t* frequencies;  // null: none are given
  bool count;
  ErrorSink errors;
  int32_t* refused;        // [num_parts]: 1: the caller's counters or free rows cannot be, and nothing may change
  int32_t* any_missing;    // 1: some key is to be inserted
  Pairs<uint32_t> firsts;  // [n]: the region of firsts, else `regions`; and the position
  int32_t* taken;          // [n]: the slots of firsts that have one
  int64_t* news;           // [n + 1]: 1 for the firsts that have a slot
  int64_t* before;         // [n + 1]: how many of them come before
  int64_t* rows;           // [n]
  int64_t* born;           // [n]

  // The number of the table that has the key at a position, or -1.
  __device__ int64_t part_at(int64_t i) const {
    int64_t low = 0, high = num_parts;  // the first table whose keys end behind it
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (parts[middle].end <= i) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < num_parts && parts[low].begin <= i ? low : -1;
  }
  // How many of its table's new keys come before a position.
  __device__ int64_t number_of(const Part& part, int64_t i) const { return before[i] - before[part.begin]; }

  // Notes an occurrence of a row. Frequency and version are the halves of one word, apart from each other.
  __device__ void touch(const Part& part, int64_t row, bool count_it) const {
    uint32_t* const halves = reinterpret_cast<uint32_t*>(part.table.entries + 2 * row + 1);
    constexpr uint32_t kMost = static_cast<uint32_t>(kMostFrequency);
    const uint32_t known = relaxed_load(&halves[0]);
    if (count_it && known <= kMost - static_cast<uint32_t>(n)) {
      atomicAdd(&halves[0], 1u);
    } else if (count_it && known < kMost && atomicAdd(&halves[0], 1u) >= kMost) {
      atomicMin(&halves[0], kMost);  // whoever has gone beyond the most goes back to it
    }
    if (part.version >= 0) relaxed_store(&halves[1], static_cast<uint32_t>(part.version));
  }
};

// One thread per table.
__global__ void check_counters_kernel(Insertion in) {
  if (thread_index() == 0) *in.any_missing = 0;
  for (int64_t p = thread_index(); p < in.num_parts; p += thread_count()) {
    const Part& part = in.parts[p];
    in.refused[p] = 0;
    const auto check = [&](TableCounter counter, int64_t most) {
      const int64_t value = part.counters[counter];
      if (value >= 0 && value <= most) return;
      in.errors.report(Argument::kCounters, Fault::kOutsideClosed, counter, value, most);
      in.refused[p] = 1;
    };
    check(kUsed, part.table.rows);
    check(kReused, part.num_free);
  }
}

// One thread per position.
__global__ void look_up_kernel(Insertion in) {
  for (int64_t i = thread_index(); i < in.n; i += thread_count()) {
    const int64_t key = in.ids[i], p = in.part_at(i);
    const int64_t row = p < 0 ? key : in.parts[p].table.find(key).row;
    in.rows[i] = row;
    in.born[i] = -1;
    if (p >= 0 && row >= 0) {
      in.missing.slot_of[i] = kNone;
    } else if (p < 0 || in.refused[p] != 0 || (in.allowed != nullptr && !in.allowed[i])) {
      in.missing.slot_of[i] = kNotAllowed;
    } else {
      in.missing.enter(i, key, in.parts[p]);
      if (relaxed_load(in.any_missing) == 0) relaxed_store(in.any_missing, 1);
    }
  }
}

// One thread per position.
__global__ void firsts_kernel(Insertion in) {
  for (int64_t i = thread_index(); i < in.n; i += thread_count()) {
    int64_t region = in.regions;
    if (in.missing.is_missing(i) && in.missing.first_of(i) == i) {
      const Part& part = in.parts[in.part_at(i)];
      region = part.first_region + region_of(part.table.shape, part.table.hash(in.ids[i]));
    }
    in.firsts.keys[i] = static_cast<uint32_t>(region);
    in.firsts.values[i] = static_cast<uint32_t>(i);
    in.news[i] = 0;
  }
}

// One thread per region.
__global__ void take_slots_kernel(Insertion in, RegionItems regions) {
  if (*in.any_missing == 0) return;
  insert_regions(
      regions, [&](int64_t i) { return in.ids[i]; },
      [&](int64_t i, int64_t key) {
        const int32_t slot = in.parts[in.part_at(i)].table.insert(key, 0);
        in.taken[i] = slot;
        if (slot >= 0) in.news[i] = 1;
      });
}

// One thread per position: those that will be given a row again look at what the list says of it.
__global__ void check_free_rows_kernel(Insertion in) {
  if (*in.any_missing == 0) return;
  for (int64_t i = thread_index(); i < in.n; i += thread_count()) {
    if (in.news[i] == 0) continue;
    const int64_t p = in.part_at(i);
    const Part& part = in.parts[p];
    const int64_t number = in.number_of(part, i), first = part.counters[kReused], used = part.counters[kUsed];
    if (number >= part.reusable()) continue;
    if (is_reusable(part.table.entries, part.free_rows, first + number, first, used)) continue;
    in.errors.report(Argument::kFreeRows, Fault::kNotFree, first + number, part.free_rows[first + number], used);
    relaxed_store(&in.refused[p], 1);
  }
}

// One thread per position: those of new keys write their row, or give the slot back.
__global__ void give_rows_kernel(Insertion in) {
  if (*in.any_missing == 0) return;
  for (int64_t i = thread_index(); i < in.n; i += thread_count()) {
    if (in.news[i] == 0) continue;
    const int64_t p = in.part_at(i), key = in.ids[i];
    const Part& part = in.parts[p];
    const int64_t row = in.refused[p] != 0 ? -1 : part.free_row(in.number_of(part, i));
    if (row < 0) {
      part.table.erase(key, in.taken[i]);
      continue;
    }
    part.table.write_row(key, in.taken[i], static_cast<int32_t>(row));
    part.table.entries[2 * row] = key;
    part.table.entries[2 * row + 1] =
        pack_entry(max(part.version, int64_t{0}), in.frequencies == nullptr ? 0 : max(in.frequencies[i], 0));
    in.rows[i] = row;
    in.born[i] = row;
  }
}

// One thread per position: those of keys that were missing read their rows, and rows note that they occur. The first
// threads count their tables' new rows.
__global__ void read_rows_kernel(Insertion in) {
  for (int64_t p = thread_index(); p < in.num_parts && *in.any_missing != 0; p += thread_count()) {
    const Part& part = in.parts[p];
    if (in.refused[p] != 0) continue;
    const int64_t reusable = part.reusable(), unused = part.table.rows - part.counters[kUsed];
    const int64_t given = min(in.number_of(part, part.end), reusable + unused), reused = min(given, reusable);
    part.counters[kReused] += reused;
    part.counters[kUsed] += given - reused;
    part.counters[kInserted] += given;
  }
  for (int64_t i = thread_index(); i < in.n; i += thread_count()) {
    const int64_t p = in.part_at(i);
    if (p < 0 || in.refused[p] != 0) continue;
    const Part& part = in.parts[p];
    const bool was_there = in.missing.slot_of[i] == kNone, may_insert = in.missing.is_missing(i);
    int64_t row = in.rows[i];
    if (may_insert && in.missing.first_of(i) != i) {
      // A first has its row already, and no one writes it here.
      row = in.rows[in.missing.first_of(i)];
      in.rows[i] = row;
    } else if (!may_insert && !was_there) {
      row = part.table.find(in.ids[i]).row;
      in.rows[i] = row;
    }
    if (row >= 0) in.touch(part, row, in.count && (was_there || in.frequencies == nullptr));
    if (row < 0 && may_insert) atomicAdd(reinterpret_cast<unsigned long long*>(part.counters + kFailed), 1ull);
  }
}

std::tuple<Tensor, Tensor> find_or_insert(DeviceCall& call, std::vector<Part> parts, const Tensor& ids,
                                          const std::optional<Tensor>& allowed,
                                          const std::optional<Tensor>& frequencies, bool count) {
  const int64_t n = ids.size(0), tables = static_cast<int64_t>(parts.size());
  const Tensor rows = call.empty({n}, ScalarType::Long), born = call.empty({n}, ScalarType::Long);
  const Keys keys = keys_of(call, ids);
  const int64_t capacity = std::max<int64_t>(2 * n, 1);
  int64_t regions = 0, free_rows = 0;
  for (Part& part : parts) {
    part.first_region = regions;
    regions += part.table.shape.regions;
    free_rows += part.num_free;
  }
  const Insertion in{
      upload(call, parts),
      tables,
      keys,
      n,
      {keys, call.workspace<uint32_t>(capacity), call.workspace<uint32_t>(n), static_cast<uint64_t>(capacity)},
      regions,
      allowed ? call.data<bool>(*allowed) : nullptr,
      frequencies ? call.data<int32_t>(*frequencies) : nullptr,
      count,
      call.errors(),
      call.workspace<int32_t>(tables),
      call.workspace<int32_t>(1),
      {call.workspace<uint32_t>(n), call.workspace<uint32_t>(n)},
      call.workspace<int32_t>(n),
      call.workspace<int64_t>(n + 1),
      call.workspace<int64_t>(n + 1),
      static_cast<int64_t*>(rows.data_ptr()),
      static_cast<int64_t*>(born.data_ptr())};
  launch(call, one_thread_each(std::max<int64_t>(tables, 1)), check_counters_kernel, in);
  if (n == 0) return {rows, born};
  const LaunchShape each = one_thread_each(n);
  fill_bytes(call.stream(), in.missing.slots, 0xff, static_cast<size_t>(capacity) * sizeof(uint32_t));
  launch(call, each, look_up_kernel, in);
  launch(call, each, firsts_kernel, in);
  launch(call, each, take_slots_kernel, in, sort_by_region(call, in.firsts, n, regions));
  sums_before(call, in.news, n, in.before);
  if (free_rows > 0) launch(call, each, check_free_rows_kernel, in);
  launch(call, each, give_rows_kernel, in);
  launch(call, each, read_rows_kernel, in);
  return {rows, born};
}

Part part_of(const Tensor& index, const Tensor& entries, const Tensor& counters, const Tensor& free_rows, int64_t begin,
             int64_t end, int64_t version) {
  return {view_of(index, entries),
          static_cast<int64_t*>(counters.data_ptr()),
          static_cast<const int32_t*>(free_rows.data_ptr()),
          free_rows.size(0),
          version,
          begin,
          end,
          0};
}

std::tuple<Tensor, Tensor> table_find_or_insert_cuda(const Tensor& index, const Tensor& entries, const Tensor& counters,
                                                     const Tensor& free_rows, const Tensor& ids,
                                                     const std::optional<Tensor>& allowed,
                                                     const std::optional<Tensor>& frequencies, int64_t version,
                                                     bool count) {
  check_table_insert(index, entries, counters, free_rows, ids, allowed, frequencies, version);
  DeviceCall call("table_find_or_insert_", ids);
  return find_or_insert(call, {part_of(index, entries, counters, free_rows, 0, ids.size(0), version)}, ids, allowed,
                        frequencies, count);
}

std::tuple<Tensor, Tensor> tables_find_or_insert_cuda(std::vector<Tensor> index, std::vector<Tensor> entries,
                                                      std::vector<Tensor> counters, std::vector<Tensor> free_rows,
                                                      const Tensor& ids, std::vector<int64_t> begins,
                                                      std::vector<int64_t> ends, std::vector<int64_t> versions,
                                                      bool count) {
  check_tables_insert(index, entries, counters, free_rows, ids, begins, ends, versions);
  DeviceCall call("tables_find_or_insert_", ids);
  std::vector<Part> parts;
  for (size_t k = 0; k < index.size(); ++k) {
    parts.push_back(part_of(index[k], entries[k], counters[k], free_rows[k], begins[k], ends[k], versions[k]));
  }
  return find_or_insert(call, std::move(parts), ids, std::nullopt, std::nullopt, count);
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "table_find_or_insert_", &tsr::table_find_or_insert_cuda);
  TSR_IMPL(m, "tables_find_or_insert_", &tsr::tables_find_or_insert_cuda);
}
