"""Operators on tensors: one module per family."""

import sys

from . import _vmap as _vmap
from . import row_update as row_update  # registers its fake kernel
from . import segment as segment
from .bucketize import bucketize as bucketize
from .embedding import embedding as embedding
from .embedding import embedding_bag as embedding_bag
from .embedding_collection import embedding_collection as embedding_collection
from .embedding_lookup import embedding_lookup as embedding_lookup
from .embedding_lookup import embedding_lookup_sparse as embedding_lookup_sparse
from .embedding_lookup import safe_embedding_lookup_sparse as safe_embedding_lookup_sparse
from .hash import fingerprint64 as fingerprint64
from .hash import fingerprint_cat64 as fingerprint_cat64
from .hash import string_fingerprint64 as string_fingerprint64
from .hash import string_to_hash_bucket as string_to_hash_bucket
from .hash import string_to_hash_bucket_fast as string_to_hash_bucket_fast
from .hash import string_to_hash_bucket_strong as string_to_hash_bucket_strong
from .hash import to_hash_bucket as to_hash_bucket
from .hash import to_hash_bucket_fast as to_hash_bucket_fast
from .hash import to_hash_bucket_strong as to_hash_bucket_strong
from .hash_cross import cross_hashed as cross_hashed
from .indexed_slices import deduplicate_rows as deduplicate_rows
from .indexed_slices import indexed_slices_norm as indexed_slices_norm
from .indexed_slices import indexed_slices_to_dense as indexed_slices_to_dense
from .jagged import jagged_to_nested as jagged_to_nested
from .jagged import jagged_to_padded as jagged_to_padded
from .jagged import jagged_to_sparse as jagged_to_sparse
from .jagged import lengths_to_offsets as lengths_to_offsets
from .jagged import nested_to_jagged as nested_to_jagged
from .jagged import offsets_to_lengths as offsets_to_lengths
from .jagged import offsets_to_row_ids as offsets_to_row_ids
from .jagged import padded_to_jagged as padded_to_jagged
from .jagged import row_ids_to_offsets as row_ids_to_offsets
from .jagged import sparse_to_jagged as sparse_to_jagged
from .record import FrameStatus as FrameStatus
from .record import crc32c as crc32c
from .record import from_byte_planes as from_byte_planes
from .record import join_byte_planes_ as join_byte_planes_
from .record import tfrecord_framed as tfrecord_framed
from .record import tfrecord_frames as tfrecord_frames
from .record import to_byte_planes as to_byte_planes
from .record_examples import ExampleColumn as ExampleColumn
from .record_examples import ExampleError as ExampleError
from .record_examples import ExampleValues as ExampleValues
from .record_examples import encode_examples as encode_examples
from .record_examples import parse_examples as parse_examples
from .row_optimizer import HISTORY_COLUMNS as HISTORY_COLUMNS
from .row_optimizer import OPTIMIZER_RULES as OPTIMIZER_RULES
from .row_optimizer import idle_motion as idle_motion
from .row_optimizer import new_history as new_history
from .row_optimizer import row_optimizer_advance_ as row_optimizer_advance_
from .row_optimizer import row_optimizer_current as row_optimizer_current
from .row_optimizer import row_optimizer_make_current_ as row_optimizer_make_current_
from .row_optimizer import row_optimizer_update_ as row_optimizer_update_
from .segment import segment_max as segment_max
from .segment import segment_mean as segment_mean
from .segment import segment_min as segment_min
from .segment import segment_prod as segment_prod
from .segment import segment_sqrt_n as segment_sqrt_n
from .segment import segment_sum as segment_sum
from .segment import unsorted_segment_max as unsorted_segment_max
from .segment import unsorted_segment_mean as unsorted_segment_mean
from .segment import unsorted_segment_min as unsorted_segment_min
from .segment import unsorted_segment_prod as unsorted_segment_prod
from .segment import unsorted_segment_sqrt_n as unsorted_segment_sqrt_n
from .segment import unsorted_segment_sum as unsorted_segment_sum
from .sparse_segment import sparse_segment_mean as sparse_segment_mean
from .sparse_segment import sparse_segment_mean_grad as sparse_segment_mean_grad
from .sparse_segment import sparse_segment_mean_grad_v2 as sparse_segment_mean_grad_v2
from .sparse_segment import sparse_segment_sqrt_n as sparse_segment_sqrt_n
from .sparse_segment import sparse_segment_sqrt_n_grad as sparse_segment_sqrt_n_grad
from .sparse_segment import sparse_segment_sqrt_n_grad_v2 as sparse_segment_sqrt_n_grad_v2
from .sparse_segment import sparse_segment_sum as sparse_segment_sum
from .sparse_segment import sparse_segment_sum_grad as sparse_segment_sum_grad
from .sparse_segment import sparse_segment_sum_grad_v2 as sparse_segment_sum_grad_v2
from .sparse_tensor import ragged_fill_empty_rows as ragged_fill_empty_rows
from .sparse_tensor import sparse_fill_empty_rows as sparse_fill_empty_rows
from .sparse_tensor import sparse_fill_empty_rows_grad as sparse_fill_empty_rows_grad
from .sparse_tensor import sparse_reorder as sparse_reorder
from .sparse_tensor import sparse_reshape as sparse_reshape
from .sparse_tensor import sparse_retain as sparse_retain
from .sparse_tensor import sparse_to_dense as sparse_to_dense
from .table import count_min_sketch_ as count_min_sketch_
from .table import table_erase_ as table_erase_
from .table import table_find as table_find
from .table import table_find_or_insert_ as table_find_or_insert_
from .table import table_rehash as table_rehash
from .table import tables_find_or_insert_ as tables_find_or_insert_
from .table_rows import table_assign_ as table_assign_
from .table_rows import table_initialize_ as table_initialize_
from .table_rows import table_lookup as table_lookup
from .unique import unique as unique
from .unique import unique_with_counts as unique_with_counts

# The name of the module until the sparse segments had one of their own.
segment_rows = sys.modules[f"{__name__}.segment_rows"] = segment

_vmap.register_the_others()
