// candidates: ids drawn as the other classes of a sampled loss, and how often each is expected in such a draw. CPU only:
// one draw depends on the one before it, and a batch has a thousand of them.
//
// candidates_(generator int64 [3], counts int32 [V + 1]?, unigrams 4 tensors or none, true_classes [...], range_max,
//             num_sampled, unique, kind)
//     -> (sampled int64 [num_sampled], true_count float32 [...], sampled_count float32 [num_sampled]):
//   ids of [0, range_max), in the order in which they are drawn. kind says with which probability p id v is:
//     0 uniform: 1 / range_max. 1 log-uniform: log((v + 2) / (v + 1)) / log(range_max + 1).
//     2 fixed: weights[v] / total, of unigrams = (weights [V], chances [V], aliases [V], total [1]), which
//       candidates_unigrams has made. 3 learned: c(v) / sum of c, where c(v) is 1 and how often v was among the
//       true_classes of earlier calls. counts is the binary indexed tree of c: counts[i] is the sum of the lowest bit of
//       i many c, those before id i; counts[0] is the sum of all.
//     4 all: every id once, in order, num_sampled being range_max; all counts are 1.
//   * The counts are those of true_classes and of sampled: p * num_sampled; with unique, where a draw of an id that is
//     there is drawn again, 1 - (1 - p)^n, n the number of draws. They are 0 where p is.
//   * generator is (seed, seed2, place): words 4 * place and on of Philox 4x32-10 with key seed, of whose counter seed2
//     is the upper half. A call adds (2048 * num_sampled + 3) / 4 to place, however many words it has used. Kind 3 adds
//     the true_classes to counts, until the sum is 2^31 - 1. What is written is contiguous.
//   * range_max is V for kinds 2 and 3, and at most 2^62. true_classes are int32 or int64, of any shape, also empty.
// candidates_unigrams(unigrams float32 [n], reserved, distortion)
//     -> (weights float32 [V], chances float32 [V], aliases int32 [V], total float32 [1]), V = reserved + n:
//   weights: zeros for the first reserved ids, then unigrams^distortion. total: their sum, added in float32, in order.
//   chances and aliases: Walker's. Of V ids drawn alike, v stays v with probability chances[v], else it is aliases[v].
//
// Errors: IndexError for a true class outside [0, range_max). ValueError for shapes and dtypes, and where unique ids are
// asked for and there are fewer, or fewer whose weights are not zero. Nothing is written then.
// Not differentiable. Deterministic: the bits are TensorFlow's, with the same C library.
// Source: tensorflow/core/kernels/{candidate_sampler_ops,range_sampler}.cc, core/lib/random/{philox_random.h,
// simple_philox.cc,distribution_sampler.cc,weighted_picker.cc}; Salmon et al., https://doi.org/10.1145/2063384.2063405;
// Walker, https://doi.org/10.1145/355744.355749; Fenwick, https://doi.org/10.1002/spe.4380240306.
#pragma once
#include <cmath>
#include <vector>

#include "checks.h"
#include "shared_memory.h"

namespace tsr {

// The values of `kind` in the schema; torchsparse_rec/ops/candidates.py has them too.
enum class CandidateKind : int64_t { kUniform = 0, kLogUniform = 1, kFixed = 2, kLearned = 3, kAll = 4 };

// Larger ids would not all be doubles' or int64's after a logarithm and back.
constexpr int64_t kMostCandidates = int64_t{1} << 62;
// Weights are drawn by 32 bits, and a draw has a number of int32.
constexpr int64_t kMostWeighted = INT32_MAX;
// A place that leaves room for every draw.
constexpr int64_t kLastPlace = int64_t{1} << 62;

// By how much a call moves the place, which counts 128 bits.
inline int64_t places_of(int64_t num_sampled) { return (2048 * num_sampled + 3) / 4; }

// One of the vectors of a call.
inline void check_per_id(const char* argument, const Tensor& x, ScalarType dtype, int64_t size) {
  TSR_CHECK_VALUE(x.dim() == 1 && x.size(0) == size && x.scalar_type() == dtype, "candidates_: ", argument, " must be ",
                  dtype_name(dtype), " of shape [", size, "], got ", dtype_name(x.scalar_type()), " of shape ",
                  shape_text(x));
}

inline void check_unigrams_of(const std::vector<Tensor>& unigrams, int64_t range_max) {
  TSR_CHECK_VALUE(unigrams.size() == 4, "candidates_: unigrams must be weights, chances, aliases and total, got ",
                  unigrams.size(), " tensors");
  check_per_id("unigrams[0]", unigrams[0], ScalarType::Float, range_max);
  check_per_id("unigrams[1]", unigrams[1], ScalarType::Float, range_max);
  check_per_id("unigrams[2]", unigrams[2], ScalarType::Int, range_max);
  check_per_id("unigrams[3]", unigrams[3], ScalarType::Float, 1);
}

inline void check_counts_of(const Tensor& counts, int64_t range_max) {
  check_per_id("counts", counts, ScalarType::Int, range_max + 1);
  TSR_CHECK_VALUE(counts.is_contiguous(), "candidates_: counts must be contiguous, as they are written in place");
}

inline CandidateKind check_candidates(const Tensor& generator, const std::optional<Tensor>& counts,
                                      const std::vector<Tensor>& unigrams, const Tensor& true_classes,
                                      int64_t range_max, int64_t num_sampled, bool unique, int64_t kind_number) {
  const char* op = "candidates_";
  TSR_CHECK_VALUE(kind_number >= 0 && kind_number <= static_cast<int64_t>(CandidateKind::kAll), op,
                  ": kind must be in [0, 4], got ", kind_number);
  const CandidateKind kind = static_cast<CandidateKind>(kind_number);
  const bool fixed = kind == CandidateKind::kFixed, learned = kind == CandidateKind::kLearned;
  const int64_t most = fixed || learned ? kMostWeighted : kMostCandidates;
  TSR_CHECK_VALUE(range_max >= 1 && range_max <= most, op, ": range_max must be in [1, ", most, "], got ", range_max);
  TSR_CHECK_VALUE(num_sampled >= 1 && num_sampled <= kMostWeighted, op, ": num_sampled must be in [1, ", kMostWeighted,
                  "], got ", num_sampled);
  TSR_CHECK_VALUE(!unique || num_sampled <= range_max, op, ": num_sampled must be at most range_max, ", range_max,
                  ", as ids are unique, got ", num_sampled);
  TSR_CHECK_VALUE(kind != CandidateKind::kAll || num_sampled == range_max, op, ": num_sampled must be range_max, ",
                  range_max, ", as all ids are drawn, got ", num_sampled);
  check_index_dtype(op, "true_classes", true_classes);
  check_per_id("generator", generator, ScalarType::Long, 3);
  TSR_CHECK_VALUE(generator.is_contiguous(), op, ": generator must be contiguous, as it is written in place");
  TSR_CHECK_VALUE(counts.has_value() == learned, op, ": counts must be given for kind 3 alone, got kind ", kind_number,
                  learned ? " without them" : " with them");
  TSR_CHECK_VALUE(fixed || unigrams.empty(), op, ": unigrams must be given for kind 2 alone, got kind ", kind_number);
  if (fixed) check_unigrams_of(unigrams, range_max);
  if (learned) check_counts_of(*counts, range_max);
  CallMemory memory;
  memory.add_written({"generator"}, generator);
  if (counts) memory.add_written({"counts"}, *counts);
  memory.add_read("unigrams", unigrams);
  memory.add_read({"true_classes"}, true_classes);
  memory.check(op);
  const int64_t place = generator.const_data_ptr<int64_t>()[2];
  TSR_CHECK_VALUE(place >= 0 && place <= kLastPlace, op, ": generator must have a place in [0, 2^62] at position 2, ",
                  "got ", place);
  if (learned) {
    const int64_t total = *counts->const_data_ptr<int32_t>();
    TSR_CHECK_VALUE(total >= range_max, op, ": counts must begin with their sum, at least ", range_max, ", got ",
                    total);
  }
  return kind;
}

inline void check_candidates_unigrams(const Tensor& unigrams, int64_t reserved) {
  const char* op = "candidates_unigrams";
  check_vector(op, "unigrams", unigrams);
  TSR_CHECK_VALUE(unigrams.scalar_type() == ScalarType::Float, op, ": unigrams must be float32, got ",
                  dtype_name(unigrams.scalar_type()));
  const int64_t most = kMostWeighted - unigrams.size(0);
  TSR_CHECK_VALUE(reserved >= 0 && reserved <= most, op, ": reserved must be in [0, ", most, "], got ", reserved);
}

}  // namespace tsr
