// Gradient of a collection's lookups with respect to per_sample_weights.
#include "../embedding_collection.h"
#include "collection.h"
#include "row_optimizer.h"

namespace tsr {
namespace {

// The rows of tables as lookups have read them: as they are, or, where steppers are given, brought up to date.
template <class T>
struct LookedUpRows {
  const TablePointers<T>& tables;
  const std::vector<RowStepper<T>>* steppers;
  StepWorker<acc_t<T>>* worker;
  Buffer<T> current;

  const T* row(const CollectionLookup& lookup, int64_t id) {
    if (steppers != nullptr) {
      const RowStepper<T>& stepper = (*steppers)[static_cast<size_t>(lookup.table)];
      if (stepper.behind(id)) {
        stepper.current(*worker, &id, 1, current.data());
        return current.data();
      }
    }
    return tables[lookup.table] + id * lookup.dim;
  }
};

// One lookup's terms in the gradients of one bag.
template <class T>
struct BagTerms {
  const CollectionLookup* lookup;
  const T* grad;
  acc_t<T> divisor;
  acc_t<T> own;  // <grad, output>
};

// An item's gradient from one lookup.
template <class T, class I>
acc_t<T> item_gradient(const Bags<T, I>& bags, const BagTerms<T>& terms, LookedUpRows<T>& rows, int64_t id,
                       int64_t item) {
  using A = acc_t<T>;
  if (bags.is_padding(item) || terms.divisor == A(0)) return A(0);
  const A value = dot_loop<T>().dot(terms.grad, rows.row(*terms.lookup, id), terms.lookup->dim);
  return weight_gradient(terms.lookup->mode, value, terms.own, bags.weight(item), terms.divisor);
}

// Checks and writes the items of a key's bags [begin, end): each the sum over the lookups, in their order.
template <class T, class I>
void write_bags(const CollectionInput<T, I>& input, const std::vector<const CollectionLookup*>& lookups, int64_t begin,
                int64_t end, LookedUpRows<T>& rows, const T* grads, const T* pooled, T* out, FirstPosition& first_bad,
                FirstPosition& first_nan) {
  using A = acc_t<T>;
  const auto dot = dot_loop<T>().dot;
  std::vector<Bags<T, I>> bags;
  std::vector<BagTerms<T>> terms(lookups.size());
  bool good = true;
  for (const CollectionLookup* lookup : lookups) {
    bags.push_back(input.bags(*lookup));
    const int64_t bound = input.c.num_embeddings[static_cast<size_t>(lookup->table)];
    good = bags.back().check(begin, end, bound, first_bad, first_nan) && good;
  }
  if (!good) return;
  const int64_t* starts = bags[0].offsets();
  for (int64_t b = begin; b < end; ++b) {
    for (size_t l = 0; l < lookups.size(); ++l) {
      const CollectionLookup& lookup = *lookups[l];
      const int64_t at = lookup.output + b * lookup.stride;
      terms[l] = {&lookup, grads + at, bags[l].divisor(b, lookup.mode),
                  is_divided(lookup.mode) ? dot(grads + at, pooled + at, lookup.dim) : A(0)};
    }
    for (int64_t i = starts[b]; i < starts[b + 1]; ++i) {
      A sum = 0;
      for (size_t l = 0; l < lookups.size(); ++l) {
        const A value = item_gradient(bags[l], terms[l], rows, static_cast<int64_t>(input.ids[i]), i);
        sum = l == 0 ? value : sum + value;
      }
      out[i] = static_cast<T>(sum);
    }
  }
}

// call and steppers are null where the tables are as they are.
template <class T, class I>
void write_weights_gradient(const CollectionInput<T, I>& input, const TablePointers<T>& tables,
                            const OptimizerStep<acc_t<T>>* call, const std::vector<RowStepper<T>>* steppers,
                            const T* grads, const T* pooled, T* out) {
  const Collection& c = input.c;
  std::vector<std::vector<const CollectionLookup*>> of_key(c.key_bags.size());
  int64_t work = 0, most_dims = 0;
  for (const CollectionLookup& lookup : c.lookups) {
    of_key[static_cast<size_t>(lookup.key)].push_back(&lookup);
    work += input.work(lookup);
    most_dims = std::max(most_dims, lookup.dim);
  }
  std::vector<LookupPart> parts;
  const int64_t workers = workers_for(work);
  for (size_t key = 0; key < of_key.size(); ++key) {
    const auto [first, bags] = c.key_bags[key];
    if (of_key[key].empty()) std::fill(out + input.starts[first], out + input.starts[first + bags], T(0.0f));
    if (of_key[key].empty()) continue;
    const std::vector<int64_t> ranges =
        balanced_ranges(input.starts.data() + first, bags, workers == 1 ? 1 : workers * 4);
    for (size_t range = 0; range + 1 < ranges.size(); ++range) {
      parts.push_back({static_cast<int64_t>(key), ranges[range], ranges[range + 1]});
    }
  }
  std::vector<std::unique_ptr<StepWorker<acc_t<T>>>> step_workers;
  std::vector<LookedUpRows<T>> rows;
  for (int64_t worker = 0; worker < workers; ++worker) {
    if (call != nullptr) step_workers.push_back(std::make_unique<StepWorker<acc_t<T>>>(*call));
    rows.push_back({tables, steppers, call != nullptr ? step_workers.back().get() : nullptr, Buffer<T>(most_dims)});
  }
  FirstPosition first_bad, first_nan;
  parallel_dynamic(static_cast<int64_t>(parts.size()), workers, [&, grads, pooled, out](int64_t worker, int64_t task) {
    const LookupPart& part = parts[static_cast<size_t>(task)];
    write_bags(input, of_key[static_cast<size_t>(part.lookup)], part.first, part.end, rows[static_cast<size_t>(worker)],
               grads, pooled, out, first_bad, first_nan);
  });
  input.throw_if(first_bad, first_nan);
}

}  // namespace

Tensor embedding_collection_weights_backward_cpu(
    const Tensor& grad_, const std::vector<Tensor>& weights_, const std::vector<Tensor>& states_,
    const std::vector<Tensor>& last_steps_, const std::optional<Tensor>& history_, const Tensor& indices_,
    const std::optional<Tensor>& offsets, const Tensor& per_sample_weights_, const Tensor& output_,
    const std::vector<int64_t>& tables, const std::vector<int64_t>& keys, const std::vector<int64_t>& modes,
    const std::vector<int64_t>& bags, const std::vector<int64_t>& padding_idx, bool side_by_side, int64_t rule_value,
    const std::vector<double>& hyperparameters, int64_t step, int64_t base) {
  const Collection c = check_embedding_collection_weights_backward(
      grad_, weights_, states_, last_steps_, history_, indices_, offsets, per_sample_weights_, output_,
      {tables, keys, modes, bags, padding_idx, side_by_side});
  OptimizerRule rule;
  if (history_) {
    rule = check_collection_current(c.op, weights_, states_, last_steps_, history_, rule_value, hyperparameters, step,
                                    base);
  }
  const std::vector<Tensor> weights = readable_rows(weights_), states = readable_rows(states_),
                            last_steps = as_contiguous(last_steps_);
  const Tensor grad = as_contiguous(grad_), output = as_contiguous(output_), indices = as_contiguous(indices_);
  const std::optional<Tensor> per_sample_weights = as_contiguous(per_sample_weights_),
                              history = as_contiguous(history_);
  const Tensor result = new_empty(*per_sample_weights, {indices.size(0)}, per_sample_weights->scalar_type());
  dispatch_float(grad.scalar_type(), c.op, "grad", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    std::optional<OptimizerStep<acc_t<T>>> call;
    std::vector<RowStepper<T>> steppers;
    if (history) {
      call.emplace(rule, step, base, /*now=*/step, &*history, /*scale=*/1);
      steppers = steppers_of<T>(*call, weights, states, last_steps, {});
    }
    dispatch_index(indices.scalar_type(), c.op, "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      write_weights_gradient<T, I>(CollectionInput<T, I>(c, indices, offsets, per_sample_weights),
                                   TablePointers<T>(weights), history ? &*call : nullptr, history ? &steppers : nullptr,
                                   grad.const_data_ptr<T>(), output.const_data_ptr<T>(), result.mutable_data_ptr<T>());
    });
  });
  return result;
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) {
  TSR_IMPL(m, "embedding_collection_weights_backward", &tsr::embedding_collection_weights_backward_cpu);
}
