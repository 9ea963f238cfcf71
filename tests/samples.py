"""
Sample inputs of every operator in csrc/library.cpp: the first of each by hand, then seeded random ones.

``SAMPLES[operator]`` is a list of :class:`sample.Sample`; ``GRADIENT_SAMPLES[operator]`` is the same for small float64
inputs at which the operator is smooth. A new case is a new entry: tests/test_operators.py does the rest.
"""

from sample import Sample
from samples_embedding import (
    backward_samples,
    bag_samples,
    embedding_samples,
    gradient_bag_samples,
    gradient_embedding_samples,
    weights_backward_samples,
)
from samples_embedding_lookup import (
    bag_offsets_samples,
    clip_backward_samples,
    gradient_clip_samples,
    gradient_pruned_bags_samples,
    gradient_shards_samples,
    pruned_bags_samples,
    shard_rows_samples,
    shards_samples,
    shards_weights_backward_samples,
)
from samples_integers import integer_hash_samples, string_hash_samples, unique_rows_samples, unique_samples
from samples_segment import dense_out, gradient_segment_samples, nothing, segment_samples, sparse_out
from samples_segment_rows import (
    gradient_segment_rows_samples,
    segment_reduce_backward_samples,
    segment_reduce_samples,
    unsorted_segment_reduce_backward_samples,
    unsorted_segment_reduce_samples,
)

SAMPLES: dict[str, list[Sample]] = {
    "sparse_segment_reduce": list(segment_samples("sparse_segment_reduce", nothing)),
    "sparse_segment_reduce_grad": list(segment_samples("sparse_segment_reduce_grad", nothing)),
    "sparse_segment_reduce_grad_out": list(segment_samples("sparse_segment_reduce_grad_out", dense_out)),
    "sparse_segment_reduce_grad_v2": list(segment_samples("sparse_segment_reduce_grad_v2", nothing)),
    "sparse_segment_reduce_grad_v2_out": list(segment_samples("sparse_segment_reduce_grad_v2_out", sparse_out)),
    "segment_reduce": list(segment_reduce_samples("segment_reduce")),
    "segment_reduce_backward": list(segment_reduce_backward_samples("segment_reduce_backward")),
    "unsorted_segment_reduce": list(unsorted_segment_reduce_samples("unsorted_segment_reduce")),
    "unsorted_segment_reduce_backward": list(
        unsorted_segment_reduce_backward_samples("unsorted_segment_reduce_backward")
    ),
    "unique": list(unique_samples("unique")),
    "unique_with_counts": list(unique_samples("unique_with_counts")),
    "unique_rows": list(unique_rows_samples("unique_rows")),
    "to_hash_bucket_fast": list(integer_hash_samples("to_hash_bucket_fast")),
    "string_to_hash_bucket_fast": list(string_hash_samples("string_to_hash_bucket_fast")),
    "embedding": list(embedding_samples("embedding")),
    "embedding_bag": list(bag_samples("embedding_bag")),
    "embedding_dense_backward": list(backward_samples("embedding_dense_backward")),
    "embedding_sparse_backward": list(backward_samples("embedding_sparse_backward")),
    "embedding_weights_backward": list(weights_backward_samples("embedding_weights_backward")),
    "bag_offsets": list(bag_offsets_samples("bag_offsets")),
    "shard_rows": list(shard_rows_samples("shard_rows")),
    "pruned_bags": list(pruned_bags_samples("pruned_bags")),
    "embedding_bag_shards": list(shards_samples("embedding_bag_shards")),
    "embedding_bag_shards_weights_backward": list(
        shards_weights_backward_samples("embedding_bag_shards_weights_backward")
    ),
    "clip_rows_backward": list(clip_backward_samples("clip_rows_backward")),
}

GRADIENT_SAMPLES: dict[str, list[Sample]] = {
    "sparse_segment_reduce": list(gradient_segment_samples("sparse_segment_reduce")),
    "sparse_segment_reduce_grad": list(gradient_segment_samples("sparse_segment_reduce_grad")),
    "sparse_segment_reduce_grad_v2": list(gradient_segment_samples("sparse_segment_reduce_grad_v2")),
    **{
        operator: list(gradient_segment_rows_samples(operator))
        for operator in (
            "segment_reduce",
            "segment_reduce_backward",
            "unsorted_segment_reduce",
            "unsorted_segment_reduce_backward",
        )
    },
    "embedding": list(gradient_embedding_samples("embedding")),
    "embedding_bag": list(gradient_bag_samples("embedding_bag")),
    "embedding_dense_backward": list(gradient_bag_samples("embedding_dense_backward")),
    "embedding_sparse_backward": list(gradient_bag_samples("embedding_sparse_backward")),
    "embedding_weights_backward": list(gradient_bag_samples("embedding_weights_backward")),
    "pruned_bags": list(gradient_pruned_bags_samples("pruned_bags")),
    "embedding_bag_shards": list(gradient_shards_samples("embedding_bag_shards")),
    "embedding_bag_shards_weights_backward": list(gradient_shards_samples("embedding_bag_shards_weights_backward")),
    "clip_rows_backward": list(gradient_clip_samples("clip_rows_backward")),
}
