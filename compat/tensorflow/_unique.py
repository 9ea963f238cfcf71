"""``tf.unique`` and ``tf.unique_with_counts``, and along an axis their raw operators of version 2."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ...ops.unique import take_slices
from .arguments import as_strings, as_tensor

_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


class Unique(NamedTuple):
    """What :func:`unique` returns."""

    #: ``[U]``, the distinct values in order of first appearance, dtype of ``x``; strings: a numpy array of bytes.
    y: Any
    #: ``[N]``, the position in ``y`` of each value of ``x``.
    idx: Tensor


class UniqueWithCounts(NamedTuple):
    """What :func:`unique_with_counts` returns."""

    #: ``[U]``, the distinct values in order of first appearance, dtype of ``x``; strings: a numpy array of bytes.
    y: Any
    #: ``[N]``, the position in ``y`` of each value of ``x``.
    idx: Tensor
    #: ``[U]``, how often each value occurs. (It hides tuple's method of this name, as TensorFlow's does.)
    count: Tensor  # type: ignore[assignment]


def unique(x: Any, out_idx: torch.dtype = torch.int32, name: str | None = None) -> Unique:
    """
    Find the distinct values of a vector, in the order of their first appearance.

    Args:
        x: ``[N]``: a tensor of an integer or floating dtype or bool, or strings as a list or numpy array. Equal are
            -0.0 and 0.0 (the first one is kept); every NaN is distinct.
        out_idx: dtype of ``idx``: torch.int32 or torch.int64.
        name: the name, ignored.

    Returns:
        ``(y, idx)`` with ``y[idx]`` equal to ``x``.

    Raises:
        ValueError: if ``x`` does not have rank 1 or one of those dtypes, or for another ``out_idx``.

    Source: ``tf.unique``.

    Example:
        >>> unique(torch.tensor([7, 3, 7, 9]))
        Unique(y=tensor([7, 3, 9]), idx=tensor([0, 1, 0, 2], dtype=torch.int32))
        >>> unique(["to", "be", "or", "not", "to", "be"]).y
        array([b'to', b'be', b'or', b'not'], dtype=object)
    """
    return Unique(*_unique(x, out_idx)[:2])


def unique_with_counts(x: Any, out_idx: torch.dtype = torch.int32, name: str | None = None) -> UniqueWithCounts:
    """
    Find the distinct values of a vector, in the order of their first appearance, and count each.

    The arguments and errors are as in :func:`unique`; ``count`` has the dtype ``out_idx`` too.

    Source: ``tf.unique_with_counts``.

    Example:
        >>> unique_with_counts(torch.tensor([0.0, 1.0, -0.0]), torch.int64)
        UniqueWithCounts(y=tensor([0., 1.]), idx=tensor([0, 1, 0]), count=tensor([2, 1]))
    """
    return UniqueWithCounts(*_unique(x, out_idx))


def _unique(x: Any, out_idx: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    _check_out_idx(out_idx)
    strings = as_strings("x", x)
    y: Any
    if strings is not None:
        y, idx, count = _unique_strings(strings)
    else:
        tensor = as_tensor("x", x).detach()
        if tensor.dim() != 1:
            raise ValueError(f"x must have rank 1, got shape {list(tensor.shape)}")
        if tensor.dtype in _BITS:
            y, idx, count = _unique_floats(tensor)
        elif tensor.dtype == torch.bool:
            values, idx, count = ops.unique_with_counts(tensor.view(torch.uint8))
            y = values.view(torch.bool)
        else:
            y, idx, count = ops.unique_with_counts(tensor)
    return y, idx.to(out_idx), count.to(out_idx)


def unique_along(x: Any, axis: Any, out_idx: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """
    Return the distinct slices of ``x`` along ``axis``, in order of first appearance: ``(y, idx, count)``.

    ``axis`` is a vector: ``[]`` for none, which takes ``x`` of rank 1, or ``[axis]``.
    """
    _check_out_idx(out_idx)
    axes = as_tensor("axis", axis, empty=torch.int32)
    if axes.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"axis must be int32 or int64, got {axes.dtype}")
    if axes.dim() != 1 or axes.shape[0] > 1:
        raise ValueError(f"axis must be a vector of 0 or 1 elements, got shape {list(axes.shape)}")
    if axes.shape[0] == 0:
        return _unique(x, out_idx)
    dim = int(axes[0])
    strings = as_strings("x", x)
    given: Any = as_tensor("x", x).detach() if strings is None else strings
    if not -given.ndim <= dim < given.ndim:
        raise ValueError(f"axis must be in [{-given.ndim}, {given.ndim}) for x of shape {list(given.shape)}, got {dim}")
    y: Any
    if strings is not None:
        ids = _unique_strings(strings.reshape(-1))[1].reshape(strings.shape)
        _, idx, count = ops.unique_with_counts(ids, dim)
        y = np.take(strings, _firsts(idx, count.shape[0]).numpy(), axis=dim)
    else:
        _, idx, count = ops.unique_with_counts(_comparable_slices(given, dim), 0)
        y = take_slices(given, dim, _firsts(idx, count.shape[0]))
    return y, idx.to(out_idx), count.to(out_idx)


def _check_out_idx(out_idx: torch.dtype) -> None:
    if out_idx not in (torch.int32, torch.int64):
        raise ValueError(f"out_idx must be torch.int32 or torch.int64, got {out_idx}")


def _firsts(inverse: Tensor, distinct: int) -> Tensor:
    """Return the position at which each number of ``inverse`` appears first."""
    size = inverse.shape[0]
    positions = torch.arange(size, device=inverse.device)
    return torch.full((distinct,), size, device=inverse.device).scatter_reduce_(0, inverse, positions, "amin")


def _comparable_slices(x: Tensor, dim: int) -> Tensor:
    """Return rows of integers, one per slice, that are equal if and only if the slices are."""
    slices = x.movedim(dim, 0)
    slices = slices.reshape(x.shape[dim], math.prod(slices.shape[1:]))
    if x.dtype == torch.bool:
        return slices.view(torch.uint8)
    if x.dtype not in _BITS:
        return slices
    bits = slices.contiguous().view(_BITS[x.dtype]).masked_fill(slices == 0, 0)
    # Further columns hold a different number for each slice with a NaN, which equals no other, and 0 for the rest.
    numbers = torch.arange(1, x.shape[dim] + 1, device=x.device).masked_fill(~slices.isnan().any(1), 0)
    return torch.cat([bits, numbers.view(bits.dtype).reshape(x.shape[dim], 8 // bits.element_size())], 1)


def _unique_strings(x: np.ndarray) -> tuple[np.ndarray, Tensor, Tensor]:
    """Find the distinct strings by a dictionary: by their hashes alone two different ones might be equal."""
    if x.ndim != 1:
        raise ValueError(f"x must have rank 1, got shape {list(x.shape)}")
    positions: dict[bytes, int] = {}
    inverse = torch.tensor([positions.setdefault(text, len(positions)) for text in x.tolist()], dtype=torch.int64)
    values = np.empty(len(positions), dtype=object)
    values[:] = list(positions)
    return values, inverse, torch.bincount(inverse, minlength=len(positions))


def _unique_floats(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the distinct floats by integers that are equal if and only if the floats are."""
    size = x.shape[0]
    positions = torch.arange(size, device=x.device)
    bits = x.view(_BITS[x.dtype]).to(torch.int64)
    # The integers are the floats' bits, but both zeros become 0 and each NaN gets a number that no other value has. For
    # float64 it is a NaN's pattern, for shorter types a number beyond their bits.
    first_nan = 0x7FF0000000000001 if x.dtype == torch.float64 else 1 << 40
    keys = bits.masked_fill(x == 0, 0).where(~x.isnan(), positions + first_nan)
    values, inverse, counts = ops.unique_with_counts(keys)
    return x[_firsts(inverse, values.shape[0])], inverse, counts
