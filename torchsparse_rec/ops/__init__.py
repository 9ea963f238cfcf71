"""Operators on tensors: one module per family."""

from .embedding import embedding as embedding
from .embedding import embedding_bag as embedding_bag
from .embedding_lookup import embedding_lookup as embedding_lookup
from .embedding_lookup import embedding_lookup_sparse as embedding_lookup_sparse
from .embedding_lookup import safe_embedding_lookup_sparse as safe_embedding_lookup_sparse
from .hash import string_to_hash_bucket_fast as string_to_hash_bucket_fast
from .hash import to_hash_bucket_fast as to_hash_bucket_fast
from .segment import sparse_segment_mean as sparse_segment_mean
from .segment import sparse_segment_mean_grad as sparse_segment_mean_grad
from .segment import sparse_segment_mean_grad_v2 as sparse_segment_mean_grad_v2
from .segment import sparse_segment_sqrt_n as sparse_segment_sqrt_n
from .segment import sparse_segment_sqrt_n_grad as sparse_segment_sqrt_n_grad
from .segment import sparse_segment_sqrt_n_grad_v2 as sparse_segment_sqrt_n_grad_v2
from .segment import sparse_segment_sum as sparse_segment_sum
from .segment import sparse_segment_sum_grad as sparse_segment_sum_grad
from .segment import sparse_segment_sum_grad_v2 as sparse_segment_sum_grad_v2
from .unique import unique as unique
from .unique import unique_with_counts as unique_with_counts
