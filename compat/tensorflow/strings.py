"""``tf.strings``: hash buckets, and the text of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import ops
from .arguments import as_size, as_strings, as_tensor

__all__ = ["as_string", "to_hash_bucket", "to_hash_bucket_fast", "to_hash_bucket_strong"]


def to_hash_bucket_fast(input: Any, num_buckets: int, name: str | None = None) -> Tensor:
    """
    Map strings to buckets by FarmHash Fingerprint64, modulo ``num_buckets``.

    Args:
        input: strings: a ``str`` or ``bytes``, a nested list of them, a numpy array of dtype ``S``, ``U`` or ``O``, or
            a pyarrow array, of any shape. ``str`` is hashed as UTF-8. Or an integer tensor or array: TensorFlow needs
            ``tf.strings.as_string`` for it first; the result is the same.
        num_buckets: the number of buckets, at least 1, below 2 ** 63.
        name: the name, ignored.

    Returns:
        int64, of the shape of ``input``, on its device.

    Raises:
        ValueError: for inputs other than strings and integers, or ``num_buckets`` that is no integer or out of range.

    Source: ``tf.strings.to_hash_bucket_fast``.

    Example:
        >>> to_hash_bucket_fast([["a", "b"], ["c", "d"]], 7)
        tensor([[5, 2],
                [5, 2]])
    """
    return hash_buckets(ops.to_hash_bucket_fast, input, num_buckets)


def to_hash_bucket_strong(input: Any, num_buckets: int, key: Any, name: str | None = None) -> Tensor:
    """
    Map strings to buckets by SipHash-2-4, modulo ``num_buckets``.

    Args:
        input: the argument of :func:`to_hash_bucket_fast`.
        num_buckets: the number of buckets, at least 1, below 2 ** 63.
        key: two integers of 64 bits, signed.
        name: the name, ignored.

    Returns:
        int64, of the shape of ``input``, on its device.

    Raises:
        ValueError: for what :func:`to_hash_bucket_fast` does not take, or another key.

    Source: ``tf.strings.to_hash_bucket_strong``.

    Example:
        >>> to_hash_bucket_strong(["Hello", "TF"], 3, [1, 2])
        tensor([2, 0])
    """
    if not isinstance(key, (list, tuple)) or len(key) != 2:
        raise ValueError(f"key must be a list of 2 integers, got {key!r}")
    words = [as_size("key", word) for word in key]
    return hash_buckets(lambda x, buckets: ops.to_hash_bucket_strong(x, buckets, words), input, num_buckets)


def to_hash_bucket(input: Any, num_buckets: int, name: str | None = None) -> Tensor:
    """
    Map strings to buckets by MurmurHash64A with TensorFlow's own seed, modulo ``num_buckets``.

    Args:
        input: the argument of :func:`to_hash_bucket_fast`.
        num_buckets: the number of buckets, at least 1, below 2 ** 63.
        name: the name, ignored.

    Returns:
        int64, of the shape of ``input``, on its device.

    Raises:
        ValueError: for what :func:`to_hash_bucket_fast` does not take.

    Source: ``tf.strings.to_hash_bucket``.

    Example:
        >>> to_hash_bucket(["Hello", "TensorFlow", "2.x"], 3)
        tensor([2, 0, 1])
    """
    return hash_buckets(ops.to_hash_bucket, input, num_buckets)


def hash_buckets(hashed: Callable[[Any, int], Tensor], input: Any, num_buckets: Any, argument: str = "input") -> Tensor:
    """Hash the input into buckets by one of the operators of ``ops``; errors call the input ``argument``."""
    num_buckets = as_size("num_buckets", num_buckets)
    if not 1 <= num_buckets < 2**63:
        raise ValueError(f"num_buckets must be in [1, 2 ** 63), got {num_buckets}")
    return hashed(_as_hashable(argument, input), num_buckets)


def _as_hashable(argument: str, value: Any) -> Any:
    """Return an integer tensor or array, or strings, in the form that the operators of ``ops`` take."""
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "iu"):
        return value
    if type(value).__module__.partition(".")[0] == "pyarrow":
        return value
    strings = as_strings(argument, value)
    if strings is not None:
        return strings
    if np.size(np.array(value, dtype=object)) == 0:
        return np.empty(np.shape(value), dtype="S1")
    raise ValueError(
        f"{argument} must hold strings or be an integer tensor or array, got {type(value).__name__}: {value!r}"
    )


def as_string(
    input: Any,
    precision: int = -1,
    scientific: bool = False,
    shortest: bool = False,
    width: int = -1,
    fill: str = "",
    name: str | None = None,
) -> np.ndarray:
    """
    Return numbers as decimal text.

    Args:
        input: integers, floats or booleans: a tensor, a numpy array, a number or a nested list of numbers.
        precision: digits behind the point of floats; -1: C's default, 6.
        scientific: whether floats are written with an exponent.
        shortest: whether floats are written with an exponent or without, whichever is shorter.
        width: the least length of a text; -1: no padding. Not for booleans.
        fill: the padding of a shorter text: a space or nothing, "0"; or "+", "-" and "#" with C's meaning. There " "
            and "+" stand before numbers that are not negative, and before no unsigned ones.
        name: the name, ignored.

    Returns:
        A numpy array of ``bytes`` of the shape of ``input``.

    Raises:
        ValueError: for other dtypes, ``scientific`` and ``shortest`` for integers or both at once, other ``fill``.

    Source: ``tf.strings.as_string``.

    Example:
        >>> as_string([3, -2])
        array([b'3', b'-2'], dtype=object)
    """
    numbers = as_tensor("input", input)
    if numbers.dtype.is_complex:
        raise ValueError(f"input must hold integers, floats or booleans, got {numbers.dtype}")
    if fill not in ("", " ", "0", "+", "-", "#"):
        raise ValueError(f"fill must be one of ' ', '0', '+', '-' and '#', got {fill!r}")
    result = np.empty(numbers.numel(), dtype=object)
    floating = numbers.is_floating_point()
    if (scientific or shortest or precision >= 0) and not floating:
        raise ValueError(f"precision, scientific and shortest must not be given for {numbers.dtype}")
    if scientific and shortest:
        raise ValueError("scientific and shortest must not be given together")
    if numbers.dtype == torch.bool:
        result[:] = [b"true" if value else b"false" for value in numbers.reshape(-1).tolist()]
        return result.reshape(numbers.shape)
    if not numbers.dtype.is_signed:
        fill = fill.strip(" +")
    kind = "d" if not floating else "e" if scientific else "g" if shortest else "f"
    digits = f".{precision}" if precision >= 0 else ""
    rest = f"{width if width >= 0 else ''}{digits}{kind}"
    # C pads infinities and NaN with spaces, whatever the fill is.
    template, special = f"%{fill}{rest}", f"%{fill.replace('0', '')}{rest}"
    values = numbers.reshape(-1).tolist()
    result[:] = [((template if math.isfinite(value) else special) % value).encode() for value in values]
    return result.reshape(numbers.shape)
