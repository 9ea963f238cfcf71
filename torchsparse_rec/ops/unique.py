"""
Family ``unique``: distinct values in the order of their first appearance.

Contract: csrc/unique.h. Kernels: csrc/cpu/unique.cpp, csrc/cpu/unique_rows.cpp, csrc/cuda/unique.cu.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import not_differentiable

__all__ = ["unique", "unique_with_counts"]


class Unique(NamedTuple):
    """The result of :func:`unique`."""

    #: Distinct values, or slices, in order of first appearance, ``[U]``, dtype of the input.
    values: Tensor
    #: For each input its position in ``values``, ``[N]``, int64.
    inverse: Tensor


class UniqueWithCounts(NamedTuple):
    """The result of :func:`unique_with_counts`."""

    #: Distinct values, or slices, in order of first appearance, ``[U]``, dtype of the input.
    values: Tensor
    #: For each input its position in ``values``, ``[N]``, int64.
    inverse: Tensor
    #: How often each value occurs, ``[U]``, int64.
    counts: Tensor


def unique(x: Tensor, dim: int | None = None) -> Unique:
    """
    Find the distinct values of a vector, or slices of a tensor along ``dim``, in the order of first appearance.

    Unlike :func:`torch.unique` nothing is sorted, so ``values[inverse]`` is ``x`` and the first value is ``x[0]``.
    The result is a function of ``x`` alone: it does not depend on the number of threads. Not differentiable.

    Args:
        x: ids, ``[N]``, any integer dtype, signed or unsigned; with ``dim`` any rank but 0.
        dim: the dimension along which the slices of ``x`` are compared: equal slices are equal in every element.

    Returns:
        A tuple ``(values, inverse)``: the distinct values ``[U]`` with the dtype of ``x``, and for each ``i`` the
        position of ``x[i]`` among them, ``[N]`` int64. ``U`` depends on the data: on CUDA reading it waits for the
        device once. With ``dim``, ``values`` has the shape of ``x`` but ``U`` at ``dim``, and ``inverse`` holds the
        place of each slice.

    Raises:
        ValueError: if ``x`` does not have rank 1 (with ``dim``: is a scalar) or an integer dtype.
        IndexError: if ``x`` has no dimension ``dim``.

    On CUDA it waits for the device, so CUDA graphs cannot capture it.

    Source: ``tf.unique``, ``tf.raw_ops.UniqueV2``.

    Example:
        >>> values, inverse = unique(torch.tensor([7, 3, 7, 7, 9, 3]))
        >>> values, inverse
        (tensor([7, 3, 9]), tensor([0, 1, 0, 0, 2, 1]))
        >>> unique(torch.tensor([[1, 2], [3, 4], [1, 2]]), dim=0).values
        tensor([[1, 2],
                [3, 4]])
    """
    if dim is not None:
        return Unique(*_unique_slices(x, dim)[:2])
    return Unique(*torch.ops.torchsparse_rec.unique.default(x))


def unique_with_counts(x: Tensor, dim: int | None = None) -> UniqueWithCounts:
    """
    Find and count the distinct values of a vector, or slices of a tensor, in the order of first appearance.

    Args:
        x: ids, ``[N]``, any integer dtype, signed or unsigned; with ``dim`` any rank but 0.
        dim: the argument of :func:`unique`.

    Returns:
        A tuple ``(values, inverse, counts)``: ``values`` ``[U]`` and ``inverse`` ``[N]`` as of :func:`unique`, and how
        often each value occurs, ``[U]`` int64.

    Raises:
        ValueError: if ``x`` does not have rank 1 (with ``dim``: is a scalar) or an integer dtype.
        IndexError: if ``x`` has no dimension ``dim``.

    On CUDA it waits for the device, so CUDA graphs cannot capture it.

    Source: ``tf.unique_with_counts``, ``tf.raw_ops.UniqueWithCountsV2``.

    Example:
        >>> unique_with_counts(torch.tensor([7, 3, 7, 7, 9, 3])).counts
        tensor([3, 2, 1])
    """
    if dim is not None:
        return UniqueWithCounts(*_unique_slices(x, dim))
    return UniqueWithCounts(*torch.ops.torchsparse_rec.unique_with_counts.default(x))


def _unique_slices(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"unique: dim must be in [{-x.dim()}, {x.dim()}), got {dim}")
    firsts, inverse, counts = torch.ops.torchsparse_rec.unique_rows.default(x.movedim(dim, 0))
    return take_slices(x, dim, firsts), inverse, counts


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def take_slices(x: Tensor, dim: int, positions: Tensor) -> Tensor:
    """Return ``x.index_select(dim, positions)``, of unsigned dtypes too: torch selects from signed ones only."""
    if x.dtype in SIGNED:
        return x.view(SIGNED[x.dtype]).index_select(dim, positions).view(x.dtype)
    return x.index_select(dim, positions)


@torch.library.register_fake("torchsparse_rec::unique")
def _unique_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    distinct = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(distinct), x.new_empty(x.shape, dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::unique_with_counts")
def _unique_with_counts_fake(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, inverse = _unique_fake(x)
    return values, inverse, values.new_empty(values.shape, dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::unique_rows")
def _unique_rows_fake(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    distinct = torch.library.get_ctx().new_dynamic_size()
    firsts = x.new_empty(distinct, dtype=torch.int64)
    return firsts, x.new_empty(x.shape[0], dtype=torch.int64), torch.empty_like(firsts)


not_differentiable("unique", "unique_with_counts", "unique_rows")
