"""
Family ``hash``: FarmHash Fingerprint64 of integers' decimal text and of byte strings, reduced to buckets.

Contract and arithmetic: csrc/hash.h. Kernels: csrc/cpu/hash.cpp, csrc/cuda/hash.cu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas
from ._vmap import elementwise

if TYPE_CHECKING:
    import pyarrow

__all__ = ["to_hash_bucket_fast", "string_to_hash_bucket_fast"]

_ops = torch.ops.torchsparse_rec
_REGISTRATIONS = torch.library.Library("torchsparse_rec", "FRAGMENT")


def to_hash_bucket_fast(
    x: Tensor | np.ndarray | Sequence[str | bytes] | pyarrow.Array | pyarrow.ChunkedArray, num_buckets: int
) -> Tensor:
    """
    Map integers or strings to buckets, as TensorFlow does: Fingerprint64 of the text, modulo ``num_buckets``.

    An integer is hashed as its decimal text (``-12`` as ``b"-12"``), whatever its dtype, without making the text. A
    string is hashed as its bytes, ``str`` as UTF-8; NULs and invalid UTF-8 count. Not differentiable.

    Args:
        x: integers of any shape, as a tensor (any integer dtype) or numpy array; or strings, as a list of ``str`` and
            ``bytes``, a numpy array of dtype ``S``, ``U`` or ``O`` of any shape, or a pyarrow ``Array`` or
            ``ChunkedArray`` of strings or binaries without nulls, whose bytes are not copied. A numpy ``S`` or ``U``
            array cannot hold trailing NULs: numpy takes them as padding, and so they are not hashed.
        num_buckets: the number of buckets, at least 1.

    Returns:
        Buckets in ``[0, num_buckets)``, int64, of x's shape: on x's device for a tensor, else on the CPU.

    Raises:
        ValueError: for a dtype that is neither integer nor string, an element that is not a string, a null, or
            ``num_buckets`` below 1.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source:
        ``tf.strings.to_hash_bucket_fast``, for integers with ``tf.strings.as_string`` before it.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> ops.to_hash_bucket_fast(torch.tensor([0, 42, -7]), 1000)
        tensor([735, 736,  62])
        >>> ops.to_hash_bucket_fast(["0", b"42", "-7"], 1000)
        tensor([735, 736,  62])
    """
    if isinstance(x, Tensor):
        return _ops.to_hash_bucket_fast.default(x, num_buckets)
    if isinstance(x, np.ndarray):
        return _hash_numpy(x, num_buckets)
    if isinstance(x, (list, tuple)):
        return _hash_list(x, num_buckets)
    if type(x).__module__.partition(".")[0] == "pyarrow":
        return _hash_arrow(x, num_buckets)
    raise ValueError(
        "to_hash_bucket_fast: x must be a tensor, a numpy array, a list of str or bytes, or a pyarrow array, "
        f"got {type(x).__name__}"
    )


def string_to_hash_bucket_fast(bytes: Tensor, offsets: Tensor, num_buckets: int) -> Tensor:
    """
    Map byte strings to buckets: Fingerprint64 of ``bytes[offsets[i]:offsets[i + 1]]``, modulo ``num_buckets``.

    The strings lie as Arrow holds them: all their bytes in one tensor, and where each begins and ends in another.
    Not differentiable.

    Args:
        bytes: ``[M]``, uint8: the strings, one after the other; bytes before the first and after the last are allowed.
        offsets: ``[N + 1]``, int64, in bytes, from 0 to M, not decreasing.
        num_buckets: the number of buckets, at least 1.

    Returns:
        ``[N]``, int64: buckets in ``[0, num_buckets)``.

    Raises:
        ValueError: for a wrong dtype or rank, offsets that decrease or leave ``[0, M]``, or ``num_buckets`` below 1.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source:
        ``tf.strings.to_hash_bucket_fast``.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> text = torch.tensor(list(b"greenred"), dtype=torch.uint8)
        >>> ops.string_to_hash_bucket_fast(text, torch.tensor([0, 5, 8]), 1000)
        tensor([704, 910])
        >>> ops.to_hash_bucket_fast(["green", "red"], 1000)
        tensor([704, 910])
    """
    return _ops.string_to_hash_bucket_fast.default(bytes, offsets, num_buckets)


def _hash_numpy(x: np.ndarray, num_buckets: int) -> Tensor:
    """Integers as a tensor; fixed-width bytes by their lengths; other strings as a list."""
    if x.dtype.kind in "iu":
        native = np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("=")).reshape(x.shape)
        return to_hash_bucket_fast(torch.from_numpy(native if native.flags.writeable else native.copy()), num_buckets)
    if x.dtype.kind == "S":
        return _hash_fixed_width(np.ascontiguousarray(x).reshape(-1), num_buckets).reshape(x.shape)
    if x.dtype.kind in "UOT":
        return _hash_list(x.reshape(-1).tolist(), num_buckets).reshape(x.shape)
    raise ValueError(f"to_hash_bucket_fast: x must have an integer or string dtype, got numpy {x.dtype}")


def _hash_fixed_width(x: np.ndarray, num_buckets: int) -> Tensor:
    """A contiguous vector of numpy dtype S: its elements without their trailing NULs."""
    width = x.dtype.itemsize
    lengths = np.char.str_len(x)
    padded = x.view(np.uint8).reshape(x.size, width) if width else np.empty((x.size, 0), np.uint8)
    text = padded[np.arange(width) < lengths[:, None]]
    return string_to_hash_bucket_fast(torch.from_numpy(text), _offsets(lengths), num_buckets)


def _hash_list(x: Sequence[Any], num_buckets: int) -> Tensor:
    """Strings one after the other in one buffer."""
    pieces: Sequence[str] | Sequence[bytes] = x
    text = _ascii(x)
    if text is None:
        pieces = [_encode(item, position) for position, item in enumerate(x)]
        text = bytearray().join(pieces)
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    # torch.frombuffer refuses an empty buffer.
    joined = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    return string_to_hash_bucket_fast(joined, _offsets(lengths), num_buckets)


def _ascii(x: Sequence[Any]) -> bytearray | None:
    """The bytes of ASCII strings, each as long as its string; None where an element is something else."""
    try:
        joined = "".join(x)
    except TypeError:
        return None
    return bytearray(joined, "ascii") if joined.isascii() else None


def _encode(item: Any, position: int) -> bytes:
    """The bytes of one element."""
    if isinstance(item, bytes):
        return item
    if not isinstance(item, str):
        raise ValueError(
            f"to_hash_bucket_fast: x[{position}] must be str or bytes, got {type(item).__name__}: {item!r}"
        )
    try:
        return item.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"to_hash_bucket_fast: x[{position}] cannot be encoded as UTF-8: {error}") from error


def _offsets(lengths: np.ndarray) -> Tensor:
    """Where each of the strings of these lengths begins, and where the last ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return torch.from_numpy(offsets)


def _hash_arrow(x: Any, num_buckets: int) -> Tensor:
    """A pyarrow Array or ChunkedArray; the user's own import of pyarrow is the only one."""
    import pyarrow

    if isinstance(x, pyarrow.ChunkedArray):
        chunks, kind = x.chunks, x.type
    elif isinstance(x, pyarrow.Array):
        chunks, kind = [x], x.type
    else:
        raise ValueError(f"to_hash_bucket_fast: x must be a pyarrow Array or ChunkedArray, got {type(x).__name__}")
    if x.null_count:
        position = x.is_null().index(True).as_py()
        raise ValueError(f"to_hash_bucket_fast: x must not contain nulls, got one at position {position}")
    # Views keep each string wherever it likes: casting lays them out one after the other.
    views = {"string_view": pyarrow.large_string, "binary_view": pyarrow.large_binary}
    if str(kind) in views:
        target = views[str(kind)]()
        chunks, kind = [chunk.cast(target) for chunk in chunks], target
    if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary()):
        raise ValueError(f"to_hash_bucket_fast: x must be a pyarrow array of strings or binaries, got {kind}")
    wide = kind in (pyarrow.large_string(), pyarrow.large_binary())
    empty = torch.empty(0, dtype=torch.uint8)
    first = string_to_hash_bucket_fast(empty, torch.zeros(1, dtype=torch.int64), num_buckets)
    return torch.cat([first, *(_hash_arrow_chunk(chunk, wide, num_buckets) for chunk in chunks)])


def _hash_arrow_chunk(chunk: Any, wide: bool, num_buckets: int) -> Tensor:
    """A chunk in Arrow's layout, whose offsets have 64 bits if `wide`; the value buffer is read where it is."""
    _, offsets_buffer, values = chunk.buffers()
    if len(chunk) == 0:
        return torch.empty(0, dtype=torch.int64)
    offsets = np.frombuffer(offsets_buffer, np.int64 if wide else np.int32)[chunk.offset :][: len(chunk) + 1]
    text = torch.empty(0, dtype=torch.uint8)
    if values is not None and values.size:
        # By address, since torch warns of buffers that are read-only; `chunk` outlives the call, which only reads.
        text = torch.frombuffer((ctypes.c_uint8 * values.size).from_address(values.address), dtype=torch.uint8)
    return string_to_hash_bucket_fast(text, torch.from_numpy(offsets.astype(np.int64)), num_buckets)


@torch.library.register_fake("torchsparse_rec::to_hash_bucket_fast")
def _to_hash_bucket_fast_fake(x: Tensor, num_buckets: int) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::string_to_hash_bucket_fast")
def _string_to_hash_bucket_fast_fake(bytes: Tensor, offsets: Tensor, num_buckets: int) -> Tensor:
    return bytes.new_empty((offsets.shape[0] - 1,), dtype=torch.int64)


# Integers in, integers out: autograd has nothing to do.
for _name in ("to_hash_bucket_fast", "string_to_hash_bucket_fast"):
    _REGISTRATIONS.impl(_name, torch.library.fallthrough_kernel, "Autograd")

elementwise("to_hash_bucket_fast")
