#include "../cuda.h"
#include "../scores.h"
#include "device.cuh"

namespace tsr {
namespace {

struct Larger {
  template <class T>
  __device__ T operator()(T x, T y) const {
    return x > y ? x : y;
  }
};
struct Added {
  template <class T>
  __device__ T operator()(T x, T y) const {
    return x + y;
  }
};

// What f makes of the values of all threads of a block of whole warps, in one order: every thread gets it.
template <class T, class F>
__device__ T of_block(T mine, const F& f) {
  TSR_SHARED(T, of_warps, kWarp);
  for (int step = kWarp / 2; step > 0; step /= 2) mine = f(mine, __shfl_xor_sync(~0u, mine, step));
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  T all = of_warps[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) all = f(all, of_warps[warp]);
  __syncthreads();
  return all;
}

template <class T>
__device__ T exponential(T x);
template <>
__device__ inline float exponential(float x) {
  return x < -87.0f ? 0.0f : expf(x);
}
template <>
__device__ inline double exponential(double x) {
  return exp(x);
}

__global__ void targets_kernel(Integers target, int64_t n, int64_t rows, int64_t ignore_index, Argument argument,
                               int64_t* out, ErrorSink errors) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    const int64_t value = target[i];
    const bool is_ignored = value == ignore_index, is_bad = !is_ignored && (value < 0 || value >= rows);
    if (is_bad) errors.report(argument, Fault::kNotATarget, i, value, rows, -1, {-1, ignore_index});
    out[i] = is_ignored || is_bad ? -1 : value;
  }
}

template <class T>
__global__ void exclude_kernel(T* scores, int64_t samples, int64_t columns, const int64_t* ids, const int64_t* of,
                               int64_t n, int64_t first_row, ErrorSink errors) {
  const int64_t begin = lower_bound(ids, n, first_row), end = lower_bound(ids, n, first_row + columns);
  for (int64_t e = begin + thread_index(); e < end; e += thread_count()) {
    if (of[e] < 0 || of[e] >= samples) {
      errors.report(Argument::kSamples, Fault::kOutOfRange, e, of[e], samples);
    } else if (is_in_block(ids[e], first_row, columns)) {  // rows that do not ascend may lie elsewhere
      scores[of[e] * columns + ids[e] - first_row] = -std::numeric_limits<T>::infinity();
    }
  }
}

// Exponentials that a thread adds before float64 takes them.
constexpr int kTerms = 16;

// A block takes a sample: its scores are read twice, the second time from the cache.
template <class T>
__global__ void __launch_bounds__(kThreads)
    lse_kernel(const T* scores, int64_t samples, int64_t columns, const int64_t* target, int64_t first_row, T* maximum,
               double* sum, T* own) {
  for (int64_t n = blockIdx.x; n < samples; n += gridDim.x) {
    const T* const row = scores + n * columns;
    const T before = maximum[n];
    T top = before;
    for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) top = Larger()(row[c], top);
    top = of_block(top, Larger());
    const T base = base_of(top);
    double mine = 0;
    for (int64_t first = threadIdx.x; first < columns; first += blockDim.x * int64_t{kTerms}) {
      T terms = 0;
      for (int64_t c = first, k = 0; c < columns && k < kTerms; c += blockDim.x, ++k)
        terms += exponential(row[c] - base);
      mine += static_cast<double>(terms);
    }
    mine = of_block(mine, Added());
    if (threadIdx.x != 0) continue;
    const double all = (top == before ? sum[n] : sum[n] * exp(static_cast<double>(before) - base)) + mine;
    sum[n] = all;
    maximum[n] = all == all ? top : std::numeric_limits<T>::quiet_NaN();
    if (is_in_block(target[n], first_row, columns)) own[n] = row[target[n] - first_row];
  }
}

template <class T>
__global__ void softmax_kernel(T* scores, int64_t samples, int64_t columns, const T* maximum, const int64_t* target,
                               int64_t first_row, const T* factor, const T* own_factor) {
  for (int64_t n = blockIdx.x; n < samples; n += gridDim.x) {
    const T base = base_of(maximum[n]);
    const int64_t place = is_in_block(target[n], first_row, columns) ? target[n] - first_row : -1;
    for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
      T* const at = scores + n * columns + c;
      const T share = exponential(*at - base) * factor[n];
      *at = c == place ? share + own_factor[n] : share;
    }
  }
}

// Where a row's score would be among n that are in order.
template <class T>
__device__ int64_t place_among(const T* values, const int64_t* rows, int64_t n, T value, int64_t row) {
  int64_t begin = 0;
  while (begin < n) {
    const int64_t middle = begin + (n - begin) / 2;
    if (is_better(values[middle], rows[middle], value, row)) {
      begin = middle + 1;
    } else {
      n = middle;
    }
  }
  return begin;
}

// The scores that a block of threads has found to be better than a sample's k-th: at most one for each thread.
template <class T>
struct Found {
  T* values;  // [2 * kThreads]: as they came, and in order
  int64_t* rows;
  int* count;  // may be more than there is room for

  __device__ bool add(T value, int64_t row) const {
    const int place = atomicAdd(count, 1);
    if (place >= kThreads) return false;
    values[place] = value;
    rows[place] = row;
    return true;
  }

  // Merges them into the k best, which are in order. All threads call it, after a barrier.
  __device__ void merge(T* best, int64_t* best_rows, int64_t k) const {
    const int n = *count < kThreads ? *count : static_cast<int>(kThreads), mine = static_cast<int>(threadIdx.x);
    if (n == 0) return;
    T* const sorted = values + kThreads;
    int64_t* const sorted_rows = rows + kThreads;
    if (mine < n) {
      int place = 0;  // among those found: all rows differ
      for (int i = 0; i < n; ++i) place += is_better(values[i], rows[i], values[mine], rows[mine]);
      sorted[place] = values[mine];
      sorted_rows[place] = rows[mine];
    }
    __syncthreads();
    if (mine == 0) *count = 0;
    const int64_t stay = place_among(best, best_rows, k, sorted[0], sorted_rows[0]);
    const int64_t to = mine < n ? mine + place_among(best, best_rows, k, sorted[mine], sorted_rows[mine])
                                : std::numeric_limits<int64_t>::max();
    // The others move up, the last ones first: none to a place that is still to be read.
    for (int64_t end = k; end > stay; end -= blockDim.x) {
      const int64_t i = end - 1 - mine;
      const bool moves = i >= stay;
      const T value = moves ? best[i] : T(0);
      const int64_t row = moves ? best_rows[i] : 0;
      const int64_t up = moves ? i + place_among(sorted, sorted_rows, n, value, row) : k;
      __syncthreads();
      if (up < k) {
        best[up] = value;
        best_rows[up] = row;
      }
      __syncthreads();
    }
    if (to < k) {
      best[to] = sorted[mine];
      best_rows[to] = sorted_rows[mine];
    }
    __syncthreads();
  }
};

// A block takes a sample. Most blocks of scores hold none that is better than the k-th: then they are read once.
template <class T>
__global__ void __launch_bounds__(kThreads) top_k_kernel(const T* scores, int64_t samples, int64_t columns,
                                                         int64_t first_row, T* values, int64_t* rows, int64_t k) {
  TSR_SHARED(T, found_values, 2 * kThreads);
  TSR_SHARED(int64_t, found_rows, 2 * kThreads);
  TSR_SHARED(int, count, 1);
  const Found<T> found{found_values, found_rows, count};
  if (threadIdx.x == 0) *count = 0;
  for (int64_t n = blockIdx.x; n < samples; n += gridDim.x) {
    const T* const row = scores + n * columns;
    T* const best = values + n * k;
    int64_t* const best_rows = rows + n * k;
    const T last = best[k - 1];
    const int64_t last_row = best_rows[k - 1];
    bool any = false;
    for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) any |= is_better(row[c], first_row + c, last, last_row);
    if (!__syncthreads_or(any)) continue;
    for (int64_t first = 0; first < columns; first += blockDim.x) {
      const int64_t c = first + threadIdx.x;
      bool waits = c < columns;
      while (true) {
        waits = waits && is_better(row[c], first_row + c, best[k - 1], best_rows[k - 1]) &&
                !found.add(row[c], first_row + c);
        if (!__syncthreads_or(waits)) break;
        found.merge(best, best_rows, k);
      }
    }
    found.merge(best, best_rows, k);
  }
}

LaunchShape block_each(int64_t samples) { return {std::min(samples, kMaxBlocks)}; }

Tensor scores_targets_cuda(const Tensor& target, int64_t rows, int64_t ignore_index, bool excluded) {
  check_scores_targets(target, rows);
  DeviceCall call("scores_targets", target);
  const int64_t n = target.size(0);
  const Tensor out = call.empty({n}, ScalarType::Long);
  const Integers given{call.data(target), target.scalar_type() == ScalarType::Long};
  launch(call, one_thread_each(n), targets_kernel, given, n, rows, ignore_index,
         excluded ? Argument::kExcluded : Argument::kTarget, out.mutable_data_ptr<int64_t>(), call.errors());
  return out;
}

void scores_exclude_cuda(const Tensor& scores, const Tensor& row_ids, const Tensor& samples, int64_t first_row) {
  check_scores_exclude(scores, row_ids, samples, first_row);
  DeviceCall call("scores_exclude_", scores);
  with_accumulator(scores.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    // How many ids are the block's is not known here.
    const int64_t threads = std::min(std::min(row_ids.size(0), scores.numel()), kFullDevice);
    launch(call, one_thread_each(threads), exclude_kernel<T>, scores.mutable_data_ptr<T>(), scores.size(0),
           scores.size(1), call.data<int64_t>(row_ids), call.data<int64_t>(samples), row_ids.size(0), first_row,
           call.errors());
  });
}

void scores_lse_cuda(const Tensor& scores, const Tensor& target, int64_t first_row, const Tensor& maximum,
                     const Tensor& sum, const Tensor& own) {
  check_scores_lse(scores, target, first_row, maximum, sum, own);
  DeviceCall call("scores_lse_", scores);
  with_accumulator(scores.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(call, block_each(scores.size(0)), lse_kernel<T>, call.data<T>(scores), scores.size(0), scores.size(1),
           call.data<int64_t>(target), first_row, maximum.mutable_data_ptr<T>(), sum.mutable_data_ptr<double>(),
           own.mutable_data_ptr<T>());
  });
}

void scores_softmax_cuda(const Tensor& scores, const Tensor& maximum, const Tensor& target, int64_t first_row,
                         const Tensor& factor, const Tensor& own_factor) {
  check_scores_softmax(scores, maximum, target, first_row, factor, own_factor);
  DeviceCall call("scores_softmax_", scores);
  with_accumulator(scores.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(call, block_each(scores.size(0)), softmax_kernel<T>, scores.mutable_data_ptr<T>(), scores.size(0),
           scores.size(1), call.data<T>(maximum), call.data<int64_t>(target), first_row, call.data<T>(factor),
           call.data<T>(own_factor));
  });
}

void scores_top_k_cuda(const Tensor& scores, int64_t first_row, const Tensor& values, const Tensor& rows) {
  check_scores_top_k(scores, first_row, values, rows);
  DeviceCall call("scores_top_k_", scores);
  const int64_t k = values.size(1);
  if (k == 0) return;
  with_accumulator(scores.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(call, block_each(scores.size(0)), top_k_kernel<T>, call.data<T>(scores), scores.size(0), scores.size(1),
           first_row, values.mutable_data_ptr<T>(), rows.mutable_data_ptr<int64_t>(), k);
  });
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "scores_targets", &tsr::scores_targets_cuda);
  TSR_IMPL(m, "scores_exclude_", &tsr::scores_exclude_cuda);
  TSR_IMPL(m, "scores_lse_", &tsr::scores_lse_cuda);
  TSR_IMPL(m, "scores_softmax_", &tsr::scores_softmax_cuda);
  TSR_IMPL(m, "scores_top_k_", &tsr::scores_top_k_cuda);
}
