"""``tf.math``: the segment reductions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._segment import segment_reduce, unsorted_segment_reduce

__all__ = [
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_prod",
    "segment_sum",
    "unsorted_segment_max",
    "unsorted_segment_mean",
    "unsorted_segment_min",
    "unsorted_segment_prod",
    "unsorted_segment_sqrt_n",
    "unsorted_segment_sum",
]


def segment_sum(data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """
    Sum the rows of each segment.

    Args:
        data: ``[N, ...]``, floating, of any integer dtype, or complex; half types are summed in float32 and rounded
            once, integers wrap.
        segment_ids: ``[N]``, int32 or int64, sorted and not negative; gaps give rows of zeros.
        name: the name, ignored.

    Returns:
        ``[last id + 1, ...]`` with the dtype of ``data``.

    Raises:
        ValueError: unsorted or negative segment ids; wrong shapes or dtypes.

    Source: ``tf.math.segment_sum``.

    Example:
        >>> segment_sum([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [0, 0, 2])
        tensor([[4., 6.],
                [0., 0.],
                [5., 6.]])
    """
    return segment_reduce("sum", data, segment_ids)


def segment_mean(data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """
    Average the rows of each segment; the mean of integers is cut towards zero.

    The arguments, result and errors are as in :func:`segment_sum`.

    Source: ``tf.math.segment_mean``.

    Example:
        >>> segment_mean([1, 2, 6], [0, 0, 1])
        tensor([1, 6], dtype=torch.int32)
    """
    return segment_reduce("mean", data, segment_ids)


def segment_max(data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """
    Return the largest element of each column in each segment; a NaN wins over all.

    The arguments, result and errors are as in :func:`segment_sum`, but ``data`` is not complex.

    Source: ``tf.math.segment_max``.

    Example:
        >>> segment_max([1.0, 5.0, -3.0], [0, 0, 2])
        tensor([ 5.,  0., -3.])
    """
    return segment_reduce("max", data, segment_ids)


def segment_min(data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """
    Return the smallest element of each column in each segment; a NaN wins over all.

    The arguments, result and errors are as in :func:`segment_sum`, but ``data`` is not complex.

    Source: ``tf.math.segment_min``.

    Example:
        >>> segment_min([1.0, 5.0, 3.0], [0, 0, 2])
        tensor([1., 0., 3.])
    """
    return segment_reduce("min", data, segment_ids)


def segment_prod(data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """
    Multiply the rows of each segment; a segment without rows is 1.

    The arguments, result and errors are as in :func:`segment_sum`. Complex numbers are multiplied pair by pair, in
    torch's operations; on CUDA that waits for the device.

    Source: ``tf.math.segment_prod``.

    Example:
        >>> segment_prod([2.0, 5.0, 3.0], [0, 0, 2])
        tensor([10.,  1.,  3.])
    """
    return segment_reduce("prod", data, segment_ids)


def unsorted_segment_sum(data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Tensor:
    """
    Sum the rows of each segment, whose ids come in any order.

    Args:
        data: ``[I..., R...]``, floating, of any integer dtype, or complex; half types are summed in float32 and rounded
            once, integers wrap.
        segment_ids: ``[I...]``, int16, int32 or int64, below ``num_segments``; rows with a negative id are left out.
        num_segments: rows of the result; an integer or a scalar tensor.
        name: the name, ignored.

    Returns:
        ``[num_segments, R...]`` with the dtype of ``data``.

    Raises:
        ValueError: segment ids that are too large; wrong shapes or dtypes.

    Source: ``tf.math.unsorted_segment_sum``.

    Example:
        >>> unsorted_segment_sum([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [2, -1, 2], 3)
        tensor([[0., 0.],
                [0., 0.],
                [6., 8.]])
    """
    return unsorted_segment_reduce("sum", data, segment_ids, num_segments)


def unsorted_segment_mean(data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Tensor:
    """
    Average the rows of each segment. The mean of integers is floating: float32 of those up to 16 bits, else float64.

    The arguments, result and errors are as in :func:`unsorted_segment_sum`, but ``data`` is not complex.

    Source: ``tf.math.unsorted_segment_mean``.

    Example:
        >>> unsorted_segment_mean([1, 2, 6], [1, 0, 1], 3)
        tensor([2.0000, 3.5000, 0.0000], dtype=torch.float64)
    """
    return unsorted_segment_reduce("mean", data, segment_ids, num_segments)


def unsorted_segment_sqrt_n(data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Tensor:
    """
    Sum the rows of each segment and divide by the square root of their number; integers are refused.

    The arguments, result and errors are as in :func:`unsorted_segment_sum`, but ``data`` is not complex.

    Source: ``tf.math.unsorted_segment_sqrt_n``.

    Example:
        >>> unsorted_segment_sqrt_n([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1], 2)
        tensor([0., 5.])
    """
    return unsorted_segment_reduce("sqrt_n", data, segment_ids, num_segments)


def unsorted_segment_max(data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Tensor:
    """
    Return the largest element of each column in each segment, in empty segments the lowest finite number.

    The arguments, result and errors are as in :func:`unsorted_segment_sum`, but ``data`` is not complex and
    ``segment_ids`` are not int16.

    Source: ``tf.math.unsorted_segment_max``.

    Example:
        >>> unsorted_segment_max([1, 5, 3], [1, 1, -1], 2)
        tensor([-2147483648,           5], dtype=torch.int32)
    """
    return unsorted_segment_reduce("max", data, segment_ids, num_segments)


def unsorted_segment_min(data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Tensor:
    """
    Return the smallest element of each column in each segment, in empty segments the highest finite number.

    The arguments, result and errors are as in :func:`unsorted_segment_sum`, but ``data`` is not complex and
    ``segment_ids`` are not int16.

    Source: ``tf.math.unsorted_segment_min``.

    Example:
        >>> unsorted_segment_min([1, 5, 3], [1, 1, -1], 2)
        tensor([2147483647,          1], dtype=torch.int32)
    """
    return unsorted_segment_reduce("min", data, segment_ids, num_segments)


def unsorted_segment_prod(data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Tensor:
    """
    Multiply the rows of each segment; a segment without rows is 1.

    The arguments, result and errors are as in :func:`unsorted_segment_sum`, but ``segment_ids`` are not int16. Complex
    numbers are multiplied as in :func:`segment_prod`.

    Source: ``tf.math.unsorted_segment_prod``.

    Example:
        >>> unsorted_segment_prod([2.0, 5.0, 3.0], [1, 0, 1], 3)
        tensor([5., 6., 1.])
    """
    return unsorted_segment_reduce("prod", data, segment_ids, num_segments)
