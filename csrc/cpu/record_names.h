// Which column a feature's name belongs to.
#pragma once
#include "record_wire.h"

namespace tsr {

// A name's length with its first and its last eight bytes: all there is of names of up to 16 bytes.
struct NameKey {
  uint64_t head = 0, tail = 0;
  int64_t size = -1;

  bool operator==(const NameKey& other) const { return head == other.head && tail == other.tail && size == other.size; }
};

constexpr int64_t kWholeInKey = 16;

// `limit`: up to where bytes may be read, names included or not.
inline NameKey name_key(Span name, const uint8_t* limit) {
  NameKey key;
  key.size = name.size();
  if (key.size >= 8) {
    key.head = load_word(name.begin);
    key.tail = load_word(name.end - 8);
  } else if (limit - name.begin >= 8) {
    key.head = load_word(name.begin) & ((uint64_t{1} << (8 * key.size)) - 1);
  } else {
    for (int64_t i = 0; i < key.size; ++i) key.head |= static_cast<uint64_t>(name.begin[i]) << (8 * i);
  }
  return key;
}

// All columns' names, by hash.
class NameTable {
 public:
  explicit NameTable(const FeatureNames& names) {
    while (static_cast<int64_t>(slots_.size()) < 4 * names.count()) slots_.resize(2 * slots_.size());
    for (auto& slot : slots_) slot = -1;
    for (int64_t c = 0; c < names.count(); ++c) {
      const Span name{names.data(c), names.data(c) + names.size(c)};
      const NameKey key = name_key(name, name.end);
      names_.push_back(name);
      keys_.push_back(key);
      size_t slot = first_slot(key);
      while (slots_[slot] >= 0) {
        TSR_CHECK_VALUE(!is(slots_[slot], key, name), "parse_examples: names must be distinct, but ", slots_[slot],
                        " and ", c, " are the same");
        slot = (slot + 1) & (slots_.size() - 1);
      }
      slots_[slot] = static_cast<int32_t>(c);
    }
  }

  // The name's column, or -1.
  int32_t find(const NameKey& key, Span name) const {
    for (size_t slot = first_slot(key);; slot = (slot + 1) & (slots_.size() - 1)) {
      if (slots_[slot] < 0 || is(slots_[slot], key, name)) return slots_[slot];
    }
  }

 private:
  size_t first_slot(const NameKey& key) const {
    uint64_t hash = (key.head ^ static_cast<uint64_t>(key.size)) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ hash >> 32 ^ key.tail) * 0xd6e8feb86659fd93u;
    return static_cast<size_t>(hash >> 32) & (slots_.size() - 1);
  }

  bool is(int32_t column, const NameKey& key, Span name) const {
    const size_t c = static_cast<size_t>(column);
    if (!(keys_[c] == key)) return false;
    return key.size <= kWholeInKey || std::memcmp(names_[c].begin, name.begin, static_cast<size_t>(key.size)) == 0;
  }

  std::vector<int32_t> slots_ = std::vector<int32_t>(4);
  std::vector<Span> names_;
  std::vector<NameKey> keys_;
};

// Writers put a record's features in the same order as the previous record's, as a rule: what was at each place then.
class NameMemory {
 public:
  NameMemory(const NameTable& table, int64_t places) : table_(&table), places_(static_cast<size_t>(places)) {}

  // The column of the name of the record's i-th feature, or -1.
  int32_t find(size_t i, Span name, const uint8_t* limit) {
    const NameKey key = name_key(name, limit);
    if (i >= places_.size()) return table_->find(key, name);
    Place& place = places_[i];
    if (place.key == key) return place.column;
    const int32_t column = table_->find(key, name);
    if (key.size <= kWholeInKey) place = {key, column};
    return column;
  }

 private:
  struct Place {
    NameKey key;
    int32_t column = -1;
  };

  const NameTable* table_;
  std::vector<Place> places_;
};

}  // namespace tsr
