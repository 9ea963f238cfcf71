// Lookups of many features in many tables.
#include "../embedding_collection.h"

#include "collection.h"
#include "row_loops.h"
#include "row_optimizer.h"

namespace tsr {
namespace {

// Rows of a block are brought up to date in scratch of about this size.
constexpr int64_t kCurrentBytes = 256 << 10;

struct PooledOutput {
  Tensor output, argmax;
};

PooledOutput new_output(const Collection& c, const Tensor& like) {
  return {new_empty(like, c.output_shape, like.scalar_type()), new_empty(like, {c.argmax_elements}, ScalarType::Long)};
}

// Pools all lookups: pool(worker, lookup, arguments, positions, argmax) gets block after block, with the table left
// open; positions and argmax are of extremes. most_bytes: of the rows of a block; prepare(workers) comes before.
template <class T, class I, class Prepare, class F>
void pool_blocks(const CollectionInput<T, I>& input, const PooledOutput& results, int64_t most_bytes,
                 const Prepare& prepare, const F& pool) {
  using B = Bags<T, I>;
  using R = typename B::Row;
  const Collection& c = input.c;
  T* out = results.output.mutable_data_ptr<T>();
  int64_t* argmax = results.argmax.mutable_data_ptr<int64_t>();
  const bool stream = c.output_elements * static_cast<int64_t>(sizeof(T)) >= kLargeBytes;
  std::vector<BagScratch<T, R>> scratch;
  FirstPosition first_bad, first_nan;
  const auto prepare_all = [&](int64_t workers) {
    const int64_t items = input.block_items();
    for (int64_t worker = 0; worker < workers; ++worker) scratch.emplace_back(items, c.has_extremes);
    prepare(workers);
  };
  for_each_part(input, prepare_all, [&, out, argmax, stream](int64_t worker, const LookupPart& part) {
    const CollectionLookup& lookup = c.lookups[static_cast<size_t>(part.lookup)];
    BagScratch<T, R>& mine = scratch[static_cast<size_t>(worker)];
    const int64_t row_bytes = std::max<int64_t>(lookup.dim * static_cast<int64_t>(sizeof(T)), 1);
    const B bags = input.bags(lookup, std::clamp<int64_t>(most_bytes / row_bytes, 1, B::kBlockItems));
    for_each_block_of(bags, part.first, part.end, lookup.dim, c.num_embeddings[static_cast<size_t>(lookup.table)],
                      lookup.mode, stream, mine, first_bad, first_nan, [&](int64_t b, PoolArguments<T, R> arguments) {
                        arguments.out = out + lookup.output + b * lookup.stride;
                        arguments.out_stride = lookup.stride;
                        const bool extreme = is_extreme(lookup.mode);
                        pool(worker, lookup, arguments, extreme ? mine.positions.data() : nullptr,
                             extreme ? argmax + lookup.argmax + b * lookup.dim : nullptr);
                      });
  });
  input.throw_if(first_bad, first_nan);
}

template <class T, class R>
void pool_block(Reduction mode, const PoolArguments<T, R>& arguments, const int64_t* positions, int64_t* argmax) {
  const RowLoops<T, R>& loops = row_loops<T, R>();
  return is_extreme(mode) ? loops.pool_extremes[mode](arguments, positions, argmax) : loops.pool(arguments);
}

// ---- Tables with stale rows -----------------------------------------------------------------------------------------

// What one thread keeps for blocks with stale rows.
template <class T>
class CurrentRows {
 public:
  explicit CurrentRows(const OptimizerStep<acc_t<T>>& call) : worker_(call) {}

  // The block with its rows where they are up to date: in the table, or here. False where all of them are in the table.
  template <class R>
  bool locate(const RowStepper<T>& stepper, const PoolArguments<T, R>& block, PoolArguments<T, int64_t>& located) {
    const R* rows = block.rows + block.starts[0];
    const int64_t n = block.starts[block.bags] - block.starts[0];
    bool behind = false;
    for (int64_t e = 0; e < n; ++e) behind |= stepper.behind(static_cast<int64_t>(rows[e]));
    if (!behind) return false;
    behind_.clear();
    places_.resize(static_cast<size_t>(n));
    for (int64_t e = 0; e < n; ++e) {
      const int64_t row = static_cast<int64_t>(rows[e]);
      const bool here = stepper.behind(row);
      places_[static_cast<size_t>(e)] = here ? static_cast<int64_t>(behind_.size()) : row;
      if (here) behind_.push_back(row);
    }
    const int64_t count = static_cast<int64_t>(behind_.size());
    if (static_cast<int64_t>(values_.size()) < count * block.dim)
      values_.resize(static_cast<size_t>(count * block.dim));
    stepper.current(worker_, behind_.data(), count, values_.data());
    // Rows are named by the element where they begin, counted from the table: so both kinds have one base.
    const int64_t here =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(values_.data()) - reinterpret_cast<uintptr_t>(block.table)) /
        static_cast<int64_t>(sizeof(T));
    for (int64_t e = 0; e < n; ++e) {
      int64_t& place = places_[static_cast<size_t>(e)];
      place = place * block.dim + (stepper.behind(static_cast<int64_t>(rows[e])) ? here : 0);
    }
    starts_.resize(static_cast<size_t>(block.bags + 1));
    for (int64_t b = 0; b <= block.bags; ++b) starts_[static_cast<size_t>(b)] = block.starts[b] - block.starts[0];
    const acc_t<T>* weights = block.weights != nullptr ? block.weights + block.starts[0] : nullptr;
    located = {block.table,    block.dim,       places_.data(), weights,      starts_.data(),
               block.divisors, block.bags,      block.out,      block.stream,
               /*stride=*/1,   block.out_stride};
    return true;
  }

 private:
  StepWorker<acc_t<T>> worker_;
  std::vector<int64_t> behind_, places_, starts_;
  std::vector<T> values_;
};

std::tuple<Tensor, Tensor> look_up(NothingKept*, const std::vector<Tensor>& weights, const CollectionBags& given) {
  const std::optional<Tensor>& offsets = given.offsets;
  const Collection c = check_collection_lookups("embedding_collection", weights, given.indices, offsets,
                                                given.per_sample_weights, given.lists);
  const Tensor indices = as_contiguous(given.indices);
  const std::optional<Tensor> per_sample_weights = as_contiguous(given.per_sample_weights);
  const PooledOutput results = new_output(c, weights[0]);
  dispatch_float(weights[0].scalar_type(), c.op, "weights", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    const TablePointers<T> pointers(weights);
    dispatch_index(indices.scalar_type(), c.op, "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const CollectionInput<T, I> input(c, indices, offsets, per_sample_weights);
      pool_blocks(
          input, results, /*most_bytes=*/INT64_MAX, [](int64_t) {},
          [&](int64_t, const CollectionLookup& lookup, auto arguments, const int64_t* positions, int64_t* argmax) {
            arguments.table = pointers[lookup.table];
            pool_block(lookup.mode, arguments, positions, argmax);
          });
    });
  });
  return {results.output, results.argmax};
}

std::tuple<Tensor, Tensor> look_up_current(NothingKept*, const std::vector<Tensor>& weights_,
                                           const std::vector<Tensor>& states_, const std::vector<Tensor>& last_steps_,
                                           const Tensor& history_, const CollectionBags& given,
                                           const CollectionRule& at) {
  const std::optional<Tensor>& offsets = given.offsets;
  const Collection c = check_collection_lookups("embedding_collection_current", weights_, given.indices, offsets,
                                                given.per_sample_weights, given.lists);
  const OptimizerRule rule = check_collection_current(c.op, weights_, states_, last_steps_, history_, at.rule,
                                                      at.hyperparameters, at.step, at.base);
  const std::vector<Tensor> weights = readable_rows(weights_), states = readable_rows(states_),
                            last_steps = as_contiguous(last_steps_);
  const Tensor indices = as_contiguous(given.indices), history = as_contiguous(history_);
  const std::optional<Tensor> per_sample_weights = as_contiguous(given.per_sample_weights);
  const PooledOutput results = new_output(c, weights[0]);
  dispatch_float(weights[0].scalar_type(), c.op, "weights", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    const OptimizerStep<acc_t<T>> call(rule, at.step, at.base, /*now=*/at.step, &history,
                                       /*scale=*/1);
    const std::vector<RowStepper<T>> steppers = steppers_of<T>(call, weights, states, last_steps, {});
    const TablePointers<T> pointers(weights);
    std::vector<std::unique_ptr<CurrentRows<T>>> current;
    dispatch_index(indices.scalar_type(), c.op, "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const CollectionInput<T, I> input(c, indices, offsets, per_sample_weights);
      pool_blocks(
          input, results, kCurrentBytes,
          [&](int64_t workers) {
            for (int64_t worker = 0; worker < workers; ++worker) {
              current.push_back(std::make_unique<CurrentRows<T>>(call));
            }
          },
          [&](int64_t worker, const CollectionLookup& lookup, auto arguments, const int64_t* positions,
              int64_t* argmax) {
            arguments.table = pointers[lookup.table];
            PoolArguments<T, int64_t> located{};
            const RowStepper<T>& stepper = steppers[static_cast<size_t>(lookup.table)];
            if (current[static_cast<size_t>(worker)]->locate(stepper, arguments, located)) {
              pool_block(lookup.mode, located, positions, argmax);
            } else {
              pool_block(lookup.mode, arguments, positions, argmax);
            }
          });
    });
  });
  return {results.output, results.argmax};
}

}  // namespace
}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  using LookUp = tsr::LookUpDoors<tsr::NothingKept, tsr::look_up>;
  using Current = tsr::CurrentDoors<tsr::NothingKept, tsr::look_up_current>;
  TSR_IMPL(m, "embedding_collection", &LookUp::by_lists);
  TSR_IMPL(m, "embedding_collection_current", &Current::by_lists);
  TSR_IMPL(m, "collection_plan", &tsr::collection_plan<tsr::NothingKept>);
  TSR_IMPL(m, "collection_plan_free", &tsr::collection_plan_free<tsr::NothingKept>);
  TSR_IMPL(m, "planned_collection", &LookUp::by_plan);
  TSR_IMPL(m, "planned_collection_current", &Current::by_plan);
}
