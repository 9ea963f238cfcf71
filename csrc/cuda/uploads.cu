#include "uploads.cuh"

namespace tsr {
namespace {

template <int64_t size>
struct Words {
  int64_t at[size];
};

// One thread per word.
template <int64_t size>
__global__ void upload_kernel(Words<size> words, int64_t count, int64_t* to) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) to[i] = words.at[i];
}

template <int64_t size>
void upload_some(const DeviceCall& call, const int64_t* from, int64_t count, int64_t* to) {
  Words<size> words{};
  std::copy_n(from, count, words.at);
  launch(call, one_thread_each(count), upload_kernel<size>, words, count, to);
}

void upload_all(const DeviceCall& call, const std::vector<int64_t>& words, int64_t* to) {
  // What a kernel's arguments may hold, 4 KiB, but for some, and what most calls need.
  constexpr int64_t kMost = 496, kFew = 64;
  const int64_t size = static_cast<int64_t>(words.size());
  for (int64_t begin = 0; begin < size; begin += kMost) {
    const int64_t count = std::min(kMost, size - begin);
    const auto upload_them = count <= kFew ? upload_some<kFew> : upload_some<kMost>;
    upload_them(call, words.data() + begin, count, to + begin);
  }
}

}  // namespace

void Uploads::send(DeviceCall& call) {
  // A graph would read memory that is not its own.
  if (call.uploads() != nullptr && !is_capturing(call.stream())) {
    there_ = call.uploads()->send(call, std::move(words_));
    return;
  }
  int64_t* const there = call.workspace<int64_t>(static_cast<int64_t>(words_.size()));
  upload_all(call, words_, there);
  there_ = there;
}

const int64_t* KeptUploads::send(DeviceCall& call, std::vector<int64_t>&& words) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t number = call.next_upload();
  if (number == sent_.size()) sent_.emplace_back();
  Sent& sent = sent_[number];
  if (!sent.there || sent.stream != call.stream() || sent.device != call.device() || sent.words != words) {
    // Into memory of its own: kernels of another thread's call may still read the last one.
    Tensor there = call.empty({static_cast<int64_t>(words.size())}, ScalarType::Long);
    upload_all(call, words, static_cast<int64_t*>(there.data_ptr()));
    sent = {call.device(), call.stream(), std::move(words), there};
  }
  return call.data<int64_t>(*sent.there);
}

}  // namespace tsr
