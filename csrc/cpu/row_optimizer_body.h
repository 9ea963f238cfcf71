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

// The idle steps of a row's elements and, with kSteps, then their step. Without kStates only the weight is written.
template <Lag kLag, bool kSteps, bool kWritesStates, class Rule, class A>
static inline __attribute__((always_inline)) void move_elements(const Rule& rule, const IdleSteps<A>& idle,
                                                                A* __restrict weight, A* __restrict state0,
                                                                A* __restrict state1, A* __restrict state2,
                                                                const A* __restrict grad, const A* __restrict sums,
                                                                A scale, A of_row, int64_t n) {
  for (int64_t d = 0; d < n; ++d) {
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

template <Lag kLag, bool kSteps, bool kWritesStates, class Rule, class A>
static inline __attribute__((always_inline)) void move_row(const Rule& given, const RowArguments<A>& row, A of_row) {
  // Copies, which stores cannot change.
  const Rule rule = given;
  IdleSteps<A> idle;
  if constexpr (kLag != Lag::kNone) idle = *row.idle;
  move_elements<kLag, kSteps, kWritesStates>(rule, idle, row.weight, row.state[0], row.state[1], row.state[2], row.grad,
                                             row.sums, row.scale, of_row, row.dim);
}

// S of every element, from several terms.
template <class Rule, class A>
static void sum_terms(const Rule& given, const RowArguments<A>& row) {
  constexpr int64_t kTile = 64;
  const Rule rule = given;
  const AdamTerm<A>* terms = row.terms + row.idle->first_term;
  const int32_t count = row.idle->terms;
  for (int64_t begin = 0; begin < row.dim; begin += kTile) {
    const int64_t width = begin + kTile < row.dim ? kTile : row.dim - begin;
    A root[kTile], sum[kTile] = {};
    const A* squares = row.state[Rule::kStates - 1] + begin;
    for (int64_t k = 0; k < width; ++k) root[k] = std::sqrt(squares[k]);
    for (int32_t t = 0; t < count; ++t) {
      const AdamTerm<A> term = terms[t];
      for (int64_t k = 0; k < width; ++k) sum[k] = term.d * sum[k] + term.of(root[k], rule.eps());
    }
    for (int64_t k = 0; k < width; ++k) row.sums[begin + k] = sum[k];
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
static void move(const Rule& rule, const RowArguments<A>& row) {
  if constexpr (std::is_same_v<typename Rule::Map, LinearMap>) {
    move_row<Lag::kLinear, kSteps, kWritesStates>(rule, row, A(0));
  } else if constexpr (Rule::kRowState) {
    static_assert(!kSteps);
    A* square = row.state[Rule::kStates];
    move_row<Lag::kRowsOwn, kSteps, kWritesStates>(rule, row, sum_of_row(*row.idle, row.terms, *square, rule.eps()));
    if (kWritesStates) *square *= row.idle->adam.p2;
  } else if (row.idle->terms == 1) {
    move_row<Lag::kOneTerm, kSteps, kWritesStates>(rule, row, A(0));
  } else {
    sum_terms(rule, row);
    move_row<Lag::kSums, kSteps, kWritesStates>(rule, row, A(0));
  }
}

// One element's part of the sums; what gather changes of the states is stored.
template <class Rule, class A>
static inline __attribute__((always_inline)) void gather_element(const Rule& rule, const RowArguments<A>& row,
                                                                 int64_t d, A* sums) {
  A state[kMostOptimizerStates];
  for (int s = 0; s < Rule::kStates; ++s) state[s] = row.state[s][d];
  rule.gather(row.weight[d], state, row.scale * row.grad[d], sums);
  if constexpr (Rule::kGatherWrites) {
    for (int s = 0; s < Rule::kStates; ++s) row.state[s][d] = state[s];
  }
}

// The sums that a step needs first, always added in the same order: 64 bytes of partial sums, then a tree.
template <class Rule, class A>
static A gather_row(const Rule& given, const RowArguments<A>& given_row) {
  constexpr int kLanes = 64 / sizeof(A);
  constexpr int kSums = Rule::kRowSums;
  const Rule rule = given;
  const RowArguments<A> row = given_row;
  A lanes[kSums][kLanes] = {};
  int64_t d = 0;
  for (; d + kLanes <= row.dim; d += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      A part[kSums];
      for (int s = 0; s < kSums; ++s) part[s] = lanes[s][k];
      gather_element(rule, row, d + k, part);
      for (int s = 0; s < kSums; ++s) lanes[s][k] = part[s];
    }
  }
  for (int k = 0; d < row.dim; ++d, ++k) {
    A part[kSums];
    for (int s = 0; s < kSums; ++s) part[s] = lanes[s][k];
    gather_element(rule, row, d, part);
    for (int s = 0; s < kSums; ++s) lanes[s][k] = part[s];
  }
  A sums[kSums];
  for (int s = 0; s < kSums; ++s) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) lanes[s][k] += lanes[s][k + half];
    }
    sums[s] = lanes[s][0];
  }
  return rule.row(sums, row.dim, row.state[Rule::kStates]);
}

template <class Rule, class A>
static void step_row(const void* bytes, const RowArguments<A>& row) {
  const Rule& rule = *static_cast<const Rule*>(bytes);
  constexpr bool kIdles = !std::is_same_v<typename Rule::Map, NoMap>;
  if constexpr (Rule::kRowSums > 0) {
    if constexpr (kIdles) {
      if (row.idle != nullptr) move<false, true>(rule, row);
    }
    move_row<Lag::kNone, true, !Rule::kGatherWrites>(rule, row, gather_row(rule, row));
  } else {
    if constexpr (kIdles) {
      if (row.idle != nullptr) return move<true, true>(rule, row);
    }
    move_row<Lag::kNone, true, true>(rule, row, A(0));
  }
}

template <class Rule, class A>
static void catch_up_row(const void* rule, const RowArguments<A>& row) {
  move<false, true>(*static_cast<const Rule*>(rule), row);
}

template <class Rule, class A>
static void current_row(const void* rule, const RowArguments<A>& row) {
  move<false, false>(*static_cast<const Rule*>(rule), row);
}

template <class Rule, class A>
static OptimizerLoops<A> optimizer_loops() {
  if constexpr (std::is_same_v<typename Rule::Map, NoMap>) {
    return {step_row<Rule, A>, nullptr, nullptr};
  } else {
    return {step_row<Rule, A>, catch_up_row<Rule, A>, current_row<Rule, A>};
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
