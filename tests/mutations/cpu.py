"""
The faults that ``make mutate`` plants in the CPU's kernels, one at a time; each must turn the family's tests red.

Several show only where two threads share the work, or beyond a block's end: there kernels go wrong most. They lie in
sources that few objects include, since a fault costs the compilation of these objects.
"""

from __future__ import annotations

from .mutation import Mutation, Table

KINDS = ("sign", "bound", "step", "race")  # as in cuda.py; threads that write the same

FAULTS = {
    "sparse_segment.cpp": [
        (
            "race",
            "__atomic_fetch_add(count + from[i], run - i, __ATOMIC_RELAXED);",
            "count[from[i]] += run - i;",
            "sparse_segment",
        )
    ],
    "bags.cpp": [
        ("step", "      while (begin < end && end < n && ids[end] == ids[end - 1]) ++end;\n", "", "sparse_segment"),
        ("bound", ": items < starts[given - 1]", ": items + 1 < starts[given - 1]", "nn"),
    ],
    "segment_body.h": [("sign", "ties - (x == best);", "ties + (x == best);", "segment")],
    "unique_hashed.h": [("bound", "first >= starts[p] ?", "first > starts[p] ?", "unique")],
    "unique_direct.h": [
        (
            "step",
            "counts_.data()[owner] += counts_.data()[entry];",
            "counts_.data()[owner] = counts_.data()[entry];",
            "unique",
        )
    ],
    "hash_string_loops.h": [("bound", "lanes_below(splat(32), s", "lanes_below(splat(33), s", "hash")],
    "sparse_tensor_rows.cpp": [("bound", "0 : rows[begin - 1] + 1, 0}", "0 : rows[begin - 1], 0}", "sparse_tensor")],
    "sparse_tensor_order.cpp": [("bound", "end = part == parts - 1 ? size : size", "end = size", "sparse_tensor")],
    "embedding_bags.cpp": [("sign", "if (weights_ == nullptr && !may_pad)", "if (weights_ == nullptr)", "embedding")],
    "embedding_ids.cpp": [
        (
            "bound",
            "!(static_cast<acc_t<W>>(weights[i]) > acc_t<W>(0))",
            "static_cast<acc_t<W>>(weights[i]) < acc_t<W>(0)",
            "lookup",
        )
    ],
    "row_starts.h": [("bound", "if (next - id > 1)", "if (next - id > 2)", "lookup")],
    "row_vectors_body.h": [("sign", "kMin ? best : x", "kMin ? x : x", "embedding")],
    "row_loops_body.h": [("step", "blocks[k] += block[k];", "blocks[k] = block[k];", "embedding")],
    "embedding_collection_weights_backward.cpp": [
        ("step", "sum = l == 0 ? value : sum + value;", "sum = value;", "collection")
    ],
    "row_update.cpp": [("sign", "+= v * state_stride[k];", "+= v * weight_stride;", "row_update")],
    "row_optimizer.cpp": [
        (
            "step",
            "return values.const_data_ptr<A>() + slice.begin * dim;",
            "return values.const_data_ptr<A>();",
            "row_optimizer",
        )
    ],
    "row_stepper.cpp": [
        (
            "step",
            "RowBits(*rounding_seed_, step_->number, rows[i])",
            "RowBits(*rounding_seed_, 0, rows[i])",
            "row_optimizer",
        ),
        ("bound", "n, step_->skips_zeros);", "n, false);", "row_optimizer"),
        ("step", "zeros ? step_->policy_of_zeros() : ", "", "row_optimizer"),
        ("step", "  together &= step_->policy_of_zeros() == nullptr;\n", "", "row_optimizer"),
    ],
    "table_insert.h": [
        ("step", "    if (its.number != row) {\n      write(its);\n", "    if (its.number != row) {\n", "table")
    ],
    "table_view.h": [
        (
            "sign",
            "{numbers[kFirstFactor], numbers[kSecondFactor]}",
            "{numbers[kSecondFactor], numbers[kFirstFactor]}",
            "table",
        )
    ],
    "quantized.cpp": [("bound", "start >= before, op", "start + 1 >= before, op", "quantized")],
    "quantized_loops_body.h": [("sign", "  if (is_long) {\n", "  if (!is_long) {\n", "quantized")],
    "scores.cpp": [
        ("step", "if (top != most[n]) sums", "if (false) sums", "scores"),
        ("sign", "last_row < first_row + c && last == last ? last", "true ? last", "scores"),
        ("step", "    std::sort(found, found + n);\n", "", "scores"),
        ("bound", "while (taken < n && old > 0 && is_better", "while (taken + 1 < n && old > 0 && is_better", "scores"),
    ],
    "scores_body.h": [
        ("bound", ": -INFINITY;", ": 0.0f;", "scores"),
        ("sign", "if (!(scores[rest] <= bar)) return c;", "if (scores[rest] > bar) return c;", "scores"),
    ],
    "candidates.cpp": [
        ("step", "  state[2] += places_of(num_sampled);\n", "", "candidates"),
        ("sign", "return r < chances[id] ? id", "return r > chances[id] ? id", "candidates"),
        ("bound", "before + counts[id + step] <= x", "before + counts[id + step] < x", "candidates"),
    ],
    "record_encode.cpp": [("bound", "for (; value >= 0x80;", "for (; value > 0x80;", "record")],
}
MUTATIONS = [Mutation(file, *fault) for file, faults in FAULTS.items() for fault in faults]
TABLE = Table(
    name="cpu",
    folder="csrc/cpu",
    kinds=KINDS,
    mutations=MUTATIONS,
    build=("setup.py", "-q", "build_ext", "--inplace", "--force"),  # the library is newer than its objects here
    built=("build", "torchsparse_rec/_C.so"),
    environment={"TORCHSPARSE_REC_CUDA": "0"},
)
