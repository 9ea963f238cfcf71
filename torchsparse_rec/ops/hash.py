"""
Family ``hash``: hashes of integers' decimal text and of byte strings, whole or reduced to buckets.

Contract and arithmetic: csrc/hash*.h. Kernels: csrc/cpu/hash*.cpp, csrc/cuda/hash*.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._hash_inputs import Hashable, Hashes, hash_any
from ._vmap import elementwise
from .autograd import not_differentiable

__all__ = [
    "fingerprint64",
    "fingerprint_cat64",
    "string_fingerprint64",
    "string_to_hash_bucket",
    "string_to_hash_bucket_fast",
    "string_to_hash_bucket_strong",
    "to_hash_bucket",
    "to_hash_bucket_fast",
    "to_hash_bucket_strong",
]

#: Murmur's multiplier, as int64.
_CAT_FACTOR = 0xC6A4A7935BD1E995 - 2**64

_ops = torch.ops.torchsparse_rec


def fingerprint64(x: Hashable) -> Tensor:
    """
    Hash integers' decimal text, or strings, to 64 bits by FarmHash Fingerprint64.

    The hash is the same on every machine, and in every release. Integers and strings are hashed by the same bytes as in
    :func:`to_hash_bucket_fast`. The hash is an unsigned number of 64 bits. Torch has few operators on such numbers, so
    it is given as the int64 of the same bits: half of all hashes are negative. Not differentiable.

    Args:
        x: integers or strings, as for :func:`to_hash_bucket_fast`.

    Returns:
        int64, of x's shape: on x's device for a tensor, else on the CPU.

    Raises:
        ValueError: for what :func:`to_hash_bucket_fast` does not take.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source:
        ``tf.fingerprint``, which gives the same 64 bits as 8 bytes; FarmHash's ``Fingerprint64``.

    Example:
        >>> from torchsparse_rec import ops
        >>> ops.fingerprint64(["hello", "world"])
        tensor([-5436999610281751320, -2010201635338800018])
    """
    return hash_any(x, Hashes("fingerprint64", _ops.fingerprint64.default, string_fingerprint64))


def string_fingerprint64(bytes: Tensor, offsets: Tensor) -> Tensor:
    """
    Hash byte strings ``bytes[offsets[i]:offsets[i + 1]]`` to 64 bits by FarmHash Fingerprint64.

    :func:`fingerprint64` takes other forms of strings, and integers. Not differentiable.

    Args:
        bytes: ``[M]``, uint8, as for :func:`string_to_hash_bucket_fast`.
        offsets: ``[N + 1]``, int64, likewise.

    Returns:
        ``[N]``, int64: the 64 bits of each hash.

    Raises:
        ValueError: for a wrong dtype or rank, or offsets that decrease or leave ``[0, M]``.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source:
        ``tf.fingerprint``.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> text = torch.tensor(list(b"greenred"), dtype=torch.uint8)
        >>> ops.string_fingerprint64(text, torch.tensor([0, 5, 8]))
        tensor([7697512358431268704,  991092756973969910])
    """
    return _ops.string_fingerprint64.default(bytes, offsets)


def fingerprint_cat64(x: Tensor, y: Tensor) -> Tensor:
    """
    Combine two 64-bit fingerprints into one, as ``cross_hashed`` combines the values of a cross.

    Args:
        x: int64, the bits of unsigned numbers, as of :func:`fingerprint64`.
        y: int64, of a shape that broadcasts with x's.

    Returns:
        int64: the 64 bits of each hash. Not differentiable.

    Raises:
        ValueError: for another dtype.

    Source:
        TensorFlow's ``FingerprintCat64`` (tsl/platform/fingerprint.h), which ``tf.sparse.cross_hashed`` is made of.

    Example:
        >>> from torchsparse_rec import ops
        >>> ops.fingerprint_cat64(ops.fingerprint64(["hello"]), ops.fingerprint64(["world"]))
        tensor([9142259856993324256])
    """
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor) or value.dtype != torch.int64:
            raise ValueError(f"fingerprint_cat64: {name} must be an int64 tensor, got {getattr(value, 'dtype', value)}")
    joined = ((x ^ _CAT_FACTOR) ^ (_mixed(y * _CAT_FACTOR) * _CAT_FACTOR)) * _CAT_FACTOR
    return _mixed(_mixed(joined) * _CAT_FACTOR)


def _mixed(x: Tensor) -> Tensor:
    """Return ``x ^ (x >> 47)`` of unsigned numbers; torch's shift of int64 copies the sign, a hash's does not."""
    return x ^ ((x >> 47) & 0x1FFFF)


def to_hash_bucket_fast(x: Hashable, num_buckets: int) -> Tensor:
    """
    Map integers or strings to buckets by FarmHash Fingerprint64 of the text, modulo ``num_buckets``.

    An integer is hashed as its decimal text (``-12`` as ``b"-12"``), whatever its dtype, without making the text. A
    string is hashed as its bytes, ``str`` as UTF-8; NULs and invalid UTF-8 count. Not differentiable.

    Args:
        x: integers of any shape, as a tensor (any integer dtype) or numpy array; or strings. Strings may be a list of
            ``str`` and ``bytes``, a numpy array of dtype ``S``, ``U`` or ``O`` of any shape, or a pyarrow ``Array`` or
            ``ChunkedArray`` of strings or binaries without nulls. Pyarrow's bytes are not copied. A numpy ``S`` or
            ``U`` array cannot hold trailing NULs: numpy takes them as padding, and so they are not hashed.
        num_buckets: the number of buckets, at least 1, below 2 ** 63.

    Returns:
        Buckets in ``[0, num_buckets)``, int64, of x's shape: on x's device for a tensor, else on the CPU.

    Raises:
        ValueError: for a dtype that is neither integer nor string, an element that is not a string, a null, or
            ``num_buckets`` out of range.

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
    return _hash_buckets("to_hash_bucket_fast", x, num_buckets)


def string_to_hash_bucket_fast(bytes: Tensor, offsets: Tensor, num_buckets: int) -> Tensor:
    """
    Map byte strings ``bytes[offsets[i]:offsets[i + 1]]`` to buckets by Fingerprint64, modulo ``num_buckets``.

    The strings lie as Arrow holds them: all their bytes in one tensor, and where each begins and ends in another.
    Not differentiable.

    Args:
        bytes: ``[M]``, uint8: the strings, in order; bytes before the first and after the last are allowed.
        offsets: ``[N + 1]``, int64, in bytes, from 0 to M, not decreasing.
        num_buckets: the number of buckets, at least 1, below 2 ** 63.

    Returns:
        ``[N]``, int64: buckets in ``[0, num_buckets)``.

    Raises:
        ValueError: for a wrong dtype or rank, offsets that decrease or leave ``[0, M]``, or ``num_buckets`` out of
            range.

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
    check_num_buckets("string_to_hash_bucket_fast", num_buckets)
    return _ops.string_to_hash_bucket_fast.default(bytes, offsets, num_buckets)


def to_hash_bucket_strong(x: Hashable, num_buckets: int, key: Sequence[int]) -> Tensor:
    """
    Map integers or strings to buckets by SipHash-2-4 of the text with a key, modulo ``num_buckets``.

    Without the key nobody can choose texts that fall into the same bucket. Not differentiable.

    Args:
        x: integers or strings, as for :func:`to_hash_bucket_fast`.
        num_buckets: the number of buckets, at least 1, below 2 ** 63.
        key: two integers, in the range of int64.

    Returns:
        Buckets in ``[0, num_buckets)``, int64, of x's shape: on x's device for a tensor, else on the CPU.

    Raises:
        ValueError: for what :func:`to_hash_bucket_fast` does not take, or a key of other than two int64.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source:
        ``tf.strings.to_hash_bucket_strong``.

    Example:
        >>> from torchsparse_rec import ops
        >>> ops.to_hash_bucket_strong(["hello", "world"], 1000, key=[1, 2])
        tensor([622, 990])
    """
    return _hash_buckets("to_hash_bucket_strong", x, num_buckets, *_key_words("to_hash_bucket_strong", key))


def string_to_hash_bucket_strong(bytes: Tensor, offsets: Tensor, num_buckets: int, key: Sequence[int]) -> Tensor:
    """
    Map byte strings ``bytes[offsets[i]:offsets[i + 1]]`` to buckets by SipHash-2-4 with a key, modulo ``num_buckets``.

    :func:`to_hash_bucket_strong` takes other forms of strings, and integers. Not differentiable.

    Args:
        bytes: ``[M]``, uint8, as for :func:`string_to_hash_bucket_fast`.
        offsets: ``[N + 1]``, int64, likewise.
        num_buckets: the number of buckets, at least 1, below 2 ** 63.
        key: two integers, in the range of int64.

    Returns:
        ``[N]``, int64: buckets in ``[0, num_buckets)``.

    Raises:
        ValueError: for a wrong dtype or rank, offsets that decrease or leave ``[0, M]``, ``num_buckets`` out of range,
            or a key of other than two int64.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source:
        ``tf.strings.to_hash_bucket_strong``.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> text = torch.tensor(list(b"greenred"), dtype=torch.uint8)
        >>> ops.string_to_hash_bucket_strong(text, torch.tensor([0, 5, 8]), 1000, key=[1, 2])
        tensor([373, 593])
    """
    name = "string_to_hash_bucket_strong"
    check_num_buckets(name, num_buckets)
    return _ops.string_to_hash_bucket_strong.default(bytes, offsets, num_buckets, *_key_words(name, key))


def to_hash_bucket(x: Hashable, num_buckets: int) -> Tensor:
    """
    Map integers or strings to buckets by MurmurHash64A of the text, modulo ``num_buckets``.

    TensorFlow's oldest programs use this hash; newer ones use :func:`to_hash_bucket_fast`. Not differentiable.

    Args:
        x: integers or strings, as for :func:`to_hash_bucket_fast`.
        num_buckets: the number of buckets, at least 1, below 2 ** 63.

    Returns:
        Buckets in ``[0, num_buckets)``, int64, of x's shape: on x's device for a tensor, else on the CPU.

    Raises:
        ValueError: for what :func:`to_hash_bucket_fast` does not take.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source:
        ``tf.strings.to_hash_bucket``.

    Example:
        >>> from torchsparse_rec import ops
        >>> ops.to_hash_bucket(["hello", "world"], 1000)
        tensor([938, 861])
    """
    return _hash_buckets("to_hash_bucket", x, num_buckets)


def string_to_hash_bucket(bytes: Tensor, offsets: Tensor, num_buckets: int) -> Tensor:
    """
    Map byte strings ``bytes[offsets[i]:offsets[i + 1]]`` to buckets by MurmurHash64A, modulo ``num_buckets``.

    :func:`to_hash_bucket` takes other forms of strings, and integers. Not differentiable.

    Args:
        bytes: ``[M]``, uint8, as for :func:`string_to_hash_bucket_fast`.
        offsets: ``[N + 1]``, int64, likewise.
        num_buckets: the number of buckets, at least 1, below 2 ** 63.

    Returns:
        ``[N]``, int64: buckets in ``[0, num_buckets)``.

    Raises:
        ValueError: for a wrong dtype or rank, offsets that decrease or leave ``[0, M]``, or ``num_buckets`` out of
            range.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.

    Source:
        ``tf.strings.to_hash_bucket``.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> text = torch.tensor(list(b"greenred"), dtype=torch.uint8)
        >>> ops.string_to_hash_bucket(text, torch.tensor([0, 5, 8]), 1000)
        tensor([572, 563])
    """
    check_num_buckets("string_to_hash_bucket", num_buckets)
    return _ops.string_to_hash_bucket.default(bytes, offsets, num_buckets)


def _hash_buckets(name: str, x: Hashable, num_buckets: int, *key: int) -> Tensor:
    """Hash x by the operators ``name``, for integers, and ``string_<name>``, for strings."""
    check_num_buckets(name, num_buckets)
    of_integers, of_strings = getattr(_ops, name).default, getattr(_ops, "string_" + name).default
    return hash_any(
        x,
        Hashes(
            name,
            lambda integers: of_integers(integers, num_buckets, *key),
            lambda bytes, offsets: of_strings(bytes, offsets, num_buckets, *key),
        ),
    )


def column_ids(
    columns: Sequence[Tensor], num_buckets: Sequence[int], missing: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Make ids of columns of integers, joined in order, and find missing values, in one pass.

    Args:
        columns: the tensors, at least one, of any integer dtype and shape; all on one device.
        num_buckets: the number of buckets of each column, as of :func:`to_hash_bucket_fast`; 0 if its values are ids
            already (values of uint64 that int64 cannot hold become 2 ** 63 - 1).
        missing: the values of each column that are missing: 0 none, 1 those equal to -1, 2 negative ones.

    Returns:
        ``(ids, keep, num_missing)``: int64 ``[N]``; bool ``[N]``, false where a value is missing, but ``[0]`` where
        every ``missing`` is 0; and how many are missing, int64 ``[]``. Not differentiable.

    Raises:
        ValueError: a dtype that is no integer's, numbers out of range, other devices.

    On CUDA nothing waits for the device, and CUDA graphs can capture it.
    """
    return _ops.column_ids.default(columns, num_buckets, missing)


def check_num_buckets(name: str, num_buckets: int) -> None:
    """Raise ``ValueError`` if ``num_buckets`` is too large for operators to be given; they check the rest."""
    if isinstance(num_buckets, int) and num_buckets >= 2**63:
        raise ValueError(f"{name}: num_buckets must be below 2 ** 63, got {num_buckets}")


def _key_words(name: str, key: Sequence[int]) -> tuple[int, int]:
    words = [int(word) for word in key]
    if len(words) != 2 or not all(-(2**63) <= word < 2**63 for word in words):
        raise ValueError(f"{name}: key must be two integers in [-2 ** 63, 2 ** 63), got {list(key)}")
    return words[0], words[1]


def _integers_fake(x: Tensor, *arguments: int) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int64)


def _strings_fake(bytes: Tensor, offsets: Tensor, *arguments: int) -> Tensor:
    return bytes.new_empty((offsets.shape[0] - 1,), dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::column_ids")
def _column_ids_fake(
    columns: list[Tensor], num_buckets: list[int], missing: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    count = sum(x.numel() for x in columns)
    first = columns[0]
    return (
        first.new_empty((count,), dtype=torch.int64),
        first.new_empty((count if any(missing) else 0,), dtype=torch.bool),
        first.new_empty((), dtype=torch.int64),
    )


not_differentiable("column_ids")

for _name in ("fingerprint64", "to_hash_bucket_fast", "to_hash_bucket_strong", "to_hash_bucket"):
    torch.library.register_fake(f"torchsparse_rec::{_name}", _integers_fake)
    torch.library.register_fake(f"torchsparse_rec::string_{_name}", _strings_fake)
    not_differentiable(_name, f"string_{_name}")
    elementwise(_name)
