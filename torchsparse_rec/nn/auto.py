"""
The rule of the gradient mode ``"auto"``: dense for a table that a step reads whole or nearly so, else by rows.

All modes give the same parameters after a step, to rounding, so the choice is a matter of cost.
``python -m benchmarks.auto_map`` compares it with the fastest mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from ..tables.table import table_of
from ._described import as_bytes
from .gradients import have_hooks

__all__ = ["AutoChoice", "choose"]

# Training lookups after which the estimate of ids per lookup no longer changes.
FREEZE_AFTER = 100
# The time of a step on so few rows, or so few elements, is its calls': dense gradients need the fewest.
SMALL_TABLE, SMALL_ELEMENTS = 1000, 1 << 16
# Under an optimizer that moves all rows, a sparse step first flushes the rows of its ids. Where rows are as short as
# this, that costs each id as much as stepping so many consecutive elements.
SHORT_ROW, ELEMENTS_PER_ID = 16, 128
# Where rows are as long as this, backward updates a whole table faster than it writes a gradient that a step reads.
LONG_ROW = 256
# The ids of a lookup, where the choice must not depend on lookups.
_SETTLED_IDS = 4096


def is_small(weight: Tensor) -> bool:
    """Say whether a table is so small that a dense gradient is fastest, however many ids a lookup has."""
    rows, dim = weight.shape
    return rows * dim <= SMALL_ELEMENTS or (rows <= SMALL_TABLE and dim < LONG_ROW)


def is_dense(weight: Tensor, ids: float, may_fuse: Callable[[Tensor], bool]) -> bool:
    """Say whether a table with so many ids a lookup trains fastest with a dense gradient."""
    rows, dim = weight.shape
    if is_small(weight):
        return True
    if rows <= ids:
        return dim < LONG_ROW or not may_fuse(weight)
    if rows <= SMALL_TABLE:
        return True
    ours = table_of(weight).optimizer
    short = dim <= SHORT_ROW and rows * dim <= ELEMENTS_PER_ID * ids
    return short and ours is not None and ours.moves_idle_rows(weight)


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


# The key is the exact class: a subclass may treat gradients in any way.
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
                f"use_optimizer: optimizer must hold the module's weight, got a {_name(optimizer)} without it"
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
        self.asked = False  # whether a lookup has asked for a layout
        self.has_loss = False  # whether a loss over all rows reads the table
        self.follows = False  # whether such a loss came before all lookups, which follow its choice

    def __getstate__(self) -> dict[str, Any]:
        """Return only the estimate: a copy has another parameter, so its optimizer must be announced again."""
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

    def announce(self, optimizer: Optimizer, weight: Tensor) -> None:
        """Take note of the optimizer of torch that updates the table, and choose anew."""
        self.announced = Announced(optimizer, weight)

    @property
    def frozen(self) -> bool:
        """Whether the estimate no longer changes."""
        return self.lookups >= FREEZE_AFTER

    def count(self, ids: int) -> None:
        """Count a training lookup, unless the estimate is frozen."""
        if not self.frozen:
            self.lookups += 1
            self.ids += ids

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
        """
        Return ``"dense"`` or ``"sparse"``, the layout of all gradients from now on: by sizes, not by lookups.

        Processes must agree. Under ZeroRedundancyOptimizer only one of them has an optimizer for the table, so all
        choose as if they had none.
        """
        if not self.settled:
            ours = table_of(weight).optimizer
            dense = self.obstacle(weight) is not None or (ours is not None and ours.is_of_zero)
            self.mode = "dense" if dense or is_dense(weight, _SETTLED_IDS, lambda _: False) else "sparse"
            self.settled = True
        return self.mode

    def wish(self, weight: Tensor) -> str:
        """Return the layout of the next gradient that is best for the table by itself, and allowed."""
        self.asked = True
        if self.settled:
            obstacle = self.obstacle(weight) if self.mode == "sparse" else None
            if obstacle is not None and table_of(weight).optimizer is None:
                raise RuntimeError(
                    "grad_mode='auto': sparse gradients were settled on, as DistributedDataParallel needs one layout "
                    f"throughout, but {self.optimizer(weight)} does not take them exactly: {obstacle}"
                )
            return self.mode
        if self.announced is not None and self.optimizer(weight) == "torch.SparseAdam":
            return "dense" if self.obstacle(weight) is not None else "sparse"
        if self.follows and self._fuses(weight):
            return "fused"
        # Sizes come first: they cost less than a look at the optimizer, and decide for most tables.
        if not self.lookups or self._is_dense(weight) or self.obstacle(weight) is not None:
            return "dense"
        return "fused" if self.may_fuse(weight) else "sparse"

    def wish_of_loss(self, weight: Tensor) -> str:
        """
        Return ``"fused"`` or ``"dense"``, the layout of the gradient that a loss over all rows gives the table.

        A backward that steps the table must bring all of its gradient. So a loss goes the way of the lookups before it;
        of a table without lookups, backward steps the table if it may.
        """
        self.has_loss = True
        if not self.asked:
            self.follows = True
        if self.follows and not self.settled:
            self.mode = "fused" if self._fuses(weight) else "dense"
        return "fused" if self.is_fused(weight) else "dense"

    def is_fused(self, weight: Tensor) -> bool:
        """Say whether the last choice is that backward updates the table, and it still may."""
        return self.mode == "fused" and self._fuses(weight)

    def _fuses(self, weight: Tensor) -> bool:
        return self.may_fuse(weight) and self.obstacle(weight) is None

    def _is_dense(self, weight: Tensor) -> bool:
        return is_dense(weight, self.ids / self.lookups, self.may_fuse)

    def joins(self, weight: Tensor) -> bool:
        """Say whether backward may update the table although a dense gradient is best for the table by itself."""
        return not self.settled and self.lookups > 0 and self._fuses(weight)

    def stays_dense(self, weight: Tensor) -> bool:
        """Say whether a single table's gradient is dense whatever else changes, and lookups need not be counted."""
        settled = self.mode == "dense" and self.frozen and self.announced is None
        return settled and not self.follows and is_small(weight)

    def may_fuse(self, weight: Tensor) -> bool:
        """Say whether backward may update the table: its optimizer allows it, and there is no ``.grad`` and no hook."""
        ours = table_of(weight).optimizer
        return ours is not None and ours.in_backward and weight.grad is None and not have_hooks([weight])

    def explain(self, weight: Tensor) -> list[str]:
        """Describe the choice in lines of text, with the numbers behind it."""
        name, obstacle = self.optimizer(weight), self.obstacle(weight)
        lines = [f"  optimizer: {name.removeprefix('torch.')}"]
        rows, row_bytes = weight.shape[0], weight.shape[1] * weight.element_size()
        if self.lookups:
            ids = self.ids / self.lookups
            most = min(ids, rows)
            state = "frozen" if self.frozen else f"frozen after {FREEZE_AFTER}"
            lines += [
                f"  estimate: {ids:,.0f} ids a lookup (mean of {self.lookups}, {state})",
                f"  a dense gradient: {rows:,} rows, {as_bytes(rows * row_bytes)}",
                f"  a sparse gradient: at most {most:,.0f} rows, {as_bytes(round(most * row_bytes))}",
            ]
        else:
            lines.append("  estimate: none before the first training lookup")
        return [*lines, f"  why: {obstacle or self._why(name, weight)}"]

    def _why(self, optimizer: str, weight: Tensor) -> str:
        if optimizer == "torch.SparseAdam":
            return "SparseAdam takes sparse gradients only"
        if self.follows and self.mode == "fused":
            return "a loss over all rows steps the table in backward, so that its gradient is never there"
        if not self.lookups:
            return "nothing is known of the lookups yet"
        ids = self.ids / self.lookups
        if not self._is_dense(weight):
            if weight.shape[0] > ids:
                return "the table has more rows than a lookup has ids"
            return f"backward updates rows of {LONG_ROW} elements or more faster than it writes their gradient"
        if self.mode == "fused":
            return "backward updates a larger table of the collection, and one lookup of both costs less than two"
        if weight.shape[0] <= SMALL_TABLE or is_small(weight):
            return (
                f"a table of at most {SMALL_TABLE:,} rows, or {SMALL_ELEMENTS:,} elements, trains fastest with a dense "
                "gradient"
            )
        if weight.shape[0] <= ids:
            return "the table has no more rows than a lookup has ids"
        return (
            f"the table has no more than {ELEMENTS_PER_ID} elements for each id of a lookup, in rows of at most "
            f"{SHORT_ROW}, and {optimizer} moves all rows at every step"
        )


def choose(autos: Sequence[AutoChoice], weights: Sequence[Tensor], together: bool = False) -> list[str]:
    """
    Choose the layouts of the next gradients of some tables, and return them.

    Args:
        autos: the tables' states of ``"auto"``.
        weights: the tables.
        together: whether every lookup reads all of these tables. If backward updates one table, it then updates all
            that it may. Gradients of two kinds would make two lookups, which cost more than small tables gain by dense
            gradients.
    """
    chosen = [auto.wish(weight) for auto, weight in zip(autos, weights, strict=True)]
    if together and "fused" in chosen and "dense" in chosen:
        tables = zip(autos, weights, chosen, strict=True)
        chosen = ["fused" if wish == "dense" and auto.joins(weight) else wish for auto, weight, wish in tables]
    for auto, weight, mode in zip(autos, weights, chosen, strict=True):
        if mode != auto.mode:
            auto.mode = mode
            table_of(weight).flush()  # as the setter of grad_mode does: compiled lookups may read rows as stored
    return chosen
