"""The slow, obvious meaning of the operators of the family ``sparse_tensor``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _strides(shape: Sequence[int]) -> list[int]:
    strides, product = [], 1
    for size in reversed(shape):
        strides.insert(0, product)
        product *= size
    return strides


def _int64(number: int) -> int:
    """The number modulo 2 ** 64, as a signed one."""
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


def sparse_fill_empty_rows(
    indices: Tensor, values: Tensor, num_rows: int, default_value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = indices[:, 0].tolist()
    places: list[list[int]] = []
    sources: list[int | None] = []
    for row in range(num_rows):
        entries = [i for i, r in enumerate(rows) if r == row]
        for i in entries:
            places.append(indices[i].tolist())
            sources.append(i)
        if not entries:
            places.append([row] + [0] * (indices.shape[1] - 1))
            sources.append(None)
    filled = torch.stack([default_value if i is None else values[i] for i in sources]) if sources else values.clone()
    reverse = [sources.index(i) for i in range(len(rows))]
    return (
        filled,
        torch.tensor(places, dtype=torch.int64).reshape(len(places), indices.shape[1]),
        torch.tensor([row not in rows for row in range(num_rows)], dtype=torch.bool),
        torch.tensor(reverse, dtype=torch.int64),
    )


def sparse_fill_empty_rows_grad(reverse_index_map: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor]:
    positions = reverse_index_map.tolist()
    is_half = grad_values.dtype in (torch.float16, torch.bfloat16)
    total = torch.zeros((), dtype=torch.float32 if is_half else grad_values.dtype).tolist()
    for position, value in enumerate(grad_values.tolist()):
        if position not in positions:
            total += value
    if grad_values.is_floating_point():
        d_default = torch.tensor(total, dtype=torch.float64).to(grad_values.dtype)
    else:
        bits = torch.iinfo(grad_values.dtype).bits
        wrapped = total % 2**bits
        if torch.iinfo(grad_values.dtype).min < 0 and wrapped >= 2 ** (bits - 1):
            wrapped -= 2**bits
        d_default = torch.tensor(wrapped, dtype=grad_values.dtype)
    d_values = [grad_values[position] for position in positions]
    return torch.stack(d_values) if d_values else grad_values.new_empty(0), d_default


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
