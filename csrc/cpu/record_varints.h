// Runs of varints: how many there are, and their values. The hot loop of messages that hold whole batches.
#pragma once
#include "record_wire.h"

namespace tsr {

constexpr uint64_t kHighBits = 0x8080808080808080u;

// The varints that end in a run: its bytes below 0x80.
inline int64_t count_varints(Span run) {
  // Eight counters in a word, none of which overflows within a block.
  constexpr int64_t kBlock = 255 * 8;
  const uint8_t* at = run.begin;
  int64_t count = 0;
  for (int64_t block; (block = std::min<int64_t>((run.end - at) & ~int64_t{7}, kBlock)) > 0; at += block) {
    uint64_t counters = 0;
    for (int64_t i = 0; i < block; i += 8) counters += (~load_word(at + i) & kHighBits) >> 7;
    constexpr uint64_t kEvenBytes = 0x00ff00ff00ff00ffu;
    const uint64_t pairs = (counters & kEvenBytes) + ((counters >> 8) & kEvenBytes);
    count += static_cast<int64_t>((pairs * 0x0001000100010001u) >> 48);
  }
  for (; at < run.end; ++at) count += *at < 0x80;
  return count;
}

// The value of up to eight bytes' seven low bits each.
inline uint64_t pack_sevens(uint64_t x) {
  x = (x & 0x007f007f007f007fu) | ((x & 0x7f007f007f007f00u) >> 1);
  x = (x & 0x00003fff00003fffu) | ((x & 0x3fff00003fff0000u) >> 2);
  return (x & 0x000000000fffffffu) | ((x & 0x0fffffff00000000u) >> 4);
}

// One varint that ends within eight bytes, all of which may be read; false if it does not.
inline bool short_varint(const uint8_t*& at, uint64_t& value) {
  const uint64_t word = load_word(at), ends = ~word & kHighBits;
  if (__builtin_expect(ends == 0, 0)) return false;
  // All bits below the first byte that ends a varint, and that byte's.
  value = pack_sevens(word & (ends ^ (ends - 1)));
  at += (__builtin_ctzll(ends) >> 3) + 1;
  return true;
}

// Values go through a sink: as they are, or narrowed.
struct WideSink {
  using Value = int64_t;
  static bool fits(int64_t) { return true; }
};
struct NarrowSink {
  using Value = int32_t;
  static bool fits(int64_t value) { return value == static_cast<int32_t>(value); }
};

// Decodes `count` varints from `at` on, none beyond `end`. Bytes up to `limit` may be read.
template <class Sink>
bool decode_run(const uint8_t*& at, const uint8_t* end, const uint8_t* limit, int64_t count, typename Sink::Value* out,
                Fault& fault) {
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* const begin = at;
    uint64_t value;
    if (limit - at < 8 || !short_varint(at, value)) {
      WireReader reader({at, end}, fault);
      if (!reader.varint(value)) return false;
      at = reader.at;
    }
    const int64_t number = static_cast<int64_t>(value);
    if (!Sink::fits(number)) return fault.set(ExampleFault::kOutOfInt32, begin, number);
    out[i] = static_cast<typename Sink::Value>(number);
  }
  return true;
}

// Where each varint ends is known only once the one before it is read: a chain of some ten cycles for each value. Long
// runs are read at four places at a time.
constexpr int kLanes = 4;
constexpr int64_t kLongRun = 1024;

template <class Sink>
bool decode_lanes(Span run, const uint8_t* limit, typename Sink::Value* out, Fault& fault) {
  const uint8_t* at[kLanes];
  const uint8_t* ends[kLanes];
  typename Sink::Value* to[kLanes];
  int64_t left[kLanes], common = INT64_MAX;
  for (int lane = 0; lane < kLanes; ++lane) {
    at[lane] = lane == 0 ? run.begin : ends[lane - 1];
    ends[lane] = lane + 1 == kLanes ? run.end : std::max(at[lane], run.begin + run.size() * (lane + 1) / kLanes);
    while (ends[lane] < run.end && ends[lane] > run.begin && ends[lane][-1] >= 0x80) ++ends[lane];
    to[lane] = lane == 0 ? out : to[lane - 1] + left[lane - 1];
    left[lane] = count_varints({at[lane], ends[lane]});
    common = std::min(common, left[lane]);
  }
  int64_t done = 0;
  for (; done < common; ++done) {
    uint64_t values[kLanes];
    const uint8_t* next[kLanes];
    bool good = limit - at[kLanes - 1] >= 8;
    for (int lane = 0; good && lane < kLanes; ++lane) {
      next[lane] = at[lane];
      good = short_varint(next[lane], values[lane]) && Sink::fits(static_cast<int64_t>(values[lane]));
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (good) {
        at[lane] = next[lane];
        to[lane][done] = static_cast<typename Sink::Value>(values[lane]);
      } else if (!decode_run<Sink>(at[lane], ends[lane], limit, 1, to[lane] + done, fault)) {
        return false;
      }
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!decode_run<Sink>(at[lane], ends[lane], limit, left[lane] - done, to[lane] + done, fault)) return false;
  }
  return true;
}

// All varints of a run, of which there are `count` and no part of another: out has room for them.
template <class Sink>
bool decode_varints(Span run, const uint8_t* limit, int64_t count, typename Sink::Value* out, Fault& fault) {
  if (run.size() >= kLongRun) return decode_lanes<Sink>(run, limit, out, fault);
  const uint8_t* at = run.begin;
  return decode_run<Sink>(at, run.end, limit, count, out, fault);
}

}  // namespace tsr
