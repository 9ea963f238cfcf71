"""Base classes of modules that own tables: whole tables are seen with all rows up to date; fused lookups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import untraced
from .._torch_modules import load_hooks
from ..tables.stale import StaleParameter, flush_read
from ..tables.table import are_same, table_of
from ..typing import GradMode
from ._fused import FusedLookups
from ._graph_owners import register_owner
from ._read import TableSet
from ._refusals import Refusals
from .plan import NO_LOOKUPS, LookupPlan


class TableOwner(torch.nn.Module):
    """
    A module with a table ``weight`` in which an optimizer of this package may leave rows stale.

    The class of the parameter flushes them before other code reads a row (``tables/stale.py``). Compilers, however, and
    some functions of torch read the storage: so the property ``weight`` flushes too, and ``eval()``, for exported
    programs.
    """

    # For a table in a collection, the collection's.
    _grad_mode: GradMode | None = None

    @property
    def weight(self) -> Tensor:
        """The table, ``[num_embeddings, embedding_dim]``, with all rows up to date."""
        stored = self._parameters.get("weight")
        if stored is None:
            # torch.nn.utils.prune, old-style weight_norm and replicas of a module set a tensor that is no parameter.
            if "weight" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute 'weight'")
            return self.__dict__["weight"]  # type: ignore[no-any-return]
        if not torch.compiler.is_compiling():
            if type(stored) is StaleParameter:
                flush_read(stored, sys._getframe(1))
        elif self._may_be_stale() and not torch.compiler.is_exporting():
            _flush_untraced(self)
        return stored

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.__dict__["weight"] = value

    @weight.deleter
    def weight(self) -> None:
        if "weight" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'weight'")
        del self.__dict__["weight"]

    def stored_weight(self) -> Parameter:
        """Return the stored table, stale rows included, or the computed one (parametrized)."""
        stored = self._parameters.get("weight")
        return stored if stored is not None else self.weight  # type: ignore[return-value]

    def _flush(self) -> None:
        stored = self._parameters.get("weight")
        if stored is not None:
            table_of(stored).flush()

    def _may_be_stale(self) -> bool:
        """Say whether rows can become stale, by the gradient mode only: compilers know no more."""
        return self._grad_mode not in (None, "dense")

    def train(self, mode: bool = True):
        """Set the mode as :meth:`torch.nn.Module.train` does; ``eval()`` brings all rows up to date."""
        if not mode:
            self._flush()
        return super().train(mode)


@untraced(
    reason="stale rows are flushed before the whole table is read, which cannot be part of a graph: use "
    "grad_mode='dense' for the table, or compile without fullgraph"
)
def _flush_untraced(module: TableOwner) -> None:
    module._flush()


# Names of our modules that other packages of the library use. Neither ``dir()`` nor the reference shows them.
OF_THE_LIBRARY = frozenset(
    "admission all_step all_stepped all_writing check_fused cold configured forget_lookups history_ends initial "
    "inputs_of keep_keys keys look_up_tables lookup_plan output_of places qconfig readers_of replacing rows_of "
    "saved_tables settled stored_weight stored_weights table_rows trains writing".split()
)


class FusedOwner(Refusals):
    """A module with fused lookups: it holds the hidden leaf on which they depend in autograd's graph."""

    _fused: dict[tuple[LookupPlan, tuple[int, ...]], FusedLookups]
    _last_fused: tuple[LookupPlan, tuple[int, ...], FusedLookups] | None
    _last_way: Any
    """A way of ``_route.py``, which imports this module: its types cannot be imported here."""
    _known_tables: dict[tuple[int, ...], TableSet]
    _leaf: Tensor
    _number: int
    _grad_mode: GradMode | None = None
    # The layout of gradients where the mode is None, and the operator of ordinary lookups.
    _sparse: bool = False
    _operator = "embedding_collection"
    # The stored tables, in the order of the whole plan.
    stored_weights: Callable[[], list[Parameter]]

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in OF_THE_LIBRARY]

    def _init_fused(self) -> None:
        self.forget_lookups()
        self._number = register_owner(self)
        if _follow_tables not in load_hooks(self).values():
            self.register_load_state_dict_post_hook(_follow_tables)

    def check_fused(self) -> None:
        """Raise ``RuntimeError`` if the gradient mode is fused, and a backward could not update the tables."""
        if self._grad_mode == "fused":
            lookups = self.readers_of(tuple(range(len(self.stored_weights()))))
            lookups.check(lookups.tables())

    def readers_of(self, tables: tuple[int, ...]) -> FusedLookups:
        """Return the :class:`FusedLookups` of some tables for others than lookups."""
        last = self._last_fused
        lookups = self._fused_lookups(NO_LOOKUPS, tables)
        self._last_fused = last
        return lookups

    def _fused_lookups(self, plan: LookupPlan, tables: tuple[int, ...]) -> FusedLookups:
        """Return the :class:`FusedLookups` of some tables by a plan, made at the first call."""
        # The last one is kept besides the dict: a plan of many tables takes long to hash.
        if self._last_fused is not None and self._last_fused[0] is plan and self._last_fused[1] == tables:
            return self._last_fused[2]
        found = self._fused.get((plan, tables))
        if found is None:
            found = self._fused[plan, tables] = FusedLookups(plan, self, tables, self._leaf)
        self._last_fused = (plan, tables, found)
        return found

    def _table_set(self, tables: Sequence[int], weights: list[Parameter]) -> TableSet:
        """Return the :class:`TableSet` of some of the tables: the same object while their parameters are the same."""
        key = tuple(tables)
        known = self._known_tables.get(key)
        if known is None or not are_same(known.weights, weights):
            known = self._known_tables[key] = TableSet(weights)
        return known

    def forget_lookups(self) -> None:
        """Drop the records of past lookups: the tables may be other ones, or on another device."""
        self._fused, self._last_fused, self._last_way, self._known_tables = {}, None, None, {}
        if self._may_fuse():
            with torch.inference_mode(False):  # a leaf of inference mode has no node, and no backward reaches it
                self._leaf = torch.zeros((), device=self.stored_weights()[0].device, requires_grad=True)

    def _end_fused(self) -> None:
        """Undo :meth:`_init_fused`, before the module changes its class."""
        for name in ("_fused", "_last_fused", "_known_tables", "_leaf", "_number"):
            self.__dict__.pop(name, None)
        hooks = load_hooks(self)
        for key in [key for key, hook in hooks.items() if hook is _follow_tables]:
            del hooks[key]

    def _may_be_stale(self) -> bool:
        """Say whether rows can become stale: only in modes whose gradients are not dense."""
        return self._grad_mode not in (None, "dense")

    def _may_fuse(self) -> bool:
        """Say whether the grad_mode allows fused lookups."""
        return self._grad_mode in ("fused", "auto")

    def _apply(self, fn: Any, recurse: bool = True):
        result = super()._apply(fn, recurse)
        self.forget_lookups()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return the module's state for copies and pickles, without what refers to this module's own tables."""
        parent = getattr(super(), "__getstate__", None)
        state = self.__dict__.copy() if parent is None else dict(parent())
        for name in ("_fused", "_last_fused", "_last_way", "_known_tables", "_leaf"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the result of :meth:`__getstate__`."""
        super().__setstate__(state)
        self._number = register_owner(self)
        self.forget_lookups()


def _follow_tables(module: FusedOwner, _keys: Any) -> None:
    """Drop the records of past lookups: after ``load_state_dict(assign=True)`` the tables may be other ones."""
    module.forget_lookups()
