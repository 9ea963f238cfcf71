// Body of row_update.cpp for one instruction set: see isa_foreach.h. No include guard, no includes.

// n elements of weight, states and grad, all in the accumulator's type.
template <class Rule, class A>
static inline __attribute__((always_inline)) void update_elements(const Rule& rule, A* __restrict weight,
                                                                  A* __restrict state0, A* __restrict state1,
                                                                  A* __restrict state2, const A* __restrict grad,
                                                                  int64_t n) {
  for (int64_t d = 0; d < n; ++d) {
    A value = weight[d];
    A state[kMostStates];
    if constexpr (Rule::kStates > 0) state[0] = state0[d];
    if constexpr (Rule::kStates > 1) state[1] = state1[d];
    if constexpr (Rule::kStates > 2) state[2] = state2[d];
    rule(value, state, grad[d]);
    weight[d] = value;
    if constexpr (Rule::kStates > 0) state0[d] = state[0];
    if constexpr (Rule::kStates > 1) state1[d] = state[1];
    if constexpr (Rule::kStates > 2) state2[d] = state[2];
  }
}

// One item: a row of weight and of each state, and the item's row of grad.
template <class Rule, class T>
static void update_row(const Rule& given, const RowOf<T>& row, const T* grad, int64_t dim) {
  using A = acc_t<T>;
  const Rule rule = given;
  if constexpr (std::is_same_v<T, A>) {
    update_elements(rule, row.weight, row.state[0], row.state[1], row.state[2], grad, dim);
  } else {
    // Half types, by tiles in the accumulator's type.
    constexpr int64_t kTile = 64;
    A weight_tile[kTile], grad_tile[kTile], state_tile[kMostStates][kTile];
    for (int64_t begin = 0; begin < dim; begin += kTile) {
      const int64_t width = begin + kTile < dim ? kTile : dim - begin;
      for (int64_t k = 0; k < width; ++k) weight_tile[k] = static_cast<A>(row.weight[begin + k]);
      for (int64_t k = 0; k < width; ++k) grad_tile[k] = static_cast<A>(grad[begin + k]);
      for (int s = 0; s < Rule::kStates; ++s) {
        for (int64_t k = 0; k < width; ++k) state_tile[s][k] = static_cast<A>(row.state[s][begin + k]);
      }
      update_elements(rule, weight_tile, state_tile[0], state_tile[1], state_tile[2], grad_tile, width);
      for (int64_t k = 0; k < width; ++k) row.weight[begin + k] = static_cast<T>(weight_tile[k]);
      for (int s = 0; s < Rule::kStates; ++s) {
        for (int64_t k = 0; k < width; ++k) row.state[s][begin + k] = static_cast<T>(state_tile[s][k]);
      }
    }
  }
}
