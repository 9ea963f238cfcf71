"""
Whole training runs of module and optimizer, beside dense float64: every optimizer, gradient mode and pooling.

CI runs configurations of some optimizers in which every two choices meet; ``make test-full`` runs those of all.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from optim.cases import BY_NAME, Case, error_of, learning_rate, one_of_each, zipf_ids
from pairs import pairwise
from torch import Tensor

from torchsparse_rec import KeyedJaggedTensor, nn

ROWS, DIM, BAGS, LENGTH = 64, 4, 5, 3
MODES = ("dense", "sparse", "fused", "auto")
POOLINGS = ("sum", "mean", "sqrtn", "max", "rows")
WEIGHTED = (False, True)
KINDS = ("module", "collection")
# These optimizers meet every choice. Each of the others is like one of them, and meets a single configuration.
OPTIMIZERS = (
    "sgd",
    "sgd-nesterov-decay",
    "adagrad",
    "rowwise-adagrad",
    "adam",
    "adam-seen",
    "adamw-amsgrad",
    "partial-rowwise-adam-decay",
    "rmsprop-centered-momentum",
    "ftrl",
)
CHOICES = ((*MODES, "changing"), POOLINGS, WEIGHTED, KINDS)


def is_possible(optimizer: str, mode: str, pooling: str, weighted: bool, kind: str) -> bool:
    """Say whether a configuration is possible: with extremes and single rows there are no weights."""
    return not (weighted and pooling in ("max", "rows"))


def every_other_minimum(found: list[tuple]) -> list[tuple]:
    """Make every other configuration of max one of min."""
    of_max = [chosen for chosen in found if chosen[2] == "max"][::2]
    return [(*chosen[:2], "min", *chosen[3:]) if chosen in of_max else chosen for chosen in found]


FOUND = every_other_minimum(pairwise(OPTIMIZERS, *CHOICES, allowed=is_possible))
OTHERS = [name for name in BY_NAME if name not in OPTIMIZERS]
CHOSEN = FOUND + [(name, *FOUND[number][1:]) for number, name in enumerate(OTHERS)]


@dataclass
class Batch:
    """The ids, weights and targets of a step."""

    ids: Tensor
    weights: Tensor | None
    target: Tensor


def batches(steps: int, pooling: str, weighted: bool, rows: int = ROWS, dim: int = DIM) -> list[Batch]:
    """Draw Zipf ids, weights and targets."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(steps):
        ids = zipf_ids(BAGS * LENGTH, generator, rows)
        weights = torch.rand(BAGS * LENGTH, generator=generator, dtype=torch.float64) + 0.5
        count = BAGS * LENGTH if pooling == "rows" else BAGS
        target = torch.randn(count, dim, generator=generator, dtype=torch.float64)
        made.append(Batch(ids, weights if weighted else None, target))
    return made


def pooled_densely(weight: Tensor, batch: Batch, pooling: str) -> Tensor:
    """Pool rows by the plain formulas."""
    x = weight[batch.ids]
    if pooling == "rows":
        return x
    x = x.view(BAGS, LENGTH, -1)
    if pooling in ("max", "min"):
        return getattr(x, pooling)(1).values  # of equal extremes the first one, which gets all of the gradient
    w = torch.ones(BAGS * LENGTH) if batch.weights is None else batch.weights
    w = w.to(weight.dtype).view(BAGS, LENGTH, 1)
    total = (w * x).sum(1)
    if pooling == "mean":
        return total / w.sum(1)
    return total / w.square().sum(1).sqrt() if pooling == "sqrtn" else total


def train_densely(case: Case, run: list[Batch], pooling: str, start: Tensor) -> Tensor:
    """Train by the reference, in the dtype of ``start``."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = case.dense([parameter], lr=case.lr)
    for step, batch in enumerate(run):
        optimizer.param_groups[0]["lr"] = learning_rate(step, case.lr)
        optimizer.zero_grad()
        pooled = pooled_densely(parameter, batch, pooling)
        (pooled - batch.target.to(pooled.dtype)).square().sum().mul(0.5).backward()
        parameter.touched = (parameter.grad != 0).any(1)
        optimizer.step()
    return parameter.detach()


class Ours:
    """A module, or a collection of one table, that is called alike."""

    def __init__(self, start: Tensor, mode: str, pooling: str, weighted: bool, kind: str) -> None:
        rows, dim = start.shape
        options = {"grad_mode": "dense" if mode == "changing" else mode}
        self.mode, self.pooling, self.kind = mode, pooling, kind
        if kind == "module":
            if pooling == "rows":
                self.module = nn.Embedding(rows, dim, _weight=start.clone(), **options)
            else:
                self.module = nn.EmbeddingBag(rows, dim, mode=pooling, _weight=start.clone(), **options)
            self.table = self.module
            return
        fields = {"name": "t", "num_embeddings": rows, "embedding_dim": dim, "feature_names": ["f"]}
        fields["init_fn"] = lambda weight: weight.copy_(start)
        if pooling == "rows":
            self.module = nn.EmbeddingCollection([nn.EmbeddingConfig(**fields)], **options)
            self.table = self.module.embeddings["t"]
        else:
            config = nn.EmbeddingBagConfig(**fields, pooling=pooling)
            self.module = nn.EmbeddingBagCollection([config], is_weighted=weighted, **options)
            self.table = self.module.embedding_bags["t"]

    def __call__(self, batch: Batch) -> Tensor:
        weights = None if batch.weights is None else batch.weights.float()
        if self.kind == "collection":
            length = 1 if self.pooling == "rows" else LENGTH
            lengths = torch.full((len(batch.ids) // length,), length)
            result = self.module(KeyedJaggedTensor(["f"], batch.ids, weights, lengths))
            return result["f"].values() if self.pooling == "rows" else result["f"]
        if self.pooling == "rows":
            return self.module(batch.ids)
        shape = (BAGS, LENGTH)
        return self.module(batch.ids.view(shape), None, None if weights is None else weights.view(shape))


def train(case: Case, run: list[Batch], start: Tensor, ours: Ours) -> Tensor:
    """Train by ours, in float32. A lookup at the end sees the bits that stale rows have once they are flushed."""
    optimizer = case.ours(ours.module.parameters(), lr=case.lr, in_backward=True)
    for step, batch in enumerate(run):
        if ours.mode == "changing":
            ours.module.grad_mode = MODES[step // 2 % 4]
        optimizer.param_groups[0]["lr"] = learning_rate(step, case.lr)
        optimizer.zero_grad()
        pooled = ours(batch)
        (pooled - batch.target.float()).square().sum().mul(0.5).backward()
        optimizer.step()
    everything = torch.arange(len(start))[:, None]
    with torch.no_grad():
        seen = ours.module(everything).view(start.shape) if ours.kind == "module" else ours.table.weight
    assert torch.equal(ours.table.weight, seen)
    return ours.table.weight.detach()


def start_of(rows: int = ROWS, dim: int = DIM) -> Tensor:
    """Draw first rows, which float32 holds exactly."""
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(1))


def compare(chosen: tuple, steps: int) -> None:
    """Train by ours, and allow at most 1.5 times the error of dense float32 against float64."""
    name, mode, pooling, weighted, kind = chosen
    case, run, start = BY_NAME[name], batches(steps, pooling, weighted), start_of()
    want = train_densely(case, run, pooling, start.double())
    allowed = 1.5 * error_of(train_densely(case, run, pooling, start), want)
    with pytest.warns(UserWarning, match="every step updates all rows") if case.warns else nullcontext():
        got = train(case, run, start, Ours(start, mode, pooling, weighted, kind))
    assert torch.isfinite(got).all()
    assert error_of(got, want) <= max(allowed, 1e-7)


def named(chosen: tuple) -> str:
    """Return a configuration's name for the report."""
    return "-".join(str(x).replace(" ", "-") for x in chosen)


@pytest.mark.parametrize("chosen", CHOSEN, ids=named)
def test_training_equals_dense_training(chosen: tuple) -> None:
    compare(chosen, 300)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("chosen", [*CHOSEN[:12], *(x for x in CHOSEN if x[0] in ("adadelta", "lamb"))], ids=named)
def test_training_with_both_kernels(chosen: tuple) -> None:
    compare(chosen, 20)


@pytest.mark.full
@pytest.mark.parametrize("chosen", pairwise(BY_NAME, *CHOICES, allowed=is_possible), ids=named)
def test_all_of_them(chosen: tuple) -> None:
    """Train by every optimizer in every mode, with every pooling, and so on."""
    compare(chosen, 300)


# ---- Rows that are idle for long -------------------------------------------------------------------------------------

IDLE = ("sgd-momentum", "sgd-nesterov-decay", "adam", "adamw", "amsgrad", "partial-rowwise-adam-decay", "adam-seen")
IDLE = one_of_each((*IDLE, "rmsprop-centered-momentum"), "weight")


@pytest.mark.parametrize("idle", [1, 10, 1_000, pytest.param(100_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", IDLE)
def test_rows_that_are_idle(name: str, idle: int) -> None:
    case, start = BY_NAME[name], start_of(16, 4)
    active = [
        Batch(torch.tensor([r, r + 1, r + 2] * BAGS), None, torch.zeros(BAGS * LENGTH, 4).double()) for r in (0, 3, 6)
    ]
    quiet = Batch(torch.tensor([11, 12, 13, 14, 15] * LENGTH), None, torch.zeros(BAGS * LENGTH, 4).double())
    run = [*active, *[quiet] * idle, *active]
    # Rows that are trained towards zero for very long hold nothing but rounding errors.
    rows = slice(9 if idle == 100_000 else None)
    want = train_densely(case, run, "rows", start.double())[rows]
    allowed = 1.5 * error_of(train_densely(case, run, "rows", start)[rows], want)
    got = train(case, run, start, Ours(start, "fused", "rows", False, "module"))[rows]
    assert error_of(got, want) <= max(allowed, 1e-7)
