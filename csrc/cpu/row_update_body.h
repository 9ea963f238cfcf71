// Body of row_update.cpp for one instruction set: see isa_foreach.h. No include guard, no includes.

// n elements of weight, states and grad, all in the accumulator's type. That no two are the same memory is only known
// of arguments.
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

template <class Rule, class A>
static void update_row(const void* rule, A* weight, A* const* state, const A* grad, int64_t n) {
  const Rule copy = *static_cast<const Rule*>(rule);
  update_elements(copy, weight, state[0], state[1], state[2], grad, n);
}

// A row of a half type, by tiles in the accumulator's type. One function for every rule: the conversions are longer.
template <class T>
static void update_half_row(const RowUpdate<T>& update, const RowOf<T>& row, const T* grad, int64_t dim) {
  constexpr int64_t kTile = 64;
  float weight_tile[kTile], grad_tile[kTile], state_tile[kMostStates][kTile];
  float* const states[kMostStates] = {state_tile[0], state_tile[1], state_tile[2]};
  for (int64_t begin = 0; begin < dim; begin += kTile) {
    const int64_t width = begin + kTile < dim ? kTile : dim - begin;
    for (int64_t k = 0; k < width; ++k) weight_tile[k] = static_cast<float>(row.weight[begin + k]);
    for (int64_t k = 0; k < width; ++k) grad_tile[k] = static_cast<float>(grad[begin + k]);
    for (int s = 0; s < update.states; ++s) {
      for (int64_t k = 0; k < width; ++k) state_tile[s][k] = static_cast<float>(row.state[s][begin + k]);
    }
    update.elements(update.rule, weight_tile, states, grad_tile, width);
    for (int64_t k = 0; k < width; ++k) row.weight[begin + k] = static_cast<T>(weight_tile[k]);
    for (int s = 0; s < update.states; ++s) {
      for (int64_t k = 0; k < width; ++k) row.state[s][begin + k] = static_cast<T>(state_tile[s][k]);
    }
  }
}
