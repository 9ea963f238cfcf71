"""``tf.sparse.cross`` and ``tf.sparse.cross_hashed``, and what their raw operators share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ...ops.hash_cross import DEFAULT_HASH_KEY
from .arguments import as_size, as_strings
from .tensors import RaggedTensor, SparseTensor

#: A dense column of strings is a numpy array.
Column: TypeAlias = SparseTensor | Tensor | np.ndarray


class JaggedColumn(NamedTuple):
    """The values of a column, row by row."""

    #: int64, or strings.
    values: Tensor | np.ndarray
    #: Where each row begins, and where the last ends.
    offsets: Tensor
    sparse: bool


def columns_of(inputs: Any) -> list[Column]:
    """Return the inputs of a cross, sparse ones first as TensorFlow orders them, with numbers cast to int64."""
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"inputs must be a list, got {type(inputs).__name__}")
    for position, column in enumerate(inputs):
        strings = isinstance(column, np.ndarray) and column.dtype.kind in "SUO"
        if not strings and not isinstance(column, (Tensor, SparseTensor)):
            raise TypeError(
                f"inputs[{position}] must be a Tensor, a SparseTensor or a numpy array of strings, got "
                f"{type(column).__name__}"
            )
    ordered = sorted(inputs, key=lambda column: not isinstance(column, SparseTensor))
    return [_with_int64(column) for column in ordered]


def _with_int64(column: Column) -> Column:
    if isinstance(column, SparseTensor):
        if not isinstance(column.values, Tensor):
            return column
        return column.with_values(_as_int64(column.values))
    return _as_int64(column) if isinstance(column, Tensor) else column


def _as_int64(x: Tensor) -> Tensor:
    """Cast numbers as TensorFlow does on x86: NaN and what int64 does not hold give its least value, on CUDA too."""
    whole = x.to(torch.int64)
    if not x.is_floating_point():
        return whole
    return whole.masked_fill(~(x.abs() < 2.0**63), torch.iinfo(torch.int64).min)


def jagged(columns: Sequence[Column], raw: bool) -> tuple[list[JaggedColumn], int]:
    """Return the columns in jagged form and the number of rows. SparseTensor entries that no row reaches are lost."""
    device = next((_device(column) for column in columns if _device(column) is not None), None)
    rows = 0
    result = []
    for position, column in enumerate(columns):
        shape = tuple(column.shape)
        if len(shape) != 2:
            raise ValueError(f"{_argument(column, raw)} must be of matrices, got {list(shape)} in column {position}")
        rows = shape[0] if position == 0 else rows
        if shape[0] != rows or rows < 0:
            raise ValueError(
                f"{_argument(column, raw)} must have the batch size {max(rows, 0)}, got {shape[0]} in column {position}"
            )
        if isinstance(column, SparseTensor):
            result.append(_sparse_column(column, rows, device))
            continue
        offsets = torch.arange(rows + 1, device=device) * shape[1]
        values = column.reshape(-1) if isinstance(column, Tensor) else _strings(column.reshape(-1))
        result.append(JaggedColumn(values, offsets, False))
    return result, rows


def _argument(column: Column, raw: bool) -> str:
    """Return the name of the argument by which a raw operator, or ``tf.sparse.cross``, takes this kind of column."""
    if not raw:
        return "inputs"
    return "shapes" if isinstance(column, SparseTensor) else "dense_inputs"


def _device(column: Column) -> torch.device | None:
    where = column.indices if isinstance(column, SparseTensor) else column
    return where.device if isinstance(where, Tensor) else None


def _strings(values: np.ndarray) -> np.ndarray:
    found = as_strings("inputs", values)
    if found is None:
        raise ValueError(f"inputs must hold numbers or strings, got {values[0]!r}")
    return found


def _sparse_column(column: SparseTensor, rows: int, device: torch.device | None) -> JaggedColumn:
    """Return a SparseTensor in jagged form; as in TensorFlow, entries after the first out of row order are lost."""
    entries = column.indices[:, 0].contiguous().to(device)
    before = torch.cat([entries.new_zeros(1), entries[:-1]])[: entries.shape[0]]
    backwards = (entries < before).nonzero()
    reached = entries[: int(backwards[0])] if len(backwards) else entries
    offsets = torch.searchsorted(reached, torch.arange(rows + 1, device=entries.device))
    return JaggedColumn(column.values, offsets, True)


def crossed(
    columns: Sequence[Column],
    num_buckets: int,
    hash_key: int | None,
    hashed: Callable[[JaggedColumn], Tensor],
    *,
    raw: bool = False,
) -> RaggedTensor:
    """Return the hashed cross of the columns, row by row; ``hashed`` turns the values of one column into int64."""
    if not 0 <= num_buckets < 2**63:
        raise ValueError(f"num_buckets must be in [0, 2 ** 63), got {num_buckets}")
    if not columns:
        return RaggedTensor(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    parsed, _ = jagged(columns, raw)
    device = parsed[0].offsets.device
    values, offsets = ops.cross_hashed(
        [(hashed(column).to(device), column.offsets) for column in parsed], num_buckets, hash_key
    )
    return RaggedTensor(values, offsets)


def numbers_or_fingerprints(column: JaggedColumn) -> Tensor:
    """Return the int64 that a column is crossed as: its numbers, or the fingerprints of its strings."""
    return column.values if isinstance(column.values, Tensor) else ops.fingerprint64(column.values)


def crossed_strings(columns: Sequence[Column], separator: Any, *, raw: bool = False) -> RaggedTensor:
    """Return the cross as strings, row by row, made in Python since torch has none."""
    joint = as_strings("separator", separator)
    if joint is None or joint.ndim != 0:
        raise ValueError(f"{'sep' if raw else 'separator'} must be one string, got {separator!r}")
    parsed, rows = jagged(columns, raw)
    texts = [_texts(column.values) for column in parsed]
    bounds = [column.offsets.tolist() for column in parsed]
    join = joint.item().join
    result: list[bytes] = []
    counts = [0] * (rows + 1)
    for row in range(rows if columns else 0):
        parts = [text[at[row] : at[row + 1]] for text, at in zip(texts, bounds, strict=True)]
        result += map(join, itertools.product(*parts))
        counts[row + 1] = len(result)
    values: Any = np.empty(len(result), dtype=object)
    values[:] = result
    return RaggedTensor(values, torch.tensor(counts))


def _texts(values: Tensor | np.ndarray) -> list[bytes]:
    return [b"%d" % value for value in values.tolist()] if isinstance(values, Tensor) else values.tolist()


def cross(inputs: Any, name: str | None = None, separator: Any = None) -> SparseTensor:
    """
    Cross columns: every combination of one value of each, row by row, joined to one string.

    Args:
        inputs: a list of columns with the same number of rows. Each is a :class:`.SparseTensor` of rank 2 or a matrix
            (a tensor, or a numpy array of strings). **Sparse columns come before dense ones in the cross**, whatever
            their order here. Numbers are cast to int64. Entries of a SparseTensor that come after one of a later row
            are lost.
        name: the name, ignored.
        separator: a string between the values; default ``"_X_"``.

    Returns:
        A :class:`.SparseTensor` of strings, on the CPU: the combinations of each row, the last column's values
        changing fastest, in its first columns.

    Raises:
        TypeError: for inputs that are not a list of such columns.
        ValueError: for other ranks, different numbers of rows, or a separator that is not a string.

    Source: ``tf.sparse.cross``.

    Example:
        >>> cross([torch.tensor([[1], [2]]), torch.tensor([[3, 4], [5, 6]])]).values
        array([b'1_X_3', b'1_X_4', b'2_X_5', b'2_X_6'], dtype=object)
    """
    return crossed_strings(columns_of(inputs), "_X_" if separator is None else separator).to_sparse()


def cross_hashed(
    inputs: Any, num_buckets: Any = 0, hash_key: int | None = None, name: str | None = None
) -> SparseTensor:
    """
    Cross columns: every combination of one value of each, row by row, hashed to one number.

    Args:
        inputs: the argument of :func:`cross`.
        num_buckets: the number by whose modulo hashes are taken; 0: modulo 2 ** 63 - 1.
        hash_key: an integer of 64 bits, signed. **0 means the default**, as None does.
        name: the name, ignored.

    Returns:
        A :class:`.SparseTensor` of int64: the combinations of each row, the last column's values changing fastest, in
        its first columns.

    Raises:
        TypeError: for inputs that are not a list of such columns.
        ValueError: for other ranks, different numbers of rows, or numbers out of range.

    On CUDA the number of crosses is read back.

    Source: ``tf.sparse.cross_hashed``.

    Example:
        >>> cross_hashed([torch.tensor([[1], [2]]), torch.tensor([[3, 4], [5, 6]])], num_buckets=100).values
        tensor([51, 25, 38, 36])
    """
    columns = columns_of(inputs)
    key = signed_word("hash_key", hash_key or DEFAULT_HASH_KEY)
    return crossed(columns, as_size("num_buckets", num_buckets), key, numbers_or_fingerprints).to_sparse()


def signed_word(argument: str, value: Any) -> int:
    """Return an integer argument, checked to be in the range of int64."""
    word = as_size(argument, value, (torch.int64,))
    if not -(2**63) <= word < 2**63:
        raise ValueError(f"{argument} must be in [-2 ** 63, 2 ** 63), got {word}")
    return word
