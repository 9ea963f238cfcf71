// Body of segment_loops.cpp for one instruction set: see isa_foreach.h. No include guard.

#include "row_vectors_body.h"

// ---- Reductions -----------------------------------------------------------------------------------------------------

// How rows that an order names are fetched: so many entries ahead, and so many bytes by a walk over some columns.
struct Fetched {
  int64_t ahead, bytes;
};

// The row of entry e. A later one is fetched, if the processor cannot foresee which it is.
template <class Arguments>
static inline __attribute__((always_inline)) int64_t row_of(const Arguments& a, int64_t e, int64_t first_column,
                                                            const Fetched& fetched) {
  if (a.order == nullptr) return e;
  if (fetched.bytes > 0) {
    fetch_later(reinterpret_cast<const char*>(a.data + a.order[e + fetched.ahead] * a.dim + first_column),
                fetched.bytes);
  }
  return a.order[e];
}

// What a bag comes to: begin(first row), add(later row), end().
struct Sum {
  template <class V, class A>
  static inline __attribute__((always_inline)) void begin(V&, A) {}
  template <class V, class A>
  static inline __attribute__((always_inline)) void add(V& total, const V& x, A) {
    total += x;
  }
  template <class V, class A>
  static inline __attribute__((always_inline)) void end(V&, A) {}
};

struct Product : Sum {
  template <class V, class A>
  static inline __attribute__((always_inline)) void add(V& total, const V& x, A) {
    total *= x;
  }
};

template <class V, class A>
static inline __attribute__((always_inline)) void turn(V& x, A direction) {
  if constexpr (is_integer_v<A>) {
    x ^= direction;
  } else {
    x *= direction;
  }
}

struct Extreme {
  template <class V, class A>
  static inline __attribute__((always_inline)) void begin(V& x, A direction) {
    turn(x, direction);
  }
  template <class V, class A>
  static inline __attribute__((always_inline)) void add(V& total, V x, A direction) {
    turn(x, direction);
    V greater = x > total ? x : total;
    if constexpr (is_integer_v<A>) {
      total = greater;
    } else {
#if defined(__x86_64__)
      // Compilers would join both choices. Apart, only this one waits for the rows before, and it is one instruction.
      asm("" : "+v"(greater));
#endif
      total = x != x ? x : greater;  // x != x: x is NaN
    }
  }
  template <class V, class A>
  static inline __attribute__((always_inline)) void end(V& total, A direction) {
    turn(total, direction);
  }
};

template <class Reducer, class T>
static constexpr bool kReducesInBlocks = std::is_same_v<Reducer, Sum> && kSumsInBlocks<acc_t<T>>;

// What the entries [begin, end) come to, at least one, but for the reducer's end.
template <class Reducer, class T, class Columns>
static inline __attribute__((always_inline)) void reduce_columns(const ReduceArguments<T>& a, int64_t begin,
                                                                 int64_t end, const Fetched& fetched,
                                                                 const Columns& columns,
                                                                 typename Columns::V (&total)[Columns::kCount]) {
  typename Columns::V x[Columns::kCount];
  columns.get(a.data + row_of(a, begin, columns.first, fetched) * a.dim + columns.first, total);
  for (int k = 0; k < Columns::kCount; ++k) Reducer::begin(total[k], a.direction);
  for (int64_t e = begin + 1; e < end; ++e) {
    columns.get(a.data + row_of(a, e, columns.first, fetched) * a.dim + columns.first, x);
    for (int k = 0; k < Columns::kCount; ++k) Reducer::add(total[k], x[k], a.direction);
  }
}

// The sum of at most a part, in blocks (row_loops.h).
template <class T, class Columns>
static inline __attribute__((always_inline)) void sum_blocks(const ReduceArguments<T>& a, int64_t begin, int64_t end,
                                                             const Fetched& fetched, const Columns& columns,
                                                             typename Columns::V (&total)[Columns::kCount]) {
  reduce_columns<Sum>(a, begin, std::min(begin + kSumBlock, end), fetched, columns, total);
  while (end - begin > kSumBlock) {
    begin += kSumBlock;
    typename Columns::V block[Columns::kCount];
    reduce_columns<Sum>(a, begin, std::min(begin + kSumBlock, end), fetched, columns, block);
    for (int k = 0; k < Columns::kCount; ++k) total[k] += block[k];
  }
}

// The bags from b on, up to one that is left to the loop for the other length. Returns that bag.
template <SumLength kLength, class Reducer, class T>
static __attribute__((noinline)) int64_t reduce_run(const ReduceArguments<T>& arguments, int64_t b) {
  const ReduceArguments<T> a = arguments;  // a copy, so that the stores cannot alias it
  constexpr int kMost = TSR_ISA_LEVEL == 2 ? 4 : 8;
  const int64_t last = a.starts[a.bags], width = a.last_column - a.first_column, ahead = fetched_ahead<T>(width);
  PartSums<> parts;
  for (; b < a.bags; ++b) {
    const int64_t begin = a.starts[b], end = a.starts[b + 1];
    if (kReducesInBlocks<Reducer, T> && leaves<kLength, acc_t<T>>(end - begin)) break;
    T* out = a.out + b * a.dim;
    if (begin == end) {
      for (int64_t d = a.first_column; d < a.last_column; ++d) out[d] = a.empty;
      continue;
    }
    for_columns<T, kMost>(a.first_column, a.last_column, [&](const auto& columns) __attribute__((always_inline)) {
      using Columns = std::decay_t<decltype(columns)>;
      constexpr int kCount = Columns::kCount;
      const Fetched fetched{std::min(ahead, last - end), fetched_bytes<T>(columns.first - a.first_column, width)};
      typename Columns::V total[kCount];
      if constexpr (kLength == SumLength::kBlock) {
        reduce_columns<Reducer>(a, begin, end, fetched, columns, total);
      } else {
        for (int64_t from = begin, to;; from = to) {
          to = std::min(from + kSumPart, end);
          sum_blocks(a, from, to, fetched, columns, total);
          if (to == end && from == begin) break;
          parts.add(total);
          if (to < end) continue;
          parts.round(total);
          break;
        }
      }
      for (int k = 0; k < kCount; ++k) {
        Reducer::end(total[k], a.direction);
        if constexpr (!is_integer_v<T>) {
          if (a.divisors != nullptr) total[k] /= a.divisors[b];
        }
      }
      columns.put(out + columns.first, total);
    });
  }
  return b;
}

template <class Reducer, class T>
static void reduce(const ReduceArguments<T>& a) {
  for (int64_t b = 0; b < a.bags;) {
    b = reduce_run<SumLength::kBlock, Reducer>(a, b);
    if constexpr (kReducesInBlocks<Reducer, T>) b = reduce_run<SumLength::kLong, Reducer>(a, b);
  }
}

// ---- Gradients ------------------------------------------------------------------------------------------------------

// What a bag's rows share: begin(first row), add(later row), share(the bag's gradient); of(row) is the row's part.
template <class V, class A>
struct ExtremeShares {
  using Mask = decltype(V{} == V{});
  A direction;
  V best;
  Mask ties;

  void begin(V x) {
    turn(x, direction);
    best = x;
    ties = Mask{} + 1;
  }
  void add(V x) {
    turn(x, direction);
    const Mask better = (x > best) | (x != x);
    ties = better ? Mask{} + 1 : ties - (x == best);  // true is -1
    best = better ? x : best;
  }
  V share(const V& grad) const { return grad / __builtin_convertvector(ties, V); }
  V of(V x, const V& share) const {
    turn(x, direction);
    return x == best ? share : V{};
  }
};

template <class V, class A>
struct ProductShares {
  using Mask = decltype(V{} == V{});
  A direction;
  V product;  // of all but zeros
  Mask zeros;

  void begin(const V& x) {
    zeros = Mask{};
    product = V{} + A(1);
    add(x);
  }
  void add(const V& x) {
    const Mask is_zero = x == V{};
    zeros -= is_zero;
    product *= is_zero ? V{} + A(1) : x;
  }
  V share(const V& grad) const { return grad * product; }
  V of(const V& x, const V& share) const {
    return x == V{} ? (zeros == 1 ? share : V{}) : (zeros == 0 ? share / x : V{});
  }
};

template <template <class, class> class Shares, class T>
static void reduce_backward(const ReduceBackwardArguments<T>& arguments) {
  using A = acc_t<T>;
  const ReduceBackwardArguments<T> a = arguments;
  const int64_t last = a.starts[a.bags], width = a.last_column - a.first_column, ahead = fetched_ahead<T>(width);
  for (int64_t b = 0; b < a.bags; ++b) {
    const int64_t begin = a.starts[b], end = a.starts[b + 1];
    if (begin == end) continue;
    for_columns<T, 4>(a.first_column, a.last_column, [&](const auto& columns) __attribute__((always_inline)) {
      using Columns = std::decay_t<decltype(columns)>;
      using V = typename Columns::V;
      constexpr int kCount = Columns::kCount;
      const Fetched fetched{std::min(ahead, last - end), fetched_bytes<T>(columns.first - a.first_column, width)};
      const T* data = a.data + columns.first;
      Shares<V, A> shares[kCount];
      V x[kCount], share[kCount];
      columns.get(data + row_of(a, begin, columns.first, fetched) * a.dim, x);
      for (int k = 0; k < kCount; ++k) {
        shares[k].direction = a.direction;
        shares[k].begin(x[k]);
      }
      for (int64_t e = begin + 1; e < end; ++e) {
        columns.get(data + row_of(a, e, columns.first, fetched) * a.dim, x);
        for (int k = 0; k < kCount; ++k) shares[k].add(x[k]);
      }
      columns.get(a.grad + b * a.dim + columns.first, share);
      for (int k = 0; k < kCount; ++k) share[k] = shares[k].share(share[k]);
      for (int64_t e = begin; e < end; ++e) {
        const int64_t at = (a.order == nullptr ? e : a.order[e]) * a.dim;
        columns.get(data + at, x);
        for (int k = 0; k < kCount; ++k) x[k] = shares[k].of(x[k], share[k]);
        columns.put(a.out + at + columns.first, x);
      }
    });
  }
}

template <class T>
static const ReduceLoops<T> kReduceLoops = {reduce<Sum, T>, reduce<Extreme, T>, reduce<Product, T>};
template <class T>
static const ReduceBackwardLoops<T> kReduceBackwardLoops = {reduce_backward<ExtremeShares, T>,
                                                            reduce_backward<ProductShares, T>};
