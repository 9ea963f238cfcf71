"""
Family ``segment``: reductions of whole tensors by segment, without indices, sorted and unsorted.

Contract and order of summation: csrc/segment.h. Kernels: csrc/cpu/segment.cpp, csrc/cuda/segment.cu.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _reduction
from . import sparse_segment
from .autograd import differentiable

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


_NEEDS_DATA = (_reduction.MAX, _reduction.MIN, _reduction.PROD)


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
    return _segment_reduce(data, segment_ids, offsets, num_segments, _reduction.SUM)


def segment_mean(
    data: Tensor,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """
    Average the rows of each segment, given by sorted ids or offsets.

    Arguments, result and errors as :func:`segment_sum`; the mean of integers is the wrapped sum divided by
    the number of rows, cut towards zero (the number wraps in the dtype too; where it wraps to 0 so does the mean).

    Source: ``tf.math.segment_mean``.

    Example:
        >>> segment_mean(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 1]))
        tensor([1.5000, 6.0000])
    """
    return _segment_reduce(data, segment_ids, offsets, num_segments, _reduction.MEAN)


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
    return _segment_reduce(data, segment_ids, offsets, num_segments, _reduction.SQRTN)


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
    return _segment_reduce(data, segment_ids, offsets, num_segments, _reduction.MAX)


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
    return _segment_reduce(data, segment_ids, offsets, num_segments, _reduction.MIN)


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

    A row's gradient is the product of the other rows, with zeros too: with one zero in a column that row alone receives
    a gradient, with two no row does. It divides the product of all but zeros, and so overflows where that does. The
    gradient of the gradient is made by torch's operators and takes memory for about ten tensors like ``data``; where
    ``data`` has zeros it must not be differentiated again.

    Source: ``tf.math.segment_prod``.

    Example:
        >>> segment_prod(torch.tensor([2.0, 5.0, 3.0]), torch.tensor([0, 0, 2]))
        tensor([10.,  1.,  3.])
    """
    return _segment_reduce(data, segment_ids, offsets, num_segments, _reduction.PROD)


# ---- Unsorted -------------------------------------------------------------------------------------------------------


def unsorted_segment_sum(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Sum the rows of each segment, given by ids in any order: ``out[s] = sum(data[i] for segment_ids[i] == s)``.

    Args:
        data: ``[I..., R...]``, float16, bfloat16, float32, float64 or any integer dtype; half types are summed in
            float32 and rounded once, integers wrap.
        segment_ids: ``[I...]``, int32 or int64, of any rank: its shape is the beginning of that of ``data``. Below
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
    return _unsorted_segment_reduce(data, segment_ids, num_segments, _reduction.SUM)


def unsorted_segment_mean(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Average the rows of each segment, given by ids in any order.

    Arguments, result and errors as :func:`unsorted_segment_sum`; the mean of integers is the wrapped sum
    divided by the number of rows, cut towards zero (the number wraps in the dtype too; where it wraps to 0 so does the
    mean).

    Source: ``tf.math.unsorted_segment_mean`` (whose mean of integers is floating).

    Example:
        >>> unsorted_segment_mean(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1, 0, 1]), 3)
        tensor([2.0000, 3.5000, 0.0000])
    """
    return _unsorted_segment_reduce(data, segment_ids, num_segments, _reduction.MEAN)


def unsorted_segment_sqrt_n(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Sum the rows of each segment, given by ids in any order, divided by the square root of their number.

    Arguments, result and errors as :func:`unsorted_segment_sum`; no integers.

    Source: ``tf.math.unsorted_segment_sqrt_n``.

    Example:
        >>> unsorted_segment_sqrt_n(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 1, 1, 1]), 2)
        tensor([0., 5.])
    """
    return _unsorted_segment_reduce(data, segment_ids, num_segments, _reduction.SQRTN)


def unsorted_segment_max(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Return the elementwise maximum of the rows of each segment, given by ids in any order; a NaN wins over all.

    Arguments, result and errors as :func:`unsorted_segment_sum`, gradient as :func:`segment_max`.

    Source: ``tf.math.unsorted_segment_max``.

    Example:
        >>> unsorted_segment_max(torch.tensor([[1, 5], [3, 2]]), torch.tensor([[1, 1], [-1, 0]]), 2)
        tensor([2, 5])
    """
    return _unsorted_segment_reduce(data, segment_ids, num_segments, _reduction.MAX)


def unsorted_segment_min(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Return the elementwise minimum of the rows of each segment, given by ids in any order; a NaN wins over all.

    Arguments, result and errors as :func:`unsorted_segment_sum`, gradient as :func:`segment_max`.

    Source: ``tf.math.unsorted_segment_min``.

    Example:
        >>> unsorted_segment_min(torch.tensor([1, 5, 3], dtype=torch.int8), torch.tensor([1, 1, -1]), 3)
        tensor([127,   1, 127], dtype=torch.int8)
    """
    return _unsorted_segment_reduce(data, segment_ids, num_segments, _reduction.MIN)


def unsorted_segment_prod(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """
    Multiply the rows of each segment, given by ids in any order; a segment without rows is 1.

    Arguments, result and errors as :func:`unsorted_segment_sum`, gradient as :func:`segment_prod`.

    Source: ``tf.math.unsorted_segment_prod``.

    Example:
        >>> unsorted_segment_prod(torch.tensor([2.0, 5.0, 3.0]), torch.tensor([1, 0, 1]), 3)
        tensor([5., 6., 1.])
    """
    return _unsorted_segment_reduce(data, segment_ids, num_segments, _reduction.PROD)


# ---- Fake kernels ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("torchsparse_rec::segment_reduce")
def _(
    data: Tensor, segment_ids: Tensor | None, offsets: Tensor | None, num_segments: int | None, reduction: int
) -> Tensor:
    size = num_segments if offsets is None else offsets.shape[0] - 1
    return data.new_empty(torch.library.get_ctx().new_dynamic_size() if size is None else size, *data.shape[1:])


@torch.library.register_fake("torchsparse_rec::segment_reduce_backward")
def _(
    grad: Tensor,
    data: Tensor | None,
    segment_ids: Tensor | None,
    offsets: Tensor | None,
    rows: int,
    reduction: int,
) -> Tensor:
    return grad.new_empty(rows, *grad.shape[1:])


@torch.library.register_fake("torchsparse_rec::unsorted_segment_reduce")
def _(data: Tensor, segment_ids: Tensor, num_segments: int, reduction: int) -> Tensor:
    return data.new_empty(num_segments, *data.shape[segment_ids.dim() :])


@torch.library.register_fake("torchsparse_rec::unsorted_segment_reduce_backward")
def _(grad: Tensor, data: Tensor | None, segment_ids: Tensor, reduction: int) -> Tensor:
    return grad.new_empty(*segment_ids.shape, *grad.shape[1:])


# ---- Autograd -------------------------------------------------------------------------------------------------------


def _reduce_setup_context(ctx, inputs, output) -> None:
    data, segment_ids, offsets, _, reduction = inputs
    ctx.save_for_backward(data if reduction in _NEEDS_DATA else None, segment_ids, offsets)
    ctx.rows = data.shape[0]
    ctx.reduction = reduction


def _reduce_backward(ctx, grad):
    data, segment_ids, offsets = ctx.saved_tensors
    result = _segment_reduce_backward(grad, data, segment_ids, offsets, ctx.rows, ctx.reduction)
    return result, None, None, None, None


def _unsorted_setup_context(ctx, inputs, output) -> None:
    data, segment_ids, _, reduction = inputs
    ctx.save_for_backward(data if reduction in _NEEDS_DATA else None, segment_ids)
    ctx.reduction = reduction


def _unsorted_backward(ctx, grad):
    data, segment_ids = ctx.saved_tensors
    return _unsorted_segment_reduce_backward(grad, data, segment_ids, ctx.reduction), None, None, None


# A gradient's own gradients, sorted and unsorted alike: reduce(values, reduction) is the forward operator over the same
# segments, share(rows, data, reduction) its gradient, and upstream the gradient with respect to the gradient's result.
_Reduce = Callable[[Tensor, int], Tensor]
_Share = Callable[[Tensor, Tensor | None, int], Tensor]


def _gradients(
    upstream: Tensor, grad: Tensor, data: Tensor | None, reduction: int, reduce: _Reduce, share: _Share
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a gradient operator with respect to its ``grad`` and ``data``."""
    if data is None or reduction not in _NEEDS_DATA:
        return reduce(upstream, reduction), None
    weights = share(torch.ones_like(grad), data, reduction)  # the gradient is grad times these
    to_grad = reduce(upstream * weights, _reduction.SUM)
    if reduction == _reduction.PROD:
        return to_grad, _product_of_all_but_two(upstream, grad, data, reduce, share)
    return to_grad, None


def _product_of_all_but_two(upstream: Tensor, grad: Tensor, data: Tensor, reduce: _Reduce, share: _Share) -> Tensor:
    """Return ``grad[s] * sum(upstream[i] * (product of rows but i and k) for i != k)`` for each row k, zeros or not."""

    def sums(values: Tensor) -> Tensor:
        return share(reduce(values, _reduction.SUM), None, _reduction.SUM)

    is_zero = data == 0
    numbers = torch.where(is_zero, 1, data)
    ratios = torch.where(is_zero, 0, upstream / numbers)
    at_zeros = torch.where(is_zero, upstream, 0)
    zeros, all_ratios, all_at_zeros = sums(is_zero.to(data.dtype)), sums(ratios), sums(at_zeros)
    # Both left-out rows are numbers; one of them is the only zero; they are the only two zeros.
    without_zero = (all_ratios - ratios) / numbers
    one_zero = torch.where(is_zero, all_ratios, all_at_zeros / numbers)
    two_zeros = torch.where(is_zero, all_at_zeros - at_zeros, 0)
    others = torch.where(
        zeros == 0, without_zero, torch.where(zeros == 1, one_zero, torch.where(zeros == 2, two_zeros, 0))
    )
    return others * share(grad * reduce(numbers, _reduction.PROD), None, _reduction.SUM)


def _backward_setup_context(ctx, inputs, output) -> None:
    grad, data, segment_ids, offsets, _, reduction = inputs
    needed = reduction in _NEEDS_DATA
    ctx.save_for_backward(grad if needed else None, data if needed else None, segment_ids, offsets)
    ctx.segments = None if segment_ids is None else grad.shape[0]
    ctx.reduction = reduction


def _backward_backward(ctx, upstream):
    grad, data, segment_ids, offsets = ctx.saved_tensors

    def reduce(values: Tensor, reduction: int) -> Tensor:
        return _segment_reduce(values, segment_ids, offsets, ctx.segments, reduction)

    def share(rows: Tensor, data: Tensor | None, reduction: int) -> Tensor:
        return _segment_reduce_backward(rows, data, segment_ids, offsets, upstream.shape[0], reduction)

    return *_gradients(upstream, grad, data, ctx.reduction, reduce, share), None, None, None, None


def _unsorted_backward_setup_context(ctx, inputs, output) -> None:
    grad, data, segment_ids, reduction = inputs
    needed = reduction in _NEEDS_DATA
    ctx.save_for_backward(grad if needed else None, data if needed else None, segment_ids)
    ctx.segments = grad.shape[0]
    ctx.reduction = reduction


def _unsorted_backward_backward(ctx, upstream):
    grad, data, segment_ids = ctx.saved_tensors

    def reduce(values: Tensor, reduction: int) -> Tensor:
        return _unsorted_segment_reduce(values, segment_ids, ctx.segments, reduction)

    def share(rows: Tensor, data: Tensor | None, reduction: int) -> Tensor:
        return _unsorted_segment_reduce_backward(rows, data, segment_ids, reduction)

    return *_gradients(upstream, grad, data, ctx.reduction, reduce, share), None, None


_segment_reduce = differentiable("segment_reduce", _reduce_backward, _reduce_setup_context)
_segment_reduce_backward = differentiable("segment_reduce_backward", _backward_backward, _backward_setup_context)
_unsorted_segment_reduce = differentiable("unsorted_segment_reduce", _unsorted_backward, _unsorted_setup_context)
_unsorted_segment_reduce_backward = differentiable(
    "unsorted_segment_reduce_backward", _unsorted_backward_backward, _unsorted_backward_setup_context
)
