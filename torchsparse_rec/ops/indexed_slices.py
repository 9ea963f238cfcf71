"""
Rows by their indices, as TensorFlow's ``IndexedSlices`` and torch's sparse gradients hold them: where an index repeats,
its rows add up. Composed of :func:`.unique` and :func:`.unsorted_segment_sum`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .segment import unsorted_segment_sum
from .unique import unique

__all__ = ["deduplicate_rows", "indexed_slices_norm", "indexed_slices_to_dense"]


class IndexedRows(NamedTuple):
    """The result of :func:`deduplicate_rows`: distinct indices and the sum of the rows of each."""

    #: ``[U, ...]``, the sum of the rows of each distinct index, dtype of the input.
    values: Tensor
    #: ``[U]``, the distinct indices in order of first appearance, dtype of the input.
    indices: Tensor


def deduplicate_rows(values: Tensor, indices: Tensor) -> IndexedRows:
    """
    Add up the rows of ``values`` that share an index: one row for each distinct index.

    Args:
        values: ``[N, ...]``, float16, bfloat16, float32, float64 or any integer dtype; half types are summed in
            float32 and rounded once, integers wrap.
        indices: ``[N]``, any integer dtype, in any order; negative ones are indices like others.

    Returns:
        A tuple ``(values, indices)``: one row per distinct index, in the order of first appearance. The rows of an
        index are added in the order of the input: the same bits on every run. Differentiable in ``values``, twice.

    Raises:
        ValueError: if ``indices`` does not have rank 1, an integer dtype and the length of ``values``, or for a dtype
            of ``values`` other than those above.

    On CUDA it waits for the device, so CUDA graphs cannot capture it.

    Source: ``tf.IndexedSlices``, as TensorFlow's optimizers merge them.

    Example:
        >>> deduplicate_rows(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([7, 4, 7]))
        IndexedRows(values=tensor([[4.],
                [2.]]), indices=tensor([7, 4]))
    """
    _check("deduplicate_rows", values, indices)
    distinct, inverse = unique(indices)
    return IndexedRows(unsorted_segment_sum(values, inverse, distinct.shape[0]), distinct)


def indexed_slices_to_dense(values: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    """
    Add the rows of ``values`` to a tensor of zeros, each at its index.

    Args:
        values: the argument of :func:`deduplicate_rows`.
        indices: ``[N]``, int32 or int64, below ``num_rows``; a row whose index is negative is left out.
        num_rows: the number of rows of the result.

    Returns:
        ``[num_rows, ...]`` with the dtype of ``values``. Differentiable in ``values``, twice.

    Raises:
        ValueError: for an index that is too large, and wrong shapes and dtypes.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.convert_to_tensor`` of ``tf.IndexedSlices``.

    Example:
        >>> indexed_slices_to_dense(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2]), 4)
        tensor([2., 0., 5., 0.])
    """
    _check("indexed_slices_to_dense", values, indices)
    return unsorted_segment_sum(values, indices, num_rows)


def indexed_slices_norm(values: Tensor, indices: Tensor) -> Tensor:
    """
    Compute the Euclidean norm of the rows after adding up rows that share an index: the dense tensor's norm.

    (The norm of ``values`` itself is another one as soon as an index repeats. Gradient clipping wants this one.)

    Args:
        values: the argument of :func:`deduplicate_rows`, floating.
        indices: ``[N]``, any integer dtype.

    Returns:
        A scalar with the dtype of ``values``; half types are computed in float32. Differentiable in ``values``.

    Raises:
        ValueError: as :func:`deduplicate_rows`; also for ``values`` that are not floating.

    On CUDA it waits for the device, so CUDA graphs cannot capture it.

    Source: ``tf.linalg.global_norm``, which leaves repeated indices apart.

    Example:
        >>> indexed_slices_norm(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([7, 3, 7]))
        tensor(5.3852)
    """
    if not values.is_floating_point():
        raise ValueError(f"indexed_slices_norm: values must be floating, got {values.dtype}")
    accumulator = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
    merged = deduplicate_rows(values.to(accumulator), indices).values
    return torch.linalg.vector_norm(merged).to(values.dtype)


def _check(op: str, values: Tensor, indices: Tensor) -> None:
    if indices.dim() != 1 or values.dim() < 1 or values.shape[0] != indices.shape[0]:
        raise ValueError(
            f"{op}: indices must have rank 1 and one index for each row of values, got shape {list(indices.shape)} "
            f"for values of shape {list(values.shape)}"
        )
