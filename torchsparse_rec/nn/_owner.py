"""What modules that own tables have in common: rows are current wherever the whole table is seen; fused lookups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..optim._tables import are_same, table_of
from ._fused import FusedLookups
from ._fused_graph import current_lookup, fused_lookup, number_of_call, register_owner
from ._plan import Ids, Plan
from ._read import Tables


class TableOwner(torch.nn.Module):
    """
    A module with a table ``weight`` of which an optimizer of ours may leave rows behind.

    Its parameter's class brings them up to date before anyone else reads one (``optim/_lagging.py``). Compilers read
    the storage: so do ``weight``, for their graphs, and ``eval()``, for programs that are exported.
    """

    # Of a table in a collection that of the collection.
    _grad_mode: str | None = None

    @property
    def weight(self) -> Tensor:
        """The table, ``[num_embeddings, embedding_dim]``, with all rows current."""
        stored = self._parameters.get("weight")
        if stored is None:
            # What torch.nn.utils.prune, old-style weight_norm and replicas of a module set is no parameter.
            if "weight" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute 'weight'")
            return self.__dict__["weight"]  # type: ignore[no-any-return]
        if not torch.compiler.is_compiling():
            if table_of(stored).growing is not None:  # whose parameter's class brings nothing up to date
                table_of(stored).make_current()
        elif self._may_lag() and not torch.compiler.is_exporting():
            _make_current_untraced(self)
        return stored

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.__dict__["weight"] = value

    @weight.deleter
    def weight(self) -> None:
        if "weight" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'weight'")
        del self.__dict__["weight"]

    def _stored_weight(self) -> Parameter:
        """The table as it is stored, rows behind or not. One that is no parameter (parametrized) is taken as it is."""
        stored = self._parameters.get("weight")
        return stored if stored is not None else self.weight  # type: ignore[return-value]

    def _make_current(self) -> None:
        stored = self._parameters.get("weight")
        if stored is not None:
            table_of(stored).make_current()

    def _may_lag(self) -> bool:
        """Whether rows can fall behind: where lookups have gradients by rows. For compilers, who know no more."""
        return self._grad_mode not in (None, "dense")

    def train(self, mode: bool = True):
        """As :meth:`torch.nn.Module.train`; ``eval()`` makes all rows current."""
        if not mode:
            self._make_current()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True):
        self._before_a_swap()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._before_a_swap()
        super()._load_from_state_dict(*args, **kwargs)

    def _before_a_swap(self) -> None:
        stored = self._parameters.get("weight")
        if stored is not None and torch.__future__.get_swap_module_params_on_conversion():
            if table_of(stored).growing is None:  # the hooks of those that grow know their parameter
                table_of(stored).forget()


@torch.compiler.disable(
    reason="the whole table is brought up to date, in place: use grad_mode='dense', or compile without fullgraph, "
    "which leaves that out of the graph"
)
def _make_current_untraced(module: TableOwner) -> None:
    module._make_current()


class FusedOwner(torch.nn.Module):
    """A module with fused lookups: the holder of the leaf that they hang on, which nobody else sees."""

    _fused: dict[tuple[Plan, tuple[int, ...]], FusedLookups]
    _last_fused: tuple[Plan, tuple[int, ...], FusedLookups] | None
    _known_tables: dict[tuple[int, ...], Tables]
    _leaf: Tensor
    _number: int
    _grad_mode: str | None = None
    # The tables as they are stored, in the order of the whole plan.
    _stored_weights: Callable[[], list[Parameter]]

    def _init_fused(self) -> None:
        self._forget_lookups()
        self._number = register_owner(self)
        if _follow_tables not in self._load_state_dict_post_hooks.values():
            self.register_load_state_dict_post_hook(_follow_tables)

    def _look_up_fused(self, plan: Plan, tables: Sequence[int], ids: Ids) -> Tensor:
        """A fused lookup of some tables of the whole; ``plan`` is theirs."""
        if torch.compiler.is_compiling():
            where = (self._number, list(tables), plan.numbers())
            how = (torch.is_grad_enabled(), self.training, number_of_call())
            return fused_lookup(self._leaf, *ids[:3], list(ids.bags), ids.side_by_side, *where, *how)[0]
        return self._fused_lookups(plan, tuple(tables))(ids, self.training)

    def _read_in_graph(self, plan: Plan, tables: Sequence[int], ids: Ids) -> Tensor:
        """Current rows, in a compiled graph, without a gradient to the tables."""
        where = (self._number, list(tables), plan.numbers())
        return current_lookup(*ids[:3], list(ids.bags), ids.side_by_side, *where)[0]

    def _fused_lookups(self, plan: Plan, tables: tuple[int, ...]) -> FusedLookups:
        """What makes these lookups, and knows of them."""
        # Not by the dict alone: a plan of many tables takes long to hash.
        if self._last_fused is not None and self._last_fused[0] is plan and self._last_fused[1] == tables:
            return self._last_fused[2]
        found = self._fused.get((plan, tables))
        if found is None:
            owner = weakref.ref(self)

            def weights() -> list[Parameter] | None:
                module = owner()
                if module is None:
                    return None
                stored = module._stored_weights()
                return stored if len(tables) == len(stored) else [stored[k] for k in tables]

            found = self._fused[plan, tables] = FusedLookups(plan, weights, self._leaf)
        self._last_fused = (plan, tables, found)
        return found

    def _held(self, tables: Sequence[int], weights: list[Parameter]) -> Tables:
        """What is known of some of the tables, gathered once for as long as they are the same."""
        key = tuple(tables)
        held = self._known_tables.get(key)
        if held is None or not are_same(held.weights, weights):
            held = self._known_tables[key] = Tables(weights)
        return held

    def _forget_lookups(self) -> None:
        """Begin anew with tables that may be elsewhere."""
        self._fused, self._last_fused, self._known_tables = {}, None, {}
        if self._may_fuse():
            self._leaf = torch.zeros((), device=self._stored_weights()[0].device, requires_grad=True)

    def _end_fused(self) -> None:
        """Undo :meth:`_init_fused`, before the module becomes another."""
        for name in ("_fused", "_last_fused", "_known_tables", "_leaf", "_number"):
            self.__dict__.pop(name, None)
        hooks = self._load_state_dict_post_hooks
        for key in [key for key, hook in hooks.items() if hook is _follow_tables]:
            del hooks[key]

    def _may_fuse(self) -> bool:
        """Whether the grad_mode can be one of fused lookups."""
        return self._grad_mode in ("fused", "auto")

    def _apply(self, fn: Any, recurse: bool = True):
        result = super()._apply(fn, recurse)
        self._forget_lookups()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which look up tables of their own."""
        parent = getattr(super(), "__getstate__", None)
        state = self.__dict__.copy() if parent is None else dict(parent())
        for name in ("_fused", "_last_fused", "_known_tables", "_leaf"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See :meth:`__getstate__`."""
        super().__setstate__(state)
        self._number = register_owner(self)
        self._forget_lookups()


def _follow_tables(module: FusedOwner, _keys: Any) -> None:
    """After ``load_state_dict(assign=True)`` the tables may be elsewhere."""
    module._forget_lookups()
