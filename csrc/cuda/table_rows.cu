// Rows of a table: their initial values, looking up, assigning.
#include "device.cuh"
#include "row_groups.cuh"
#include "table.cuh"

namespace tsr {
namespace {

// ---- Initial values -------------------------------------------------------------------------------------------------

template <class T>
struct InitialRows {
  Initial initial;
  const T* values;  // [num_values, dim], or null
  int64_t num_values;
  int64_t dim;

  // `width` columns of a key's initial row.
  template <int width>
  __device__ Vector<T, width> load(int64_t key, int64_t column) const {
    if (values != nullptr) return load_vector<T, width>(values + default_row(key, num_values) * dim + column);
    Vector<T, width> result{};
    if constexpr (!std::is_same_v<T, uint8_t>) {
      const uint64_t stream = initial_stream(initial, key);
      // One after another: what a normal distribution takes need not be there several times.
#pragma unroll 1
      for (int c = 0; c < width; ++c) {
        const T value = rounded_once<T>(initial_value(initial, stream, column + c));
        // Written out, as an indexed column would move the vector from registers to memory.
#pragma unroll
        for (int k = 0; k < width; ++k) result.at[k] = k == c ? value : result.at[k];
      }
    }
    return result;
  }
};

template <class T>
InitialRows<T> initial_rows(DeviceCall& call, const Initial& initial, const std::optional<Tensor>& values,
                            int64_t dim) {
  return {initial, values ? call.data<T>(*values) : nullptr, values ? values->size(0) : 0, dim};
}

// Calls f with the tags of T and of the elements that one load or store moves.
template <class T, class F>
void with_width(int64_t columns, std::initializer_list<const void*> pointers, const F& f) {
  constexpr int kWide = 16 / sizeof(T);
  if (vector_width<T>(columns, pointers) == kWide) {
    f(std::integral_constant<int, kWide>());
  } else {
    f(std::integral_constant<int, 1>());
  }
}

// ---- table_initialize_ ----------------------------------------------------------------------------------------------

// A team per row.
template <class T>
__global__ void initialize_kernel(InitialRows<T> first, const int64_t* rows, Keys keys, int64_t table_rows,
                                  RowTiling tiling, ErrorSink errors, T* weight) {
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const int64_t row = rows[tile.row];
    if (row >= table_rows && tile.first_lane)
      errors.report(Argument::kRows, Fault::kNotBelow, tile.row, row, table_rows);
    if (row < 0 || row >= table_rows || tile.column >= first.dim) continue;
    weight[row * first.dim + tile.column] = first.template load<1>(keys[tile.row], tile.column).at[0];
  }
}

void table_initialize_cuda(const Tensor& weight, const Tensor& rows, const Tensor& keys,
                           const std::optional<Tensor>& values, int64_t kind, std::vector<double> parameters,
                           int64_t seed) {
  const Initial initial = check_table_initialize(weight, rows, keys, values, kind, parameters, seed);
  DeviceCall call("table_initialize_", weight);
  const int64_t dim = weight.size(1);
  const RowTiling tiling(rows.size(0), dim, 1);
  dispatch_float(weight.scalar_type(), call.op(), "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(call, tiling.shape(), initialize_kernel<T>, initial_rows<T>(call, initial, values, dim),
           call.data<int64_t>(rows), keys_of(call, keys), weight.size(0), tiling, call.errors(),
           static_cast<T*>(weight.data_ptr()));
  });
}

// ---- table_lookup ---------------------------------------------------------------------------------------------------

template <class T>
struct Lookup {
  TableView table;
  Keys ids;
  const T* weight;
  const T* missing;  // [dim], or null: the initial row
  InitialRows<T> first;
  T* out;  // [n, dim]
};

// A team per id, all of whose lanes look it up: they read the same addresses.
template <class T, int width>
__global__ void lookup_kernel(Lookup<T> p, RowTiling tiling) {
  const int64_t dim = p.first.dim;
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    if (tile.column >= dim) continue;
    const int64_t key = p.ids[tile.row], row = p.table.find(key).row;
    const T* const from = row >= 0 ? p.weight + row * dim : p.missing;
    store_vector(p.out + tile.row * dim + tile.column, from != nullptr
                                                           ? load_vector<T, width>(from + tile.column)
                                                           : p.first.template load<width>(key, tile.column));
  }
}

template <class T>
void launch_lookup(DeviceCall& call, const Lookup<T>& lookup, int64_t n) {
  with_width<T>(lookup.first.dim, {lookup.weight, lookup.missing, lookup.first.values, lookup.out}, [&](auto tag) {
    constexpr int kWidth = decltype(tag)::value;
    const RowTiling tiling(n, lookup.first.dim, kWidth);
    launch(call, tiling.shape(), lookup_kernel<T, kWidth>, lookup, tiling);
  });
}

Tensor table_lookup_cuda(const Tensor& index, const Tensor& entries, const Tensor& weight, const Tensor& ids,
                         const std::optional<Tensor>& missing, const std::optional<Tensor>& values, int64_t kind,
                         std::vector<double> parameters, int64_t seed) {
  const Initial initial = check_table_lookup(index, entries, weight, ids, missing, values, kind, parameters, seed);
  DeviceCall call("table_lookup", weight);
  const int64_t n = ids.size(0), dim = weight.size(1);
  const Tensor out = call.empty({n, dim}, weight.scalar_type());
  const auto look_up = [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_lookup<T>(call,
                     {view_of(index, entries), keys_of(call, ids), static_cast<const T*>(weight.data_ptr()),
                      missing ? call.data<T>(*missing) : nullptr, initial_rows<T>(call, initial, values, dim),
                      static_cast<T*>(out.data_ptr())},
                     n);
  };
  if (weight.scalar_type() == ScalarType::Byte) {
    look_up(type_tag<uint8_t>{});
  } else {
    dispatch_float(weight.scalar_type(), call.op(), "weight", look_up);
  }
  return out;
}

// ---- table_assign_ --------------------------------------------------------------------------------------------------

// A team per sorted entry: the last of each row writes it. Unit: what one load moves. Keys are rows, `table_rows` for
// those that are left out.
template <class Unit, class K>
__global__ void assign_kernel(Pairs<K> pairs, int64_t entries, int64_t table_rows, const int64_t* rows,
                              const Unit* values, int64_t units, RowTiling tiling, ErrorSink errors, Unit* weight) {
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const int64_t row = static_cast<int64_t>(pairs.keys[tile.row]), i = static_cast<int64_t>(pairs.values[tile.row]);
    if (row == table_rows) {
      if (rows[i] >= 0 && tile.first_lane) errors.report(Argument::kRows, Fault::kNotBelow, i, rows[i], table_rows);
      continue;
    }
    const bool is_last = tile.row + 1 == entries || pairs.keys[tile.row + 1] != pairs.keys[tile.row];
    if (is_last && tile.column < units) weight[row * units + tile.column] = values[i * units + tile.column];
  }
}

template <class Unit>
void assign(DeviceCall& call, const RowGroups& groups, const int64_t* rows, const void* values, int64_t row_bytes,
            void* weight) {
  const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
  const RowTiling tiling(groups.entries, units, 1);
  with_pairs(groups, [&](const auto& pairs) {
    using K = std::remove_pointer_t<decltype(pairs.keys)>;
    launch(call, tiling.shape(), assign_kernel<Unit, K>, pairs, groups.entries, groups.rows, rows,
           static_cast<const Unit*>(values), units, tiling, call.errors(), static_cast<Unit*>(weight));
  });
}

void table_assign_cuda(const Tensor& weight, const Tensor& rows, const Tensor& values) {
  check_table_assign(weight, rows, values);
  DeviceCall call("table_assign_", weight);
  const int64_t n = rows.size(0), row_bytes = weight.size(1) * static_cast<int64_t>(weight.element_size());
  const int64_t* const to = call.data<int64_t>(rows);
  const void* const from = call.data(values);
  const RowGroups groups =
      group_by_row(call, Indices{ScalarType::Long, to, n, weight.size(0), -1, /*report=*/false}, n, EntryItself());
  void* const data = weight.data_ptr();
  // Bytes where rows begin anywhere.
  const uint64_t alignment =
      reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(row_bytes);
  const auto run = alignment % 16 == 0  ? &assign<Vector<uint64_t, 2>>
                   : alignment % 4 == 0 ? &assign<uint32_t>
                                        : &assign<uint8_t>;
  run(call, groups, to, from, row_bytes, data);
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "table_initialize_", &tsr::table_initialize_cuda);
  TSR_IMPL(m, "table_lookup", &tsr::table_lookup_cuda);
  TSR_IMPL(m, "table_assign_", &tsr::table_assign_cuda);
}
