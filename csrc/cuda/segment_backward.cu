#include "bags.cuh"
#include "pool_sum.cuh"
#include "segment.cuh"
#include "segment_ids.cuh"

namespace tsr {
namespace {

// ---- What a segment's rows share ------------------------------------------------------------------------------------

// The Totals write values and counts of their view, [segments, columns].
template <class T, int width_>
struct Shared {
  using A = acc_t<T>;
  static constexpr int width = width_;

  A value[width] = {};
  int64_t count[width] = {};

  template <class View>
  __device__ void store(const View& p, int64_t bag, const RowTile& tile) const {
    if (tile.column >= p.columns) return;
    const int64_t at = bag * p.columns + tile.column;
#pragma unroll
    for (int c = 0; c < width; ++c) {
      p.values[at + c] = value[c];
      p.counts[at + c] = count[c];
    }
  }
};

// The largest of `ordered` values, and how many are equal to it.
template <class T, int width_>
struct Ties : Shared<T, width_> {
  using A = acc_t<T>;

  struct Entry : Sum<T, width_>::Entry {
    template <class I>
    __device__ void load(const PoolView<T, I>& p, const RowTile& tile, bool has_columns, int64_t index, int64_t j) {
      Sum<T, width_>::Entry::load(p, tile, has_columns, index, j);
      if (!has_columns) return;
#pragma unroll
      for (int c = 0; c < width_; ++c) {
        this->row.at[c] = static_cast<T>(ordered(static_cast<A>(this->row.at[c]), p.direction));
      }
    }
  };

  __device__ void offer(int c, A x, int64_t times) {
    if (this->count[c] == 0 || x > this->value[c] || x != x) {
      this->value[c] = x;
      this->count[c] = times;
    } else if (x == this->value[c]) {
      this->count[c] += times;
    }
  }
  __device__ void add(const Entry& entry, int64_t) {
#pragma unroll
    for (int c = 0; c < width_; ++c) offer(c, static_cast<A>(entry.row.at[c]), 1);
  }
  __device__ void merge(const Ties& later) {
#pragma unroll
    for (int c = 0; c < width_; ++c) {
      if (later.count[c] != 0) offer(c, later.value[c], later.count[c]);
    }
  }
};

// The product of all but zeros, and how many zeros there are.
template <class T, int width_>
struct NonZeros : Shared<T, width_> {
  using A = acc_t<T>;
  using Entry = typename Sum<T, width_>::Entry;

  __device__ NonZeros() {
#pragma unroll
    for (int c = 0; c < width_; ++c) this->value[c] = A(1);
  }
  __device__ void add(const Entry& entry, int64_t) {
#pragma unroll
    for (int c = 0; c < width_; ++c) {
      const A x = static_cast<A>(entry.row.at[c]);
      if (x == A(0)) {
        ++this->count[c];
      } else {
        this->value[c] *= x;
      }
    }
  }
  __device__ void merge(const NonZeros& later) {
#pragma unroll
    for (int c = 0; c < width_; ++c) {
      this->value[c] *= later.value[c];
      this->count[c] += later.count[c];
    }
  }
};

// ---- Rows -----------------------------------------------------------------------------------------------------------

template <class T>
struct RowGradients {
  const T* grad;              // [segments, columns]
  const T* data;              // [rows, columns], if a Part wants it
  const int64_t* segment_of;  // [rows], -1 for none
  int64_t segments;
  int64_t columns;
  Reduction reduction;
  const unsigned long long* sizes;  // [segments] or null: of sums
  acc_t<T> direction;
  const acc_t<T>* values;  // [segments, columns]
  const int64_t* counts;
  T* out;  // [rows, columns]
};

// A row's part of its segment's gradient g, in one column.
struct QuotientPart {
  static constexpr bool takes_data = false;
  template <class T>
  __device__ static acc_t<T> of(const RowGradients<T>& p, int64_t segment, int64_t, acc_t<T>, acc_t<T> g) {
    using A = acc_t<T>;
    if (p.reduction == Reduction::kSum) return g;
    const A n = static_cast<A>(p.sizes[segment]);
    return g / (p.reduction == Reduction::kMean ? n : sqrt(n));
  }
};

struct ExtremePart {
  static constexpr bool takes_data = true;
  template <class T>
  __device__ static acc_t<T> of(const RowGradients<T>& p, int64_t, int64_t at, acc_t<T> x, acc_t<T> g) {
    using A = acc_t<T>;
    return ordered(x, p.direction) == p.values[at] ? g / static_cast<A>(p.counts[at]) : A(0);
  }
};

struct ProductPart {
  static constexpr bool takes_data = true;
  template <class T>
  __device__ static acc_t<T> of(const RowGradients<T>& p, int64_t, int64_t at, acc_t<T> x, acc_t<T> g) {
    using A = acc_t<T>;
    const int64_t zeros = p.counts[at];
    const A share = g * p.values[at];
    if (x == A(0)) return zeros == 1 ? share : A(0);
    return zeros == 0 ? share / x : A(0);
  }
};

// A team owns a tile of one row.
template <class Part, int width, class T>
__global__ void row_gradients_kernel(RowGradients<T> p, RowTiling tiling) {
  using A = acc_t<T>;
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    if (tile.column >= p.columns) continue;
    const int64_t segment = p.segment_of[tile.row], to = tile.row * p.columns + tile.column;
    const bool has_segment = segment >= 0 && segment < p.segments;
    Vector<T, width> row{}, result;
    if (has_segment) {
      const int64_t at = segment * p.columns + tile.column;
      const Vector<T, width> grad = load_vector<T, width>(p.grad + at);
      if constexpr (Part::takes_data) row = load_vector<T, width>(p.data + to);
#pragma unroll
      for (int c = 0; c < width; ++c) {
        result.at[c] =
            static_cast<T>(Part::of(p, segment, at + c, static_cast<A>(row.at[c]), static_cast<A>(grad.at[c])));
      }
    } else {
#pragma unroll
      for (int c = 0; c < width; ++c) result.at[c] = static_cast<T>(A(0));
    }
    store_vector(p.out + to, result);
  }
}

template <class Part, class T>
void write_rows(DeviceCall& call, const RowGradients<T>& p, int64_t rows) {
  constexpr int wide = 16 / sizeof(T);
  const void* const data = Part::takes_data ? p.data : p.grad;
  if (vector_width<T>(p.columns, {p.grad, data, p.out}) == wide) {
    const RowTiling tiling(rows, p.columns, wide);
    launch(call, tiling.shape(), row_gradients_kernel<Part, wide, T>, p, tiling);
  } else {
    const RowTiling tiling(rows, p.columns, 1);
    launch(call, tiling.shape(), row_gradients_kernel<Part, 1, T>, p, tiling);
  }
}

// ---- Gradient -------------------------------------------------------------------------------------------------------

template <template <class, int> class Total, class T>
void share_columns(DeviceCall& call, const SegmentEntries& entries, RowGradients<T>& p) {
  const int64_t size = entries.segments * p.columns;
  acc_t<T>* const values = call.workspace<acc_t<T>>(size);
  int64_t* const counts = call.workspace<int64_t>(size);
  const Pooling pooling = pooling_of(entries, ScalarType::Float, p.data, p.columns);
  PoolView<T, int64_t> view = view_of<T, int64_t>(call, pooling);
  view.direction = p.direction;
  view.values = values;
  view.counts = counts;
  constexpr int wide = 16 / sizeof(T);
  if (vector_width<T>(p.columns, {p.data}) == wide) {
    launch_pool<Total<T, wide>>(call, view, pooling.entries);
  } else {
    launch_pool<Total<T, 1>>(call, view, pooling.entries);
  }
  p.values = values;
  p.counts = counts;
}

// entries(): the segments' rows; asked for only where they are needed.
template <class Entries>
Tensor row_gradients(DeviceCall& call, const Tensor& grad, const std::optional<Tensor>& data, const int64_t* segment_of,
                     const std::vector<int64_t>& shape, int64_t rows, Reduction reduction, const Entries& entries) {
  const Tensor out = call.empty(shape, grad.scalar_type());
  dispatch_float(grad.scalar_type(), call.op(), "grad", [&](auto tag) {
    using T = typename decltype(tag)::type;
    RowGradients<T> p{};
    p.grad = call.data<T>(grad);
    p.segment_of = segment_of;
    p.segments = grad.size(0);
    p.columns = row_elements(grad);
    p.reduction = reduction;
    p.direction = order_of<T>(reduction, false);
    p.out = static_cast<T*>(out.data_ptr());
    if (needs_data(reduction)) {
      p.data = call.data<T>(*data);
      if (reduction == Reduction::kProd) {
        share_columns<NonZeros>(call, entries(), p);
        return write_rows<ProductPart>(call, p, rows);
      }
      share_columns<Ties>(call, entries(), p);
      return write_rows<ExtremePart>(call, p, rows);
    }
    if (reduction != Reduction::kSum) {
      unsigned long long* const sizes = call.workspace<unsigned long long>(p.segments);
      fill_bytes(call.stream(), sizes, 0, p.segments * sizeof(*sizes));
      launch(call, one_thread_each(rows), segment_counts_kernel<int64_t>, segment_of, rows, p.segments, sizes);
      p.sizes = sizes;
    }
    write_rows<QuotientPart>(call, p, rows);
  });
  return out;
}

Tensor segment_reduce_backward_cuda(const Tensor& grad, const std::optional<Tensor>& data,
                                    const std::optional<Tensor>& segment_ids, const std::optional<Tensor>& offsets,
                                    int64_t rows, int64_t reduction_value) {
  const Reduction reduction = check_segment_reduce_backward(grad, data, segment_ids, offsets, rows, reduction_value);
  DeviceCall call("segment_reduce_backward", grad);
  call.asks("rows", rows);
  const std::optional<int64_t> segments = segment_ids ? std::optional<int64_t>(grad.size(0)) : std::nullopt;
  const SegmentEntries entries = sorted_segment_entries(call, segment_ids, offsets, segments, rows);
  const int64_t* const segment_of = entry_bags(call, BagOf{entries.offsets, entries.segments}, rows);
  return row_gradients(call, grad, data, segment_of, shape_with_rows(grad, rows), rows, reduction,
                       [&] { return entries; });
}

Tensor unsorted_segment_reduce_backward_cuda(const Tensor& grad, const std::optional<Tensor>& data,
                                             const Tensor& segment_ids, int64_t reduction_value) {
  const Reduction reduction = check_unsorted_segment_reduce_backward(grad, data, segment_ids, reduction_value);
  DeviceCall call("unsorted_segment_reduce_backward", grad);
  const int64_t rows = segment_ids.numel(), segments = grad.size(0);
  const int64_t* const segment_of = kept_segment_ids(call, segment_ids, segments);
  return row_gradients(call, grad, data, segment_of, shape_of_rows(segment_ids, grad), rows, reduction,
                       [&] { return grouped_segment_entries(call, segment_of, rows, segments); });
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "segment_reduce_backward", &tsr::segment_reduce_backward_cuda);
  TSR_IMPL(m, "unsorted_segment_reduce_backward", &tsr::unsorted_segment_reduce_backward_cuda);
}
