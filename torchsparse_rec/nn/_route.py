"""The ways that lookups go: by which operators, with which gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from .._torch import as_stored
from ._fused import FusedLookups, fused_bare
from ._read import TableSet, stale_bare
from .plan import Plan

__all__ = ["Way"]


class Way(NamedTuple):
    """The way of a lookup with gradients, in one table whose rows may be stale, and what it was found by."""

    weight: Parameter
    options: list[Any]
    plan: Plan
    kind: str
    lookups: FusedLookups | None
    tables: TableSet

    def look_up(
        self, indices: Tensor, offsets: Tensor | None, weights: Tensor | None, bags: tuple[int, ...], training: bool
    ) -> Tensor:
        """Look up ids without any question; see :class:`Ids`."""
        with as_stored():
            inputs = indices, offsets, weights
            if self.lookups is not None:
                return fused_bare(self.lookups.leaf, *inputs, bags, True, self.lookups, training)  # type: ignore[no-any-return]
            return stale_bare(self.plan, self.kind, bags, True, self.tables, *inputs, self.weight)  # type: ignore[no-any-return]
