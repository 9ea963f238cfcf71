// Body of row_stepper.cpp for one instruction set: see isa_foreach.h. No include guard, no includes.

// How the elements of a row learn what the row has missed.
enum class Lag {
  kNone,
  kLinear,
  kOneTerm,  // S from one term, by the element's own state
  kSums,     // S in an array
  kRowsOwn,  // S is the row's
};

template <class Rule>
static constexpr bool kIsAdam =
    !std::is_same_v<typename Rule::Map, LinearMap> && !std::is_same_v<typename Rule::Map, NoMap>;

// One element's idle steps. d: its place; s: of kRowsOwn.
template <Lag kLag, class Rule, class A>
static inline __attribute__((always_inline)) void catch_up_element(const Rule& rule, const IdleSteps<A>& idle,
                                                                   const A* __restrict sums, A s, int64_t d, A& weight,
                                                                   A* state) {
  if constexpr (kLag == Lag::kLinear) rule.catch_up(idle.linear, weight, state);
  if constexpr (kLag == Lag::kOneTerm) {
    rule.catch_up(idle.adam, idle.term.of(rule.root(state), rule.eps()), weight, state);
  }
  if constexpr (kLag == Lag::kSums) rule.catch_up(idle.adam, sums[d], weight, state);
  if constexpr (kLag == Lag::kRowsOwn) rule.catch_up(idle.adam, s, weight, state);
}

// Where one row and its gradient are.
template <class A>
struct RowPlace {
  A* weight;
  A* state[kMostOptimizerStates];
  const A* grad;  // null where there is no step
};

template <class Rule, class A>
static inline __attribute__((always_inline)) RowPlace<A> row_place(const RowBlock<A>& block, int64_t i) {
  RowPlace<A> place{};
  place.weight = block.weight + block.weight_rows[i] * block.weight_stride;
  for (int s = 0; s < Rule::kStates + Rule::kRowState; ++s) {
    place.state[s] = block.state[s] + block.rows[i] * block.state_stride[s];
  }
  if (block.grad != nullptr) place.grad = block.grad + i * block.dim;
  return place;
}

template <class Rule, class A>
static inline __attribute__((always_inline)) void fetch_place(const RowBlock<A>& block, int64_t i) {
  const int64_t later = i + block.ahead;
  if (later >= block.count) return;
  const RowPlace<A> place = row_place<Rule>(block, later);
  const int64_t bytes = block.dim * static_cast<int64_t>(sizeof(A));
  for (int64_t b = 0; b < bytes; b += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(place.weight) + b);
    for (int s = 0; s < Rule::kStates; ++s) __builtin_prefetch(reinterpret_cast<const char*>(place.state[s]) + b);
    if (place.grad != nullptr) __builtin_prefetch(reinterpret_cast<const char*>(place.grad) + b);
  }
  if (Rule::kRowState) __builtin_prefetch(place.state[Rule::kStates]);
}

// What a row's loop over elements needs beside the row.
template <class Rule, class A>
struct RowLoop {
  const Rule rule;
  const int64_t dim;
  const A scale;
  const AdamTerm<A>* const terms;
  A* const scratch;
};

// The idle steps of a row's elements and, with kSteps, then their step. Without kWritesStates only the weight is
// written. idle: null if kLag is kNone. of_row: what rule.row gave, or S of kRowsOwn.
template <Lag kLag, bool kSteps, bool kWritesStates, class Rule, class A>
static inline __attribute__((always_inline)) void move_elements(const RowLoop<Rule, A>& loop, const RowPlace<A>& row,
                                                                const IdleSteps<A>* missed, A of_row) {
  const Rule rule = loop.rule;
  IdleSteps<A> idle;
  if constexpr (kLag != Lag::kNone) idle = *missed;
  const A scale = loop.scale;
  const A* __restrict grad = row.grad;
  const A* __restrict sums = loop.scratch;
  A* __restrict weight = row.weight;
  A* __restrict state0 = row.state[0];
  A* __restrict state1 = row.state[1];
  A* __restrict state2 = row.state[2];
  for (int64_t d = 0; d < loop.dim; ++d) {
    A value = weight[d];
    A state[kMostOptimizerStates];
    if constexpr (Rule::kStates > 0) state[0] = state0[d];
    if constexpr (Rule::kStates > 1) state[1] = state1[d];
    if constexpr (Rule::kStates > 2) state[2] = state2[d];
    catch_up_element<kLag>(rule, idle, sums, of_row, d, value, state);
    if constexpr (kSteps) rule.step(value, state, scale * grad[d], of_row);
    weight[d] = value;
    if constexpr (kWritesStates && Rule::kStates > 0) state0[d] = state[0];
    if constexpr (kWritesStates && Rule::kStates > 1) state1[d] = state[1];
    if constexpr (kWritesStates && Rule::kStates > 2) state2[d] = state[2];
  }
}

// S of every element, from several terms.
template <class Rule, class A>
static __attribute__((noinline)) void sum_terms(const RowLoop<Rule, A>& loop, const A* squares,
                                                const IdleSteps<A>& idle) {
  constexpr int64_t kTile = 64;
  const A eps = loop.rule.eps();
  const AdamTerm<A>* terms = loop.terms + idle.first_term;
  for (int64_t begin = 0; begin < loop.dim; begin += kTile) {
    const int64_t width = begin + kTile < loop.dim ? kTile : loop.dim - begin;
    A root[kTile], sum[kTile] = {};
    for (int64_t k = 0; k < width; ++k) root[k] = std::sqrt(squares[begin + k]);
    for (int32_t t = 0; t < idle.terms; ++t) {
      const AdamTerm<A> term = terms[t];
      for (int64_t k = 0; k < width; ++k) sum[k] = term.d * sum[k] + term.of(root[k], eps);
    }
    for (int64_t k = 0; k < width; ++k) loop.scratch[begin + k] = sum[k];
  }
}

// S of a row whose second moment is one number.
template <class A>
static A sum_of_row(const IdleSteps<A>& idle, const AdamTerm<A>* terms, A square, A eps) {
  const A root = std::sqrt(square);
  if (idle.terms == 1) return idle.term.of(root, eps);
  A sum = 0;
  for (int32_t t = 0; t < idle.terms; ++t) {
    const AdamTerm<A> term = terms[idle.first_term + t];
    sum = term.d * sum + term.of(root, eps);
  }
  return sum;
}

// The idle steps of a row and, with kSteps, its step, where elements do not need one another.
template <bool kSteps, bool kWritesStates, class Rule, class A>
static inline __attribute__((always_inline)) void move_row(const RowLoop<Rule, A>& loop, const RowPlace<A>& row,
                                                           const IdleSteps<A>* idle) {
  if constexpr (std::is_same_v<typename Rule::Map, LinearMap>) {
    move_elements<Lag::kLinear, kSteps, kWritesStates>(loop, row, idle, A(0));
  } else if constexpr (Rule::kRowState) {
    static_assert(!kSteps);
    A* square = row.state[Rule::kStates];
    const A sum = sum_of_row(*idle, loop.terms, *square, loop.rule.eps());
    move_elements<Lag::kRowsOwn, kSteps, kWritesStates>(loop, row, idle, sum);
    if (kWritesStates) *square = idle->adam.second(*square);
  } else if (idle->terms == 1) {
    move_elements<Lag::kOneTerm, kSteps, kWritesStates>(loop, row, idle, A(0));
  } else {
    sum_terms(loop, row.state[Rule::kStates - 1], *idle);
    move_elements<Lag::kSums, kSteps, kWritesStates>(loop, row, idle, A(0));
  }
}

// n elements' parts of the (at most two) sums. What gather changes of the states is stored.
template <class Rule, class A>
static inline __attribute__((always_inline)) void gather_elements(const Rule& rule, const A* __restrict weight,
                                                                  A* __restrict state0, A* __restrict state1,
                                                                  const A* __restrict grad, A scale,
                                                                  A* __restrict parts0, A* __restrict parts1,
                                                                  int64_t n) {
  for (int64_t d = 0; d < n; ++d) {
    A state[kMostOptimizerStates], part[2] = {};
    if constexpr (Rule::kStates > 0) state[0] = state0[d];
    if constexpr (Rule::kStates > 1) state[1] = state1[d];
    rule.gather(weight[d], state, scale * grad[d], part);
    parts0[d] = part[0];
    if constexpr (Rule::kRowSums > 1) parts1[d] = part[1];
    if constexpr (Rule::kGatherWrites && Rule::kStates > 0) state0[d] = state[0];
    if constexpr (Rule::kGatherWrites && Rule::kStates > 1) state1[d] = state[1];
  }
}

// The sum of n numbers, always added in the same order: 64 bytes of partial sums, then a tree.
template <class A>
static inline __attribute__((always_inline)) A sum_of(const A* x, int64_t n) {
  constexpr int kLanes = 64 / sizeof(A);
  if (n == 1) return x[0];
  // The compiler's own vectors, of the machine's width: together always 64 bytes.
  constexpr int kBytes = TSR_ISA_LEVEL == 2 ? 64 : TSR_ISA_LEVEL == 1 ? 32 : 16;
  constexpr int kPieces = 64 / kBytes, kPieceLanes = kBytes / static_cast<int>(sizeof(A));
  typedef A Piece __attribute__((vector_size(kBytes)));
  typedef A Unaligned __attribute__((vector_size(kBytes), aligned(alignof(A)), may_alias));
  Piece sums[kPieces] = {};
  int64_t d = 0;
  for (; d + kLanes <= n; d += kLanes) {
    for (int p = 0; p < kPieces; ++p) sums[p] += *reinterpret_cast<const Unaligned*>(x + d + p * kPieceLanes);
  }
  A lanes[kLanes];
  for (int k = 0; k < kLanes; ++k) lanes[k] = sums[k / kPieceLanes][k % kPieceLanes];
  for (int k = 0; d < n; ++d, ++k) lanes[k] += x[d];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

template <class Rule, class A>
static inline __attribute__((always_inline)) void step_row(const RowLoop<Rule, A>& loop, const RowPlace<A>& row,
                                                           const IdleSteps<A>* idle) {
  constexpr bool kIdles = !std::is_same_v<typename Rule::Map, NoMap>;
  if constexpr (Rule::kRowSums > 0) {
    if constexpr (kIdles) {
      if (idle != nullptr) move_row<false, true>(loop, row, idle);
    }
    const Rule rule = loop.rule;
    gather_elements(rule, row.weight, row.state[0], row.state[1], row.grad, loop.scale, loop.scratch,
                    loop.scratch + loop.dim, loop.dim);
    A sums[Rule::kRowSums];
    for (int s = 0; s < Rule::kRowSums; ++s) sums[s] = sum_of(loop.scratch + s * loop.dim, loop.dim);
    const A of_row = rule.row(sums, loop.dim, row.state[Rule::kStates]);
    move_elements<Lag::kNone, true, !Rule::kGatherWrites>(loop, row, idle, of_row);
  } else {
    if constexpr (kIdles) {
      if (idle != nullptr) return move_row<true, true>(loop, row, idle);
    }
    move_elements<Lag::kNone, true, true>(loop, row, idle, A(0));
  }
}

// Most rows say no at their first element.
template <class A>
static inline bool is_zero(const A* grad, A scale, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) {
    if (!(scale * grad[d] == A(0))) return false;
  }
  return true;
}

template <class Rule, class A>
static RowLoop<Rule, A> row_loop(const void* rule, const RowBlock<A>& block) {
  return {*static_cast<const Rule*>(rule), block.dim, block.scale, block.terms, block.scratch};
}

template <class Rule, class A>
static void step_rows(const void* rule, const RowBlock<A>& given) {
  const RowBlock<A> block = given;  // a copy, so that the stores cannot alias it
  const RowLoop<Rule, A> loop = row_loop<Rule>(rule, block);
  for (int64_t i = 0; i < block.count; ++i) {
    fetch_place<Rule>(block, i);
    const RowPlace<A> row = row_place<Rule>(block, i);
    if (block.skips_zeros && is_zero(row.grad, block.scale, block.dim)) continue;
    step_row(loop, row, block.idle != nullptr ? block.idle[i] : nullptr);
  }
}

template <bool kWritesStates, class Rule, class A>
static void move_rows(const void* rule, const RowBlock<A>& given) {
  const RowBlock<A> block = given;
  const RowLoop<Rule, A> loop = row_loop<Rule>(rule, block);
  for (int64_t i = 0; i < block.count; ++i) {
    fetch_place<Rule>(block, i);
    if (block.idle[i] == nullptr) continue;
    move_row<false, kWritesStates>(loop, row_place<Rule>(block, i), block.idle[i]);
  }
}

template <class Rule, class A>
static OptimizerLoops<A> optimizer_loops() {
  constexpr bool kByElement = Rule::kRowSums == 0 && !Rule::kRowState;
  if constexpr (std::is_same_v<typename Rule::Map, NoMap>) {
    return {step_rows<Rule, A>, kByElement, nullptr, nullptr};
  } else {
    return {step_rows<Rule, A>, kByElement, move_rows<true, Rule, A>, move_rows<false, Rule, A>};
  }
}

// ---- Conversions ----------------------------------------------------------------------------------------------------

template <class T>
static void widen(const T* from, acc_t<T>* to, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<acc_t<T>>(from[d]);
}

template <class T>
static void narrow(const acc_t<T>* from, T* to, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(from[d]);
}

template <class T>
static void narrow_by_chance(const acc_t<T>* from, T* to, int64_t dim, const RowBits& given) {
  const RowBits bits = given;
  for (int64_t d = 0; d < dim; ++d) {
    if constexpr (std::is_same_v<T, acc_t<T>>) {
      to[d] = from[d];
    } else {
      to[d] = static_cast<T>(rounded_by<T>(from[d], bits.of(static_cast<uint32_t>(d))));
    }
  }
}

template <class T>
static const RowConversions<T> kRowConversions = {widen<T>, narrow<T>, narrow_by_chance<T>};
