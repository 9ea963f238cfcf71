"""
Family ``sparse_tensor``: operators on a sparse tensor's (indices, values, shape).

Contract: csrc/sparse_tensor.h. Kernels: csrc/cpu/sparse_tensor*.cpp, csrc/cuda/sparse_tensor*.cu. Conversions to and
from other forms of rows are in :mod:`.jagged`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._scalars import scalar_like
from ._sparse_tensor_kernels import fill, fill_grad, to_dense
from .unique import take_slices

__all__ = [
    "ragged_fill_empty_rows",
    "sparse_fill_empty_rows",
    "sparse_fill_empty_rows_grad",
    "sparse_reorder",
    "sparse_reshape",
    "sparse_retain",
    "sparse_to_dense",
]

_ops = torch.ops.torchsparse_rec


class FilledRows(NamedTuple):
    """
    The result of :func:`sparse_fill_empty_rows`.

    Example:
        >>> filled = sparse_fill_empty_rows(torch.tensor([[1, 2]]), torch.tensor([5.0]), 2, -1.0)
        >>> filled.empty_row_indicator
        tensor([ True, False])
    """

    #: ``[M, R]``: the indices of all entries, filled ones too, grouped by row.
    indices: Tensor
    #: ``[M]``: the value of each of these entries.
    values: Tensor
    #: ``[num_rows]``, bool: which rows were empty.
    empty_row_indicator: Tensor
    #: ``[N]``, int64: the place of each given entry among the results.
    reverse_index_map: Tensor


class RaggedFilledRows(NamedTuple):
    """
    The result of :func:`ragged_fill_empty_rows`.

    Example:
        >>> ragged_fill_empty_rows(torch.tensor([1]), torch.tensor([5.0]), 2, -1.0).value_rowids
        tensor([0, 1])
    """

    #: ``[M]``, int64, sorted: the row of each value, filled ones too.
    value_rowids: Tensor
    #: ``[M]``: these values.
    values: Tensor
    #: ``[nrows]``, bool: which rows were empty.
    empty_row_indicator: Tensor
    #: ``[N]``, int64: the place of each given value among the results.
    reverse_index_map: Tensor


# ---- Shape ----------------------------------------------------------------------------------------------------------


def resolved_shape(shape: Sequence[int], new_shape: Sequence[int]) -> list[int]:
    """Return ``new_shape`` with its one -1, if any, replaced by the size that follows from the number of elements."""
    places = [d for d, size in enumerate(new_shape) if size == -1]
    if not places:
        return list(new_shape)
    if len(places) > 1:
        raise ValueError(
            f"sparse_reshape: new_shape must have at most one -1, got {list(new_shape)} with -1 at {places}"
        )
    elements, known = math.prod(shape), math.prod([size for size in new_shape if size != -1])
    if known <= 0:
        raise ValueError(
            f"sparse_reshape: new_shape must have positive sizes beside the -1 that they determine, got "
            f"{list(new_shape)}"
        )
    if elements % known != 0:
        raise ValueError(
            f"sparse_reshape: new_shape must divide the {elements} elements of shape {list(shape)}, got "
            f"{list(new_shape)}"
        )
    return [elements // known if size == -1 else size for size in new_shape]


def sparse_reshape(indices: Tensor, shape: Sequence[int], new_shape: Sequence[int]) -> Tensor:
    """
    Return the indices of a sparse tensor's entries after its elements, in row-major order, get another shape.

    The values stay unchanged: entry ``i`` stays entry ``i``.

    Args:
        indices: ``[N, R]``, int64. They are not checked against ``shape``: an index outside it gives one outside
            ``new_shape``, by the same arithmetic.
        shape: ``R`` sizes, at most 64.
        new_shape: ``Q`` sizes with the same product; one may be -1 and follows from the others.

    Returns:
        ``[N, Q]``, int64. Not differentiable.

    Raises:
        ValueError: sizes of another product, negative ones, shapes of 2 ** 63 elements or more, entries in a shape
            without elements, wrong ranks or dtypes.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.sparse.reshape``.

    Example:
        >>> sparse_reshape(torch.tensor([[0, 2], [1, 0]]), [2, 3], [3, -1])
        tensor([[1, 0],
                [1, 1]])
    """
    return _ops.sparse_reshape.default(indices, list(shape), resolved_shape(shape, new_shape))


# ---- Empty rows -----------------------------------------------------------------------------------------------------


def sparse_fill_empty_rows(indices: Tensor, values: Tensor, num_rows: int, default_value: Tensor | float) -> FilledRows:
    """
    Give every row of a sparse tensor that has no entry one: ``default_value`` at ``[row, 0, ...]``.

    Args:
        indices: ``[N, R]``, int64, in any order; the first column is the row. Other columns are not checked.
        values: ``[N]``, any dtype.
        num_rows: the first size of the sparse tensor's shape.
        default_value: a number, or a scalar tensor with the dtype and device of ``values``.

    Returns:
        ``(indices [M, R], values [M], empty_row_indicator [num_rows], reverse_index_map [N])``. Entries are grouped by
        row in increasing order; entries of one row keep their order. ``reverse_index_map[i]`` is where entry ``i``
        went. Differentiable in ``values`` and ``default_value``.

    Raises:
        IndexError: a row outside ``[0, num_rows)``.
        ValueError: wrong shapes, dtypes or devices.

    On CUDA the number of empty rows is read back, so it waits for the device, raises bad rows at once, and CUDA graphs
    cannot capture it.

    Source: ``tf.sparse.fill_empty_rows``.

    Example:
        >>> filled = sparse_fill_empty_rows(torch.tensor([[2, 5], [0, 1]]), torch.tensor([7.0, 8.0]), 3, -1.0)
        >>> filled.indices
        tensor([[0, 1],
                [1, 0],
                [2, 5]])
        >>> filled.values, filled.reverse_index_map
        (tensor([ 8., -1.,  7.]), tensor([2, 0]))
    """
    default = scalar_like("default_value", default_value, values)
    filled, places, *rest = fill(indices, values, num_rows, default)
    return FilledRows(places, filled, *rest)


def sparse_fill_empty_rows_grad(reverse_index_map: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor]:
    """
    Return the gradients of ``sparse_fill_empty_rows`` with respect to its values and its default value.

    Args:
        reverse_index_map: ``[N]``, int64, in ``[0, M)``; positions may repeat.
        grad_values: ``[M]``, floating or integer: the gradient of the filled values.

    Returns:
        ``(d_values [N], d_default_value [])``: ``grad_values[reverse_index_map]``, and the sum of the others, with the
        dtype of ``grad_values``; half types are summed in float32. Differentiable in ``grad_values``.

    Raises:
        IndexError: a position outside ``[0, M)``.
        ValueError: wrong shapes, dtypes or devices.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.raw_ops.SparseFillEmptyRowsGrad``.

    Example:
        >>> sparse_fill_empty_rows_grad(torch.tensor([2, 0]), torch.tensor([1.0, 2.0, 4.0]))
        (tensor([4., 1.]), tensor(2.))
    """
    return fill_grad(reverse_index_map, grad_values)


def ragged_fill_empty_rows(
    value_rowids: Tensor, values: Tensor, nrows: int, default_value: Tensor | float
) -> RaggedFilledRows:
    """
    Give every row of a ragged tensor that has no values one: ``default_value``.

    Args:
        value_rowids: ``[N]``, int64: the row of each value, in any order.
        values: ``[N]``, any dtype.
        nrows: the number of rows.
        default_value: a number, or a scalar tensor with the dtype and device of ``values``.

    Returns:
        ``(value_rowids [M], values [M], empty_row_indicator [nrows], reverse_index_map [N])``, as
        :func:`sparse_fill_empty_rows` with one column; its gradient is :func:`sparse_fill_empty_rows_grad` too.

    Raises:
        IndexError, ValueError: as :func:`sparse_fill_empty_rows`.

    On CUDA the number of empty rows is read back, so it waits for the device.

    Source: ``tf.raw_ops.RaggedFillEmptyRows``.

    Example:
        >>> filled = ragged_fill_empty_rows(torch.tensor([0, 2, 2]), torch.tensor([3, 1, 4]), 4, 0)
        >>> filled.value_rowids, filled.values
        (tensor([0, 1, 2, 2, 3]), tensor([3, 0, 1, 4, 0]))
    """
    if value_rowids.dim() != 1:
        raise ValueError(f"ragged_fill_empty_rows: value_rowids must have rank 1, got shape {list(value_rowids.shape)}")
    places, *rest = sparse_fill_empty_rows(value_rowids.unsqueeze(1), values, nrows, default_value)
    return RaggedFilledRows(places.squeeze(1), *rest)


# ---- Order ----------------------------------------------------------------------------------------------------------


def sparse_reorder(indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """
    Sort the entries of a sparse tensor by their indices, lexicographically.

    Args:
        indices: ``[N, R]``, int64. They are not checked: negative ones come first.
        values: ``[N, ...]``, any dtype.

    Returns:
        ``(indices, values)``, sorted; entries with equal indices keep their order. Differentiable in ``values``.

    Raises:
        ValueError: wrong shapes or dtypes.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.sparse.reorder``.

    Example:
        >>> sparse_reorder(torch.tensor([[1, 0], [0, 2], [0, 1]]), torch.tensor([1.0, 2.0, 3.0]))
        (tensor([[0, 1],
                [0, 2],
                [1, 0]]), tensor([3., 2., 1.]))
    """
    if values.dim() == 0 or indices.dim() != 2 or values.shape[0] != indices.shape[0]:
        raise ValueError(
            "sparse_reorder: values must have one entry for each row of indices, got shapes "
            f"{list(values.shape)} and {list(indices.shape)}"
        )
    ordered, permutation = _ops.sparse_reorder.default(indices)
    return ordered, take_slices(values, 0, permutation)


def sparse_retain(indices: Tensor, values: Tensor, to_retain: Tensor) -> tuple[Tensor, Tensor]:
    """
    Keep the entries of a sparse tensor where a mask is true.

    Args:
        indices: ``[N, R]``.
        values: ``[N, ...]``, any dtype.
        to_retain: ``[N]``: bool, or numbers: all but 0 keep their entry.

    Returns:
        ``(indices, values)`` of the kept entries, in their order. Differentiable in ``values``.

    Raises:
        ValueError: a mask of another length.

    On CUDA the number of kept entries is read back, so it waits for the device.

    Source: ``tf.sparse.retain``.

    Example:
        >>> sparse_retain(torch.tensor([[0], [1], [2]]), torch.tensor([5, 6, 7]), torch.tensor([True, False, True]))
        (tensor([[0],
                [2]]), tensor([5, 7]))
    """
    if to_retain.dim() != 1 or values.dim() == 0 or not (to_retain.shape[0] == values.shape[0] == indices.shape[0]):
        raise ValueError(
            "sparse_retain: to_retain must have one element for each entry, got shape "
            f"{list(to_retain.shape)} for indices {list(indices.shape)} and values {list(values.shape)}"
        )
    kept = to_retain.nonzero().squeeze(1)
    return indices.index_select(0, kept), take_slices(values, 0, kept)


def sparse_to_dense(
    indices: Tensor,
    shape: Sequence[int],
    values: Tensor,
    default_value: Tensor | float = 0,
    validate: bool = True,
) -> Tensor:
    """
    Convert a sparse tensor to a dense one: its values at their indices, ``default_value`` elsewhere.

    Args:
        indices: ``[N, R]``, int64.
        shape: ``R`` sizes.
        values: ``[N]``, any dtype.
        default_value: the value of the other elements: a number, or a scalar tensor with the dtype and device of
            ``values``.
        validate: whether indices must be sorted and distinct. Without it they may come in any order, and of several
            entries with one index the last counts.

    Returns:
        ``[*shape]``, with the dtype of ``values``. Differentiable in ``values`` (an entry that does not count has the
        gradient 0) and ``default_value``.

    Raises:
        IndexError: an index outside ``shape``, always.
        ValueError: with ``validate``, indices that repeat or are not sorted; wrong shapes, dtypes or devices; a shape
            of 2 ** 63 elements or more.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source: ``tf.sparse.to_dense``.

    Example:
        >>> sparse_to_dense(torch.tensor([[0, 2], [1, 0]]), [2, 3], torch.tensor([5.0, 6.0]), -1.0)
        tensor([[-1., -1.,  5.],
                [ 6., -1., -1.]])
    """
    return to_dense(indices, list(shape), values, scalar_like("default_value", default_value, values), validate)
