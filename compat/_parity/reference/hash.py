"""
Slow, obvious references of the operators of the family ``hash``, and of the hash functions below them.

A hash function takes bytes and returns an unsigned number of 64 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# ---- FarmHash Fingerprint64 -----------------------------------------------------------------------------------------

_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_WORD = 2**64 - 1


def _rotate(x: int, bits: int) -> int:
    x &= _WORD
    return ((x >> bits) | (x << (64 - bits))) & _WORD


def _shift_mix(x: int) -> int:
    x &= _WORD
    return x ^ (x >> 47)


def _mix(u: int, v: int, factor: int) -> int:
    a = _shift_mix((u ^ v) * factor)
    return _shift_mix((v ^ a) * factor) * factor & _WORD


def _word(text: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(text[at : at + size], "little")


def _short_hash(text: bytes) -> int:
    """Hash a text of 0 to 16 bytes."""
    n = len(text)
    factor = _K2 + 2 * n
    if n >= 8:
        a, b = _word(text, 0) + _K2, _word(text, n - 8)
        return _mix((_rotate(b, 37) * factor + a) & _WORD, (_rotate(a, 25) + b) * factor & _WORD, factor)
    if n >= 4:
        return _mix(n + (_word(text, 0, 4) << 3), _word(text, n - 4, 4), factor)
    if n > 0:
        y, z = text[0] + (text[n // 2] << 8), n + (text[-1] << 2)
        return _shift_mix((y * _K2 ^ z * _K0) & _WORD) * _K2 & _WORD
    return _K2


def _middle_hash(text: bytes) -> int:
    """Hash a text of 17 to 64 bytes."""
    n = len(text)
    factor = _K2 + 2 * n
    a = _word(text, 0) * (_K1 if n <= 32 else _K2)
    b, c, d = _word(text, 8), _word(text, n - 8) * factor, _word(text, n - 16) * _K2
    y = (_rotate(a + b, 43) + _rotate(c, 30) + d) & _WORD
    z = _mix(y, (a + _rotate(b + _K2, 18) + c) & _WORD, factor)
    if n <= 32:
        return z
    e, f = _word(text, 16) * factor, _word(text, 24)
    g, h = (y + _word(text, n - 32)) * factor, (z + _word(text, n - 24)) * factor
    return _mix((_rotate(e + f, 43) + _rotate(g, 30) + h) & _WORD, (e + _rotate(f + a, 18) + g) & _WORD, factor & _WORD)


def _weak(text: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    w, x, y, z = (_word(text, at + 8 * k) for k in range(4))
    a += w
    b = _rotate(b + a + z, 21)
    c = a
    a += x + y
    b += _rotate(a, 44)
    return (a + z) & _WORD, (b + c) & _WORD


def farm_hash(text: bytes) -> int:
    """Return FarmHash Fingerprint64, as an unsigned number."""
    n = len(text)
    if n <= 16:
        return _short_hash(text)
    if n <= 64:
        return _middle_hash(text)
    x, y = 81, (81 * _K1 + 113) & _WORD
    z = _shift_mix(y * _K2 + 113) * _K2 & _WORD
    v, w = (0, 0), (0, 0)
    x = (x * _K2 + _word(text, 0)) & _WORD

    def rounds(at: int, factor: int, nine: int) -> None:
        nonlocal x, y, z, v, w
        x = _rotate(x + y + v[0] + _word(text, at + 8), 37) * factor & _WORD
        y = _rotate(y + v[1] + _word(text, at + 48), 42) * factor & _WORD
        x ^= w[1] * nine & _WORD
        y = (y + v[0] * nine + _word(text, at + 40)) & _WORD
        z = _rotate(z + w[0], 33) * factor & _WORD
        v = _weak(text, at, v[1] * factor, x + w[0])
        w = _weak(text, at + 32, z + w[1], y + _word(text, at + 16))
        x, z = z, x

    for block in range((n - 1) // 64):
        rounds(64 * block, _K1, 1)
    factor = _K1 + ((z & 0xFF) << 1)
    w = (w[0] + ((n - 1) & 63), w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    rounds(n - 64, factor, 9)
    first = _mix(v[0], w[0], factor) + _shift_mix(y) * _K0 + z
    return _mix(first & _WORD, (_mix(v[1], w[1], factor) + x) & _WORD, factor)


# ---- SipHash-2-4 ----------------------------------------------------------------------------------------------------


def _rotate_left(x: int, bits: int) -> int:
    return _rotate(x, 64 - bits)


def sip_hash(text: bytes, key0: int, key1: int) -> int:
    key0, key1 = key0 & _WORD, key1 & _WORD
    seeds = [int.from_bytes(part, "big") for part in (b"somepseu", b"dorandom", b"lygenera", b"tedbytes")]
    a, b, c, d = (seed ^ key for seed, key in zip(seeds, (key0, key1, key0, key1), strict=True))

    def rounds(times: int) -> None:
        nonlocal a, b, c, d
        for _ in range(times):
            a, c = (a + b) & _WORD, (c + d) & _WORD
            b, d = _rotate_left(b, 13) ^ a, _rotate_left(d, 16) ^ c
            a = _rotate_left(a, 32)
            c, a = (c + b) & _WORD, (a + d) & _WORD
            b, d = _rotate_left(b, 17) ^ c, _rotate_left(d, 21) ^ a
            c = _rotate_left(c, 32)

    padded = text + bytes(7 - len(text) % 8) + bytes([len(text) % 256])
    for at in range(0, len(padded), 8):
        word = _word(padded, at)
        d ^= word
        rounds(2)
        a ^= word
    c ^= 0xFF
    rounds(4)
    return a ^ b ^ c ^ d


# ---- MurmurHash64A --------------------------------------------------------------------------------------------------

_MURMUR = 0xC6A4A7935BD1E995


def murmur_hash(text: bytes, seed: int = 0xDECAFCAFFE) -> int:
    whole = len(text) // 8 * 8
    h = seed ^ len(text) * _MURMUR & _WORD
    for at in range(0, whole, 8):
        h = (h ^ _shift_mix(_word(text, at) * _MURMUR) * _MURMUR & _WORD) * _MURMUR & _WORD
    if len(text) > whole:
        h = (h ^ _word(text, whole)) * _MURMUR & _WORD
    return _shift_mix(_shift_mix(h) * _MURMUR)


# ---- Operators ------------------------------------------------------------------------------------------------------


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _of_integers(x: Tensor, result: Callable[[bytes], int]) -> Tensor:
    results = [result(str(value).encode()) for value in x.flatten().tolist()]
    return torch.tensor(results, dtype=torch.int64, device=x.device).reshape(x.shape)


def _of_strings(bytes_: Tensor, offsets: Tensor, result: Callable[[bytes], int]) -> Tensor:
    text = bytes(bytes_.tolist())
    results = [result(text[a:b]) for a, b in itertools.pairwise(offsets.tolist())]
    return torch.tensor(results, dtype=torch.int64, device=bytes_.device)


def fingerprint64(x: Tensor) -> Tensor:
    return _of_integers(x, lambda text: _signed(farm_hash(text)))


def string_fingerprint64(bytes_: Tensor, offsets: Tensor) -> Tensor:
    return _of_strings(bytes_, offsets, lambda text: _signed(farm_hash(text)))


def to_hash_bucket_fast(x: Tensor, num_buckets: int) -> Tensor:
    return _of_integers(x, lambda text: farm_hash(text) % num_buckets)


def string_to_hash_bucket_fast(bytes_: Tensor, offsets: Tensor, num_buckets: int) -> Tensor:
    return _of_strings(bytes_, offsets, lambda text: farm_hash(text) % num_buckets)


def to_hash_bucket_strong(x: Tensor, num_buckets: int, key0: int, key1: int) -> Tensor:
    return _of_integers(x, lambda text: sip_hash(text, key0, key1) % num_buckets)


def string_to_hash_bucket_strong(bytes_: Tensor, offsets: Tensor, num_buckets: int, key0: int, key1: int) -> Tensor:
    return _of_strings(bytes_, offsets, lambda text: sip_hash(text, key0, key1) % num_buckets)


def to_hash_bucket(x: Tensor, num_buckets: int) -> Tensor:
    return _of_integers(x, lambda text: murmur_hash(text) % num_buckets)


def string_to_hash_bucket(bytes_: Tensor, offsets: Tensor, num_buckets: int) -> Tensor:
    return _of_strings(bytes_, offsets, lambda text: murmur_hash(text) % num_buckets)


def column_ids(columns: list[Tensor], num_buckets: list[int], missing: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    ids, keep = [], []
    for x, buckets, kind in zip(columns, num_buckets, missing, strict=True):
        for value in x.flatten().tolist():
            ids.append(farm_hash(str(value).encode()) % buckets if buckets else min(value, 2**63 - 1))
            keep.append(not (kind == 1 and value == -1 or kind == 2 and value < 0))
    mask = torch.tensor(keep if any(missing) else [], dtype=torch.bool)
    return torch.tensor(ids, dtype=torch.int64), mask, torch.tensor(keep.count(False))


def fingerprint_cat(a: int, b: int) -> int:
    """Return FingerprintCat64, as an unsigned number."""
    product = (a ^ _MURMUR ^ _shift_mix(b * _MURMUR) * _MURMUR & _WORD) * _MURMUR
    return _shift_mix(_shift_mix(product) * _MURMUR)


def _rows(values: Tensor, offsets: Tensor) -> Iterator[list[int]]:
    if values.dim() == 2:
        yield from values.tolist()
    else:
        for a, b in itertools.pairwise(offsets.tolist()):
            yield values[a:b].tolist()


def cross_hashed(
    values: list[Tensor], offsets: list[Tensor], num_buckets: int, hash_key: int | None
) -> tuple[Tensor, Tensor]:
    crosses, bounds = [], [0]
    columns = [_rows(*column) for column in zip(values, offsets, strict=True)]
    for row in zip(*columns, strict=True):
        for combination in itertools.product(*row):
            words = [value & _WORD for value in combination]
            h = words.pop(0) if hash_key is None else hash_key & _WORD
            for word in words:
                h = fingerprint_cat(h, word)
            crosses.append(h % (num_buckets or 2**63 - 1))
        bounds.append(len(crosses))
    return torch.tensor(crosses, dtype=torch.int64), torch.tensor(bounds)


FUNCTIONS = (
    fingerprint64,
    string_fingerprint64,
    to_hash_bucket_fast,
    string_to_hash_bucket_fast,
    to_hash_bucket_strong,
    string_to_hash_bucket_strong,
    to_hash_bucket,
    string_to_hash_bucket,
    column_ids,
    cross_hashed,
)
