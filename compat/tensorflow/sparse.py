"""``tf.sparse``: segment reductions, crosses, and operators on sparse tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._cross import cross as cross
from ._cross import cross_hashed as cross_hashed
from ._sparse import fill_empty_rows as fill_empty_rows
from ._sparse import from_dense as from_dense
from ._sparse import reorder as reorder
from ._sparse import reshape as reshape
from ._sparse import retain as retain
from ._sparse import to_dense as to_dense
from ._sparse_parts import concat as concat
from ._sparse_parts import expand_dims as expand_dims
from ._sparse_parts import slice as slice
from ._sparse_segment import sparse_segment_reduce
from ._sparse_sums import bincount as bincount
from ._sparse_sums import sparse_dense_matmul as sparse_dense_matmul
from ._sparse_tensor import SparseTensor as SparseTensor

__all__ = [
    "SparseTensor",
    "bincount",
    "concat",
    "cross",
    "cross_hashed",
    "expand_dims",
    "fill_empty_rows",
    "from_dense",
    "reorder",
    "reshape",
    "retain",
    "segment_mean",
    "segment_sqrt_n",
    "segment_sum",
    "slice",
    "sparse_dense_matmul",
    "to_dense",
]


def segment_sum(
    data: Any,
    indices: Any,
    segment_ids: Any,
    num_segments: Any = None,
    name: str | None = None,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Sum the rows ``data[indices]`` within each segment.

    Args:
        data: ``[V, ...]``, float16, bfloat16, float32, float64 or any integer dtype; half types are summed in float32
            and rounded once, integers wrap.
        indices: ``[N]``, int32 or int64: rows of ``data``.
        segment_ids: ``[N]``, int32 or int64, sorted and not negative; gaps give zero rows.
        num_segments: rows of the result; an integer or a scalar tensor. Default: the last segment id + 1.
        name: the name, ignored.
        sparse_gradient: whether the gradient of ``data`` is a coalesced sparse COO tensor, TensorFlow's IndexedSlices
            with sorted, unique indices, instead of a dense tensor.

    Returns:
        ``[num_segments, ...]`` with the dtype of ``data``.

    Raises:
        IndexError: an index outside ``[0, V)``.
        ValueError: unsorted, negative or too large segment ids; wrong shapes or dtypes.

    Source: ``tf.sparse.segment_sum``.

    Example:
        >>> import torch
        >>> data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
        >>> segment_sum(data, [0, 2, 0], [0, 0, 1], sparse_gradient=True).sum().backward()
        >>> data.grad.indices(), data.grad.values()
        (tensor([[0, 2]]), tensor([[2., 2.],
                [1., 1.]]))
    """
    return sparse_segment_reduce("sum", data, indices, segment_ids, num_segments, sparse_gradient)


def segment_mean(
    data: Any,
    indices: Any,
    segment_ids: Any,
    num_segments: Any = None,
    name: str | None = None,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Average the rows ``data[indices]`` within each segment; a segment without entries is zero.

    The arguments, result and errors are as in :func:`segment_sum`, but ``data`` must be floating.

    Source: ``tf.sparse.segment_mean``.

    Example:
        >>> segment_mean([[1.0, 2.0], [3.0, 4.0]], [0, 1, 1], [0, 0, 2])
        tensor([[2., 3.],
                [0., 0.],
                [3., 4.]])
    """
    return sparse_segment_reduce("mean", data, indices, segment_ids, num_segments, sparse_gradient)


def segment_sqrt_n(
    data: Any,
    indices: Any,
    segment_ids: Any,
    num_segments: Any = None,
    name: str | None = None,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Sum the rows ``data[indices]`` within each segment and divide by the square root of the number of entries.

    The arguments, result and errors are as in :func:`segment_sum`, but ``data`` must be floating.

    Source: ``tf.sparse.segment_sqrt_n``.

    Example:
        >>> segment_sqrt_n([1.0, 3.0, 5.0], [0, 1, 1, 2], [0, 0, 0, 0])
        tensor([6.])
    """
    return sparse_segment_reduce("sqrt_n", data, indices, segment_ids, num_segments, sparse_gradient)
