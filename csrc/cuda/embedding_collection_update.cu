// An optimizer's step on the rows that a collection looked up, with gradients that no one ever writes down whole: a
// team adds up the entries of its row as it steps it. How many rows there are stays on the device.
#include "embedding_collection_current.cuh"
#include "embedding_collection_groups.cuh"

namespace tsr {
namespace {

// Threads of a block that steps rows: few, as each takes many registers. 12 or 16 warps of a processor are busy, and no
// kernel spills.
constexpr int64_t kStepThreads = 128;

// A row of more than kPiece entries is added up before, in pieces: its gradient, in the accumulator's dtype.
template <class A>
struct GradientInputs : PartInputs<A> {
  ScalarType dtype{};   // of grad
  A* values = nullptr;  // [long rows, stride]
  int64_t stride = 0;
  const int64_t* slots = nullptr;  // [groups]: which of them, for those that are long
};

// Rows of grad, and sums that are stored as they are, not rounded.
template <class A>
struct GradientView : PartView<A> {
  using Inputs = GradientInputs<A>;
  // Of half types a lane owns half as many columns as where gradients are written.
  static constexpr int64_t kMergingThreads = kThreads * (sizeof(A) == sizeof(float) ? 2 : 1);

  const Inputs& inputs;

  __device__ GradientView(const Inputs& in, const Part& part, Offsets offsets)
      : PartView<A>(in, part, offsets), inputs(in) {}

  template <int width>
  __device__ Vector<A, width> load_row(int64_t index, const RowTile& tile) const {
    Vector<A, width> row{};
    load_as<width>(inputs.dtype, this->part.rows, index + tile.column, this->columns - tile.column, this->rows_aligned,
                   row.at);
    return row;
  }
  template <int width>
  __device__ void store_row(int64_t bag, const RowTile& tile, const Vector<A, width>& row) const {
    A* const to = inputs.values + inputs.slots[this->part.first_offset + bag] * inputs.stride + tile.column;
    store_each<width>(to, this->columns - tile.column, /*aligned=*/false, [&](int c) { return row.at[c]; });
  }
};

// ---- The step -------------------------------------------------------------------------------------------------------

template <class A>
struct StepInputs : GradientInputs<A> {
  Parts parts{};                           // first_blocks: of kStepThreads threads
  const OptimizerTable* tables = nullptr;  // [parts]
  const int64_t* first_rows = nullptr;     // [parts]
  SortedPairs sorted{};
  OptimizerCall<A> optimizer{};
};

// One block: the groups of each part, and the blocks that step them. What it writes is what `in.parts` reads from then
// on: parts as they were given, with their groups and rows, those of grad.
template <class A>
__global__ void place_groups_kernel(const __grid_constant__ StepInputs<A> in, RowRuns runs, const Part* given,
                                    const void* grad, Part* parts, int64_t* bounds, int64_t* first_blocks) {
  for (int64_t w = threadIdx.x; w <= in.parts.count; w += blockDim.x) {
    bounds[w] = first_group(runs, in.first_rows[w], [&](int64_t j) { return in.sorted.key(j); });
  }
  __syncthreads();
  const auto place = [&](int64_t w) {
    const int64_t groups = bounds[w + 1] - bounds[w], teams = kStepThreads >> in.tables[w].lanes_log2;
    Part part = given[w];
    part.rows = grad;
    part.first_offset = bounds[w];
    part.bags = groups;
    parts[w] = part;
    return (groups + teams - 1) / teams;
  };
  write_sums_before(in.parts.count, place, first_blocks);
}

// What a team is to step: a row of table w, and where its entries are among the sorted ones.
struct StepRow {
  int32_t w = 0;
  int32_t entries = 0;  // kPiece + 1 where there are more than kPiece; 0: there is no row
  int64_t begin = 0;
  int64_t row = 0;
};

// Blocks are dealt to the tables in the order of their groups; a team takes one of each.
template <class A>
__device__ int64_t group_of_block(const StepInputs<A>& in, int64_t w, int64_t block) {
  const int lanes_log2 = in.tables[w].lanes_log2;
  return in.parts.parts[w].first_offset + (block - in.parts.first_blocks[w]) * (blockDim.x >> lanes_log2) +
         RowTeam(lanes_log2).in_block();
}

// Whole warps come here.
template <class A>
__device__ StepRow row_of_block(const StepInputs<A>& in, int64_t block) {
  StepRow found;
  found.w = static_cast<int32_t>(last_at_most(in.parts.first_blocks, in.parts.count, block));
  const Part& part = in.parts.parts[found.w];
  const int64_t group = group_of_block(in, found.w, block);
  if (group >= part.first_offset + part.bags) return found;
  found.begin = in.offsets[group];
  found.entries = static_cast<int32_t>(min(in.offsets[group + 1] - found.begin, static_cast<int64_t>(kPiece + 1)));
  found.row = in.sorted.key(found.begin) - in.first_rows[found.w];
  prefetch_row(in.optimizer, in.tables[found.w], found.row);
  return found;
}

// A block steps the rows of one block after another. Which rows the next has is found before this one's are stepped:
// that is a chain of reads of which each waits for the one before.
template <class Rules, class A>
__global__ void __launch_bounds__(kStepThreads, sizeof(A) == sizeof(float) ? 4 : 3)
    collection_update_kernel(const __grid_constant__ StepInputs<A> in) {
  constexpr int width = kLaneColumns<A>;
  const int64_t blocks = in.parts.first_blocks[in.parts.count];
  if (blockIdx.x >= blocks) return;
  StepRow next = row_of_block(in, blockIdx.x);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const StepRow mine = next;
    if (block + gridDim.x < blocks) next = row_of_block(in, block + gridDim.x);
    if (mine.entries == 0) continue;
    const Part& part = in.parts.parts[mine.w];
    const OptimizerTable& table = in.tables[mine.w];
    const RowTeam team(table.lanes_log2);
    TableRow<A, Rules>(in.optimizer, table, mine.row).template step<true>(team, [&](int64_t column, A* to) {
      if (mine.entries > kPiece) {
        const A* const values = in.values + in.slots[group_of_block(in, mine.w, block)] * in.stride + column;
#pragma unroll
        for (int c = 0; c < width; ++c) {
          if (column + c < part.columns) to[c] = values[c];
        }
        return;
      }
      GradientSum<A, width> total;
      add_entries(GradientView<A>(in, part, Offsets{}), RowTile{0, column, false}, mine.begin, mine.entries, total,
                  [](int) {});
#pragma unroll
      for (int c = 0; c < width; ++c) to[c] = total.sums.value(c);
    });
  }
}

// ---- On the host ----------------------------------------------------------------------------------------------------

// Adds up the rows of more than kPiece entries.
template <class A>
void pool_long_rows(DeviceCall& call, StepInputs<A>& in, const RowTiling& tiling, int64_t entries) {
  using Total = GradientSum<A, kLaneColumns<A>>;
  using View = GradientView<A>;
  const WidestTiling widest(tiling);
  const int64_t capacity = tiling.tiles / tiling.tiles_per_row;
  int64_t* const slots = call.workspace<int64_t>(capacity);
  const PoolPlan plan = plan_parts(call, in.parts, in.offsets, entries, /*run=*/1, tiling, slots);
  if (plan.piece_blocks == 0) return;
  Total* const totals = call.workspace<Total>(plan.total_capacity * widest.lanes_per_row());
  const int64_t long_rows = std::min(plan.total_capacity, capacity);
  in.stride = widest.lanes_per_row() * Total::width;
  in.values = call.workspace<A>(long_rows * in.stride);
  in.slots = slots;
  launch(call, {plan.piece_blocks, kPartThreads}, parts_kernel<Total, View>, in.parts,
         static_cast<const GradientInputs<A>&>(in), plan, totals, widest);
  const int64_t blocks = std::min(long_rows * widest.tiles_per_row, kFullDevice / kThreads + 1);
  launch(call, {blocks, View::kMergingThreads}, long_bags_of_parts_kernel<Total, View>, in.parts,
         static_cast<const GradientInputs<A>&>(in), plan, static_cast<const Total*>(totals), widest);
}

template <class A>
void step_rows(DeviceCall& call, const CollectionGradient& gradient, const CollectionInput& input,
               const std::vector<OptimizerTable>& tables, const OptimizerArguments& arguments) {
  CollectionGroups groups = start_groups(call, gradient, input.items);
  const int64_t count = static_cast<int64_t>(tables.size()), entries = groups.groups.entries;
  const int64_t capacity = std::min(entries, groups.groups.rows);
  const int width = kLaneColumns<A>, wide = static_cast<int>(16 / gradient.grad.element_size());
  std::vector<Part> listed;
  int64_t columns = 0, least_teams = kStepThreads;
  for (size_t w = 0; w < tables.size(); ++w) {
    Part part = part_of_groups(gradient, groups, w);
    part.rows = nullptr;
    deal_lanes(part, width, wide);
    listed.push_back(part);
    columns = std::max<int64_t>(columns, part.columns);
    least_teams = std::min(least_teams, kStepThreads >> tables[w].lanes_log2);
  }
  Uploads uploads;
  const size_t parts_place = uploads.add(listed), tables_place = uploads.add(tables);
  group_entries(call, gradient, input, groups, uploads);
  if (capacity == 0) return;
  Part* const parts = call.workspace<Part>(count);
  const RowRuns runs = row_runs(call, groups.groups);
  int64_t* const bounds = call.workspace<int64_t>(count + 1);
  int64_t* const first_blocks = call.workspace<int64_t>(count + 1);
  StepInputs<A> in;
  static_cast<PartInputs<A>&>(in) = inputs_of_groups<A>(call, groups);
  in.dtype = gradient.grad.scalar_type();
  in.offsets = runs.starts;
  in.parts = {count, first_blocks, bounds, parts};
  in.tables = uploads.at<OptimizerTable>(tables_place);
  in.first_rows = groups.first_rows_there;
  in.sorted = groups.groups.sorted();
  in.optimizer = optimizer_call<A>(call, arguments);
  launch(call, {1}, place_groups_kernel<A>, in, runs, uploads.at<Part>(parts_place), groups.grad, parts, bounds,
         first_blocks);
  pool_long_rows(call, in, RowTiling(capacity, columns, width), entries);
  // No more than keep a large device busy: how many there is work for is known on the device alone.
  const LaunchShape shape{std::min(capacity / least_teams + count, kFullDevice / kStepThreads + 1), kStepThreads};
  with_rules(in.optimizer, [&](auto rules) { launch(call, shape, collection_update_kernel<decltype(rules), A>, in); });
}

void update(KeptUploads* uploads, const CollectionUpdate& written, const Tensor& grad,
            const std::optional<Tensor>& argmax, const CollectionBags& given) {
  const CollectionRule& at = written.rule;
  const auto& [indices, offsets, per_sample_weights, lists] = given;
  const std::vector<Tensor>&weights = written.weights, &states = written.states, &last_steps = written.last_steps;
  const Collection c = check_embedding_collection_update(weights, grad, indices, offsets, per_sample_weights, argmax,
                                                         lists, written.wanted);
  const CollectionStep checked =
      check_collection_step(c, weights, states, last_steps, written.history, written.wanted, written.grad_scale,
                            at.rule, at.hyperparameters, at.step, at.base, written.rounding_seeds, written.whole);
  if (checked.weights.empty()) return;
  DeviceCall call(c.op, weights[0], uploads);
  const CollectionGradient gradient{c, grad, per_sample_weights, argmax, written.wanted};
  const OptimizerArguments arguments{checked.rule,
                                     at.step,
                                     at.base,
                                     at.step - 1,
                                     weights[0].scalar_type(),
                                     written.history,
                                     written.grad_scale,
                                     written.maximize,
                                     !written.rounding_seeds.empty()};
  const std::vector<OptimizerTable> on_host =
      optimizer_tables(arguments, checked.weights, states, last_steps, written.rounding_seeds);
  const CollectionInput input = collection_input(call, indices, offsets);
  with_accumulator(grad.scalar_type(), [&](auto tag) {
    step_rows<typename decltype(tag)::type>(call, gradient, input, on_host, arguments);
  });
}

}  // namespace
}  // namespace tsr

TSR_CUDA_KERNELS(m) {
  using Update = tsr::UpdateDoors<tsr::KeptUploads, tsr::update>;
  TSR_IMPL(m, "embedding_collection_update_", &Update::by_lists);
  TSR_IMPL(m, "planned_collection_update_", &Update::by_plan);
}
