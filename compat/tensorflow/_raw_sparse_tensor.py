"""The operators of ``tf.raw_ops`` that reshape, fill and reorder sparse tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ._sparse import dense, fill_gradient, filled_rows, reordered, reshaped, sizes
from ._sparse_tensor import as_int64, as_values, device_of
from .arguments import as_size


class Reshaped(NamedTuple):
    """What :func:`SparseReshape` returns."""

    #: ``[N, Q]``.
    output_indices: Tensor
    #: ``[Q]``, on the CPU.
    output_shape: Tensor


class FilledRows(NamedTuple):
    """What :func:`SparseFillEmptyRows` returns."""

    #: ``[M, R]``.
    output_indices: Tensor
    #: ``[M]``; strings: a numpy array of bytes.
    output_values: Any
    #: ``[nrows]``, bool.
    empty_row_indicator: Tensor
    #: ``[N]``: where each entry went.
    reverse_index_map: Tensor


class RaggedFilledRows(NamedTuple):
    """What :func:`RaggedFillEmptyRows` returns."""

    #: ``[M]``.
    output_value_rowids: Tensor
    #: ``[M]``; strings: a numpy array of bytes.
    output_values: Any
    #: ``[nrows]``, bool.
    empty_row_indicator: Tensor
    #: ``[N]``: where each value went.
    reverse_index_map: Tensor


class FilledRowsGradient(NamedTuple):
    """What :func:`SparseFillEmptyRowsGrad` and :func:`RaggedFillEmptyRowsGrad` return."""

    #: ``[N]``.
    d_values: Tensor
    #: ``[]``.
    d_default_value: Tensor


class Reordered(NamedTuple):
    """What :func:`SparseReorder` returns."""

    #: ``[N, R]``.
    output_indices: Tensor
    #: ``[N]``; strings: a numpy array of bytes.
    output_values: Any


def SparseReshape(*, input_indices: Any, input_shape: Any, new_shape: Any, name: str | None = None) -> Reshaped:
    """
    Compute :func:`.sparse.reshape`.

    Example:
        >>> SparseReshape(input_indices=[[0, 2]], input_shape=[2, 3], new_shape=[6])
        Reshaped(output_indices=tensor([[2]]), output_shape=tensor([6]))
    """
    return Reshaped(*reshaped(as_int64("input_indices", input_indices), input_shape, new_shape))


def SparseFillEmptyRows(
    *, indices: Any, values: Any, dense_shape: Any, default_value: Any, name: str | None = None
) -> FilledRows:
    """
    Compute :func:`.sparse.fill_empty_rows`, and where each entry went.

    Example:
        >>> SparseFillEmptyRows(indices=[[1]], values=[5.0], dense_shape=[2], default_value=0.0).reverse_index_map
        tensor([1])
    """
    given = as_values("values", values)
    places = as_int64("indices", indices, device_of(given))
    return FilledRows(*filled_rows(places, given, sizes("dense_shape", dense_shape), default_value))


def SparseFillEmptyRowsGrad(*, reverse_index_map: Any, grad_values: Any, name: str | None = None) -> FilledRowsGradient:
    """
    Return the gradient of :func:`SparseFillEmptyRows`; positions may repeat.

    Example:
        >>> SparseFillEmptyRowsGrad(reverse_index_map=[2, 0], grad_values=[1.0, 2.0, 4.0])
        FilledRowsGradient(d_values=tensor([4., 1.]), d_default_value=tensor(2.))
    """
    return FilledRowsGradient(*fill_gradient(reverse_index_map, grad_values))


def RaggedFillEmptyRows(
    *, value_rowids: Any, values: Any, nrows: Any, default_value: Any, name: str | None = None
) -> RaggedFilledRows:
    """
    Give every row without values the default, for values with row ids; see :func:`SparseFillEmptyRows`.

    Example:
        >>> RaggedFillEmptyRows(value_rowids=[1], values=[5.0], nrows=2, default_value=0.0).output_values
        tensor([0., 5.])
    """
    given = as_values("values", values)
    ids = as_int64("value_rowids", value_rowids, device_of(given))
    if ids.dim() != 1:
        raise ValueError(f"value_rowids must be a vector, got shape {list(ids.shape)}")
    rows = as_size("nrows", nrows)
    places, *rest = filled_rows(ids.unsqueeze(1), given, [rows], default_value)
    return RaggedFilledRows(places if rows == 0 else places.squeeze(1), *rest)


def RaggedFillEmptyRowsGrad(*, reverse_index_map: Any, grad_values: Any, name: str | None = None) -> FilledRowsGradient:
    """
    Return the gradient of :func:`RaggedFillEmptyRows`.

    Example:
        >>> RaggedFillEmptyRowsGrad(reverse_index_map=[1], grad_values=[1.0, 2.0])
        FilledRowsGradient(d_values=tensor([2.]), d_default_value=tensor(1.))
    """
    return FilledRowsGradient(*fill_gradient(reverse_index_map, grad_values))


def SparseReorder(*, input_indices: Any, input_values: Any, input_shape: Any, name: str | None = None) -> Reordered:
    """
    Compute :func:`.sparse.reorder`.

    Example:
        >>> SparseReorder(input_indices=[[1], [0]], input_values=[5.0, 6.0], input_shape=[2]).output_values
        tensor([6., 5.])
    """
    values = as_values("input_values", input_values)
    indices = as_int64("input_indices", input_indices, device_of(values))
    shape = sizes("input_shape", input_shape)
    if values.ndim != 1 or indices.dim() != 2 or list(indices.shape) != [values.shape[0], len(shape)]:
        raise ValueError(
            "input_indices must have one row for each of input_values and one column for each size of input_shape, "
            f"got shapes {list(indices.shape)} and {list(values.shape)}, and input_shape {shape}"
        )
    return Reordered(*reordered(indices, values))


def SparseToDense(
    *,
    sparse_indices: Any,
    output_shape: Any,
    sparse_values: Any,
    default_value: Any,
    validate_indices: bool = True,
    name: str | None = None,
) -> Any:
    """
    Compute :func:`.sparse.to_dense`; indices may also be a vector or scalar, values one scalar.

    Example:
        >>> SparseToDense(sparse_indices=[1, 3], output_shape=[4], sparse_values=7.0, default_value=0.0)
        tensor([0., 7., 0., 7.])
    """
    values = as_values("sparse_values", sparse_values)
    shape = sizes("output_shape", output_shape)
    indices = as_int64("sparse_indices", sparse_indices, device_of(values))
    if indices.dim() > 2:
        raise ValueError(f"sparse_indices must be a scalar, vector or matrix, got shape {list(indices.shape)}")
    if indices.dim() < 2:
        indices = indices.reshape(-1, 1)
    if values.ndim == 0:
        values = _repeated(values, indices.shape[0])
    return dense(indices, shape, values, default_value, validate_indices)


def _repeated(value: Any, count: int) -> Any:
    """Repeat a scalar ``count`` times, as a vector."""
    if isinstance(value, Tensor):
        return value.expand(count)
    return value.reshape(1).repeat(count)
