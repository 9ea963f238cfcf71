// The only file that includes torch: everything the kernels may use of it, in this project's words.
//
// torch is used through its stable ABI (TORCH_TARGET_VERSION 2.10), so that one build serves every torch >= 2.10.
// Facts that shape this file: a C++ std::invalid_argument reaches Python as ValueError and std::out_of_range as
// IndexError, with their text; a failing ATen call and a throw inside parallel_for lose theirs.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "memory.h"

// torch 2.11's; null where torch is older.
extern "C" __attribute__((weak, visibility("default"))) AOTITorchError torch_from_blob(
    void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t storage_offset, int32_t dtype,
    int32_t device_type, int32_t device_index, AtenTensorHandle* result, int32_t layout, const uint8_t* opaque_metadata,
    int64_t opaque_metadata_size, void (*deleter)(void* data, void* context), void* deleter_context);

namespace tsr {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---- Errors ---------------------------------------------------------------------------------------------------------

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// A wrong shape, dtype or argument: ValueError in Python. Text: "<op>: <argument> must ..., got ...".
#define TSR_CHECK_VALUE(condition, ...) \
  if (!(condition)) throw std::invalid_argument(::tsr::message(__VA_ARGS__))
// An id or position outside its bound: IndexError in Python.
#define TSR_CHECK_INDEX(condition, ...) \
  if (!(condition)) throw std::out_of_range(::tsr::message(__VA_ARGS__))

inline std::string shape_text(const Tensor& x) {
  std::ostringstream text;
  text << '[';
  for (int64_t d = 0; d < x.dim(); ++d) text << (d ? ", " : "") << x.size(d);
  text << ']';
  return text.str();
}

inline int32_t device_type(const Tensor& x) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  return type;
}

inline std::string device_text(const Tensor& x) {
  const int32_t type = device_type(x);
  if (type == aoti_torch_device_type_cuda()) return message("cuda:", x.get_device_index());
  return type == aoti_torch_device_type_cpu() ? "cpu" : type == aoti_torch_device_type_meta() ? "meta" : "another";
}

// To be called before anything is opened on a device: which of the tensors torch has chosen a kernel by is not known.
template <class Name, class OtherName>
void check_same_device(const char* op, const Name& argument, const Tensor& x, const OtherName& other_name,
                       const Tensor& other) {
  TSR_CHECK_VALUE(device_type(x) == device_type(other) && x.get_device_index() == other.get_device_index(), op, ": ",
                  argument, " must be on the device of ", other_name, ", ", device_text(other), ", got ",
                  device_text(x));
}

// ---- Registration ---------------------------------------------------------------------------------------------------

// The boxed calling convention reinterprets 64-bit slots: a `float` or `int` parameter would read garbage silently.
template <class T>
struct is_boxable : std::false_type {};
template <>
struct is_boxable<Tensor> : std::true_type {};
template <>
struct is_boxable<int64_t> : std::true_type {};
template <>
struct is_boxable<double> : std::true_type {};
template <>
struct is_boxable<bool> : std::true_type {};
template <class T>
struct is_boxable<std::optional<T>> : is_boxable<T> {};
template <class T>
struct is_boxable<std::vector<T>> : is_boxable<T> {};
template <class F>
struct signature;
template <class R, class... A>
struct signature<R (*)(A...)> {
  static constexpr bool ok = (is_boxable<std::remove_cv_t<std::remove_reference_t<A>>>::value && ...);
};

#define TSR_IMPL(m, name, fn)                                                                         \
  static_assert(::tsr::signature<decltype(fn)>::ok,                                                   \
                "operator parameters must be Tensor, int64_t, double, bool, optional<> or vector<>"); \
  m.impl(name, TORCH_BOX(fn))

// ---- Tensors --------------------------------------------------------------------------------------------------------

// The argument whose value says how much memory is asked for: it is named where there is not so much. Such memory is
// asked for before anything is written; new_empty and Buffer refuse sizes that no int64 holds in bytes.
struct Asked {
  const char* op = nullptr;
  const char* argument = nullptr;
  int64_t value = 0;
};

[[noreturn]] inline void throw_no_memory(const Asked& asked, bool on_cuda, const std::string& what) {
  std::ostringstream text;
  if (on_cuda) text << "CUDA out of memory: ";
  if (asked.op != nullptr) text << asked.op << ": ";
  text << "cannot allocate " << what;
  if (asked.op != nullptr) text << ", for " << asked.argument << " = " << asked.value;
  throw std::runtime_error(text.str());
}

inline std::string tensor_text(const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::ostringstream text;
  text << "a " << torch::headeronly::toString(dtype) << " tensor of shape [";
  for (size_t d = 0; d < sizes.size(); ++d) text << (d ? ", " : "") << sizes[d];
  return text.str() + "]";
}

// The strides of a contiguous tensor; false if no int64 holds them.
inline bool contiguous_strides(const std::vector<int64_t>& sizes, std::vector<int64_t>& strides) {
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(sizes[d], 1), &stride)) return false;
  }
  return true;
}

// A large tensor on the CPU, in memory that is kept when it is gone; nothing where there is none. It cannot be made
// larger in place, as no tensor can whose memory is not torch's own. dtype: as torch numbers it.
inline std::optional<Tensor> new_kept(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                                      int32_t dtype) {
  int64_t bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  if (bytes < kLeastKeptBytes || torch_from_blob == nullptr) return std::nullopt;
  const KeptMemory::Block block = KeptMemory::instance().borrow(bytes);
  if (block.bytes == 0) return std::nullopt;
  const auto deleter = [](void* memory, void* context) {
    KeptMemory::instance().give_back({memory, static_cast<int64_t>(reinterpret_cast<intptr_t>(context))});
  };
  AtenTensorHandle made = nullptr;
  const AOTITorchError error = torch_from_blob(
      block.memory, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), /*storage_offset=*/0, dtype,
      aoti_torch_device_type_cpu(), /*device_index=*/-1, &made, aoti_torch_layout_strided(), nullptr, 0, deleter,
      reinterpret_cast<void*>(static_cast<intptr_t>(block.bytes)));
  if (error == 0) return Tensor(made);
  KeptMemory::instance().give_back(block);
  return std::nullopt;
}

// An uninitialised tensor on the device of `like`. torch's own text is lost when it cannot be had, so ours says the
// size. On the CPU it goes past torch's dispatcher, which for a small tensor takes longer than all else.
inline Tensor new_empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype,
                        const Asked& asked = {}) {
  try {
    std::vector<int64_t> strides(sizes.size());
    if (!like.is_cpu() || !contiguous_strides(sizes, strides)) {
      return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()),
                                      dtype);
    }
    const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    if (std::optional<Tensor> kept = new_kept(sizes, strides, code)) return *kept;
    AtenTensorHandle made = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                    code, aoti_torch_device_type_cpu(), 0, &made));
    Tensor out(made);
    prefer_huge_pages(out.data_ptr(), out.numel() * static_cast<int64_t>(out.element_size()));
    return out;
  } catch (const std::exception&) {
    throw_no_memory(asked, like.is_cuda(), tensor_text(sizes, dtype));
  }
}

// A COO tensor of some rows, unique and sorted: [1, U], as it keeps them, or [U].
inline Tensor coalesced_rows(const Tensor& values, const Tensor& rows, const std::vector<int64_t>& sizes) {
  using torch::stable::detail::from;
  AtenTensorHandle indices = nullptr;
  if (rows.dim() == 1) {
    const int64_t shape[] = {1, rows.size(0)}, strides[] = {rows.size(0), 1};
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(rows.get(), 2, shape, strides, 0, &indices));
  }
  const auto none = from(std::optional<ScalarType>(std::nullopt));
  std::array<StableIValue, 8> stack{from(indices == nullptr ? rows : Tensor(indices)),
                                    from(values),
                                    from(torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size())),
                                    none,  // dtype
                                    none,  // layout
                                    none,  // device
                                    none,  // pin_memory
                                    from(std::optional<bool>(true))};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_sparse_coo_tensor_unsafe", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The shape of x with its first dimension replaced by `rows`.
inline std::vector<int64_t> shape_with_rows(const Tensor& x, int64_t rows) {
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < x.dim(); ++d) shape.push_back(d == 0 ? rows : x.size(d));
  return shape;
}

// Elements of x in one entry of its first dimension (1 for a vector).
inline int64_t row_elements(const Tensor& x) {
  int64_t n = 1;
  for (int64_t d = 1; d < x.dim(); ++d) n *= x.size(d);
  return n;
}

// Not named contiguous: torch::stable has a function of that name, which a call would find too.
// Of a view that repeats its elements the copy may be larger than memory.
inline Tensor as_contiguous(const Tensor& x) {
  if (x.is_contiguous()) return x;
  try {
    return torch::stable::contiguous(x);
  } catch (const std::exception&) {
    const auto sizes = x.sizes();
    throw_no_memory({}, x.is_cuda(), tensor_text({sizes.begin(), sizes.end()}, x.scalar_type()));
  }
}

inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& x) {
  return x ? std::optional<Tensor>(as_contiguous(*x)) : std::nullopt;
}

// aten::resize_ in place: the convention of torch's `out=` (storage is kept when it is large enough).
inline void resize_(const Tensor& x, const std::vector<int64_t>& sizes, const Asked& asked = {}) {
  std::array<StableIValue, 3> stack{
      torch::stable::detail::from(x),
      torch::stable::detail::from(torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size())),
      torch::stable::detail::from(std::optional<torch::headeronly::MemoryFormat>(std::nullopt))};
  try {
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::resize_", "", stack.data(), TORCH_ABI_VERSION));
  } catch (const std::exception&) {
    throw_no_memory(asked, x.is_cuda(),
                    tensor_text(sizes, x.scalar_type()) + " in place of one that may be fixed in size");
  }
  Tensor released = torch::stable::detail::to<Tensor>(stack[0]);
}

inline int64_t storage_bytes(const Tensor& x) {
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &bytes));
  return bytes;
}

// Where a storage of some bytes begins: of a tensor without elements torch says no address.
inline const void* storage_data(const Tensor& x) {
  const int64_t one = 1;
  AtenTensorHandle first = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), 1, &one, &one, /*storage_offset=*/0, &first));
  return Tensor(first).data_ptr();
}

// ---- CPU threads ----------------------------------------------------------------------------------------------------

// Whose threads: ThreadSanitizer's tests bring their own, since it does not know OpenMP's.
#ifndef TSR_THREADS
#define TSR_THREADS torch::stable
#endif

inline int64_t num_threads() { return static_cast<int64_t>(TSR_THREADS::get_num_threads()); }

// Runs f(begin, end) over disjoint ranges that cover [begin, end). f must not throw: its message would be lost.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (begin >= end) return;
  TSR_THREADS::parallel_for(begin, end, grain, f);
}

// Runs f(task) for every task in [0, tasks), one task at a time on a thread; f must not throw.
template <class F>
void parallel_tasks(int64_t tasks, const F& f) {
  parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) f(task);
  });
}

// The least work worth a thread, in elements added or moved: some 50 microseconds. Waking a thread takes a few, but on
// a machine whose cores are busy the wait for it can take milliseconds.
constexpr int64_t kWorkPerThread = 1 << 17;

inline int64_t workers_for(int64_t work) { return std::clamp<int64_t>(work / kWorkPerThread, 1, num_threads()); }

// Runs f(worker, task) for every task in [0, tasks): for tasks of uneven cost. Each worker takes the tasks of its own
// consecutive share one by one, then helps with the others' shares: neighbouring results stay in one core's cache,
// where the next operator's threads, which split their work likewise, look for them. Workers are numbered from 0 and
// below `workers`, so that each can own scratch memory allocated before; f must not throw.
template <class F>
void parallel_dynamic(int64_t tasks, int64_t workers, const F& f) {
  struct alignas(128) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  workers = std::min(workers, tasks);
  std::vector<Share> shares(static_cast<size_t>(workers));
  for (int64_t worker = 0; worker < workers; ++worker) {
    shares[static_cast<size_t>(worker)].next = tasks * worker / workers;
    shares[static_cast<size_t>(worker)].end = tasks * (worker + 1) / workers;
  }
  parallel_tasks(workers, [&, workers](int64_t worker) {
    for (int64_t turn = 0; turn < workers; ++turn) {
      Share& share = shares[static_cast<size_t>((worker + turn) % workers)];
      for (int64_t task; (task = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) f(worker, task);
    }
  });
}

// Uninitialised scratch memory on the host.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size, const Asked& asked = {}) {
    const size_t bytes = static_cast<size_t>(size) * sizeof(T);
    const bool in_lines = bytes >= kLeastInLines;
    KeptMemory::Block kept;
    void* memory = nullptr;
    if (size >= 0 && size <= INT64_MAX / static_cast<int64_t>(sizeof(T))) {
      if (bytes >= static_cast<size_t>(kLeastKeptBytes)) {
        kept = KeptMemory::instance().borrow(static_cast<int64_t>(bytes));
        memory = kept.memory;
      }
      if (memory == nullptr) {
        memory = in_lines ? ::operator new(bytes, kLine, std::nothrow) : ::operator new(bytes, std::nothrow);
      }
    }
    if (memory == nullptr) {
      throw_no_memory(asked, /*on_cuda=*/false, message(size, " elements of ", sizeof(T), " bytes on the host"));
    }
    data_ = std::unique_ptr<T[], Free>(static_cast<T*>(memory), Free{in_lines, kept.bytes});
    if (kept.bytes == 0) prefer_huge_pages(memory, static_cast<int64_t>(bytes));
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](int64_t i) { return data_[static_cast<size_t>(i)]; }
  const T& operator[](int64_t i) const { return data_[static_cast<size_t>(i)]; }

 private:
  static_assert(std::is_trivially_default_constructible_v<T> && std::is_trivially_destructible_v<T>);
  // Begins with a cache line, so that a vector or a row of one line does not lie in two; where it is small, that would
  // cost more than it saves.
  static constexpr std::align_val_t kLine{64};
  static constexpr size_t kLeastInLines = 4096;
  struct Free {
    bool in_lines = false;
    int64_t kept_bytes = 0;
    void operator()(T* data) const {
      if (kept_bytes > 0) return KeptMemory::instance().give_back({data, kept_bytes});
      in_lines ? ::operator delete(data, kLine) : ::operator delete(data);
    }
  };
  std::unique_ptr<T[], Free> data_;
};

// The smallest position any thread has reported: the deterministic "first offender" of a parallel check.
class FirstPosition {
 public:
  void report(int64_t position) {
    int64_t known = position_.load(std::memory_order_relaxed);
    while (position < known && !position_.compare_exchange_weak(known, position)) {
    }
  }
  bool found() const { return position() != kNone; }
  int64_t position() const { return position_.load(); }

 private:
  static constexpr int64_t kNone = INT64_MAX;
  std::atomic<int64_t> position_{kNone};
};

}  // namespace tsr
