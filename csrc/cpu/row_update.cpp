// Optimizer steps on rows: one thread owns a row and takes its items in their order.
#include "../row_update.h"

#include <type_traits>

#include "gradient.h"
#include "level.h"
#include "row_groups.h"
#include "row_loops.h"

namespace tsr {
namespace {

// Where one row of weight and of each state is; null for states that the rule does not have.
template <class T>
struct RowOf {
  T* weight;
  T* state[kMostStates];
};

// What a call does to a row, without the rule's type: only the loop over elements is compiled for each rule.
template <class T>
struct RowUpdate {
  const void* rule;
  int states;
  void (*elements)(const void* rule, acc_t<T>* weight, acc_t<T>* const* state, const acc_t<T>* grad, int64_t n);
};

#define TSR_ISA_BODY "row_update_body.h"
#include "isa_foreach.h"

// Weight and states, and the gradients of the items.
template <class T>
struct RowTables {
  RowOf<T> first;
  int64_t weight_stride = 0;
  int64_t state_stride[kMostStates] = {};
  const T* grad = nullptr;
  int64_t dim = 0;

  RowTables(const Tensor& weight, const RowStates& states, const Tensor& grads)
      : first{weight.mutable_data_ptr<T>(), {}},
        weight_stride(row_stride(weight)),
        grad(grads.const_data_ptr<T>()),
        dim(row_elements(weight)) {
    for (size_t k = 0; k < states.size() && states[k]; ++k) {
      first.state[k] = states[k]->mutable_data_ptr<T>();
      state_stride[k] = row_stride(*states[k]);
    }
  }

  RowOf<T> row(int64_t v) const {
    RowOf<T> result = first;
    result.weight += v * weight_stride;
    for (int k = 0; k < kMostStates; ++k) {
      if (result.state[k] != nullptr) result.state[k] += v * state_stride[k];
    }
    return result;
  }
};

// One item: a row of weight and of each state, and the item's row of grad.
template <class T>
void update_row(const RowUpdate<T>& update, const RowOf<T>& row, const T* grad, int64_t dim) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    update.elements(update.rule, row.weight, row.state, grad, dim);
  } else {
    static const auto update_half_row = pick_level<void (*)(const RowUpdate<T>&, const RowOf<T>&, const T*, int64_t)>(
        &baseline::update_half_row<T>, &avx2::update_half_row<T>, &avx512::update_half_row<T>);
    update_half_row(update, row, grad, dim);
  }
}

// Items [begin, end) in their order; row_of(e) and item_of(e) say which row and which row of grad.
template <class T, class RowAt, class ItemAt>
void update_items(const RowUpdate<T>& update, const RowTables<T>& tables, int64_t begin, int64_t end,
                  const RowAt& row_of, const ItemAt& item_of) {
  const int64_t dim = tables.dim;
  const int64_t ahead = rows_ahead((2 + update.states) * dim * static_cast<int64_t>(sizeof(T)));
  for (int64_t e = begin; e < end; ++e) {
    if (e + ahead < end) {
      const RowOf<T> later = tables.row(row_of(e + ahead));
      fetch_row(later.weight, dim);
      for (int k = 0; k < update.states; ++k) fetch_row(later.state[k], dim);
      fetch_row(tables.grad + item_of(e + ahead) * dim, dim);
    }
    update_row(update, tables.row(row_of(e)), tables.grad + item_of(e) * dim, dim);
  }
}

// Updates rows by one thread, in the order given.
template <class T>
void update_in_order(const char* op, const RowUpdate<T>& update, const RowTables<T>& tables, const Tensor& indices,
                     int64_t num_rows) {
  const int64_t n = indices.size(0);
  dispatch_index(indices.scalar_type(), op, "indices", [&](auto tag) {
    using I = typename decltype(tag)::type;
    const I* rows = indices.const_data_ptr<I>();
    FirstPosition first_bad;
    report_bad_ids(rows, 0, n, num_rows, first_bad);
    if (first_bad.found()) throw_bad_index(op, "indices", indices, first_bad.position(), num_rows);
    update_items(
        update, tables, 0, n, [rows](int64_t e) { return static_cast<int64_t>(rows[e]); }, [](int64_t e) { return e; });
  });
}

// Updates rows by several threads, each row's items by one of them.
template <class T>
void update_by_row(const char* op, const RowUpdate<T>& update, const RowTables<T>& tables, const Tensor& indices,
                   int64_t num_rows) {
  dispatch_width(fits_32_bits(num_rows, indices.size(0), 0), [&](auto tag) {
    using U = typename decltype(tag)::type;
    const RowGroups<U> groups(op, indices, nullptr, num_rows, /*padding=*/-1, tables.dim, GradientRows::kPresent);
    const Item<U>* items = groups.items();
    const std::vector<Slice>& slices = groups.slices();
    parallel_dynamic(static_cast<int64_t>(slices.size()), groups.workers(), [&, items](int64_t, int64_t task) {
      const Slice& slice = slices[static_cast<size_t>(task)];
      update_items(
          update, tables, slice.begin, slice.end, [items](int64_t e) { return static_cast<int64_t>(items[e].row); },
          [items](int64_t e) { return static_cast<int64_t>(items[e].payload); });
    });
  });
}

}  // namespace

void row_update_cpu(const Tensor& weight, const std::optional<Tensor>& state0, const std::optional<Tensor>& state1,
                    const std::optional<Tensor>& state2, const Tensor& grad, const Tensor& indices, int64_t rule_value,
                    const std::vector<double>& hyperparameters) {
  const RowStates states{state0, state1, state2};
  const RowRule rule = check_row_update(weight, states, grad, indices, rule_value, hyperparameters);
  const char* op = words_of(rule).op;
  const Tensor grads = as_contiguous(grad), ids = as_contiguous(indices);
  dispatch_float(weight.scalar_type(), op, "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const RowTables<T> tables(weight, states, grads);
    dispatch_rule<A>(rule, hyperparameters, [&](const auto& policy) {
      using Rule = std::decay_t<decltype(policy)>;
      const RowUpdate<T> update{
          &policy, Rule::kStates,
          pick_level(&baseline::update_row<Rule, A>, &avx2::update_row<Rule, A>, &avx512::update_row<Rule, A>)};
      if (workers_for(ids.size(0) * tables.dim) == 1) {
        update_in_order(op, update, tables, ids, weight.size(0));
      } else {
        update_by_row(op, update, tables, ids, weight.size(0));
      }
    });
  });
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) { TSR_IMPL(m, "row_update", &tsr::row_update_cpu); }
