#include "table_shards.cuh"

namespace tsr {
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
