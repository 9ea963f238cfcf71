"""Calls of the family ``sparse_tensor`` and of the conversions between forms of rows, for sizes that must compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchsparse_rec import ops

_Compiled = tuple[Callable, Callable[[int], tuple]]


def _sparse(size: int) -> tuple[Tensor, Tensor, int, int]:
    """Return sorted entries, some rows empty, of sizes that never coincide, so that no two become one symbol."""
    generator = torch.Generator().manual_seed(size)
    rows, columns, entries = 5 * size + 1, 2 * size + 1, 7 * size + 3
    element = torch.randperm(rows * columns, generator=generator)[:entries].sort().values
    return (
        torch.stack([element // columns, element % columns], 1),
        torch.rand(entries, generator=generator),
        rows,
        columns,
    )


def _indices(size: int) -> tuple[Tensor, int, int]:
    indices, _, rows, columns = _sparse(size)
    return indices, rows, columns


def _offsets(size: int) -> tuple[Tensor, int]:
    values, offsets, _ = _jagged(size)
    return offsets, values.shape[0]


def _jagged(size: int) -> tuple[Tensor, Tensor, int]:
    indices, values, rows, columns = _sparse(size)
    return values, ops.row_ids_to_offsets(indices[:, 0], rows), columns


def _padded(size: int) -> tuple[Tensor]:
    return (ops.jagged_to_padded(*_jagged(size)),)


def _jagged_pair(size: int) -> tuple[Tensor, Tensor]:
    return _jagged(size)[:2]


def _through_nested(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    back, bounds = ops.nested_to_jagged(ops.jagged_to_nested(values, offsets) * 2)
    return back, bounds


COMPILED_SPARSE_TENSORS: dict[str, _Compiled] = {
    "sparse_reshape": (
        lambda indices, rows, columns: ops.sparse_reshape(indices, [rows, columns], [columns, -1]),
        _indices,
    ),
    "sparse_fill_empty_rows": (
        lambda indices, values, rows, _: ops.sparse_fill_empty_rows(indices, values, rows, -1.0)[:3],
        _sparse,
    ),
    "sparse_fill_empty_rows_grad": (
        lambda indices, values, rows, columns: sum(ops.sparse_fill_empty_rows_grad(indices[:, 1] // 2, values)),
        _sparse,
    ),
    "ragged_fill_empty_rows": (
        lambda indices, values, rows, _: ops.ragged_fill_empty_rows(indices[:, 0], values, rows, -1.0)[:3],
        _sparse,
    ),
    "sparse_reorder": (lambda indices, values, rows, _: ops.sparse_reorder(indices.flip(0), values), _sparse),
    "sparse_retain": (
        lambda indices, values, rows, _: ops.sparse_retain(*ops.sparse_reorder(indices, values), values > 0.5),
        _sparse,
    ),
    "sparse_to_dense": (
        lambda indices, values, rows, columns: ops.sparse_to_dense(indices, [rows, columns], values, -1.0),
        _sparse,
    ),
    "row_ids_to_offsets": (
        lambda indices, rows, _: ops.row_ids_to_offsets(indices[:, 0], rows),
        _indices,
    ),
    "offsets_to_row_ids": (
        lambda offsets, items: ops.offsets_to_row_ids(offsets, items),
        _offsets,
    ),
    "lengths": (
        lambda offsets, _: ops.lengths_to_offsets(ops.offsets_to_lengths(offsets)),
        _offsets,
    ),
    "jagged_to_padded": (ops.jagged_to_padded, _jagged),
    "padded_to_jagged": (ops.padded_to_jagged, _padded),
    "sparse_to_jagged": (
        lambda indices, values, rows, _: ops.sparse_to_jagged(indices, values, rows),
        _sparse,
    ),
    "jagged_to_sparse": (
        lambda values, offsets, columns: ops.jagged_to_sparse(values, offsets, columns)[:2],
        _jagged,
    ),
    "nested": (_through_nested, _jagged_pair),
}
