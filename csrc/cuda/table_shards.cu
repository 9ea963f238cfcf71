#include "table_shards.cuh"

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

}  // namespace

void Uploads::send(DeviceCall& call) {
  // What a kernel's arguments may hold, 4 KiB, but for some, and what most calls need.
  constexpr int64_t kMost = 496, kFew = 64;
  const int64_t size = static_cast<int64_t>(words_.size());
  there_ = call.workspace<int64_t>(size);
  for (int64_t begin = 0; begin < size; begin += kMost) {
    const int64_t count = std::min(kMost, size - begin);
    const auto upload_them = count <= kFew ? upload_some<kFew> : upload_some<kMost>;
    upload_them(call, words_.data() + begin, count, there_ + begin);
  }
}

ShardedTable upload_table(DeviceCall& call, const std::vector<Tensor>& params) {
  const int64_t shards = static_cast<int64_t>(params.size());
  std::vector<int64_t> words(2 * params.size());
  int64_t rows = 0;
  uintptr_t all_addresses = 0;
  for (size_t s = 0; s < params.size(); ++s) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(call.data(params[s]));
    const uintptr_t row_bytes = static_cast<uintptr_t>(params[s].size(1)) * params[s].element_size();
    words[params.size() + s] = static_cast<int64_t>(address - static_cast<uintptr_t>(rows) * row_bytes);
    rows += params[s].size(0);
    words[s] = rows;
    if (params[s].size(0) > 0) all_addresses |= address;
  }
  const int64_t* const uploaded = upload(call, words);
  return {shards, uploaded, uploaded + shards, reinterpret_cast<const void*>(all_addresses)};
}

}  // namespace tsr
