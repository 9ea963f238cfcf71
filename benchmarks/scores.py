"""
Benchmark rows of the ``scores`` family: a softmax over all rows of a table, forward and backward, beside torch's.

Input and rows are as small as a model's are; the peers hold all scores, or torch's own chunks of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchsparse_rec import ops

from .rows import Case, CudaTargets, Make, Options, Row, UnavailableError

SAMPLES, ROWS_OF_TABLE, DIM = 512, 200_000, 64


def of_all_scores(input: Tensor, table: Tensor, target: Tensor) -> Tensor:
    """Return the loss by way of all scores."""
    return F.cross_entropy(input @ table.T, target)


def gradients(loss: Callable[..., Tensor], given: list[Tensor]) -> Make:
    """Return the call that gives a loss's gradients."""
    input, table, target = given

    def make() -> Callable[[], Any]:
        leaves = [x.clone().requires_grad_() for x in (input, table)]
        return lambda: torch.autograd.grad(loss(*leaves, target), leaves)

    return make


def of_chunks(given: list[Tensor]) -> Make:
    """Return the call that gives the gradients of torch's loss without all scores, which torch has from 2.13 on."""

    def make() -> Callable[[], Any]:
        loss: Any = getattr(F, "linear_cross_entropy", None)
        if loss is None:
            raise UnavailableError("torch has no linear_cross_entropy")
        return gradients(partial(loss, options=torch.nn.LinearCrossEntropyOptions()), given)()

    return make


def build(options: Options) -> Case:
    """Draw the problem, and return its sides."""
    rows = options.size(ROWS_OF_TABLE, 2_000)
    generator = torch.Generator(options.device).manual_seed(0)
    drawn: Any = {"generator": generator, "device": options.device}
    given = [torch.randn(n, DIM, **drawn) / DIM**0.5 for n in (SAMPLES, rows)]
    given.append(torch.randint(rows, (SAMPLES,), **drawn))

    def check() -> None:
        mine, wanted = (gradients(loss, given)()() for loss in (ops.linear_cross_entropy, of_all_scores))
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-7)

    peers = {"all scores": gradients(of_all_scores, given), "torch's chunks": of_chunks(given)}
    return Case(gradients(ops.linear_cross_entropy, given), peers, check, samples=SAMPLES)


ROWS = [
    Row(
        "scores/cross-entropy",
        "linear_cross_entropy, 512 samples, 200k x 64, forward and backward",
        build,
        targets={"all scores": 2.0},
        cuda=CudaTargets(fastest_peer=None),
    )
]
