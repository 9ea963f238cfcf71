"""
Norms, clipping and conversion to a dense tensor of :class:`.IndexedSlices`.

Norms are of the tensor that the slices stand for: rows that share an index are added up first. TensorFlow takes the
norm of the slices as they come, which differs as soon as an index repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import ops
from .arguments import as_tensor
from .tensors import IndexedSlices


def convert_to_tensor(
    value: Any, dtype: torch.dtype | None = None, dtype_hint: Any = None, name: str | None = None
) -> Tensor:
    """
    Make a dense tensor of :class:`.IndexedSlices`: slices of one index add up, negative indices drop out.

    Args:
        value: slices whose ``dense_shape`` is known (only its first element matters), or any value that can be
            converted to a tensor.
        dtype: the dtype of the result. Slices must have it already.
        dtype_hint: the dtype of the result if ``dtype`` is None and ``value`` has no dtype of its own.
        name: the name, ignored.

    Raises:
        ValueError: for slices without ``dense_shape``, of another ``dtype``, or with an index that is too large.

    Source: ``tf.convert_to_tensor``.

    Example:
        >>> slices = IndexedSlices([[1.0], [2.0], [4.0]], [2, 0, 2], [3, 1])
        >>> convert_to_tensor(slices).T
        tensor([[2., 0., 5.]])
    """
    if not isinstance(value, IndexedSlices):
        tensor = as_tensor("value", value)
        wanted = dtype or (None if isinstance(value, Tensor) else dtype_hint)
        if wanted is not None and isinstance(value, Tensor) and value.dtype != wanted:
            raise ValueError(f"value must be {wanted}, got {value.dtype}")
        return tensor if wanted is None else tensor.to(wanted)
    if dtype is not None and dtype != value.values.dtype:
        raise ValueError(f"value must be {dtype}, got IndexedSlices of {value.values.dtype}")
    if value.dense_shape is None:
        raise ValueError("value must have a dense_shape, got IndexedSlices without one")
    if value.dense_shape.dim() != 1 or value.dense_shape.shape[0] < 1 or int(value.dense_shape[0]) < 0:
        raise ValueError(f"value must have a dense_shape of sizes, got {value.dense_shape.tolist()}")
    return ops.indexed_slices_to_dense(value.values, value.indices, int(value.dense_shape[0]))


def merged(slices: IndexedSlices) -> IndexedSlices:
    """Return the slices with rows of one index added up, in order of first appearance."""
    found = ops.deduplicate_rows(slices.values, slices.indices)
    return IndexedSlices(found.values, found.indices, slices.dense_shape)


def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: str | None = None) -> Any:
    """
    Scale ``t`` down to the norm ``clip_norm`` where its own is larger.

    Args:
        t: a tensor, or :class:`.IndexedSlices`: these are merged first, which TensorFlow does not do.
        clip_norm: a number or scalar tensor.
        axes: the dimensions whose elements make up a norm; all by default.
        name: the name, ignored.

    Returns:
        A tensor, or slices if ``t`` is slices; slices come back merged.

    Source: ``tf.clip_by_norm``.

    Example:
        >>> clip_by_norm(IndexedSlices([[3.0, 4.0], [3.0, 4.0]], [0, 0], [3, 2]), 5.0).values
        tensor([[3., 4.]])
    """
    if isinstance(t, IndexedSlices):
        slices = merged(t)
        return IndexedSlices(clip_by_norm(slices.values, clip_norm, axes), slices.indices, slices.dense_shape)
    values = as_tensor("t", t)
    limit = torch.as_tensor(clip_norm, dtype=values.dtype, device=values.device)
    dims = tuple(range(values.dim())) if axes is None else tuple(torch.as_tensor(axes).reshape(-1).tolist())
    squares = (values * values).sum(dims, keepdim=True) if dims else values * values
    # The gradient must not go through the root of 0, whose derivative is infinite.
    is_positive = squares > 0
    norms = torch.where(is_positive, torch.where(is_positive, squares, 1).sqrt(), squares)
    return values * limit / torch.maximum(norms, limit)


def global_norm(t_list: Sequence[Any], name: str | None = None) -> Tensor:
    """
    Return the Euclidean norm of all elements of all tensors; None counts for nothing.

    Args:
        t_list: tensors, :class:`.IndexedSlices` (merged first, which TensorFlow does not do), and None.
        name: the name, ignored.

    Returns:
        A scalar; 0 in float32 if ``t_list`` has no tensor.

    Raises:
        TypeError: if ``t_list`` is not a list or tuple.

    Source: ``tf.linalg.global_norm``.

    Example:
        >>> global_norm([IndexedSlices([1.0, 2.0], [0, 0], [3]), torch.tensor([4.0]), None])
        tensor(5.)
    """
    if isinstance(t_list, (str, Tensor)) or not isinstance(t_list, Sequence):
        raise TypeError(f"t_list must be a list of tensors, got {type(t_list).__name__}")
    squares = [
        (values * values).sum()
        for values in (merged(t).values if isinstance(t, IndexedSlices) else t for t in t_list)
        if values is not None
    ]
    return torch.stack(squares).sum().sqrt() if squares else torch.tensor(0.0)


def clip_by_global_norm(
    t_list: Sequence[Any], clip_norm: Any, use_norm: Any = None, name: str | None = None
) -> tuple[list[Any], Tensor]:
    """
    Scale all tensors by one number, so that their :func:`global_norm` is at most ``clip_norm``.

    Args:
        t_list: the argument of :func:`global_norm`.
        clip_norm: a number or scalar tensor.
        use_norm: the norm to go by, if known.
        name: the name, ignored.

    Returns:
        ``(list_clipped, global_norm)``. Slices keep their indices. An infinite norm makes everything NaN.

    Source: ``tf.clip_by_global_norm``.

    Example:
        >>> clip_by_global_norm([torch.tensor([6.0, 8.0]), None], 5.0)
        ([tensor([3., 4.]), None], tensor(10.))
    """
    norm = global_norm(t_list) if use_norm is None else torch.as_tensor(use_norm)
    limit = torch.as_tensor(clip_norm, dtype=norm.dtype, device=norm.device)
    scale = limit * torch.minimum(1 / norm, 1 / limit)
    scale = torch.where(norm.isfinite(), scale, torch.nan)

    def scaled(t: Any) -> Any:
        if isinstance(t, IndexedSlices):
            return IndexedSlices(t.values * scale, t.indices, t.dense_shape)
        return None if t is None else t * scale

    return [scaled(t) for t in t_list], norm
