"""Collections of lookups among the large samples: a third of a size's bags to each of three keys, in two tables."""

from __future__ import annotations

from functools import partial

import torch
from large_sizes import SIZES, Build, Size, floats_of, generator_of, ids_of, offsets_of
from reference import MEAN, SQRTN, SUM
from sample import Sample


def _collection(operator: str, size: Size) -> Sample:
    """The first table is looked up for two of the keys; the second has rows of another width."""
    indices, offsets, third = ids_of(size), offsets_of(size), size.segments // 3
    tables = [floats_of(size, size.rows), floats_of(size, size.rows)[:, : size.dim // 2 + 1].contiguous()]
    weights = torch.rand(size.items, generator=generator_of(size)).to(size.dtype) + 0.5
    bags = [third, third, size.segments - 2 * third]
    lists = ([0, 1, 0], [0, 1, 2], [SUM, MEAN, SQRTN], bags, [-1, -1], False)
    dims = [table.shape[1] for table in tables]
    if operator == "embedding_collection":
        return Sample(operator, str(size), (tables, indices, offsets, weights, *lists, False))
    elements = sum(bags[key] * dims[table] for table, key in zip(*lists[:2], strict=True))
    grad = torch.randn(elements, generator=generator_of(size)).to(size.dtype)
    if operator == "embedding_collection_weights_backward":
        # Any output of the shape will do.
        output = grad.flip(0)
        states = (grad, tables, [], [], None, indices, offsets, weights, output, *lists, 0, [], 0, 0)
        return Sample(operator, str(size), states)
    shapes = ([size.rows] * 2, dims)
    return Sample(operator, str(size), (grad, indices, offsets, weights, None, *shapes, *lists, [True, True]))


def builds_of_collections() -> list[Build]:
    """One of each size for every operator."""
    names = ("", "_dense_backward", "_sparse_backward", "_weights_backward")
    operators = [f"embedding_collection{name}" for name in names]
    return [
        Build(f"{operator}-{size}-", partial(_collection, operator, size)) for size in SIZES for operator in operators
    ]
