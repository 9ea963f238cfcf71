// unique for keys of any range: a stable partition by hash, and one hash table that fits the cache per partition.
//
// x is scattered into partitions, each in the order of x, so that all equal keys meet in one; a table per partition
// finds for every key the first equal one. Walking x again with one cursor per partition meets the same entries in the
// order of x: ids are given to first ones as they come, and the others copy theirs. No sort, no stored positions.
#pragma once
#include <limits>

#include "unique_common.h"

namespace tsr {

// A bijection that spreads nearby keys; the top bits are the best mixed.
inline uint64_t mix_key(uint64_t key) {
  key *= 0x9E3779B97F4A7C15ull;
  key ^= key >> 32;
  return key * 0xD6E8FEB86659FD93ull;
}

// In the entries: this key was not seen before.
template <class Pos>
constexpr Pos kFirst = std::numeric_limits<Pos>::max();

// Finds the first equal key of each key in [begin, end): entries[e] = kFirst, or the position of the first.
// counts (may be null): counts[first] = number of equal keys.
template <class Key, class Pos>
class FirstFinder {
 public:
  // Slots for n keys, no matter which.
  static int64_t slots_for(int64_t n) {
    int64_t slots = 64;
    while (slots < 2 * n) slots *= 2;
    return slots;
  }

  // used_bits: of the hash, from the top, that are the same for all the keys. slots: room for slots_for(end - begin).
  FirstFinder(const Key* keys, Pos* entries, Pos* counts, Pos* slots, int used_bits)
      : keys_(keys), entries_(entries), counts_(counts), slots_(slots), used_bits_(used_bits) {}

  void run(Pos begin, Pos end) {
    // Each collision costs a step. Ordinary keys need less than one; keys made to collide would need a square.
    int64_t steps_left = 16 * static_cast<int64_t>(end - begin) + 64;
    Pos distinct = 0;
    use_slots(slots_for(std::min<int64_t>(end - begin, kStartKeys)));
    for (Pos e = begin; e < end; ++e) {
      const Key key = keys_[e];
      Pos slot = slot_of(key);
      while (slots_[slot] != 0 && keys_[slots_[slot] - 1] != key && steps_left > 0) {
        slot = (slot + 1) & mask_;
        --steps_left;
      }
      if (steps_left == 0) return run_sorted(begin, end);
      if (slots_[slot] != 0) {
        repeat(e, slots_[slot] - 1);
        continue;
      }
      slots_[slot] = e + 1;
      first(e);
      if (++distinct > mask_ / 2 + 1) grow(begin, e + 1);
    }
  }

 private:
  // Partitions of the usual size never grow their table; larger ones, often of few hot keys, start with a small one.
  static constexpr int64_t kStartKeys = 32768;

  void first(Pos e) {
    entries_[e] = kFirst<Pos>;
    if (counts_ != nullptr) counts_[e] = 1;
  }

  void repeat(Pos e, Pos first) {
    entries_[e] = first;
    if (counts_ != nullptr) ++counts_[first];
  }

  Pos slot_of(Key key) const { return static_cast<Pos>((mix_key(key) << used_bits_) >> shift_); }

  void use_slots(int64_t slots) {
    mask_ = static_cast<Pos>(slots - 1);
    shift_ = 64;
    for (int64_t s = slots; s > 1; s /= 2) --shift_;
    std::fill_n(slots_, slots, Pos{0});
  }

  void grow(Pos begin, Pos end) {
    use_slots(2 * (static_cast<int64_t>(mask_) + 1));
    for (Pos e = begin; e < end; ++e) {
      if (entries_[e] != kFirst<Pos>) continue;
      Pos slot = slot_of(keys_[e]);
      while (slots_[slot] != 0) slot = (slot + 1) & mask_;
      slots_[slot] = e + 1;
    }
  }

  // Positions sorted by key take the place of the table.
  void run_sorted(Pos begin, Pos end) {
    const Pos n = end - begin;
    for (Pos j = 0; j < n; ++j) slots_[j] = begin + j;
    std::sort(slots_, slots_ + n,
              [keys = keys_](Pos a, Pos b) { return keys[a] != keys[b] ? keys[a] < keys[b] : a < b; });
    for (Pos j = 0, head = 0; j < n; ++j) {
      if (j == 0 || keys_[slots_[j]] != keys_[slots_[head]]) {
        head = j;
        first(slots_[j]);
      } else {
        repeat(slots_[j], slots_[head]);
      }
    }
  }

  const Key* keys_;
  Pos* entries_;
  Pos* counts_;
  Pos* slots_;  // 1 + position of a first key; 0: free
  int used_bits_;
  int shift_ = 0;
  Pos mask_ = 0;
};

// Few keys: one partition, which is x itself, on the calling thread.
template <class Key, class Pos>
UniqueResult unique_one_partition(const Tensor& x, bool with_counts) {
  const int64_t n = x.numel();
  const Key* keys = static_cast<const Key*>(x.const_data_ptr());
  Scratch<Pos> entries(n), counts(with_counts ? n : 0);
  Scratch<Pos> slots(FirstFinder<Key, Pos>::slots_for(n));
  FirstFinder<Key, Pos>(keys, entries.data(), with_counts ? counts.data() : nullptr, slots.data(), 0)
      .run(0, static_cast<Pos>(n));

  const int64_t distinct = std::count(entries.data(), entries.data() + n, kFirst<Pos>);
  UniqueResult result{new_empty(x, {distinct}, x.scalar_type()), new_empty(x, {n}, ScalarType::Long), std::nullopt};
  if (with_counts) result.counts = new_empty(x, {distinct}, ScalarType::Long);
  Key* values = static_cast<Key*>(result.values.mutable_data_ptr());
  int64_t* inverse = static_cast<int64_t*>(result.inverse.mutable_data_ptr());
  int64_t* counts_out = with_counts ? static_cast<int64_t*>(result.counts->mutable_data_ptr()) : nullptr;
  int64_t next = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (entries.data()[i] != kFirst<Pos>) {
      inverse[i] = inverse[entries.data()[i]];
      continue;
    }
    values[next] = keys[i];
    if (with_counts) counts_out[next] = static_cast<int64_t>(counts.data()[i]);
    inverse[i] = next++;
  }
  return result;
}

template <class Key, class Pos>
class HashedUnique {
 public:
  HashedUnique(const Tensor& x, bool with_counts)
      : x_(x),
        keys_(static_cast<const Key*>(x.const_data_ptr())),
        chunks_(x.numel(), workers_for(x.numel())),
        bits_(partition_bits(x.numel())),
        partitions_(int64_t{1} << bits_),
        with_counts_(with_counts),
        partition_(chunks_.n),
        entries_(chunks_.n),
        counts_(with_counts ? chunks_.n : 0),
        starts_(chunks_.count * partitions_),
        cursors_(chunks_.count * partitions_),
        firsts_(chunks_.count * partitions_),
        inverse_(new_empty(x, {chunks_.n}, ScalarType::Long)),
        // Nobody needs the partitioned keys once ids are written, so they stay where the ids will be.
        partitioned_(static_cast<Key*>(inverse_.mutable_data_ptr())) {}

  UniqueResult run() {
    parallel_tasks(chunks_.count, [&](int64_t chunk) { count_partitions(chunk); });
    const int64_t largest = place_partitions();
    parallel_tasks(chunks_.count, [&](int64_t chunk) { scatter(chunk); });
    find_firsts(largest);

    std::vector<int64_t> first_id(chunks_.count + 1, 0);
    for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
      first_id[chunk + 1] = first_id[chunk];
      for (int64_t p = 0; p < partitions_; ++p) first_id[chunk + 1] += firsts_[chunk * partitions_ + p];
    }
    UniqueResult result{new_empty(x_, {first_id.back()}, x_.scalar_type()), inverse_, std::nullopt};
    if (with_counts_) result.counts = new_empty(x_, {first_id.back()}, ScalarType::Long);
    Key* values = static_cast<Key*>(result.values.mutable_data_ptr());
    int64_t* counts = with_counts_ ? static_cast<int64_t*>(result.counts->mutable_data_ptr()) : nullptr;
    parallel_tasks(chunks_.count,
                   [&](int64_t chunk) { write_ids(chunk, first_id[chunk], first_id[chunk + 1], values, counts); });
    parallel_for(chunks_.end(0), chunks_.n, kUniqueGrain, [&](int64_t begin, int64_t end) { resolve(begin, end); });
    return result;
  }

 private:
  // About 20k keys in a partition, whose table then fits the second-level cache; more streams than 1024 would not.
  static int partition_bits(int64_t n) {
    int bits = 1;
    while (bits < 10 && (n >> bits) > 24576) ++bits;
    return bits;
  }

  void count_partitions(int64_t chunk) {
    const int64_t begin = chunks_.begin(chunk), end = chunks_.end(chunk);
    Pos* sizes = cursors_.data() + chunk * partitions_;
    std::fill_n(sizes, partitions_, Pos{0});
    for (int64_t i = begin; i < end; ++i) {
      const auto p = static_cast<uint16_t>(mix_key(keys_[i]) >> (64 - bits_));
      partition_.data()[i] = p;
      ++sizes[p];
    }
  }

  // starts[chunk, p]: where the chunk's keys of partition p go. Returns the size of the largest partition.
  int64_t place_partitions() {
    Pos next = 0, largest = 0;
    for (int64_t p = 0; p < partitions_; ++p) {
      const Pos begin = next;
      for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
        starts_[chunk * partitions_ + p] = next;
        next += cursors_[chunk * partitions_ + p];
      }
      largest = std::max<Pos>(largest, next - begin);
    }
    return static_cast<int64_t>(largest);
  }

  // Where the keys of (chunk, p) end: where the next chunk's begin, or the next partition's, or all.
  Pos stop(int64_t chunk, int64_t p) const {
    if (chunk + 1 < chunks_.count) return starts_[(chunk + 1) * partitions_ + p];
    return p + 1 < partitions_ ? starts_[p + 1] : static_cast<Pos>(chunks_.n);
  }

  Pos* rewound_cursors(int64_t chunk) {
    Pos* cursors = cursors_.data() + chunk * partitions_;
    std::copy_n(starts_.data() + chunk * partitions_, partitions_, cursors);
    return cursors;
  }

  void scatter(int64_t chunk) {
    Pos* cursors = rewound_cursors(chunk);
    for (int64_t i = chunks_.begin(chunk); i < chunks_.end(chunk); ++i) {
      partitioned_[cursors[partition_.data()[i]]++] = keys_[i];
    }
  }

  void find_firsts(int64_t largest) {
    const int64_t room = FirstFinder<Key, Pos>::slots_for(largest);
    Scratch<Pos> slots(chunks_.count * room);
    parallel_dynamic(partitions_, chunks_.count, [&](int64_t worker, int64_t p) {
      FirstFinder<Key, Pos>(partitioned_, entries_.data(), with_counts_ ? counts_.data() : nullptr,
                            slots.data() + worker * room, bits_)
          .run(starts_[p], stop(chunks_.count - 1, p));
      for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
        const Pos* begin = entries_.data() + starts_[chunk * partitions_ + p];
        const Pos* end = entries_.data() + stop(chunk, p);
        firsts_[chunk * partitions_ + p] = static_cast<Pos>(std::count(begin, end, kFirst<Pos>));
      }
    });
  }

  // Gives ids to the chunk's first ones; entries then hold their ids. A key that an earlier chunk has gets ~entry.
  void write_ids(int64_t chunk, int64_t next, int64_t last, Key* values, int64_t* counts) {
    int64_t* inverse = static_cast<int64_t*>(inverse_.mutable_data_ptr());
    const Pos* starts = starts_.data() + chunk * partitions_;
    Pos* cursors = rewound_cursors(chunk);
    Pos* entries = entries_.data();
    for (int64_t i = chunks_.begin(chunk); i < chunks_.end(chunk); ++i) {
      const uint16_t p = partition_.data()[i];
      const Pos e = cursors[p]++;
      const Pos first = entries[e];
      if (first == kFirst<Pos>) {
        values[next] = keys_[i];
        if (counts != nullptr) counts[next] = static_cast<int64_t>(counts_.data()[e]);
        entries[e] = static_cast<Pos>(next);
        inverse[i] = next++;
      } else {
        inverse[i] = first >= starts[p] ? static_cast<int64_t>(entries[first]) : ~static_cast<int64_t>(first);
      }
    }
  }

  void resolve(int64_t begin, int64_t end) {
    int64_t* inverse = static_cast<int64_t*>(inverse_.mutable_data_ptr());
    for (int64_t i = begin; i < end; ++i) {
      if (inverse[i] < 0) inverse[i] = static_cast<int64_t>(entries_.data()[~inverse[i]]);
    }
  }

  const Tensor& x_;
  const Key* keys_;
  const Chunks chunks_;
  const int bits_;
  const int64_t partitions_;
  const bool with_counts_;
  Scratch<uint16_t> partition_;  // [N]
  Scratch<Pos> entries_;         // [N], in partitioned order
  Scratch<Pos> counts_;          // [N], in partitioned order, or nothing
  std::vector<Pos> starts_;      // [chunks, partitions]
  std::vector<Pos> cursors_;     // [chunks, partitions]: where each chunk is in each partition
  std::vector<Pos> firsts_;      // [chunks, partitions]: keys first met there
  Tensor inverse_;
  Key* partitioned_;  // [N]
};

}  // namespace tsr
