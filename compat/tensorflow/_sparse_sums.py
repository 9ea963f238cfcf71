"""Behind :mod:`.sparse`: counts, and products with a dense matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import ops
from ._ragged_tensor import RaggedTensor
from ._sparse_tensor import SparseTensor, checked
from .arguments import as_size, as_tensor


def bincount(
    values: Any,
    weights: Any = None,
    axis: Any = 0,
    minlength: Any = None,
    maxlength: Any = None,
    binary_output: bool = False,
    name: str | None = None,
) -> SparseTensor:
    """
    Count how often each number occurs, or add up its weights.

    Args:
        values: numbers that are not negative, int32 or int64. They are a tensor or numbers of rank 1 or 2, a
            :class:`.SparseTensor` of rank 1 or 2, or a :class:`.RaggedTensor` of rank 2.
        weights: a weight for each number, in the same kind of tensor and the same places; default: none.
        axis: 0: count all numbers together; -1: count each row.
        minlength: the least length of the result, or of its rows.
        maxlength: the length of the result, or of its rows; numbers that are not below it do not count.
        binary_output: whether 1 stands for any count. Not with weights.
        name: the name, ignored.

    Returns:
        A :class:`.SparseTensor` of rank 1, or of rank 2 for rows: at each number that occurs its count, of the dtype of
        ``values``, or the sum of its weights. Sorted.

    Raises:
        ValueError: for negative numbers, other ranks or dtypes, another axis, or both weights and ``binary_output``.

    Source: ``tf.sparse.bincount``.

    Example:
        >>> found = bincount([[1, 1, 3], [0, 2, 2]], axis=-1)
        >>> found.indices.tolist(), found.values.tolist(), found.shape
        ([[0, 1], [0, 3], [1, 0], [1, 2]], [2, 1, 1, 2], (2, 4))
    """
    if axis not in (None, 0, -1):
        raise ValueError(f"axis must be 0 or -1, got {axis}")
    if weights is not None and binary_output:
        raise ValueError("binary_output must be False with weights, got True")
    numbers, rows, count = _rows_of("values", values)
    if numbers.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"values must be int32 or int64, got {numbers.dtype}")
    weighed = _weights_like(values, rows, weights)
    wrong = (numbers < 0).nonzero()
    if len(wrong):
        raise ValueError(f"values must not be negative, got {int(numbers[wrong[0]])} at position {int(wrong[0])}")
    if not axis:
        rows, count = torch.zeros_like(rows), None
    least, length = _length("minlength", minlength), _length("maxlength", maxlength)
    if length is not None:
        kept = numbers < length
        numbers, rows, weighed = numbers[kept], rows[kept], None if weighed is None else weighed[kept]
    else:
        # As in TensorFlow, the result of no numbers has length 1.
        length = max(least or 0, int(numbers.max()) + 1 if len(numbers) else 1)
    places, inverse, counts = torch.unique(
        torch.stack([rows, numbers.to(torch.int64)]), dim=1, return_inverse=True, return_counts=True
    )
    found: Tensor = torch.ones_like(counts) if binary_output else counts
    found = found.to(numbers.dtype)
    if weighed is not None:
        found = weighed.new_zeros(len(counts)).index_add(0, inverse, weighed)
    if count is None:
        return SparseTensor(places[1:].T, found, torch.tensor([length]))
    return SparseTensor(places.T, found, torch.tensor([count, length]))


def _length(argument: str, value: Any) -> int | None:
    length = None if value is None else as_size(argument, value)
    if length is not None and length < 0:
        raise ValueError(f"{argument} must not be negative, got {length}")
    return length


def _rows_of(argument: str, values: Any) -> tuple[Tensor, Tensor, int | None]:
    """Return the numbers, the row of each, and the number of rows, which is None for a vector."""
    if isinstance(values, SparseTensor) and len(values.shape) <= 2:
        numbers = values.values
        if isinstance(numbers, Tensor):
            alone = len(values.shape) == 1
            rows = torch.zeros_like(values.indices[:, 0]) if alone else values.indices[:, 0]
            return numbers, rows, None if alone else values.shape[0]
    elif isinstance(values, RaggedTensor):
        if isinstance(values.values, Tensor) and values.values.dim() == 1:
            return values.values, values.value_rowids(), len(values.row_splits) - 1
    elif not isinstance(values, SparseTensor):
        numbers = as_tensor(argument, values)
        if numbers.dim() == 1:
            return numbers, torch.zeros(len(numbers), dtype=torch.int64, device=numbers.device), None
        if numbers.dim() == 2:
            rows = torch.arange(len(numbers), device=numbers.device).repeat_interleave(numbers.shape[1])
            return numbers.reshape(-1), rows, len(numbers)
    raise ValueError(f"{argument} must be numbers of rank 1 or 2, got {values!r}")


def _weights_like(values: Any, rows: Tensor, weights: Any) -> Tensor | None:
    if weights is None:
        return None
    same = type(values) if isinstance(values, (SparseTensor, RaggedTensor)) else None
    if same is not None and not isinstance(weights, same):
        raise ValueError(f"weights must be a {same.__name__} as values are, got {type(weights).__name__}")
    found, places, _ = _rows_of("weights", weights)
    if not torch.equal(places, rows):
        raise ValueError("weights must have the places of values, got others")
    return found


def sparse_dense_matmul(
    sp_a: Any, b: Any, adjoint_a: bool = False, adjoint_b: bool = False, name: str | None = None
) -> Tensor:
    """
    Multiply a sparse with a dense matrix, or a dense with a sparse one.

    Args:
        sp_a: a :class:`.SparseTensor` ``[n, k]`` in any order, equal indices added up; a tensor if ``b`` is sparse.
        b: a tensor ``[k, m]`` of the same dtype, or a :class:`.SparseTensor`.
        adjoint_a: whether to take the conjugate transpose of ``sp_a``.
        adjoint_b: whether to take the conjugate transpose of ``b``.
        name: the name, ignored.

    Returns:
        ``[n, m]``. Differentiable in both. Half types are added up in float32 and rounded once.

    Raises:
        TypeError: for none or two sparse matrices.
        IndexError: for an index outside the shape.
        ValueError: for other ranks, sizes or dtypes.

    Source: ``tf.sparse.sparse_dense_matmul``.

    Example:
        >>> sparse_dense_matmul(SparseTensor([[0, 2], [1, 0]], [5.0, 6.0], [2, 3]), [[1.0], [2.0], [3.0]])
        tensor([[15.],
                [ 6.]])
    """
    if isinstance(b, SparseTensor):
        # A B = (B' A')'.
        return sparse_dense_matmul(b, sp_a, not adjoint_b, not adjoint_a).mH
    a = checked("sp_a", sp_a)
    dense = as_tensor("b", b, device=a.indices.device)
    if len(a.shape) != 2 or dense.dim() != 2 or a.dtype != dense.dtype:
        raise ValueError(
            f"sp_a and b must be matrices of one dtype, got shapes {list(a.shape)} and {list(dense.shape)}, and "
            f"{a.dtype} and {dense.dtype}"
        )
    wrong = ((a.indices < 0) | (a.indices >= a.dense_shape.to(a.indices.device))).any(1).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise IndexError(
            f"sp_a: indices[{place}] must be in the shape {list(a.shape)}, got {a.indices[place].tolist()}"
        )
    rows, columns = a.indices.unbind(1)
    (n, k), values = a.shape, a.values
    if adjoint_a:
        rows, columns, n, k, values = columns, rows, k, n, values.conj()
    if adjoint_b:
        dense = dense.mH
    if dense.shape[0] != k:
        raise ValueError(f"b must have {k} rows, as sp_a has columns, got {dense.shape[0]}")
    if not dense.is_complex():
        wide = torch.float32 if dense.dtype in (torch.float16, torch.bfloat16) else dense.dtype
        products = dense[columns].to(wide) * values.to(wide).unsqueeze(1)
        return ops.unsorted_segment_sum(products, rows, n).to(dense.dtype)
    return torch.zeros(n, dense.shape[1], dtype=dense.dtype, device=dense.device).index_add(
        0, rows, dense[columns] * values.unsqueeze(1)
    )
