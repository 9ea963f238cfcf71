"""Large samples of the family ``embedding_collection``: tables of all widths, on several threads."""

from __future__ import annotations

from functools import partial

import torch
from large_sizes import Build
from reference import MAX, MEAN, SQRTN, SUM
from sample import Sample
from samples_embedding_collection import Collection, random_collection

ADAM = (3, [0.125, 0.75, 0.875, 1e-3, 0.25, 1.0])
_ops = torch.ops.torchsparse_rec


def _collection(bags: int, weighted: bool, side_by_side: bool) -> Collection:
    return random_collection(
        "",
        rows=(bags // 3, 7, 3 * bags, bags),
        dims=(16, 130, 1, 33),
        tables=(0, 1, 2, 3, 0, 2),
        keys=(0, 1, 2, 2, 1, 0),
        modes=(MEAN, SUM, SQRTN, SUM, SUM, MEAN) if weighted else (MEAN, SUM, SQRTN, MAX, MAX, SUM),
        bags=(bags,) * 3 if side_by_side else (bags, bags // 2, 3 * bags),
        padding_idx=(4, -1, 3 * bags, -1),
        most=9,
        weighted=weighted,
        side_by_side=side_by_side,
        seed=bags,
    )


def _sample(operator: str, bags: int, weighted: bool, side_by_side: bool) -> Sample:
    x = _collection(bags, weighted, side_by_side)
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


def builds_of_collections() -> list[Build]:
    builds = []
    for operator, bags in (
        ("embedding_collection", 20_000),
        ("embedding_collection_current", 5_000),
        ("embedding_collection_dense_backward", 20_000),
        ("embedding_collection_sparse_backward", 20_000),
        ("embedding_collection_weights_backward", 20_000),
        ("embedding_collection_update_", 5_000),
    ):
        for weighted, side_by_side in ((False, True), (True, False)):
            if operator.endswith("weights_backward") and not weighted:
                continue
            for count in (bags, 1_000):
                name = f"{operator}-{count}x{'_weighted' if weighted else ''}"
                builds.append(Build(name, partial(_sample, operator, count, weighted, side_by_side)))
    return builds
