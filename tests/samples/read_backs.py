"""
What operators copy from a CUDA device to the host and wait for: the one list of it.

The words are those of the error that such a call raises while a CUDA graph is captured. No other operator waits.
docs/operators.md shows the list, tests/ops/test_capturing.py and tests/cuda/test_synchronisation.py hold it true.
"""

from __future__ import annotations

from samples.sample import Sample

_LAST_SEGMENT = "the last segment id, which num_segments=None asks for,"
_PRESENT_ROWS = "the number of rows that have entries"
_DISTINCT = "the number of distinct values"
READ_BACKS = {
    "sparse_segment_reduce": _LAST_SEGMENT,
    "segment_reduce": _LAST_SEGMENT,
    "sparse_segment_reduce_grad_v2": _PRESENT_ROWS,
    "sparse_segment_reduce_grad_v2_out": _PRESENT_ROWS,
    "sparse_fill_empty_rows": "the number of empty rows",
    "unique": _DISTINCT,
    "unique_with_counts": _DISTINCT,
    "unique_rows": _DISTINCT,
    "cross_hashed": "the number of crosses",
    "embedding_sparse_backward": _PRESENT_ROWS,
    "embedding_collection_sparse_backward": _PRESENT_ROWS,
}

# With what an operator of the list reads back nothing all the same: for readers, and below for calls.
READS_NOTHING = {
    "sparse_segment_reduce": "with `num_segments` or `offsets`",
    "segment_reduce": "with `num_segments` or `offsets`",
    "cross_hashed": "with matrices alone",
}


def read_back(sample: Sample) -> str | None:
    """Return what this call reads back, or None."""
    if sample.operator in ("sparse_segment_reduce", "segment_reduce") and sample.arguments[3] is not None:
        return None
    if sample.operator == "segment_reduce" and sample.arguments[1] is None:
        return None
    if sample.operator == "cross_hashed" and all(x.dim() == 2 for x in sample.arguments[0]):
        return None
    return READ_BACKS.get(sample.operator)
