#include <limits>

#include "row_loops.h"
#include "table_find.h"

namespace tsr {
namespace {

// Raises for the first row outside [.., rows); negative ones are left out by contract.
void check_rows(const char* op, const Tensor& rows, int64_t bound) {
  const int64_t* data = rows.const_data_ptr<int64_t>();
  FirstPosition bad;
  parallel_for(0, rows.size(0), kWorkPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (data[i] >= bound) return bad.report(i);
    }
  });
  TSR_CHECK_INDEX(!bad.found(), op, ": rows[", bad.position(), "] must be below ", bound, ", got ",
                  data[bad.position()]);
}

// What writes the initial row of a key.
template <class T>
struct InitialRows {
  Initial initial;
  const T* values;  // [num_values, dim], or null
  int64_t num_values, dim;

  void write(int64_t key, T* row) const {
    if (values != nullptr) {
      for (int64_t c = 0; c < dim; ++c) row[c] = values[default_row(key, num_values) * dim + c];
      return;
    }
    const uint64_t stream = initial_stream(initial, key);
    for (int64_t c = 0; c < dim; ++c) row[c] = rounded_once<T>(initial_value(initial, stream, c));
  }
};

template <class T>
InitialRows<T> initial_rows(const Initial& initial, const std::optional<Tensor>& values, int64_t dim) {
  return {initial, values ? values->const_data_ptr<T>() : nullptr, values ? values->size(0) : 0, dim};
}

// An element of a normal distribution costs about as much as this many elements moved.
constexpr int64_t kWorkPerInitial = 8;

// Keys whose rows are found before any of them is read.
constexpr int64_t kLookupBlock = 512;

// No row has no bytes, and then no address.
template <class T>
TSR_ALWAYS_INLINE void copy_row(T* to, const T* from, int64_t dim) {
  if (dim > 0) std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(T));
}

}  // namespace

void table_initialize_cpu(const Tensor& weight, const Tensor& given_rows, const Tensor& given_keys,
                          const std::optional<Tensor>& given_values, int64_t kind, std::vector<double> parameters,
                          int64_t seed) {
  const Initial initial = check_table_initialize(weight, given_rows, given_keys, given_values, kind, parameters, seed);
  const Tensor rows = as_contiguous(given_rows), keys = as_contiguous(given_keys);
  const std::optional<Tensor> values = as_contiguous(given_values);
  check_rows("table_initialize_", rows, weight.size(0));
  const int64_t* to = rows.const_data_ptr<int64_t>();
  const int64_t dim = weight.size(1), grain = kWorkPerThread / (dim * kWorkPerInitial + 1) + 1;
  dispatch_float(weight.scalar_type(), "table_initialize_", "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const InitialRows<T> first = initial_rows<T>(initial, values, dim);
    T* data = weight.mutable_data_ptr<T>();
    dispatch_index(keys.scalar_type(), "table_initialize_", "keys", [&](auto key_tag) {
      const auto* key = keys.const_data_ptr<typename decltype(key_tag)::type>();
      parallel_for(0, rows.size(0), grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          if (to[i] >= 0) first.write(static_cast<int64_t>(key[i]), data + to[i] * dim);
        }
      });
    });
  });
}

Tensor table_lookup_cpu(const Tensor& index, const Tensor& entries, const Tensor& weight, const Tensor& given_ids,
                        const std::optional<Tensor>& given_missing, const std::optional<Tensor>& given_values,
                        int64_t kind, std::vector<double> parameters, int64_t seed) {
  const char* op = "table_lookup";
  const Initial initial =
      check_table_lookup(index, entries, weight, given_ids, given_missing, given_values, kind, parameters, seed);
  const Tensor ids = as_contiguous(given_ids);
  const std::optional<Tensor> missing = as_contiguous(given_missing), values = as_contiguous(given_values);
  const int64_t n = ids.size(0), dim = weight.size(1);
  Tensor result = new_empty(weight, {n, dim}, weight.scalar_type());
  const TableView table = read_view(index, entries);
  const auto look_up = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* data = weight.const_data_ptr<T>();
    const T* instead = missing ? missing->const_data_ptr<T>() : nullptr;
    T* out = result.mutable_data_ptr<T>();
    const int64_t ahead = rows_ahead(dim * static_cast<int64_t>(sizeof(T)));
    dispatch_index(ids.scalar_type(), op, "ids", [&](auto id_tag) {
      using Id = typename decltype(id_tag)::type;
      const Id* keys = ids.const_data_ptr<Id>();
      parallel_for(0, n, kWorkPerThread / (kWorkPerKey + dim) + 1, [&](int64_t begin, int64_t end) {
        int64_t rows[kLookupBlock];
        for (int64_t first = begin; first < end; first += kLookupBlock) {
          const int64_t last = std::min(first + kLookupBlock, end);
          bool all = true;
          find_each(table, keys, first, last, [&](int64_t i, int64_t row) {
            rows[i - first] = row;
            all &= row >= 0;
          });
          for (int64_t i = first; i < last; ++i) {
            if (i + ahead < last && rows[i + ahead - first] >= 0) fetch_row(data + rows[i + ahead - first] * dim, dim);
            if (rows[i - first] >= 0) copy_row(out + i * dim, data + rows[i - first] * dim, dim);
          }
          for (int64_t i = first; i < last && !all; ++i) {
            if (rows[i - first] >= 0) continue;
            if (instead != nullptr) {
              copy_row(out + i * dim, instead, dim);
            } else if constexpr (!std::is_same_v<T, uint8_t>) {
              initial_rows<T>(initial, values, dim).write(static_cast<int64_t>(keys[i]), out + i * dim);
            }
          }
        }
      });
    });
  };
  if (weight.scalar_type() == ScalarType::Byte) {
    look_up(type_tag<uint8_t>{});
  } else {
    dispatch_float(weight.scalar_type(), op, "weight", look_up);
  }
  return result;
}

// Each thread writes rows of its own, so that of several values for a row the last is written last.
void table_assign_cpu(const Tensor& weight, const Tensor& given_rows, const Tensor& given_values) {
  check_table_assign(weight, given_rows, given_values);
  const Tensor rows = as_contiguous(given_rows), values = as_contiguous(given_values);
  check_rows("table_assign_", rows, weight.size(0));
  const int64_t n = rows.size(0), row_bytes = weight.size(1) * static_cast<int64_t>(weight.element_size());
  const int64_t* to = rows.const_data_ptr<int64_t>();
  const char* from = static_cast<const char*>(values.const_data_ptr());
  char* data = static_cast<char*>(weight.mutable_data_ptr());
  const int64_t workers = workers_for(n * weight.size(1)), table_rows = weight.size(0);
  parallel_tasks(workers, [&](int64_t worker) {
    const int64_t begin = table_rows * worker / workers, end = table_rows * (worker + 1) / workers;
    for (int64_t i = 0; i < n; ++i) {
      if (to[i] >= begin && to[i] < end) copy_row(data + to[i] * row_bytes, from + i * row_bytes, row_bytes);
    }
  });
}

Tensor count_min_sketch_cpu(const Tensor& sketch, const Tensor& given_ids, const std::optional<Tensor>& given_mask,
                            int64_t num_hashes, bool count) {
  check_count_min_sketch(sketch, given_ids, given_mask, num_hashes);
  const Tensor ids = as_contiguous(given_ids);
  const std::optional<Tensor> mask = as_contiguous(given_mask);
  const bool* wanted = mask ? mask->const_data_ptr<bool>() : nullptr;
  const int64_t n = ids.size(0), width = sketch.size(0);
  Tensor counts = new_empty(ids, {n}, ScalarType::Int);
  int32_t* out = counts.mutable_data_ptr<int32_t>();
  dispatch_counter(sketch, [&](auto tag) {
    using Counter = typename decltype(tag)::type;
    constexpr Counter kMost = std::numeric_limits<Counter>::max();
    Counter* counters = sketch.mutable_data_ptr<Counter>();
    dispatch_index(ids.scalar_type(), "count_min_sketch_", "ids", [&](auto id_tag) {
      const auto* data = ids.const_data_ptr<typename decltype(id_tag)::type>();
      const int64_t grain = kWorkPerThread / (kWorkPerKey * num_hashes);
      if (count) {
        parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            if (wanted != nullptr && !wanted[i]) continue;
            const SketchPlace place(static_cast<int64_t>(data[i]));
            for (int64_t k = 0; k < num_hashes; ++k) {
              Counter* counter = counters + place.counter(k, width);
              Counter known = __atomic_load_n(counter, __ATOMIC_RELAXED);
              while (known < kMost && !__atomic_compare_exchange_n(counter, &known, static_cast<Counter>(known + 1),
                                                                   true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
              }
            }
          }
        });
      }
      parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          out[i] = 0;
          if (wanted != nullptr && !wanted[i]) continue;
          const SketchPlace place(static_cast<int64_t>(data[i]));
          Counter least = kMost;
          for (int64_t k = 0; k < num_hashes; ++k) least = std::min(least, counters[place.counter(k, width)]);
          out[i] = static_cast<int32_t>(std::min<int64_t>(static_cast<int64_t>(least), INT32_MAX));
        }
      });
    });
  });
  return counts;
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "table_initialize_", &tsr::table_initialize_cpu);
  TSR_IMPL(m, "table_lookup", &tsr::table_lookup_cpu);
  TSR_IMPL(m, "table_assign_", &tsr::table_assign_cpu);
  TSR_IMPL(m, "count_min_sketch_", &tsr::count_min_sketch_cpu);
}
