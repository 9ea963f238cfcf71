"""Inputs of hashes: integers, or strings in any of their forms, brought to bytes and offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import numpy as np
import torch
from torch import Tensor

from .._arrow_memory import strings

if TYPE_CHECKING:
    import pyarrow

#: Whatever the hash functions take: integers or strings.
Hashable: TypeAlias = Union[Tensor, np.ndarray, Sequence[str | bytes], "pyarrow.Array", "pyarrow.ChunkedArray"]


class Hashes(NamedTuple):
    """A hash function: its operators on integers and on strings."""

    #: Its name in errors.
    name: str
    integers: Callable[[Tensor], Tensor]
    #: Takes bytes and offsets.
    strings: Callable[[Tensor, Tensor], Tensor]


def hash_any(x: Hashable, hashes: Hashes) -> Tensor:
    """Hash x, elementwise, by the operator for its kind of elements."""
    if isinstance(x, Tensor):
        return hashes.integers(x)
    if isinstance(x, np.ndarray):
        return _hash_numpy(x, hashes)
    if isinstance(x, (list, tuple)):
        return _hash_list(x, hashes)
    if type(x).__module__.partition(".")[0] == "pyarrow":
        return _hash_arrow(x, hashes)
    raise ValueError(
        f"{hashes.name}: x must be a tensor, a numpy array, a list of str or bytes, or a pyarrow array, "
        f"got {type(x).__name__}"
    )


def _hash_numpy(x: np.ndarray, hashes: Hashes) -> Tensor:
    """Hash a numpy array: integers as a tensor, fixed-width bytes by their lengths, other strings as a list."""
    if x.dtype.kind in "iu":
        native = np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("=")).reshape(x.shape)
        return hashes.integers(torch.from_numpy(native if native.flags.writeable else native.copy()))
    if x.dtype.kind == "S":
        return _hash_fixed_width(np.ascontiguousarray(x).reshape(-1), hashes).reshape(x.shape)
    if x.dtype.kind in "UOT":
        return _hash_list(x.reshape(-1).tolist(), hashes).reshape(x.shape)
    raise ValueError(f"{hashes.name}: x must have an integer or string dtype, got numpy {x.dtype}")


def _hash_fixed_width(x: np.ndarray, hashes: Hashes) -> Tensor:
    """Hash a contiguous vector of numpy dtype S: its elements without their trailing NULs."""
    width = x.dtype.itemsize
    lengths = np.char.str_len(x)
    padded = x.view(np.uint8).reshape(x.size, width) if width else np.empty((x.size, 0), np.uint8)
    text = padded[np.arange(width) < lengths[:, None]]
    return hashes.strings(torch.from_numpy(text), _offsets(lengths))


def _hash_list(x: Sequence[Any], hashes: Hashes) -> Tensor:
    """Hash a list of strings, copied in order into one buffer."""
    pieces: Sequence[str] | Sequence[bytes] = x
    text = _ascii(x)
    if text is None:
        pieces = [_encode(item, position, hashes.name) for position, item in enumerate(x)]
        text = bytearray().join(pieces)
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    # torch.frombuffer refuses an empty buffer.
    joined = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    return hashes.strings(joined, _offsets(lengths))


def _ascii(x: Sequence[Any]) -> bytearray | None:
    """Join ASCII strings, each as many bytes as characters; None where an element is something else."""
    try:
        joined = "".join(x)
    except TypeError:
        return None
    return bytearray(joined, "ascii") if joined.isascii() else None


def _encode(item: Any, position: int, name: str) -> bytes:
    """Return the bytes of one element; ``str`` becomes UTF-8."""
    if isinstance(item, bytes):
        return item
    if not isinstance(item, str):
        raise ValueError(f"{name}: x[{position}] must be str or bytes, got {type(item).__name__}: {item!r}")
    try:
        return item.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: x[{position}] cannot be encoded as UTF-8: {error}") from error


def _offsets(lengths: np.ndarray) -> Tensor:
    """Return where each of the strings of these lengths begins, and where the last ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return torch.from_numpy(offsets)


def _hash_arrow(x: Any, hashes: Hashes) -> Tensor:
    """Hash a pyarrow Array or ChunkedArray. Only here is pyarrow imported: the user has done so before."""
    import pyarrow

    if isinstance(x, pyarrow.ChunkedArray):
        chunks, kind = x.chunks, x.type
    elif isinstance(x, pyarrow.Array):
        chunks, kind = [x], x.type
    else:
        raise ValueError(f"{hashes.name}: x must be a pyarrow Array or ChunkedArray, got {type(x).__name__}")
    if x.null_count:
        position = x.is_null().index(True).as_py()
        raise ValueError(f"{hashes.name}: x must not contain nulls, got one at position {position}")
    if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"):
        raise ValueError(f"{hashes.name}: x must be a pyarrow array of strings or binaries, got {kind}")
    empty = torch.empty(0, dtype=torch.uint8)
    first = hashes.strings(empty, torch.zeros(1, dtype=torch.int64))
    return torch.cat([first, *(hashes.strings(*strings(chunk)) for chunk in chunks)])
