#include "../sparse_tensor.h"

#include "row_starts.h"

namespace tsr {
namespace {

// ---- Reshape --------------------------------------------------------------------------------------------------------

// Small ranks are known to the compiler.
template <class F>
void dispatch_rank(int64_t rank, const F& f) {
  switch (rank) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 3:
      return f(std::integral_constant<int, 3>{});
    default:
      return f(std::integral_constant<int, 0>{});
  }
}

template <int kFrom, int kTo>
void reshape_entries(const Reshape& reshape, const int64_t* from, int64_t* to, int64_t entries) {
  parallel_for(0, entries, kItemGrain, [&reshape, from, to](int64_t begin, int64_t end) {
    const Reshape local = reshape;  // of this thread's stack, which no store through `to` can change
    for (int64_t i = begin; i < end; ++i) {
      local.move<kFrom, kTo>(from + i * local.from_rank, to + i * local.to_rank);
    }
  });
}

}  // namespace

Tensor sparse_reshape_cpu(const Tensor& indices_, std::vector<int64_t> shape, std::vector<int64_t> new_shape) {
  check_sparse_reshape(indices_, shape, new_shape);
  const int64_t entries = indices_.size(0);
  const Tensor indices = as_contiguous(indices_);
  const Tensor out = new_empty(indices, {entries, static_cast<int64_t>(new_shape.size())}, ScalarType::Long);
  if (entries == 0) return out;
  const int64_t* from = indices.const_data_ptr<int64_t>();
  int64_t* to = out.mutable_data_ptr<int64_t>();
  if (shape == new_shape) {
    parallel_for(0, indices.numel(), kItemGrain,
                 [=](int64_t begin, int64_t end) { std::copy(from + begin, from + end, to + begin); });
    return out;
  }
  const Reshape reshape(shape, new_shape);
  dispatch_rank(reshape.from_rank, [&](auto from_rank) {
    dispatch_rank(reshape.to_rank, [&](auto to_rank) {
      reshape_entries<decltype(from_rank)::value, decltype(to_rank)::value>(reshape, from, to, entries);
    });
  });
  return out;
}

// ---- Rows and offsets -----------------------------------------------------------------------------------------------

Tensor row_ids_to_offsets_cpu(const Tensor& row_ids, int64_t num_rows) {
  const char* op = "row_ids_to_offsets";
  check_row_ids_to_offsets(row_ids, num_rows);
  const int64_t items = row_ids.size(0);
  const Tensor out = new_empty(row_ids, {num_rows + 1}, ScalarType::Long, {op, "num_rows", num_rows});
  int64_t* offsets = out.mutable_data_ptr<int64_t>();
  dispatch_index(row_ids.scalar_type(), op, "row_ids", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const Column<I> ids{row_ids.const_data_ptr<I>(), row_ids.stride(0)};
    FirstPosition first_bad;
    start_rows(ids, items, num_rows, offsets, first_bad);
    if (first_bad.found()) {
      const int64_t i = first_bad.position(), id = ids[i];
      TSR_CHECK_INDEX(id >= 0 && id < num_rows, op, ": row_ids[", i, "] must be in [0, ", num_rows, "), got ", id);
      TSR_CHECK_VALUE(false, op, ": row_ids must be sorted, got ", ids[i - 1], " followed by ", id, " at position ", i);
    }
  });
  return out;
}

Tensor offsets_to_row_ids_cpu(const Tensor& offsets_, int64_t num_items) {
  const char* op = "offsets_to_row_ids";
  check_offsets_to_row_ids(offsets_, num_items);
  const Tensor given = as_contiguous(offsets_);
  const int64_t rows = given.size(0) - 1;
  dispatch_index(given.scalar_type(), op, "offsets", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const I* offsets = given.const_data_ptr<I>();
    TSR_CHECK_VALUE(offsets[0] == 0, op, ": offsets[0] must be 0, got ", offsets[0]);
    FirstPosition first_bad;
    parallel_for(1, rows + 1, kItemGrain, [&, offsets](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (offsets[r] < offsets[r - 1]) return first_bad.report(r);
      }
    });
    const int64_t bad = first_bad.position();
    TSR_CHECK_VALUE(!first_bad.found(), op, ": offsets must not decrease, got ", offsets[bad - 1], " followed by ",
                    offsets[bad], " at position ", bad);
    TSR_CHECK_VALUE(static_cast<int64_t>(offsets[rows]) == num_items, op, ": offsets[", rows,
                    "], the last, must be the number of items, ", num_items, ", got ", offsets[rows]);
  });
  const Tensor out = new_empty(given, {num_items}, ScalarType::Long, {op, "num_items", num_items});
  int64_t* ids = out.mutable_data_ptr<int64_t>();
  dispatch_index(given.scalar_type(), op, "offsets", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const I* offsets = given.const_data_ptr<I>();
    // By items, not rows: rows may be of any length.
    parallel_for(0, num_items, kItemGrain, [=](int64_t begin, int64_t end) {
      int64_t row = std::upper_bound(offsets, offsets + rows + 1, begin) - offsets - 1;
      for (int64_t i = begin; i < end; ++row) {
        const int64_t row_end = std::min<int64_t>(offsets[row + 1], end);
        for (; i < row_end; ++i) ids[i] = row;
      }
    });
  });
  return out;
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "sparse_reshape", &tsr::sparse_reshape_cpu);
  TSR_IMPL(m, "row_ids_to_offsets", &tsr::row_ids_to_offsets_cpu);
  TSR_IMPL(m, "offsets_to_row_ids", &tsr::offsets_to_row_ids_cpu);
}
