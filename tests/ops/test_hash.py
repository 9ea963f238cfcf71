"""The hash family: every dtype, length and kind of string; TensorFlow's answers are golden vectors."""

import numpy as np
import pytest
import torch
from devices import cpu_only

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.hash import farm_hash
from torchsparse_rec.ops.hash import column_ids

pytestmark = pytest.mark.usefixtures("kernels")

MOST = 2**63 - 1
DTYPES = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]


def by_text(values: list[int], num_buckets: int = MOST) -> torch.Tensor:
    """Return the buckets of integers through their decimal text."""
    return ops.to_hash_bucket_fast([str(v) for v in values], num_buckets)


def assorted(count: int, seed: int = 0) -> torch.Tensor:
    """Return int64 numbers of every length of text, in a random order."""
    random = np.random.default_rng(seed)
    values = random.integers(-(2**63), 2**63 - 1, count, dtype=np.int64)
    return torch.from_numpy(values >> random.integers(0, 64, count))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_beyond_a_block(dtype):
    x = assorted(2000).view(dtype)[:3001]
    assert torch.equal(ops.to_hash_bucket_fast(x, 997), by_text(x.tolist(), 997))


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8, 9, 511, 512, 513, 1024, 8192, 40_001])
def test_counts_around_vectors_and_blocks(count):
    x = assorted(count, seed=count)
    assert torch.equal(ops.to_hash_bucket_fast(x, 1009), by_text(x.tolist(), 1009))


@pytest.mark.parametrize("digits", range(1, 20))
def test_texts_of_one_length_alone(digits):
    random = np.random.default_rng(digits)
    x = random.integers(10 ** (digits - 1) if digits > 1 else 0, min(10**digits, MOST), 700)
    for values in (x, -x):
        assert torch.equal(ops.to_hash_bucket_fast(torch.from_numpy(values), MOST), by_text(values.tolist()))


def test_shapes_and_strides():
    x = assorted(60).reshape(3, 4, 5)
    expected = by_text(x.flatten().tolist()).reshape(3, 4, 5)
    assert torch.equal(ops.to_hash_bucket_fast(x, MOST), expected)
    assert torch.equal(ops.to_hash_bucket_fast(x.permute(2, 0, 1), MOST), expected.permute(2, 0, 1))
    assert torch.equal(ops.to_hash_bucket_fast(x[:, ::2], MOST), expected[:, ::2])
    assert ops.to_hash_bucket_fast(torch.tensor(42), MOST).item() == farm_hash(b"42") % MOST
    assert ops.to_hash_bucket_fast(torch.empty(0, 3, dtype=torch.int32), 5).shape == (0, 3)
    strided = torch.tensor([0, 9, 2, 9, 3, 9])[::2]
    text = torch.tensor(list(b"axbxcx"), dtype=torch.uint8)[::2]
    assert torch.equal(ops.string_to_hash_bucket_fast(text, strided, 99), ops.to_hash_bucket_fast(["ab", "c"], 99))


WORDS = ["", "a", "green", "naïve", "日本語", "with\0nul", "x" * 100]


def expected_words() -> torch.Tensor:
    """Return the buckets of WORDS through the operator on bytes and offsets."""
    encoded = [w.encode() for w in WORDS]
    offsets = torch.tensor([0, *np.cumsum([len(e) for e in encoded])])
    return ops.string_to_hash_bucket_fast(torch.tensor(list(b"".join(encoded)), dtype=torch.uint8), offsets, MOST)


def test_lists_and_numpy_strings():
    expected = expected_words()
    encoded = [w.encode() for w in WORDS]
    mixed = [w if i % 2 else w.encode() for i, w in enumerate(WORDS)]
    for strings in (WORDS, tuple(WORDS), encoded, mixed, np.array(WORDS), np.array(encoded)):
        assert torch.equal(ops.to_hash_bucket_fast(strings, MOST), expected)
    for strings in (WORDS, encoded, mixed):
        assert torch.equal(ops.to_hash_bucket_fast(np.array(strings, dtype=object), MOST), expected)
    assert torch.equal(ops.to_hash_bucket_fast(["a", "green"], MOST), expected[1:3])


def test_numpy_shapes_padding_and_integers():
    square = np.array([["a", "bb"], ["ccc", ""]])
    expected = ops.to_hash_bucket_fast(["a", "bb", "ccc", ""], 97).reshape(2, 2)
    for array in (square, square.astype("S"), square.astype(object)):
        assert torch.equal(ops.to_hash_bucket_fast(array, 97), expected)
        assert torch.equal(ops.to_hash_bucket_fast(array.T, 97), expected.T)
    assert torch.equal(ops.to_hash_bucket_fast(np.array([b"a\0", b"a"]), 97), expected[0, 0].expand(2))
    assert ops.to_hash_bucket_fast(np.array([], dtype="S3"), 97).shape == (0,)
    numbers = np.arange(-6, 6).reshape(3, 4)
    expected = by_text(numbers.ravel().tolist(), 97).reshape(3, 4)
    frozen = numbers.copy()
    frozen.flags.writeable = False
    for array in (numbers, frozen, numbers.astype(">i4"), numbers[::-1][::-1]):
        assert torch.equal(ops.to_hash_bucket_fast(array, 97), expected)
    assert torch.equal(ops.to_hash_bucket_fast(numbers[::-1], 97), expected.flip(0))


@pytest.fixture
def pa():
    return pytest.importorskip("pyarrow")


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "large_binary", "string_view"])
def test_arrow(pa, kind):
    if not hasattr(pa, kind):
        pytest.skip(f"this pyarrow has no {kind}")
    strings = WORDS if "string" in kind else [w.encode() for w in WORDS]
    array = pa.array(strings, getattr(pa, kind)())
    expected = expected_words()
    assert torch.equal(ops.to_hash_bucket_fast(array, MOST), expected)
    assert torch.equal(ops.to_hash_bucket_fast(array[2:5], MOST), expected[2:5])
    assert ops.to_hash_bucket_fast(array[:0], MOST).shape == (0,)
    chunked = pa.chunked_array([array[:3], array[3:3], array[3:]])
    assert torch.equal(ops.to_hash_bucket_fast(chunked, MOST), expected)
    with pytest.raises(ValueError, match="nulls, got one at position 1"):
        ops.to_hash_bucket_fast(pa.array([strings[1], None], getattr(pa, kind)()), MOST)


def test_arrow_empty(pa):
    assert ops.to_hash_bucket_fast(pa.array([], pa.string()), 3).tolist() == []
    assert ops.to_hash_bucket_fast(pa.chunked_array([], pa.string()), 3).tolist() == []
    empties = ops.to_hash_bucket_fast(pa.array(["", ""]), MOST)
    assert empties.tolist() == [farm_hash(b"") % MOST] * 2


def test_empty_strings():
    assert ops.to_hash_bucket_fast([], 3).tolist() == []
    assert ops.to_hash_bucket_fast(["", b""], MOST).tolist() == [farm_hash(b"") % MOST] * 2


def raises(text: str):
    return pytest.raises(ValueError, match=text)


def test_errors_of_integers():
    x = torch.arange(3)
    with raises("x must have an integer dtype, got Bool"):
        ops.to_hash_bucket_fast(x.bool(), 3)
    for bad in (0, -4):
        with raises(f"num_buckets must be >= 1, got {bad}"):
            ops.to_hash_bucket_fast(x, bad)
        with raises(f"num_buckets must be >= 1, got {bad}"):
            ops.to_hash_bucket_fast([], bad)


@cpu_only
def test_errors_of_other_inputs():
    with raises(r"x\[0\] must be str or bytes, got NoneType"):
        ops.to_hash_bucket_fast(np.array([None, "a"], dtype=object), 3)
    with raises(r"x\[1\] cannot be encoded as UTF-8"):
        ops.to_hash_bucket_fast(["a", "\ud800"], 3)
    with raises("got numpy bool"):
        ops.to_hash_bucket_fast(np.ones(2, bool), 3)


def test_errors_of_arrow(pa):
    with raises("strings or binaries, got int64"):
        ops.to_hash_bucket_fast(pa.array([1, 2]), 3)
    with raises("pyarrow Array or ChunkedArray, got StringScalar"):
        ops.to_hash_bucket_fast(pa.scalar("a"), 3)
    with raises("num_buckets must be >= 1, got 0"):
        ops.to_hash_bucket_fast(pa.chunked_array([], pa.string()), 0)


def test_arrow_bytes_are_not_copied(pa, monkeypatch):
    array = pa.array(WORDS)
    addresses = []
    hashed = ops.hash.string_fingerprint64
    expected = ops.fingerprint64(WORDS)
    monkeypatch.setattr(
        ops.hash,
        "string_fingerprint64",
        lambda text, *rest: addresses.append(text.data_ptr()) or hashed(text, *rest),
    )
    assert torch.equal(ops.fingerprint64(array), expected)
    assert array.buffers()[2].address in addresses


def test_errors_of_offsets():
    text = torch.zeros(10, dtype=torch.uint8)

    def call(offsets, bytes=text):
        return ops.string_to_hash_bucket_fast(bytes, torch.tensor(offsets), 3)

    with raises("offsets must be >= 0, got -1 at position 0"):
        call([-1, 3])
    with raises("offsets must not decrease, got 2 at position 2 after 5"):
        call([0, 5, 2, 1, 99])
    with raises("offsets must be at most 10, the number of bytes, got 11 at position 1"):
        call([0, 11, 2])
    with raises(r"offsets must be in \[0, 10\], the number of bytes, got 11 at position 0"):
        call([11])
    with raises("got 0 at position 70000 after 3"):
        call([3] * 70_000 + [0] * 20_000)
    with raises(r"offsets must be an int64 vector .* got Int of shape \[1\]"):
        ops.string_to_hash_bucket_fast(text, torch.zeros(1, dtype=torch.int32), 3)
    with raises("offsets must be an int64 vector"):
        ops.string_to_hash_bucket_fast(text, torch.zeros(0, dtype=torch.int64), 3)
    with raises(r"bytes must be a uint8 vector, got Byte of shape \[2, 5\]"):
        call([0], text.reshape(2, 5))
    with raises("bytes must be a uint8 vector, got Char"):
        call([0], text.to(torch.int8))
    assert call([4, 6, 6, 10]).shape == (3,)


def test_columns_of_ids_and_of_hashes():
    """Join columns of several dtypes and layouts in one call, longer than a block and in parts of blocks."""
    ids, grid = assorted(1300), assorted(600).reshape(20, 30)
    huge = torch.tensor([2**64 - 1, 2**63, 5], dtype=torch.uint64)
    columns = [ids[::2], grid.t(), ids[:3].to(torch.int8), huge, huge, grid[:, :1]]
    made, keep, count = column_ids(columns, [0, 997, 31, 0, 997, 0], [0] * 6)
    parts = [ids[::2], by_text(grid.t().flatten().tolist(), 997), by_text(columns[2].tolist(), 31)]
    parts += [torch.tensor([MOST, MOST, 5]), by_text(huge.tolist(), 997), grid[:, 0]]
    assert torch.equal(made, torch.cat(parts))
    assert keep.shape == (0,) and count.shape == () and int(count) == 0
    made[0] += 1
    assert int(ids[0]) == int(made[0]) - 1


def test_missing_values_of_columns():
    x = torch.tensor([3, -1, -2, 0, -1])
    made, keep, count = column_ids([x, x, x, x.to(torch.int16), x.view(torch.uint64)], [0, 0, 0, 9, 0], [0, 1, 2, 1, 2])
    marked = [True, False, True, True, False]
    assert keep.tolist() == [True] * 5 + marked + [True, False, False, True, False] + marked + [True] * 5
    assert int(count) == 7 and made[:5].tolist() == x.tolist()
    # A value that is missing is an id like others.
    assert made[16].tolist() == farm_hash(b"-1") % 9


def test_errors_of_columns():
    x = torch.tensor([1])
    with raises("num_buckets and missing must hold one number for each of the 2 columns, got 2 and 1"):
        column_ids([x, x], [0, 0], [0])
    with raises("column_ids: columns must have an integer dtype, got Float"):
        column_ids([x, x.float()], [0, 0], [0, 0])
    with raises("column_ids: num_buckets must be >= 0, got -3 at position 1"):
        column_ids([x, x], [0, -3], [0, 0])
    for bad in (-1, 3):
        with raises(f"column_ids: missing must be 0, 1 or 2, got {bad} at position 0"):
            column_ids([x], [0], [bad])
