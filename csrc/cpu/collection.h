// The input of a collection on the CPU: what its operators share.
#pragma once
#include "../collection_plan.h"
#include "embedding_bags.h"
#include "table_rows.h"

namespace tsr {

// What a plan keeps for calls on the CPU.
struct NothingKept {
  static constexpr int64_t kSign = 1;
};
// Bags and their items, checked but for the ids. The tensors must be contiguous and outlive this.
template <class I>
struct CollectionIds {
  CollectionIds(const Collection& collection, const Tensor& indices_, const std::optional<Tensor>& offsets)
      : c(collection),
        indices(indices_),
        ids(indices_.const_data_ptr<I>()),
        starts(bag_starts(collection.op, indices_, offsets)) {}

  int64_t items(const CollectionLookup& lookup) const {
    return starts[lookup.first_bag + lookup.bags] - starts[lookup.first_bag];
  }

  // Elements that a lookup, or its gradient, adds and writes.
  int64_t work(const CollectionLookup& lookup) const { return (items(lookup) + lookup.bags) * lookup.dim; }

  // Throws for what Bags::check has reported of lookups.
  void throw_if(const FirstPosition& first_bad, const FirstPosition& first_nan) const {
    if (first_bad.found()) {
      const int64_t position = first_bad.position(), id = static_cast<int64_t>(ids[position]);
      const int64_t bag = std::upper_bound(starts.data(), starts.data() + c.bags, position) - starts.data() - 1;
      for (const CollectionLookup& lookup : c.lookups) {
        const int64_t rows = c.num_embeddings[static_cast<size_t>(lookup.table)];
        const int64_t bound = index_bound(rows, c.padding_idx[static_cast<size_t>(lookup.table)]);
        if (bag < lookup.first_bag || bag >= lookup.first_bag + lookup.bags || (id >= 0 && id < bound)) continue;
        throw_bad_index(c.op, "indices", indices, position, rows);
      }
    }
    throw_bad_bags(c.op, indices, 0, FirstPosition(), first_nan);
  }

  const Collection& c;
  const Tensor& indices;
  const I* ids;
  Buffer<int64_t> starts;  // [bags + 1]
};

// The input of a collection, with the items' weights. T: the type of weights and per_sample_weights.
template <class T, class I>
struct CollectionInput : CollectionIds<I> {
  CollectionInput(const Collection& collection, const Tensor& indices_, const std::optional<Tensor>& offsets,
                  const std::optional<Tensor>& per_sample_weights)
      : CollectionIds<I>(collection, indices_, offsets),
        weights(per_sample_weights ? per_sample_weights->const_data_ptr<T>() : nullptr) {}

  Bags<T, I> bags(const CollectionLookup& lookup, int64_t block_items = Bags<T, I>::kBlockItems) const {
    const int64_t padding = this->c.padding_idx[static_cast<size_t>(lookup.table)];
    return Bags<T, I>(this->ids, weights, padding, this->starts.data() + lookup.first_bag, lookup.bags, block_items);
  }

  // The most items that Bags puts into one block.
  int64_t block_items() const {
    int64_t most = std::min(Bags<T, I>::kBlockItems, this->starts[this->c.bags]);
    for (int64_t b = 0; b < this->c.bags; ++b) most = std::max(most, this->starts[b + 1] - this->starts[b]);
    return most;
  }

  const T* weights;
};

// Some bags of one lookup: one task of a parallel loop over all of them.
struct LookupPart {
  int64_t lookup;
  int64_t first, end;
};

// All lookups in parts, one lookup after the other also side by side: to return to a table costs more than to return to
// lines of the output, since a table's pages have to be looked up again.
template <class I>
std::vector<LookupPart> lookup_parts(const CollectionIds<I>& input, int64_t work, int64_t workers) {
  const Collection& c = input.c;
  const int64_t lookups = static_cast<int64_t>(c.lookups.size());
  std::vector<LookupPart> parts;
  for (int64_t l = 0; l < lookups; ++l) {
    const CollectionLookup& lookup = c.lookups[static_cast<size_t>(l)];
    // Of workers * 16 equal parts of the work, how many are this lookup's.
    const int64_t pieces = workers == 1 ? 1 : std::max<int64_t>(1, input.work(lookup) / (work / (workers * 16) + 1));
    const int64_t* starts = input.starts.data() + lookup.first_bag;
    const std::vector<int64_t> ranges =
        pieces == 1 ? std::vector<int64_t>{0, lookup.bags} : balanced_ranges(starts, lookup.bags, pieces);
    for (size_t range = 0; range + 1 < ranges.size(); ++range) parts.push_back({l, ranges[range], ranges[range + 1]});
  }
  return parts;
}

// Runs f(worker, part) over parts of all lookups; prepare(workers) comes before.
template <class I, class Prepare, class F>
void for_each_part(const CollectionIds<I>& input, const Prepare& prepare, const F& f) {
  int64_t work = 0;
  for (const CollectionLookup& lookup : input.c.lookups) work += input.work(lookup);
  const int64_t workers = workers_for(work);
  const std::vector<LookupPart> parts = lookup_parts(input, work, workers);
  prepare(workers);
  parallel_dynamic(static_cast<int64_t>(parts.size()), workers,
                   [&](int64_t worker, int64_t task) { f(worker, parts[static_cast<size_t>(task)]); });
}

// Tables as the kernels read them: contiguous copies of those that are not contiguous. weights must outlive this.
template <class T>
class TablePointers {
 public:
  explicit TablePointers(const std::vector<Tensor>& weights) {
    pointers_.reserve(weights.size());
    for (const Tensor& weight : weights) {
      const bool as_it_is = weight.is_contiguous();
      if (!as_it_is) copies_.push_back(torch::stable::contiguous(weight));
      const Tensor& table = as_it_is ? weight : copies_.back();
      pointers_.push_back(static_cast<const T*>(table.data_ptr()));
    }
  }
  const T* operator[](int64_t table) const { return pointers_[static_cast<size_t>(table)]; }

 private:
  std::vector<const T*> pointers_;
  std::vector<Tensor> copies_;
};

}  // namespace tsr
