// What kernels know of an optimizer's call and of its tables, and how lanes move the columns of a row: the first half
// of row_optimizer.cuh.
#pragma once
#include "../cuda.h"
#include "../row_optimizer.h"
#include "../stochastic_rounding.h"
#include "device.cuh"
#include "table_shards.cuh"

namespace tsr {

// ---- The rule -------------------------------------------------------------------------------------------------------

enum class IdleKind : int32_t { kNone, kLinear, kAdam, kAmsgrad };

// Of an optimizer or of one of its rules.
template <class Rule>
constexpr IdleKind idle_kind() {
  using Map = typename Rule::Map;
  if (std::is_same_v<Map, LinearMap>) return IdleKind::kLinear;
  if (std::is_same_v<Map, AdamMap<true>>) return IdleKind::kAdam;
  return std::is_same_v<Map, AdamMap<false>> ? IdleKind::kAmsgrad : IdleKind::kNone;
}
TSR_HOST_DEVICE constexpr bool is_adam(IdleKind kind) { return kind == IdleKind::kAdam || kind == IdleKind::kAmsgrad; }

template <class... Lists>
struct JoinedRules;
template <class... First, class... Second, class... Lists>
struct JoinedRules<RuleList<First...>, RuleList<Second...>, Lists...>
    : JoinedRules<RuleList<First..., Second...>, Lists...> {};
template <class List>
struct JoinedRules<List> {
  using type = List;
};

// The rules of all optimizers whose idle rows move in one of these ways. A kernel is compiled for one such list: rules
// of one list need much the same of a kernel, and registers for the most demanding of them.
template <class Optimizer, IdleKind... kinds>
constexpr bool kIsOneOf = ((idle_kind<Optimizer>() == kinds) || ...);
template <class A, class Optimizers, IdleKind... kinds>
struct RulesThat;
template <class A, class... Optimizers, IdleKind... kinds>
struct RulesThat<A, std::variant<Optimizers...>, kinds...>
    : JoinedRules<RuleList<>, std::conditional_t<kIsOneOf<Optimizers, kinds...>, typename Optimizers::template Rules<A>,
                                                 RuleList<>>...> {};
template <class A>
using StillRules = typename RulesThat<A, OptimizerRule, IdleKind::kNone>::type;
template <class A>
using LinearRules = typename RulesThat<A, OptimizerRule, IdleKind::kLinear>::type;
template <class A>
using AdamRules = typename RulesThat<A, OptimizerRule, IdleKind::kAdam, IdleKind::kAmsgrad>::type;

// The rule's place in its list; -1: it is not there.
template <class Rule, class... Rules>
constexpr int32_t index_of(RuleList<Rules...>) {
  int32_t index = 0, found = -1;
  ((std::is_same_v<Rule, Rules> ? (found = index++) : index++), ...);
  return found;
}

// What of a kernel the rules of a list make use of.
template <class Rules>
struct RuleNeeds;
template <class... Rules>
struct RuleNeeds<RuleList<Rules...>> {
  static constexpr bool kLinear = ((idle_kind<Rules>() == IdleKind::kLinear) || ...);
  static constexpr bool kAdam = (is_adam(idle_kind<Rules>()) || ...);
  static constexpr bool kRowState = (Rules::kRowState || ...);
  static constexpr bool kRowSums = ((Rules::kRowSums > 0) || ...);
  static constexpr int kStates = std::max({Rules::kStates...});
};

// What a call's kernels hold beside the tables. Large: they take it as a __grid_constant__.
template <class A>
struct OptimizerCall {
  int32_t rule = -1;   // its place in its list
  int32_t states = 0;  // with one value per element
  int32_t row_sums = 0;
  IdleKind idle = IdleKind::kNone;
  ScalarType weight_dtype{};
  bool rounds_by_chance = false;
  bool skips_zeros = false;       // among named rows of tables that are not flushed
  A eps = 0;                      // of Adam's family
  A sign = 1;                     // of gradients
  const A* grad_scale = nullptr;  // one of the two, or none
  const float* float_scale = nullptr;
  const void* history = nullptr;
  int64_t now = 0;                             // rows are flushed through this step, counted from the base
  int64_t done = 0;                            // what last_step becomes
  int64_t step = 0;                            // the step's own number
  bool has_rule_of_zeros = false;              // a rule of its own for rows whose gradient is zero
  alignas(16) unsigned char scalars[96] = {};  // the rule
  alignas(16) unsigned char scalars_of_zeros[96] = {};

  __device__ A scale() const {
    const A factor = grad_scale != nullptr ? *grad_scale : float_scale != nullptr ? static_cast<A>(*float_scale) : A(1);
    return sign * factor;
  }
};

// Calls f with the call's rule; of_zeros: with that of rows whose gradient is zero.
template <class A, class F, class... Rules>
__device__ __forceinline__ void with_rule(const OptimizerCall<A>& call, RuleList<Rules...>, const F& f,
                                          bool of_zeros = false) {
  int32_t index = 0;
  const unsigned char* const scalars = of_zeros ? call.scalars_of_zeros : call.scalars;
  ((call.rule == index++ ? f(*reinterpret_cast<const Rules*>(scalars)) : void()), ...);
}

// ---- Tables ---------------------------------------------------------------------------------------------------------

// In words of 8 bytes: they are uploaded as such.
struct OptimizerTable {
  void* weight;
  void* states[kMostOptimizerStates];  // of one value per element
  void* row_state;                     // of one value per row; null: none
  int32_t* last_step;                  // null: the table is up to date
  int64_t weight_stride;
  int64_t state_strides[kMostOptimizerStates];
  int64_t row_state_stride;
  int64_t rows;
  int64_t columns;
  int64_t seed;
  int32_t lanes_log2;  // lanes of a team that takes kLaneColumns at a time
  int32_t vector;      // columns that every row allows to move at a time, with 16 bytes to a load

  // Whether a lane's columns are moved so.
  template <int width>
  __device__ bool is_aligned() const {
    return width <= vector;
  }
};

// Columns that a lane takes at a time.
template <class A>
constexpr int kLaneColumns = 16 / sizeof(A);

// The neighbouring lanes of a warp that have a row in common: a power of two.
class RowTeam {
 public:
  __device__ explicit RowTeam(int lanes_log2) : lanes_log2_(lanes_log2) {}
  __device__ int lanes() const { return 1 << lanes_log2_; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) & (lanes() - 1); }
  __device__ int64_t in_block() const { return threadIdx.x >> lanes_log2_; }
  __device__ unsigned mask() const {
    const unsigned ones = lanes_log2_ == 5 ? ~0u : (1u << lanes()) - 1;
    return ones << (threadIdx.x % kWarp & ~(static_cast<unsigned>(lanes()) - 1));
  }
  __device__ void wait() const { __syncwarp(mask()); }

  __device__ bool any(bool value) const { return __any_sync(mask(), value) != 0; }

  // The sum over the lanes, in a fixed tree; every lane has it.
  template <class A>
  __device__ A sum(A value) const {
    for (int step = lanes() / 2; step > 0; step /= 2) value += __shfl_xor_sync(mask(), value, step);
    return value;
  }

 private:
  int lanes_log2_;
};

// ---- Columns of a row -----------------------------------------------------------------------------------------------

// What a lane holds of a row: `width` neighbouring columns.
template <class A, int width>
struct RowColumns {
  A weight[width] = {};
  A state[width][kMostOptimizerStates] = {};
  A sums[width] = {};  // S of Adam's family, where it has parts
};

// Whether a step leaves named rows of the table alone whose gradient is zero.
template <class A>
__device__ __forceinline__ bool skips_zeros(const OptimizerCall<A>& call, const OptimizerTable& table) {
  return call.skips_zeros && table.last_step == nullptr;
}

// Whether what the team's lanes have of a gradient is zero, each in `count` columns.
template <class A, int width>
__device__ __forceinline__ bool are_zeros(const RowTeam& team, const A (&grad)[width], int64_t count) {
  bool found = false;
#pragma unroll
  for (int c = 0; c < width; ++c) found |= c < count && !(grad[c] == A(0));
  return !team.any(found);
}

// f(c, from[c]) for c below count and width.
template <int width, class T, class F>
__device__ __forceinline__ void load_each(const T* from, int64_t count, bool aligned, const F& f) {
  constexpr int part = std::min<int>(width, 16 / sizeof(T));
  if (aligned && count >= width) {
#pragma unroll
    for (int first = 0; first < width; first += part) {
      const Vector<T, part> loaded = load_vector<T, part>(from + first);
#pragma unroll
      for (int c = 0; c < part; ++c) f(first + c, loaded.at[c]);
    }
  } else {
#pragma unroll
    for (int c = 0; c < width; ++c) {
      if (c < count) f(c, from[c]);
    }
  }
}

// to[c] = f(c) for c below count and width.
template <int width, class T, class F>
__device__ __forceinline__ void store_each(T* to, int64_t count, bool aligned, const F& f) {
  constexpr int part = std::min<int>(width, 16 / sizeof(T));
  if (aligned && count >= width) {
#pragma unroll
    for (int first = 0; first < width; first += part) {
      Vector<T, part> stored;
#pragma unroll
      for (int c = 0; c < part; ++c) stored.at[c] = f(first + c);
      store_vector<T, part>(to + first, stored);
    }
  } else {
#pragma unroll
    for (int c = 0; c < width; ++c) {
      if (c < count) to[c] = f(c);
    }
  }
}

// Calls f with a null pointer of the type that weights of this dtype, and maybe gradients, have.
template <class A, class F>
__device__ __forceinline__ void with_weight_type(ScalarType dtype, const F& f) {
  if constexpr (std::is_same_v<A, float>) {
    if (dtype == ScalarType::Half) return f(static_cast<Half*>(nullptr));
    if (dtype == ScalarType::BFloat16) return f(static_cast<BFloat16*>(nullptr));
  }
  f(static_cast<A*>(nullptr));
}

// to[c] = x[at + c] for c below count and width.
template <int width, class A>
__device__ __forceinline__ void load_as(ScalarType dtype, const void* x, int64_t at, int64_t count, bool aligned,
                                        A* to) {
  with_weight_type<A>(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    load_each<width>(static_cast<const T*>(x) + at, count, aligned, [&](int c, T x_c) { to[c] = static_cast<A>(x_c); });
  });
}

// Asks for what the asking lane's team reads first when it steps a row, without waiting for it.
template <class A>
__device__ __forceinline__ void prefetch_row(const OptimizerCall<A>& call, const OptimizerTable& table, int64_t row) {
  const RowTeam team(table.lanes_log2);
  if (table.last_step != nullptr) prefetch(table.last_step + row);
  const int64_t column = team.lane() * kLaneColumns<A>;
  if (column >= table.columns) return;
  with_weight_type<A>(call.weight_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    prefetch(static_cast<const T*>(table.weight) + row * table.weight_stride + column);
  });
  for (int s = 0; s < call.states; ++s) {
    prefetch(static_cast<const A*>(table.states[s]) + row * table.state_strides[s] + column);
  }
}

// ---- On the host ----------------------------------------------------------------------------------------------------

struct OptimizerArguments {
  const OptimizerRule& rule;
  int64_t step, base;
  int64_t now;  // the step through which rows are flushed: step - 1 before a step
  ScalarType weight_dtype;
  const std::optional<Tensor>& history;
  const std::optional<Tensor>& grad_scale;
  bool maximize;
  bool rounds_by_chance;
};

// Everything must have been checked.
template <class A>
OptimizerCall<A> optimizer_call(DeviceCall& call, const OptimizerArguments& arguments);

// Calls f with the list that has the call's rule.
template <class A, class F>
void with_rules(const OptimizerCall<A>& call, const F& f) {
  switch (call.idle) {
    case IdleKind::kNone:
      return f(StillRules<A>());
    case IdleKind::kLinear:
      return f(LinearRules<A>());
    default:
      return f(AdamRules<A>());
  }
}

// Calls f with the list that has the call's rule, for rules whose idle rows move.
template <class A, class F>
void with_idle_rules(const OptimizerCall<A>& call, const F& f) {
  call.idle == IdleKind::kLinear ? f(LinearRules<A>()) : f(AdamRules<A>());
}

// states: this table's; last_step null: it is up to date.
OptimizerTable optimizer_table(const OptimizerArguments& arguments, const Tensor& weight, const Tensor* states,
                               const Tensor* last_step, int64_t seed);

// The tables that are stepped together: states and last_steps table after table.
inline std::vector<OptimizerTable> optimizer_tables(const OptimizerArguments& arguments,
                                                    const std::vector<Tensor>& weights,
                                                    const std::vector<Tensor>& states,
                                                    const std::vector<Tensor>& last_steps,
                                                    const std::vector<int64_t>& seeds) {
  std::vector<OptimizerTable> tables;
  const size_t per_table = states.size() / std::max<size_t>(weights.size(), 1);
  for (size_t k = 0; k < weights.size(); ++k) {
    tables.push_back(optimizer_table(arguments, weights[k], states.data() + k * per_table,
                                     last_steps.empty() ? nullptr : &last_steps[k], seeds.empty() ? 0 : seeds[k]));
  }
  return tables;
}

}  // namespace tsr
