// Find or insert.
//
// Every key is looked up. The positions whose keys are missing and may be inserted enter a table of this call's keys,
// so that the first position of each key is known, and of a key's many occurrences only that one is inserted. The
// firsts take slots, each region's by one thread in their order; those that got one are numbered in the order of
// positions, and the number says which row is theirs. Where rows run out, the last ones give their slots back. At last
// all other positions read what their first one got.
#include "table.cuh"

namespace tsr {
namespace {

// In the table of the call's keys: an empty slot. As the number of a slot: the key had a row before.
constexpr uint32_t kNone = 0xffffffff;
// As the number of a slot: the key is missing and must not be inserted here.
constexpr uint32_t kNotAllowed = kNone - 1;

// The call's keys that are missing: a slot holds the first position of one. There are at most 2^32 - 2 slots.
struct MissingKeys {
  Keys ids;
  uint32_t* slots;    // [capacity]
  uint32_t* slot_of;  // [n]: that of the key at each position, or kNone or kNotAllowed
  uint64_t capacity;

  __device__ bool is_missing(int64_t i) const { return slot_of[i] < kNotAllowed; }
  __device__ int64_t first_of(int64_t i) const { return slots[slot_of[i]]; }

  // What a slot holds may be out of date: a later position of the same key, or none yet.
  __device__ void enter(int64_t i, int64_t key) const {
    const uint32_t position = static_cast<uint32_t>(i);
    uint64_t slot = __umul64hi(hash_key(key), capacity);
    for (;; slot = slot + 1 == capacity ? 0 : slot + 1) {
      uint32_t found = relaxed_load(&slots[slot]);
      if (found == kNone) found = atomicCAS(&slots[slot], kNone, position);
      if (found == kNone) break;
      if (ids[found] != key) continue;
      if (found > position) atomicMin(&slots[slot], position);
      break;
    }
    slot_of[i] = static_cast<uint32_t>(slot);
  }
};

struct Insertion {
  TableView table;
  Keys ids;
  int64_t n;
  MissingKeys missing;
  int64_t* counters;
  const int32_t* free_rows;
  int64_t num_free;
  const bool* allowed;         // null: all are
  const int32_t* frequencies;  // null: none are given
  int64_t version;
  bool count;
  ErrorSink errors;
  int32_t* refused;  // 1: the caller's counters or free rows cannot be, and nothing may change
  int32_t* regions;  // [n]: those of firsts, else -1
  int32_t* taken;    // [n]: the slots of firsts that have one
  int64_t* news;     // [n + 1]: 1 for the firsts that have a slot
  int64_t* before;   // [n + 1]: how many of them come before
  int64_t* rows;     // [n]
  int64_t* born;     // [n]

  // Adding one cannot reach the version: there are fewer than 2^31 positions. touch_rows_kernel sees to the most.
  __device__ void count_occurrence(int64_t row) const {
    atomicAdd(reinterpret_cast<unsigned long long*>(table.entries + 2 * row + 1), 1ull);
  }

  __device__ int64_t reusable() const { return num_free - counters[kReused]; }
  // The k-th row that is free, or -1.
  __device__ int64_t free_row(int64_t k) const {
    if (k < reusable()) return free_rows[counters[kReused] + k];
    const int64_t row = counters[kUsed] + (k - reusable());
    return row < table.rows ? row : -1;
  }
};

// One thread.
__global__ void check_counters_kernel(Insertion in) {
  *in.refused = 0;
  const auto check = [&](TableCounter counter, int64_t most) {
    const int64_t value = in.counters[counter];
    if (value >= 0 && value <= most) return;
    in.errors.report(Argument::kCounters, Fault::kOutsideClosed, counter, value, most);
    *in.refused = 1;
  };
  check(kUsed, in.table.rows);
  check(kReused, in.num_free);
}

// One thread per position.
__global__ void look_up_kernel(Insertion in) {
  for (int64_t i = thread_index(); i < in.n; i += thread_count()) {
    const int64_t key = in.ids[i];
    const int64_t row = in.table.find(key).row;
    in.rows[i] = row;
    in.born[i] = -1;
    if (row >= 0) {
      in.missing.slot_of[i] = kNone;
    } else if (*in.refused != 0 || (in.allowed != nullptr && !in.allowed[i])) {
      in.missing.slot_of[i] = kNotAllowed;
    } else {
      in.missing.enter(i, key);
    }
  }
}

// One thread per position.
__global__ void regions_of_firsts_kernel(Insertion in) {
  for (int64_t i = thread_index(); i < in.n; i += thread_count()) {
    const bool is_first = in.missing.is_missing(i) && in.missing.first_of(i) == i;
    in.regions[i] = is_first ? static_cast<int32_t>(region_of(in.table.shape, in.table.hash(in.ids[i]))) : -1;
    in.news[i] = 0;
  }
}

// One thread per region.
__global__ void take_slots_kernel(Insertion in, RegionItems regions) {
  insert_regions(
      regions, [&](int64_t i) { return in.ids[i]; },
      [&](int64_t i, int64_t key) {
        const int32_t slot = in.table.insert(key, 0);
        in.taken[i] = slot;
        if (slot >= 0) in.news[i] = 1;
      });
}

// One thread per row that will be given out again.
__global__ void check_free_rows_kernel(Insertion in) {
  const int64_t first = in.counters[kReused], used = in.counters[kUsed];
  for (int64_t k = thread_index(); k < min(in.before[in.n], in.reusable()); k += thread_count()) {
    if (is_reusable(in.table.entries, in.free_rows, first + k, first, used)) continue;
    in.errors.report(Argument::kFreeRows, Fault::kNotFree, first + k, in.free_rows[first + k], used);
    relaxed_store(in.refused, 1);
  }
}

// One thread per position: those of new keys write their row, or give the slot back.
__global__ void give_rows_kernel(Insertion in) {
  for (int64_t i = thread_index(); i < in.n; i += thread_count()) {
    if (in.news[i] == 0) continue;
    const int64_t row = *in.refused != 0 ? -1 : in.free_row(in.before[i]), key = in.ids[i];
    if (row < 0) {
      in.table.erase(key, in.taken[i]);
      continue;
    }
    in.table.write_row(key, in.taken[i], static_cast<int32_t>(row));
    in.table.entries[2 * row] = key;
    in.table.entries[2 * row + 1] =
        pack_entry(max(in.version, int64_t{0}), in.frequencies == nullptr ? 0 : max(in.frequencies[i], 0));
    in.rows[i] = row;
    in.born[i] = row;
  }
}

// One thread per position: those of keys that were missing read their rows. The first thread counts the rows.
__global__ void read_rows_kernel(Insertion in) {
  if (*in.refused != 0) return;
  if (thread_index() == 0) {
    const int64_t reusable = in.reusable(), unused = in.table.rows - in.counters[kUsed];
    const int64_t given = min(in.before[in.n], reusable + unused), reused = min(given, reusable);
    in.counters[kReused] += reused;
    in.counters[kUsed] += given - reused;
    in.counters[kInserted] += given;
  }
  for (int64_t i = thread_index(); i < in.n; i += thread_count()) {
    const bool was_there = in.missing.slot_of[i] == kNone, may_insert = in.missing.is_missing(i);
    int64_t row = in.rows[i];
    if (may_insert && in.missing.first_of(i) != i) {
      // A first has its row already, and no one writes it here.
      row = in.rows[in.missing.first_of(i)];
      in.rows[i] = row;
    } else if (!may_insert && !was_there) {
      row = in.table.find(in.ids[i]).row;
      in.rows[i] = row;
    }
    if (row >= 0 && in.count && (was_there || in.frequencies == nullptr)) in.count_occurrence(row);
    if (row < 0 && may_insert) atomicAdd(reinterpret_cast<unsigned long long*>(in.counters + kFailed), 1ull);
  }
}

// One thread per position. Those of one row write the same.
__global__ void touch_rows_kernel(Insertion in) {
  if (*in.refused != 0) return;
  for (int64_t i = thread_index(); i < in.n; i += thread_count()) {
    if (in.rows[i] < 0) continue;
    int64_t* const entry = in.table.entries + 2 * in.rows[i] + 1;
    const int64_t known = relaxed_load(entry);
    relaxed_store(entry, pack_entry(in.version >= 0 ? in.version : entry_version(known),
                                    min(entry_frequency(known), kMostFrequency)));
  }
}

std::tuple<Tensor, Tensor> table_find_or_insert_cuda(const Tensor& index, const Tensor& entries, const Tensor& counters,
                                                     const Tensor& free_rows, const Tensor& ids,
                                                     const std::optional<Tensor>& allowed,
                                                     const std::optional<Tensor>& frequencies, int64_t version,
                                                     bool count) {
  check_table_insert(index, entries, counters, free_rows, ids, allowed, frequencies, version);
  DeviceCall call("table_find_or_insert_", ids);
  const int64_t n = ids.size(0);
  const Tensor rows = call.empty({n}, ScalarType::Long), born = call.empty({n}, ScalarType::Long);
  const Keys keys = keys_of(call, ids);
  const int64_t capacity = std::max<int64_t>(2 * n, 1);
  const Insertion in{
      view_of(index, entries),
      keys,
      n,
      {keys, call.workspace<uint32_t>(capacity), call.workspace<uint32_t>(n), static_cast<uint64_t>(capacity)},
      static_cast<int64_t*>(counters.data_ptr()),
      static_cast<const int32_t*>(free_rows.data_ptr()),
      free_rows.size(0),
      allowed ? call.data<bool>(*allowed) : nullptr,
      frequencies ? call.data<int32_t>(*frequencies) : nullptr,
      version,
      count,
      call.errors(),
      call.workspace<int32_t>(1),
      call.workspace<int32_t>(n),
      call.workspace<int32_t>(n),
      call.workspace<int64_t>(n + 1),
      call.workspace<int64_t>(n + 1),
      static_cast<int64_t*>(rows.data_ptr()),
      static_cast<int64_t*>(born.data_ptr())};
  launch(call, {1, 1}, check_counters_kernel, in);
  if (n == 0) return {rows, born};
  const LaunchShape each = one_thread_each(n);
  fill_bytes(call.stream(), in.missing.slots, 0xff, static_cast<size_t>(capacity) * sizeof(uint32_t));
  launch(call, each, look_up_kernel, in);
  launch(call, each, regions_of_firsts_kernel, in);
  const RegionItems items = group_by_region(call, in.table.shape, in.regions, n);
  launch(call, items.shape(), take_slots_kernel, in, items);
  sums_before(call, in.news, n, in.before);
  launch(call, one_thread_each(std::min(n, in.num_free)), check_free_rows_kernel, in);
  launch(call, each, give_rows_kernel, in);
  launch(call, each, read_rows_kernel, in);
  if (count || version >= 0) launch(call, each, touch_rows_kernel, in);
  return {rows, born};
}

__global__ void copy_ids_kernel(Keys keys, int64_t n, int64_t* rows, int64_t* born) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    rows[i] = keys[i];
    born[i] = -1;
  }
}

std::tuple<Tensor, Tensor> tables_find_or_insert_cuda(std::vector<Tensor> index, std::vector<Tensor> entries,
                                                      std::vector<Tensor> counters, std::vector<Tensor> free_rows,
                                                      const Tensor& ids, std::vector<int64_t> begins,
                                                      std::vector<int64_t> ends, std::vector<int64_t> versions,
                                                      bool count) {
  check_tables_insert(index, entries, counters, free_rows, ids, begins, ends, versions);
  DeviceCall call("tables_find_or_insert_", ids);
  const int64_t n = ids.size(0);
  Tensor rows = call.empty({n}, ScalarType::Long), born = call.empty({n}, ScalarType::Long);
  launch(call, one_thread_each(n), copy_ids_kernel, keys_of(call, ids), n, static_cast<int64_t*>(rows.data_ptr()),
         static_cast<int64_t*>(born.data_ptr()));
  for (size_t k = 0; k < index.size(); ++k) {
    const auto part = [&](Tensor x) { return torch::stable::narrow(x, 0, begins[k], ends[k] - begins[k]); };
    const auto [its_rows, its_born] = table_find_or_insert_cuda(
        index[k], entries[k], counters[k], free_rows[k], part(ids), std::nullopt, std::nullopt, versions[k], count);
    Tensor to_rows = part(rows), to_born = part(born);
    torch::stable::copy_(to_rows, its_rows);
    torch::stable::copy_(to_born, its_born);
  }
  return {rows, born};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "table_find_or_insert_", &tsr::table_find_or_insert_cuda);
  TSR_IMPL(m, "tables_find_or_insert_", &tsr::tables_find_or_insert_cuda);
}
