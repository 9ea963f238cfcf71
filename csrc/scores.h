// scores: blocks of the scores of N samples, [N, C]: those of rows first_row to first_row + C - 1 of a table, as passes
// over a large table meet them. A softmax over all rows is made of them without all scores ever being there.
//
// scores_targets(target [N], rows, ignore_index, excluded) -> [N] int64: target, and -1 where it is ignore_index.
//   excluded: an error calls them by that name.
// scores_exclude_(scores, row_ids [E], samples [E], first_row): scores[samples[e], row_ids[e] - first_row] = -inf for
//   the ids of the block's rows. row_ids ascend.
// scores_lse_(scores, target [N], first_row, maximum [N], sum [N], own [N]): takes a block into the running logarithm
//   of the sum of exponentials, maximum + log(sum):
//     top = max(maximum, max over c of scores); sum = sum * exp(maximum - top) + sum over c of exp(scores - top);
//     maximum = top; own[n] = scores[n, target[n] - first_row] if the target is among the rows.
//   Begin with maximum -inf and sum 0.
// scores_softmax_(scores, maximum [N], target [N], first_row, factor [N], own_factor [N]): writes over scores
//     exp(scores - maximum) * factor, to which the target's adds own_factor.
// scores_top_k_(scores, first_row, values [N, k], rows [N, k]): merges a block into the k best scores so far and their
//   rows. The higher score is the better one, NaN the highest; of equal ones the lower row. They are in order, the best
//   first. Blocks may come in any order, but no row twice. Begin with values -inf and rows -1: what is left of them is
//   no row, and neither is a score of -inf.
// * scores, maximum, own, values and the factors are float32 or float64, all the same; sum is float64; row_ids, samples,
//   targets and rows are int64. What is written is contiguous. A target of -1 is in no block.
// * Where all scores so far are -inf, maximum is, and sum is 0. A NaN, or an infinity that is not -inf, makes sum and
//   maximum of its sample NaN.
// * float32: exp is right to 2 units in the last place, and 0 below exp(-87). Of a sample exponentials are added in
//   float32 in 32 lanes by turns, those of 1,024 columns at a time, and these sums in float64.
// * Errors: IndexError for a target outside [0, rows) that is not ignore_index, and a sample outside [0, N); ValueError
//   for shapes and dtypes. Determinism: the same bits on any number of threads and on every instruction set of the CPU.
// * Not differentiable.
// Source: the softmax of Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
#pragma once
#include <limits>

#include "checks.h"
#include "shared_memory.h"

namespace tsr {

// Columns whose exponentials are added before float64 takes them, and the lanes that add them.
constexpr int64_t kScoresTile = 1024;
constexpr int kScoresLanes = 32;

inline void check_scores_targets(const Tensor& target, int64_t rows) {
  const char* op = "scores_targets";
  check_vector(op, "target", target);
  check_index_dtype(op, "target", target);
  check_count(op, "rows", rows);
}

// Of a target, or of what is excluded; the losses that meet it have several names.
inline std::string bad_target(const char* argument, int64_t position, int64_t value, int64_t rows, int64_t ignore_index,
                              bool excluded) {
  return message("scores_targets: ", argument, "[", position, "] must be in [0, ", rows, ")",
                 excluded ? " or " : " or ignore_index, ", ignore_index, ", got ", value);
}

// What one number of every sample is.
inline void check_of_samples(const char* op, const char* argument, const Tensor& x, const Tensor& scores,
                             ScalarType dtype) {
  TSR_CHECK_VALUE(x.dim() == 1 && x.size(0) == scores.size(0) && x.scalar_type() == dtype, op, ": ", argument,
                  " must be ", dtype_name(dtype), " of shape [", scores.size(0), "], as scores, got ",
                  dtype_name(x.scalar_type()), " of shape ", shape_text(x));
  check_same_device(op, argument, x, "scores", scores);
}

inline void check_block(const char* op, const Tensor& scores, int64_t first_row) {
  TSR_CHECK_VALUE(scores.dim() == 2, op, ": scores must have rank 2, got shape ", shape_text(scores));
  TSR_CHECK_VALUE(scores.scalar_type() == ScalarType::Float || scores.scalar_type() == ScalarType::Double, op,
                  ": scores must be float32 or float64, got ", dtype_name(scores.scalar_type()));
  TSR_CHECK_VALUE(first_row >= 0 && first_row <= INT64_MAX - scores.size(1), op,
                  ": first_row and the number of columns must be in [0, 2^63), also together, got ", first_row, " and ",
                  scores.size(1));
}

inline void check_contiguous(const char* op, const char* argument, const Tensor& x) {
  TSR_CHECK_VALUE(x.is_contiguous(), op, ": ", argument, " must be contiguous, as it is written in place, got strides ",
                  strides_text(x));
}

inline void check_scores_exclude(const Tensor& scores, const Tensor& row_ids, const Tensor& samples,
                                 int64_t first_row) {
  const char* op = "scores_exclude_";
  check_block(op, scores, first_row);
  check_contiguous(op, "scores", scores);
  for (const auto& [argument, x] : {std::pair{"row_ids", &row_ids}, std::pair{"samples", &samples}}) {
    TSR_CHECK_VALUE(x->dim() == 1 && x->size(0) == row_ids.size(0) && x->scalar_type() == ScalarType::Long, op, ": ",
                    argument, " must be Long of shape [", row_ids.size(0), "], got ", dtype_name(x->scalar_type()),
                    " of shape ", shape_text(*x));
    check_same_device(op, argument, *x, "scores", scores);
  }
  CallMemory memory;
  memory.add_written({"scores"}, scores);
  memory.add_read({"row_ids"}, row_ids);
  memory.add_read({"samples"}, samples);
  memory.check(op);
}

inline void check_scores_lse(const Tensor& scores, const Tensor& target, int64_t first_row, const Tensor& maximum,
                             const Tensor& sum, const Tensor& own) {
  const char* op = "scores_lse_";
  check_block(op, scores, first_row);
  check_of_samples(op, "target", target, scores, ScalarType::Long);
  check_of_samples(op, "maximum", maximum, scores, scores.scalar_type());
  check_of_samples(op, "sum", sum, scores, ScalarType::Double);
  check_of_samples(op, "own", own, scores, scores.scalar_type());
  check_contiguous(op, "maximum", maximum);
  check_contiguous(op, "sum", sum);
  check_contiguous(op, "own", own);
  CallMemory memory;
  memory.add_read({"scores"}, scores);
  memory.add_read({"target"}, target);
  memory.add_written({"maximum"}, maximum);
  memory.add_written({"sum"}, sum);
  memory.add_written({"own"}, own);
  memory.check(op);
}

inline void check_scores_softmax(const Tensor& scores, const Tensor& maximum, const Tensor& target, int64_t first_row,
                                 const Tensor& factor, const Tensor& own_factor) {
  const char* op = "scores_softmax_";
  check_block(op, scores, first_row);
  check_contiguous(op, "scores", scores);
  check_of_samples(op, "maximum", maximum, scores, scores.scalar_type());
  check_of_samples(op, "target", target, scores, ScalarType::Long);
  check_of_samples(op, "factor", factor, scores, scores.scalar_type());
  check_of_samples(op, "own_factor", own_factor, scores, scores.scalar_type());
  CallMemory memory;
  memory.add_written({"scores"}, scores);
  memory.add_read({"maximum"}, maximum);
  memory.add_read({"target"}, target);
  memory.add_read({"factor"}, factor);
  memory.add_read({"own_factor"}, own_factor);
  memory.check(op);
}

inline void check_scores_top_k(const Tensor& scores, int64_t first_row, const Tensor& values, const Tensor& rows) {
  const char* op = "scores_top_k_";
  check_block(op, scores, first_row);
  TSR_CHECK_VALUE(values.dim() == 2 && values.size(0) == scores.size(0) && values.scalar_type() == scores.scalar_type(),
                  op, ": values must be ", dtype_name(scores.scalar_type()), " of shape [", scores.size(0),
                  ", k], as scores, got ", dtype_name(values.scalar_type()), " of shape ", shape_text(values));
  TSR_CHECK_VALUE(rows.dim() == 2 && rows.size(0) == values.size(0) && rows.size(1) == values.size(1) &&
                      rows.scalar_type() == ScalarType::Long,
                  op, ": rows must be Long of shape ", shape_text(values), ", as values, got ",
                  dtype_name(rows.scalar_type()), " of shape ", shape_text(rows));
  CallMemory memory;
  memory.add_read({"scores"}, scores);
  for (const auto& [argument, x] : {std::pair{"values", &values}, std::pair{"rows", &rows}}) {
    check_same_device(op, argument, *x, "scores", scores);
    check_contiguous(op, argument, *x);
    memory.add_written({argument}, *x);
  }
  memory.check(op);
}

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

TSR_HOST_DEVICE inline bool is_in_block(int64_t row, int64_t first_row, int64_t columns) {
  return row >= first_row && row - first_row < columns;
}

// What exp is taken relative to: scores that are all -inf stay so.
template <class T>
TSR_HOST_DEVICE T base_of(T maximum) {
  return maximum == -std::numeric_limits<T>::infinity() ? T(0) : maximum;
}

// Whether a row's score comes before another's: never -inf before the -inf of no row, -1.
template <class T>
TSR_HOST_DEVICE bool is_better(T score, int64_t row, T other, int64_t other_row) {
  const bool is_nan = score != score, other_is_nan = other != other;
  return score > other || (is_nan && !other_is_nan) ||
         ((score == other || (is_nan && other_is_nan)) && row < other_row);
}

}  // namespace tsr
