"""Benchmark rows of the ``features`` family: ids of Wide & Deep's 40 categorical columns, a tensor for each."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torchsparse_rec import features, ops
from torchsparse_rec.features import FeatureTransform

from .rows import Call, Case, CudaTargets, Make, Options, Row, tensorflow

COLUMNS, TEN_HOT = 40, 3
ROWS_PER_TABLE = 400_000


def batch(examples: int) -> dict[str, Tensor]:
    """Draw 37 columns of one integer per example, and 3 of ten."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(examples, 10) if k >= COLUMNS - TEN_HOT else (examples,) for k in range(COLUMNS)]
    return {f"c{k}": torch.randint(ROWS_PER_TABLE, shape, generator=generator) for k, shape in enumerate(shapes)}


def transform(hashed: bool, drop_missing: bool, device: str) -> FeatureTransform:
    """Make a transform of all columns. They are of one kind, so that it makes one operator call."""
    columns = [
        features.categorical_column_with_hash_bucket(f"c{k}", ROWS_PER_TABLE, "int64")
        if hashed
        else features.categorical_column_with_identity(f"c{k}", ROWS_PER_TABLE)
        for k in range(COLUMNS)
    ]
    tables = [features.embedding_column(column, 16, "sum") for column in columns]
    return FeatureTransform(tables, drop_missing=drop_missing).to(device)


def build(hashed: bool, examples: int, drop_missing: bool, options: Options) -> Case:
    """Build the transform of a batch of that many examples."""
    size = options.size(examples, 256)
    given = {name: x.to(options.device) for name, x in batch(size).items()}
    columns = transform(hashed, drop_missing, options.device)
    joined = torch.cat([x.reshape(-1) for x in given.values()])

    def ours() -> Call:
        return lambda: columns(given).sparse

    def floor() -> Call:
        if hashed:
            return lambda: ops.to_hash_bucket_fast(joined, ROWS_PER_TABLE)
        return lambda: torch.cat([x.reshape(-1) for x in given.values()])

    def tf_function() -> Call:
        tf = tensorflow(options)
        theirs = [tf.constant(x.numpy()) for x in batch(size).values()]

        @tf.function
        def ids(values):  # type: ignore[no-untyped-def]
            return [tf.strings.to_hash_bucket_fast(tf.strings.as_string(x), ROWS_PER_TABLE) for x in values]

        return lambda: ids(theirs)

    def check() -> None:
        made = columns(given).sparse
        assert made is not None
        expected = ops.to_hash_bucket_fast(joined, ROWS_PER_TABLE) if hashed else joined
        assert torch.equal(made.values(), expected)
        assert made.keys() == list(given) and made.stride() == size

    peers: dict[str, Make] = {"the hash alone" if hashed else "torch.cat alone": floor}
    if hashed:
        peers["TensorFlow tf.function"] = tf_function
    count = joined.numel()
    sizes = f"{COLUMNS} columns, {count:,} int64 of {size:,} examples"
    return Case(ours, peers, check, 16 * count, samples=size, ids=count, sizes=sizes)


def row(hashed: bool, examples: int, drop_missing: bool = True) -> Row:
    """Make a benchmark row for one kind of columns and one batch size."""
    kind = "hashed" if hashed else "identity"
    trusting = "" if drop_missing else ", -1 taken as it is"
    return Row(
        f"features/{kind}_{examples}" + ("" if drop_missing else "_trusting"),
        f"FeatureTransform, {kind} columns, batch {examples:,}{trusting}",
        partial(build, hashed, examples, drop_missing),
        {"TensorFlow tf.function": 5.0} if hashed else {},
        CudaTargets(fastest_peer=None),
    )


ROWS: list[Row] = [
    row(False, 16_384),
    row(False, 16_384, drop_missing=False),
    row(True, 16_384),
    row(True, 16_384, drop_missing=False),
    row(True, 131_072),
]
