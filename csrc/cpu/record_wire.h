// Protobuf's wire format, read with bounds: varints, tags and lengths; what is wrong is reported, with its place.
#pragma once
#include "../record_example.h"
#include "record_bytes.h"

namespace tsr {

// A run of bytes of the message that is being read. Span() is none at all.
struct Span {
  const uint8_t* begin;
  const uint8_t* end;

  int64_t size() const { return end - begin; }
  bool empty() const { return begin == end; }
};

// What is wrong with a message, and where: the first thing that was found.
struct Fault {
  ExampleFault kind = ExampleFault::kNone;
  const uint8_t* at = nullptr;
  int64_t column = -1;
  int64_t detail = 0;

  // Always false, so that readers can return it.
  bool set(ExampleFault kind_, const uint8_t* at_, int64_t detail_ = 0) {
    kind = kind_;
    at = at_;
    detail = detail_;
    return false;
  }
};

enum WireType : uint32_t { kVarintType = 0, kFixed64Type = 1, kBytesType = 2, kFixed32Type = 5 };

constexpr uint32_t tag_of(uint32_t field, WireType type) { return field << 3 | type; }

// Reads one message's fields. Every function leaves `at` after what it has read, or reports a fault and returns false.
struct WireReader {
  const uint8_t* at;
  const uint8_t* end;
  Fault* fault;

  WireReader(Span span, Fault& fault_) : at(span.begin), end(span.end), fault(&fault_) {}

  bool done() const { return at == end; }

  bool varint(uint64_t& value) {
    if (at < end && *at < 0x80) {
      value = *at++;
      return true;
    }
    return long_varint(value);
  }

  // The bytes that a length before them counts.
  bool bytes(Span& span) {
    const uint8_t* const begin = at;
    uint64_t length;
    if (!varint(length)) return false;
    if (length > static_cast<uint64_t>(end - at)) {
      return fault->set(ExampleFault::kLength, begin, static_cast<int64_t>(std::min<uint64_t>(length, INT64_MAX)));
    }
    span = {at, at + length};
    at += length;
    return true;
  }

  bool tag(uint32_t& value) {
    const uint8_t* const begin = at;
    uint64_t wide;
    if (!varint(wide)) return false;
    if (wide > UINT32_MAX || wide >> 3 == 0) return fault->set(ExampleFault::kTag, begin, tag_detail(wide));
    value = static_cast<uint32_t>(wide);
    return true;
  }

  // A field that is not known, after its tag, which was at `begin`.
  bool skip(uint32_t value, const uint8_t* begin) {
    uint64_t number;
    Span span;
    switch (value & 7) {
      case kVarintType:
        return varint(number);
      case kFixed64Type:
        return fixed(8);
      case kBytesType:
        return bytes(span);
      case kFixed32Type:
        return fixed(4);
      default:
        return fault->set(ExampleFault::kTag, begin, tag_detail(value));
    }
  }

  bool fixed(int64_t size) {
    if (end - at < size) return fault->set(ExampleFault::kTruncated, at);
    at += size;
    return true;
  }

 private:
  static int64_t tag_detail(uint64_t tag) { return static_cast<int64_t>(std::min<uint64_t>(tag, INT64_MAX)); }

  bool long_varint(uint64_t& value) {
    const uint8_t* const begin = at;
    value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (at == end) return fault->set(ExampleFault::kTruncated, begin);
      const uint8_t byte = *at++;
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return fault->set(ExampleFault::kVarint, begin);
  }
};

}  // namespace tsr
