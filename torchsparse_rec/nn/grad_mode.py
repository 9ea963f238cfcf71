"""
Which layout a table's gradient has: the modes, the rule of ``"auto"``, and what ``explain()`` says of it.

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

__all__ = ["GradModeMixin", "step_costs"]

GRAD_MODES = (None, "sparse", "dense", "auto")

# Training lookups after which the estimate of rows per lookup no longer changes.
FREEZE_AFTER = 100

# Key of the estimate in a module's metadata within a state_dict; the state_dict's own keys stay torch's.
_METADATA_KEY = "torchsparse_rec_lookups"

# How many times a step passes over the elements of the gradient's rows, (dense, sparse), counted from torch's formulas:
# the backward writes them; SGD reads gradient and weight and writes the weight; Adagrad also has state and temporaries.
# Other optimizers take one layout only; for what explain() prints of them, the gradient is written and read.
_PASSES = {"SGD": (4, 4), "Adagrad": (12, 18)}
_OTHER_PASSES = (2, 2)

# Time of a step, on two cores. Fixed part: lookup, backward and optimizer on a table of 16 x 4, (dense, sparse).
# Rate: derived, for both, from torch's steps of 6.5 GB (dense) and 21 MB (sparse) at 793,471 x 512, 2,560 ids, SGD.
_FIXED_MICROSECONDS = {"SGD": (55.0, 120.0), "Adagrad": (85.0, 190.0)}
_OTHER_FIXED_MICROSECONDS = (85.0, 190.0)
_BYTES_PER_MICROSECOND = 12e3


def expected_rows(num_embeddings: int, ids: float) -> float:
    """Different rows among so many uniformly drawn ids: no distribution of the ids is expected to have more."""
    if num_embeddings <= 1:
        return float(min(num_embeddings, ids))
    return -num_embeddings * math.expm1(ids * math.log1p(-1.0 / num_embeddings))


class StepCost(NamedTuple):
    """What one step with one gradient mode costs: bytes moved, and the time they and the fixed part take."""

    bytes: int
    microseconds: float


def step_costs(
    num_embeddings: int, embedding_dim: int, element_size: int, optimizer: str, rows: float
) -> dict[str, StepCost]:
    """
    Estimate a training step's cost in each gradient mode: a pure function of sizes and shipped constants.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: elements of a row.
        element_size: bytes of an element.
        optimizer: name of the optimizer's class.
        rows: different rows that a step touches.

    Returns:
        The costs of ``"dense"`` and ``"sparse"``.

    Example:
        >>> costs = step_costs(793_471, 512, 4, "SGD", 2_556)
        >>> costs["dense"].bytes // costs["sparse"].bytes
        310
    """
    dense_passes, sparse_passes = _PASSES.get(optimizer, _OTHER_PASSES)
    dense_fixed, sparse_fixed = _FIXED_MICROSECONDS.get(optimizer, _OTHER_FIXED_MICROSECONDS)
    row_bytes = embedding_dim * element_size
    dense = round(dense_passes * num_embeddings * row_bytes)
    sparse = round(sparse_passes * rows * row_bytes)
    return {
        "dense": StepCost(dense, dense_fixed + dense / _BYTES_PER_MICROSECOND),
        "sparse": StepCost(sparse, sparse_fixed + sparse / _BYTES_PER_MICROSECOND),
    }


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


# By exact class: what a subclass does with a gradient is unknown.
_OBSTACLES: dict[type, Callable[[dict[str, Any]], str | None]] = {
    SGD: _sgd_obstacle,
    Adagrad: _adagrad_obstacle,
    SparseAdam: lambda group: None,
}


class _Announced:
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
        """Why the gradient must be dense, or None. Looked up anew each time: schedules change hyperparameters."""
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
        """The class of the optimizer."""
        return _name(self.optimizer())


def _name(optimizer: Optimizer | None) -> str:
    return type(optimizer).__name__ if optimizer is not None else "none"


# ---- The choice ------------------------------------------------------------------------------------------------------


class AutoChoice:
    """What ``"auto"`` remembers of one table: how many ids its lookups have, its optimizer, and the last choice."""

    def __init__(self) -> None:
        self.lookups = 0
        self.ids = 0
        self.announced: _Announced | None = None
        self.sparse = False
        self._chosen_for: str | None = None

    def __getstate__(self) -> dict[str, int]:
        """Copies keep the estimate; the optimizer, which knows the original's parameter, must be announced again."""
        return {"lookups": self.lookups, "ids": self.ids}

    def __setstate__(self, state: dict[str, int]) -> None:
        """See :meth:`__getstate__`."""
        self.__init__()  # type: ignore[misc]
        self.restore(state)

    def restore(self, state: dict[str, int]) -> None:
        """Take over a saved estimate."""
        self.lookups, self.ids = state["lookups"], state["ids"]
        self._chosen_for = None

    def ids_per_lookup(self) -> float | None:
        """The mean over the training lookups counted so far, None before the first."""
        return self.ids / self.lookups if self.lookups else None

    def count(self, ids: int) -> None:
        """Count a training lookup, unless the estimate is frozen."""
        if self.lookups < FREEZE_AFTER:
            self.lookups += 1
            self.ids += ids
            self._chosen_for = None

    def choose(self, weight: Tensor) -> bool:
        """Whether the next gradient is sparse."""
        if self.announced is None or self.announced.obstacle(weight) is not None:
            self.sparse = False
            self._chosen_for = None
        elif self._chosen_for != self.announced.name():
            self._chosen_for = self.announced.name()
            self.sparse = self._sparse_is_cheaper(weight)
        return self.sparse

    def _sparse_is_cheaper(self, weight: Tensor) -> bool:
        if self._chosen_for == "SparseAdam":
            return True
        costs = self.costs(weight)
        return costs is not None and costs["sparse"].microseconds < costs["dense"].microseconds

    def costs(self, weight: Tensor) -> dict[str, StepCost] | None:
        """The cost of each mode, None before the first training lookup."""
        ids = self.ids_per_lookup()
        if ids is None:
            return None
        name = self.announced.name() if self.announced is not None else "none"
        rows = expected_rows(weight.shape[0], ids)
        return step_costs(weight.shape[0], weight.shape[1], weight.element_size(), name, rows)


class GradModeMixin(torch.nn.Module):
    """The part of a table module that decides on the layout of its gradient."""

    weight: Tensor
    sparse: bool
    _grad_mode: str | None
    _auto: AutoChoice

    def _init_grad_mode(self, grad_mode: str | None) -> None:
        self._auto = AutoChoice()
        self.grad_mode = grad_mode

    @property
    def grad_mode(self) -> str | None:
        """``None``, ``"sparse"``, ``"dense"`` or ``"auto"``; may be set at any time."""
        return self._grad_mode

    @grad_mode.setter
    def grad_mode(self, value: str | None) -> None:
        if value not in GRAD_MODES:
            raise ValueError(f"grad_mode must be one of {', '.join(map(repr, GRAD_MODES))}, got {value!r}")
        self._grad_mode = value

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """
        Tell ``"auto"`` which optimizer updates this table, so that it may choose sparse gradients.

        Args:
            optimizer: a torch optimizer that holds ``self.weight``. It is not kept alive, saved or copied.

        Raises:
            ValueError: the optimizer does not hold ``self.weight``.
        """
        self._auto.announced = _Announced(optimizer, self.weight)
        self._auto._chosen_for = None
        self._auto.choose(self.weight)

    def _wants_sparse_grad(self, weight: Tensor, ids: int) -> bool:
        """Whether this lookup's gradient is sparse. False where there is no gradient."""
        mode = self._grad_mode
        if mode == "dense" or (mode is None and not self.sparse):
            return False
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return False
        if mode != "auto":
            return True
        if torch.compiler.is_compiling():
            return self._auto.sparse
        if self.training:
            self._auto.count(ids)
        return self._auto.choose(weight)

    def explain(self) -> str:
        """
        Say which layout the table's gradient has, and why, with the numbers behind it.

        Returns:
            A text of several lines: the choice; the table; under ``grad_mode="auto"`` the optimizer, the estimate of
            rows per lookup, and the bytes and time of a step in each mode.
        """
        weight = self.weight
        size = weight.numel() * weight.element_size()
        table = (
            f"  table: {weight.shape[0]:,} rows x {weight.shape[1]:,}, {weight.element_size()} bytes an element, "
            f"{_bytes(size)}"
        )
        title = f"{type(self).__name__}: grad_mode={self._grad_mode!r} -> "
        if self._grad_mode != "auto":
            sparse = self.sparse if self._grad_mode is None else self._grad_mode == "sparse"
            why = f"follows sparse={self.sparse}" if self._grad_mode is None else "as asked"
            return f"{title}{'sparse' if sparse else 'dense'} ({why})\n{table}"
        sparse = self._auto.choose(weight)
        lines = [f"{title}{'sparse' if sparse else 'dense'}", table, *self._explain_auto(weight)]
        return "\n".join(lines)

    def _explain_auto(self, weight: Tensor) -> list[str]:
        auto = self._auto
        ids = auto.ids_per_lookup()
        costs = auto.costs(weight)
        if auto.announced is None:
            obstacle: str | None = "no optimizer was announced: call use_optimizer(optimizer)"
        else:
            obstacle = auto.announced.obstacle(weight)
        name = auto.announced.name() if auto.announced is not None else "none"
        lines = [f"  optimizer: {name}"]
        if ids is None or costs is None:
            lines.append("  estimate: none before the first training lookup")
        else:
            state = "frozen" if auto.lookups >= FREEZE_AFTER else f"frozen after {FREEZE_AFTER}"
            lines.append(
                f"  estimate: {ids:,.0f} ids a lookup (mean of {auto.lookups}, {state}), "
                f"at most {expected_rows(weight.shape[0], ids):,.0f} different rows expected"
            )
            for mode, cost in costs.items():
                lines.append(f"  {mode}: {_bytes(cost.bytes)} moved a step, about {cost.microseconds:,.0f} us")
        return [*lines, f"  why: {obstacle or self._why(auto, costs)}"]

    @staticmethod
    def _why(auto: AutoChoice, costs: dict[str, StepCost] | None) -> str:
        if auto.announced is not None and auto.announced.name() == "SparseAdam":
            return "SparseAdam takes sparse gradients only"
        if costs is None:
            return "nothing is known of the lookups yet"
        ratio = costs["dense"].microseconds / costs["sparse"].microseconds
        return f"the optimizer takes both exactly; by estimate dense takes {ratio:,.2f} times as long as sparse"

    # ---- The estimate travels with the state ------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None and self._auto.lookups:
            metadata[_METADATA_KEY] = self._auto.__getstate__()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        estimate = local_metadata.get(_METADATA_KEY)
        if estimate is not None:
            self._auto.restore(estimate)


def _bytes(count: int) -> str:
    """A number of bytes in the largest unit it fills."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} bytes"
