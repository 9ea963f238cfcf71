"""The calls from tables, and modules that look rows up, to the optimizer that holds a table's parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

__all__ = ["TableOptimizer"]


class TableOptimizer(Protocol):
    """An optimizer of tables, as :mod:`torchsparse_rec.optim` has them."""

    param_groups: list[dict[str, Any]]
    in_backward: bool
    """Whether backwards step the tables."""
    is_of_zero: bool
    """Whether it was made by torch's ZeroRedundancyOptimizer."""

    def holds(self, parameter: Tensor) -> bool:
        """Say whether a parameter is in one of the groups."""

    def sparse_obstacle(self, weight: Tensor) -> str | None:
        """Return why a sparse or fused gradient of a table saves nothing, or None."""

    def column_obstacle(self, weight: Tensor) -> str | None:
        """Return why the optimizer must not step only some columns of a table, or None if it may."""

    def moves_idle_rows(self, weight: Tensor) -> bool:
        """Say whether a step also moves rows of a table, or their states, that have no gradient."""

    def has_stepped(self, parameters: Iterable[Tensor]) -> bool:
        """Say whether a backward has stepped one of the parameters since the last step."""

    def refuse_stepped(self, what: str, parameters: Iterable[Tensor]) -> None:
        """Raise ``RuntimeError``, which names ``what``, if a backward has stepped one of the parameters."""
