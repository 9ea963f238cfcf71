"""The ways that lookups go: by which operators, with which gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import as_stored, is_traced, is_wrapped
from ._fused import FusedLookups, fused_bare
from ._read import TableSet, stale_bare
from .plan import Plan

__all__ = ["Way"]


class Way(NamedTuple):
    """
    The way of a lookup that gives its tables gradients, and reads rows that may be stale or lets backward step them.

    Of a small lookup, most of the time is the Python that finds the way. The next one compares what it was found by.
    """

    options: Sequence[Any]
    """Of a module of one table: what else its lookups depend on."""
    plan: Plan
    kind: str
    lookups: FusedLookups | None
    tables: TableSet

    def is_of(self, weights: Sequence[Parameter], ids: Tensor, per_sample_weights: Tensor | None) -> bool:
        """Say whether a lookup in these tables by these ids, which nobody but autograd sees, goes this way too."""
        if type(ids) is not Tensor or ids.is_nested or len(weights) != len(self.tables.weights):
            return False
        if not torch.is_grad_enabled() or is_traced() or is_wrapped(ids):
            return False
        with as_stored():
            dtype = weights[0].dtype
            for weight, known in zip(weights, self.tables.weights, strict=True):
                if weight is not known or not weight.requires_grad or weight.dtype is not dtype:
                    return False
            if per_sample_weights is not None and per_sample_weights.dtype is not dtype:
                return False
            return self.lookups is not None or self.tables.is_stale()

    def look_up(
        self,
        indices: Tensor,
        offsets: Tensor | None,
        per_sample_weights: Tensor | None,
        bags: Sequence[int],
        side_by_side: bool,
        training: bool,
    ) -> Tensor:
        """Return the results of the lookup of :class:`Ids`; ``training`` is the module's."""
        inputs = indices, offsets, per_sample_weights, bags, side_by_side
        with as_stored():
            if self.lookups is not None:
                return fused_bare(self.lookups.leaf, *inputs, self.lookups, training)  # type: ignore[no-any-return]
            tables = self.tables
            return stale_bare(self.plan, self.kind, *inputs[3:], tables, *inputs[:3], *tables.weights)  # type: ignore[no-any-return]
