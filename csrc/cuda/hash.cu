#include "../cuda.h"
#include "../hash.h"

namespace tsr {
namespace {

// One thread per integer; its decimal text never leaves the registers.
template <class T>
__global__ void to_hash_bucket_kernel(const T* x, int64_t n, BucketRemainder bucket, int64_t* out) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) out[i] = bucket(fingerprint64_of_decimal(x[i]));
}

Tensor to_hash_bucket_fast_cuda(const Tensor& x, int64_t num_buckets) {
  DeviceCall call("to_hash_bucket_fast", x);
  check_to_hash_bucket_fast(x, num_buckets);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < x.dim(); ++d) shape.push_back(x.size(d));
  const Tensor out = call.empty(shape, ScalarType::Long);
  dispatch_integer(x.scalar_type(), call.op(), "x", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(call, one_thread_each(x.numel()), to_hash_bucket_kernel<T>, call.data<T>(x), x.numel(),
           BucketRemainder(num_buckets), static_cast<int64_t*>(out.data_ptr()));
  });
  return out;
}

// One thread per string. Offsets that decrease or leave the bytes are reported, and their string is not read.
__global__ void string_to_hash_bucket_kernel(const uint8_t* bytes, int64_t size, const int64_t* offsets, int64_t n,
                                             BucketRemainder bucket, ErrorSink errors, int64_t* out) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    const int64_t begin = offsets[i], end = offsets[i + 1];
    if (i == 0 && begin < 0) {
      errors.report(Argument::kOffsets, Fault::kBeforeBytes, i, begin, 0);
    } else if (end < begin) {
      errors.report(Argument::kOffsets, Fault::kUnsortedBytes, i + 1, end, begin);
    } else if (end > size) {
      errors.report(Argument::kOffsets, Fault::kBeyondBytes, i + 1, end, size);
    }
    const bool readable = begin >= 0 && begin <= end && end <= size;
    out[i] = readable ? bucket(fingerprint64(bytes + begin, end - begin)) : 0;
  }
  if (n == 0 && thread_index() == 0 && (offsets[0] < 0 || offsets[0] > size)) {
    errors.report(Argument::kOffsets, Fault::kOutsideBytes, 0, offsets[0], size);
  }
}

Tensor string_to_hash_bucket_fast_cuda(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets) {
  DeviceCall call("string_to_hash_bucket_fast", bytes);
  check_string_to_hash_bucket_fast(bytes, offsets, num_buckets);
  TSR_CHECK_VALUE(offsets.is_cuda() == bytes.is_cuda() && offsets.get_device_index() == bytes.get_device_index(),
                  call.op(), ": offsets must be on the device of bytes");
  const int64_t n = offsets.size(0) - 1;
  const Tensor out = call.empty({n}, ScalarType::Long);
  launch(call, one_thread_each(std::max<int64_t>(n, 1)), string_to_hash_bucket_kernel, call.data<uint8_t>(bytes),
         bytes.size(0), call.data<int64_t>(offsets), n, BucketRemainder(num_buckets), call.errors(),
         static_cast<int64_t*>(out.data_ptr()));
  return out;
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "to_hash_bucket_fast", &tsr::to_hash_bucket_fast_cuda);
  TSR_IMPL(m, "string_to_hash_bucket_fast", &tsr::string_to_hash_bucket_fast_cuda);
}
