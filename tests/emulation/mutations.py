"""
The faults that ``make mutate`` plants in the CUDA kernels, one at a time; each must turn the emulated tests red.

Every ``.cu`` file has at least two kinds of them. A test of the ordinary suite asserts that each text is where it is
said to be: whoever changes a line changes its entry.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

CUDA = Path(__file__).resolve().parents[2] / "csrc/cuda"
KINDS = ("sign", "bound", "step")


class Mutation(NamedTuple):
    """A text that ``file`` of csrc/cuda has once, what replaces it, and the tests (pytest's -k) that must notice."""

    file: str
    kind: Literal["sign", "bound", "step"]  # a changed sign, order or choice; a moved bound; a dropped step
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation("bags.cu", "bound", "offset < given[b - 1]", "offset <= given[b - 1]", "embedding_bag"),
    Mutation("bags.cu", "bound", "b == bags && offset", "b > bags && offset", "recorded"),
    Mutation("bags.cu", "sign", "bags[i] = bag_of(i)", "bags[i] = -bag_of(i)", "weights_backward"),
    Mutation("embedding.cu", "bound", "bad >= rows", "bad > rows", "recorded"),
    Mutation("embedding.cu", "step", "      any_bad = any_bad || !in_range;\n", "", "recorded"),
    Mutation("embedding.cu", "bound", "tile.column < units)", "tile.column <= units)", "embedding and not bag"),
    Mutation("embedding.cu", "step", "+ kRowsInFlight - 1) / kRows", ") / kRows", "lookups"),
    Mutation("embedding_backward.cu", "sign", "with_row - prod", "with_row + prod", "weights_backward"),
    Mutation("embedding_backward.cu", "bound", "int step = lanes / 2;", "int step = lanes / 4;", "weights_backward"),
    Mutation("embedding_backward.cu", "step", "A(0) : weight / divisor", "A(0) : weight", "gradients_of_bags"),
    Mutation("embedding_backward.cu", "sign", "Divisor::kCount : ", "Divisor::kOne : ", "dense_backward"),
    Mutation("errors.cu", "step", "    r->first = kNoError;\n", "", "recorded"),
    Mutation("errors.cu", "bound", "(uint64_t{1} << kPositionBits) - 1", "(uint64_t{1} << 2) - 1", "recorded"),
    Mutation("errors.cu", "sign", 'must not decrease, got ", e.bound', 'must not decrease, got ", e.value', "recorded"),
    Mutation("hash.cu", "sign", "below_zero ? 0 - word : word", "below_zero ? word : word", "to_hash_bucket_strong"),
    Mutation("hash.cu", "bound", "n >= 4) return farm", "n > 4) return farm", "to_hash_bucket"),
    Mutation("hash.cu", "sign", "negative ? 0 - bits : bits", "negative ? bits : bits", "to_hash_bucket"),
    Mutation("hash.cu", "step", "    v -= divisor;\n    ++quotient;\n", "", "hash"),
    Mutation("hash_cross.cu", "bound", "rows + 1, i + 1) - 1", "rows + 1, i) - 1", "cross_hashed"),
    Mutation("hash_cross.cu", "sign", "number -= place * inner", "number += place * inner", "cross_hashed"),
    Mutation("hash_cross.cu", "step", "counts[row] = valid ? count : 0", "counts[row] = count", "column_offsets"),
    Mutation("hash_strings.cu", "bound", "end <= size;", "end < size;", "string_to_hash"),
    Mutation("hash_strings.cu", "step", "(offset_ + n) % 4}; }", "offset_}; }", "string_to_hash"),
    Mutation("pool_max.cu", "sign", "offered > value[c]", "offered < value[c]", "pooled_bags and max"),
    Mutation("pool_max.cu", "sign", "winners[c] != p", "winners[c] == p", "gradients_of_bags and max"),
    Mutation("pool_max.cu", "bound", "later.winner[c] >= 0", "later.winner[c] > 0", "pooled_bags and max"),
    Mutation("pool_max.cu", "step", "      winner[c] = j;\n", "", "pooled_bags and max"),
    Mutation("pool_plan.cu", "bound", "begin + k * kPiece", "begin + k * (kPiece - 1)", "pooled_bags"),
    Mutation("pool_plan.cu", "sign", "end - begin <= kEnt", "end - begin >= kEnt", "pooled_bags"),
    Mutation("pool_plan.cu", "step", "    plan.found[3] = 1;\n", "", "offsets_without_sense"),
    Mutation("pool_rows.cu", "sign", "!= nullptr || pooling.scales !=", "== nullptr || pooling.scales !=", "pooled"),
    Mutation(
        "pool_rows.cu",
        "step",
        "  if (pooling.weights != nullptr) return pool_weighted_rows(call, pooling);\n",
        "",
        "pooled",
    ),
    Mutation("pool_scaled.cu", "sign", "+= entry.scale *", "-= entry.scale *", "gradients_of_bags"),
    Mutation(
        "pool_scaled.cu", "sign", "!= nullptr ? p.coefficients", "== nullptr ? p.coefficients", "gradients_of_bags"
    ),
    Mutation("pool_scaled.cu", "step", "    ++this->count;\n", "", "gradients_of_bags"),
    Mutation("pool_weighted.cu", "sign", "value[c] += entry.weight *", "value[c] -= entry.weight *", "pooled"),
    Mutation("pool_weighted.cu", "sign", "squares += weight * weight;", "squares += weight;", "pooled and sqrtn"),
    Mutation("pool_weighted.cu", "step", "    weights.merge(later.weights);\n", "", "pooled and mean"),
    Mutation("pool_weighted.cu", "bound", "(pooling.bags);", "(pooling.bags - 1);", "gradients_of"),
    Mutation("primitives.cu", "sign", "cuda::std::plus<int64_t>", "cuda::std::minus<int64_t>", "unique"),
    Mutation("primitives.cu", "bound", "int64_t{0}, n + 1", "int64_t{0}, n", "unique"),
    Mutation("primitives.cu", "bound", "n, 0, bits", "n, 0, bits - 1", "segment and grad"),
    Mutation("primitives.cu", "step", "{keys.Current(),", "{from.keys,", "segment and grad"),
    Mutation("primitives.cu", "sign", "!= keys[j - 1]", "== keys[j - 1]", "grad_v2"),
    Mutation(
        "row_groups.cu",
        "bound",
        "write_offsets(keys, entries, rows, ",
        "write_offsets(keys, entries, rows - 1, ",
        "reduce_grad",
    ),
    Mutation("row_groups.cu", "step", 'have entries") - 1', 'have entries")', "grad_v2"),
    Mutation("row_groups.cu", "sign", "keys[present.offsets[r]]", "keys[present.offsets[0]]", "grad_v2"),
    Mutation("segment.cu", "bound", "id < segment_ids[i - 1]", "id <= segment_ids[i - 1]", "segment"),
    Mutation("segment.cu", "sign", "A(1) / (reduction", "A(-1) / (reduction", "reduce_grad"),
    Mutation("segment.cu", "bound", "entries, segments, offsets);", "entries, segments - 1, offsets);", "segment"),
    Mutation("segment.cu", "bound", "begin_lanes >> (lane + 1)", "begin_lanes >> (lane + 2)", "gradients_of_segments"),
    Mutation("segment.cu", "step", "n : sqrt(n)", "n : n", "reduce_grad"),
    Mutation(
        "unique.cu", "sign", "if (found > entry) found = atomicMin", "if (found < entry) found = atomicMin", "unique"
    ),
    Mutation("unique.cu", "bound", "number[k] >= kCounters", "number[k] > kCounters", "with_counts"),
    Mutation(
        "unique.cu",
        "step",
        "  __syncthreads();\n  for (int64_t c = threadIdx.x; c < kCounters; c += kThreads) {\n",
        "  for (int64_t c = threadIdx.x; c < kCounters; c += kThreads) {\n",
        "with_counts",
    ),
    Mutation("unique.cu", "step", "counters[c] = 0;\n  __syncthreads();", "counters[c] = 0;", "with_counts"),
]


def problems() -> list[str]:
    """What is wrong with the table: texts that are not there once, files with too few kinds of faults."""
    found = []
    for m in MUTATIONS:
        path = CUDA / m.file
        times = path.read_text().count(m.old) if path.exists() else 0
        if times != 1:
            found.append(f"{m.file} must have {m.old!r} once, has it {times} times")
    kinds = Counter(file for file, _ in {(m.file, m.kind) for m in MUTATIONS})
    for path in sorted(CUDA.glob("*.cu")):
        if kinds[path.name] < 2:
            found.append(f"{path.name} has {kinds[path.name]} kinds of faults, at least 2 of {KINDS} are wanted")
    return found
