"""Benchmark rows of the ``sparse_tensor`` family: preparations of a pooled lookup, beside TensorFlow and torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchsparse_rec import ops

from .rows import Call, Case, CudaTargets, Options, Row, tensorflow


@dataclass(frozen=True)
class Sparse:
    """Ids in rows of random lengths, ten on the mean. A few rows are empty."""

    indices: Tensor
    values: Tensor
    rows: int
    columns: int
    offsets: Tensor

    @property
    def sizes(self) -> str:
        """Return the sizes in words."""
        return f"{self.values.shape[0]:,} ids in {self.rows:,} rows"


def sparse(options: Options, *, ordered: bool = True) -> Sparse:
    """Draw a sparse tensor of int64 ids."""
    entries = options.size(1_000_000, 20_000, 16_000_000)
    rows = entries // 10
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, rows, (entries,), generator=generator).sort().values
    offsets = ops.row_ids_to_offsets(row, rows)
    column = torch.arange(entries) - offsets[row]
    indices = torch.stack([row, column], 1)
    if not ordered:
        indices = indices[torch.randperm(entries, generator=generator)]
    values = torch.randint(0, 1_000_000, (entries,), generator=generator)
    return Sparse(
        indices.to(options.device),
        values.to(options.device),
        rows,
        int(column.max()) + 1,
        offsets.to(options.device),
    )


def _theirs(options: Options, given: Sparse) -> tuple[Any, Any]:
    tf = tensorflow(options)
    return tf, tf.SparseTensor(given.indices.numpy(), given.values.numpy(), [given.rows, given.columns])


def fill(ordered: bool) -> Callable[[Options], Case]:
    """Make a benchmark row: fill every empty row with an id."""

    def build(options: Options) -> Case:
        given = sparse(options, ordered=ordered)
        default = torch.tensor(0, device=options.device)

        def ours() -> Call:
            return lambda: ops.sparse_fill_empty_rows(given.indices, given.values, given.rows, default)

        def theirs() -> Call:
            tf, sp = _theirs(options, given)
            return lambda: tf.sparse.fill_empty_rows(sp, 0)

        def check() -> None:
            filled = ours()()
            assert torch.equal(filled.values[filled.reverse_index_map], given.values)
            assert torch.equal(filled.indices[filled.reverse_index_map], given.indices)
            assert torch.equal(filled.indices[:, 0].unique(), torch.arange(given.rows, device=options.device))
            assert bool((filled.indices[:, 0].diff() >= 0).all())

        entries = given.values.shape[0]
        return Case(ours, {"TensorFlow": theirs}, check, 56 * entries + given.rows, ids=entries, sizes=given.sizes)

    return build


def reshape(options: Options) -> Case:
    """Build a reshape: the same elements in half as many rows."""
    given = sparse(options)
    old, new = [given.rows, given.columns], [given.rows // 2, 2 * given.columns]

    def ours() -> Call:
        return lambda: ops.sparse_reshape(given.indices, old, new)

    def theirs() -> Call:
        tf, sp = _theirs(options, given)
        return lambda: tf.sparse.reshape(sp, new)

    def check() -> None:
        row, column = given.indices.unbind(1)
        wanted = torch.stack([row // 2, row % 2 * given.columns + column], 1)
        assert torch.equal(ours()(), wanted)

    entries = given.values.shape[0]
    return Case(ours, {"TensorFlow": theirs}, check, 32 * entries, ids=entries, sizes=given.sizes)


def reorder(options: Options) -> Case:
    """Build a reorder: shuffled entries are sorted again."""
    given = sparse(options, ordered=False)

    def ours() -> Call:
        return lambda: ops.sparse_reorder(given.indices, given.values)

    def theirs() -> Call:
        tf, sp = _theirs(options, given)
        return lambda: tf.sparse.reorder(sp)

    def coalesce() -> Call:
        shape = (given.rows, given.columns)
        return lambda: torch.sparse_coo_tensor(
            given.indices.t(), given.values, shape, check_invariants=False
        ).coalesce()

    def check() -> None:
        indices, values = ours()()
        wanted = coalesce()()
        assert torch.equal(indices.t(), wanted.indices()) and torch.equal(values, wanted.values())

    entries = given.values.shape[0]
    peers = {"TensorFlow": theirs, "torch coalesce": coalesce}
    return Case(ours, peers, check, 48 * entries, ids=entries, sizes=given.sizes)


def dense(options: Options) -> Case:
    """Build the conversion to a dense matrix."""
    given = sparse(options)
    values = given.values.float()

    def ours() -> Call:
        return lambda: ops.sparse_to_dense(given.indices, [given.rows, given.columns], values)

    def theirs() -> Call:
        tf, _ = _theirs(options, given)
        sp = tf.SparseTensor(given.indices.numpy(), values.numpy(), [given.rows, given.columns])
        return lambda: tf.sparse.to_dense(sp)

    def put() -> Call:
        def call() -> Tensor:
            matrix = torch.zeros(given.rows, given.columns, device=options.device)
            return matrix.index_put_(tuple(given.indices.unbind(1)), values)

        return call

    def check() -> None:
        assert torch.equal(ours()(), put()())

    moved = 20 * values.shape[0] + 4 * given.rows * given.columns
    return Case(
        ours, {"TensorFlow": theirs, "torch index_put_": put}, check, moved, ids=values.shape[0], sizes=given.sizes
    )


def offsets(options: Options) -> Case:
    """Build the offsets of the rows of a sparse tensor."""
    given = sparse(options)

    def ours() -> Call:
        return lambda: ops.row_ids_to_offsets(given.indices[:, 0], given.rows)

    def searched() -> Call:
        bounds = torch.arange(given.rows + 1, device=options.device)
        return lambda: torch.searchsorted(given.indices[:, 0].contiguous(), bounds)

    def check() -> None:
        assert torch.equal(ours()(), searched()())

    entries = given.values.shape[0]
    return Case(
        ours, {"torch searchsorted": searched}, check, 16 * entries + 8 * given.rows, ids=entries, sizes=given.sizes
    )


_CUDA = CudaTargets(fastest_peer=None)
ROWS = [
    Row("sparse_tensor/fill", "sparse_fill_empty_rows, rows in order", fill(True), {"TensorFlow": 3.0}, _CUDA),
    Row("sparse_tensor/fill-unordered", "sparse_fill_empty_rows, entries shuffled", fill(False), {}, _CUDA),
    Row("sparse_tensor/reshape", "sparse_reshape to half as many rows", reshape, {"TensorFlow": 3.0}, _CUDA),
    Row("sparse_tensor/reorder", "sparse_reorder of shuffled entries", reorder),
    Row("sparse_tensor/to-dense", "sparse_to_dense, validated", dense),
    Row("sparse_tensor/offsets", "row_ids_to_offsets of a column of indices", offsets),
]
