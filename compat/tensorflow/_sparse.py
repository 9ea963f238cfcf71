"""Behind :mod:`.sparse` and :mod:`.raw_ops`: reshape, fill, sort, filter and densify sparse tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ...ops.sparse_tensor import resolved_shape
from ._sparse_tensor import SparseTensor, as_int64, as_scalar_like, as_values, checked, take, with_last
from .arguments import as_tensor


def sizes(argument: str, value: Any) -> list[int]:
    """Return a shape as a list of integers, given as numbers or as a vector of int32 or int64."""
    tensor = as_int64(argument, value)
    if tensor.dim() != 1:
        raise ValueError(f"{argument} must be a vector, got shape {list(tensor.shape)}")
    return tensor.tolist()


def _numbered(strings: np.ndarray, indices: Tensor) -> Tensor:
    """Return the numbers of strings, which stand for them on the device of their indices: strings are on the CPU."""
    return torch.arange(strings.shape[0], device=indices.device)


def reshape(sp_input: SparseTensor, shape: Any, name: str | None = None) -> SparseTensor:
    """
    Return the same elements, in row-major order, in another shape; entries keep their order.

    Args:
        sp_input: the sparse tensor, whose indices are not checked: one outside the shape gives one outside the new
            shape.
        shape: numbers or an integer vector; one may be -1 and follows from the others.
        name: the name, ignored.

    Raises:
        TypeError: for an ``sp_input`` that is not a SparseTensor.
        ValueError: for a shape of another number of elements, or of 2 ** 63 and more.

    Source: ``tf.sparse.reshape``.

    Example:
        >>> reshape(SparseTensor([[0, 2], [1, 0]], [5.0, 6.0], [2, 3]), [3, -1]).indices
        tensor([[1, 0],
                [1, 1]])
    """
    sp_input = checked("sp_input", sp_input)
    indices, new_shape = reshaped(sp_input.indices, sp_input.dense_shape, shape)
    return SparseTensor(indices, sp_input.values, new_shape)


def reshaped(indices: Tensor, shape: Any, new_shape: Any) -> tuple[Tensor, Tensor]:
    """Return the indices in the new shape, and the new shape without -1."""
    old = sizes("shape", shape)
    new = resolved_shape(old, sizes("new_shape", new_shape))
    return ops.sparse_reshape(indices, old, new), torch.tensor(new, dtype=torch.int64)


def fill_empty_rows(sp_input: SparseTensor, default_value: Any, name: str | None = None) -> tuple[SparseTensor, Tensor]:
    """
    Give every row without entries one: ``default_value`` at ``[row, 0, ...]``.

    Args:
        sp_input: a sparse tensor of any rank >= 1, with entries in any order.
        default_value: a scalar of the values' kind.
        name: the name, ignored.

    Returns:
        ``(sparse tensor, empty_row_indicator)``: entries grouped by row in increasing order, entries of one row in
        their order; and which rows were empty, bool.

    Raises:
        TypeError: for an ``sp_input`` that is not a SparseTensor, or a default of another kind.
        IndexError: for a row outside the shape.

    Source: ``tf.sparse.fill_empty_rows``.

    Example:
        >>> filled, empty = fill_empty_rows(SparseTensor([[1, 2]], [5.0], [3, 4]), -1.0)
        >>> filled.values, empty
        (tensor([-1.,  5., -1.]), tensor([ True, False,  True]))
    """
    sp_input = checked("sp_input", sp_input)
    indices, values, is_empty, _ = filled_rows(
        sp_input.indices, sp_input.values, sizes("dense_shape", sp_input.dense_shape), default_value
    )
    return SparseTensor(indices, values, sp_input.dense_shape), is_empty


def filled_rows(
    indices: Tensor, values: Any, dense_shape: list[int], default_value: Any
) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Call ``ops.sparse_fill_empty_rows``, for strings too."""
    if not dense_shape or indices.dim() != 2 or indices.shape[1] != len(dense_shape):
        raise ValueError(
            "dense_shape must have one size for each column of indices, at least one, got "
            f"{dense_shape} for indices of shape {list(indices.shape)}"
        )
    default = as_scalar_like("default_value", default_value, values)
    if isinstance(values, Tensor):
        return ops.sparse_fill_empty_rows(indices, values, dense_shape[0], default)
    if values.ndim != 1:
        raise ValueError(f"values must be a vector, got shape {list(values.shape)}")
    filled = ops.sparse_fill_empty_rows(indices, _numbered(values, indices), dense_shape[0], values.shape[0])
    return filled.indices, take(with_last(values, default), filled.values), *filled[2:]


def fill_gradient(reverse_index_map: Any, grad_values: Any) -> tuple[Tensor, Tensor]:
    """Call ``ops.sparse_fill_empty_rows_grad``, for complex numbers too."""
    grad = as_tensor("grad_values", grad_values)
    positions = as_int64("reverse_index_map", reverse_index_map, grad.device)
    if not grad.is_complex():
        return ops.sparse_fill_empty_rows_grad(positions, grad)
    parts = [ops.sparse_fill_empty_rows_grad(positions, part) for part in (grad.real, grad.imag)]
    d_values, d_default = (torch.complex(*pair) for pair in zip(*parts, strict=True))
    return d_values, d_default


def reorder(sp_input: SparseTensor, name: str | None = None) -> SparseTensor:
    """
    Sort the entries by their indices, lexicographically.

    Entries with equal indices keep their order, where TensorFlow keeps it for few entries only. Indices are not
    checked.

    Source: ``tf.sparse.reorder``.

    Example:
        >>> reorder(SparseTensor([[1, 0], [0, 2]], ["a", "b"], [2, 3])).values
        array([b'b', b'a'], dtype=object)
    """
    sp_input = checked("sp_input", sp_input)
    return SparseTensor(*reordered(sp_input.indices, sp_input.values), sp_input.dense_shape)


def reordered(indices: Tensor, values: Any) -> tuple[Tensor, Any]:
    """Sort indices and values by the indices."""
    if isinstance(values, Tensor):
        return ops.sparse_reorder(indices, values)
    ordered, places = ops.sparse_reorder(indices, _numbered(values, indices))
    return ordered, take(values, places)


def retain(sp_input: SparseTensor, to_retain: Any) -> SparseTensor:
    """
    Keep the entries that a mask selects, by True or by numbers that are not 0.

    Raises:
        TypeError: for an ``sp_input`` that is not a SparseTensor.
        ValueError: for a mask of another length.

    Source: ``tf.sparse.retain``.

    Example:
        >>> retain(SparseTensor([[0], [1]], [5.0, 6.0], [2]), [False, True]).values
        tensor([6.])
    """
    sp_input = checked("sp_input", sp_input)
    mask = as_tensor("to_retain", to_retain, device=sp_input.indices.device)
    if mask.shape != (sp_input.indices.shape[0],):
        raise ValueError(
            f"to_retain must have one element for each of the {sp_input.indices.shape[0]} entries, got shape "
            f"{list(mask.shape)}"
        )
    kept = mask.nonzero().squeeze(1)
    return SparseTensor(sp_input.indices[kept], take(sp_input.values, kept), sp_input.dense_shape)


def to_dense(
    sp_input: SparseTensor, default_value: Any = None, validate_indices: bool = True, name: str | None = None
) -> Any:
    """
    Write the entries into a dense tensor, or strings into a numpy array.

    Args:
        sp_input: the sparse tensor.
        default_value: the value of the other elements: a scalar of the values' kind; default: 0, "" or False.
        validate_indices: whether indices must be sorted and distinct. Without it the last of several entries with one
            index counts, but all of them get the element's gradient, as in TensorFlow.
        name: the name, ignored.

    Raises:
        TypeError: for an ``sp_input`` that is not a SparseTensor, or a default of another kind.
        IndexError: for an index outside the shape.
        ValueError: with ``validate_indices``, for indices that repeat or are not sorted.

    Source: ``tf.sparse.to_dense``.

    Example:
        >>> to_dense(SparseTensor([[0, 2], [1, 0]], [5.0, 6.0], [2, 3]))
        tensor([[0., 0., 5.],
                [6., 0., 0.]])
    """
    sp_input = checked("sp_input", sp_input)
    if default_value is None:
        default_value = sp_input.values.new_zeros(()) if isinstance(sp_input.values, Tensor) else b""
    shape = sizes("dense_shape", sp_input.dense_shape)
    return dense(sp_input.indices, shape, sp_input.values, default_value, validate_indices)


def dense(indices: Tensor, shape: list[int], values: Any, default_value: Any, validate: bool) -> Any:
    """Call ``ops.sparse_to_dense``, for strings too, with TensorFlow's gradient."""
    default = as_scalar_like("default_value", default_value, values)
    if not isinstance(values, Tensor):
        places = ops.sparse_to_dense(indices, shape, _numbered(values, indices), values.shape[0], validate)
        return take(with_last(values, default), places)
    if validate or not (values.requires_grad or default.requires_grad):
        return ops.sparse_to_dense(indices, shape, values, default, validate)
    return _DenseOfRepeated.apply(indices, shape, values, default)


class _DenseOfRepeated(torch.autograd.Function):
    """Gives every entry its element's gradient, even if a later entry replaced it, and the rest to the default."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, shape: list[int], values: Tensor, default: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        return ops.sparse_to_dense(indices, shape, values, default, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor]:  # type: ignore[override]
        (indices,) = ctx.saved_tensors
        d_values = grad[tuple(indices.unbind(1))] if indices.shape[1] else grad.expand(indices.shape[0])
        # Half types are rounded once, at the end.
        wide = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
        d_default = grad.sum(dtype=wide) - d_values.sum(dtype=wide)
        return None, None, d_values, d_default.to(grad.dtype)


def from_dense(tensor: Any, name: str | None = None) -> SparseTensor:
    """
    Return the elements of a dense tensor that are not 0, "" or False, as entries. -0.0 is 0; NaN is not.

    Args:
        tensor: rank >= 1; a tensor, numbers or strings.
        name: the name, ignored.

    Source: ``tf.sparse.from_dense``.

    Example:
        >>> from_dense([[0.0, 5.0], [0.0, 0.0]]).indices
        tensor([[0, 1]])
    """
    values = as_values("tensor", tensor)
    if values.ndim == 0:
        raise ValueError("tensor must have rank >= 1, got a scalar")
    mask = values != 0 if isinstance(values, Tensor) else torch.from_numpy((values != b"").astype(bool))
    indices = mask.nonzero()
    flat = take(values.reshape(-1), mask.reshape(-1).nonzero().squeeze(1))
    return SparseTensor(indices, flat, torch.tensor(values.shape, dtype=torch.int64))
