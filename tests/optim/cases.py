"""What comparisons of optimizers with dense ones share: references that torch lacks, cases, and the training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchsparse_rec import optim
from torchsparse_rec._torch import as_stored
from torchsparse_rec.compat._parity.reference.row_optimizer import (
    ftrl,
    lamb,
    lion,
    partial_rowwise_adam,
    rowwise_adagrad,
)
from torchsparse_rec.ops.row_optimizer import row_optimizer_current
from torchsparse_rec.tables.table import table_of

ROWS, DIM, IDS = 64, 4, 12

# ---- References ------------------------------------------------------------------------------------------------------


class Reference(torch.optim.Optimizer):
    """A dense optimizer by a formula. ``parameter.touched`` says which rows have a gradient that is not zero."""

    def __init__(self, formula, names, states, lazy, params, **arguments):
        super().__init__(params, arguments)
        self.formula, self.names, self.states, self.lazy = formula, names, states, lazy

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            given = (group[name] for name in self.names)
            h = [number for value in given for number in (value if isinstance(value, tuple) else [value])]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(enumerate(p.new_zeros(p.shape[:dims]) for dims in self.states), step=0)
                    state[0] += group["initial_accumulator_value"]
                state["step"] += 1
                row = [p, *(state[k] for k in range(len(self.states)))]
                grad = -p.grad if group.get("maximize") else p.grad
                rows = p.touched if self.lazy else slice(None)
                for table, new in zip(row, self.formula(row, grad, state["step"], *h), strict=True):
                    table[rows] = new[rows]


def _reference(formula: Callable, states: tuple[int, ...], lazy: bool = False, first: float = 0.0, **defaults):
    """
    Return what makes a dense optimizer.

    Args:
        formula: a rule of compat's reference.
        states: the dimensions of each of the rule's states.
        lazy: whether rows without gradient stay as they are.
        first: the default of ``initial_accumulator_value``, at which the first state starts.
        defaults: the defaults of the formula's arguments after ``lr``, in its order.
    """
    make = partial(Reference, formula, ("lr", *defaults), states, lazy)
    return partial(make, initial_accumulator_value=first, **defaults)


_BETAS = (0.9, 0.999)
#: Optimizers that torch lacks, dense.
REFERENCES = {
    "RowWiseAdagrad": _reference(rowwise_adagrad, (1,), lr_decay=0.0, eps=1e-10, weight_decay=0.0),
    "PartialRowWiseAdam": _reference(partial_rowwise_adam, (2, 1), betas=_BETAS, eps=1e-8, weight_decay=0.0),
    "Ftrl": _reference(ftrl, (2, 2), True, 0.1, lr_power=-0.5, l1=0.0, l2=0.0, l2_shrinkage=0.0, beta=0.0),
    "Lion": _reference(lion, (2,), betas=(0.9, 0.99), weight_decay=0.0),
    "LAMB": _reference(lamb, (2, 2), True, betas=_BETAS, eps=1e-6, weight_decay=0.0),
}


@torch.no_grad()
def _decay_rows_seen(decay, decoupled, optimizer, *_):
    """Add decay to the gradients of rows that have one; if decoupled, take it from these rows."""
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if p.grad is not None):
            part = decay * torch.where(p.touched[:, None], p, 0)
            if decoupled:
                p -= group["lr"] * part
            else:
                p.grad = p.grad - part if group.get("maximize") else p.grad + part


def _decaying_rows_seen(make, weight_decay, decoupled_weight_decay, params, **kwargs):
    """Return a dense optimizer without decay, and a hook before its step that decays rows seen."""
    optimizer = make(params, **kwargs)
    optimizer.register_step_pre_hook(partial(_decay_rows_seen, weight_decay, decoupled_weight_decay))
    return optimizer


# ---- Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One of our optimizers, and the dense one to which it must be equal."""

    name: str
    kind: str  # the class
    arguments: dict[str, Any]
    ours: Callable[..., Any]
    dense: Callable[..., torch.optim.Optimizer]
    lr: float = 0.05
    # Whether a step must update all rows with this rule, and warns of it.
    warns: bool = False

    def __str__(self) -> str:
        return self.name

    def motion(self) -> str:
        """Return how rows without gradient move, in the words of ``ops.idle_motion``; empty: in no closed form."""
        optimizer = self.ours([torch.nn.Parameter(torch.zeros(1, 1))], lr=self.lr)
        return optimizer.rule(optimizer.param_groups[0]).words.motion


def _case(name: str, kind: str, lr: float = 0.05, warns: bool = False, **kwargs):
    dense = REFERENCES.get(kind) or partial(getattr(torch.optim, kind), foreach=False)
    others = dict(kwargs)
    if others.pop("decay", "all") == "seen":
        decay = others.pop("weight_decay"), others.pop("decoupled_weight_decay", False)
        dense = partial(_decaying_rows_seen, dense, *decay)
    return Case(name, kind, kwargs, partial(getattr(optim, kind), **kwargs), partial(dense, **others), lr, warns)


CASES = [
    _case("sgd", "SGD"),
    _case("sgd-decay", "SGD", weight_decay=0.1),
    _case("sgd-momentum", "SGD", momentum=0.9),
    _case("sgd-momentum-decay-dampening", "SGD", momentum=0.8, dampening=0.3, weight_decay=0.1),
    _case("sgd-nesterov-decay", "SGD", momentum=0.9, nesterov=True, weight_decay=0.1),
    _case("adagrad", "Adagrad", lr_decay=0.01, initial_accumulator_value=0.1),
    _case("adagrad-decay", "Adagrad", weight_decay=0.1, warns=True),
    _case("adagrad-seen", "Adagrad", weight_decay=0.1, decay="seen"),
    _case("rowwise-adagrad", "RowWiseAdagrad", lr_decay=0.01),
    _case("rowwise-adagrad-decay", "RowWiseAdagrad", weight_decay=0.1, warns=True),
    _case("rowwise-adagrad-seen", "RowWiseAdagrad", weight_decay=0.1, decay="seen"),
    _case("adam", "Adam"),
    _case("adam-large-eps", "Adam", eps=0.1, betas=(0.8, 0.99)),
    _case("adam-maximize", "Adam", lr=0.01, maximize=True),
    _case("adam-decay", "Adam", weight_decay=0.1, warns=True),
    _case("adam-seen", "Adam", weight_decay=0.1, decay="seen"),
    _case("adam-seen-maximize", "Adam", lr=0.01, weight_decay=0.1, decay="seen", maximize=True),
    _case("adam-seen-decoupled", "Adam", weight_decay=0.1, decay="seen", decoupled_weight_decay=True),
    _case("amsgrad-seen", "Adam", weight_decay=0.1, decay="seen", amsgrad=True),
    _case("adam-decoupled", "Adam", weight_decay=0.1, decoupled_weight_decay=True),
    _case("amsgrad", "Adam", amsgrad=True),
    _case("adamw", "AdamW", weight_decay=0.1),
    _case("adamw-amsgrad", "AdamW", weight_decay=0.1, amsgrad=True),
    _case("partial-rowwise-adam", "PartialRowWiseAdam"),
    _case("partial-rowwise-adam-decay", "PartialRowWiseAdam", weight_decay=0.1),
    _case("rmsprop", "RMSprop", lr=0.01),
    _case("rmsprop-centered", "RMSprop", centered=True, eps=1e-3, lr=0.01),
    _case("rmsprop-momentum", "RMSprop", momentum=0.9, lr=0.01),
    _case("rmsprop-centered-momentum", "RMSprop", momentum=0.9, centered=True, eps=1e-3, lr=0.01),
    _case("rmsprop-decay", "RMSprop", weight_decay=0.1, warns=True),
    _case("rmsprop-seen", "RMSprop", lr=0.01, weight_decay=0.1, decay="seen"),
    _case("rmsprop-seen-momentum", "RMSprop", lr=0.01, weight_decay=0.1, decay="seen", momentum=0.9, eps=1e-3),
    _case("ftrl", "Ftrl", lr=0.5),
    _case("ftrl-penalties", "Ftrl", lr=0.5, l1=0.01, l2=0.02, l2_shrinkage=0.03, beta=0.1, lr_power=-0.4),
    _case("adadelta", "Adadelta", lr=1.0),
    _case("adadelta-decay", "Adadelta", lr=1.0, weight_decay=0.1, warns=True),
    _case("lamb", "LAMB", weight_decay=0.01),
    _case("lion", "Lion", lr=0.01),
    _case("lion-decay", "Lion", lr=0.01, betas=(0.5, 0.9), weight_decay=0.1),
    _case("adamax", "Adamax", lr=0.01, warns=True),
    _case("adamax-decay", "Adamax", lr=0.01, eps=0.1, weight_decay=0.1, warns=True),
]
BY_NAME = {case.name: case for case in CASES}

# What random programs draw from.
_ADAM = {"lr": (0.01, 0.05), "betas": ((0.9, 0.999), (0.8, 0.99), (0.5, 0.9), (0.0, 0.99)), "eps": (1e-8, 1e-3, 0.1)}
_ADAGRAD = {"lr": (0.05, 0.2), "lr_decay": (0.0, 0.01), "weight_decay": (0.0, 0.0, 0.1), "eps": (1e-10, 1e-3)}
_ADAGRAD["initial_accumulator_value"] = (0.0, 0.1)
_DECAY = {"weight_decay": (0.0, 0.1)}
CHOICES: dict[str, dict[str, tuple]] = {
    "SGD": {"lr": (0.01, 0.05), "momentum": (0.0, 0.5, 0.9), "dampening": (0.0, 0.3), **_DECAY},
    "Adagrad": _ADAGRAD,
    "RowWiseAdagrad": _ADAGRAD,
    "Adam": {**_ADAM, **_DECAY, "amsgrad": (False, True), "decoupled_weight_decay": (False, True)},
    "AdamW": {**_ADAM, **_DECAY, "amsgrad": (False, True)},
    "PartialRowWiseAdam": {**_ADAM, **_DECAY},
    "RMSprop": {"lr": (0.01, 0.03), "alpha": (0.99, 0.9, 0.5), "eps": (1e-3, 0.1), "momentum": (0.0, 0.0, 0.9)}
    | {"centered": (False, True), "weight_decay": (0.0, 0.0, 0.1)},
    "Adadelta": {"lr": (0.3, 1.0), "rho": (0.9, 0.5), "eps": (1e-6, 1e-3), "weight_decay": (0.0, 0.0, 0.1)},
    "Ftrl": {"lr": (0.1, 0.5), "lr_power": (-0.5, -0.4), "l1": (0.0, 0.01), "l2": (0.0, 0.02)}
    | {"l2_shrinkage": (0.0, 0.03), "beta": (0.0, 0.1), "initial_accumulator_value": (0.1, 0.5)},
    "LAMB": {"lr": (0.01, 0.05), "betas": ((0.9, 0.999), (0.8, 0.99)), "eps": (1e-6, 1e-3), **_DECAY},
    "Lion": {"lr": (0.001, 0.01), "betas": ((0.9, 0.99), (0.5, 0.9), (0.0, 0.9), (0.9, 0.0)), **_DECAY},
    "Adamax": {**_ADAM, **_DECAY},
}


def one_of_each(names: Sequence[str], *motions: str) -> list[str]:
    """Return these cases, and one of each other optimizer whose rows without gradient move in one of these ways."""
    kinds = {BY_NAME[name].kind for name in names}
    others = {case.kind: case.name for case in reversed(CASES) if case.kind not in kinds and case.motion() in motions}
    return [*names, *reversed(others.values())]


def other_kinds(kinds: Iterable[str]) -> list[Case]:
    """Return a case of each optimizer that is not among these."""
    return [
        BY_NAME[name] for name in one_of_each([], "none", "states", "weight", "") if BY_NAME[name].kind not in kinds
    ]


# ---- A training run --------------------------------------------------------------------------------------------------


def owned_table(values: Tensor) -> torch.nn.Parameter:
    """Make a table whose readers ask for rows that are up to date, as our modules do."""
    parameter = torch.nn.Parameter(values.clone())
    table_of(parameter).mark_owned()
    return parameter


def current_rows(parameter: Tensor, ids: Tensor) -> Tensor:
    """Return rows as a lookup sees them, up to date."""
    table = table_of(parameter)
    if not table.is_stale():
        return parameter.detach()[ids]
    rows = table.rows
    with as_stored():
        stored = parameter.detach()
    return row_optimizer_current(
        stored,
        rows.states,
        rows.last_step,
        rows.clock.history,
        ids,
        rule=rows.clock.rule,
        hyperparameters=rows.clock.hyperparameters,
        step=rows.clock.step,
        base=rows.clock.base,
    )


def zipf_ids(count: int, generator: torch.Generator, rows: int = ROWS) -> Tensor:
    """Draw row numbers, some of them often, most of them rarely."""
    weights = 1.0 / torch.arange(1, rows + 1, dtype=torch.float64) ** 1.05
    return torch.multinomial(weights, count, replacement=True, generator=generator)


def learning_rate(step: int, peak: float) -> float:
    """Return a learning rate of a schedule: a warm-up, then a cosine."""
    return peak * min((step + 1) / 10, 1.0) * (0.55 + 0.45 * math.cos(step / 20))


@dataclass
class Batch:
    """The ids and targets of a step, the same for a table of any precision, and the gradient's layout."""

    ids: Tensor
    target: Tensor
    layout: str


def batches(steps: int, layout: str = "sparse", seed: int = 0) -> list[Batch]:
    """Draw batches. ``layout`` is "sparse", "dense", or "mixed", with a dense gradient now and then."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for step in range(steps):
        ids = zipf_ids(IDS, generator)
        target = torch.randn(IDS, DIM, generator=generator, dtype=torch.float64)
        here = layout if layout != "mixed" else ("dense" if step % 5 == 3 else "sparse")
        result.append(Batch(ids, target, here))
    return result


def set_gradient(parameter: Tensor, batch: Batch, rows: Tensor, dense: bool) -> None:
    """Set the gradient of half the squared distance to the targets, given the batch's rows as they are."""
    values = rows - batch.target.to(rows.dtype)
    grad = torch.sparse_coo_tensor(batch.ids[None], values, parameter.shape, check_invariants=True)
    parameter.grad = grad.to_dense() if dense else grad
    parameter.touched = (grad.to_dense() != 0).any(1)


def train(optimizer: torch.optim.Optimizer, parameter: Tensor, run: list[Batch], peak: float, first: int = 0) -> None:
    """Train a table of ours, with gradients from rows that are up to date, in the batches' layouts."""
    for step, batch in enumerate(run, first):
        optimizer.param_groups[0]["lr"] = learning_rate(step, peak)
        set_gradient(parameter, batch, current_rows(parameter, batch.ids), batch.layout == "dense")
        optimizer.step()


def train_densely(optimizer: torch.optim.Optimizer, parameter: Tensor, run: list[Batch], peak: float) -> None:
    """Train a table by a dense reference."""
    for step, batch in enumerate(run):
        optimizer.param_groups[0]["lr"] = learning_rate(step, peak)
        set_gradient(parameter, batch, parameter.detach()[batch.ids], dense=True)
        optimizer.step()


def initial(seed: int = 1) -> Tensor:
    """Draw the first rows of a table, which every dtype but half ones holds exactly."""
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))


def error_of(got: Tensor, expected: Tensor) -> float:
    """Return the root of the mean squared error, which does not hang on one unlucky element."""
    return (got.double() - expected).square().mean().sqrt().item()


def dense_results(case: Case, run: list[Batch]) -> tuple[Tensor, float]:
    """Return the rows that the dense reference trains in float64, and the error of those that it trains in float32."""
    results = []
    for dtype in (torch.float64, torch.float32):
        parameter = torch.nn.Parameter(initial().to(dtype))
        train_densely(case.dense([parameter], lr=case.lr), parameter, run, case.lr)
        results.append(parameter.detach().double())
    return results[0], error_of(results[1], results[0])


# ---- Tables of ours beside dense float64 ones ------------------------------------------------------------------------


def both(make, dense, tables=1):
    """Make tables of ours and float64 ones, and an optimizer for each side."""
    ours = [owned_table(initial(seed)) for seed in range(tables)]
    theirs = [torch.nn.Parameter(initial(seed).double()) for seed in range(tables)]
    return ours, make(ours), theirs, dense(theirs)


def step(ours, theirs, optimizers, batch, which=None, dense=False):
    """Step some of the tables on both sides; the others have no gradient."""
    for k, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        one.grad = other.grad = None
        if which is None or k in which:
            set_gradient(one, batch, current_rows(one, batch.ids), dense)
            set_gradient(other, batch, other.detach()[batch.ids], True)
    for optimizer in optimizers:
        optimizer.step()


def distance(one, other):
    """Return the largest difference between a lookup of all our rows and the float64 table."""
    return (current_rows(one, torch.arange(ROWS)).double() - other.detach()).abs().max().item()
