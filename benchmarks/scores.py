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

from torchsparse_rec import nn, ops, optim

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


def drawn(options: Options) -> list[Tensor]:
    """Draw samples, rows, and a target and an id for each sample."""
    rows = options.size(ROWS_OF_TABLE, 2_000)
    generator = torch.Generator(options.device).manual_seed(0)
    how: Any = {"generator": generator, "device": options.device}
    given = [torch.randn(n, DIM, **how) / DIM**0.5 for n in (SAMPLES, rows)]
    return [*given, *(torch.randint(rows, (SAMPLES,), **how) for _ in range(2))]


def build(options: Options) -> Case:
    """Draw the problem, and return its sides."""
    *given, _ = drawn(options)

    def check() -> None:
        mine, wanted = (gradients(loss, given)()() for loss in (ops.linear_cross_entropy, of_all_scores))
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-7)

    peers = {"all scores": gradients(of_all_scores, given), "torch's chunks": of_chunks(given)}
    return Case(gradients(ops.linear_cross_entropy, given), peers, check, samples=SAMPLES)


def step(given: list[Tensor], kind: str, tied: bool = False) -> Make:
    """
    Return the call of a training step with exact Adam.

    Args:
        given: what :func:`drawn` returns.
        kind: the gradient mode of our table; ``"torch"``: its table, all scores, and its optimizer.
        tied: whether the samples are rows of the table.
    """
    input, rows, target, ids = given

    def make() -> Callable[[], Any]:
        if kind == "torch":
            table: Any = torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False)
        else:
            table = nn.Embedding.from_pretrained(rows.clone(), freeze=False, grad_mode=kind)  # type: ignore[arg-type]
        leaf = input.clone().requires_grad_()
        adam: Any = torch.optim.Adam if kind == "torch" else partial(optim.Adam, in_backward=kind == "fused")
        optimizer = adam([leaf, *table.parameters()])

        def call() -> Any:
            optimizer.zero_grad()
            samples = leaf + table(ids) if tied else leaf
            if kind == "torch":
                loss = of_all_scores(samples, table.weight, target)
            else:
                loss = nn.table_cross_entropy(samples, table, target)
            loss.backward()
            optimizer.step()
            return table.weight

        return call

    return make


def build_step(options: Options) -> Case:
    """Draw the problem, and return the sides of an untied step."""
    given = drawn(options)
    sides = {kind: step(given, kind) for kind in ("fused", "torch", "dense")}

    def check() -> None:
        mine, *others = (make()() for make in sides.values())
        for other in others:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)

    return Case(sides["fused"], {"all scores": sides["torch"], "ours, dense": sides["dense"]}, check, samples=SAMPLES)


def build_tied(options: Options) -> Case:
    """Draw the problem, and return the sides of a tied step."""
    given = drawn(options)

    def check() -> None:
        mine, other = (step(given, kind, tied=True)()() for kind in ("fused", "torch"))
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)

    peers = {"untied": step(given, "fused"), "all scores": step(given, "torch", tied=True)}
    return Case(step(given, "fused", tied=True), peers, check, samples=SAMPLES)


ROWS = [
    Row(
        "scores/cross-entropy",
        "linear_cross_entropy, 512 samples, 200k x 64, forward and backward",
        build,
        targets={"all scores": 2.0},
        cuda=CudaTargets(fastest_peer=None),
    ),
    Row(
        "scores/step",
        "table_cross_entropy, fused, exact Adam, 512 samples, 200k x 64, a training step",
        build_step,
        targets={"all scores": 1.33, "ours, dense": 0.91},
        cuda=CudaTargets(fastest_peer=None),
    ),
    Row(
        "scores/tied",
        "the same where each sample also looks up a row of the table",
        build_tied,
        targets={"untied": 0.74},
        cuda=CudaTargets(fastest_peer=None),
    ),
]
