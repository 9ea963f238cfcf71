#include "../table.h"

#include <tuple>

#include "table_insert.h"

namespace tsr {
namespace {

void check_counters(const char* op, const Tensor& entries, const Tensor& counters, const Tensor& free_rows) {
  const int64_t* known = counters.const_data_ptr<int64_t>();
  TSR_CHECK_VALUE(known[kUsed] >= 0 && known[kUsed] <= entries.size(0), op, ": counters[0] must be in [0, ",
                  entries.size(0), "], got ", known[kUsed]);
  TSR_CHECK_VALUE(known[kReused] >= 0 && known[kReused] <= free_rows.size(0), op, ": counters[1] must be in [0, ",
                  free_rows.size(0), "], got ", known[kReused]);
}

void write_seed(int64_t seed, int32_t* line) {
  const KeyFactors factors = factors_of_seed(seed);
  uint64_t numbers[kBucketWords / 2] = {};
  numbers[kSeed] = static_cast<uint64_t>(seed);
  numbers[kFirstFactor] = factors.first;
  numbers[kSecondFactor] = factors.second;
  std::memcpy(line, numbers, sizeof(numbers));
}

}  // namespace

Tensor table_find_cpu(const Tensor& index, const Tensor& entries, const Tensor& given_ids) {
  const char* op = "table_find";
  check_table_find(op, index, entries, given_ids);
  const Tensor ids = as_contiguous(given_ids);
  const int64_t n = ids.size(0);
  Tensor rows = new_empty(ids, {n}, ScalarType::Long);
  int64_t* out = rows.mutable_data_ptr<int64_t>();
  const TableView table = read_view(index, entries);
  dispatch_index(ids.scalar_type(), op, "ids", [&](auto tag) {
    using Id = typename decltype(tag)::type;
    const Id* data = ids.const_data_ptr<Id>();
    parallel_for(0, n, kWorkPerThread / kWorkPerKey, [&](int64_t begin, int64_t end) {
      find_each(table, data, begin, end, [&](int64_t i, int64_t row) { out[i] = row; });
    });
  });
  return rows;
}

std::tuple<Tensor, Tensor> table_find_or_insert_cpu(const Tensor& index, const Tensor& entries, const Tensor& counters,
                                                    const Tensor& free_rows, const Tensor& given_ids,
                                                    const std::optional<Tensor>& given_allowed,
                                                    const std::optional<Tensor>& given_frequencies, int64_t version,
                                                    bool count) {
  check_table_insert(index, entries, counters, free_rows, given_ids, given_allowed, given_frequencies, version);
  const Tensor ids = as_contiguous(given_ids);
  const std::optional<Tensor> allowed = as_contiguous(given_allowed), frequencies = as_contiguous(given_frequencies);
  check_counters("table_find_or_insert_", entries, counters, free_rows);
  const int64_t n = ids.size(0);
  Tensor rows = new_empty(ids, {n}, ScalarType::Long), born = new_empty(ids, {n}, ScalarType::Long);
  dispatch_index(ids.scalar_type(), "table_find_or_insert_", "ids", [&](auto tag) {
    using Id = typename decltype(tag)::type;
    Inserter<Id>({write_view(index, entries), counters.mutable_data_ptr<int64_t>(), free_rows.const_data_ptr<int32_t>(),
                  free_rows.size(0), ids.const_data_ptr<Id>(), n, allowed ? allowed->const_data_ptr<bool>() : nullptr,
                  frequencies ? frequencies->const_data_ptr<int32_t>() : nullptr, version, count,
                  rows.mutable_data_ptr<int64_t>(), born.mutable_data_ptr<int64_t>()})
        .run();
  });
  return {rows, born};
}

// Table by table, each by one thread where there are enough of them.
std::tuple<Tensor, Tensor> tables_find_or_insert_cpu(std::vector<Tensor> index, std::vector<Tensor> entries,
                                                     std::vector<Tensor> counters, std::vector<Tensor> free_rows,
                                                     const Tensor& given_ids, std::vector<int64_t> begins,
                                                     std::vector<int64_t> ends, std::vector<int64_t> versions,
                                                     bool count) {
  check_tables_insert(index, entries, counters, free_rows, given_ids, begins, ends, versions);
  for (size_t k = 0; k < index.size(); ++k)
    check_counters("tables_find_or_insert_", entries[k], counters[k], free_rows[k]);
  const Tensor ids = as_contiguous(given_ids);
  const int64_t n = ids.size(0), tables = static_cast<int64_t>(index.size());
  Tensor rows = new_empty(ids, {n}, ScalarType::Long), born = new_empty(ids, {n}, ScalarType::Long);
  int64_t* out_rows = rows.mutable_data_ptr<int64_t>();
  int64_t* out_born = born.mutable_data_ptr<int64_t>();
  std::vector<std::string> errors(index.size());
  dispatch_index(ids.scalar_type(), "tables_find_or_insert_", "ids", [&](auto tag) {
    using Id = typename decltype(tag)::type;
    const Id* data = ids.const_data_ptr<Id>();
    const int64_t workers = workers_for(n * kWorkPerKey);
    const bool by_table = tables >= 2 * workers;
    const auto insert = [&](int64_t, int64_t k) {
      const size_t table = static_cast<size_t>(k);
      const int64_t begin = begins[table];
      try {
        Inserter<Id>({write_view(index[table], entries[table]), counters[table].mutable_data_ptr<int64_t>(),
                      free_rows[table].const_data_ptr<int32_t>(), free_rows[table].size(0), data + begin,
                      ends[table] - begin, nullptr, nullptr, versions[table], count, out_rows + begin, out_born + begin,
                      by_table ? 1 : INT64_MAX})
            .run();
      } catch (const std::exception& error) {
        errors[table] = error.what();
      }
    };
    int64_t done = 0;
    for (int64_t k = 0; k <= tables; ++k) {
      const int64_t next = k < tables ? begins[static_cast<size_t>(k)] : n;
      for (; done < next; ++done) {
        out_rows[done] = static_cast<int64_t>(data[done]);
        out_born[done] = -1;
      }
      if (k < tables) done = ends[static_cast<size_t>(k)];
    }
    if (by_table) {
      parallel_dynamic(tables, workers, insert);
    } else {
      for (int64_t k = 0; k < tables; ++k) insert(0, k);
    }
  });
  for (const std::string& error : errors) TSR_CHECK_VALUE(error.empty(), error);
  return {rows, born};
}

Tensor table_erase_cpu(const Tensor& index, const Tensor& entries, const Tensor& given_ids,
                       const std::optional<Tensor>& given_mask) {
  const char* op = "table_erase_";
  check_table_erase(index, entries, given_ids, given_mask);
  const Tensor ids = as_contiguous(given_ids);
  const std::optional<Tensor> mask = as_contiguous(given_mask);
  const bool* wanted = mask ? mask->const_data_ptr<bool>() : nullptr;
  const int64_t n = ids.size(0);
  Tensor rows = new_empty(ids, {n}, ScalarType::Long);
  int64_t* out = rows.mutable_data_ptr<int64_t>();
  const TableView table = write_view(index, entries);
  dispatch_index(ids.scalar_type(), op, "ids", [&](auto tag) {
    using Id = typename decltype(tag)::type;
    const Id* data = ids.const_data_ptr<Id>();
    // By one thread, as whoever follows may have the same key.
    find_each(table, data, 0, n, [&](int64_t i, int64_t row) {
      const int64_t key = static_cast<int64_t>(data[i]);
      const KeyPlace place = table.place(key);
      // The row was looked for before the keys ahead of this one went: an entry without a key looks like key 0's.
      if (row >= 0 && table.entries[2 * row + 1] == kFreeEntry) row = find_row(table, place, key);
      out[i] = wanted == nullptr || wanted[i] ? row : -1;
      if (out[i] < 0) return;
      erase_slot(table, place, find_slot(table, place, [&](int32_t at) { return at == row; }));
      table.entries[2 * row] = 0;
      table.entries[2 * row + 1] = kFreeEntry;
    });
  });
  return rows;
}

Tensor table_rehash_cpu(const Tensor& entries, const Tensor& counters, int64_t buckets, int64_t seed) {
  check_table_rehash(entries, counters, buckets);
  const Asked asked{"table_rehash", "buckets", buckets};
  Tensor index = seed == 0 ? new_empty(entries, {buckets, kBucketWords}, ScalarType::Int, asked)
                           : new_empty(entries, {(buckets + 1) * kBucketWords}, ScalarType::Int, asked);
  if (seed != 0) write_seed(seed, index.mutable_data_ptr<int32_t>() + buckets * kBucketWords);
  const TableView table = write_view(index, entries);
  parallel_for(0, buckets, kWorkPerThread / kBucketWords,
               [&](int64_t begin, int64_t end) { std::fill(table.bucket(begin), table.bucket(end), 0); });
  counters.mutable_data_ptr<int64_t>()[kFailed] += fill_index(table);
  return index;
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "table_find", &tsr::table_find_cpu);
  TSR_IMPL(m, "table_find_or_insert_", &tsr::table_find_or_insert_cpu);
  TSR_IMPL(m, "tables_find_or_insert_", &tsr::tables_find_or_insert_cpu);
  TSR_IMPL(m, "table_erase_", &tsr::table_erase_cpu);
  TSR_IMPL(m, "table_rehash", &tsr::table_rehash_cpu);
}
