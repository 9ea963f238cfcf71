// route: the ids of each table that are first of their value (unique.cuh), sorted stably by rank.
//
// Ids lie table by table, so what is sorted by rank alone is in the order of ranks, tables and first appearances. Where
// each (rank, table) begins is searched in that order: it travels to the host with the first bad position, in one copy.
#include "../cuda.h"
#include "../route.h"
#include "device.cuh"
#include "table_shards.cuh"
#include "unique.cuh"

namespace tsr {
namespace {

using P = unsigned;  // there are fewer than 2^31 ids

// The ids of tables one after another.
template <class I>
struct TableIds {
  struct Value {
    int64_t id;
    int64_t table;
  };

  const I* ids;
  const int64_t* starts;  // [tables + 1]
  int64_t tables;

  static uint64_t capacity(int64_t n) { return 2 * static_cast<uint64_t>(n); }
  __device__ int64_t table_of(int64_t i) const { return lower_bound(starts, tables + 1, i + 1) - 1; }
  __device__ Value load(int64_t i) const { return {static_cast<int64_t>(ids[i]), table_of(i)}; }
  __device__ uint64_t hash_of(const Value& value) const {
    return scattered(static_cast<uint64_t>(value.id) ^ scattered(static_cast<uint64_t>(value.table) + 1));
  }
  __device__ bool equals(int64_t position, const Value& value) const {
    return static_cast<int64_t>(ids[position]) == value.id && position >= starts[value.table] &&
           position < starts[value.table + 1];
  }
};

// A table of a fixed size, in words of 8 bytes: they are uploaded as such.
struct BlockedTable {
  int64_t size;
  int64_t log2;
  BlockSplit split;
};

// Of ids in tables of fixed sizes: rows of ranks.
template <class I>
struct Rows {
  using Sent = int32_t;

  const BlockedTable* tables;

  __device__ bool is_bad(int64_t t, I id) const { return id < 0 || id >= tables[t].size; }
  __device__ int32_t block(int64_t t, I id) const {
    return reversed_bits(static_cast<uint32_t>(id), static_cast<int>(tables[t].log2));
  }
  __device__ int32_t rank(int64_t t, I id) const { return block(t, id) / tables[t].split.each; }
  __device__ Sent sent(int64_t t, I id, int32_t rank) const {
    const BlockSplit& split = tables[t].split;
    return static_cast<int32_t>(id >> tables[t].log2) * split.count_of(rank) + block(t, id) - rank * split.each;
  }
};

// Of keys of tables that grow: the keys.
template <class I>
struct Keys {
  using Sent = I;

  int32_t each;  // blocks of a rank

  __device__ bool is_bad(int64_t, I) const { return false; }
  __device__ int32_t rank(int64_t, I key) const { return block_of_key(key) / each; }
  __device__ Sent sent(int64_t, I key, int32_t) const { return key; }
};

// One thread per id: (rank, position) of what is sent, and (none, position) of what is not.
template <class I, class Way>
__global__ void ranks_kernel(TableIds<I> in, Way way, const P* parents, int64_t n, unsigned none, Pairs<uint32_t> pairs,
                             unsigned long long* first_bad) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    const int64_t table = in.table_of(i);
    const I id = in.ids[i];
    const bool is_bad = way.is_bad(table, id);
    if (is_bad) atomicMin(first_bad, static_cast<unsigned long long>(i));
    const bool is_sent = !is_bad && (parents == nullptr || parents[i] == kNone<P>);
    pairs.keys[i] = is_sent ? static_cast<unsigned>(way.rank(table, id)) : none;
    pairs.values[i] = static_cast<uint32_t>(i);
  }
}

// begins[rank * tables + table] = what is sent before: [ranks * tables + 1]. One thread each.
__global__ void begins_kernel(Pairs<uint32_t> sorted, int64_t n, const int64_t* starts, int64_t tables, int64_t count,
                              unsigned none, int64_t* begins) {
  for (int64_t b = thread_index(); b < count; b += thread_count()) {
    const bool has_none = b == count - 1 || b / tables >= none;
    const unsigned rank = has_none ? none : static_cast<unsigned>(b / tables);
    const int64_t start = has_none ? 0 : starts[b % tables];
    int64_t low = 0, high = n;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const bool before = sorted.keys[middle] < rank || (sorted.keys[middle] == rank && sorted.values[middle] < start);
      before ? low = middle + 1 : high = middle;
    }
    begins[b] = low;
  }
}

// One thread for each that is sent. occurrences: null, or ones without parents and zeros with them.
template <class I, class Way>
__global__ void send_kernel(TableIds<I> in, Way way, Pairs<uint32_t> sorted, int64_t total, int32_t occurrence,
                            typename Way::Sent* sent, int32_t* occurrences, int64_t* places) {
  for (int64_t j = thread_index(); j < total; j += thread_count()) {
    const int64_t i = sorted.values[j];
    sent[j] = way.sent(in.table_of(i), in.ids[i], static_cast<int32_t>(sorted.keys[j]));
    if (occurrences != nullptr) occurrences[j] = occurrence;
    places[i] = j;
  }
}

// One thread per id, which takes the place of the first of its value.
__global__ void places_kernel(const P* parents, int64_t n, int32_t* occurrences, int64_t* places) {
  for (int64_t i = thread_index(); i < n; i += thread_count()) {
    int64_t first = i;
    for (P parent = parents[i]; parent != kNone<P>; parent = parents[first]) first = parent;
    const int64_t place = places[first];
    if (first != i) places[i] = place;
    if (occurrences != nullptr) atomicAdd(&occurrences[place], 1);
  }
}

struct Routed {
  Tensor sent, occurrences, counts, places;
};

Tensor on_host(const std::vector<int64_t>& sizes, const Asked& asked) {
  using torch::stable::Device;
  try {
    return torch::stable::empty(torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), ScalarType::Long,
                                std::nullopt, Device(torch::stable::DeviceType::CPU));
  } catch (const std::exception&) {
    throw_no_memory(asked, /*on_cuda=*/false, tensor_text(sizes, ScalarType::Long));
  }
}

template <class I, class Way, class BadId>
Routed route_by(DeviceCall& call, const TableIds<I>& in, const Way& way, int64_t n, int64_t ranks, bool distinct,
                bool with_occurrences, const BadId& bad_id) {
  call.asks("ranks", ranks);
  const unsigned none = static_cast<unsigned>(std::min<int64_t>(ranks, 1 << kMostBlocksLog2));
  const P* const parents = distinct ? find_parents<P>(call, in, n) : nullptr;
  const Pairs<uint32_t> pairs{call.workspace<uint32_t>(n), call.workspace<uint32_t>(n)};
  const Pairs<uint32_t> spare{call.workspace<uint32_t>(n), call.workspace<uint32_t>(n)};
  const int64_t groups = ranks * in.tables;
  int64_t* const begins = call.workspace<int64_t>(groups + 2);
  auto* const first_bad = reinterpret_cast<unsigned long long*>(begins + groups + 1);
  fill_bytes(call.stream(), first_bad, 0xff, sizeof(*first_bad));
  launch(call, one_thread_each(n), ranks_kernel<I, Way>, in, way, parents, n, none, pairs, first_bad);
  int bits = 1;
  while (none >> bits != 0) ++bits;
  const Pairs<uint32_t> sorted = sort_pairs(call, pairs, spare, n, bits);
  launch(call, one_thread_each(groups + 1), begins_kernel, sorted, n, in.starts, in.tables, groups + 1, none, begins);
  const std::vector<int64_t> read = call.read_back(begins, groups + 2, "the number of rows of each rank");
  if (read.back() != -1) bad_id(read.back());

  const int64_t total = read[static_cast<size_t>(groups)];
  using Sent = typename Way::Sent;
  const Routed result{call.empty({total}, sizeof(Sent) == 4 ? ScalarType::Int : ScalarType::Long),
                      call.empty({with_occurrences ? total : 0}, ScalarType::Int),
                      on_host({ranks, in.tables}, {call.op(), "ranks", ranks}), call.empty({n}, ScalarType::Long)};
  int64_t* const counts = static_cast<int64_t*>(result.counts.mutable_data_ptr());
  for (int64_t g = 0; g < groups; ++g) counts[g] = read[static_cast<size_t>(g + 1)] - read[static_cast<size_t>(g)];
  int32_t* const occurrences = with_occurrences ? static_cast<int32_t*>(result.occurrences.data_ptr()) : nullptr;
  int64_t* const places = static_cast<int64_t*>(result.places.data_ptr());
  launch(call, one_thread_each(total), send_kernel<I, Way>, in, way, sorted, total, distinct ? 0 : 1,
         static_cast<Sent*>(result.sent.data_ptr()), occurrences, places);
  if (distinct) launch(call, one_thread_each(n), places_kernel, parents, n, occurrences, places);
  return result;
}

std::tuple<Tensor, Tensor, Tensor> route_cuda(const Tensor& ids, const std::vector<int64_t>& starts,
                                              const std::vector<int64_t>& sizes, const std::vector<int64_t>& blocks,
                                              int64_t ranks, bool distinct) {
  check_route(ids, starts, sizes, blocks, ranks);
  DeviceCall call("route", ids);
  const int64_t n = ids.size(0), tables = static_cast<int64_t>(sizes.size());
  std::vector<BlockedTable> blocked;
  for (size_t t = 0; t < sizes.size(); ++t) {
    blocked.push_back({sizes[t], log2_of_blocks(blocks[t]), BlockSplit(blocks[t], ranks)});
  }
  Uploads uploads;
  const size_t starts_place = uploads.add(starts), tables_place = uploads.add(blocked);
  uploads.send(call);
  Routed r;
  dispatch_index(ids.scalar_type(), call.op(), "ids", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const TableIds<I> in{call.data<I>(ids), uploads.at<int64_t>(starts_place), tables};
    const Rows<I> way{uploads.at<BlockedTable>(tables_place)};
    r = route_by(call, in, way, n, ranks, distinct, /*with_occurrences=*/false, [&](int64_t i) {
      throw_bad_routed_id(i, static_cast<int64_t>(call.read_back(in.ids + i, "an id out of range")), starts, sizes);
    });
  });
  return {r.sent, r.counts, r.places};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> route_keys_cuda(const Tensor& keys, const std::vector<int64_t>& starts,
                                                           int64_t ranks, bool distinct) {
  check_route_ids("route_keys", "keys", keys, starts, ranks);
  DeviceCall call("route_keys", keys);
  const int64_t* const starts_there = upload(call, starts);
  Routed r;
  dispatch_index(keys.scalar_type(), call.op(), "keys", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const TableIds<I> in{call.data<I>(keys), starts_there, static_cast<int64_t>(starts.size()) - 1};
    const Keys<I> way{BlockSplit(1 << kMostBlocksLog2, ranks).each};
    r = route_by(call, in, way, keys.size(0), ranks, distinct, /*with_occurrences=*/true, [](int64_t) {});
  });
  return {r.sent, r.occurrences, r.counts, r.places};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  TSR_IMPL(m, "route", &tsr::route_cuda);
  TSR_IMPL(m, "route_keys", &tsr::route_keys_cuda);
}
