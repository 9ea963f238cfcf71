#include "memory.h"

#include <algorithm>

#include "cuda.h"
#include "races.h"

namespace tsr {
namespace emulated {
namespace {

constexpr size_t kGuardBytes = 64;  // keeps an allocation's alignment
constexpr uint8_t kGuard = 0xa5;
constexpr uint8_t kUnwritten = 0xff;

// The tensors of the running operator call.
std::vector<Tensor> guarded;
bool capturing = false;

bool intact(const uint8_t* bytes) {
  return std::all_of(bytes, bytes + kGuardBytes, [](uint8_t byte) { return byte == kGuard; });
}

}  // namespace

void check_guards() {
  for (const Tensor& flat : guarded) {
    const uint8_t* const bytes = static_cast<const uint8_t*>(flat.data_ptr());
    const size_t size = static_cast<size_t>(flat.numel()) * flat.element_size();
    if (!intact(bytes)) throw std::logic_error("emulated CUDA: a kernel wrote before the start of a tensor");
    if (!intact(bytes + size - kGuardBytes)) {
      throw std::logic_error("emulated CUDA: a kernel wrote behind the end of a tensor");
    }
  }
}

void release_guards() { guarded.clear(); }

void* SharedMemory::get(const void* key, size_t bytes) {
  for (const Array& array : arrays_) {
    if (array.key == key) return array.start;
  }
  Array array{key, bytes, std::make_unique<uint8_t[]>(bytes + 3 * kGuardBytes), nullptr};
  const uintptr_t begin = reinterpret_cast<uintptr_t>(array.memory.get()) + kGuardBytes;
  array.start = reinterpret_cast<uint8_t*>((begin + kGuardBytes - 1) / kGuardBytes * kGuardBytes);
  std::fill_n(array.start - kGuardBytes, kGuardBytes, kGuard);
  std::fill_n(array.start, bytes, kUnwritten);
  std::fill_n(array.start + bytes, kGuardBytes, kGuard);
  start_shared(array.start, bytes);
  arrays_.push_back(std::move(array));
  return arrays_.back().start;
}

size_t SharedMemory::bytes() const {
  size_t total = 0;
  for (const Array& array : arrays_) total += array.key == nullptr ? 0 : array.bytes;
  return total;
}

void SharedMemory::check() const {
  for (const Array& array : arrays_) {
    if (!intact(array.start - kGuardBytes) || !intact(array.start + array.bytes)) {
      throw std::logic_error("emulated CUDA: a kernel wrote outside a shared array");
    }
  }
}

}  // namespace emulated

DeviceGuard::~DeviceGuard() { emulated::release_guards(); }

bool is_capturing(Stream) { return emulated::capturing; }

void fill_bytes(Stream, void* to, int value, size_t bytes) {
  if (bytes > 0) std::memset(to, value, bytes);
  emulated::count_launches(bytes > 0);
  emulated::check_guards();
}

void copy_to_host(int32_t, void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

ErrorRecord* new_record() { return new ErrorRecord; }

std::optional<std::string> device_without_code(int32_t) {
  return std::getenv("TORCHSPARSE_REC_EMULATED_OLD_GPU")
             ? std::optional<std::string>("Pretended, of compute capability 7.5")
             : std::nullopt;
}

Tensor device_empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype, const Asked& asked) {
  constexpr int64_t kMost = int64_t{1} << 50;  // more than any memory: guards are not added
  int64_t elements = 1;
  bool fits = true;
  for (const int64_t size : sizes) fits &= !__builtin_mul_overflow(elements, size, &elements);
  if (!fits || elements > kMost) return new_empty(like, sizes, dtype, asked);
#if defined(__SANITIZE_ADDRESS__)
  // Without guards: the sanitizer watches the ends.
  const Tensor result = new_empty(like, sizes, dtype, asked);
  if (elements > 0) std::memset(result.data_ptr(), emulated::kUnwritten, elements * result.element_size());
  return result;
#else
  const size_t element_bytes = new_empty(like, {0}, dtype).element_size();
  const int64_t margin = static_cast<int64_t>(emulated::kGuardBytes / element_bytes);
  const Tensor flat = new_empty(like, {elements + 2 * margin}, dtype, asked);
  uint8_t* const bytes = static_cast<uint8_t*>(flat.data_ptr());
  const size_t size = static_cast<size_t>(elements) * element_bytes;
  std::memset(bytes, emulated::kGuard, emulated::kGuardBytes);
  std::memset(bytes + emulated::kGuardBytes, emulated::kUnwritten, size);
  std::memset(bytes + emulated::kGuardBytes + size, emulated::kGuard, emulated::kGuardBytes);
  emulated::guarded.push_back(flat);
  Tensor inner = torch::stable::narrow(const_cast<Tensor&>(flat), 0, margin, elements);
  return torch::stable::view(inner, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
#endif
}

}  // namespace tsr

// Whether the current stream counts as being captured into a graph.
extern "C" __attribute__((visibility("default"))) void tsr_emulated_set_capturing(int capturing) {
  tsr::emulated::capturing = capturing != 0;
}
