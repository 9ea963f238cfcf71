"""
Family ``sparse_segment``: sparse segment reductions and their gradients.

Contract and order of summation: csrc/sparse_segment.h.
Kernels: csrc/cpu/sparse_segment.cpp, csrc/cuda/sparse_segment.cu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas
from .. import _reduction
from ._offsets import check_not_empty
from ._sparse_segment_kernels import gradient, gradient_v2, reduce_segments
from .embedding import embedding_bag

__all__ = [
    "sparse_segment_sum",
    "sparse_segment_mean",
    "sparse_segment_sqrt_n",
    "sparse_segment_sum_grad",
    "sparse_segment_mean_grad",
    "sparse_segment_sqrt_n_grad",
    "sparse_segment_sum_grad_v2",
    "sparse_segment_mean_grad_v2",
    "sparse_segment_sqrt_n_grad_v2",
]

_ops = torch.ops.torchsparse_rec
_MODE_NAMES = {number: word for word, number in _reduction.COMBINERS.items()}


# ---- Forward --------------------------------------------------------------------------------------------------------


def _segment_reduce(
    data: Tensor,
    indices: Tensor,
    segment_ids: Tensor | None,
    num_segments: int | None,
    offsets: Tensor | None,
    reduction: int,
) -> Tensor:
    """Compute one of the three reductions, over segment ids or over offsets."""
    if segment_ids is not None and offsets is not None:
        raise ValueError("exactly one of segment_ids and offsets must be given, got both")
    if segment_ids is not None:
        return reduce_segments(data, indices, segment_ids, num_segments, reduction)
    if offsets is None:
        raise ValueError("exactly one of segment_ids and offsets must be given, got neither")
    if num_segments is not None:
        raise ValueError(f"num_segments must be None when offsets say it, got {num_segments}")
    if data.dim() == 0:
        raise ValueError("data must have rank >= 1, got a scalar")
    check_not_empty(f"sparse_segment_{_MODE_NAMES[reduction].replace('sqrtn', 'sqrt_n')}", offsets, indices)
    # The same reduction over contiguous bags; offsets carry the number of rows, so nothing is read back.
    table = data.flatten(1) if data.dim() > 1 else data.unsqueeze(1)
    rows = embedding_bag(table, indices, offsets, mode=_MODE_NAMES[reduction])
    return rows.reshape(rows.shape[0], *data.shape[1:])


def sparse_segment_sum(
    data: Tensor,
    indices: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """
    Sum the rows ``data[indices]`` within each segment: ``out[s] = sum(data[indices[i]] for segment_ids[i] == s)``.

    Args:
        data: ``[V, ...]``, float16, bfloat16, float32 or float64; half types are summed in float32 and rounded once.
        indices: ``[N]``, int32 or int64: rows of ``data``.
        segment_ids: ``[N]``, int32 or int64, sorted and not negative; gaps are allowed and give zero rows.
        num_segments: rows of the result, ``S``. ``None`` means the last segment id + 1, which on CUDA is read back
            from the device (and refused while a CUDA graph is captured).
        offsets: ``[S + 1]``, int32 or int64, instead of ``segment_ids``: segment ``s`` is
            ``indices[offsets[s] : offsets[s + 1]]``.

    Returns:
        ``[S, ...]`` with the dtype of ``data``; segments without entries are zero. Differentiable in ``data``.

    Raises:
        IndexError: an index outside ``[0, V)``.
        ValueError: unsorted, negative or too large segment ids; wrong shapes, dtypes or devices.

    On CUDA, with ``num_segments`` or ``offsets``, nothing waits for the device and CUDA graphs can capture it.

    Source: ``tf.sparse.segment_sum``.

    Example:
        >>> data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> sparse_segment_sum(data, torch.tensor([0, 2, 1]), torch.tensor([0, 0, 1]))
        tensor([[6., 8.],
                [3., 4.]])
    """
    return _segment_reduce(data, indices, segment_ids, num_segments, offsets, _reduction.SUM)


def sparse_segment_mean(
    data: Tensor,
    indices: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """
    Average the rows ``data[indices]`` within each segment.

    Arguments, result and errors as :func:`sparse_segment_sum`; the sum of a segment is divided by its number of
    entries.

    Source: ``tf.sparse.segment_mean``.

    Example:
        >>> data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> sparse_segment_mean(data, torch.tensor([0, 2, 1]), torch.tensor([0, 0, 2]), num_segments=4)
        tensor([[3., 4.],
                [0., 0.],
                [3., 4.],
                [0., 0.]])
    """
    return _segment_reduce(data, indices, segment_ids, num_segments, offsets, _reduction.MEAN)


def sparse_segment_sqrt_n(
    data: Tensor,
    indices: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """
    Sum the rows ``data[indices]`` within each segment, divided by the square root of their number.

    Arguments, result and errors as :func:`sparse_segment_sum`.

    Source: ``tf.sparse.segment_sqrt_n``.

    Example:
        >>> data = torch.tensor([[1.0], [3.0], [5.0]])
        >>> sparse_segment_sqrt_n(data, torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 0, 0]))
        tensor([[6.]])
    """
    return _segment_reduce(data, indices, segment_ids, num_segments, offsets, _reduction.SQRTN)


# ---- Gradients ------------------------------------------------------------------------------------------------------


def _refuse_gradient(op: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(f"{op}: out= cannot be used with tensors that require a gradient")


def _grad(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, reduction: int, out: Tensor | None
) -> Tensor:
    if out is None:
        return gradient(grad, indices, segment_ids, output_dim0, reduction)
    _refuse_gradient("sparse_segment_reduce_grad", grad, out)
    _ops.sparse_segment_reduce_grad_out.default(grad, indices, segment_ids, output_dim0, reduction, out)
    return out


def _grad_v2(
    grad: Tensor,
    indices: Tensor,
    segment_ids: Tensor,
    dense_output_dim0: int,
    reduction: int,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    if out is None:
        return gradient_v2(grad, indices, segment_ids, dense_output_dim0, reduction)
    _refuse_gradient("sparse_segment_reduce_grad_v2", grad, *out)
    _ops.sparse_segment_reduce_grad_v2_out.default(grad, indices, segment_ids, dense_output_dim0, reduction, *out)
    return out


def sparse_segment_sum_grad(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, *, out: Tensor | None = None
) -> Tensor:
    """
    Return the gradient of ``sparse_segment_sum`` with respect to ``data``, as a dense tensor.

    ``result[v]`` is the sum of ``grad[segment_ids[i]]`` over the ``i`` with ``indices[i] == v``.

    Args:
        grad: ``[S, ...]``, float16, bfloat16, float32 or float64: the gradient of the forward result.
        indices: ``[N]``, int32 or int64, in ``[0, output_dim0)``.
        segment_ids: ``[N]``, int32 or int64, in ``[0, S)``; they need not be sorted.
        output_dim0: rows of ``data`` in the forward operation.
        out: the tensor into which the result is written, resized as torch's ``out=`` does, so that a buffer can be
            reused. Writing into memory that is already mapped is several times faster than into fresh memory. It shares
            no memory with the other tensors, and where it is resized no storage.

    Returns:
        ``[output_dim0, ...]``; rows without entries are zero. Differentiable in ``grad`` unless ``out`` is given.

    Raises:
        IndexError: an index outside ``[0, output_dim0)`` or a segment id outside ``[0, S)``.
        ValueError: wrong shapes, dtypes or devices; an ``out`` that shares memory.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.raw_ops.SparseSegmentSumGrad`` (which returns uninitialised memory when ``indices`` is empty).

    Example:
        >>> grad = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
        >>> sparse_segment_sum_grad(grad, torch.tensor([0, 2, 2]), torch.tensor([0, 0, 1]), 3)
        tensor([[1., 1.],
                [0., 0.],
                [3., 3.]])
    """
    return _grad(grad, indices, segment_ids, output_dim0, _reduction.SUM, out)


def sparse_segment_mean_grad(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, *, out: Tensor | None = None
) -> Tensor:
    """
    Return the gradient of ``sparse_segment_mean`` with respect to ``data``, as a dense tensor.

    Arguments, result and errors as :func:`sparse_segment_sum_grad`; each entry is divided by the number of entries of
    its segment.

    Source: ``tf.raw_ops.SparseSegmentMeanGrad``.

    Example:
        >>> grad = torch.tensor([[2.0, 2.0]])
        >>> sparse_segment_mean_grad(grad, torch.tensor([0, 1]), torch.tensor([0, 0]), 2)
        tensor([[1., 1.],
                [1., 1.]])
    """
    return _grad(grad, indices, segment_ids, output_dim0, _reduction.MEAN, out)


def sparse_segment_sqrt_n_grad(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, *, out: Tensor | None = None
) -> Tensor:
    """
    Return the gradient of ``sparse_segment_sqrt_n`` with respect to ``data``, as a dense tensor.

    Arguments, result and errors as :func:`sparse_segment_sum_grad`; each entry is divided by the square root of the
    number of entries of its segment.

    Source: ``tf.raw_ops.SparseSegmentSqrtNGrad``.

    Example:
        >>> grad = torch.tensor([[2.0]])
        >>> sparse_segment_sqrt_n_grad(grad, torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 0, 0]), 2)
        tensor([[1.],
                [3.]])
    """
    return _grad(grad, indices, segment_ids, output_dim0, _reduction.SQRTN, out)


def sparse_segment_sum_grad_v2(
    grad: Tensor,
    indices: Tensor,
    segment_ids: Tensor,
    dense_output_dim0: int,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Return the gradient of ``sparse_segment_sum`` with respect to ``data``: only the rows with entries, and their ids.

    Args:
        grad: the argument of :func:`sparse_segment_sum_grad`.
        indices: the argument of :func:`sparse_segment_sum_grad`.
        segment_ids: the argument of :func:`sparse_segment_sum_grad`.
        dense_output_dim0: rows of ``data`` in the forward operation.
        out: ``(values, rows)`` to write into; both are resized as torch's ``out=`` does. They share no memory with the
            other tensors or each other, and where they are resized no storage.

    Returns:
        ``(values, rows)``: ``values [U, ...]`` and the sorted, unique ids ``rows [U]`` of those rows, in the dtype of
        ``indices``. On CUDA, ``U`` is read back from the device. ``values`` is differentiable in ``grad`` unless
        ``out`` is given.

    Raises:
        IndexError, ValueError: as :func:`sparse_segment_sum_grad`.

    On CUDA it waits for the device, so CUDA graphs cannot capture it.

    Source: ``tf.raw_ops.SparseSegmentSumGradV2``.

    Example:
        >>> grad = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
        >>> sparse_segment_sum_grad_v2(grad, torch.tensor([2, 0, 2]), torch.tensor([0, 0, 1]), 3)
        (tensor([[1., 1.],
                [3., 3.]]), tensor([0, 2]))
    """
    return _grad_v2(grad, indices, segment_ids, dense_output_dim0, _reduction.SUM, out)


def sparse_segment_mean_grad_v2(
    grad: Tensor,
    indices: Tensor,
    segment_ids: Tensor,
    dense_output_dim0: int,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Return the gradient of ``sparse_segment_mean`` with respect to ``data``: only the rows with entries, and their ids.

    Arguments, result and errors as :func:`sparse_segment_sum_grad_v2`; each entry is divided by the number of entries
    of its segment.

    Source: ``tf.raw_ops.SparseSegmentMeanGradV2``.

    Example:
        >>> sparse_segment_mean_grad_v2(torch.tensor([[2.0]]), torch.tensor([4, 1]), torch.tensor([0, 0]), 6)
        (tensor([[1.],
                [1.]]), tensor([1, 4]))
    """
    return _grad_v2(grad, indices, segment_ids, dense_output_dim0, _reduction.MEAN, out)


def sparse_segment_sqrt_n_grad_v2(
    grad: Tensor,
    indices: Tensor,
    segment_ids: Tensor,
    dense_output_dim0: int,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Return the gradient of ``sparse_segment_sqrt_n`` with respect to ``data``: only rows with entries, and their ids.

    Arguments, result and errors as :func:`sparse_segment_sum_grad_v2`; each entry is divided by the square root of the
    number of entries of its segment.

    Source: ``tf.raw_ops.SparseSegmentSqrtNGradV2``.

    Example:
        >>> sparse_segment_sqrt_n_grad_v2(torch.tensor([[2.0]]), torch.tensor([4, 1, 1, 1]), torch.zeros(4).int(), 6)
        (tensor([[3.],
                [1.]]), tensor([1, 4]))
    """
    return _grad_v2(grad, indices, segment_ids, dense_output_dim0, _reduction.SQRTN, out)
