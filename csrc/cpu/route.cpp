#include "../route.h"

#include <tuple>

#include "unique_hashed.h"

namespace tsr {
namespace {

// The work of routing an id, in elements moved.
constexpr int64_t kWorkPerId = 8;
// A table has a slot for each of its rows if they are not more than so many for each id of the call: to clear them
// costs less than to hash.
constexpr int64_t kSlotsPerId = 4;

// Where the rows of a block are: 8 bytes, so that those of 4096 blocks stay in the nearest cache.
struct Home {
  uint16_t rank;
  uint16_t blocks;  // that the rank has
  uint16_t place;   // of the block among them
};

std::vector<Home> homes_of(int64_t blocks, int64_t ranks) {
  const BlockSplit split(blocks, ranks);
  std::vector<Home> homes;
  homes.reserve(static_cast<size_t>(blocks));
  for (int32_t rank = 0; rank <= split.last_rank(); ++rank) {
    for (int32_t place = 0; place < split.count_of(rank); ++place) {
      homes.push_back(
          {static_cast<uint16_t>(rank), static_cast<uint16_t>(split.count_of(rank)), static_cast<uint16_t>(place)});
    }
  }
  return homes;
}

// Of ids in tables of fixed sizes: rows of ranks.
template <class Id>
class Rows {
 public:
  using Sent = int32_t;

  Rows(const std::vector<int64_t>& sizes, const std::vector<int64_t>& blocks, int64_t ranks)
      : sizes_(sizes), homes_(kMostBlocksLog2 + 1) {
    for (const int64_t count : blocks) {
      const int log2 = log2_of_blocks(count);
      log2_.push_back(log2);
      std::vector<Home>& numbered = homes_[static_cast<size_t>(log2)];
      if (!numbered.empty()) continue;
      const std::vector<Home> homes = homes_of(count, ranks);
      for (int64_t number = 0; number < count; ++number) {
        numbered.push_back(homes[static_cast<size_t>(reversed_bits(static_cast<uint32_t>(number), log2))]);
      }
    }
  }

  struct OfTable {
    const Home* homes;
    int log2;
    const Home& home(Id id) const { return homes[id & ((Id{1} << log2) - 1)]; }
    int32_t rank(Id id) const { return home(id).rank; }
    Sent sent(Id id) const { return static_cast<int32_t>(id >> log2) * home(id).blocks + home(id).place; }
  };
  OfTable of_table(int64_t t) const {
    const int log2 = log2_[static_cast<size_t>(t)];
    return {homes_[static_cast<size_t>(log2)].data(), log2};
  }
  // What its ids are below.
  int64_t bound(int64_t t) const { return sizes_[static_cast<size_t>(t)]; }

 private:
  const std::vector<int64_t>& sizes_;
  std::vector<int> log2_;
  std::vector<std::vector<Home>> homes_;  // by log2, then by a row's remainder
};

// Of keys of tables that grow: the keys.
template <class Id>
class Keys {
 public:
  using Sent = Id;

  explicit Keys(int64_t ranks) : homes_(homes_of(1 << kMostBlocksLog2, ranks)) {}

  struct OfTable {
    const Home* homes;
    int32_t rank(Id key) const { return homes[block_of_key(key)].rank; }
    Sent sent(Id key) const { return key; }
  };
  OfTable of_table(int64_t) const { return {homes_.data()}; }
  int64_t bound(int64_t) const { return INT64_MAX; }

 private:
  std::vector<Home> homes_;
};

// The distinct ids of one table after another, numbered by first appearance. One thread has one.
template <class Id>
class Numbering {
 public:
  // rows: of the largest table that has a slot for each row. longest: ids of the longest other table.
  Numbering(int64_t rows, int64_t longest)
      : direct_(static_cast<size_t>(rows)), hashed_(longest > 0 ? FirstFinder<Key, uint32_t>::slots_for(longest) : 0) {}

  // numbers[i] = which of the distinct ids among ids[begin : end] ids[i] is; firsts[begin + number] = where it is first.
  // Returns how many they are.
  uint32_t of_rows(const Id* ids, uint32_t begin, uint32_t end, uint32_t* numbers, uint32_t* firsts) {
    uint32_t* const slots = direct_.data();
    const uint32_t before = seen_;  // slots up to this are of tables before
    uint32_t count = 0;
    // No branch: whether an id is new is as good as random.
    for (uint32_t i = begin; i < end; ++i) {
      uint32_t& slot = slots[ids[i]];
      firsts[begin + count] = i;
      const bool is_new = slot <= before;
      const uint32_t mark = is_new ? before + count + 1 : slot;
      slot = mark;
      numbers[i] = mark - before - 1;
      count += is_new;
    }
    seen_ += count;
    return count;
  }

  uint32_t of_keys(const Id* ids, uint32_t begin, uint32_t end, uint32_t* numbers, uint32_t* firsts) {
    if (begin == end) return 0;  // no slots may have been made
    FirstFinder<Key, uint32_t>(reinterpret_cast<const Key*>(ids), numbers, nullptr, hashed_.data(), 0).run(begin, end);
    uint32_t count = 0;
    for (uint32_t i = begin; i < end; ++i) {
      if (numbers[i] == kFirst<uint32_t>) {
        firsts[begin + count] = i;
        numbers[i] = count++;
      } else {
        numbers[i] = numbers[numbers[i]];
      }
    }
    return count;
  }

 private:
  using Key = std::make_unsigned_t<Id>;
  std::vector<uint32_t> direct_;  // by row: 1 + its number, from that of the first table on; 0: not seen
  Scratch<uint32_t> hashed_;
  uint32_t seen_ = 0;
};

struct Routed {
  Tensor sent, occurrences, counts, places;
};

template <class Id, class Way>
Routed route_by(const char* op, const Way& way, const Tensor& given, const std::vector<int64_t>& starts, int64_t ranks,
                bool distinct, bool with_occurrences) {
  const int64_t n = given.numel(), tables = static_cast<int64_t>(starts.size()) - 1;
  const Id* const ids = static_cast<const Id*>(given.const_data_ptr());
  const auto begin_of = [&](int64_t t) { return static_cast<uint32_t>(starts[static_cast<size_t>(t)]); };
  const auto is_direct = [&](int64_t t) { return way.bound(t) <= kSlotsPerId * n; };
  int64_t rows = 0, longest = 0;
  for (int64_t t = 0; t < tables && distinct; ++t) {
    if (is_direct(t)) {
      rows = std::max(rows, way.bound(t));
    } else {
      longest = std::max<int64_t>(longest, begin_of(t + 1) - begin_of(t));
    }
  }
  const Asked asked{op, "ranks", ranks};
  const Tensor counts = new_empty(given, {ranks, tables}, ScalarType::Long, asked);
  const Tensor places = new_empty(given, {n}, ScalarType::Long);
  int64_t* const count = static_cast<int64_t*>(counts.mutable_data_ptr());
  int64_t* const place = static_cast<int64_t*>(places.mutable_data_ptr());
  const int64_t workers = std::clamp<int64_t>(workers_for(kWorkPerId * n), 1, std::max<int64_t>(tables, 1));
  std::vector<Numbering<Id>> numberings;
  for (int64_t worker = 0; worker < (distinct ? workers : 0); ++worker) numberings.emplace_back(rows, longest);
  // Of each worker: a number for each rank, of the table that it is at.
  Buffer<int64_t> of_ranks(workers * ranks, asked);
  // Of each table, from its first id on: by id its number; and by number where it is first, then its place.
  Scratch<uint32_t> numbers(distinct ? n : 0), firsts(distinct ? n : 0);

  parallel_dynamic(tables, workers, [&](int64_t worker, int64_t t) {
    const uint32_t begin = begin_of(t), end = begin_of(t + 1);
    const auto table = way.of_table(t);
    int64_t* const mine = of_ranks.data() + worker * ranks;
    std::fill_n(mine, ranks, int64_t{0});
    if (distinct) {
      Numbering<Id>& numbering = numberings[static_cast<size_t>(worker)];
      const uint32_t found = is_direct(t) ? numbering.of_rows(ids, begin, end, numbers.data(), firsts.data())
                                          : numbering.of_keys(ids, begin, end, numbers.data(), firsts.data());
      for (uint32_t u = begin; u < begin + found; ++u) ++mine[table.rank(ids[firsts.data()[u]])];
    } else {
      for (uint32_t i = begin; i < end; ++i) ++mine[table.rank(ids[i])];
    }
    for (int64_t rank = 0; rank < ranks; ++rank) count[rank * tables + t] = mine[rank];
  });

  Buffer<int64_t> begins(ranks * tables, asked);
  int64_t total = 0;
  for (int64_t i = 0; i < ranks * tables; ++i) {
    begins[i] = total;
    total += count[i];
  }
  using Sent = typename Way::Sent;
  const Tensor sent = new_empty(given, {total}, sizeof(Sent) == 4 ? ScalarType::Int : ScalarType::Long);
  const Tensor occurrences = new_empty(given, {with_occurrences ? total : 0}, ScalarType::Int);
  Sent* const to_send = static_cast<Sent*>(sent.mutable_data_ptr());
  int32_t* const times = static_cast<int32_t*>(occurrences.mutable_data_ptr());
  parallel_dynamic(tables, workers, [&](int64_t worker, int64_t t) {
    const uint32_t begin = begin_of(t), end = begin_of(t + 1);
    const auto table = way.of_table(t);
    int64_t* const next = of_ranks.data() + worker * ranks;
    int64_t found = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      next[rank] = begins[rank * tables + t];
      found += count[rank * tables + t];
    }
    const auto send = [&](Id id) {
      const int64_t to = next[table.rank(id)]++;
      to_send[to] = table.sent(id);
      if (with_occurrences) times[to] = distinct ? 0 : 1;
      return to;
    };
    if (!distinct) {
      for (uint32_t i = begin; i < end; ++i) place[i] = send(ids[i]);
      return;
    }
    uint32_t* const place_of = firsts.data() + begin;
    for (int64_t u = 0; u < found; ++u) place_of[u] = static_cast<uint32_t>(send(ids[place_of[u]]));
    for (uint32_t i = begin; i < end; ++i) {
      place[i] = place_of[numbers.data()[i]];
      if (with_occurrences) ++times[place[i]];
    }
  });
  return {sent, occurrences, counts, places};
}

template <class Id>
void check_ids(const Tensor& given, const std::vector<int64_t>& starts, const std::vector<int64_t>& sizes) {
  const Id* const ids = static_cast<const Id*>(given.const_data_ptr());
  for (size_t t = 0; t < sizes.size(); ++t) {
    const auto is_bad = [size = sizes[t]](Id id) { return id < 0 || id >= size; };
    bool any = false;
    for (int64_t i = starts[t]; i < starts[t + 1]; ++i) any |= is_bad(ids[i]);
    if (!any) continue;
    const int64_t i = std::find_if(ids + starts[t], ids + starts[t + 1], is_bad) - ids;
    throw_bad_routed_id(i, static_cast<int64_t>(ids[i]), starts, sizes);
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> route_cpu(const Tensor& given, const std::vector<int64_t>& starts,
                                             const std::vector<int64_t>& sizes, const std::vector<int64_t>& blocks,
                                             int64_t ranks, bool distinct) {
  check_route(given, starts, sizes, blocks, ranks);
  const Tensor ids = tsr::as_contiguous(given);
  return dispatch_index(ids.scalar_type(), "route", "ids", [&](auto tag) -> std::tuple<Tensor, Tensor, Tensor> {
    using Id = typename decltype(tag)::type;
    check_ids<Id>(ids, starts, sizes);
    const Routed r = route_by<Id>("route", Rows<Id>(sizes, blocks, ranks), ids, starts, ranks, distinct, false);
    return {r.sent, r.counts, r.places};
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> route_keys_cpu(const Tensor& given, const std::vector<int64_t>& starts,
                                                          int64_t ranks, bool distinct) {
  check_route_ids("route_keys", "keys", given, starts, ranks);
  const Tensor keys = tsr::as_contiguous(given);
  using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  return dispatch_index(keys.scalar_type(), "route_keys", "keys", [&](auto tag) -> Result {
    using Id = typename decltype(tag)::type;
    const Routed r = route_by<Id>("route_keys", Keys<Id>(ranks), keys, starts, ranks, distinct, true);
    return {r.sent, r.occurrences, r.counts, r.places};
  });
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "route", &tsr::route_cpu);
  TSR_IMPL(m, "route_keys", &tsr::route_keys_cpu);
}
