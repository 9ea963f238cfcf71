// A table's index: find, erase, make anew.
#include "table.cuh"

namespace tsr {

RegionItems sort_by_region(DeviceCall& call, Pairs<uint32_t> pairs, int64_t items, int64_t regions) {
  const Pairs<uint32_t> spare{call.workspace<uint32_t>(items), call.workspace<uint32_t>(items)};
  int bits = 1;
  while (bits < 32 && (regions >> bits) != 0) ++bits;
  return {sort_pairs(call, pairs, spare, items, bits), items, regions};
}

namespace {

// ---- table_find -----------------------------------------------------------------------------------------------------

// One thread per key.
__global__ void find_kernel(TableView table, Keys ids, int64_t n, int64_t* rows) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) rows[i] = table.find(ids[i]).row;
}

Tensor table_find_cuda(const Tensor& index, const Tensor& entries, const Tensor& ids) {
  check_table_find("table_find", index, entries, ids);
  DeviceCall call("table_find", ids);
  const int64_t n = ids.size(0);
  const Tensor rows = call.empty({n}, ScalarType::Long);
  launch(call, one_thread_each(n), find_kernel, view_of(index, entries), keys_of(call, ids), n,
         static_cast<int64_t*>(rows.data_ptr()));
  return rows;
}

// ---- table_erase_ ---------------------------------------------------------------------------------------------------

// Below all versions and frequencies: what an entry says of the positions that want its row to be free. The first of
// them is the least.
__device__ inline int64_t claim_of(int64_t position) { return INT64_MIN + position; }

// One thread per position: looks its key up, and claims the row.
__global__ void claim_rows_kernel(TableView table, Keys ids, int64_t n, const bool* mask, int64_t* rows,
                                  int32_t* slots) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    Found found{-1, -1};
    if (mask == nullptr || mask[i]) found = table.find(ids[i]);
    rows[i] = found.row;
    slots[i] = found.slot;
    if (found.row >= 0) {
      atomicMin(reinterpret_cast<long long*>(table.entries + 2 * found.row + 1), static_cast<long long>(claim_of(i)));
    }
  }
}

// One thread per position: of those that want a row the first erases its key.
__global__ void erase_kernel(TableView table, Keys ids, int64_t n, const int32_t* slots, int64_t* rows) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    if (rows[i] < 0) continue;
    int64_t* const entry = table.entries + 2 * rows[i];
    if (relaxed_load(&entry[1]) != claim_of(i)) {
      rows[i] = -1;
      continue;
    }
    table.erase(ids[i], slots[i]);
    entry[0] = 0;
    relaxed_store(&entry[1], kFreeEntry);
  }
}

Tensor table_erase_cuda(const Tensor& index, const Tensor& entries, const Tensor& ids,
                        const std::optional<Tensor>& mask) {
  check_table_erase(index, entries, ids, mask);
  DeviceCall call("table_erase_", ids);
  const int64_t n = ids.size(0);
  const TableView table = view_of(index, entries);
  const Keys keys = keys_of(call, ids);
  const Tensor result = call.empty({n}, ScalarType::Long);
  int64_t* const rows = static_cast<int64_t*>(result.data_ptr());
  int32_t* const slots = call.workspace<int32_t>(n);
  launch(call, one_thread_each(n), claim_rows_kernel, table, keys, n, mask ? call.data<bool>(*mask) : nullptr, rows,
         slots);
  launch(call, one_thread_each(n), erase_kernel, table, keys, n, slots, rows);
  return result;
}

// ---- table_rehash ---------------------------------------------------------------------------------------------------

// One thread per row.
__global__ void regions_of_rows_kernel(TableView table, Pairs<uint32_t> rows) {
  for (int64_t row = thread_index(); row < table.rows; row += thread_count()) {
    const bool is_free = table.entries[2 * row + 1] == kFreeEntry;
    const int64_t region = is_free ? table.shape.regions : region_of(table.shape, table.hash(table.entries[2 * row]));
    rows.keys[row] = static_cast<uint32_t>(region);
    rows.values[row] = static_cast<uint32_t>(row);
  }
}

// One thread.
__global__ void write_seed_kernel(int64_t seed, KeyFactors factors, int32_t* line) {
  const auto write = [&](SeedNumber which, uint64_t number) {
    line[2 * which] = static_cast<int32_t>(static_cast<uint32_t>(number));
    line[2 * which + 1] = static_cast<int32_t>(static_cast<uint32_t>(number >> 32));
  };
  write(kSeed, static_cast<uint64_t>(seed));
  write(kFirstFactor, factors.first);
  write(kSecondFactor, factors.second);
}

// One thread per region.
__global__ void fill_index_kernel(TableView table, RegionItems regions, unsigned long long* failed) {
  insert_regions(
      regions, [&](int64_t row) { return table.entries[2 * row]; },
      [&](int64_t row, int64_t key) {
        if (table.insert(key, static_cast<int32_t>(row)) < 0) atomicAdd(failed, 1ull);
      });
}

Tensor table_rehash_cuda(const Tensor& entries, const Tensor& counters, int64_t buckets, int64_t seed) {
  check_table_rehash(entries, counters, buckets);
  DeviceCall call("table_rehash", entries);
  call.asks("buckets", buckets);
  const Tensor index = seed == 0 ? call.empty({buckets, kBucketWords}, ScalarType::Int)
                                 : call.empty({(buckets + 1) * kBucketWords}, ScalarType::Int);
  const TableView table = view_of(index, entries);
  fill_bytes(call.stream(), table.index, 0, static_cast<size_t>(index.numel()) * sizeof(int32_t));
  if (seed != 0) {
    int32_t* const line = table.index + buckets * kBucketWords;
    launch(call, {1, 1}, write_seed_kernel, seed, factors_of_seed(seed), line);
  }
  const Pairs<uint32_t> rows{call.workspace<uint32_t>(table.rows), call.workspace<uint32_t>(table.rows)};
  const LaunchShape each = one_thread_each(table.rows);
  launch(call, each, regions_of_rows_kernel, table, rows);
  launch(call, each, fill_index_kernel, table, sort_by_region(call, rows, table.rows, table.shape.regions),
         static_cast<unsigned long long*>(counters.data_ptr()) + kFailed);
  return index;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "table_find", &tsr::table_find_cuda);
  TSR_IMPL(m, "table_erase_", &tsr::table_erase_cuda);
  TSR_IMPL(m, "table_rehash", &tsr::table_rehash_cuda);
}
