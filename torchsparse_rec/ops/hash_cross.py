"""
Family ``hash``: crosses of columns of integers and strings.

Contract and arithmetic: csrc/hash_cross.h. Kernels: csrc/cpu/hash_cross.cpp, csrc/cuda/hash_cross.cu.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ._hash_inputs import Hashable, Hashes, hash_any
from .autograd import not_differentiable
from .hash import check_num_buckets, string_fingerprint64

__all__ = ["cross_hashed"]

#: One column of :func:`cross_hashed`.
Column: TypeAlias = Hashable | tuple[Hashable, Tensor]

#: The key that TensorFlow starts the hash of a cross with.
DEFAULT_HASH_KEY = 0xDECAFCAFFE

_ops = torch.ops.torchsparse_rec


def cross_hashed(
    columns: Sequence[Column], num_buckets: int = 0, hash_key: int | None = DEFAULT_HASH_KEY
) -> tuple[Tensor, Tensor]:
    """
    Hash every combination of one value of each column, row by row, to one number: a feature cross.

    The length of row ``b`` of the result is the product of the columns' numbers of values in row ``b``; it is empty if
    any column's row is. The last column's value changes fastest. Integers are crossed unchanged, strings as their
    :func:`fingerprint64`. Not differentiable.

    Args:
        columns: the columns, at least one, at most 120, with the same number of rows B, each one of

            * ``[B]`` or ``[B, k]`` integers or strings, as for :func:`fingerprint64`: k values in every row;
            * a pair ``(values, offsets)``: integers ``[M]`` or as many strings, and int64 ``[B + 1]``: row ``b`` has
              ``values[offsets[b]:offsets[b + 1]]``.
        num_buckets: the number by whose modulo hashes are reduced, at least 1, below 2 ** 63; 0: modulo 2 ** 63 - 1.
        hash_key: the number that the hash starts with, any integer of 64 bits, signed or unsigned. None: the hash
            starts with the first column's value itself.

    Returns:
        ``(values, offsets)``: the crosses, int64 ``[N]``, and where each row of them begins and ends, int64
        ``[B + 1]``.

    Raises:
        ValueError: for no columns, other dtypes or ranks, or different numbers of rows. Also for offsets that decrease
            or leave ``[0, M]``, ``num_buckets`` out of range, or a row of more than ``2 ** 62 / B`` crosses.

    On CUDA the number of crosses is read back, unless all columns have the same number of values in every row.

    Source:
        ``tf.sparse.cross_hashed``; there ``hash_key=0`` means the default. Without a key:
        ``tf.raw_ops.SparseCrossHashed``.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> clicks = (torch.tensor([7, 8, 9]), torch.tensor([0, 2, 3]))
        >>> ops.cross_hashed([torch.tensor([1, 2]), clicks], num_buckets=100)
        (tensor([89, 22, 82]), tensor([0, 2, 3]))
    """
    if hash_key is not None and not -(2**63) <= hash_key < 2**64:
        raise ValueError(f"cross_hashed: hash_key must be an integer of 64 bits, got {hash_key}")
    check_num_buckets("cross_hashed", num_buckets)
    if not len(columns):
        raise ValueError("cross_hashed: columns must hold at least one column")
    parsed = [_column(position, column) for position, column in enumerate(columns)]
    values, offsets = [value for value, _ in parsed], [bounds for _, bounds in parsed]
    return _ops.cross_hashed.default(values, offsets, num_buckets, None if hash_key is None else _as_int64(hash_key))


def _column(position: int, column: Column) -> tuple[Tensor, Tensor]:
    """Return one column as (values, offsets), the form of the operator's schema; a matrix has empty offsets."""
    given: Any = column
    offsets: Tensor | None = None
    if isinstance(column, tuple) and len(column) == 2 and isinstance(column[1], Tensor):
        given, offsets = column[0], column[1]
    try:
        values = hash_any(given, Hashes("cross_hashed", _as_integers, string_fingerprint64))
    except ValueError as error:
        raise ValueError(str(error).replace(": x", f": columns[{position}]", 1)) from error
    if offsets is not None:
        return values, offsets
    if values.dim() not in (1, 2):
        raise ValueError(f"cross_hashed: columns[{position}] must have 1 or 2 dimensions, got {values.dim()}")
    return values.unsqueeze(1) if values.dim() == 1 else values, values.new_empty(0)


def _as_integers(x: Tensor) -> Tensor:
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise ValueError(f"cross_hashed: x must have an integer dtype, got {x.dtype}")
    return x.to(torch.int64)


def _as_int64(word: int) -> int:
    """Return the int64 of the same bits."""
    return word - 2**64 if word >= 2**63 else word


@torch.library.register_fake("torchsparse_rec::cross_hashed")
def _cross_hashed_fake(
    values: list[Tensor], offsets: list[Tensor], num_buckets: int, hash_key: int | None
) -> tuple[Tensor, Tensor]:
    matrix = values[0].dim() == 2
    rows: Any = values[0].shape[0] if matrix else offsets[0].shape[0] - 1
    if all(value.dim() == 2 for value in values):
        count = rows * math.prod(value.shape[1] for value in values)
    else:
        count = torch.library.get_ctx().new_dynamic_size()
    return values[0].new_empty((count,)), values[0].new_empty((rows + 1,))


not_differentiable("cross_hashed")
