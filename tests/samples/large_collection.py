"""
Collections of lookups among the large samples: a third of a size's bags to each of three keys, in two tables; and mixed
ones, of all modes and widths.
"""

from __future__ import annotations

from functools import partial

import torch
from samples.embedding_collection import Collection, random_collection
from samples.large_sizes import SIZES, Build, Size, floats_of, generator_of, ids_of, offsets_of
from samples.row_optimizer import ruled
from samples.sample import Family, Sample

from torchsparse_rec.compat._parity.reference import MAX, MEAN, MIN, SQRTN, SUM

ADAM = ruled("adam", lr=0.125, beta1=0.75, beta2=0.875, eps=1e-3, weight_decay=0.25, decoupled=1.0)
_ops = torch.ops.torchsparse_rec


def _mixed_collection(bags: int, weighted: bool, side_by_side: bool) -> Collection:
    return random_collection(
        "",
        rows=(bags // 3, 7, 3 * bags, bags),
        dims=(16, 130, 1, 33),
        tables=(0, 1, 2, 3, 0, 2),
        keys=(0, 1, 2, 2, 1, 0),
        modes=(MEAN, SUM, SQRTN, SUM, SUM, MEAN) if weighted else (MEAN, SUM, SQRTN, MAX, MIN, SUM),
        bags=(bags,) * 3 if side_by_side else (bags, bags // 2, 3 * bags),
        padding_idx=(4, -1, 3 * bags, -1),
        most=9,
        weighted=weighted,
        side_by_side=side_by_side,
        seed=bags,
    )


def _mixed(operator: str, bags: int, weighted: bool, side_by_side: bool) -> Sample:
    x = _mixed_collection(bags, weighted, side_by_side)
    output, argmax = _ops.embedding_collection.default(x.weights, *x.inputs, *x.lists, False)
    winners = None if weighted else argmax
    states = [torch.full_like(weight, 0.5) for weight in x.weights for _ in range(2)]
    last_steps = [torch.arange(weight.shape[0], dtype=torch.int32) % 3 for weight in x.weights]
    history = torch.zeros(8, 8, dtype=torch.float64)
    for step in (1, 2):
        _ops.row_optimizer_advance_.default(history, *ADAM, step, 0)
    arguments = {
        "embedding_collection": (x.weights, *x.inputs, *x.lists, False),
        "embedding_collection_current": (x.weights, states, last_steps, history, *x.inputs, *x.lists, *ADAM, 2, 0),
        "embedding_collection_dense_backward": (x.grad, *x.inputs, winners, *x.sizes, *x.lists, x.wanted),
        "embedding_collection_sparse_backward": (x.grad, *x.inputs, winners, *x.sizes, *x.lists, x.wanted),
        "embedding_collection_coo_backward": (x.grad, *x.inputs, winners, *x.sizes, *x.lists, x.wanted),
        "embedding_collection_weights_backward": (
            *(x.grad, x.weights, [], [], None, *x.inputs, output, *x.lists),
            *(0, [], 0, 0),
        ),
        "embedding_collection_update_": (
            *(x.weights, states, last_steps, history, x.grad, *x.inputs, winners, *x.lists, x.wanted),
            *(None, *ADAM, 3, 0, False, []),
        ),
    }[operator]
    return Sample(operator, "", arguments)


def _builds_of_mixed() -> list[Build]:
    builds = []
    for operator, bags in (
        ("embedding_collection", 20_000),
        ("embedding_collection_current", 5_000),
        ("embedding_collection_dense_backward", 20_000),
        ("embedding_collection_sparse_backward", 20_000),
        ("embedding_collection_coo_backward", 20_000),
        ("embedding_collection_weights_backward", 20_000),
        ("embedding_collection_update_", 5_000),
    ):
        for weighted, side_by_side in ((False, True), (True, False)):
            if operator.endswith("weights_backward") and not weighted:
                continue
            for count in (bags, 1_000):
                name = f"{operator}-{count}x{'_weighted' if weighted else ''}"
                builds.append(Build(name, partial(_mixed, operator, count, weighted, side_by_side)))
    return builds


def _collection(operator: str, size: Size) -> Sample:
    """Return lookups for two keys in a first table, and for a third in a table with rows of another width."""
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


def _builds() -> list[Build]:
    """Return a collection of each size for operators without an optimizer, and mixed ones for all operators."""
    names = ("", "_dense_backward", "_sparse_backward", "_coo_backward", "_weights_backward")
    operators = [f"embedding_collection{name}" for name in names]
    builds = [
        Build(f"{operator}-{size}-", partial(_collection, operator, size)) for size in SIZES for operator in operators
    ]
    return builds + _builds_of_mixed()


FAMILY = Family(large=_builds())
