// Lookups in tables with stale rows: each row is brought up to date in registers, and nothing of it is written.
#include "embedding_collection_current.cuh"
#include "embedding_collection_forward.cuh"

namespace tsr {
namespace {

template <class A>
struct CurrentInputs : PartInputs<A> {
  OptimizerCall<A> optimizer{};
};

// Results are of the dtype of the tables, in A until they are stored.
template <class A>
struct ResultView : PartView<A> {
  using Inputs = CurrentInputs<A>;
  // Of half types a lane owns half as many columns as in a lookup of stored rows.
  static constexpr int64_t kMergingThreads = kThreads * (sizeof(A) == sizeof(float) ? 2 : 1);

  const Inputs& inputs;

  __device__ ResultView(const Inputs& in, const Part& part, Offsets offsets)
      : PartView<A>(in, part, offsets), inputs(in) {}

  template <int width>
  __device__ void store_row(int64_t bag, const RowTile& tile, const Vector<A, width>& row) const {
    with_weight_type<A>(inputs.optimizer.weight_dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      T* const to = this->template results<T>() + bag * this->part.out_stride + tile.column;
      store_each<width>(to, this->columns - tile.column, this->part.out_aligned != 0,
                        [&](int c) { return static_cast<T>(row.at[c]); });
    });
  }
};

// A part's rows are an OptimizerTable's. They are rounded to its dtype before they are added up.
template <class A, class Rules>
struct CurrentView : ResultView<A> {
  using ResultView<A>::ResultView;

  template <int width>
  __device__ Vector<A, width> load_row(int64_t index, const RowTile& tile) const {
    const OptimizerCall<A>& optimizer = this->inputs.optimizer;
    const OptimizerTable& table = *static_cast<const OptimizerTable*>(this->part.rows);
    A now[width];
    TableRow<A, Rules>(optimizer, table, index).now(tile.column, now);
    Vector<A, width> row;
#pragma unroll
    for (int c = 0; c < width; ++c) row.at[c] = rounded_weight(optimizer, now[c]);
    return row;
  }
};

// One entry after the other: to bring a row up to date takes too many registers for more.
template <class Total, class A, class Rules, class Before>
__device__ void add_entries(const CurrentView<A, Rules>& p, const RowTile& tile, int64_t begin, int n, Total& total,
                            const Before& before) {
  bool any_bad = false;
#pragma unroll 1
  for (int j = 0; j < n; ++j) {
    before(j);
    const int64_t index = p.indices[begin + j];
    typename Total::Entry entry;
    entry.prepare(p, begin + j);
    any_bad = any_bad || !p.is_allowed(index) || entry.is_bad();
    if (!p.in_range(index) || index == p.padding_idx) continue;
    entry.load(p, tile, tile.column < p.columns, index, begin + j);
    total.add(entry, begin + j);
  }
  if (any_bad && p.report && tile.first_lane) report_entries(p, begin, n);
}

std::tuple<Tensor, Tensor> look_up_current(KeptUploads* uploads, const std::vector<Tensor>& weights,
                                           const std::vector<Tensor>& states, const std::vector<Tensor>& last_steps,
                                           const Tensor& history, const CollectionBags& given,
                                           const CollectionRule& at) {
  const char* op = "embedding_collection_current";
  const std::optional<Tensor>& per_sample_weights = given.per_sample_weights;
  const Collection c =
      check_collection_lookups(op, weights, given.indices, given.offsets, per_sample_weights, given.lists);
  const std::optional<Tensor> given_history(history);
  const OptimizerRule rule = check_collection_current(op, weights, states, last_steps, given_history, at.rule,
                                                      at.hyperparameters, at.step, at.base);
  DeviceCall call(op, weights[0], uploads);
  Forward f = start_forward(call, c, weights[0].scalar_type(), given.indices, given.offsets);
  const CollectionOptimizer optimizer{weights, states, last_steps, given_history, rule, at.step, at.base};
  with_accumulator(weights[0].scalar_type(), [&](auto tag) {
    using A = typename decltype(tag)::type;
    with_current_tables<A>(call, optimizer, [&](const auto& step_call, auto rules, const OptimizerTable* on_device) {
      using View = CurrentView<A, decltype(rules)>;
      constexpr int width = kLaneColumns<A>;
      for (size_t k = 0; k < weights.size(); ++k) f.tables.push_back(on_device + k);
      CurrentInputs<A> in;
      static_cast<PartInputs<A>&>(in) = inputs_of<A>(call, f);
      in.weights = static_cast<const A*>(accumulated(call, per_sample_weights));
      in.optimizer = step_call;
      // Weights of 1 add up to the bits of a plain sum.
      pool_lookups<WeightedSum<A, width>, View, ResultView<A>>(call, f, in, /*of_extremes=*/false);
      pool_lookups<Extreme<A, width>, View, ResultView<A>>(call, f, in, /*of_extremes=*/true);
    });
  });
  return {f.out, f.argmax};
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  using Current = tsr::CurrentDoors<tsr::KeptUploads, tsr::look_up_current>;
  TSR_IMPL(m, "embedding_collection_current", &Current::by_lists);
  TSR_IMPL(m, "planned_collection_current", &Current::by_plan);
}
