"""
Sample inputs of every operator in csrc/library.cpp: the first of each by hand, then seeded random ones.

``SAMPLES[operator]`` is a list of :class:`sample.Sample`; ``GRADIENT_SAMPLES[operator]`` is the same for small float64
inputs at which the operator is smooth. A new case is a new entry: tests/ops/test_operators.py does the rest.
"""

from samples.embedding import (
    backward_samples,
    bag_samples,
    embedding_samples,
    gradient_bag_samples,
    gradient_embedding_samples,
    weights_backward_samples,
)
from samples.embedding_collection import COLLECTION_GRADIENT_SAMPLES, COLLECTION_SAMPLES
from samples.embedding_lookup import (
    clip_backward_samples,
    gradient_clip_samples,
    gradient_pruned_bags_samples,
    gradient_shards_samples,
    pruned_bags_samples,
    shard_rows_samples,
    shards_samples,
    shards_weights_backward_samples,
)
from samples.hash import cross_samples, integer_hash_samples, string_hash_samples
from samples.integers import unique_rows_samples, unique_samples
from samples.row_optimizer import advance_samples, current_samples, make_current_samples, update_samples
from samples.row_update import row_update_samples
from samples.sample import Sample
from samples.segment import (
    segment_gradient_samples,
    segment_reduce_backward_samples,
    segment_reduce_samples,
    unsorted_segment_reduce_backward_samples,
    unsorted_segment_reduce_samples,
)
from samples.sparse_segment import (
    dense_out,
    nothing,
    sparse_out,
    sparse_segment_gradient_samples,
    sparse_segment_samples,
)
from samples.sparse_tensor import (
    dense_samples,
    fill_grad_samples,
    fill_samples,
    gradient_dense_samples,
    gradient_fill_grad_samples,
    gradient_fill_samples,
    offsets_samples,
    reorder_samples,
    reshape_samples,
    row_ids_samples,
)
from samples.table import TABLE_SAMPLES

SAMPLES: dict[str, list[Sample]] = {
    "sparse_segment_reduce": list(sparse_segment_samples("sparse_segment_reduce", nothing)),
    "sparse_segment_reduce_grad": list(sparse_segment_samples("sparse_segment_reduce_grad", nothing)),
    "sparse_segment_reduce_grad_out": list(sparse_segment_samples("sparse_segment_reduce_grad_out", dense_out)),
    "sparse_segment_reduce_grad_v2": list(sparse_segment_samples("sparse_segment_reduce_grad_v2", nothing)),
    "sparse_segment_reduce_grad_v2_out": list(sparse_segment_samples("sparse_segment_reduce_grad_v2_out", sparse_out)),
    "segment_reduce": list(segment_reduce_samples("segment_reduce")),
    "segment_reduce_backward": list(segment_reduce_backward_samples("segment_reduce_backward")),
    "unsorted_segment_reduce": list(unsorted_segment_reduce_samples("unsorted_segment_reduce")),
    "unsorted_segment_reduce_backward": list(
        unsorted_segment_reduce_backward_samples("unsorted_segment_reduce_backward")
    ),
    "unique": list(unique_samples("unique")),
    "unique_with_counts": list(unique_samples("unique_with_counts")),
    "fingerprint64": list(integer_hash_samples("fingerprint64")),
    "string_fingerprint64": list(string_hash_samples("string_fingerprint64")),
    "unique_rows": list(unique_rows_samples("unique_rows")),
    "to_hash_bucket_fast": list(integer_hash_samples("to_hash_bucket_fast")),
    "string_to_hash_bucket_fast": list(string_hash_samples("string_to_hash_bucket_fast")),
    "to_hash_bucket_strong": list(integer_hash_samples("to_hash_bucket_strong")),
    "string_to_hash_bucket_strong": list(string_hash_samples("string_to_hash_bucket_strong")),
    "to_hash_bucket": list(integer_hash_samples("to_hash_bucket")),
    "string_to_hash_bucket": list(string_hash_samples("string_to_hash_bucket")),
    "cross_hashed": list(cross_samples("cross_hashed")),
    "sparse_reshape": list(reshape_samples("sparse_reshape")),
    "sparse_fill_empty_rows": list(fill_samples("sparse_fill_empty_rows")),
    "sparse_fill_empty_rows_grad": list(fill_grad_samples("sparse_fill_empty_rows_grad")),
    "sparse_reorder": list(reorder_samples("sparse_reorder")),
    "sparse_to_dense": list(dense_samples("sparse_to_dense")),
    "row_ids_to_offsets": list(offsets_samples("row_ids_to_offsets")),
    "offsets_to_row_ids": list(row_ids_samples("offsets_to_row_ids")),
    "embedding": list(embedding_samples("embedding")),
    "embedding_bag": list(bag_samples("embedding_bag")),
    "embedding_dense_backward": list(backward_samples("embedding_dense_backward")),
    "embedding_sparse_backward": list(backward_samples("embedding_sparse_backward")),
    "embedding_weights_backward": list(weights_backward_samples("embedding_weights_backward")),
    "row_update": list(row_update_samples()),
    "row_optimizer_update_": list(update_samples()),
    "row_optimizer_advance_": list(advance_samples()),
    "row_optimizer_current": list(current_samples()),
    "row_optimizer_make_current_": list(make_current_samples()),
    "shard_rows": list(shard_rows_samples("shard_rows")),
    "pruned_bags": list(pruned_bags_samples("pruned_bags")),
    "embedding_bag_shards": list(shards_samples("embedding_bag_shards")),
    "embedding_bag_shards_weights_backward": list(
        shards_weights_backward_samples("embedding_bag_shards_weights_backward")
    ),
    "clip_rows_backward": list(clip_backward_samples("clip_rows_backward")),
    **COLLECTION_SAMPLES,
    **TABLE_SAMPLES,
}

GRADIENT_SAMPLES: dict[str, list[Sample]] = {
    "sparse_segment_reduce": list(sparse_segment_gradient_samples("sparse_segment_reduce")),
    "sparse_segment_reduce_grad": list(sparse_segment_gradient_samples("sparse_segment_reduce_grad")),
    "sparse_segment_reduce_grad_v2": list(sparse_segment_gradient_samples("sparse_segment_reduce_grad_v2")),
    **{
        operator: list(segment_gradient_samples(operator))
        for operator in (
            "segment_reduce",
            "segment_reduce_backward",
            "unsorted_segment_reduce",
            "unsorted_segment_reduce_backward",
        )
    },
    "sparse_fill_empty_rows": list(gradient_fill_samples("sparse_fill_empty_rows")),
    "sparse_fill_empty_rows_grad": list(gradient_fill_grad_samples("sparse_fill_empty_rows_grad")),
    "sparse_to_dense": list(gradient_dense_samples("sparse_to_dense")),
    "embedding": list(gradient_embedding_samples("embedding")),
    "embedding_bag": list(gradient_bag_samples("embedding_bag")),
    "embedding_dense_backward": list(gradient_bag_samples("embedding_dense_backward")),
    "embedding_sparse_backward": list(gradient_bag_samples("embedding_sparse_backward")),
    "pruned_bags": list(gradient_pruned_bags_samples("pruned_bags")),
    "embedding_bag_shards": list(gradient_shards_samples("embedding_bag_shards")),
    "clip_rows_backward": list(gradient_clip_samples("clip_rows_backward")),
    "embedding_collection": COLLECTION_GRADIENT_SAMPLES,
}

ALL = [sample for samples in SAMPLES.values() for sample in samples]
REPRESENTATIVE = [sample for sample in ALL if sample.representative]
# The other samples of each operator, in groups of twenty: a test of its own costs more than most calls.
TWENTIES: dict[str, list[Sample]] = {}
for _name, _samples in SAMPLES.items():
    _others = [sample for sample in _samples if not sample.representative]
    for _begin in range(0, len(_others), 20):
        _run = _others[_begin : _begin + 20]
        TWENTIES[f"{_name}-{_begin}_to_{_begin + len(_run) - 1}"] = _run
