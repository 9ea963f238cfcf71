// Where each column's feature lies in a record.
//
// An Example has one field, features (1), a message whose field 1 is repeated: the map's entries, of which each has a
// name (1) and a Feature (2).
#pragma once
#include "record_names.h"

namespace tsr {

class RecordSplitter {
 public:
  // `fixed`: which columns have a fixed count. `limit`: up to where bytes may be read.
  RecordSplitter(const NameTable& table, std::vector<bool> fixed, const uint8_t* limit)
      : memory_(table, 2 * static_cast<int64_t>(fixed.size()) + kMorePlaces),
        features_(fixed.size()),
        fixed_(std::move(fixed)),
        limit_(limit) {}

  // Finds the features of a record; false after a fault.
  bool split(Span record, Fault& fault) {
    std::fill(features_.begin(), features_.end(), Span());
    place_ = 0;
    WireReader reader(record, fault);
    while (!reader.done()) {
      const uint8_t* const begin = reader.at;
      uint32_t tag;
      Span features;
      if (!reader.tag(tag)) return false;
      if (tag != tag_of(1, kBytesType)) {
        if (!reader.skip(tag, begin)) return false;
      } else if (!reader.bytes(features) || !read_entries(features, fault)) {
        return false;
      }
    }
    return true;
  }

  // The column's feature in the last record; without a beginning if there is none.
  Span feature(int64_t column) const { return features_[static_cast<size_t>(column)]; }

 private:
  // Features that are not asked for have places too.
  static constexpr int64_t kMorePlaces = 64;

  bool read_entries(Span features, Fault& fault) {
    WireReader reader(features, fault);
    while (!reader.done()) {
      const uint8_t* const begin = reader.at;
      uint32_t tag;
      Span entry, name, feature;
      if (!reader.tag(tag)) return false;
      if (tag != tag_of(1, kBytesType)) {
        if (!reader.skip(tag, begin)) return false;
        continue;
      }
      if (!reader.bytes(entry)) return false;
      if (!plain_entry(entry, name, feature) && !read_entry(entry, name, feature, fault)) return false;
      const int32_t found = memory_.find(place_++, name, limit_);
      if (found < 0) continue;
      const size_t column = static_cast<size_t>(found);
      // tf.io.parse_example passes over empty features, but where any number of values may be.
      if (!feature.empty() || !fixed_[column]) features_[column] = feature;
    }
    return true;
  }

  // What writers write as a rule: the name, then the feature, and both lengths in one byte.
  static bool plain_entry(Span entry, Span& name, Span& feature) {
    const uint8_t* const at = entry.begin;
    const int64_t size = entry.size();
    if (size < 4 || at[0] != tag_of(1, kBytesType) || at[1] > 0x7f || at[1] + 4 > size) return false;
    name = {at + 2, at + 2 + at[1]};
    if (name.end[0] != tag_of(2, kBytesType) || name.end[1] > 0x7f || name.end[1] != entry.end - name.end - 2) {
      return false;
    }
    feature = {name.end + 2, entry.end};
    return true;
  }

  static bool read_entry(Span entry, Span& name, Span& feature, Fault& fault) {
    name = feature = {entry.end, entry.end};
    WireReader reader(entry, fault);
    while (!reader.done()) {
      const uint8_t* const begin = reader.at;
      uint32_t tag;
      if (!reader.tag(tag)) return false;
      const bool good = tag == tag_of(1, kBytesType)   ? reader.bytes(name)
                        : tag == tag_of(2, kBytesType) ? reader.bytes(feature)
                                                       : reader.skip(tag, begin);
      if (!good) return false;
    }
    return true;
  }

  NameMemory memory_;
  std::vector<Span> features_;
  std::vector<bool> fixed_;
  const uint8_t* limit_;
  size_t place_ = 0;
};

}  // namespace tsr
