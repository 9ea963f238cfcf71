"""Benchmark rows of the ``unique`` family: values in order of first appearance, as TensorFlow's; torch sorts them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchsparse_rec import ops

from .ids import zipf_ids
from .rows import Call, Case, CudaTargets, Make, Options, Row, tensorflow


def count(options: Options) -> int:
    """Return the number of ids."""
    return options.size(5_000_000, 50_000, 16_000_000)


def bounded(options: Options) -> Tensor:
    """Draw ids from a range of a tenth of their number."""
    n = count(options)
    return torch.randint(0, n // 10, (n,), generator=torch.Generator().manual_seed(0)).to(options.device)


def distinct(options: Options) -> Tensor:
    """Draw random 62-bit ids, all different."""
    n = count(options)
    return torch.randint(0, 2**62, (n,), generator=torch.Generator().manual_seed(0)).to(options.device)


def popular(options: Options) -> Tensor:
    """Draw ids by Zipf's law, from as many as there are draws."""
    return zipf_ids(count(options), count(options), options.device)


def check(x: Tensor) -> None:
    """Check that the values restore x, are in order of first appearance, and have right counts."""
    values, inverse, counts = ops.unique_with_counts(x)
    plain = ops.unique(x)
    assert torch.equal(plain.values, values) and torch.equal(plain.inverse, inverse)
    assert torch.equal(values[inverse], x)
    expected, expected_counts = torch.unique(x, return_counts=True)
    order = values.argsort()
    assert torch.equal(values[order], expected) and torch.equal(counts[order], expected_counts)
    positions = torch.arange(x.numel(), device=x.device)
    first = torch.full_like(values, x.numel()).scatter_reduce_(0, inverse, positions, "amin")
    assert bool((first.diff() > 0).all())


def row(name: str, what: str, draw: Callable[[Options], Tensor], counts: bool, targets: dict[str, float]) -> Row:
    """Make a benchmark row for one kind of ids, with or without counts."""

    def build(options: Options) -> Case:
        x = draw(options)

        def ours() -> Call:
            return lambda: (ops.unique_with_counts if counts else ops.unique)(x)

        def torch_unique() -> Call:
            return lambda: torch.unique(x, return_inverse=True, return_counts=counts)

        def tf_unique() -> Call:
            tf = tensorflow(options)
            function, given = tf.unique_with_counts if counts else tf.unique, tf.constant(x.numpy())
            return lambda: function(given, out_idx=tf.int64)

        peers: dict[str, Make] = {"TensorFlow": tf_unique, "torch (sorted)": torch_unique}
        distinct_values = torch.unique(x).numel()
        bytes_moved = 8 * (2 * x.numel() + (2 if counts else 1) * distinct_values)
        sizes = f"{x.numel():,} int64 of {distinct_values:,} values"
        return Case(ours, peers, lambda: check(x), bytes_moved, ids=x.numel(), sizes=sizes)

    # torch.unique spends its time on a sort, which a hash table does not need.
    cuda = CudaTargets(fastest_peer=1.0 if counts else 3.0)
    return Row(f"unique/{name}", what, build, targets, cuda)


def check_rows(x: Tensor) -> None:
    """Check that the rows restore x, and are in order of first appearance."""
    values, inverse, counts = ops.unique_with_counts(x, dim=0)
    assert torch.equal(values[inverse], x) and len(values) == len(torch.unique(x, dim=0))
    assert torch.equal(counts, torch.bincount(inverse)) and bool((inverse.cummax(0).values.diff() <= 1).all())


def pairs_row() -> Row:
    """Make a benchmark row for unique rows of a matrix, as keys of several parts, such as user and item."""

    def build(options: Options) -> Case:
        n = count(options) // 5
        generator = torch.Generator().manual_seed(0)
        pool = torch.randint(0, 2**40, (n // 2, 4), generator=generator)
        x = pool[torch.randint(0, n // 2, (n,), generator=generator)].to(options.device)

        def ours() -> Call:
            return lambda: ops.unique(x, dim=0)

        def torch_unique() -> Call:
            return lambda: torch.unique(x, dim=0, return_inverse=True)

        def tf_unique() -> Call:
            tf = tensorflow(options)
            given, axis = tf.constant(x.numpy()), tf.constant([0])
            return lambda: tf.raw_ops.UniqueV2(x=given, axis=axis, out_idx=tf.int64)

        peers: dict[str, Make] = {"TensorFlow": tf_unique, "torch (sorted)": torch_unique}
        distinct_rows = len(ops.unique(x, dim=0).values)
        sizes = f"{n:,} rows of 4 int64, {distinct_rows:,} different"
        return Case(ours, peers, lambda: check_rows(x), 8 * (5 * n + 4 * distinct_rows), ids=n, sizes=sizes)

    return Row("unique/rows", "unique with inverse of rows", build, {}, CudaTargets(fastest_peer=1.0))


_BOUNDED = {"TensorFlow": 6.0, "torch (sorted)": 4.0}
_DISTINCT = {"TensorFlow": 3.5, "torch (sorted)": 2.2}
ROWS = [
    row("bounded", "unique with inverse, ids in a row, each ten times on the mean", bounded, False, _BOUNDED),
    row("distinct", "unique with inverse, different random 62-bit ids", distinct, False, _DISTINCT),
    row("zipf", "unique with inverse, popular ids scattered", popular, False, {}),
    row("bounded-counts", "the same as unique/bounded, with counts", bounded, True, {}),
    row("distinct-counts", "the same as unique/distinct, with counts", distinct, True, {}),
    pairs_row(),
]
