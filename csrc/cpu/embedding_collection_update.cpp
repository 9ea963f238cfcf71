// An optimizer's step on the rows that a collection has looked up.
#include "../embedding_collection.h"
#include "collection_groups.h"
#include "row_optimizer.h"

namespace tsr {
namespace {

// Gradients of so many rows are summed and then applied: they and the rows stay in the second-level cache.
constexpr int64_t kUpdateBytes = 64 << 10;
// Rows of a line and more come from memory while the gradients are summed; of narrower ones a line holds several.
constexpr int64_t kLeastFetched = 64;

// What one thread keeps for its slices.
template <class A, class U>
struct UpdateWorker {
  UpdateWorker(const OptimizerStep<A>& call, int64_t rows_, int64_t elements)
      : step(call), rows(rows_), values(elements) {}
  StepWorker<A> step;
  Buffer<U> rows;
  Buffer<A> values;
};

int64_t update_rows(int64_t dim, int64_t width) {
  return std::max<int64_t>(1, kUpdateBytes / (std::max<int64_t>(dim, 1) * width));
}

// steppers: of the wanted tables; places: where among them a table is; whole: see ../row_optimizer.h.
template <class T, class U>
void step_rows(const CollectionGroups<T, U>& groups, const OptimizerStep<acc_t<T>>& call,
               const std::vector<RowStepper<T>>& steppers, const std::vector<int64_t>& places,
               const std::vector<int64_t>& whole) {
  using A = acc_t<T>;
  const auto place_of = [&](const TableEntries<T, U>& table) {
    return static_cast<size_t>(places[static_cast<size_t>(table.table)]);
  };
  const auto is_whole = [&](const TableEntries<T, U>& table) {
    const size_t k = place_of(table);
    return table.meaning.dim > 0 && is_stepped_whole(whole, k, steppers[k].rows(), groups.groups(table).groups());
  };
  std::vector<std::unique_ptr<UpdateWorker<A, U>>> mine;
  const auto prepare = [&](int64_t workers) {
    int64_t rows = 0, elements = 0;
    for (const TableEntries<T, U>& table : groups.tables()) {
      const RowGroups<U>& its = groups.groups(table);
      const int64_t most = is_whole(table) ? its.most_rows() : its.most_items(), dim = table.meaning.dim;
      rows = std::max(rows, most);
      elements = std::max(elements, dim * std::min(most, update_rows(dim, sizeof(A))));
    }
    for (int64_t worker = 0; worker < workers; ++worker) {
      mine.push_back(std::make_unique<UpdateWorker<A, U>>(call, rows, elements));
    }
  };
  groups.for_each_slice(
      is_whole, prepare,
      [&](int64_t worker, const TableEntries<T, U>& table, const ItemMeaning<T, U>& meaning, const Slice& slice,
          SliceScratch<T, U>& scratch) {
        UpdateWorker<A, U>& my = *mine[static_cast<size_t>(worker)];
        const RowStepper<T>& stepper = steppers[place_of(table)];
        const Item<U>* items = groups.groups(table).items() + slice.begin;
        const bool all = is_whole(table);
        const int64_t count = all ? start_all_rows(items, slice, scratch.starts.data())
                                  : start_present_rows(items, slice, scratch.starts.data(), my.rows.data());
        describe_items(items, slice, meaning, count, scratch);
        const int64_t most = update_rows(meaning.dim, sizeof(A));
        for (int64_t first = 0; first < count; first += most) {
          const int64_t n = std::min(most, count - first);
          if (!all && meaning.dim * static_cast<int64_t>(sizeof(T)) >= kLeastFetched) {
            stepper.fetch(my.rows.data() + first, n);
          }
          pool_items(meaning, scratch, first, n, slice.end - slice.begin, my.values.data(), /*stream=*/false);
          if (all) {
            stepper.step_all(my.step, my.values.data(), slice.first_row + first, slice.first_row + first + n);
          } else {
            stepper.step(my.step, my.rows.data() + first, my.values.data(), n);
          }
        }
      });
}

void update(NothingKept*, const CollectionUpdate& written, const Tensor& grad_, const std::optional<Tensor>& argmax_,
            const CollectionBags& given) {
  const CollectionRule& at = written.rule;
  const std::vector<Tensor>&weights = written.weights, &states = written.states, &last_steps = written.last_steps;
  const std::optional<Tensor>&offsets = given.offsets, &grad_scale = written.grad_scale;
  const Collection c = check_embedding_collection_update(
      weights, grad_, given.indices, offsets, given.per_sample_weights, argmax_, given.lists, written.wanted);
  const CollectionStep stepped =
      check_collection_step(c, weights, states, last_steps, written.history, written.wanted, grad_scale, at.rule,
                            at.hyperparameters, at.step, at.base, written.rounding_seeds, written.whole);
  const Tensor grad = as_contiguous(grad_), indices = as_contiguous(given.indices);
  const std::optional<Tensor> history = as_contiguous(written.history), argmax = as_contiguous(argmax_),
                              per_sample_weights = as_contiguous(given.per_sample_weights);
  dispatch_float(grad.scalar_type(), c.op, "grad", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    const OptimizerStep<acc_t<T>> call(stepped.rule, at.step, at.base, /*now=*/at.step - 1,
                                       last_steps.empty() ? nullptr : &*history,
                                       scale_of(grad_scale, written.maximize));
    const auto steppers = steppers_of<T>(call, stepped.weights, states, last_steps, written.rounding_seeds);
    dispatch_index(indices.scalar_type(), c.op, "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const CollectionInput<T, I> input(c, indices, offsets, per_sample_weights);
      dispatch_collection_width(input, [&](auto width_tag) {
        using U = typename decltype(width_tag)::type;
        const CollectionGroups<T, U> groups(group_tables<U>(input, grad.const_data_ptr<T>(),
                                                            argmax ? argmax->const_data_ptr<int64_t>() : nullptr,
                                                            written.wanted, GradientRows::kPresent));
        step_rows(groups, call, steppers, stepped.places, written.whole);
      });
    });
  });
}

}  // namespace
}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  using Update = tsr::UpdateDoors<tsr::NothingKept, tsr::update>;
  TSR_IMPL(m, "embedding_collection_update_", &Update::by_lists);
  TSR_IMPL(m, "planned_collection_update_", &Update::by_plan);
}
