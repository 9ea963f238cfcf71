"""Behind :mod:`.sparse`: concatenate sparse tensors, cut blocks out of them and add a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._sparse import reorder, sizes
from ._sparse_tensor import SparseTensor, checked, take
from .arguments import as_size


def axis_of(axis: Any, rank: int) -> int:
    """Return an axis counted from the front."""
    found = as_size("axis", axis)
    if not -rank <= found < rank:
        raise ValueError(f"axis must be in [{-rank}, {rank}), got {found}")
    return found % rank


def concat(
    axis: int, sp_inputs: Sequence[SparseTensor], expand_nonconcat_dims: bool = False, name: str | None = None
) -> SparseTensor:
    """
    Put sparse tensors side by side along one dimension; entries come out sorted.

    Args:
        axis: the dimension, in [-rank, rank).
        sp_inputs: sparse tensors of one rank and dtype, whose sizes are equal except along ``axis``. A single one is
            returned unchanged.
        expand_nonconcat_dims: whether other sizes may differ: the largest counts.
        name: the name, ignored.

    Raises:
        TypeError: for inputs that are not a list of SparseTensors.
        ValueError: for no inputs, other ranks, sizes or dtypes, or an axis that there is not.

    Source: ``tf.sparse.concat``.

    Example:
        >>> parts = [SparseTensor([[1, 0]], [5.0], [2, 3]), SparseTensor([[0, 1]], [6.0], [2, 2])]
        >>> concat(1, parts).indices
        tensor([[0, 4],
                [1, 0]])
    """
    if not isinstance(sp_inputs, (list, tuple)):
        raise TypeError(f"sp_inputs must be a list, got {type(sp_inputs).__name__}")
    parts = [checked(f"sp_inputs[{k}]", part) for k, part in enumerate(sp_inputs)]
    if not parts:
        raise ValueError("sp_inputs must hold at least one SparseTensor, got none")
    if len(parts) == 1:
        return parts[0]
    rank = len(parts[0].shape)
    axis = axis_of(axis, rank)
    for k, part in enumerate(parts):
        if len(part.shape) != rank or part.dtype != parts[0].dtype:
            raise ValueError(
                f"sp_inputs must have one rank and dtype, got {rank} and {parts[0].dtype}, and in position {k} "
                f"{len(part.shape)} and {part.dtype}"
            )
    every = torch.stack([part.dense_shape for part in parts])
    shape = every.amax(0)
    others = torch.arange(rank) != axis
    if not expand_nonconcat_dims and not torch.equal(every[:, others], shape[others].expand(len(parts), -1)):
        raise ValueError(f"sp_inputs must have equal sizes but along axis {axis}, got shapes {every.tolist()}")
    shape[axis] = every[:, axis].sum()
    starts = (every[:, axis].cumsum(0) - every[:, axis]).tolist()
    moved = []
    for part, start in zip(parts, starts, strict=True):
        indices = part.indices.clone()
        indices[:, axis] += start
        moved.append(indices)
    values = [part.values for part in parts]
    joined: Any = torch.cat(values) if isinstance(values[0], Tensor) else np.concatenate(values)
    return reorder(SparseTensor(torch.cat(moved), joined, shape))


def slice(sp_input: SparseTensor, start: Any, size: Any, name: str | None = None) -> SparseTensor:
    """
    Cut a block out of a sparse tensor.

    Args:
        sp_input: the sparse tensor; its entries keep their order.
        start: the beginning of the block in each dimension.
        size: the size of the block in each dimension; its part beyond the tensor is left off.
        name: the name, ignored.

    Raises:
        TypeError: for an ``sp_input`` that is not a SparseTensor.
        ValueError: for other than one number for each dimension, or a negative one.

    Source: ``tf.sparse.slice``.

    Example:
        >>> slice(SparseTensor([[0, 2], [1, 0]], [5.0, 6.0], [2, 3]), [0, 1], [2, 9]).indices
        tensor([[0, 1]])
    """
    sp_input = checked("sp_input", sp_input)
    shape, begin, length = sp_input.dense_shape, torch.tensor(sizes("start", start)), torch.tensor(sizes("size", size))
    for argument, given in (("start", begin), ("size", length)):
        if given.shape != shape.shape or bool((given < 0).any()):
            raise ValueError(f"{argument} must be {len(shape)} numbers >= 0, got {given.tolist()}")
    length = torch.minimum(length, (shape - begin).clamp(min=0))
    first, last = begin.to(sp_input.indices.device), (begin + length).to(sp_input.indices.device)
    kept = ((sp_input.indices >= first) & (sp_input.indices < last)).all(1).nonzero().squeeze(1)
    return SparseTensor(sp_input.indices[kept] - first, take(sp_input.values, kept), length)


def expand_dims(sp_input: SparseTensor, axis: Any = None, name: str | None = None) -> SparseTensor:
    """
    Insert a dimension of size 1.

    Args:
        sp_input: the sparse tensor.
        axis: the place of the new dimension, in [-rank - 1, rank]. Default -1: behind the last.
        name: the name, ignored.

    Raises:
        TypeError: for an ``sp_input`` that is not a SparseTensor, or an axis that is not an integer.
        ValueError: for an axis out of range.

    Source: ``tf.sparse.expand_dims``.

    Example:
        >>> expand_dims(SparseTensor([[0, 2]], [5.0], [2, 3]), 0).shape
        (1, 2, 3)
    """
    sp_input = checked("sp_input", sp_input)
    if not isinstance(axis, (int, Tensor, np.integer, type(None))):
        raise TypeError(f"axis must be an integer, got {axis!r}")
    place = axis_of(-1 if axis is None else axis, len(sp_input.shape) + 1)
    indices, shape = sp_input.indices, sp_input.dense_shape
    zeros = indices.new_zeros(indices.shape[0], 1)
    return SparseTensor(
        torch.cat([indices[:, :place], zeros, indices[:, place:]], 1),
        sp_input.values,
        torch.cat([shape[:place], shape.new_ones(1), shape[place:]]),
    )
