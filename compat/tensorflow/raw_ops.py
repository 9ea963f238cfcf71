"""
``tf.raw_ops``: single operators. As in TensorFlow, all arguments are keywords; ``name`` is ignored.

Shapes, dtypes and errors of an operator are those of the function that its docstring names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._raw_bucketize import Bucketize as Bucketize
from ._raw_hash import AsString as AsString
from ._raw_hash import Fingerprint as Fingerprint
from ._raw_hash import SparseCross as SparseCross
from ._raw_hash import SparseCrossHashed as SparseCrossHashed
from ._raw_hash import SparseCrossV2 as SparseCrossV2
from ._raw_hash import StringToHashBucket as StringToHashBucket
from ._raw_hash import StringToHashBucketFast as StringToHashBucketFast
from ._raw_hash import StringToHashBucketStrong as StringToHashBucketStrong
from ._raw_segment import SegmentMax as SegmentMax
from ._raw_segment import SegmentMean as SegmentMean
from ._raw_segment import SegmentMin as SegmentMin
from ._raw_segment import SegmentProd as SegmentProd
from ._raw_segment import SegmentSum as SegmentSum
from ._raw_segment import UnsortedSegmentMax as UnsortedSegmentMax
from ._raw_segment import UnsortedSegmentMin as UnsortedSegmentMin
from ._raw_segment import UnsortedSegmentProd as UnsortedSegmentProd
from ._raw_segment import UnsortedSegmentSum as UnsortedSegmentSum
from ._raw_sparse_tensor import RaggedFillEmptyRows as RaggedFillEmptyRows
from ._raw_sparse_tensor import RaggedFillEmptyRowsGrad as RaggedFillEmptyRowsGrad
from ._raw_sparse_tensor import SparseFillEmptyRows as SparseFillEmptyRows
from ._raw_sparse_tensor import SparseFillEmptyRowsGrad as SparseFillEmptyRowsGrad
from ._raw_sparse_tensor import SparseReorder as SparseReorder
from ._raw_sparse_tensor import SparseReshape as SparseReshape
from ._raw_sparse_tensor import SparseToDense as SparseToDense
from ._raw_unique import UniqueV2 as UniqueV2
from ._raw_unique import UniqueWithCountsV2 as UniqueWithCountsV2
from ._sparse_segment import segment_grad, segment_grad_v2, segment_reduce
from ._unique import Unique as _Unique
from ._unique import UniqueWithCounts as _UniqueWithCounts
from ._unique import unique, unique_with_counts


class SparseGradient(NamedTuple):
    """What the ``GradV2`` operators return."""

    #: ``[U, ...]``, the rows of the gradient that have entries.
    output: Tensor
    #: ``[U]``, their ids, in the dtype of ``indices``.
    sorted_unique_indices: Tensor


def SparseSegmentSum(
    *, data: Any, indices: Any, segment_ids: Any, sparse_gradient: bool = False, name: str | None = None
) -> Tensor:
    """
    Compute :func:`.sparse.segment_sum` with the last segment id + 1 rows.

    Example:
        >>> SparseSegmentSum(data=[1.0, 2.0, 3.0], indices=[0, 2], segment_ids=[0, 0])
        tensor([4.])
    """
    return segment_reduce("sum", data, indices, segment_ids, None, sparse_gradient)


def SparseSegmentSumWithNumSegments(
    *,
    data: Any,
    indices: Any,
    segment_ids: Any,
    num_segments: Any,
    sparse_gradient: bool = False,
    name: str | None = None,
) -> Tensor:
    """
    Compute :func:`.sparse.segment_sum` with ``num_segments`` rows.

    Example:
        >>> SparseSegmentSumWithNumSegments(data=[1.0, 2.0], indices=[0, 1], segment_ids=[0, 0], num_segments=2)
        tensor([3., 0.])
    """
    return segment_reduce("sum", data, indices, segment_ids, num_segments, sparse_gradient)


def SparseSegmentSumGrad(
    *, grad: Any, indices: Any, segment_ids: Any, output_dim0: Any, name: str | None = None
) -> Tensor:
    """
    Return the gradient of :func:`SparseSegmentSum`, ``[output_dim0, ...]``; ``segment_ids`` need not be sorted.

    Example:
        >>> SparseSegmentSumGrad(grad=[1.0, 2.0], indices=[0, 2, 2], segment_ids=[0, 0, 1], output_dim0=3)
        tensor([1., 0., 3.])
    """
    return segment_grad("sum", grad, indices, segment_ids, output_dim0)


def SparseSegmentSumGradV2(
    *, grad: Any, indices: Any, segment_ids: Any, dense_output_dim0: Any, name: str | None = None
) -> SparseGradient:
    """
    Return the gradient of :func:`SparseSegmentSum`: the rows that have entries, and their sorted ids.

    Example:
        >>> SparseSegmentSumGradV2(grad=[1.0, 2.0], indices=[2, 0, 2], segment_ids=[0, 0, 1], dense_output_dim0=3)
        SparseGradient(output=tensor([1., 3.]), sorted_unique_indices=tensor([0, 2], dtype=torch.int32))
    """
    return SparseGradient(*segment_grad_v2("sum", grad, indices, segment_ids, dense_output_dim0))


def SparseSegmentMean(
    *, data: Any, indices: Any, segment_ids: Any, sparse_gradient: bool = False, name: str | None = None
) -> Tensor:
    """Compute :func:`.sparse.segment_mean` with the last segment id + 1 rows."""
    return segment_reduce("mean", data, indices, segment_ids, None, sparse_gradient)


def SparseSegmentMeanWithNumSegments(
    *,
    data: Any,
    indices: Any,
    segment_ids: Any,
    num_segments: Any,
    sparse_gradient: bool = False,
    name: str | None = None,
) -> Tensor:
    """Compute :func:`.sparse.segment_mean` with ``num_segments`` rows."""
    return segment_reduce("mean", data, indices, segment_ids, num_segments, sparse_gradient)


def SparseSegmentMeanGrad(
    *, grad: Any, indices: Any, segment_ids: Any, output_dim0: Any, name: str | None = None
) -> Tensor:
    """Return the gradient of :func:`SparseSegmentMean`, ``[output_dim0, ...]``; ``segment_ids`` need not be sorted."""
    return segment_grad("mean", grad, indices, segment_ids, output_dim0)


def SparseSegmentMeanGradV2(
    *, grad: Any, indices: Any, segment_ids: Any, dense_output_dim0: Any, name: str | None = None
) -> SparseGradient:
    """Return the gradient of :func:`SparseSegmentMean`: the rows that have entries, and their sorted ids."""
    return SparseGradient(*segment_grad_v2("mean", grad, indices, segment_ids, dense_output_dim0))


def SparseSegmentSqrtN(
    *, data: Any, indices: Any, segment_ids: Any, sparse_gradient: bool = False, name: str | None = None
) -> Tensor:
    """Compute :func:`.sparse.segment_sqrt_n` with the last segment id + 1 rows."""
    return segment_reduce("sqrt_n", data, indices, segment_ids, None, sparse_gradient)


def SparseSegmentSqrtNWithNumSegments(
    *,
    data: Any,
    indices: Any,
    segment_ids: Any,
    num_segments: Any,
    sparse_gradient: bool = False,
    name: str | None = None,
) -> Tensor:
    """Compute :func:`.sparse.segment_sqrt_n` with ``num_segments`` rows."""
    return segment_reduce("sqrt_n", data, indices, segment_ids, num_segments, sparse_gradient)


def SparseSegmentSqrtNGrad(
    *, grad: Any, indices: Any, segment_ids: Any, output_dim0: Any, name: str | None = None
) -> Tensor:
    """Return the gradient of :func:`SparseSegmentSqrtN`, ``[output_dim0, ...]``; ``segment_ids`` need not be sorted."""
    return segment_grad("sqrt_n", grad, indices, segment_ids, output_dim0)


def SparseSegmentSqrtNGradV2(
    *, grad: Any, indices: Any, segment_ids: Any, dense_output_dim0: Any, name: str | None = None
) -> SparseGradient:
    """Return the gradient of :func:`SparseSegmentSqrtN`: the rows that have entries, and their sorted ids."""
    return SparseGradient(*segment_grad_v2("sqrt_n", grad, indices, segment_ids, dense_output_dim0))


def Unique(*, x: Any, out_idx: torch.dtype = torch.int32, name: str | None = None) -> _Unique:
    """Compute :func:`torchsparse_rec.compat.tensorflow.unique`."""
    return unique(x, out_idx)


def UniqueWithCounts(*, x: Any, out_idx: torch.dtype = torch.int32, name: str | None = None) -> _UniqueWithCounts:
    """Compute :func:`torchsparse_rec.compat.tensorflow.unique_with_counts`."""
    return unique_with_counts(x, out_idx)
