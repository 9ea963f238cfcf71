// Calls of CUB: some that its contracts forbid, although hardware may bear them, and sound ones.
#include <thrust/iterator/counting_iterator.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_run_length_encode.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_select.cuh>

#include "faults.h"

namespace tsr {
namespace {

// The numbers first, first + step, ... modulo 4096, in device memory.
uint32_t* numbers(Bench& b, int64_t n, uint32_t first, uint32_t step) {
  uint32_t* const x = b.call.workspace<uint32_t>(n);
  for (int64_t i = 0; i < n; ++i) x[i] = (first + step * static_cast<uint32_t>(i)) % 4096;
  return x;
}

// CUB's two phases, with scratch of `less` bytes fewer than CUB asked for, `shift` bytes behind its start.
template <class F>
void with_scratch(Bench& b, const F& run, size_t less = 0, size_t shift = 0) {
  size_t bytes = 0;
  run(nullptr, bytes);
  uint8_t* const scratch = b.call.workspace<uint8_t>(static_cast<int64_t>(bytes + shift));
  bytes -= less;
  run(scratch + shift, bytes);
}

struct SortOf {
  int64_t n;
  int begin_bit, end_bit;
  size_t less = 0, shift = 0;
};

// Sorts pairs whose values are positions. Shows the sorted values (62 at most), the buffer that holds them, and whether
// the other buffer is overwritten.
void sort(Bench& b, const SortOf& sort) {
  cub::DoubleBuffer<uint32_t> keys(numbers(b, sort.n, 5, 1237), b.call.workspace<uint32_t>(sort.n));
  cub::DoubleBuffer<uint32_t> values(numbers(b, sort.n, 0, 1), b.call.workspace<uint32_t>(sort.n));
  with_scratch(
      b,
      [&](void* scratch, size_t& bytes) {
        cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, values, sort.n, sort.begin_bit, sort.end_bit);
      },
      sort.less, sort.shift);
  std::copy_n(values.Current(), std::min<int64_t>(sort.n, 62), b.out_as<uint32_t>());
  b.out_as<uint32_t>()[62] = static_cast<uint32_t>(keys.selector);
  b.out_as<uint32_t>()[63] = keys.Alternate()[0];
}

// Sorts 50 keys in two buffers; the second begins `distance` behind the first.
void sort_at_distance(Bench& b, int64_t distance) {
  uint32_t* const x = numbers(b, 100, 0, 1);
  uint32_t* const y = numbers(b, 100, 0, 1);
  cub::DoubleBuffer<uint32_t> keys(x, x + distance), values(y, y + 50);
  with_scratch(b, [&](void* scratch, size_t& bytes) {
    cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, values, 50, 0, 32);
  });
}

// Shows x[i] - i, where x[i] is the sum of the ones before the i-th; `out` lies `shift` elements behind the input.
void scan(Bench& b, int64_t shift) {
  uint32_t* const x = numbers(b, 80, 1, 0);
  with_scratch(b, [&](void* scratch, size_t& bytes) {
    cub::DeviceScan::ExclusiveScan(scratch, bytes, x, x + shift, cuda::std::plus<uint32_t>(), uint32_t{7}, 40);
  });
  std::copy_n(x + shift, 40, b.out_as<uint32_t>());
}

struct IsBelow {
  const uint32_t* bound;
  bool operator()(uint32_t i) const { return i < *bound; }
};

// Shows the numbers below 14 and how many they are.
void select_if(Bench& b) {
  const uint32_t* const bound = numbers(b, 1, 14, 0);
  with_scratch(b, [&](void* scratch, size_t& bytes) {
    cub::DeviceSelect::If(scratch, bytes, thrust::counting_iterator<uint32_t>(0), b.out_as<uint32_t>(),
                          b.out_as<uint32_t>() + 63, 40, IsBelow{bound});
  });
}

// The functor reads where the call writes.
void select_if_by_output(Bench& b) {
  uint32_t* const bound = numbers(b, 40, 14, 0);
  with_scratch(b, [&](void* scratch, size_t& bytes) {
    cub::DeviceSelect::If(scratch, bytes, thrust::counting_iterator<uint32_t>(0), bound, b.out_as<uint32_t>() + 63, 40,
                          IsBelow{bound});
  });
}

void select_flagged(Bench& b, bool over_flags) {
  const uint32_t* const x = numbers(b, 40, 100, 1);
  uint8_t* const flags = b.call.workspace<uint8_t>(160);
  for (int i = 0; i < 160; ++i) flags[i] = i % 4 == 1;
  uint32_t* const out = over_flags ? reinterpret_cast<uint32_t*>(flags) : b.out_as<uint32_t>();
  with_scratch(b, [&](void* scratch, size_t& bytes) {
    cub::DeviceSelect::Flagged(scratch, bytes, x, flags, out, b.out_as<uint32_t>() + 63, 40);
  });
}

// Runs of 1, 2, 3, ... equal numbers: shows their values, then their lengths from position 30 on.
void run_lengths(Bench& b, bool in_place) {
  uint32_t* const x = numbers(b, 21, 0, 0);
  for (uint32_t run = 0, i = 0; run < 6; ++run) {
    for (uint32_t k = 0; k <= run; ++k) x[i++] = 9 * run;
  }
  uint32_t* const out = b.out_as<uint32_t>();
  with_scratch(b, [&](void* scratch, size_t& bytes) {
    cub::DeviceRunLengthEncode::Encode(scratch, bytes, x, in_place ? x : out, out + 30, out + 63, 21);
  });
}

}  // namespace

const Cases& primitive_cases() {
  static const Cases all{
      {"sort_few", [](Bench& b) { sort(b, {20, 0, 32}); }},
      {"sort_by_one_pass", [](Bench& b) { sort(b, {62, 0, 8}); }},
      {"sort_by_two_passes", [](Bench& b) { sort(b, {62, 0, 12}); }},
      {"sort_by_upper_bits", [](Bench& b) { sort(b, {62, 4, 12}); }},
      {"sort_by_too_many_bits", [](Bench& b) { sort(b, {62, 0, 33}); }},
      {"sort_from_bit_minus_one", [](Bench& b) { sort(b, {62, -1, 8}); }},
      {"sort_by_no_bits", [](Bench& b) { sort(b, {62, 8, 8}); }},
      {"sort_with_little_scratch", [](Bench& b) { sort(b, {62, 0, 8, /*less=*/1}); }},
      {"sort_with_shifted_scratch", [](Bench& b) { sort(b, {62, 0, 8, 0, /*shift=*/4}); }},
      {"sort_with_scratch_of_fewer",
       [](Bench& b) {
         size_t bytes = 0;
         cub::DoubleBuffer<uint32_t> keys(numbers(b, 500, 0, 1), b.call.workspace<uint32_t>(500));
         cub::DoubleBuffer<uint32_t> values(numbers(b, 500, 0, 1), b.call.workspace<uint32_t>(500));
         cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, values, 62, 0, 8);
         cub::DeviceRadixSort::SortPairs(b.call.workspace<uint8_t>(5000), bytes, keys, values, 500, 0, 8);
       }},
      {"sort_in_place", [](Bench& b) { sort_at_distance(b, 0); }},
      {"sort_overlapping", [](Bench& b) { sort_at_distance(b, 49); }},
      {"sort_side_by_side", [](Bench& b) { sort_at_distance(b, 50); }},
      {"scan", [](Bench& b) { scan(b, 40); }},
      {"scan_in_place", [](Bench& b) { scan(b, 0); }},
      {"scan_overlapping", [](Bench& b) { scan(b, 1); }},
      {"select_if", select_if},
      {"select_if_by_output", select_if_by_output},
      {"select_flagged", [](Bench& b) { select_flagged(b, false); }},
      {"select_over_flags", [](Bench& b) { select_flagged(b, true); }},
      {"run_lengths", [](Bench& b) { run_lengths(b, false); }},
      {"run_lengths_in_place", [](Bench& b) { run_lengths(b, true); }},
  };
  return all;
}

}  // namespace tsr
