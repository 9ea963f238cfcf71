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
    Mutation("bags.cu", "sign", "++count;", "--count;", "dense_backward"),
    Mutation("bags.cu", "step", "weights[i] * weights[i]", "weights[i]", "weights_backward"),
    Mutation("bags.cu", "bound", "b == bags && offset", "b > bags && offset", "recorded"),
    Mutation("embedding.cu", "bound", "index < rows;", "index <= rows;", "recorded"),
    Mutation("embedding.cu", "sign", "value > best", "value < best", "embedding_bag"),
    Mutation("embedding.cu", "step", "        winner = i;\n", "", "embedding_bag"),
    Mutation("embedding_backward.cu", "sign", "with_row - with_output", "with_row + with_output", "weights_backward"),
    Mutation("embedding_backward.cu", "bound", "int step = lanes / 2;", "int step = lanes / 4;", "weights_backward"),
    Mutation("embedding_backward.cu", "sign", "sum += static_cast", "sum -= static_cast", "dense_backward"),
    Mutation("embedding_backward.cu", "step", "weight / divisor;", "weight;", "dense_backward"),
    Mutation("errors.cu", "step", "  r->key = kNoError;\n", "", "recorded"),
    Mutation("errors.cu", "bound", "(uint64_t{1} << kPositionBits) - 1", "(uint64_t{1} << 2) - 1", "recorded"),
    Mutation("errors.cu", "sign", 'must not decrease, got ", e.bound', 'must not decrease, got ", e.value', "recorded"),
    Mutation("hash.cu", "bound", "end <= size;", "end < size;", "string_to_hash"),
    Mutation("hash.cu", "sign", "fingerprint64_of_decimal(x[i])", "fingerprint64_of_decimal(-x[i])", "to_hash_bucket"),
    Mutation(
        "hash.cu", "step", "BucketRemainder(num_buckets), static_cast", "BucketRemainder(1), static_cast", "to_hash"
    ),
    Mutation("pool.cu", "sign", "total.sum[c] += weight *", "total.sum[c] -= weight *", "segment"),
    Mutation("pool.cu", "bound", "entry.index < p.rows && entry.index != ", "entry.index != ", "recorded"),
    Mutation("pool.cu", "bound", "begin + k * kPiece", "begin + k * (kPiece - 1)", "long or popular"),
    Mutation("pool.cu", "step", "      total.count += all.pieces[k].count;\n", "", "long"),
    Mutation("primitives.cu", "sign", "cuda::std::plus<int64_t>", "cuda::std::minus<int64_t>", "unique"),
    Mutation("primitives.cu", "bound", "int64_t{0}, n + 1", "int64_t{0}, n", "unique"),
    Mutation("primitives.cu", "bound", "n, 0, bits", "n, 0, bits - 1", "segment and grad"),
    Mutation("primitives.cu", "step", "{keys.Current(),", "{from.keys,", "segment and grad"),
    Mutation("row_groups.cu", "bound", "row <= rows; row +=", "row < rows; row +=", "reduce_grad"),
    Mutation("row_groups.cu", "sign", "index != padding_idx ?", "index == padding_idx ?", "dense_backward"),
    Mutation("row_groups.cu", "sign", "key != keys[j - 1]", "key == keys[j - 1]", "grad_v2"),
    Mutation("row_groups.cu", "step", "  while (bits < 64 && (rows >> bits) != 0) ++bits;\n", "", "grad_v2"),
    Mutation("segment.cu", "bound", "id < segment_ids[i - 1]", "id <= segment_ids[i - 1]", "segment"),
    Mutation("segment.cu", "sign", "A(1) / (reduction", "A(-1) / (reduction", "reduce_grad"),
    Mutation("segment.cu", "bound", "s <= segments; s +=", "s < segments; s +=", "segment"),
    Mutation("segment.cu", "step", "n : sqrt(n)", "n : n", "reduce_grad"),
    Mutation("unique.cu", "sign", "atomicMin(&table.first[slot]", "atomicMax(&table.first[slot]", "unique"),
    Mutation("unique.cu", "bound", "capacity < 2 * n", "capacity < n / 2", "unique"),
    Mutation(
        "unique.cu", "step", "if (counts != nullptr) atomicAdd", "if (counts == nullptr) atomicAdd", "with_counts"
    ),
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
