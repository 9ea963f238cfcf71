// What the host knows of a call, on its way to the device's memory.
#pragma once
#include <cstring>
#include <mutex>

#include "../cuda.h"

namespace tsr {

// Vectors of structures made of words of 8 bytes. They travel as arguments of kernels: a CUDA graph keeps them.
class Uploads {
 public:
  // Returns its place, for at().
  template <class T>
  size_t add(const std::vector<T>& structures) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(int64_t) == 0 && alignof(T) <= 8);
    const size_t place = words_.size();
    words_.resize(place + structures.size() * (sizeof(T) / sizeof(int64_t)));
    if (!structures.empty()) std::memcpy(words_.data() + place, structures.data(), structures.size() * sizeof(T));
    return place;
  }
  void send(DeviceCall& call);
  // Once it is sent. Never written: a later call may read it again.
  template <class T>
  const T* at(size_t place) const {
    return reinterpret_cast<const T*>(there_ + place);
  }

 private:
  std::vector<int64_t> words_;
  const int64_t* there_ = nullptr;
};

// One of them alone.
template <class T>
const T* upload(DeviceCall& call, const std::vector<T>& structures) {
  Uploads uploads;
  const size_t place = uploads.add(structures);
  uploads.send(call);
  return uploads.at<T>(place);
}

// What the last call of a kind has sent, upload after upload. A call that sends the same on the same stream reads it
// again. Addresses of results and scratch, which differ from call to call, do not belong in uploads.
class KeptUploads {
 public:
  static constexpr int64_t kSign = -1;  // of collection_plan
  const int64_t* send(DeviceCall& call, std::vector<int64_t>&& words);

 private:
  struct Sent {
    int32_t device;
    Stream stream;
    std::vector<int64_t> words;
    std::optional<Tensor> there;
  };

  std::mutex mutex_;
  std::vector<Sent> sent_;
};

}  // namespace tsr
