"""Random training programs: one seed draws one program, and the lookups of each step have a seed of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from optim.cases import CHOICES
from torch import Tensor

MODES = ("dense", "sparse", "fused", "auto")
KINDS = ("rows", "bags", "row collection", "bag collection")
POOLINGS = ("sum", "mean", "max")


@dataclass
class Spec:
    """A table. Its features look it up, in modules of their own if ``shared``."""

    rows: int
    dim: int
    pooling: str  # "rows": not pooled
    padding: int | None
    features: int
    shared: bool
    max_norm: float | None
    by_frequency: bool


@dataclass
class Program:
    """A training program: tables, optimizer, and steps by their names and arguments."""

    seed: int
    kind: str
    grad_mode: str
    dtype: torch.dtype
    tables: list[Spec]
    weighted: bool
    optimizer: str
    arguments: dict[str, Any]
    in_backward: bool
    groups: bool  # whether each table has a parameter group
    head: bool
    extreme: bool
    growing: bool  # whether the tables grow; they have all their rows from the start
    steps: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def has_fused(self) -> bool:
        """Whether a backward may update tables."""
        return self.grad_mode == "fused" or (self.grad_mode == "auto" and self.in_backward)

    @property
    def trains_weights(self) -> bool:
        """Whether the weights of ids have gradients, which demand that no table is renormalised before the backward."""
        return self.weighted and not self.extreme and self.seed % 2 == 0 and all(not t.max_norm for t in self.tables)

    def __str__(self) -> str:
        head = {name: value for name, value in vars(self).items() if name != "steps"}
        return "\n".join([f"{head}", *(f"  {number:2} {name} {its}" for number, (name, its) in enumerate(self.steps))])


# ---- Optimizers ------------------------------------------------------------------------------------------------------

# What a schedule may change between steps, beside lr. SGD's momentum may become zero or not; with other optimizers
# torch itself refuses that.
SCHEDULED = ("weight_decay", "betas", "eps", "momentum", "alpha", "rho", "l1", "l2")


def _optimizer(random: Random) -> tuple[str, dict[str, Any]]:
    name = random.choice(list(CHOICES))
    arguments = {key: random.choice(values) for key, values in CHOICES[name].items()}
    if name == "SGD" and arguments["momentum"] and random.random() < 0.3:
        arguments.update(nesterov=True, dampening=0.0)
    if random.random() < 0.15:
        arguments["maximize"] = True
    if name != "LAMB" and random.random() < 0.2:
        arguments["lazy"] = True
    return name, arguments


def _schedule(random: Random, program: Program) -> dict[str, Any]:
    """Draw a new value for one hyperparameter."""
    names = [name for name in CHOICES[program.optimizer] if name in SCHEDULED]
    if program.optimizer != "SGD" and "momentum" in names:
        names.remove("momentum")
    if program.arguments.get("nesterov"):  # Nesterov needs a momentum
        names.remove("momentum")
    name = random.choice(names)
    return {name: random.choice(CHOICES[program.optimizer][name])}


# ---- Programs --------------------------------------------------------------------------------------------------------


def _tables(random: Random, kind: str, grad_mode: str) -> list[Spec]:
    modules = "collection" not in kind
    specs = []
    for _ in range(random.choice((1, 1, 2, 3))):
        rows = random.choice((1, 7, 30, 200))
        if grad_mode == "auto" and random.random() < 0.5:
            rows = 3000
        specs.append(
            Spec(
                rows=rows,
                dim=random.choice((1, 3, 8)),
                pooling="rows" if "row" in kind else random.choice(POOLINGS),
                padding=random.randrange(rows) if rows > 1 and random.random() < 0.4 else None,
                features=random.choice((1, 1, 2)),
                shared=modules and random.random() < 0.5,
                max_norm=2.0 if modules and random.random() < 0.1 else None,
                by_frequency=kind == "rows" and random.random() < 0.1,
            )
        )
    return specs


_STEPS = {
    "train": 12,
    "learning rate": 2,
    "schedule": 2,
    "freeze": 1,
    "read": 2,
    "weights": 1,
    "reload": 1,
    "resume": 1,
    "from torch": 0.5,
    "copy": 0.7,
    "flush": 0.5,
    "write": 0.7,
    "new optimizer": 0.4,
    "no gradient": 0.4,
    "average": 1,
    "move": 1,
    "leave": 0.7,
}


def _train(random: Random, program: Program, tables: int) -> dict[str, Any]:
    """Draw the arguments of a step: its backwards, their lookups, and what is done to gradients before and after."""
    arguments: dict[str, Any] = {"seed": random.randrange(2**31)}
    if tables > 1 and "collection" not in program.kind and random.random() < 0.2:
        arguments["without"] = random.randrange(tables)
    if not program.trains_weights and random.random() < 0.2:
        arguments["checkpointed"] = True
    if program.extreme:
        return arguments
    arguments["zero"] = random.choice(("none", "none", "none", "zeros", "none" if program.has_fused else "keep"))
    if program.has_fused:
        return arguments
    if random.random() < 0.15:
        arguments["backwards"] = 2
    clip = random.random()
    if clip < 0.15:
        arguments["clip_norm"] = random.choice((0.5, 3.0)), random.choice((2.0, 1.0, float("inf")))
    elif clip < 0.25:
        arguments["clip_value"] = 0.3
    return arguments


def draw(seed: int, extreme: bool = False) -> Program:
    """Draw the program of a seed."""
    random = Random(seed)
    kind, grad_mode = random.choice(KINDS), random.choice(MODES)
    name, arguments = _optimizer(random)
    program = Program(
        seed=seed,
        kind=kind,
        grad_mode=grad_mode,
        dtype=torch.float32 if extreme or random.random() < 0.25 else torch.float64,
        tables=_tables(random, kind, grad_mode),
        weighted="bag" in kind and random.random() < 0.4,
        optimizer=name,
        arguments=arguments,
        in_backward=grad_mode == "fused" or random.random() < 0.5,
        groups=random.random() < 0.3,
        # Ftrl and LAMB update dense layers by another rule, which tests/optim checks.
        head=name not in ("Ftrl", "LAMB") and random.random() < 0.5,
        extreme=extreme,
        growing=kind != "bags" and random.random() < 0.2,
    )
    if program.growing:
        for spec in program.tables:
            spec.rows, spec.shared = max(spec.rows, 2), False
            spec.padding = spec.max_norm = None
            spec.by_frequency = False
    if extreme:
        program.head = False
        for spec in program.tables:
            spec.pooling = "sum" if spec.pooling != "rows" else "rows"  # equal infinities have no single maximum
            spec.max_norm = None
    for spec in program.tables:
        if spec.pooling == "max":
            program.weighted = False
    # A row that is written into a table that grows is a new one, and torch's states have no row for a key.
    absent = ("from torch", "write") if extreme or program.growing else ()
    weights = {key: value for key, value in _STEPS.items() if key not in absent}
    for step in random.choices(list(weights), list(weights.values()), k=random.randint(5, 25)):
        its: dict[str, Any] = {"seed": random.randrange(2**31)}
        if step == "train":
            its = _train(random, program, len(program.tables))
        elif step == "learning rate":
            its["factor"] = random.choice((0.1, 0.5, 2.0) if not extreme else (0.0, 0.1, 2.0))
            if its["factor"] == 0.0 and name == "Ftrl":
                its["factor"] = 1e-3
        elif step == "schedule":
            its = _schedule(random, program)
        elif step in ("freeze", "write", "move", "leave"):
            its["table"] = random.randrange(len(program.tables))
        if step == "freeze":
            its["zero"] = random.choice(("none", "zeros"))
        elif step == "move":
            its["factor"] = random.choice((0.25, 1.5))
        program.steps.append((step, its))
    return program


# ---- What one backward looks up --------------------------------------------------------------------------------------


@dataclass
class Feature:
    """Bags of ids for one table, the targets of their results, and a mask of the results."""

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None
    target: Tensor
    mask: Tensor

    @property
    def offsets(self) -> Tensor:
        """The place where each bag starts, and where the last one ends."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])


# Factors of targets, which become gradients.
EXTREMES = (1e30, 1e20, 1e15, 1e-20, 1e-30, 1e-42, 0.0, float("inf"), float("nan"))


def lookups(program: Program, seed: int) -> list[Feature]:
    """
    Return the ids, weights and targets of a backward, for the features of the tables in order.

    A mask of 0 makes the gradient of a row of the result exactly zero. Now and then the last two bags hold one id that
    is nowhere else, with the masks 1 and -1: the gradient of its row adds up to exactly zero.
    """
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    bags = random.choice((0, 1, 3, 6)) if random.random() < 0.3 else 5
    pair = random.random() < 0.3
    found = []
    for spec in program.tables:
        lone = random.randrange(spec.rows) if pair and spec.rows > 1 and not spec.by_frequency else None
        first, span = random.randrange(spec.rows), max(1, int(spec.rows * random.random() ** 2))
        for number in range(spec.features):
            feature = _feature(random, generator, program, spec, bags, (first, span), lone)
            if pair:
                _append_pair(feature, lone if number == 0 else None, spec)
            found.append(feature)
    return found


def _feature(
    random: Random,
    generator: torch.Generator,
    program: Program,
    spec: Spec,
    bags: int,
    place: tuple[int, int],
    lone: int | None,
) -> Feature:
    lengths = [random.choice((0, 1, 1, 2, 4)) for _ in range(bags)]
    if random.random() < 0.3:
        lengths = [random.choice((1, 2, 3))] * bags
    ids = [(place[0] + random.randrange(place[1])) % spec.rows for _ in range(sum(lengths))]
    ids = [(id + 1) % spec.rows if id == lone else id for id in ids]
    count = len(ids) if spec.pooling == "rows" else bags
    mask = torch.tensor([random.choice((1.0, 1.0, 1.0, 0.0)) for _ in range(count)], dtype=torch.float64)
    target = torch.randn(count, spec.dim, generator=generator, dtype=torch.float64)
    if program.extreme and count:
        target[random.randrange(count)] *= random.choice(EXTREMES)
    weights = None
    if program.weighted:
        weights = torch.rand(len(ids), generator=generator, dtype=torch.float64) + 0.25
        if spec.pooling == "sum" and random.random() < 0.3:
            weights[: random.randrange(len(ids) + 1)] = 0.0
    int64 = torch.int64
    return Feature(torch.tensor(ids, dtype=int64), torch.tensor(lengths, dtype=int64), weights, target, mask)


def _append_pair(feature: Feature, lone: int | None, spec: Spec) -> None:
    """Append two bags, each with the id ``lone``, or empty if it is None."""
    size = 0 if lone is None else 1
    feature.lengths = torch.cat([feature.lengths, torch.full((2,), size)])
    if lone is not None:
        feature.ids = torch.cat([feature.ids, torch.full((2,), lone)])
        if feature.weights is not None:  # torch fuses products with sums: with other weights the sum would not be 0
            feature.weights = torch.cat([feature.weights, feature.weights.new_full((2,), 0.5)])
    if lone is not None or spec.pooling != "rows":
        feature.mask = torch.cat([feature.mask, torch.tensor([1.0, -1.0], dtype=torch.float64)])
        feature.target = torch.cat([feature.target, feature.target.new_full((2, spec.dim), 0.5)])
