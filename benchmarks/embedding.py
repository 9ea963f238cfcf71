"""
Benchmark rows of the ``embedding`` family: lookups in a table that no cache holds, one row per id or pooled by bag.

Bytes are counted by formula: the ids, one row of the table for each id (also if it comes again), and the result. Calls
take turns with several batches of ids, so that none finds its rows in a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from torchsparse_rec import ops
from torchsparse_rec.typing import Pooling

from .ids import SPREADS, bag_lengths, offsets_of
from .rows import Call, Case, CudaTargets, Make, Options, Row

# 10.7 GB of float32 in a GPU's memory for each number of columns; on a CPU, a table that no cache holds.
ELEMENTS_CUDA, ELEMENTS_CPU, ELEMENTS_QUICK = 2_684_354_560, 64_000_000, 320_000
LOOKUPS_CUDA, LOOKUPS_CPU, LOOKUPS_QUICK = 1_048_576, 131_072, 4_000
BATCHES = 16


@dataclass(frozen=True)
class Problem:
    """The sizes of a table, and of batches of bags of ids."""

    dim: int
    spread: str
    # Shortest and longest bag. About 20 ids on the mean.
    shortest: int = 16
    longest: int = 24

    def name(self) -> str:
        """Return the end of a benchmark row's name."""
        mixed = "-mixed" if self.shortest == 1 else ""
        return f"{self.dim}-{self.spread}{mixed}"

    def rows(self, options: Options) -> int:
        """Return the number of rows of the table."""
        return options.size(ELEMENTS_CPU, ELEMENTS_QUICK, ELEMENTS_CUDA) // self.dim

    def bags(self, options: Options) -> int:
        """Return the number of bags in a batch."""
        return options.size(LOOKUPS_CPU, LOOKUPS_QUICK, LOOKUPS_CUDA) * 2 // (self.shortest + self.longest)

    def table(self, options: Options) -> Tensor:
        """Make a table ``[rows, dim]``, float32."""
        return torch.empty(self.rows(options), self.dim, device=options.device).uniform_(-0.05, 0.05)

    def batches(self, options: Options, count: int = BATCHES) -> list[Batch]:
        """Make batches with equally many bags; the numbers of ids differ a little."""
        bags = self.bags(options)
        lengths = [bag_lengths(bags, self.shortest, self.longest, options.device, seed) for seed in range(count)]
        offsets = [offsets_of(each) for each in lengths]
        sizes = [int(each[-1]) for each in offsets]
        ids = SPREADS[self.spread](sum(sizes), self.rows(options), options.device).split(sizes)
        weights = (torch.rand(sum(sizes), device=options.device) + 0.5).split(sizes)
        # Each tensor is copied: a part of a larger one may begin where its memory cannot be read in wide loads.
        return [Batch(i.clone(), o, w.clone()) for i, o, w in zip(ids, offsets, weights, strict=True)]

    def sizes(self, options: Options, ids: int) -> str:
        """Return the sizes, as text for the report."""
        table = f"{self.rows(options):,} x {self.dim} float32"
        bags = f"{self.bags(options):,} bags of {self.shortest} to {self.longest}"
        return f"{table}, about {ids:,} {self.spread} ids, {bags}"


@dataclass(frozen=True)
class Batch:
    """A batch of ids in bags."""

    ids: Tensor  # [N] int64
    offsets: Tensor  # [B + 1] int64
    weights: Tensor  # [N] float32: one for each id, where they are wanted

    def bags_of_ids(self) -> Tensor:
        """Return the bag of each id, ``[N]``."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=len(self.ids))


Lookup = Callable[[Tensor, Batch], Tensor]


def mean_ids(batches: list[Batch]) -> int:
    """Return the mean number of ids in a batch."""
    return sum(len(batch.ids) for batch in batches) // len(batches)


def in_turn(lookup: Lookup, table: Tensor, batches: list[Batch]) -> Make:
    """Return a maker of calls of one side, each with the next batch."""

    def make() -> Call:
        turns = itertools.cycle(batches)
        return lambda: lookup(table, next(turns))

    return make


def gathered(table: Tensor, batch: Batch, reduce: str) -> Tensor:
    """Look up rows by index_select, then pool them by segment_reduce."""
    return torch.segment_reduce(table.index_select(0, batch.ids), reduce, offsets=batch.offsets, unsafe=True)


def torch_bag(mode: str) -> Lookup:
    """Return torch's own pooled lookup."""
    return lambda table, batch: functional.embedding_bag(
        batch.ids, table, batch.offsets, mode=mode, include_last_offset=True
    )


def divided_bag(table: Tensor, batch: Batch) -> Tensor:
    """Divide the sums of bags by the square roots of their lengths; no length is zero."""
    return torch_bag("sum")(table, batch) / batch.offsets.diff().sqrt().unsqueeze(1)


def torch_weighted_bag(table: Tensor, batch: Batch) -> Tensor:
    """Compute torch's pooled lookup with weights."""
    return functional.embedding_bag(
        batch.ids, table, batch.offsets, mode="sum", per_sample_weights=batch.weights, include_last_offset=True
    )


@dataclass(frozen=True)
class Kind:
    """A kind of lookup: ours, the peers', and the bytes that it must move."""

    name: str
    what: str
    ours: Lookup
    # The peers by name. The first one is also the reference of the check.
    peers: dict[str, Lookup]
    bytes_per_id: int = 8
    pooled: bool = True
    # Bytes written for each element of a pooled result.
    bytes_per_result: int = 4

    def bytes_moved(self, dim: int, ids: int, bags: int) -> int:
        """Count the bytes: ids, a row for each id, offsets of the bags, and the result."""
        results = self.bytes_per_result * bags if self.pooled else 4 * ids
        return self.bytes_per_id * ids + 4 * dim * ids + dim * results + (8 * bags if self.pooled else 0)


def bag_kind(mode: Pooling) -> Kind:
    """Return the kind of a pooled lookup without weights."""
    peers: dict[str, Lookup] = {"torch embedding_bag / root": divided_bag}
    if mode != "sqrtn":
        peers = {
            "torch embedding_bag": torch_bag(mode),
            "torch index_select + segment_reduce": lambda table, batch: gathered(table, batch, mode),
        }
    return Kind(
        f"bag-{mode}",
        f"embedding_bag, mode {mode}: rows pooled in one pass",
        lambda table, batch: ops.embedding_bag(table, batch.ids, batch.offsets, mode=mode),
        peers,
        # max also writes the positions of the maxima.
        bytes_per_result=12 if mode == "max" else 4,
    )


WEIGHTED = Kind(
    "bag-weighted",
    "embedding_bag, mode sum, with a weight for each id",
    lambda table, batch: ops.embedding_bag(table, batch.ids, batch.offsets, per_sample_weights=batch.weights),
    {"torch embedding_bag": torch_weighted_bag},
    bytes_per_id=12,
)
PER_ID = Kind(
    "rows",
    "embedding: one row per id",
    lambda table, batch: ops.embedding(table, batch.ids),
    {
        "torch embedding": lambda table, batch: functional.embedding(batch.ids, table),
        "torch index_select": lambda table, batch: table.index_select(0, batch.ids),
    },
    pooled=False,
)


def row(kind: Kind, problem: Problem, target: float | None = None, published: str = "") -> Row:
    """Make a benchmark row for one kind of lookup in one table."""

    def build(options: Options) -> Case:
        table, batches = problem.table(options), problem.batches(options)
        ids = mean_ids(batches)

        def check() -> None:
            for batch in batches[:2]:
                expected = next(iter(kind.peers.values()))(table, batch)
                torch.testing.assert_close(kind.ours(table, batch), expected, rtol=1e-5, atol=1e-6)

        return Case(
            in_turn(kind.ours, table, batches),
            {peer: in_turn(lookup, table, batches) for peer, lookup in kind.peers.items()},
            check,
            kind.bytes_moved(problem.dim, ids, problem.bags(options)),
            ids=ids,
            sizes=problem.sizes(options, ids),
        )

    name = f"embedding/{kind.name}-{problem.name()}"
    return Row(name, kind.what, build, cuda=CudaTargets(copy_share=target), published=published)


_POOLED = "FBGEMM's pooled lookup: 57 to 65 % of peak bandwidth (H100, mixed lengths)"
_PER_ID = "FBGEMM's sequence lookup: 92 % of peak bandwidth (H100)"
GRID = [Problem(dim, spread) for dim in (128, 16) for spread in ("uniform", "zipf")]
POPULAR = Problem(128, "zipf")
ROWS = [
    *(row(bag_kind("sum"), problem, 0.85, _POOLED if problem.dim == 128 else "") for problem in GRID),
    row(bag_kind("sum"), Problem(128, "zipf", 1, 40), 0.85, _POOLED),
    *(row(kind, POPULAR) for kind in (bag_kind("mean"), bag_kind("sqrtn"), bag_kind("max"), WEIGHTED)),
    *(row(PER_ID, problem, published=_PER_ID if problem.dim == 128 else "") for problem in GRID),
]
