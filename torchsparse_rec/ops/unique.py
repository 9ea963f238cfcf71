"""
Family ``unique``: distinct values in the order of their first appearance.

Contract: csrc/unique.h. Kernels: csrc/cpu/unique.cpp, csrc/cuda/unique.cu.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas


class Unique(NamedTuple):
    """What :func:`unique` returns."""

    #: Distinct values in order of first appearance, ``[U]``, dtype of the input.
    values: Tensor
    #: For each input its position in ``values``, ``[N]``, int64.
    inverse: Tensor


class UniqueWithCounts(NamedTuple):
    """What :func:`unique_with_counts` returns."""

    #: Distinct values in order of first appearance, ``[U]``, dtype of the input.
    values: Tensor
    #: For each input its position in ``values``, ``[N]``, int64.
    inverse: Tensor
    #: How often each value occurs, ``[U]``, int64.
    counts: Tensor


def unique(x: Tensor) -> Unique:
    """
    Find the distinct values of a vector, in the order of their first appearance.

    Unlike :func:`torch.unique` nothing is sorted, so ``values[inverse]`` is ``x`` and the first value is ``x[0]``.
    The result is a function of ``x`` alone: it does not depend on the number of threads. Not differentiable.

    Args:
        x: ids, ``[N]``, any integer dtype, signed or unsigned.

    Returns:
        A tuple ``(values, inverse)``: the distinct values ``[U]`` with the dtype of ``x``, and for each ``i`` the
        position of ``x[i]`` among them, ``[N]`` int64. ``U`` depends on the data: on CUDA reading it waits for the
        device once.

    Raises:
        ValueError: if ``x`` does not have rank 1 or an integer dtype.

    On CUDA it waits for the device, so CUDA graphs cannot capture it.

    Source: ``tf.unique``.

    Example:
        >>> values, inverse = unique(torch.tensor([7, 3, 7, 7, 9, 3]))
        >>> values, inverse
        (tensor([7, 3, 9]), tensor([0, 1, 0, 0, 2, 1]))
    """
    return Unique(*torch.ops.torchsparse_rec.unique.default(x))


def unique_with_counts(x: Tensor) -> UniqueWithCounts:
    """
    Find the distinct values of a vector, in the order of their first appearance, and count each.

    Args:
        x: ids, ``[N]``, any integer dtype, signed or unsigned.

    Returns:
        A tuple ``(values, inverse, counts)``: ``values`` ``[U]`` and ``inverse`` ``[N]`` as of :func:`unique`, and how
        often each value occurs, ``[U]`` int64.

    Raises:
        ValueError: if ``x`` does not have rank 1 or an integer dtype.

    Source: ``tf.unique_with_counts``.

    Example:
        >>> unique_with_counts(torch.tensor([7, 3, 7, 7, 9, 3])).counts
        tensor([3, 2, 1])
    """
    return UniqueWithCounts(*torch.ops.torchsparse_rec.unique_with_counts.default(x))


@torch.library.register_fake("torchsparse_rec::unique")
def _unique_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    distinct = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(distinct), x.new_empty(x.shape, dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::unique_with_counts")
def _unique_with_counts_fake(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, inverse = _unique_fake(x)
    return values, inverse, values.new_empty(values.shape, dtype=torch.int64)


# Not differentiable, and said so: integers have no gradient, so calls pass the autograd keys by, at no cost.
_AUTOGRAD = torch.library.Library("torchsparse_rec", "IMPL", "Autograd")
_AUTOGRAD.impl("unique", torch.library.fallthrough_kernel)
_AUTOGRAD.impl("unique_with_counts", torch.library.fallthrough_kernel)
