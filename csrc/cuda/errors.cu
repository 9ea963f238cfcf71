#include <atomic>
#include <map>
#include <mutex>

#include "../cuda.h"
#include "errors.h"

namespace tsr {
namespace {

struct DeviceErrors {
  ErrorRecord* record;
  uint64_t calls = 0;
};

#ifndef TSR_EMULATED
// Mapped: kernels write to it by its host address. Never freed: kernels may run until the process ends.
ErrorRecord* new_record() {
  // The first call may happen while a graph is captured, where allocating is refused unless the mode is relaxed.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  void* memory = nullptr;
  const cudaError_t result = cudaHostAlloc(&memory, sizeof(ErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable);
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  STD_CUDA_CHECK(result);
  return new (memory) ErrorRecord;
}
#endif

std::mutex& errors_mutex() {
  static std::mutex mutex;
  return mutex;
}

DeviceErrors& device_errors(int32_t device) {
  static std::map<int32_t, DeviceErrors> all;
  const auto found = all.find(device);
  return found != all.end() ? found->second : all.emplace(device, DeviceErrors{new_record()}).first->second;
}

// The record as it was at one moment, and emptied; nothing if it is empty or just being written.
std::optional<ErrorRecord> take_record(ErrorRecord* record) {
  volatile ErrorRecord* const r = record;
  if (r->key == kNoError) return std::nullopt;
  const unsigned before = r->sequence;
  std::atomic_thread_fence(std::memory_order_acquire);
  ErrorRecord copy;
  copy.key = r->key;
  copy.value = r->value;
  copy.bound = r->bound;
  copy.op = r->op;
  copy.argument = const_cast<const Argument&>(r->argument);
  copy.fault = const_cast<const Fault&>(r->fault);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (before % 2 != 0 || r->sequence != before) return std::nullopt;
  r->key = kNoError;
  return copy;
}

const char* argument_name(Argument argument) {
  switch (argument) {
    case Argument::kIndices:
      return "indices";
    case Argument::kSegmentIds:
      return "segment_ids";
    case Argument::kOffsets:
      return "offsets";
    default:
      return "per_sample_weights";
  }
}

// The words of the CPU's errors.
[[noreturn]] void raise(const ErrorRecord& e) {
  const uint64_t position = e.key & ((uint64_t{1} << kPositionBits) - 1);
  const std::string argument = message(e.op, ": ", argument_name(e.argument));
  const std::string element = message(argument, "[", position, "]");
  const std::string got = message(", got ", e.value, " at position ", position);
  switch (e.fault) {
    case Fault::kOutOfRange:
      throw std::out_of_range(message(element, " must be in [0, ", e.bound, "), got ", e.value));
    case Fault::kNegative:
      throw std::invalid_argument(message(element, " must be >= 0, got ", e.value));
    case Fault::kUnsorted:
      throw std::invalid_argument(
          message(argument, " must be sorted, got ", e.bound, " followed by ", e.value, " at position ", position));
    case Fault::kDecreasing:
      throw std::invalid_argument(
          message(argument, " must not decrease, got ", e.bound, " followed by ", e.value, " at position ", position));
    case Fault::kTooLarge:
      throw std::invalid_argument(message(element, " must be below num_segments = ", e.bound, ", got ", e.value));
    case Fault::kNotFirst:
      throw std::invalid_argument(message(element, " must be 0, got ", e.value));
    case Fault::kNotLast:
      throw std::invalid_argument(
          message(element, ", the last, must be the number of indices, ", e.bound, ", got ", e.value));
    case Fault::kBeforeBytes:
      throw std::invalid_argument(message(argument, " must be >= 0", got));
    case Fault::kUnsortedBytes:
      throw std::invalid_argument(message(argument, " must not decrease", got, " after ", e.bound));
    case Fault::kBeyondBytes:
      throw std::invalid_argument(message(argument, " must be at most ", e.bound, ", the number of bytes", got));
    case Fault::kOutsideBytes:
      throw std::invalid_argument(message(argument, " must be in [0, ", e.bound, "], the number of bytes", got));
    default:
      throw std::invalid_argument(message(element, " must be a number, got nan"));
  }
}

// Under the mutex.
void raise_recorded(const DeviceErrors& errors) {
  if (const auto record = take_record(errors.record)) raise(*record);
}

void check_errors_cuda(const Tensor& probe) {
  const std::lock_guard<std::mutex> lock(errors_mutex());
  raise_recorded(device_errors(probe.get_device_index()));
}

}  // namespace

ErrorSink begin_errors(const char* op, int32_t device) {
  const std::lock_guard<std::mutex> lock(errors_mutex());
  DeviceErrors& errors = device_errors(device);
  raise_recorded(errors);
  // The number wraps: after a million calls two pending faults may change places, no more.
  const uint64_t call = errors.calls++ & ((uint64_t{1} << kCallBits) - 1);
  return {errors.record, call << (kPositionBits + kArgumentBits), op};
}

}  // namespace tsr

TSR_CUDA_KERNELS(m) { TSR_IMPL(m, "check_errors", &tsr::check_errors_cuda); }
