// The bags of a pooled lookup on the CPU: checked block by block, and brought into the form the row loops take.
#pragma once
#include "bags.h"
#include "row_loops.h"

namespace tsr {

// One thread's arrays for one block of bags.
template <class T, class R>
struct BagScratch {
  BagScratch(int64_t items, bool with_positions);
  Buffer<R> rows;
  Buffer<acc_t<T>> weights;
  Buffer<int64_t> positions;
  Buffer<int64_t> starts;
  Buffer<acc_t<T>> divisors;
};

// Throws for what Bags::check reported: a bad index first, else a NaN weight.
void throw_bad_bags(const char* op, const Tensor& indices, int64_t num_embeddings, const FirstPosition& first_bad,
                    const FirstPosition& first_nan);

// Offsets, checked, with the last; without them every index is a bag of its own.
Buffer<int64_t> bag_starts(const char* op, const Tensor& indices, const std::optional<Tensor>& offsets,
                           bool include_last_offset = true);

template <class T, class I>
class Bags {
 public:
  using A = acc_t<T>;
  // The type under which the row loops read indices: ids are not negative once checked.
  using Row = std::conditional_t<std::is_same_v<I, int32_t>, uint32_t, int64_t>;
  static constexpr int64_t kBlockBags = 256;
  static constexpr int64_t kBlockItems = 4096;

  // indices and per_sample_weights must be contiguous and outlive this. Checks the offsets; without them each index is
  // its own bag. block_items: the most items a block should have.
  Bags(const char* op, const Tensor& indices, const std::optional<Tensor>& offsets,
       const std::optional<Tensor>& per_sample_weights, int64_t padding_idx, int64_t block_items = kBlockItems,
       bool include_last_offset = true);

  // The bags between starts [count + 1], which have been checked.
  Bags(const I* indices, const T* weights, int64_t padding_idx, Buffer<int64_t> starts, int64_t count,
       int64_t block_items = kBlockItems);

  // The bags between starts [count + 1], which have been checked and outlive this; items keep their positions in
  // indices.
  Bags(const I* indices, const T* weights, int64_t padding_idx, const int64_t* starts, int64_t count,
       int64_t block_items = kBlockItems)
      : indices_(indices),
        weights_(weights),
        padding_(padding_idx),
        block_items_(block_items),
        count_(count),
        offsets_(starts) {}

  int64_t count() const { return count_; }
  int64_t items() const { return offsets_[count_] - offsets_[0]; }
  const int64_t* offsets() const { return offsets_; }
  // The most items a block has that needs scratch memory; not of bags whose starts outlive this.
  int64_t scratch_items() const { return scratch_items_; }

  // A block begins at bag b and ends before `end`: some bags, with few items unless one bag alone has many.
  int64_t block_end(int64_t b, int64_t end) const;

  // Reports the first index outside [0, num_embeddings) that is not padding either, and the first NaN weight; false if
  // there was one.
  bool check(int64_t b, int64_t end, int64_t num_embeddings, FirstPosition& first_bad, FirstPosition& first_nan) const;

  // Bags [b, end) without their padding, with weights and divisors of the reduction. table, dim and out are left open.
  PoolArguments<T, Row> decode(int64_t b, int64_t end, Reduction reduction, BagScratch<T, Row>& scratch) const;

  // The coefficient of every item in its bag's result: w_i over the bag's denominator, 0 where that is 0.
  void coefficients(int64_t b, int64_t end, Reduction reduction, A* by_item) const;
  // The coefficient of a bag's items where no weights are given: one for a whole bag.
  A coefficient(int64_t b, Reduction reduction) const;

  bool weighted() const { return weights_ != nullptr; }
  bool is_padding(int64_t item) const { return static_cast<int64_t>(indices_[item]) == padding_; }
  A weight(int64_t item) const { return weights_ != nullptr ? static_cast<A>(weights_[item]) : A(1); }
  // What bag b's sum is divided by.
  A divisor(int64_t b, Reduction reduction) const { return divisor(b, reduction, padding_ >= 0); }

 private:
  // Whether any item of the bags [b, end), which have been checked, is padding.
  bool has_padding(int64_t b, int64_t end) const;
  // may_pad: whether items of the bag may be padding.
  A divisor(int64_t b, Reduction reduction, bool may_pad) const;

  const I* indices_;
  const T* weights_;
  int64_t padding_;
  int64_t block_items_;
  int64_t count_;
  Buffer<int64_t> own_offsets_;
  const int64_t* offsets_;
  int64_t scratch_items_ = 0;
};

// The threads that pooling the bags into rows of dim elements is worth.
template <class T, class I>
int64_t pool_workers(const Bags<T, I>& bags, int64_t dim) {
  return workers_for((bags.items() + bags.count()) * dim);
}

// Checks and decodes the bags [first, end), block by block: decodes a block into scratch, or finds it usable as it is,
// and hands it to pool_block(first bag, arguments), with table and out left open.
template <class T, class I, class F>
void for_each_block_of(const Bags<T, I>& bags, int64_t first, int64_t end, int64_t dim, int64_t num_embeddings,
                       Reduction reduction, bool stream, BagScratch<T, typename Bags<T, I>::Row>& scratch,
                       FirstPosition& first_bad, FirstPosition& first_nan, const F& pool_block) {
  const bool near = is_near(num_embeddings, dim * static_cast<int64_t>(sizeof(T)), bags.items());
  for (int64_t b = first, next; b < end; b = next) {
    next = bags.block_end(b, end);
    if (!bags.check(b, next, num_embeddings, first_bad, first_nan)) continue;  // an earlier offender may follow
    auto arguments = bags.decode(b, next, reduction, scratch);
    arguments.dim = dim;
    arguments.stream = stream;
    arguments.near = near;
    pool_block(b, arguments);
  }
}

// Checks and decodes all bags by several threads, and hands each block to pool_block(worker, first bag, arguments,
// scratch).
template <class T, class I, class F>
void for_each_block(const Bags<T, I>& bags, int64_t dim, int64_t num_embeddings, Reduction reduction,
                    FirstPosition& first_bad, FirstPosition& first_nan, const F& pool_block) {
  using R = typename Bags<T, I>::Row;
  const int64_t workers = pool_workers(bags, dim), tasks = workers == 1 ? 1 : workers * 16;
  const std::vector<int64_t> ranges = balanced_ranges(bags.offsets(), bags.count(), tasks);
  std::vector<BagScratch<T, R>> scratch;
  for (int64_t worker = 0; worker < workers; ++worker) {
    scratch.emplace_back(bags.scratch_items(), is_extreme(reduction));
  }
  const bool stream = bags.count() * dim * static_cast<int64_t>(sizeof(T)) >= kLargeBytes;
  parallel_dynamic(tasks, workers, [&](int64_t worker, int64_t task) {
    BagScratch<T, R>& mine = scratch[static_cast<size_t>(worker)];
    for_each_block_of(bags, ranges[static_cast<size_t>(task)], ranges[static_cast<size_t>(task + 1)], dim,
                      num_embeddings, reduction, stream, mine, first_bad, first_nan,
                      [&](int64_t b, const PoolArguments<T, R>& arguments) { pool_block(worker, b, arguments, mine); });
  });
}

}  // namespace tsr
