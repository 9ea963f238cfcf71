#include "pool_sum.cuh"
#include "segment.cuh"

namespace tsr {
namespace {

// ---- Totals ---------------------------------------------------------------------------------------------------------

// A bag's rows folded by an Operation, beginning with the first.
template <class Operation, class T, int width_>
struct Fold {
  using A = acc_t<T>;
  static constexpr int width = width_;

  struct Entry : Sum<T, width_>::Entry {
    Operation operation;

    template <class I>
    __device__ void prepare(const PoolView<T, I>& p, int64_t) {
      operation.prepare(p);
    }
    template <class I>
    __device__ void load(const PoolView<T, I>& p, const RowTile& tile, bool has_columns, int64_t index, int64_t j) {
      Sum<T, width_>::Entry::load(p, tile, has_columns, index, j);
      if (!has_columns) return;
#pragma unroll
      for (int c = 0; c < width; ++c) {
        this->row.at[c] = static_cast<T>(operation.load(p, static_cast<A>(this->row.at[c])));
      }
    }
  };

  A value[width] = {};
  int64_t count = 0;
  Operation operation;

  __device__ void add(const Entry& entry, int64_t) {
    operation = entry.operation;
#pragma unroll
    for (int c = 0; c < width; ++c) {
      const A x = static_cast<A>(entry.row.at[c]);
      value[c] = count == 0 ? x : operation.fold(value[c], x);
    }
    ++count;
  }

  __device__ void merge(const Fold& later) {
    if (later.count == 0) return;
    operation = later.operation;
#pragma unroll
    for (int c = 0; c < width; ++c) {
      value[c] = count == 0 ? later.value[c] : operation.fold(value[c], later.value[c]);
    }
    count += later.count;
  }

  template <class View>
  __device__ void store(const View& p, int64_t bag, const RowTile& tile) const {
    if (tile.column >= p.columns) return;
    Vector<T, width> result;
#pragma unroll
    for (int c = 0; c < width; ++c) {
      result.at[c] = count == 0 ? p.empty : static_cast<T>(operation.store(p, value[c], count));
    }
    store_vector(p.out + bag * p.columns + tile.column, result);
  }
};

// Values are loaded such that the largest wins, and stored as they were.
struct Largest {
  template <class View>
  __device__ void prepare(const View&) {}
  template <class View, class A>
  __device__ A load(const View& p, A x) const {
    return ordered(x, p.direction);
  }
  template <class A>
  __device__ A fold(A total, A x) const {
    return x > total || x != x ? x : total;  // x != x: x is NaN
  }
  template <class View, class A>
  __device__ A store(const View& p, A total, int64_t) const {
    return ordered(total, p.direction);
  }
};

struct Product {
  template <class View>
  __device__ void prepare(const View&) {}
  template <class View, class A>
  __device__ A load(const View&, A x) const {
    return x;
  }
  template <class A>
  __device__ A fold(A total, A x) const {
    return total * x;
  }
  template <class View, class A>
  __device__ A store(const View&, A total, int64_t) const {
    return total;
  }
};

// Every reduction of integers, told apart as it runs: they are rare, and a kernel for each would take as long to
// compile as all those of floats.
struct OfIntegers {
  Reduction reduction;

  template <class View>
  __device__ void prepare(const View& p) {
    reduction = p.reduction;
  }
  template <class View, class A>
  __device__ A load(const View& p, A x) const {
    return is_extreme(reduction) ? ordered(x, p.direction) : x;
  }
  template <class A>
  __device__ A fold(A total, A x) const {
    switch (reduction) {
      case Reduction::kProd:
        return static_cast<A>(static_cast<uint64_t>(total) * static_cast<uint64_t>(x));
      case Reduction::kMax:
      case Reduction::kMin:
        return x > total ? x : total;
      default:
        return static_cast<A>(total + x);
    }
  }
  template <class View, class A>
  __device__ A store(const View& p, A total, int64_t count) const {
    return reduction == Reduction::kMean ? integer_mean(total, static_cast<A>(count), p.is_signed) : load(p, total);
  }
};

// ---- Forward --------------------------------------------------------------------------------------------------------

template <class Operation, class T>
void fold_rows(DeviceCall& call, const Pooling& pooling, const PoolView<T, int64_t>& view) {
  constexpr int wide = 16 / sizeof(T);
  if (vector_width<T>(pooling.columns, {pooling.table, pooling.out}) == wide) {
    launch_pool<Fold<Operation, T, wide>>(call, view, pooling.entries);
  } else {
    launch_pool<Fold<Operation, T, 1>>(call, view, pooling.entries);
  }
}

// `unsorted`: what a segment without rows becomes.
void reduce(DeviceCall& call, const Tensor& data, const SegmentEntries& entries, const RowShape& shape,
            Reduction reduction, bool unsorted, const Tensor& out) {
  const ScalarType dtype = data.scalar_type();
  Pooling pooling = pooling_of(entries, dtype, call.data(data), shape.elements);
  pooling.out = out.data_ptr();
  pooling.divisor = divisor_of(reduction);
  dispatch_reduced(dtype, call.op(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    PoolView<T, int64_t> view = view_of<T, int64_t>(call, pooling);
    view.is_signed = is_signed_dtype(dtype);
    view.direction = order_of<T>(reduction, view.is_signed);
    view.empty = empty_segment<T>(reduction, unsorted, view.is_signed);
    if constexpr (is_integer_v<T>) {
      view.reduction = reduction;
      launch_pool<Fold<OfIntegers, T, 1>>(call, view, pooling.entries);
    } else if (reduction == Reduction::kProd) {
      fold_rows<Product>(call, pooling, view);
    } else if (needs_data(reduction)) {
      fold_rows<Largest>(call, pooling, view);
    } else {
      pool_rows(call, pooling);
    }
  });
}

Tensor segment_reduce_cuda(const Tensor& data, const std::optional<Tensor>& segment_ids,
                           const std::optional<Tensor>& offsets, std::optional<int64_t> num_segments,
                           int64_t reduction_value) {
  const Reduction reduction = check_segment_reduce(data, segment_ids, offsets, num_segments, reduction_value);
  DeviceCall call("segment_reduce", data);
  const SegmentEntries entries = sorted_segment_entries(call, segment_ids, offsets, num_segments, data.size(0));
  const Tensor out = call.empty(shape_of_segments(data, 1, entries.segments), data.scalar_type());
  reduce(call, data, entries, RowShape(data, 1), reduction, /*unsorted=*/false, out);
  return out;
}

Tensor unsorted_segment_reduce_cuda(const Tensor& data, const Tensor& segment_ids, int64_t num_segments,
                                    int64_t reduction_value) {
  const Reduction reduction = check_unsorted_segment_reduce(data, segment_ids, num_segments, reduction_value);
  DeviceCall call("unsorted_segment_reduce", data);
  call.asks("num_segments", num_segments);
  const RowShape shape(data, segment_ids.dim());
  const Tensor out = call.empty(shape_of_segments(data, segment_ids.dim(), num_segments), data.scalar_type());
  const SegmentEntries entries =
      grouped_segment_entries(call, kept_segment_ids(call, segment_ids, num_segments), shape.rows, num_segments);
  reduce(call, data, entries, shape, reduction, /*unsorted=*/true, out);
  return out;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "segment_reduce", &tsr::segment_reduce_cuda);
  TSR_IMPL(m, "unsorted_segment_reduce", &tsr::unsorted_segment_reduce_cuda);
}
