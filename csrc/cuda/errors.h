// Bad values found by CUDA kernels, told to the host without a synchronisation.
//
// A kernel skips a bad value and reports it to its device's record, which lies in pinned host memory. Every operator
// call on the device looks at the record first; where there is something, it waits for the stream and raises it, as
// does check_errors(). Of several bad values the record keeps that of the earliest call, argument and position, so the
// message is the same on every run.
#pragma once
#include <cstdint>

#ifdef TSR_EMULATED
#include "emulation.h"
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

namespace tsr {

// In the order in which the CPU checks them.
enum class Argument : int32_t {
  kOffsets,
  kSegmentIds,
  kIndices,
  kWeights,
  kValues,
  kRowIds,
  kReverseIndexMap,
  kIds,
  kRows,
  kCounters,
  kFreeRows,
  kTarget,
  kExcluded,
  kSamples
};

// What is wrong with a value; the numbers that go with it are in brackets.
enum class Fault : int32_t {
  kOutOfRange,      // an id outside [0, bound)
  kNegative,        // a segment id below 0
  kUnsorted,        // a segment id below its predecessor, bound
  kTooLarge,        // a segment id >= num_segments, bound
  kNotFirst,        // the first offset of bags is not 0
  kDecreasing,      // an offset of bags below its predecessor, bound
  kNotLast,         // the last offset of bags is not bound
  kNotANumber,      // a NaN weight
  kBeforeBytes,     // the first offset of strings is below 0
  kUnsortedBytes,   // an offset of strings below its predecessor, bound
  kBeyondBytes,     // an offset of strings above the number of bytes, bound
  kColumnOffsets,   // an offset of column number bound below its predecessor, or outside the column's values
  kTooManyCrosses,  // a row of more than bound crosses
  kOutsideBytes,    // the only offset, of no strings, outside [0, bound]
  kNotItems,        // the last offset of rows is not bound
  kUnsortedIndex,   // an index of an element before its predecessor's, bound
  kRepeatedIndex,   // an index of its predecessor's element
  kNoRow,           // an id whose row its shard does not have
  kNotIncreasing,   // a row not above its predecessor, bound
  kNotBelow,        // a row >= bound, where negative ones are left out
  kOutsideClosed,   // a counter outside [0, bound]
  kNotATarget,      // a target outside [0, bound) that is not ignore_index, begin
  kNotFree,         // among rows that are free one that is not, or not below bound, or not in ascending order
};

constexpr uint64_t kNoError = ~uint64_t{0};

// Where an argument is a list of tensors: which of them, and where it begins if all are one. Positions count in all.
struct ListItem {
  int32_t item = -1;
  int64_t begin = 0;
};

// A bad value, as kernels tell it.
struct FaultDetails {
  uint64_t key = kNoError;  // written last: what is here is whole once this is the record's key
  int64_t value = 0;
  int64_t bound = 0;
  const char* op = nullptr;
  Argument argument{};
  Fault fault{};
  int32_t column = -1;  // of a matrix; the position is the row then
  int32_t item = -1;    // of a list
  int64_t begin = 0;
};

// Of all faults only those are written down that come before all others seen so far: few. The last of them is the
// first of all.
struct ErrorRecord {
  static constexpr unsigned kDetails = 1024;
  unsigned long long first = kNoError;  // the smallest key so far: call, argument and position of a fault
  unsigned written = 0;
  FaultDetails details[kDetails];  // a ring
  FaultDetails taken;              // where take_fault leaves one for the host
};

#if defined(__CUDACC__) || defined(TSR_EMULATED)
// Empties the record, and leaves what was its first fault in `taken`; its key is kNoError if there is none, or it is
// just being written. One thread of the device: the host cannot, as what is atomic on the device is not towards it, and
// would lose a fault that another stream reports meanwhile.
__device__ inline void take_fault(ErrorRecord* record) {
  volatile FaultDetails* const taken = &record->taken;
  taken->key = kNoError;
  unsigned long long first = atomicMin(&record->first, static_cast<unsigned long long>(kNoError));
  for (unsigned k = 0; first != kNoError && k < ErrorRecord::kDetails; ++k) {
    const volatile FaultDetails& details = record->details[k];
    if (details.key != first) continue;
    __threadfence_system();
    taken->value = details.value;
    taken->bound = details.bound;
    taken->op = details.op;
    taken->argument = details.argument;
    taken->fault = details.fault;
    taken->column = details.column;
    taken->item = details.item;
    taken->begin = details.begin;
    const unsigned long long seen = atomicCAS(&record->first, first, static_cast<unsigned long long>(kNoError));
    if (seen == first) {
      taken->key = first;
      return;
    }
    // One that comes before it has come since.
    first = seen;
    k = ~0u;
  }
}
#endif

constexpr int kPositionBits = 40;
constexpr int kArgumentBits = 4;
constexpr int kCallBits = 64 - kPositionBits - kArgumentBits;

// What a kernel holds of its call: passed by value.
struct ErrorSink {
  ErrorRecord* record;
  uint64_t call;   // the call's number, in the key's place
  const char* op;  // a string of the host

#if defined(__CUDACC__) || defined(TSR_EMULATED)
  // Keeps the fault if it comes before what the record holds. No thread waits for another.
  __device__ void report(Argument argument, Fault fault, int64_t position, int64_t value, int64_t bound,
                         int32_t column = -1, const ListItem& item = ListItem()) const {
    const uint64_t key = call | static_cast<uint64_t>(argument) << kPositionBits | static_cast<uint64_t>(position);
    if (static_cast<volatile ErrorRecord*>(record)->first <= key) return;
    if (atomicMin(&record->first, static_cast<unsigned long long>(key)) <= key) return;
    volatile FaultDetails& details = record->details[atomicAdd(&record->written, 1u) % ErrorRecord::kDetails];
    details.value = value;
    details.bound = bound;
    details.op = op;
    details.argument = argument;
    details.fault = fault;
    details.column = column;
    details.item = item.item;
    details.begin = item.begin;
    __threadfence_system();
    details.key = key;
  }
#endif
};

}  // namespace tsr
