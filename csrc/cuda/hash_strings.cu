// CUDA doors of the hash family's operators on byte strings.
#include "../cuda.h"
#include "../hash.h"
#include "hash_words.cuh"

namespace tsr {
namespace {

// Bytes at any address, read by the aligned words that hold them, up to 3 bytes before and 4 after what is asked for:
// the device would load one byte at a time. See TextWords in hash_words.h.
class AlignedText {
 public:
  __device__ explicit AlignedText(const uint8_t* s)
      : words_(reinterpret_cast<const uint32_t*>(s - reinterpret_cast<uintptr_t>(s) % 4)),
        offset_(reinterpret_cast<uintptr_t>(s) % 4) {}

  __device__ AlignedText operator+(uint64_t n) const { return {words_ + (offset_ + n) / 4, (offset_ + n) % 4}; }
  __device__ uint8_t operator[](uint64_t i) const { return reinterpret_cast<const uint8_t*>(words_)[offset_ + i]; }

  friend __device__ uint32_t load32(AlignedText s) { return s.word(0); }
  friend __device__ uint64_t load64(AlignedText s) { return pair(s.word(0), s.word(1)); }

 private:
  __device__ AlignedText(const uint32_t* words, uint64_t offset) : words_(words), offset_(offset) {}
  __device__ uint32_t word(int i) const {
    return word_at(words_[i], words_[i + 1], static_cast<uint32_t>(offset_) * 8);
  }

  const uint32_t* words_;
  uint64_t offset_;  // below 4
};

// The hash of bytes[begin : end]. Nothing outside bytes [size] is read: around the first and the last strings there may
// be no room for whole words.
template <class Hash>
__device__ inline uint64_t hash_of_bytes(const Hash& hash, const uint8_t* bytes, int64_t size, int64_t begin,
                                         int64_t end) {
  const uint64_t n = static_cast<uint64_t>(end - begin);
  if (begin >= 4 && end + 4 <= size) return hash.of_bytes(AlignedText(bytes + begin), n);
  return hash.of_bytes(bytes + begin, n);
}

// One thread per string. Offsets that decrease or leave the bytes are reported, and their string is not read.
template <class Hash, class Result>
__global__ void hash_strings_kernel(const uint8_t* bytes, int64_t size, const int64_t* offsets, int64_t n, Hash hash,
                                    Result result, ErrorSink errors, int64_t* out) {
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
    out[i] = readable ? result(hash_of_bytes(hash, bytes, size, begin, end)) : 0;
  }
  if (n == 0 && thread_index() == 0 && (offsets[0] < 0 || offsets[0] > size)) {
    errors.report(Argument::kOffsets, Fault::kOutsideBytes, 0, offsets[0], size);
  }
}

template <class Hash, class Result>
Tensor hash_strings(const char* op, const Tensor& bytes, const Tensor& offsets, const Hash& hash,
                    const Result& result) {
  check_hash_strings(op, bytes, offsets);
  DeviceCall call(op, bytes);
  const int64_t n = offsets.size(0) - 1;
  const Tensor out = call.empty({n}, ScalarType::Long);
  launch(call, one_thread_each(std::max<int64_t>(n, 1)), hash_strings_kernel<Hash, Result>, call.data<uint8_t>(bytes),
         bytes.size(0), call.data<int64_t>(offsets), n, hash, result, call.errors(),
         static_cast<int64_t*>(out.data_ptr()));
  return out;
}

Tensor string_fingerprint64_cuda(const Tensor& bytes, const Tensor& offsets) {
  return hash_strings("string_fingerprint64", bytes, offsets, FarmHash(), HashBits());
}

Tensor string_to_hash_bucket_fast_cuda(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets) {
  const char* op = "string_to_hash_bucket_fast";
  return hash_strings(op, bytes, offsets, FarmHash(), checked_buckets(op, num_buckets));
}

Tensor string_to_hash_bucket_strong_cuda(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets, int64_t key0,
                                         int64_t key1) {
  const char* op = "string_to_hash_bucket_strong";
  return hash_strings(op, bytes, offsets, SipHash(key0, key1), checked_buckets(op, num_buckets));
}

Tensor string_to_hash_bucket_cuda(const Tensor& bytes, const Tensor& offsets, int64_t num_buckets) {
  const char* op = "string_to_hash_bucket";
  return hash_strings(op, bytes, offsets, MurmurHash(), checked_buckets(op, num_buckets));
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "string_fingerprint64", &tsr::string_fingerprint64_cuda);
  TSR_IMPL(m, "string_to_hash_bucket_fast", &tsr::string_to_hash_bucket_fast_cuda);
  TSR_IMPL(m, "string_to_hash_bucket_strong", &tsr::string_to_hash_bucket_strong_cuda);
  TSR_IMPL(m, "string_to_hash_bucket", &tsr::string_to_hash_bucket_cuda);
}
