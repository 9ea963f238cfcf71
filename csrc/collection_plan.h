// collection_plan: what calls of embedding_collection's operators have in common from step to step, held on this side
// of the dispatcher. To turn a list of Python into one of C++ costs 40 to 150 ns an entry, more than a small lookup.
//
// collection_plan(weights, states, last_steps, tables, keys, modes, padding_idx, maximize, rounding_seeds, whole)
//   -> plan: holds the arguments, and gives them a number. weights say for which device, and are not held: what holds a
//   parameter keeps it alive, and torch.utils.swap_tensors from it.
// planned_collection(weights, indices, offsets?, per_sample_weights?, bags, side_by_side, plan): embedding_collection.
// planned_collection_current(weights, history, indices, ..., side_by_side, rule, hyperparameters, step, base, plan):
//   embedding_collection_current.
// planned_collection_update_(weights, history?, grad, indices, offsets?, per_sample_weights?, argmax?, bags,
//   side_by_side, rule, hyperparameters, step, base, plan): embedding_collection_update_ of all tables, without
//   grad_scale. It writes states and last_steps too, though its schema cannot say so.
// collection_plan_free(probe, plan): lets go of the arguments; probe says on which device they are. A call that runs
//   keeps them until it ends. A number that stands for nothing is let alone.
//
// These give the bits and raise the errors of the operators that they stand for, which check the arguments at each
// call: tensors may have got other memory. An unknown plan, or one that has been freed: ValueError. On CUDA a plan also
// keeps what its last call has sent to the device, and sends it again only if it is another.
// They are for eager calls: no compiler, transform or mode sees what a number stands for.
#pragma once
#include <pthread.h>

#include <map>
#include <mutex>

#include "embedding_collection.h"

namespace tsr {

// Kept: what the device's calls keep besides. kSign tells its numbers from those of others.
template <class Kept>
struct CollectionPlan {
  std::vector<Tensor> states, last_steps;
  std::vector<int64_t> tables, keys, modes, padding_idx;
  bool maximize;
  std::vector<int64_t> rounding_seeds, whole;
  std::vector<bool> wanted;  // all tables
  Kept kept{};

  CollectionLists lists(const std::vector<int64_t>& bags, bool side_by_side) const {
    return {tables, keys, modes, bags, padding_idx, side_by_side};
  }
};

// The plans of a process. Threads may make, use and free them at any time, and a process may fork.
template <class Kept>
class CollectionPlans {
 public:
  using Plan = CollectionPlan<Kept>;

  // Never destroyed: when a process ends, torch may be gone before what would let go of tensors.
  static CollectionPlans& all() {
    static CollectionPlans& plans = *new CollectionPlans;
    return plans;
  }

  int64_t add(std::shared_ptr<Plan> plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    plans_.emplace(last_ += Kept::kSign, std::move(plan));
    return last_;
  }
  std::shared_ptr<Plan> at(const char* op, int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(number);
    TSR_CHECK_VALUE(found != plans_.end(), op,
                    ": plan must be the number of a collection_plan of this device that has not been freed, got ",
                    number);
    return found->second;
  }
  // The plan ends after the lock has been left: to let go of a tensor may run other code.
  void free(int64_t number) {
    std::shared_ptr<Plan> plan;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(number);
    if (found == plans_.end()) return;
    plan = std::move(found->second);
    plans_.erase(found);
  }

 private:
  CollectionPlans() {
    pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); }, [] { all().mutex_.unlock(); });
  }

  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Plan>> plans_;
  int64_t last_ = 0;
};

template <class Kept>
int64_t collection_plan(const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
                        const std::vector<Tensor>& last_steps, const std::vector<int64_t>& tables,
                        const std::vector<int64_t>& keys, const std::vector<int64_t>& modes,
                        const std::vector<int64_t>& padding_idx, bool maximize,
                        const std::vector<int64_t>& rounding_seeds, const std::vector<int64_t>& whole) {
  const auto plan = std::make_shared<CollectionPlan<Kept>>();
  plan->states = states;
  plan->last_steps = last_steps;
  plan->tables = tables;
  plan->keys = keys;
  plan->modes = modes;
  plan->padding_idx = padding_idx;
  plan->maximize = maximize;
  plan->rounding_seeds = rounding_seeds;
  plan->whole = whole;
  plan->wanted.assign(weights.size(), true);
  return CollectionPlans<Kept>::all().add(plan);
}

template <class Kept>
void collection_plan_free(const Tensor&, int64_t plan) {
  CollectionPlans<Kept>::all().free(plan);
}

// ---- A device's doors: to each operator by lists, and to the one by a plan that does the same ------------------------

// The bags of a call, and what is looked up by them.
struct CollectionBags {
  const Tensor& indices;
  const std::optional<Tensor>&offsets, &per_sample_weights;
  CollectionLists lists;
};

// The rule of an optimizer, and where it is.
struct CollectionRule {
  int64_t rule;
  const std::vector<double>& hyperparameters;
  int64_t step, base;
};

// look_up(Kept*, weights, bags); Kept* is null without a plan.
template <class Kept, auto look_up>
struct LookUpDoors {
  static std::tuple<Tensor, Tensor> by_lists(const std::vector<Tensor>& weights, const Tensor& indices,
                                             const std::optional<Tensor>& offsets,
                                             const std::optional<Tensor>& per_sample_weights,
                                             const std::vector<int64_t>& tables, const std::vector<int64_t>& keys,
                                             const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
                                             const std::vector<int64_t>& padding_idx, bool side_by_side, bool) {
    return look_up(nullptr, weights,
                   {indices, offsets, per_sample_weights, {tables, keys, modes, bags, padding_idx, side_by_side}});
  }
  static std::tuple<Tensor, Tensor> by_plan(const std::vector<Tensor>& weights, const Tensor& indices,
                                            const std::optional<Tensor>& offsets,
                                            const std::optional<Tensor>& per_sample_weights,
                                            const std::vector<int64_t>& bags, bool side_by_side, int64_t plan) {
    const auto p = CollectionPlans<Kept>::all().at("planned_collection", plan);
    return look_up(&p->kept, weights, {indices, offsets, per_sample_weights, p->lists(bags, side_by_side)});
  }
};

// look_up_current(Kept*, weights, states, last_steps, history, bags, rule).
template <class Kept, auto look_up_current>
struct CurrentDoors {
  static std::tuple<Tensor, Tensor> by_lists(const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
                                             const std::vector<Tensor>& last_steps, const Tensor& history,
                                             const Tensor& indices, const std::optional<Tensor>& offsets,
                                             const std::optional<Tensor>& per_sample_weights,
                                             const std::vector<int64_t>& tables, const std::vector<int64_t>& keys,
                                             const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
                                             const std::vector<int64_t>& padding_idx, bool side_by_side, int64_t rule,
                                             const std::vector<double>& hyperparameters, int64_t step, int64_t base) {
    return look_up_current(
        nullptr, weights, states, last_steps, history,
        {indices, offsets, per_sample_weights, {tables, keys, modes, bags, padding_idx, side_by_side}},
        {rule, hyperparameters, step, base});
  }
  static std::tuple<Tensor, Tensor> by_plan(const std::vector<Tensor>& weights, const Tensor& history,
                                            const Tensor& indices, const std::optional<Tensor>& offsets,
                                            const std::optional<Tensor>& per_sample_weights,
                                            const std::vector<int64_t>& bags, bool side_by_side, int64_t rule,
                                            const std::vector<double>& hyperparameters, int64_t step, int64_t base,
                                            int64_t plan) {
    const auto p = CollectionPlans<Kept>::all().at("planned_collection_current", plan);
    return look_up_current(&p->kept, weights, p->states, p->last_steps, history,
                           {indices, offsets, per_sample_weights, p->lists(bags, side_by_side)},
                           {rule, hyperparameters, step, base});
  }
};

// What an update writes, and how.
struct CollectionUpdate {
  const std::vector<Tensor>&weights, &states, &last_steps;
  const std::optional<Tensor>& history;
  const std::vector<bool>& wanted;
  const std::optional<Tensor>& grad_scale;
  CollectionRule rule;
  bool maximize;
  const std::vector<int64_t>&rounding_seeds, &whole;
};

// update(Kept*, written, grad, argmax, bags).
template <class Kept, auto update>
struct UpdateDoors {
  static void by_lists(const std::vector<Tensor>& weights, const std::vector<Tensor>& states,
                       const std::vector<Tensor>& last_steps, const std::optional<Tensor>& history, const Tensor& grad,
                       const Tensor& indices, const std::optional<Tensor>& offsets,
                       const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
                       const std::vector<int64_t>& tables, const std::vector<int64_t>& keys,
                       const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
                       const std::vector<int64_t>& padding_idx, bool side_by_side, const std::vector<bool>& wanted,
                       const std::optional<Tensor>& grad_scale, int64_t rule,
                       const std::vector<double>& hyperparameters, int64_t step, int64_t base, bool maximize,
                       const std::vector<int64_t>& rounding_seeds, const std::vector<int64_t>& whole) {
    update(nullptr,
           {weights,
            states,
            last_steps,
            history,
            wanted,
            grad_scale,
            {rule, hyperparameters, step, base},
            maximize,
            rounding_seeds,
            whole},
           grad, argmax,
           {indices, offsets, per_sample_weights, {tables, keys, modes, bags, padding_idx, side_by_side}});
  }
  static void by_plan(const std::vector<Tensor>& weights, const std::optional<Tensor>& history, const Tensor& grad,
                      const Tensor& indices, const std::optional<Tensor>& offsets,
                      const std::optional<Tensor>& per_sample_weights, const std::optional<Tensor>& argmax,
                      const std::vector<int64_t>& bags, bool side_by_side, int64_t rule,
                      const std::vector<double>& hyperparameters, int64_t step, int64_t base, int64_t plan) {
    const auto p = CollectionPlans<Kept>::all().at("planned_collection_update_", plan);
    update(&p->kept,
           {weights,
            p->states,
            p->last_steps,
            history,
            p->wanted,
            /*grad_scale=*/std::nullopt,
            {rule, hyperparameters, step, base},
            p->maximize,
            p->rounding_seeds,
            p->whole},
           grad, argmax, {indices, offsets, per_sample_weights, p->lists(bags, side_by_side)});
  }
};

}  // namespace tsr
