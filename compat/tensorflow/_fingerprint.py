"""``tf.fingerprint``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import ops
from .tensors import as_values

__all__ = ["fingerprint"]


def fingerprint(data: Any, method: Any = "farmhash64", name: str | None = None) -> Tensor:
    """
    Return FarmHash Fingerprint64 of each row of ``data``, as 8 bytes.

    Args:
        data: ``[N, ...]``, a tensor, a numpy array, a list of numbers, or strings. A row is hashed by its bytes in
            memory. A row of one string is hashed as that string; a row of several strings, or none, as the strings'
            fingerprints.
        method: only ``"farmhash64"``.
        name: the name, ignored.

    Returns:
        ``[N, 8]``, uint8: the hashes, their lowest bytes first.

    Raises:
        ValueError: for a scalar, or another method.

    Source: ``tf.fingerprint``.

    Example:
        >>> fingerprint(["hello"])
        tensor([[232,  12,  56,  49, 169, 229, 139, 180]], dtype=torch.uint8)
    """
    if method not in ("farmhash64", b"farmhash64"):
        raise ValueError(f"method must be 'farmhash64', got {method!r}")
    rows = as_values("data", data)
    if rows.ndim < 1:
        raise ValueError("data must have at least 1 dimension, got a scalar")
    if isinstance(rows, np.ndarray):
        hashes = ops.fingerprint64(rows)
        return _bytes_of_rows(hashes if hashes[:1].numel() == 1 else row_hashes(hashes))
    return _bytes_of_rows(row_hashes(rows))


def row_hashes(x: Tensor) -> Tensor:
    """Return the hashes of the bytes of each row, int64."""
    return ops.string_fingerprint64(*byte_strings(x))


def byte_strings(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of ``x`` as strings of bytes: all bytes, and the offset of each row."""
    rows = _bytes_of_rows(x)
    return rows.reshape(-1), torch.arange(rows.shape[0] + 1, device=x.device) * rows.shape[1]


def _bytes_of_rows(x: Tensor) -> Tensor:
    """Return the bytes of each row, ``[N, bytes in a row]``, uint8."""
    size = x.element_size() * math.prod(x.shape[1:])
    # torch calls a single element contiguous whatever its stride, but view(torch.uint8) wants stride 1.
    elements = x.contiguous().as_strided((x.numel(),), (1,))
    return elements.view(torch.uint8).reshape(x.shape[0], size)
