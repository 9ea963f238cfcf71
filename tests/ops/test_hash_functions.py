"""The strong hash, the old one and the fingerprint: known values, every length, key and layout, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from devices import cpu_only

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.hash import farm_hash, murmur_hash, sip_hash

pytestmark = pytest.mark.usefixtures("kernels")

MOST = 2**63 - 1
TEXT = bytes((i * 131 + 7) & 255 for i in range(300))
KEYS = [(0, 0), (1, 2), (-1, -(2**63)), (MOST, 0)]
HASHES: dict[str, Callable[[Any], torch.Tensor]] = {
    "to_hash_bucket_fast": lambda x: ops.to_hash_bucket_fast(x, MOST),
    "to_hash_bucket_strong": lambda x: ops.to_hash_bucket_strong(x, MOST, (-7, MOST)),
    "to_hash_bucket": lambda x: ops.to_hash_bucket(x, MOST),
    "fingerprint64": ops.fingerprint64,
}
each_hash = pytest.mark.parametrize("name", HASHES)


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def test_the_vectors_of_siphash() -> None:
    """Compare with the paper's vector: the key 00 01 ... 0f, and the text 00 01 ... 0e."""
    key = [int.from_bytes(bytes(range(start, start + 8)), "little") for start in (0, 8)]
    assert sip_hash(bytes(range(15)), *key) == 0xA129CA6149BE45E5
    assert ops.to_hash_bucket_strong([bytes(range(15))], MOST, key).tolist() == [0xA129CA6149BE45E5 % MOST]


def test_golden_values_of_tensorflow() -> None:
    """Compare with tf.strings.to_hash_bucket_strong(..., key=[1, 2]), to_hash_bucket and tf.fingerprint of 2.21."""
    words = ["Hello", "TensorFlow", "2.x", ""]
    assert ops.to_hash_bucket_strong(["Hello", "TF"], 3, [1, 2]).tolist() == [2, 0]
    assert ops.to_hash_bucket(words[:3], 3).tolist() == [2, 0, 1]
    assert ops.fingerprint64(["hello", "world"]).tolist() == [-5436999610281751320, -2010201635338800018]


@pytest.mark.parametrize("key", KEYS)
def test_strong_hash_of_every_length(key: tuple[int, int]) -> None:
    words = [TEXT[i : i + n] for i, n in enumerate([*range(70), 100, 127, 128, 200])]
    wanted = [sip_hash(word, *key) % MOST for word in words]
    assert ops.to_hash_bucket_strong(words, MOST, key).tolist() == wanted


def test_old_and_whole_hash_of_every_length() -> None:
    words = [TEXT[:n] for n in range(200)]
    assert ops.to_hash_bucket(words, MOST).tolist() == [murmur_hash(word) % MOST for word in words]
    assert ops.fingerprint64(words).tolist() == [signed(farm_hash(word)) for word in words]


@each_hash
def test_integers_hash_as_their_text(name: str) -> None:
    near = {sign * (10**k + d) for k in range(19) for d in (-1, 0, 1) for sign in (-1, 1)}
    values = sorted({x for x in near if -(2**63) <= x <= MOST} | {0, MOST, -(2**63)})
    assert torch.equal(HASHES[name](torch.tensor(values)), HASHES[name]([str(v) for v in values]))
    largest = [2**64 - 1, 2**63, 10**19]
    texts = [str(v) for v in largest]
    assert torch.equal(HASHES[name](torch.tensor(largest, dtype=torch.uint64)), HASHES[name](texts))


@each_hash
def test_strings_around_vectors_and_blocks(name: str) -> None:
    """Hash strings together and alone: neighbours differ in length, and some lie at the ends of the bytes."""
    for count in (1, 7, 8, 9, 15, 16, 17, 511, 512, 513, 1030, 5000):
        random = np.random.default_rng(count)
        spans = zip(random.integers(0, 200, count), random.integers(0, 60, count), strict=True)
        words = [TEXT[at : at + n] for at, n in spans]
        together = HASHES[name](words)
        some = random.permutation(count)[:20].tolist()
        assert together[some].tolist() == [HASHES[name]([words[i]]).item() for i in some], count


@each_hash
def test_many_strings_of_one_length(name: str) -> None:
    for length in (*range(41), 64, 65):
        words = [TEXT[i : i + length] for i in range(40)]
        assert HASHES[name](words)[-1] == HASHES[name]([words[-1]])[0], length


@each_hash
def test_kinds_of_input(name: str) -> None:
    expected = HASHES[name](["a", "bb"])
    assert torch.equal(HASHES[name](np.array([["a"], ["bb"]])), expected.reshape(2, 1))
    assert torch.equal(HASHES[name](np.array([b"a", b"bb"], dtype=object)), expected)
    assert HASHES[name](np.array([3, -4], np.int16)).tolist() == HASHES[name](["3", "-4"]).tolist()
    assert HASHES[name]([]).shape == (0,)
    assert HASHES[name](torch.empty(0, 3, dtype=torch.int32)).shape == (0, 3)


@each_hash
def test_errors_name_the_operator(name: str) -> None:
    def raises(text: str) -> Any:
        return pytest.raises(ValueError, match=f"^{name}: {text}")

    with raises("x must have an integer dtype, got Float"):
        HASHES[name](torch.ones(2))
    with raises(r"x\[1\] must be str or bytes, got int: 5"):
        HASHES[name](["a", 5])
    with raises("x must be a tensor, a numpy array, .* got str"):
        HASHES[name]("abc")
    with raises("x must have an integer or string dtype, got numpy float64"):
        HASHES[name](np.ones(1))


@pytest.mark.parametrize("strings", [False, True])
def test_errors_of_buckets_and_keys(strings: bool) -> None:
    x = ["a"] if strings else torch.tensor([1])
    calls = {
        "to_hash_bucket_fast": ops.to_hash_bucket_fast,
        "to_hash_bucket": ops.to_hash_bucket,
        "to_hash_bucket_strong": lambda x, n: ops.to_hash_bucket_strong(x, n, (1, 2)),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name}: num_buckets must be below 2 \*\* 63, got {2**63}"):
            call(x, 2**63)
        with pytest.raises(ValueError, match=f"{name}: num_buckets must be >= 1, got 0"):
            call(x, 0)
    for key in ([1], [1, 2, 3], [2**63, 0], [0, -(2**63) - 1]):
        with pytest.raises(ValueError, match=r"to_hash_bucket_strong: key must be two integers in \[-2 \*\* 63"):
            ops.to_hash_bucket_strong(x, 5, key)


def test_bytes_and_offsets() -> None:
    text, offsets = torch.tensor(list(b"xxgreenredyy"), dtype=torch.uint8), torch.tensor([2, 7, 7, 10])
    words = ["green", "", "red"]
    assert torch.equal(ops.string_fingerprint64(text, offsets), ops.fingerprint64(words))
    strong = ops.string_to_hash_bucket_strong(text, offsets, 99, [1, 2])
    assert torch.equal(strong, ops.to_hash_bucket_strong(words, 99, [1, 2]))
    assert torch.equal(ops.string_to_hash_bucket(text, offsets, 99), ops.to_hash_bucket(words, 99))


@cpu_only
@each_hash
def test_the_first_bad_offset_is_told(name: str) -> None:
    arguments = {"to_hash_bucket_strong": (9, (1, 2)), "fingerprint64": ()}.get(name, (9,))
    offsets = torch.zeros(50_000, dtype=torch.int64)
    offsets[30_000] = 5
    offsets[40_000] = 7
    with pytest.raises(ValueError, match=f"string_{name}: offsets must not decrease, got 0 at position 30001 after 5"):
        getattr(ops, f"string_{name}")(torch.zeros(10, dtype=torch.uint8), offsets, *arguments)
