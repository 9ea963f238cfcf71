"""``tf.strings``: hash buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ._arguments import as_size, as_strings

__all__ = ["to_hash_bucket_fast"]


def to_hash_bucket_fast(input: Any, num_buckets: int, name: str | None = None) -> Tensor:
    """
    Map strings to buckets by FarmHash Fingerprint64, modulo ``num_buckets``.

    Args:
        input: strings: a ``str`` or ``bytes``, a nested list of them, a numpy array of dtype ``S``, ``U`` or ``O``, or
            a pyarrow array, of any shape; ``str`` is hashed as UTF-8. Or an integer tensor or array, for which
            TensorFlow needs ``tf.strings.as_string`` first; the result is the same.
        num_buckets: at least 1, below 2 ** 63.
        name: ignored.

    Returns:
        int64, of the shape of ``input``, on its device.

    Raises:
        ValueError: for what is neither strings nor integers, or ``num_buckets`` that is no integer or out of range.

    Source: ``tf.strings.to_hash_bucket_fast``.

    Example:
        >>> to_hash_bucket_fast([["a", "b"], ["c", "d"]], 7)
        tensor([[5, 2],
                [5, 2]])
    """
    num_buckets = as_size("num_buckets", num_buckets)
    if not 1 <= num_buckets < 2**63:
        raise ValueError(f"num_buckets must be in [1, 2 ** 63), got {num_buckets}")
    if isinstance(input, Tensor) or (isinstance(input, np.ndarray) and input.dtype.kind in "iu"):
        return ops.to_hash_bucket_fast(input, num_buckets)
    if type(input).__module__.partition(".")[0] == "pyarrow":
        return ops.to_hash_bucket_fast(input, num_buckets)
    strings = as_strings("input", input)
    if strings is not None:
        return ops.to_hash_bucket_fast(strings, num_buckets)
    if np.size(np.array(input, dtype=object)) == 0:
        return torch.empty(np.shape(input), dtype=torch.int64)
    raise ValueError(f"input must hold strings or be an integer tensor or array, got {type(input).__name__}: {input!r}")
