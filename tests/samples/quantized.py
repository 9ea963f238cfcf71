"""Sample inputs of the family ``quantized``: those of ``embedding``, with tables of each format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from samples.embedding import bag_modes, is_representative, mode_word
from samples.large_sizes import Build, Size, floats_of, ids_of, offsets_of
from samples.sample import DIMENSIONS, INDICES, Family, Random, Sample
from torch import Tensor

from torchsparse_rec.compat._parity.reference import MAX, MEAN, SUM
from torchsparse_rec.ops.quantized import ROW_FORMATS, packed_rows

# Two rows: 2 q + 1, and -q / 2.
BY_HAND = torch.tensor([[0, 5, 255, *[0, 0, 0, 64], *[0, 0, 128, 63]], [4, 0, 1, *[0, 0, 0, 191], *[0, 0, 0, 0]]])


def _fits(table: Tensor, rows: str) -> bool:
    """Say whether a format has such a table."""
    return rows.endswith("float16") or (
        table.shape[1] > 0 and (rows == "int8" or table.shape[1] % 2 == 0) and bool(table.isfinite().all())
    )


def embedding_samples(operator: str) -> Iterator[Sample]:
    by_hand = BY_HAND.to(torch.uint8)
    yield Sample(operator, "by_hand", (by_hand, torch.tensor([[1, 0], [0, 1]]), 8), representative=True)
    shapes = itertools.cycle([(7,), (), (3, 4), (0,), (2, 0, 3), (2, 3, 4), (100,)])
    for seed, (rows, dim) in enumerate(itertools.product(ROW_FORMATS, (*DIMENSIONS, 2, 16, 18, 32, 128))):
        table, index, shape = Random(seed).floats(19, dim, dtype=torch.float32), INDICES[seed % 2], next(shapes)
        if not _fits(table, rows):
            continue
        ids = Random(seed).integers(0, 19, *shape, dtype=index)
        name = f"{rows}_{dim}_{index}_rank_{len(shape)}".replace("torch.", "")
        representative = dim == 8 and rows != "int8"
        yield Sample(operator, name, (packed_rows(table, rows), ids, ROW_FORMATS[rows].bits), representative)
    nothing = torch.empty(0, dtype=torch.int64)
    yield Sample(operator, "no_rows", (torch.empty(0, 13, dtype=torch.uint8), nothing, 8))
    yield Sample(operator, "no_columns", (torch.zeros(4, 4, dtype=torch.uint8), torch.tensor([3, 3]), 4))


def bag_samples(operator: str) -> Iterator[Sample]:
    for problem, mode, _ in bag_modes():
        for rows, row_format in ROW_FORMATS.items():
            if problem.weight.dtype != torch.float32 or not _fits(problem.weight, rows):
                continue
            bags = (problem.indices, problem.offsets, problem.weights, row_format.bits, mode, problem.padding_idx)
            table = packed_rows(problem.weight, rows)
            name = f"{rows}-{problem.name}-{mode_word(mode, False)}"
            representative = is_representative(problem, mode) and rows != "float16"
            yield Sample(operator, name, (table, *bags), representative)
            if problem.name in ("by_hand", "by_hand_weighted", "uneven", "only_empty_bags"):
                starts = (table, bags[0], problem.offsets[:-1], *bags[2:])
                yield Sample(operator, f"{name}-starts", (*starts, False))
                yield Sample(operator, f"{name}-from_second", (*starts, False, 1, None))
                last = len(problem.offsets) - 2
                yield Sample(operator, f"{name}-one", (table, *bags, True, last, 1), representative)
                yield Sample(operator, f"{name}-none", (table, *bags, True, 1, 0))
    for dim in (16, 32, 64, 128):  # with code of their own
        for (seed, rows), weighted in itertools.product(enumerate(("int8", "int4")), (False, True)):
            random = Random(seed + dim)
            table = packed_rows(random.floats(90, dim, dtype=torch.float32), rows)
            ids = random.integers(0, 90, 700, dtype=INDICES[seed])
            offsets = torch.tensor([0, 5, 5, 305, 322, 338, 355, 700])
            weights = random.weights(700, torch.float32) if weighted else None
            name = f"{rows}_{dim}_long" + ("_weighted" if weighted else "")
            yield Sample(operator, name, (table, ids, offsets, weights, ROW_FORMATS[rows].bits, MEAN, 3))


def _large(operator: str, size: Size, rows: str, mode: int) -> Sample:
    table, bits = packed_rows(floats_of(size, size.rows), rows), ROW_FORMATS[rows].bits
    if operator == "quantized_embedding":
        return Sample(operator, str(size), (table, ids_of(size), bits))
    return Sample(operator, str(size), (table, ids_of(size), offsets_of(size), None, bits, mode, -1))


_SIZES = (
    (Size(100_000, 300_000, 30_000, 64, spread="zipf"), "int8", SUM),
    (Size(50_000, 100_000, 3, 8, index=torch.int32), "int4", MEAN),
    (Size(20_000, 300_000, 30_000, 16), "bfloat16", MAX),
)

FAMILY = Family(
    samples={"quantized_embedding": embedding_samples, "quantized_embedding_bag": bag_samples},
    large=[
        Build(f"{operator}-{rows}-{size}", partial(_large, operator, size, rows, mode))
        for operator in ("quantized_embedding", "quantized_embedding_bag")
        for size, rows, mode in _SIZES
    ],
)
