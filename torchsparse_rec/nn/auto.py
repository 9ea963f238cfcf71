"""
The rule of the gradient mode ``"auto"``.

All modes give the same parameters after a step, to rounding, so the choice is a matter of cost.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from ..optim._tables import table_of
from .gradients import has_hooks

__all__ = ["AutoChoice", "calibrate", "step_costs"]

MODES = ("dense", "sparse", "fused")

# Training lookups after which the estimate of rows per lookup no longer changes.
FREEZE_AFTER = 100

_LEAST_ELEMENTS = 8
# The rows that a lookup is taken to touch, where the choice must not depend on lookups.
_SETTLED_ROWS = 4096


class Constants(NamedTuple):
    """The parts of a step's cost, by optimizer: ours by the class's name, torch's by the name after ``"torch."``."""

    # Microseconds of a step on a table of 16 x 4: dense, sparse, fused.
    fixed: dict[str, tuple[float, ...]]
    # How many times a step passes over the elements of the rows it touches, by the same modes: the backward writes a
    # gradient, the optimizer reads it, reads and writes weight and states. torch's SGD and Adagrad take dense and
    # sparse gradients; the passes of torch's other optimizers only serve what explain() prints.
    passes: dict[str, tuple[float, ...]]
    # Microseconds for each touched row besides its bytes, by the same modes: it lies anywhere, and may be stale.
    row_microseconds: dict[str, tuple[float, ...]]
    # How fast the optimizers of "torch" and "ours" pass over memory.
    bytes_per_microsecond: dict[str, float]


# Measured on two cores with AVX-512: fixed by calibrate(), the others fitted to the times of benchmarks/auto_map.py.
# "torch" and "ours" stand for all other optimizers.
SHIPPED = Constants(
    fixed={
        "torch.SGD": (55.0, 120.0),
        "torch.Adagrad": (85.0, 190.0),
        "torch": (85.0, 190.0),
        "SGD": (77.0, 131.0, 134.0),
        "Adagrad": (79.0, 133.0, 135.0),
        "ours": (88.0, 225.0, 159.0),
    },
    passes={
        "torch.SGD": (4, 4),
        "torch.Adagrad": (12, 18),
        "torch": (2, 2),
        "SGD": (2.2, 2.0, 2.0),
        "RowWiseAdagrad": (2.2, 2.0, 2.0),
        "Adagrad": (2.3, 3.8, 2.6),
        "ours": (3.1, 4.5, 5.0),
    },
    row_microseconds={
        "torch": (0.0, 0.0),
        "SGD": (0.012, 0.010, 0.013),
        "RowWiseAdagrad": (0.012, 0.010, 0.013),
        "Adagrad": (0.018, 0.006, 0.022),
        "ours": (0.028, 0.068, 0.048),
    },
    bytes_per_microsecond={"torch": 12e3, "ours": 20e3},
)
_constants = SHIPPED


def constants() -> Constants:
    """Return the constants that are in use."""
    return _constants


def calibrate(device: torch.device | str | None = None) -> Constants:
    """
    Measure the constants of ``grad_mode="auto"`` on this machine, and use them from now on, in this process.

    Without this call, choices follow constants that were measured once, so that the same program makes the same
    choices everywhere. After it, tables whose estimate is frozen choose anew as well.

    Args:
        device: where to measure. Default: torch's default device.

    Returns:
        The constants.

    The call takes some seconds, and draws from torch's global random numbers.

    Example:
        >>> calibrate().bytes_per_microsecond["ours"] > 0
        True
    """
    global _constants
    from ._calibrate import measure

    _constants = measure(torch.device(device) if device is not None else torch.get_default_device())
    return _constants


def expected_rows(num_embeddings: int, ids: float) -> float:
    """Return the expected number of different rows among uniformly drawn ids: no other distribution has more."""
    if num_embeddings <= 1:
        return float(min(num_embeddings, ids))
    return -num_embeddings * math.expm1(ids * math.log1p(-1.0 / num_embeddings))


class StepCost(NamedTuple):
    """The cost of one step in one gradient mode: bytes moved, and the time that they and the fixed part take."""

    bytes: int
    microseconds: float


def step_costs(
    num_embeddings: int, embedding_dim: int, element_size: int, optimizer: str, rows: float, in_backward: bool = False
) -> dict[str, StepCost]:
    """
    Estimate a training step's cost in each gradient mode: a pure function of sizes and constants.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: elements of a row.
        element_size: bytes of an element.
        optimizer: name of the optimizer's class, after ``"torch."`` if it is torch's.
        rows: different rows that a step touches.
        in_backward: whether the optimizer is one of :mod:`torchsparse_rec.optim` made with ``in_backward=True``.
            Default False.

    Returns:
        The costs of ``"dense"`` and ``"sparse"``, and with ``in_backward`` of ``"fused"``.

    Example:
        >>> costs = step_costs(793_471, 512, 4, "torch.SGD", 2_556)
        >>> costs["dense"].bytes // costs["sparse"].bytes
        310
    """
    whose = "torch" if optimizer.startswith("torch") else "ours"
    tables = (_constants.passes, _constants.fixed, _constants.row_microseconds)
    columns = list(zip(*(table.get(optimizer, table[whose]) for table in tables), strict=True))
    costs = {}
    for mode, (times, start, row) in zip(MODES if in_backward else MODES[:2], columns, strict=False):
        count = num_embeddings if mode == "dense" else rows
        moved = round(times * count * embedding_dim * element_size)
        # Our pass over a table of narrower rows takes as long as if they had _LEAST_ELEMENTS.
        narrow = max(_LEAST_ELEMENTS / max(embedding_dim, 1), 1.0) if (whose, mode) == ("ours", "dense") else 1.0
        microseconds = start + narrow * moved / _constants.bytes_per_microsecond[whose] + row * rows
        costs[mode] = StepCost(moved, microseconds)
    return costs


# ---- Which optimizers take sparse gradients exactly ------------------------------------------------------------------


def _sgd_obstacle(group: dict[str, Any]) -> str | None:
    for name in ("momentum", "weight_decay"):
        if group[name] != 0:
            return f"its {name}, {group[name]}, moves rows without gradient"
    return "fused=True refuses sparse gradients" if group.get("fused") else None


def _adagrad_obstacle(group: dict[str, Any]) -> str | None:
    if group["weight_decay"] != 0:
        return f"its weight_decay, {group['weight_decay']}, moves rows without gradient"
    return "fused=True refuses sparse gradients" if group.get("fused") else None


# The key is the exact class: what a subclass does with a gradient is unknown.
_OBSTACLES: dict[type, Callable[[dict[str, Any]], str | None]] = {
    SGD: _sgd_obstacle,
    Adagrad: _adagrad_obstacle,
    SparseAdam: lambda group: None,
}


class Announced:
    """The place of a table in an optimizer: its parameter group and its position there."""

    def __init__(self, optimizer: Optimizer, weight: Tensor) -> None:
        places = [
            (g, p)
            for g, group in enumerate(optimizer.param_groups)
            for p, parameter in enumerate(group["params"])
            if parameter is weight
        ]
        if not places:
            raise ValueError(
                f"use_optimizer: optimizer must hold the module's weight, got a {_name(optimizer)} without"
            )
        self.optimizer = weakref.ref(optimizer)
        self.group, self.position = places[0]

    def obstacle(self, weight: Tensor) -> str | None:
        """Return why the gradient must be dense, or None; each time anew, as schedules change hyperparameters."""
        optimizer = self.optimizer()
        if optimizer is None:
            return "the announced optimizer no longer exists"
        group = optimizer.param_groups[self.group]
        if group["params"][self.position] is not weight:
            return "the announced optimizer no longer holds this table"
        rule = _OBSTACLES.get(type(optimizer))
        if rule is None:
            return "it refuses sparse gradients, or is not known to treat them as dense ones"
        return rule(group)

    def name(self) -> str:
        """Return the name of the optimizer's class."""
        return _name(self.optimizer())


def _name(optimizer: Optimizer | None) -> str:
    return type(optimizer).__name__ if optimizer is not None else "none"


# ---- The choice ------------------------------------------------------------------------------------------------------


class AutoChoice:
    """The state of ``"auto"`` for one table: how many ids its lookups have, its optimizer, and the last choice."""

    def __init__(self) -> None:
        self.lookups = 0
        self.ids = 0
        self.announced: Announced | None = None
        self.mode = "dense"
        self.settled = False
        self._chosen_for: tuple[str, bool, Constants] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the estimate alone: a copy has another parameter, so its optimizer must be announced again."""
        return self.estimate()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the result of :meth:`__getstate__`."""
        self.__init__()  # type: ignore[misc]
        self.restore(state)

    def estimate(self) -> dict[str, int]:
        """Return the estimate in the form that a state_dict keeps."""
        return {"lookups": self.lookups, "ids": self.ids}

    def restore(self, state: dict[str, int]) -> None:
        """Take over an estimate that :meth:`estimate` returned."""
        self.lookups, self.ids = state["lookups"], state["ids"]
        self._chosen_for = None

    def announce(self, optimizer: Optimizer, weight: Tensor) -> None:
        """Take note of the optimizer of torch that updates the table, and choose anew."""
        self.announced = Announced(optimizer, weight)
        self._chosen_for = None

    def ids_per_lookup(self) -> float | None:
        """Return the mean number of ids over the training lookups counted so far, None before the first."""
        return self.ids / self.lookups if self.lookups else None

    @property
    def frozen(self) -> bool:
        """Whether the estimate no longer changes."""
        return self.lookups >= FREEZE_AFTER

    def count(self, ids: int) -> None:
        """Count a training lookup, unless the estimate is frozen."""
        if not self.frozen:
            self.lookups += 1
            self.ids += ids
            self._chosen_for = None

    def optimizer(self, weight: Tensor) -> str:
        """Return the name of the class of the optimizer that updates the table, after ``"torch."`` if it is torch's."""
        ours = table_of(weight).optimizer
        if ours is not None:
            return type(ours).__name__
        return f"torch.{self.announced.name()}" if self.announced is not None else "none"

    def obstacle(self, weight: Tensor) -> str | None:
        """Return why the gradient must be dense, or None."""
        ours = table_of(weight).optimizer
        if ours is not None:
            return ours.sparse_obstacle(weight)
        if self.announced is None:
            return "no optimizer was announced: call use_optimizer(optimizer)"
        return self.announced.obstacle(weight)

    def settle(self, weight: Tensor) -> str:
        """Choose the layout, ``"dense"`` or ``"sparse"``, of all gradients from now on, by sizes, not by lookups."""
        if not self.settled:
            sizes = weight.shape[0], weight.shape[1], weight.element_size()
            costs = step_costs(*sizes, self.optimizer(weight), _SETTLED_ROWS)
            cheapest = min(costs, key=lambda mode: costs[mode].microseconds)
            self.mode = "dense" if self.obstacle(weight) is not None else cheapest
            self.settled = True
        return self.mode

    def choose(self, weight: Tensor) -> str:
        """Choose the layout of the next gradient: ``"dense"``, ``"sparse"`` or ``"fused"``."""
        if self.settled:
            obstacle = self.obstacle(weight)
            if self.mode == "sparse" and obstacle is not None and table_of(weight).optimizer is None:
                raise RuntimeError(
                    "grad_mode='auto': the choice of sparse gradients was settled, as for DistributedDataParallel, but "
                    f"{self.optimizer(weight)} does not take them exactly: {obstacle}"
                )
            return self.mode
        if self.obstacle(weight) is not None:
            self.mode, self._chosen_for = "dense", None
            return self.mode
        chosen_for = (self.optimizer(weight), self.may_fuse(weight), _constants)
        if self._chosen_for != chosen_for:
            self._chosen_for = chosen_for
            self.mode = self._cheapest(weight)
        return self.mode

    def _cheapest(self, weight: Tensor) -> str:
        if self.optimizer(weight) == "torch.SparseAdam":
            return "sparse"
        costs = self.costs(weight)
        return "dense" if costs is None else min(costs, key=lambda mode: costs[mode].microseconds)

    def costs(self, weight: Tensor) -> dict[str, StepCost] | None:
        """Return the cost of each mode, None before the first training lookup."""
        ids = self.ids_per_lookup()
        if ids is None:
            return None
        rows = expected_rows(weight.shape[0], ids)
        sizes = weight.shape[0], weight.shape[1], weight.element_size()
        return step_costs(*sizes, self.optimizer(weight), rows, self.may_fuse(weight))

    def may_fuse(self, weight: Tensor) -> bool:
        """Say whether backward may update the table: its optimizer allows it, and there is no ``.grad`` and no hook."""
        ours = table_of(weight).optimizer
        return ours is not None and ours.in_backward and weight.grad is None and not has_hooks(weight)

    def explain(self, weight: Tensor) -> list[str]:
        """Return the choice in words, as lines of text, with the numbers behind it."""
        ids, costs, obstacle = self.ids_per_lookup(), self.costs(weight), self.obstacle(weight)
        name = self.optimizer(weight)
        lines = [f"  optimizer: {name.removeprefix('torch.')}"]
        if ids is None or costs is None:
            lines.append("  estimate: none before the first training lookup")
        else:
            state = "frozen" if self.frozen else f"frozen after {FREEZE_AFTER}"
            lines.append(
                f"  estimate: {ids:,.0f} ids a lookup (mean of {self.lookups}, {state}), "
                f"at most {expected_rows(weight.shape[0], ids):,.0f} different rows expected"
            )
            for mode, cost in costs.items():
                lines.append(f"  {mode}: {as_bytes(cost.bytes)} moved a step, about {cost.microseconds:,.0f} us")
        return [*lines, f"  why: {obstacle or _why(name, costs)}"]


def _why(optimizer: str, costs: dict[str, StepCost] | None) -> str:
    if optimizer == "torch.SparseAdam":
        return "SparseAdam takes sparse gradients only"
    if costs is None:
        return "nothing is known of the lookups yet"
    others = [mode for mode in costs if mode != "dense"]
    best = min(others, key=lambda mode: costs[mode].microseconds)
    ratio = costs["dense"].microseconds / costs[best].microseconds
    return f"the optimizer takes all exactly; by estimate dense takes {ratio:,.2f} times as long as {best}"


def as_bytes(count: int) -> str:
    """Return a number of bytes as text, in the largest unit it fills."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} bytes"
