"""Buckets of numbers. Composed of :func:`torch.bucketize`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["bucketize"]


def bucketize(x: Tensor, boundaries: Tensor | Sequence[float]) -> Tensor:
    """
    Return the bucket of each number: the number of boundaries that are not above it.

    Bucket ``b`` is ``boundaries[b - 1] <= x < boundaries[b]``; NaN falls into the last bucket.

    Args:
        x: numbers of any shape, of any integer or floating dtype but uint16, uint32 and uint64.
        boundaries: ``[B]``, ascending, equal ones allowed, no NaN: a tensor on the device of ``x``, or numbers, which
            become float32 (float64 for float64 ``x``). ``x`` is compared with them in the dtype that both promote to.

    Returns:
        The shape of ``x``, int64, from 0 to B. Not differentiable.

    Raises:
        ValueError: if ``boundaries`` are not a vector, not ascending (looked at where they are numbers, or a tensor
            on the CPU outside of torch.compile) or not numbers.

    On CUDA nothing waits for the device, and CUDA graphs can capture it where ``boundaries`` is a tensor.

    Source: ``tf.raw_ops.Bucketize``; ``tf.keras.layers.Discretization``.

    Example:
        >>> bucketize(torch.tensor([-5.0, 0.0, 3.0, 10.0, float("nan")]), [0.0, 10.0])
        tensor([0, 1, 1, 2, 2])
    """
    if not isinstance(boundaries, Tensor):
        try:
            numbers = [float(boundary) for boundary in boundaries]
        except TypeError as error:
            raise ValueError(f"bucketize: boundaries must be a tensor or numbers, got {boundaries!r}") from error
        _check_number(numbers[:1])
        for position in range(1, len(numbers)):
            _check_ascending(position, numbers[position - 1], numbers[position])
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        boundaries = torch.tensor(numbers, dtype=dtype, device=x.device)
    elif boundaries.dim() != 1:
        raise ValueError(f"bucketize: boundaries must have rank 1, got shape {list(boundaries.shape)}")
    elif boundaries.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_number(boundaries[:1].tolist())
        wrong = (~(boundaries[:-1] <= boundaries[1:])).nonzero()
        if wrong.numel() > 0:
            position = int(wrong[0]) + 1
            _check_ascending(position, boundaries[position - 1].item(), boundaries[position].item())
    common = torch.promote_types(x.dtype, boundaries.dtype)
    return torch.bucketize(x.detach().to(common), boundaries.detach().to(common), right=True)


def _check_number(first: list[float]) -> None:
    if any(number != number for number in first):
        raise ValueError("bucketize: boundaries[0] must be a number, got nan")


def _check_ascending(position: int, before: float, boundary: float) -> None:
    if not before <= boundary:
        raise ValueError(
            f"bucketize: boundaries must be ascending, got {before} followed by {boundary} at position {position}"
        )
