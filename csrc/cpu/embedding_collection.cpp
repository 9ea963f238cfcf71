// Lookups of many features in many tables.
#include "../embedding_collection.h"

#include "collection.h"
#include "row_loops.h"

namespace tsr {
namespace {

struct PooledOutput {
  Tensor output, argmax;
};

PooledOutput new_output(const Collection& c, const Tensor& like) {
  return {new_empty(like, c.output_shape, like.scalar_type()), new_empty(like, {c.argmax_elements}, ScalarType::Long)};
}

// Pools all lookups in tables as they are.
template <class T, class I>
void pool_lookups(const CollectionInput<T, I>& input, const TablePointers<T>& tables, T* out, int64_t* argmax,
                  FirstPosition& first_bad, FirstPosition& first_nan) {
  using R = typename Bags<T, I>::Row;
  const Collection& c = input.c;
  const RowLoops<T, R>& loops = row_loops<T, R>();
  const bool stream = c.output_elements * static_cast<int64_t>(sizeof(T)) >= kLargeBytes;
  std::vector<BagScratch<T, R>> scratch;
  const auto prepare = [&](int64_t workers) {
    const int64_t items = input.block_items();
    for (int64_t worker = 0; worker < workers; ++worker) scratch.emplace_back(items, c.has_max);
  };
  for_each_part(input, prepare, [&, out, argmax, stream](int64_t worker, const LookupPart& part) {
    const CollectionLookup& lookup = c.lookups[static_cast<size_t>(part.lookup)];
    BagScratch<T, R>& mine = scratch[static_cast<size_t>(worker)];
    for_each_block_of(input.bags(lookup), part.first, part.end, lookup.dim,
                      c.num_embeddings[static_cast<size_t>(lookup.table)], lookup.mode, stream, mine, first_bad,
                      first_nan, [&](int64_t b, PoolArguments<T, R> arguments) {
                        arguments.table = tables[lookup.table];
                        arguments.out = out + lookup.output + b * lookup.stride;
                        arguments.out_stride = lookup.stride;
                        if (lookup.mode == Reduction::kMax) {
                          loops.pool_max(arguments, mine.positions.data(), argmax + lookup.argmax + b * lookup.dim);
                        } else {
                          loops.pool(arguments);
                        }
                      });
  });
}

}  // namespace

std::tuple<Tensor, Tensor> embedding_collection_cpu(
    const std::vector<Tensor>& weights, const Tensor& indices_, const std::optional<Tensor>& offsets,
    const std::optional<Tensor>& per_sample_weights_, const std::vector<int64_t>& tables,
    const std::vector<int64_t>& keys, const std::vector<int64_t>& modes, const std::vector<int64_t>& bags,
    const std::vector<int64_t>& padding_idx, bool side_by_side, bool) {
  const Collection c = check_embedding_collection("embedding_collection", weights, indices_, offsets,
                                                  per_sample_weights_,
                                                  {tables, keys, modes, bags, padding_idx, side_by_side});
  const Tensor indices = as_contiguous(indices_);
  const std::optional<Tensor> per_sample_weights = as_contiguous(per_sample_weights_);
  const auto [output, argmax] = new_output(c, weights[0]);
  const Tensor out = output, winners = argmax;  // C++17 lambdas cannot capture structured bindings
  dispatch_float(out.scalar_type(), c.op, "weights", [&](auto value_tag) {
    using T = typename decltype(value_tag)::type;
    dispatch_index(indices.scalar_type(), c.op, "indices", [&](auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const CollectionInput<T, I> input(c, indices, offsets, per_sample_weights);
      FirstPosition first_bad, first_nan;
      pool_lookups<T, I>(input, TablePointers<T>(weights), out.mutable_data_ptr<T>(),
                         winners.mutable_data_ptr<int64_t>(), first_bad, first_nan);
      input.throw_if(first_bad, first_nan);
    });
  });
  return {out, winners};
}

}  // namespace tsr

STABLE_TORCH_LIBRARY_IMPL(torchsparse_rec, CPU, m) { TSR_IMPL(m, "embedding_collection", &tsr::embedding_collection_cpu); }
