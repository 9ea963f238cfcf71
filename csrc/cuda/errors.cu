#include <map>
#include <mutex>

#include "../cuda.h"
#include "../hash_cross.h"
#include "../scores.h"
#include "errors.h"

namespace tsr {
namespace {

struct DeviceErrors {
  ErrorRecord* record;
  uint64_t calls = 0;
};

__global__ void take_fault_kernel(ErrorRecord* record) { take_fault(record); }

#ifndef TSR_EMULATED
// While a graph is captured, allocating and waiting are refused unless the mode is relaxed.
class RelaxedCapture {
 public:
  RelaxedCapture() { STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Mapped: kernels write to it by its host address. Never freed: kernels may run until the process ends.
ErrorRecord* new_record() {
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  STD_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(ErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable));
  return new (memory) ErrorRecord;
}

// The current device's name and compute capability, if this library has no code that it can run.
std::optional<std::string> device_without_code(int32_t device) {
  cudaFuncAttributes attributes;
  const cudaError_t result = cudaFuncGetAttributes(&attributes, take_fault_kernel);
  if (result != cudaErrorNoKernelImageForDevice && result != cudaErrorInvalidDeviceFunction) {
    STD_CUDA_CHECK(result);
    return std::nullopt;
  }
  static_cast<void>(cudaGetLastError());  // which others would take for theirs
  cudaDeviceProp properties;
  STD_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return message(properties.name, ", of compute capability ", properties.major, ".", properties.minor);
}

// Runs the kernel beside all that the device does, and waits for it.
void run_alone(void (*kernel)(ErrorRecord*), ErrorRecord* record) {
  const RelaxedCapture relaxed;
  cudaStream_t stream = nullptr;
  STD_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  start_kernel(stream, 1, 1, 0, kernel, record);
  const cudaError_t result = cudaStreamSynchronize(stream);
  STD_CUDA_CHECK(cudaStreamDestroy(stream));
  STD_CUDA_CHECK(result);
}
#else
void run_alone(void (*kernel)(ErrorRecord*), ErrorRecord* record) { start_kernel(0, 1, 1, 0, kernel, record); }
#endif

std::mutex& errors_mutex() {
  static std::mutex mutex;
  return mutex;
}

DeviceErrors& device_errors(int32_t device) {
  static std::map<int32_t, DeviceErrors> all;
  const auto found = all.find(device);
  if (found != all.end()) return found->second;
  if (const auto without = device_without_code(device)) {
    throw std::runtime_error(
        message("torchsparse_rec was built without code for this GPU, ", *without,
                ": build it with TORCH_CUDA_ARCH_LIST naming that, or keep the tensors on the CPU"));
  }
  return all.emplace(device, DeviceErrors{new_record()}).first->second;
}

const char* argument_name(Argument argument) {
  switch (argument) {
    case Argument::kIndices:
      return "indices";
    case Argument::kSegmentIds:
      return "segment_ids";
    case Argument::kOffsets:
      return "offsets";
    case Argument::kValues:
      return "values";
    case Argument::kRowIds:
      return "row_ids";
    case Argument::kReverseIndexMap:
      return "reverse_index_map";
    case Argument::kIds:
      return "ids";
    case Argument::kRows:
      return "rows";
    case Argument::kCounters:
      return "counters";
    case Argument::kFreeRows:
      return "free_rows";
    case Argument::kTarget:
      return "target";
    case Argument::kExcluded:
      return "excluded";
    case Argument::kSamples:
      return "samples";
    default:
      return "per_sample_weights";
  }
}

// The words of the CPU's errors.
[[noreturn]] void raise(const FaultDetails& e) {
  const uint64_t in_all = e.key & ((uint64_t{1} << kPositionBits) - 1);
  const uint64_t position = in_all - static_cast<uint64_t>(e.begin);
  std::string argument = message(e.op, ": ", argument_name(e.argument));
  if (e.item >= 0) argument += message("[", e.item, "]");
  const std::string element =
      e.column < 0 ? message(argument, "[", position, "]") : message(argument, "[", position, ", ", e.column, "]");
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
    case Fault::kColumnOffsets:
      throw std::invalid_argument(message(argument, "[", e.bound, "]", kColumnOffsetsRule, got));
    case Fault::kTooManyCrosses:
      throw std::invalid_argument(too_many_crosses(e.bound, static_cast<int64_t>(position)));
    case Fault::kNotItems:
      throw std::invalid_argument(
          message(element, ", the last, must be the number of items, ", e.bound, ", got ", e.value));
    case Fault::kUnsortedIndex:
      throw std::invalid_argument(message(argument, " must be sorted, got element ", e.bound,
                                          " of the dense tensor followed by element ", e.value, " at position ",
                                          position));
    case Fault::kRepeatedIndex:
      throw std::invalid_argument(message(argument, " must not repeat, got element ", e.value,
                                          " of the dense tensor again at position ", position));
    case Fault::kNoRow:
      throw std::out_of_range(message(element, " must name a row that its shard has, got ", e.value));
    case Fault::kNotIncreasing:
      throw std::invalid_argument(
          message(argument, " must increase strictly, got ", e.value, " after ", e.bound, " at position ", position));
    case Fault::kNotBelow:
      throw std::out_of_range(message(element, " must be below ", e.bound, ", got ", e.value));
    case Fault::kOutsideClosed:
      throw std::invalid_argument(message(element, " must be in [0, ", e.bound, "], got ", e.value));
    case Fault::kNotATarget:
      throw std::out_of_range(bad_target(argument_name(e.argument), static_cast<int64_t>(in_all), e.value, e.bound,
                                         e.begin, e.argument == Argument::kExcluded));
    case Fault::kNotFree:
      throw std::invalid_argument(message(element, " must be in [0, ", e.bound,
                                          "), without a key and more than the one before it, got ", e.value));
    default:
      throw std::invalid_argument(message(element, " must be a number, got nan"));
  }
}

// Under the mutex. A kernel that is still running may yet report a fault that comes before those seen so far: waits for
// the stream, which is dear only where something is wrong. A stream that is being captured cannot be waited for.
void raise_recorded(const DeviceErrors& errors, Stream stream) {
  if (static_cast<volatile const ErrorRecord*>(errors.record)->first == kNoError) return;
  if (!is_capturing(stream)) wait_for(stream);
  run_alone(take_fault_kernel, errors.record);
  const FaultDetails fault = errors.record->taken;
  if (fault.key != kNoError) raise(fault);
}

void check_errors_cuda(const Tensor& probe) {
  const int32_t device = probe.get_device_index();
  const DeviceGuard guard(device);
  const std::lock_guard<std::mutex> lock(errors_mutex());
  raise_recorded(device_errors(device), current_stream(device));
}

}  // namespace

ErrorSink begin_errors(const char* op, int32_t device, Stream stream) {
  const std::lock_guard<std::mutex> lock(errors_mutex());
  DeviceErrors& errors = device_errors(device);
  raise_recorded(errors, stream);
  // The number wraps: after a million calls two pending faults may change places, no more.
  const uint64_t call = errors.calls++ & ((uint64_t{1} << kCallBits) - 1);
  return {errors.record, call << (kPositionBits + kArgumentBits), op};
}

}  // namespace tsr

TSR_CUDA_KERNELS(m) { TSR_IMPL(m, "check_errors", &tsr::check_errors_cuda); }
