// sparse_reorder and sparse_to_dense: what depends on the order of entries.
#include <numeric>

#include "../sparse_tensor.h"
#include "row_groups.h"

namespace tsr {
namespace {

constexpr const char* kReorderOp = "sparse_reorder";
constexpr const char* kDenseOp = "sparse_to_dense";

// ---- Reorder --------------------------------------------------------------------------------------------------------

bool comes_before(const int64_t* a, const int64_t* b, int64_t rank) {
  return std::lexicographical_compare(a, a + rank, b, b + rank);
}

bool is_sorted(const int64_t* indices, int64_t entries, int64_t rank) {
  std::atomic<bool> sorted{true};
  parallel_for(1, entries, kItemGrain, [&, indices, rank](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && sorted.load(std::memory_order_relaxed); ++i) {
      if (comes_before(indices + i * rank, indices + (i - 1) * rank, rank)) sorted = false;
    }
  });
  return sorted;
}

// The box of all indices: [low, low + size) in each dimension.
struct Box {
  std::vector<int64_t> low;
  std::vector<int64_t> size;
  int64_t elements;  // 0 where they are too many to number
};

Box bounding_box(const int64_t* indices, int64_t entries, int64_t rank) {
  constexpr int64_t kMost = int64_t{1} << 62;
  std::vector<int64_t> low(indices, indices + rank), high = low;
  for (int64_t i = 1; i < entries; ++i) {
    for (int64_t d = 0; d < rank; ++d) {
      const int64_t index = indices[i * rank + d];
      low[static_cast<size_t>(d)] = std::min(low[static_cast<size_t>(d)], index);
      high[static_cast<size_t>(d)] = std::max(high[static_cast<size_t>(d)], index);
    }
  }
  Box box{low, std::vector<int64_t>(static_cast<size_t>(rank)), 1};
  for (size_t d = 0; d < low.size(); ++d) {
    const uint64_t size = static_cast<uint64_t>(high[d]) - static_cast<uint64_t>(low[d]) + 1;
    const bool fits = size != 0 && box.elements != 0 && size <= static_cast<uint64_t>(kMost / box.elements);
    box.size[d] = static_cast<int64_t>(size);
    box.elements = fits ? box.elements * box.size[d] : 0;
  }
  return box;
}

// Sorts by each entry's number in the box.
template <class U>
void sort_by_number(const Tensor& indices, const Box& box, int64_t* permutation) {
  const int64_t entries = indices.size(0), rank = indices.size(1);
  const Tensor numbers = new_empty(indices, {entries}, ScalarType::Long);
  const int64_t* from = indices.const_data_ptr<int64_t>();
  int64_t* to = numbers.mutable_data_ptr<int64_t>();
  parallel_for(0, entries, kItemGrain, [&, from, to, rank](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t number = 0;
      for (int64_t d = 0; d < rank; ++d) {
        number = number * box.size[static_cast<size_t>(d)] + (from[i * rank + d] - box.low[static_cast<size_t>(d)]);
      }
      to[i] = number;
    }
  });
  const RowGroups<U> groups(kReorderOp, numbers, nullptr, box.elements, /*padding=*/-1, /*row_elements=*/1,
                            GradientRows::kPresent);
  const Item<U>* items = groups.items();
  parallel_for(0, entries, kItemGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) permutation[i] = static_cast<int64_t>(items[i].payload);
  });
}

// Fills permutation with the order of entries.
void sort_entries(const Tensor& indices, int64_t* permutation) {
  const int64_t entries = indices.size(0), rank = indices.size(1);
  const int64_t* from = indices.const_data_ptr<int64_t>();
  const Box box = bounding_box(from, entries, rank);
  if (box.elements == 0) {
    std::iota(permutation, permutation + entries, 0);
    std::stable_sort(permutation, permutation + entries, [from, rank](int64_t a, int64_t b) {
      return comes_before(from + a * rank, from + b * rank, rank);
    });
  } else if (std::max(box.elements, entries) < INT32_MAX) {
    sort_by_number<uint32_t>(indices, box, permutation);
  } else {
    sort_by_number<int64_t>(indices, box, permutation);
  }
}

// ---- To dense -------------------------------------------------------------------------------------------------------

// Each entry's element of the dense tensor, checked.
Buffer<int64_t> checked_elements(const Tensor& indices, const std::vector<int64_t>& sizes, bool validate) {
  const int64_t entries = indices.size(0), rank = indices.size(1);
  const int64_t* from = indices.const_data_ptr<int64_t>();
  const DenseShape shape(sizes);
  Buffer<int64_t> buffer(entries);
  int64_t* elements = buffer.data();
  FirstPosition first_bad;
  parallel_for(0, entries, kItemGrain, [&, from, elements, rank](int64_t begin, int64_t end) {
    int64_t column = 0, before = begin == 0 ? -1 : shape.element(from + (begin - 1) * rank, column);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t element = shape.element(from + i * rank, column);
      if (element < 0 || (validate && element <= before)) return first_bad.report(i);
      elements[i] = before = element;
    }
  });
  if (first_bad.found()) {
    int64_t column = 0;
    const int64_t i = first_bad.position(), element = shape.element(from + i * rank, column);
    TSR_CHECK_INDEX(element >= 0, kDenseOp, ": indices[", i, ", ", column, "] must be in [0, ",
                    sizes[static_cast<size_t>(column)], "), got ", from[i * rank + column]);
    const int64_t before = shape.element(from + (i - 1) * rank, column);
    TSR_CHECK_VALUE(element != before, kDenseOp, ": indices must not repeat, got element ", element,
                    " of the dense tensor again at position ", i);
    TSR_CHECK_VALUE(false, kDenseOp, ": indices must be sorted, got element ", before, " of the dense tensor followed",
                    " by element ", element, " at position ", i);
  }
  return buffer;
}

template <class T>
void write_dense(const int64_t* elements, const T* values, int64_t entries, T default_value, bool sorted, T* dense,
                 int64_t size) {
  // Each part of the dense tensor is one thread's: it writes its entries in their order.
  const int64_t parts = workers_for(size + entries);
  parallel_tasks(parts, [=](int64_t part) {
    const int64_t begin = size / parts * part, end = part == parts - 1 ? size : size / parts * (part + 1);
    std::fill(dense + begin, dense + end, default_value);
    const int64_t* first = sorted ? std::lower_bound(elements, elements + entries, begin) : elements;
    const int64_t* last = sorted ? std::lower_bound(first, elements + entries, end) : elements + entries;
    for (int64_t i = first - elements; i < last - elements; ++i) {
      if (elements[i] >= begin && elements[i] < end) dense[elements[i]] = values[i];
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor> sparse_reorder_cpu(const Tensor& given) {
  check_sparse_reorder(given);
  const Tensor indices = as_contiguous(given);
  const int64_t entries = indices.size(0), rank = indices.size(1);
  const Tensor out = new_empty(indices, {entries, rank}, ScalarType::Long);
  const Tensor order = new_empty(indices, {entries}, ScalarType::Long);
  const int64_t* from = indices.const_data_ptr<int64_t>();
  int64_t *to = out.mutable_data_ptr<int64_t>(), *permutation = order.mutable_data_ptr<int64_t>();
  if (is_sorted(from, entries, rank)) {
    std::iota(permutation, permutation + entries, 0);
  } else {
    sort_entries(indices, permutation);
  }
  parallel_for(0, entries, kItemGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::copy_n(from + permutation[i] * rank, rank, to + i * rank);
  });
  return {out, order};
}

Tensor sparse_to_dense_cpu(const Tensor& indices_, std::vector<int64_t> shape, const Tensor& values_,
                           const Tensor& default_value, bool validate) {
  const int64_t size = check_sparse_to_dense(indices_, shape, values_, default_value);
  const Tensor indices = as_contiguous(indices_), values = as_contiguous(values_);
  const Tensor dense = new_empty(values, shape, values.scalar_type(), {kDenseOp, "the elements of shape", size});
  const Buffer<int64_t> elements = checked_elements(indices, shape, validate);
  dispatch_element(kDenseOp, values, [&](auto tag) {
    using T = typename decltype(tag)::type;
    write_dense(elements.data(), static_cast<const T*>(values.const_data_ptr()), values.size(0),
                *static_cast<const T*>(default_value.const_data_ptr()), validate,
                static_cast<T*>(dense.mutable_data_ptr()), size);
  });
  return dense;
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "sparse_reorder", &tsr::sparse_reorder_cpu);
  TSR_IMPL(m, "sparse_to_dense", &tsr::sparse_to_dense_cpu);
}
