"""Benchmark rows of the ``hash`` family: integers to buckets, without text of them, and byte strings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchsparse_rec import ops

from .rows import Call, Case, CudaTargets, Make, Options, Row, tensorflow

BUCKETS = 1_000_003
# tf.strings.to_hash_bucket_fast(text, BUCKETS) of TensorFlow 2.21.
RECORDED = {
    b"0": 537292,
    b"42": 59059,
    b"-7": 985360,
    b"1234567": 22860,
    b"12345678": 470335,
    b"-2147483648": 345099,
    b"1234567890123456": 857634,
    b"12345678901234567": 774961,
    b"-9223372036854775808": 400334,
    b"user_1": 787228,
    b"user_4611686018427387904": 123210,
}

# tf.sparse.cross_hashed([[[3]], [[4, 5]]], BUCKETS) of TensorFlow 2.21, of int64 tensors.
RECORDED_CROSSES = [33143, 196914]


def full_range(n: int) -> Tensor:
    """Draw any int64, most of 18 to 20 characters."""
    return torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63, n, dtype=np.int64, endpoint=False))


def below_2_31(n: int) -> Tensor:
    """Draw integers in ``[0, 2^31)``, most of 9 or 10 digits."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, 2**31, n, dtype=np.int64))


def mixed_lengths(n: int) -> Tensor:
    """Draw integers of both signs with every number of digits equally often."""
    generator = np.random.default_rng(0)
    magnitudes = np.exp(generator.uniform(0, np.log(2.0**62), n)).astype(np.int64)
    return torch.from_numpy(magnitudes * generator.choice([-1, 1], n))


def check_recorded(device: str) -> None:
    """Compare with TensorFlow's buckets of strings, and of integers where the strings are their text."""
    assert ops.to_hash_bucket_fast(list(RECORDED), BUCKETS).tolist() == list(RECORDED.values())
    integers = {int(text): bucket for text, bucket in RECORDED.items() if not text.startswith(b"user")}
    x = torch.tensor(list(integers), device=device)
    assert ops.to_hash_bucket_fast(x, BUCKETS).tolist() == list(integers.values())


def check_against_text(x: Tensor, device: str) -> None:
    """Compare buckets of integers with the buckets of their text."""
    check_recorded(device)
    sample = x[:: max(1, len(x) // 20_000)]
    text = ops.to_hash_bucket_fast([str(value) for value in sample.tolist()], BUCKETS)
    assert torch.equal(ops.to_hash_bucket_fast(sample.to(device), BUCKETS).cpu(), text)


def integer_row(
    name: str, what: str, draw: Callable[[int], Tensor], targets: dict[str, float], ids_per_second: float | None = None
) -> Row:
    """Make a benchmark row for one distribution of integers."""

    def build(options: Options) -> Case:
        x = draw(options.size(2_000_000, 20_000, 33_554_432))
        given = x.to(options.device)

        def ours() -> Call:
            return lambda: ops.to_hash_bucket_fast(given, BUCKETS)

        def tf_eager() -> Call:
            tf = tensorflow(options)
            values = tf.constant(x.numpy())
            return lambda: tf.strings.to_hash_bucket_fast(tf.strings.as_string(values), BUCKETS)

        def tf_function() -> Call:
            tf = tensorflow(options)
            values = tf.constant(x.numpy())
            compiled = tf.function(lambda v: tf.strings.to_hash_bucket_fast(tf.strings.as_string(v), BUCKETS))
            return lambda: compiled(values)

        peers: dict[str, Make] = {"TensorFlow eager": tf_eager, "TensorFlow tf.function": tf_function}
        return Case(
            ours,
            peers,
            lambda: check_against_text(x, options.device),
            16 * len(x),
            ids=len(x),
            sizes=f"{len(x):,} int64",
        )

    cuda = CudaTargets(fastest_peer=None, ids_per_second=ids_per_second)
    return Row(f"hash/{name}", f"to_hash_bucket_fast, int64, {what}", build, targets, cuda)


KEY = [5, -7]


def build_strings(strong: bool, options: Options) -> Case:
    """Build the hashing of byte strings, as one buffer and offsets; TensorFlow's are its own string tensor."""
    words = [b"user_%d" % value for value in mixed_lengths(options.size(2_000_000, 20_000)).abs().tolist()]
    offsets = torch.from_numpy(np.cumsum([0, *(len(word) for word in words)], dtype=np.int64)).to(options.device)
    joined = torch.from_numpy(np.frombuffer(bytearray(b"".join(words)), dtype=np.uint8)).to(options.device)

    def ours() -> Call:
        if strong:
            return lambda: ops.string_to_hash_bucket_strong(joined, offsets, BUCKETS, KEY)
        return lambda: ops.string_to_hash_bucket_fast(joined, offsets, BUCKETS)

    def tf_strings() -> Call:
        tf = tensorflow(options)
        values = tf.constant(words)
        if strong:
            return lambda: tf.strings.to_hash_bucket_strong(values, BUCKETS, KEY)
        return lambda: tf.strings.to_hash_bucket_fast(values, BUCKETS)

    def check() -> None:
        check_recorded(options.device)
        every = max(1, len(words) // 20_000)
        some = words[::every]
        alone = ops.to_hash_bucket_strong(some, BUCKETS, KEY) if strong else ops.to_hash_bucket_fast(some, BUCKETS)
        assert torch.equal(ours()()[::every].cpu(), alone)

    moved = len(joined) + 16 * len(words)
    sizes = f"{len(words):,} byte strings of 6 to 24 bytes"
    return Case(ours, {"TensorFlow eager": tf_strings}, check, moved, ids=len(words), sizes=sizes)


def build_cross(jagged: bool, options: Options) -> Case:
    """Build a cross of three columns, with one value in every row or with one to three."""
    rows = options.size(1_000_000, 10_000)
    generator = np.random.default_rng(0)
    lengths = [generator.integers(1, 4, rows) if jagged else np.ones(rows, np.int64) for _ in range(3)]
    bounds = [np.concatenate([[0], np.cumsum(n)]) for n in lengths]
    values = [generator.integers(0, 2**40, at[-1]) for at in bounds]
    columns: list[Any] = [torch.from_numpy(x).to(options.device) for x in values]
    if jagged:
        columns = [(x, torch.from_numpy(at).to(options.device)) for x, at in zip(columns, bounds, strict=True)]
    count = int(np.prod(lengths, axis=0).sum())

    def ours() -> Call:
        return lambda: ops.cross_hashed(columns, BUCKETS)

    def tf_cross() -> Call:
        tf = tensorflow(options)
        if jagged:
            pairs = zip(values, bounds, strict=True)
            theirs = [tf.RaggedTensor.from_row_splits(x, at).to_sparse() for x, at in pairs]
        else:
            theirs = [tf.constant(x.reshape(-1, 1)) for x in values]
        return lambda: tf.sparse.cross_hashed(theirs, BUCKETS)

    def check() -> None:
        known = [x.to(options.device) for x in (torch.tensor([3]), torch.tensor([[4, 5]]))]
        assert ops.cross_hashed(known, BUCKETS)[0].tolist() == RECORDED_CROSSES
        assert len(ours()()[0]) == count

    moved = 8 * (sum(len(x) for x in values) + count + rows)
    sizes = f"{rows:,} rows of 3 columns, {count:,} crosses"
    return Case(ours, {"TensorFlow eager": tf_cross}, check, moved, ids=count, sizes=sizes)


def other_row(name: str, what: str, build: Callable[[Options], Case], ratio: float) -> Row:
    """Make a benchmark row of strings or crosses, with its target beside TensorFlow."""
    return Row(f"hash/{name}", what, build, {"TensorFlow eager": ratio}, CudaTargets(fastest_peer=None))


_FULL_RANGE = {"TensorFlow eager": 10.0, "TensorFlow tf.function": 7.0}
_BELOW_2_31 = {"TensorFlow eager": 8.0, "TensorFlow tf.function": 5.0}
ROWS = [
    integer_row("full-range", "full range", full_range, _FULL_RANGE, 30e9),
    integer_row("below-2^31", "below 2^31", below_2_31, _BELOW_2_31, 50e9),
    integer_row("mixed", "mixed lengths", mixed_lengths, {"TensorFlow eager": 5.0}),
    other_row("strings", "string_to_hash_bucket_fast, byte strings", partial(build_strings, False), 2.0),
    other_row("strings-strong", "string_to_hash_bucket_strong, byte strings", partial(build_strings, True), 6.0),
    other_row("cross", "cross_hashed, one value in each column", partial(build_cross, False), 4.0),
    other_row("cross-jagged", "cross_hashed, one to three values", partial(build_cross, True), 4.0),
]
