"""
Benchmark rows of the ``scores`` family: a softmax over all rows of a table, forward and backward, and its best rows.

Input and rows are as small as a model's are; the peers hold all scores, or torch's own chunks of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchsparse_rec import nn, ops, optim

from .machine import begin_peak_anew, memory
from .rows import Case, CudaTargets, Fact, Make, Options, Row, UnavailableError, tensorflow

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
        given: the result of :func:`drawn`.
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


# ---- Some of the rows ------------------------------------------------------------------------------------------------

SAMPLED = 1_000


def sampled_step(given: list[Tensor], kind: Any = "fused") -> Callable[[], Any]:
    """Return the call of our training step with exact Adam over rows that a sampler draws, in a gradient mode."""
    input, rows, target, _ = given
    table = nn.Embedding.from_pretrained(rows.clone(), freeze=False, grad_mode=kind)
    leaf, sampler = input.clone().requires_grad_(), nn.LogUniformSampler(rows.shape[0], SAMPLED, seed=0)
    optimizer = optim.Adam([leaf, *table.parameters()], in_backward=kind == "fused")

    def call() -> Tensor:
        optimizer.zero_grad()
        loss = nn.sampled_softmax_loss(leaf, table, target, sampler(target))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return call


def sampled_step_of_tensorflow(given: list[Tensor], options: Options) -> Callable[[], Any]:
    """Return the call of TensorFlow's step: its Adam steps all rows."""
    tf = tensorflow(options)
    input, rows, target, _ = given
    variables = [tf.Variable(x.numpy()) for x in (input, rows)]
    labels, biases = tf.constant(target.numpy()[:, None]), tf.zeros(rows.shape[0])
    adam = tf.keras.optimizers.Adam()
    adam.build(variables)

    @tf.function
    def call() -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sampled_softmax_loss(
                variables[1], biases, labels, variables[0], SAMPLED, rows.shape[0], seed=0
            )
            loss = tf.reduce_mean(losses)
        adam.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return call  # type: ignore[no-any-return]


def build_sampled(options: Options) -> Case:
    """Draw the problem, and return its sides."""
    given = drawn(options)

    def check() -> None:
        """Compare with dense steps by the same draws; TensorFlow draws others."""
        mine, wanted = (sampled_step(given, kind) for kind in ("fused", "dense"))
        for _ in range(3):
            torch.testing.assert_close(mine(), wanted(), rtol=1e-5, atol=0)

    peers: dict[str, Make] = {"tensorflow": lambda: sampled_step_of_tensorflow(given, options)}
    return Case(lambda: sampled_step(given), peers, check, samples=SAMPLES)


# ---- The highest scores ----------------------------------------------------------------------------------------------

QUERIES, CANDIDATES, BEST, EXCLUDED = 256, 1_000_000, 100, 200
# Of one call, beyond the memory before it.
PEAK_LIMIT_MB = 30.0


def top_k_of_all(query: Tensor, table: Tensor, excluded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the highest scores by way of all."""
    scores = query @ table.T
    return (scores if excluded is None else scores.scatter_(1, excluded, -torch.inf)).topk(BEST)


def peak_of(call: Callable[[], Any], options: Options) -> list[Fact]:
    """Return the peak of memory in a call beyond that before it, in MB (10^6 bytes)."""
    if options.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peak = torch.cuda.max_memory_allocated()
    elif sys.platform.startswith("linux"):
        before = memory("VmRSS")
        begin_peak_anew()
        call()
        peak = memory("VmHWM")
    else:
        return []
    return [Fact("peak memory of a call", (peak - before) / 1e6, "MB", PEAK_LIMIT_MB)]


def build_top_k(excludes: bool, options: Options) -> Case:
    """Draw the problem, and return its sides."""
    rows = options.size(CANDIDATES, 5_000)
    generator = torch.Generator(options.device).manual_seed(0)
    drawn: Any = {"generator": generator, "device": options.device}
    query, table = (torch.randn(n, DIM, **drawn) for n in (QUERIES, rows))
    excluded = torch.randint(rows, (QUERIES, EXCLUDED), **drawn) if excludes else None

    def ours() -> tuple[Tensor, Tensor]:
        return ops.top_k_rows(query, table, BEST, excluded=excluded)

    def check() -> None:
        (values, found), (wanted, _) = ours(), top_k_of_all(query, table, excluded)
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close((query[:, None] * table[found]).sum(2), values, rtol=1e-4, atol=1e-4)

    peers: dict[str, Make] = {"all scores": lambda: lambda: top_k_of_all(query, table, excluded)}
    return Case(lambda: ours, peers, check, samples=QUERIES, facts=lambda: peak_of(ours, options))


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
        "scores/sampled",
        "sampled_softmax_loss, fused, exact Adam, 512 samples, 1,000 rows drawn of 200k x 64, a training step",
        build_sampled,
        targets={"tensorflow": 10.0},
        cuda=CudaTargets(fastest_peer=None),
    ),
    Row(
        "scores/tied",
        "the same where each sample also looks up a row of the table",
        build_tied,
        targets={"untied": 0.74},
        cuda=CudaTargets(fastest_peer=None),
    ),
    *(
        Row(
            f"scores/top-k{name}",
            f"top_k_rows, 100 of 1M x 64 for 256 queries{what}",
            partial(build_top_k, bool(name)),
            targets={"all scores": 1.25},
            cuda=CudaTargets(fastest_peer=None),
        )
        for name, what in (("", ""), ("-excluded", ", 200 ids of each excluded"))
    ),
]
