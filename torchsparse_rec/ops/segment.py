"""
Family ``segment``: reductions of whole tensors by segment, without indices, sorted and unsorted.

Contract and order of summation: csrc/segment.h. Kernels: csrc/cpu/segment.cpp, csrc/cuda/segment.cu.
"""

from __future__ import annotations

import torch as torch  # the examples use it
from torch import Tensor

from .. import _reduction
from . import sparse_segment
from ._offsets import check_not_empty
from ._segment_kernels import reduce_sorted, reduce_unsorted

__all__ = [
    "segment_sum",
    "segment_mean",
    "segment_sqrt_n",
    "segment_max",
    "segment_min",
    "segment_prod",
    "unsorted_segment_sum",
    "unsorted_segment_mean",
    "unsorted_segment_sqrt_n",
    "unsorted_segment_max",
    "unsorted_segment_min",
    "unsorted_segment_prod",
]


def __getattr__(name: str) -> object:
    """Return what stood in this module while it held the sparse segments."""
    if name in sparse_segment.__all__:
        return getattr(sparse_segment, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- Sorted ---------------------------------------------------------------------------------------------------------


def segment_sum(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """
    Sum the rows of each segment, given by sorted ids or offsets: ``out[s] = sum(data[i] for segment_ids[i] == s)``.

    Args:
        data: ``[N, ...]``, float16, bfloat16, float32, float64 or any integer dtype; half types are summed in float32
            and rounded once, integers wrap.
        segment_ids: ``[N]``, int32 or int64, sorted and not negative; gaps are allowed.
        num_segments: rows of the result, ``S``. ``None`` means the last segment id + 1, which on CUDA is read back
            from the device (and refused while a CUDA graph is captured).
        offsets: ``[S + 1]``, int32 or int64, instead of ``segment_ids``: segment ``s`` is
            ``data[offsets[s] : offsets[s + 1]]``.

    Returns:
        ``[S, ...]`` with the dtype of ``data``; a segment without rows is 0 (1 for :func:`segment_prod`).
        Differentiable in ``data``, twice.

    Raises:
        ValueError: unsorted, negative or too large segment ids; offsets that do not go from 0 to ``N`` without
            decreasing; wrong shapes, dtypes or devices.

    On CUDA, with ``num_segments`` or ``offsets``, nothing waits for the device and CUDA graphs can capture it.

    Source: ``tf.math.segment_sum``.

    Example:
        >>> data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> segment_sum(data, torch.tensor([0, 0, 2]))
        tensor([[4., 6.],
                [0., 0.],
                [5., 6.]])
    """
    check_not_empty("segment_sum", offsets, data, "rows")
    return reduce_sorted(data, segment_ids, offsets, num_segments, _reduction.SUM)


def segment_mean(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """
    Average the rows of each segment, given by sorted ids or offsets.

    Arguments, result and errors as :func:`segment_sum`. The mean of integers is the wrapped sum divided by the number
    of rows, cut towards zero. (The number wraps in the dtype too; where it wraps to 0, the mean is 0.)

    Source: ``tf.math.segment_mean``.

    Example:
        >>> segment_mean(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 1]))
        tensor([1.5000, 6.0000])
    """
    check_not_empty("segment_mean", offsets, data, "rows")
    return reduce_sorted(data, segment_ids, offsets, num_segments, _reduction.MEAN)


def segment_sqrt_n(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """
    Sum the rows of each segment, given by sorted ids or offsets, divided by the square root of their number.

    Arguments, result and errors as :func:`segment_sum`; no integers.

    Source: ``tf.sparse.segment_sqrt_n`` with ``indices = range(N)``.

    Example:
        >>> segment_sqrt_n(torch.tensor([1.0, 2.0, 3.0, 4.0]), offsets=torch.tensor([0, 4, 4]))
        tensor([5., 0.])
    """
    check_not_empty("segment_sqrt_n", offsets, data, "rows")
    return reduce_sorted(data, segment_ids, offsets, num_segments, _reduction.SQRTN)


def segment_max(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """
    Return the elementwise maximum of the rows of each segment, given by sorted ids or offsets; a NaN wins over all.

    Arguments, result and errors as :func:`segment_sum`.

    In the gradient, rows that are equal to the maximum share alike; where it is NaN no row receives anything.

    Source: ``tf.math.segment_max``.

    Example:
        >>> segment_max(torch.tensor([1, 5, 3]), torch.tensor([0, 0, 2]))
        tensor([5, 0, 3])
    """
    check_not_empty("segment_max", offsets, data, "rows")
    return reduce_sorted(data, segment_ids, offsets, num_segments, _reduction.MAX)


def segment_min(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """
    Return the elementwise minimum of the rows of each segment, given by sorted ids or offsets; a NaN wins over all.

    Arguments, result and errors as :func:`segment_sum`, gradient as :func:`segment_max`.

    Source: ``tf.math.segment_min``.

    Example:
        >>> segment_min(torch.tensor([1, 5, 3]), torch.tensor([0, 0, 2]))
        tensor([1, 0, 3])
    """
    check_not_empty("segment_min", offsets, data, "rows")
    return reduce_sorted(data, segment_ids, offsets, num_segments, _reduction.MIN)


def segment_prod(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """
    Multiply the rows of each segment, given by sorted ids or offsets; a segment without rows is 1.

    Arguments, result and errors as :func:`segment_sum`.

    A row's gradient is the product of the other rows, with zeros too: with one zero in a column only that row receives
    a gradient, with two no row does. It divides the product of all but zeros, and so overflows where that does. The
    gradient of the gradient is made by torch's operators and takes memory for about ten tensors like ``data``. Where
    ``data`` has zeros it must not be differentiated again.

    Source: ``tf.math.segment_prod``.

    Example:
        >>> segment_prod(torch.tensor([2.0, 5.0, 3.0]), torch.tensor([0, 0, 2]))
        tensor([10.,  1.,  3.])
    """
    check_not_empty("segment_prod", offsets, data, "rows")
    return reduce_sorted(data, segment_ids, offsets, num_segments, _reduction.PROD)


# ---- Unsorted -------------------------------------------------------------------------------------------------------


def unsorted_segment_sum(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Sum the rows of each segment, given by ids in any order: ``out[s] = sum(data[i] for segment_ids[i] == s)``.

    Args:
        data: ``[I..., R...]``, float16, bfloat16, float32, float64 or any integer dtype; half types are summed in
            float32 and rounded once, integers wrap.
        segment_ids: ``[I...]``, int32 or int64, of any rank: its shape is the beginning of the shape of ``data``. Below
            ``num_segments``; a row whose id is negative is left out.
        num_segments: rows of the result, ``S``.

    Returns:
        ``[S, R...]`` with the dtype of ``data``; a segment without rows is 0 (1 for :func:`unsorted_segment_prod`, for
        :func:`unsorted_segment_max` and :func:`unsorted_segment_min` the lowest and the highest finite number).
        Differentiable in ``data``, twice.

    Raises:
        ValueError: segment ids that are too large; wrong shapes, dtypes or devices.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.math.unsorted_segment_sum``.

    Example:
        >>> data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> unsorted_segment_sum(data, torch.tensor([2, -1, 2]), 3)
        tensor([[0., 0.],
                [0., 0.],
                [6., 8.]])
    """
    return reduce_unsorted(data, segment_ids, num_segments, _reduction.SUM)


def unsorted_segment_mean(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Average the rows of each segment, given by ids in any order.

    Arguments, result and errors as :func:`unsorted_segment_sum`. The mean of integers is the wrapped sum divided by the
    number of rows, cut towards zero. (The number wraps in the dtype too; where it wraps to 0, the mean is 0.)

    Source: ``tf.math.unsorted_segment_mean`` (whose mean of integers is floating).

    Example:
        >>> unsorted_segment_mean(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1, 0, 1]), 3)
        tensor([2.0000, 3.5000, 0.0000])
    """
    return reduce_unsorted(data, segment_ids, num_segments, _reduction.MEAN)


def unsorted_segment_sqrt_n(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Sum the rows of each segment, given by ids in any order, divided by the square root of their number.

    Arguments, result and errors as :func:`unsorted_segment_sum`; no integers.

    Source: ``tf.math.unsorted_segment_sqrt_n``.

    Example:
        >>> unsorted_segment_sqrt_n(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 1, 1, 1]), 2)
        tensor([0., 5.])
    """
    return reduce_unsorted(data, segment_ids, num_segments, _reduction.SQRTN)


def unsorted_segment_max(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Return the elementwise maximum of the rows of each segment, given by ids in any order; a NaN wins over all.

    Arguments, result and errors as :func:`unsorted_segment_sum`, gradient as :func:`segment_max`.

    Source: ``tf.math.unsorted_segment_max``.

    Example:
        >>> unsorted_segment_max(torch.tensor([[1, 5], [3, 2]]), torch.tensor([[1, 1], [-1, 0]]), 2)
        tensor([2, 5])
    """
    return reduce_unsorted(data, segment_ids, num_segments, _reduction.MAX)


def unsorted_segment_min(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Return the elementwise minimum of the rows of each segment, given by ids in any order; a NaN wins over all.

    Arguments, result and errors as :func:`unsorted_segment_sum`, gradient as :func:`segment_max`.

    Source: ``tf.math.unsorted_segment_min``.

    Example:
        >>> unsorted_segment_min(torch.tensor([1, 5, 3], dtype=torch.int8), torch.tensor([1, 1, -1]), 3)
        tensor([127,   1, 127], dtype=torch.int8)
    """
    return reduce_unsorted(data, segment_ids, num_segments, _reduction.MIN)


def unsorted_segment_prod(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Multiply the rows of each segment, given by ids in any order; a segment without rows is 1.

    Arguments, result and errors as :func:`unsorted_segment_sum`, gradient as :func:`segment_prod`.

    Source: ``tf.math.unsorted_segment_prod``.

    Example:
        >>> unsorted_segment_prod(torch.tensor([2.0, 5.0, 3.0]), torch.tensor([1, 0, 1]), 3)
        tensor([5., 6., 1.])
    """
    return reduce_unsorted(data, segment_ids, num_segments, _reduction.PROD)
