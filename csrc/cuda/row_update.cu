#include "../cuda.h"
#include "../row_update.h"
#include "device.cuh"
#include "row_groups.cuh"

namespace tsr {
namespace {

// Items whose gradients are asked for before the first of them is used: a row's items wait for one another, and reading
// takes longer than computing.
constexpr int kItemsAhead = 4;

template <class T>
struct RowTables {
  T* weight;
  T* state[kMostStates];  // null for states that the rule does not have
  int64_t weight_stride;
  int64_t state_stride[kMostStates];
  const T* grad;  // [entries, columns]
  int64_t columns;
};

// What a lane holds of a row between its items, in the type of the memory: rounded after every item.
template <class T, int width, int states>
struct LaneRow {
  Vector<T, width> weight;
  Vector<T, width> state[states > 0 ? states : 1];
};

template <class Rule, class T, int width>
__device__ void update_lane(const Rule& rule, LaneRow<T, width, Rule::kStates>& row, const Vector<T, width>& grad) {
  using A = acc_t<T>;
#pragma unroll
  for (int c = 0; c < width; ++c) {
    A weight = static_cast<A>(row.weight.at[c]);
    A state[kMostStates];
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) state[s] = static_cast<A>(row.state[s].at[c]);
    rule(weight, state, static_cast<A>(grad.at[c]));
    row.weight.at[c] = static_cast<T>(weight);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) row.state[s].at[c] = static_cast<T>(state[s]);
  }
}

// A team owns the row of the sorted entry where its items begin, and takes them in their order; the teams of a row's
// other entries have nothing to do.
template <class Rule, class T, int width>
__global__ void row_update_kernel(Rule rule, RowTables<T> tables, SortedPairs pairs, int64_t entries, int64_t rows,
                                  RowTiling tiling) {
  for (int64_t t = tiling.first(); t < tiling.tiles; t += tiling.stride()) {
    const RowTile tile = tiling.at(t);
    const int64_t key = pairs.key(tile.row);
    const bool begins = tile.row == 0 || pairs.key(tile.row - 1) != key;
    if (!begins || key >= rows || tile.column >= tables.columns) continue;
    T* const weight = tables.weight + key * tables.weight_stride + tile.column;
    LaneRow<T, width, Rule::kStates> row;
    row.weight = load_vector<T, width>(weight);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      row.state[s] = load_vector<T, width>(tables.state[s] + key * tables.state_stride[s] + tile.column);
    }
    for (int64_t j = tile.row; j < entries && pairs.key(j) == key; j += kItemsAhead) {
      Vector<T, width> grads[kItemsAhead];
      bool present[kItemsAhead];
#pragma unroll
      for (int k = 0; k < kItemsAhead; ++k) {
        present[k] = j + k < entries && pairs.key(j + k) == key;
        if (!present[k]) continue;
        grads[k] = load_vector<T, width>(tables.grad + pairs.value(j + k) * tables.columns + tile.column);
      }
#pragma unroll
      for (int k = 0; k < kItemsAhead; ++k) {
        if (present[k]) update_lane<Rule, T, width>(rule, row, grads[k]);
      }
    }
    store_vector<T, width>(weight, row.weight);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      store_vector<T, width>(tables.state[s] + key * tables.state_stride[s] + tile.column, row.state[s]);
    }
  }
}

template <class T>
RowTables<T> row_tables(const Tensor& weight, const RowStates& states, const T* grad) {
  RowTables<T> tables{static_cast<T*>(weight.data_ptr()), {}, row_stride(weight), {}, grad, row_elements(weight)};
  for (size_t s = 0; s < states.size() && states[s]; ++s) {
    tables.state[s] = static_cast<T*>(states[s]->data_ptr());
    tables.state_stride[s] = row_stride(*states[s]);
  }
  return tables;
}

// Elements of T that one load moves, where every row of every table begins at such an address.
template <class T>
int row_vector_width(const RowTables<T>& tables) {
  int width =
      vector_width<T>(tables.columns, {tables.weight, tables.grad, tables.state[0], tables.state[1], tables.state[2]});
  bool aligned = tables.weight_stride % width == 0;
  for (int64_t stride : tables.state_stride) aligned = aligned && stride % width == 0;
  return aligned ? width : 1;
}

template <class Rule, class T, int width>
void launch_row_update(DeviceCall& call, const Rule& rule, const RowTables<T>& tables, const RowGroups& groups) {
  const RowTiling tiling(groups.entries, tables.columns, width);
  launch(call, tiling.shape(), row_update_kernel<Rule, T, width>, rule, tables, groups.sorted(), groups.entries,
         groups.rows, tiling);
}

void row_update_cuda(const Tensor& weight, const std::optional<Tensor>& state0, const std::optional<Tensor>& state1,
                     const std::optional<Tensor>& state2, const Tensor& grad, const Tensor& indices, int64_t rule_value,
                     const std::vector<double>& hyperparameters) {
  const RowStates states{state0, state1, state2};
  const RowRule rule = check_row_update(weight, states, grad, indices, rule_value, hyperparameters);
  DeviceCall call(words_of(rule).op, weight);
  const Indices ids{indices.scalar_type(), call.data(indices), indices.size(0), weight.size(0)};
  const RowGroups groups = group_by_row(call, ids, ids.entries, EntryItself());
  dispatch_float(weight.scalar_type(), call.op(), "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const RowTables<T> tables = row_tables<T>(weight, states, call.data<T>(grad));
    dispatch_rule<acc_t<T>>(rule, hyperparameters, [&](const auto& policy) {
      using Rule = std::decay_t<decltype(policy)>;
      constexpr int wide = 16 / sizeof(T);
      if (row_vector_width(tables) == wide) {
        launch_row_update<Rule, T, wide>(call, policy, tables, groups);
      } else {
        launch_row_update<Rule, T, 1>(call, policy, tables, groups);
      }
    });
  });
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) { TSR_IMPL(m, "row_update", &tsr::row_update_cuda); }
