// The loops over table rows that every lookup and every gradient is made of, compiled per instruction set.
//
// A gradient is a lookup too: row v of a table's gradient pools the rows of grad that its entries point at. So one
// loop, pool, serves both directions.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../checks.h"
#include "../dispatch.h"

namespace tsr {

// How float32 sums of rows are taken, here and wherever a sum may have many terms: equal terms err alike, so that one
// long sum's error would grow with their number. Blocks of kSumBlock terms are added one by one, the blocks of a part
// of kSumPart terms likewise, and the parts in float64, where an infinity stays one (in a compensated sum it would
// not). So a sum of n terms is within 2^-23 * sqrt(n) * sum|terms| of the exact one. Sums of float64 are one block.
constexpr int64_t kSumBlock = 16;
constexpr int64_t kSumPart = 256;
template <class A>
constexpr bool kSumsInBlocks = std::is_same_v<A, float>;

// Where the block that begins at `begin` ends, for sums that are rare enough to take every block in float64.
template <class A>
int64_t sum_block_end(int64_t begin, int64_t end) {
  return kSumsInBlocks<A> && end - begin > kSumBlock ? begin + kSumBlock : end;
}

// Bag b holds the entries [starts[b], starts[b + 1]); entry e is row rows[e] of table, times weights[e].
//   out[b, :] = sum of weights[e] * table[rows[e], :], in blocks and in the order of e, divided by divisors[b]
// R is uint32_t or int64_t: the width in which the caller happens to have the rows.
template <class T, class R>
struct PoolArguments {
  const T* table;
  int64_t dim;
  const R* rows;
  const acc_t<T>* weights;   // null: all 1
  const int64_t* starts;     // [bags + 1]
  const acc_t<T>* divisors;  // [bags], 0 gives a row of zeros; null: all 1
  int64_t bags;
  T* out;       // [bags, dim]
  bool stream;  // write past the caches: right for memory that is mapped already and not read soon
  // Elements from one row to the next; 0 stands for dim. 1 where rows says in elements where rows begin.
  int64_t stride = 0;
  int64_t out_stride = 0;  // elements from one row of out to the next; 0 stands for dim
  // pool only: rows may be fetched from memory up to this entry, beyond the last bag; 0: not beyond.
  int64_t fetch_end = 0;
  bool near = false;         // pool only: see is_near
  acc_t<T>* wide = nullptr;  // where results of half types go that are not to be rounded, in place of out
};

// Whether the second-level cache holds a table whose rows come again and again: fetching them ahead is a third of the
// work then, for nothing.
inline bool is_near(int64_t table_rows, int64_t row_bytes, int64_t entries) {
  return table_rows * row_bytes <= (256 << 10) && entries > 2 * table_rows;
}

// How far ahead to fetch rows that are visited at random: what has been asked for but not used stays at about 8 KB, as
// much as the processor keeps under way.
inline int64_t rows_ahead(int64_t row_bytes) {
  return std::clamp<int64_t>(8192 / std::max<int64_t>(row_bytes, 1), 2, 64);
}

// Asks for a row of dim elements.
template <class T>
void fetch_row(const T* row, int64_t dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  const int64_t size = dim * static_cast<int64_t>(sizeof(T));
  for (int64_t b = 0; b < size; b += 64) __builtin_prefetch(bytes + b);
}

// The modes that are extremes, and a loop of each.
constexpr Reduction kExtremes[] = {Reduction::kMax, Reduction::kMin};

template <class F>
struct OfExtremes {
  F loops[std::size(kExtremes)];

  F operator[](Reduction mode) const {
    return loops[std::find(std::begin(kExtremes), std::end(kExtremes), mode) - std::begin(kExtremes)];
  }
};

template <class T, class R>
struct RowLoops {
  void (*pool)(const PoolArguments<T, R>& arguments);
  // Elementwise maximum or minimum; the first of equal values wins and a NaN wins over all. argmax [bags, dim] receives
  // positions[e] of the winning entry, or -1 in an empty bag (whose row is zero).
  OfExtremes<void (*)(const PoolArguments<T, R>& arguments, const int64_t* positions, int64_t* argmax)> pool_extremes;
  // As pool, but element d of an entry counts only where winners[places[e] + d] == positions[e]: the gradient of
  // extremes. places null: rows[e] * dim. An entry whose place is negative counts in full.
  void (*pool_won)(const PoolArguments<T, R>& arguments, const int64_t* positions, const int64_t* winners,
                   const int64_t* places);
};

template <class T, class R>
const RowLoops<T, R>& row_loops();

// <x, y> over dim elements, always in the same order: 64 bytes of partial sums, then a tree.
template <class T>
struct DotLoop {
  acc_t<T> (*dot)(const T* x, const T* y, int64_t dim);
};

template <class T>
const DotLoop<T>& dot_loop();

}  // namespace tsr
