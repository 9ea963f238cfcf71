"""The operators of ``tf.raw_ops`` that hash and cross."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import ops
from . import strings
from ._cross import (
    Column,
    JaggedColumn,
    columns_of,
    crossed,
    crossed_strings,
    numbers_or_fingerprints,
    signed_word,
)
from ._fingerprint import byte_strings, fingerprint
from .arguments import as_size, as_tensor
from .tensors import RaggedTensor, SparseTensor, as_values


class SparseCrossResult(NamedTuple):
    """The indices, values and shape of a cross, as the raw operators return a sparse tensor."""

    output_indices: Tensor
    output_values: Any
    output_shape: Tensor


def StringToHashBucketFast(*, input: Any, num_buckets: int, name: str | None = None) -> Tensor:
    """Compute :func:`.strings.to_hash_bucket_fast`."""
    return strings.to_hash_bucket_fast(input, num_buckets)


def StringToHashBucketStrong(*, input: Any, num_buckets: int, key: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.strings.to_hash_bucket_strong`."""
    return strings.to_hash_bucket_strong(input, num_buckets, key)


def StringToHashBucket(*, string_tensor: Any, num_buckets: int, name: str | None = None) -> Tensor:
    """Compute :func:`.strings.to_hash_bucket`."""
    return strings.hash_buckets(ops.to_hash_bucket, string_tensor, num_buckets, "string_tensor")


def AsString(
    *,
    input: Any,
    precision: int = -1,
    scientific: bool = False,
    shortest: bool = False,
    width: int = -1,
    fill: str = "",
    name: str | None = None,
) -> np.ndarray:
    """Compute :func:`.strings.as_string`."""
    return strings.as_string(input, precision, scientific, shortest, width, fill)


def Fingerprint(*, data: Any, method: Any, name: str | None = None) -> Tensor:
    """Compute :func:`torchsparse_rec.compat.tensorflow.fingerprint`."""
    return fingerprint(data, method)


def SparseCross(
    *,
    indices: Sequence[Any],
    values: Sequence[Any],
    shapes: Sequence[Any],
    dense_inputs: Sequence[Any],
    hashed_output: bool,
    num_buckets: int,
    hash_key: int,
    out_type: Any,
    internal_type: Any,
    name: str | None = None,
) -> SparseCrossResult:
    """
    Compute :func:`.sparse.cross_hashed` if ``hashed_output``, else :func:`.sparse.cross`, of columns in parts.

    ``hash_key=0`` is the key 0, not the default. ``out_type`` and ``internal_type`` follow from the rest and are
    ignored.
    """
    columns = _columns(indices, values, shapes, dense_inputs)
    if not hashed_output:
        return _parts(crossed_strings(columns, "_X_", raw=True))
    key = signed_word("hash_key", hash_key)
    return _parts(crossed(columns, as_size("num_buckets", num_buckets), key, numbers_or_fingerprints, raw=True))


def SparseCrossV2(
    *,
    indices: Sequence[Any],
    values: Sequence[Any],
    shapes: Sequence[Any],
    dense_inputs: Sequence[Any],
    sep: Any,
    name: str | None = None,
) -> SparseCrossResult:
    """Compute :func:`.sparse.cross` of columns in parts."""
    return _parts(crossed_strings(_columns(indices, values, shapes, dense_inputs), sep, raw=True))


def SparseCrossHashed(
    *,
    indices: Sequence[Any],
    values: Sequence[Any],
    shapes: Sequence[Any],
    dense_inputs: Sequence[Any],
    num_buckets: Any,
    strong_hash: Any,
    salt: Any,
    name: str | None = None,
) -> SparseCrossResult:
    """
    Compute a hashed cross whose hash starts with the first column's value, of columns in parts.

    Strings are crossed as their Fingerprint64, or as their SipHash-2-4 with the key ``salt`` if ``strong_hash``.
    Integers of sparse columns are hashed the same way, as strings of their 8 bytes. So are integers of dense columns if
    ``strong_hash``; otherwise they are crossed unhashed.
    """
    columns = _columns(indices, values, shapes, dense_inputs)
    key = as_tensor("salt", salt).tolist()
    if not isinstance(key, list) or len(key) != 2:
        raise ValueError(f"salt must be a vector of 2 integers, got {salt!r}")
    strong = bool(as_tensor("strong_hash", strong_hash))

    def hashed(column: JaggedColumn) -> Tensor:
        if not strong and not column.sparse:
            return numbers_or_fingerprints(column)
        if isinstance(column.values, Tensor):
            text, offsets = byte_strings(column.values)
            if not strong:
                return ops.string_fingerprint64(text, offsets)
            return _all_bits(*(ops.string_to_hash_bucket_strong(text, offsets, n, key) for n in (2**62, 2**62 + 1)))
        if not strong:
            return ops.fingerprint64(column.values)
        return _all_bits(*(ops.to_hash_bucket_strong(column.values, n, key) for n in (2**62, 2**62 + 1)))

    return _parts(crossed(columns, max(int(as_size("num_buckets", num_buckets)), 0), None, hashed, raw=True))


def _all_bits(low: Tensor, other: Tensor) -> Tensor:
    """Return the 64 bits of hashes, given their remainders by 2 ** 62 and 2 ** 62 + 1."""
    # h = q 2^62 + low, and so h = low - q modulo 2^62 + 1.
    upper = torch.where(low >= other, low - other, low - other + (2**62 + 1))
    return low + (upper << 62)


def _columns(
    indices: Sequence[Any], values: Sequence[Any], shapes: Sequence[Any], dense_inputs: Sequence[Any]
) -> list[Column]:
    """Return the columns, int64 or strings, in the order of the cross."""
    if not len(indices) == len(values) == len(shapes):
        raise ValueError(
            f"indices, values and shapes must have the same length, got {len(indices)}, {len(values)}, {len(shapes)}"
        )
    sparse = [SparseTensor(*parts) for parts in zip(indices, values, shapes, strict=True)]
    columns = [*sparse, *(as_values("dense_inputs", column) for column in dense_inputs)]
    for position, column in enumerate(columns):
        if column.dtype not in (torch.int64, torch.int32, bytes, np.dtype(object)):
            raise ValueError(f"values and dense_inputs must be int64 or strings, got {column.dtype} in {position}")
    return columns_of(columns)


def _parts(crosses: RaggedTensor) -> SparseCrossResult:
    result = crosses.to_sparse()
    return SparseCrossResult(result.indices, result.values, result.dense_shape)
