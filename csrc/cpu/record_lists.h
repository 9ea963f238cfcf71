// The list that a feature holds: its values' number, and the values themselves.
//
// A Feature is one of three messages, and each has one repeated field, 1:
//   bytes_list (field 1) of byte strings, float_list (2) of 4 bytes each, int64_list (3) of varints.
// Numbers come packed, which is one field of bytes that holds them all, or one field each.
#pragma once
#include "record_varints.h"

namespace tsr {

// The field of a Feature that holds values for a column of this dtype.
inline uint32_t list_field(ExampleDtype dtype) {
  return dtype == ExampleDtype::kBytes ? 1 : dtype == ExampleDtype::kFloat32 ? 2 : 3;
}

// Calls each(run) for the runs of a list of the field's kind, in order: packed numbers, a number by itself, or a byte
// string. each returns false after a fault.
template <class Each>
bool for_each_run(Span list, uint32_t field, Fault& fault, const Each& each) {
  WireReader reader(list, fault);
  const uint32_t single = field == 2 ? tag_of(1, kFixed32Type) : field == 3 ? tag_of(1, kVarintType) : 0;
  while (!reader.done()) {
    const uint8_t* const begin = reader.at;
    uint32_t tag;
    if (!reader.tag(tag)) return false;
    const uint8_t* const value = reader.at;
    if (tag == tag_of(1, kBytesType)) {
      Span run;
      if (!reader.bytes(run)) return false;
      if (field == 2 && run.size() % 4 != 0) return fault.set(ExampleFault::kFloats, value, run.size());
      if (field == 3 && !run.empty() && run.end[-1] >= 0x80) return fault.set(ExampleFault::kTruncated, run.end - 1);
      if (!each(run)) return false;
    } else {
      if (!reader.skip(tag, begin)) return false;
      if (tag == single && !each(Span{value, reader.at})) return false;
    }
  }
  return true;
}

// Calls each(run) for the runs of all lists of one kind in a Feature, which may have several. `found`: whether there is
// any.
template <class Each>
bool for_each_value_run(Span feature, uint32_t field, Fault& fault, bool& found, const Each& each) {
  WireReader reader(feature, fault);
  found = false;
  while (!reader.done()) {
    const uint8_t* const begin = reader.at;
    uint32_t tag;
    if (!reader.tag(tag)) return false;
    if ((tag & 7) != kBytesType || tag >> 3 > 3) {
      if (!reader.skip(tag, begin)) return false;
      continue;
    }
    if (tag >> 3 != field) return fault.set(ExampleFault::kKind, begin, tag >> 3);
    Span list;
    if (!reader.bytes(list) || !for_each_run(list, field, fault, each)) return false;
    found = true;
  }
  return true;
}

// ---- What writers write as a rule: one packed list ------------------------------------------------------------------

// The values of a Feature that holds one packed list, which is all of it, with lengths of one byte; false otherwise.
inline bool small_packed(Span feature, uint32_t field, Span& run) {
  const uint8_t* const at = feature.begin;
  const int64_t size = feature.size();
  if (size < 4 || size > 127) return false;
  if (at[0] != tag_of(field, kBytesType) || at[1] != size - 2 || at[2] != tag_of(1, kBytesType) || at[3] != size - 4) {
    return false;
  }
  run = {at + 4, feature.end};
  return true;
}

// Decodes exactly k varints that are all of a run; false, without a fault, if it is not so. A short varint may be read
// beyond the run's end, and is then not taken.
template <class Sink>
bool decode_exactly(Span run, const uint8_t* limit, int64_t k, typename Sink::Value* out) {
  const uint8_t* at = run.begin;
  for (int64_t i = 0; i < k; ++i) {
    if (at >= run.end) return false;
    uint64_t value = *at;
    if (value < 0x80) {
      ++at;
    } else if (limit - at < 8 || !short_varint(at, value)) {
      return false;
    }
    if (!Sink::fits(static_cast<int64_t>(value))) return false;
    out[i] = static_cast<typename Sink::Value>(value);
  }
  return at == run.end;
}

// ---- Any list -------------------------------------------------------------------------------------------------------

// How much a feature holds.
struct ListSize {
  int64_t values = 0;
  int64_t bytes = 0;  // of strings
  bool found = false;
};

inline bool measure_list(Span feature, ExampleDtype dtype, Fault& fault, ListSize& size) {
  const uint32_t field = list_field(dtype);
  Span plain;
  if (dtype != ExampleDtype::kBytes && small_packed(feature, field, plain)) {
    size.found = true;
    for (const uint8_t* at = plain.begin; at < plain.end; ++at) size.values += *at < 0x80;
    if (field == 2) size.values = plain.size() / 4;
    if (field == 2 ? plain.size() % 4 == 0 : plain.empty() || plain.end[-1] < 0x80) return true;
    size = ListSize();
  }
  return for_each_value_run(feature, field, fault, size.found, [&](Span run) {
    if (dtype == ExampleDtype::kBytes) {
      size.values += 1;
      size.bytes += run.size();
    } else {
      size.values += dtype == ExampleDtype::kFloat32 ? run.size() / 4 : count_varints(run);
    }
    return true;
  });
}

// Decodes numbers that measure_list has counted, or fewer.
template <class Sink>
bool decode_integers(Span feature, const uint8_t* limit, typename Sink::Value* out, Fault& fault) {
  bool found;
  return for_each_value_run(feature, 3, fault, found, [&](Span run) {
    const int64_t count = count_varints(run);
    typename Sink::Value* const to = out;
    out += count;
    return decode_varints<Sink>(run, limit, count, to, fault);
  });
}

inline bool decode_floats(Span feature, float* out, Fault& fault) {
  bool found;
  return for_each_value_run(feature, 2, fault, found, [&](Span run) {
    if (!run.empty()) std::memcpy(out, run.begin, static_cast<size_t>(run.size()));
    out += run.size() / 4;
    return true;
  });
}

// Copies the strings to `out`, and writes where each ends to `ends`, counted from `base`.
inline bool copy_strings(Span feature, uint8_t* out, int64_t base, int64_t* ends, Fault& fault) {
  bool found;
  return for_each_value_run(feature, 1, fault, found, [&](Span run) {
    if (!run.empty()) std::memcpy(out, run.begin, static_cast<size_t>(run.size()));
    out += run.size();
    *ends++ = base += run.size();
    return true;
  });
}

}  // namespace tsr
