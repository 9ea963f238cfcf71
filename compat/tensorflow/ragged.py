"""``tf.ragged``: crosses of columns whose rows have different lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.hash_cross import DEFAULT_HASH_KEY
from ._cross import crossed, crossed_strings, numbers_or_fingerprints, signed_word
from ._ragged_tensor import RaggedTensor
from ._sparse_tensor import SparseTensor, as_values
from .arguments import as_size, holds_integers

__all__ = ["RaggedTensor", "cross", "cross_hashed"]


def cross(inputs: Any, name: str | None = None) -> RaggedTensor:
    """
    Cross columns: every combination of one value of each, row by row, joined to one string by ``_X_``.

    Args:
        inputs: a list of columns with the same number of rows: :class:`.RaggedTensor` and :class:`.SparseTensor` of
            rank 2, and matrices (tensors, or strings). They are crossed in this order.
        name: the name, ignored.

    Returns:
        A :class:`.RaggedTensor` of strings: the combinations of each row, the last column's values changing fastest.

    Raises:
        TypeError: for inputs that are not a list.
        ValueError: for other ranks, different numbers of rows, or floats.

    Source: ``tf.ragged.cross``.

    Example:
        >>> rows = RaggedTensor.from_row_lengths(["b", "c", "d"], [2, 1])
        >>> cross([[["a"], ["e"]], rows]).to_list()
        [[b'a_X_b', b'a_X_c'], [b'e_X_d']]
    """
    return crossed_strings(_columns(inputs), "_X_")


def cross_hashed(
    inputs: Any, num_buckets: Any = 0, hash_key: int | None = None, name: str | None = None
) -> RaggedTensor:
    """
    Cross columns: every combination of one value of each, row by row, hashed to one number.

    Args:
        inputs: the argument of :func:`cross`.
        num_buckets: the number by whose modulo hashes are taken; 0: modulo 2 ** 63 - 1.
        hash_key: an integer of 64 bits; default: TensorFlow's. (0 is the key 0, unlike in ``tf.sparse.cross_hashed``.)
        name: the name, ignored.

    Returns:
        A :class:`.RaggedTensor` of int64.

    Raises:
        TypeError: for inputs that are not a list.
        ValueError: as :func:`cross`, and for numbers out of range.

    Source: ``tf.ragged.cross_hashed``.

    Example:
        >>> rows = RaggedTensor.from_row_lengths(["b", "c", "d"], [2, 1])
        >>> cross_hashed([[["a"], ["e"]], rows], num_buckets=100).to_list()
        [[86, 66], [94]]
    """
    key = as_size("hash_key", DEFAULT_HASH_KEY if hash_key is None else hash_key, (torch.int64,))
    key = signed_word("hash_key", key - 2**64 if key > 2**63 else key)
    return crossed(_columns(inputs), as_size("num_buckets", num_buckets), key, numbers_or_fingerprints)


def _columns(inputs: Any) -> list[Any]:
    """Return the inputs in the form that crosses take, in their order."""
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"inputs must be a list, got {type(inputs).__name__}")
    columns: list[Any] = []
    for position, given in enumerate(inputs):
        if isinstance(given, RaggedTensor):
            if given.ragged_rank != 1 or given.flat_values.ndim != 1:
                raise ValueError(f"inputs[{position}] must have rank 2, got shape {given.shape}")
            column: Any = given.to_sparse()
        else:
            column = given if isinstance(given, SparseTensor) else as_values(f"inputs[{position}]", given)
        values = column.values if isinstance(column, SparseTensor) else column
        if isinstance(values, Tensor):
            if not holds_integers(values):
                raise ValueError(f"inputs[{position}] must hold integers or strings, got {values.dtype}")
            column = column.with_values(values.long()) if isinstance(column, SparseTensor) else values.long()
        columns.append(column)
    return columns
