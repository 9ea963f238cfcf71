"""Slow, obvious references of the operators of the family ``sparse_tensor``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .numbers import on_tensors


def _strides(shape: Sequence[int]) -> list[int]:
    strides: list[int] = []
    product = 1
    for size in reversed(shape):
        strides.insert(0, product)
        product *= size
    return strides


def _int64(number: int) -> int:
    """Return the number modulo 2 ** 64, as a signed one."""
    return (number + 2**63) % 2**64 - 2**63


def sparse_reshape(indices: Tensor, shape: Sequence[int], new_shape: Sequence[int]) -> Tensor:
    if list(shape) == list(new_shape):
        return indices.clone()
    rows = []
    for index in indices.tolist():
        element = _int64(sum(i * stride for i, stride in zip(index, _strides(shape), strict=True)))
        sign, rest, row = (-1 if element < 0 else 1), abs(element), []
        for stride in _strides(new_shape):
            row.append(_int64(sign * (rest // stride)))
            rest %= stride
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), len(new_shape))


@on_tensors
def sparse_fill_empty_rows(
    indices: np.ndarray, values: np.ndarray, num_rows: int, default_value: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    is_empty = np.bincount(indices[:, 0], minlength=num_rows) == 0
    (rows,) = np.nonzero(is_empty)
    places = np.concatenate([indices, np.stack([rows, *[0 * rows] * (indices.shape[1] - 1)], axis=1)])
    order = np.argsort(places[:, 0], kind="stable")
    filled = np.concatenate([values, np.full(len(rows), default_value, values.dtype)])
    return filled[order], places[order], is_empty, np.argsort(order)[: len(indices)]


@on_tensors
def sparse_fill_empty_rows_grad(
    reverse_index_map: np.ndarray, grad_values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    of_default = np.ones(len(grad_values), bool)
    of_default[reverse_index_map] = False
    return grad_values[reverse_index_map], np.asarray(grad_values[of_default].sum(dtype=grad_values.dtype))


def sparse_reorder(indices: Tensor) -> tuple[Tensor, Tensor]:
    rows = indices.tolist()
    order = sorted(range(len(rows)), key=lambda i: rows[i])
    permutation = torch.tensor(order, dtype=torch.int64)
    return indices[permutation], permutation


def sparse_to_dense(
    indices: Tensor, shape: Sequence[int], values: Tensor, default_value: Tensor, validate: bool
) -> Tensor:
    dense = torch.empty(list(shape), dtype=values.dtype)
    dense[...] = default_value
    for index, value in zip(indices.tolist(), values, strict=True):
        dense[tuple(index)] = value
    return dense


def row_ids_to_offsets(row_ids: Tensor, num_rows: int) -> Tensor:
    ids = row_ids.tolist()
    return torch.tensor([sum(i < row for i in ids) for row in range(num_rows + 1)], dtype=torch.int64)


def offsets_to_row_ids(offsets: Tensor, num_items: int) -> Tensor:
    bounds = offsets.tolist()
    ids = [row for row, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)) for _ in range(a, b)]
    return torch.tensor(ids, dtype=torch.int64)


FUNCTIONS = (
    sparse_reshape,
    sparse_fill_empty_rows,
    sparse_fill_empty_rows_grad,
    sparse_reorder,
    sparse_to_dense,
    row_ids_to_offsets,
    offsets_to_row_ids,
)
