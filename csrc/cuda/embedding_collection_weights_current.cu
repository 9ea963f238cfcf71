// Gradients of per_sample_weights where the lookups read the rows as of now.
#include "embedding_collection_current.cuh"
#include "embedding_collection_weights.cuh"

namespace tsr {
namespace {

// A lookup's table is an OptimizerTable.
template <class T, class Rules>
struct CurrentRows {
  using A = acc_t<T>;
  OptimizerCall<A> optimizer;

  struct Row {
    TableRow<A, Rules> row;

    __device__ Row(const CurrentRows& rows, const WeightedLookup& lookup, int64_t index)
        : row(rows.optimizer, *static_cast<const OptimizerTable*>(lookup.table), index) {}
    template <int width>
    __device__ Vector<T, width> load(int64_t column) const {
      A now[width];
      row.now(column, now);
      Vector<T, width> columns;
#pragma unroll
      for (int c = 0; c < width; ++c) columns.at[c] = static_cast<T>(now[c]);
      return columns;
    }
  };
};

}  // namespace

void write_current_weights_gradient(DeviceCall& call, const WeightsGradient& g, const CollectionOptimizer& optimizer,
                                    const Tensor& out) {
  dispatch_float(out.scalar_type(), call.op(), "weights", [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_current_tables<acc_t<T>>(call, optimizer, [&](const auto& step_call, auto rules, const OptimizerTable* tables) {
      std::vector<const void*> addresses;
      for (size_t k = 0; k < optimizer.weights.size(); ++k) addresses.push_back(tables + k);
      const CurrentRows<T, decltype(rules)> rows{step_call};
      write_weights_gradient<T>(call, g, rows, addresses, out);
    });
  });
}

}  // namespace tsr
