"""What modules that own tables have in common: rows are current wherever the whole table is seen, and the anchor."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..optim._tables import are_same, table_of
from ._anchor import new_anchor
from ._fused import FusedLookups
from ._fused_graph import current_lookup, fused_lookup, number_of_call, register_owner
from ._plan import Ids, Plan
from ._read import Tables

APPLY = ("backward", "step")
_ANCHOR = "fused_anchor"


class TableOwner(torch.nn.Module):
    """
    A module with a table ``weight`` of which an optimizer of ours may leave rows behind.

    They are brought up to date before anyone sees the table as a whole: by ``weight``, ``state_dict()``, ``eval()``,
    copies, ``.to()``.
    """

    # Whether the grad_mode, of a table in a collection that of the collection, is one of gradients by rows.
    _by_rows = False

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
        return self._by_rows

    def train(self, mode: bool = True):
        """As :meth:`torch.nn.Module.train`; ``eval()`` makes all rows current."""
        if not mode:
            self._make_current()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True):
        self._make_current()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles."""
        self._make_current()
        return self.__dict__.copy()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._make_current()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._make_current()
        super()._load_from_state_dict(*args, **kwargs)


@torch.compiler.disable(
    reason="the whole table is brought up to date, in place: use grad_mode='dense', or compile without fullgraph, "
    "which leaves that out of the graph"
)
def _make_current_untraced(module: TableOwner) -> None:
    module._make_current()


class AnchorOwner(torch.nn.Module):
    """A module with fused lookups: the holder of their anchor, which belongs to no state_dict."""

    _fused: dict[tuple[Plan, tuple[int, ...]], FusedLookups]
    _last_fused: tuple[Plan, tuple[int, ...], FusedLookups] | None
    _known_tables: dict[tuple[int, ...], Tables]
    _apply_at: str
    _number: int

    def _init_fused(self, apply: str) -> None:
        if apply not in APPLY:
            raise ValueError(f"{type(self).__name__}: apply must be 'backward' or 'step', got {apply!r}")
        self._apply_at = apply
        self._forget_lookups()
        self._number = register_owner(self)
        if _follow_tables not in self._load_state_dict_post_hooks.values():
            self.register_load_state_dict_post_hook(_follow_tables)

    def _stored_weights(self) -> list[Parameter]:
        """The tables as they are stored, in the order of the whole plan."""
        raise NotImplementedError

    def _set_anchor(self, wanted: bool) -> None:
        """Have an anchor, or none."""
        if not wanted:
            self._parameters.pop(_ANCHOR, None)
        elif _ANCHOR not in self._parameters:
            self.register_parameter(_ANCHOR, new_anchor(self._stored_weights()))
        self._forget_lookups()

    def _look_up_fused(self, plan: Plan, tables: Sequence[int], ids: Ids) -> Tensor:
        """A fused lookup of some tables of the whole; ``plan`` is theirs."""
        anchor = self._parameters[_ANCHOR]
        assert anchor is not None
        if torch.compiler.is_compiling():
            recorded = torch.is_grad_enabled() and anchor.requires_grad
            where = (self._number, list(tables), plan.numbers())
            return fused_lookup(anchor, *ids[:3], list(ids.bags), ids.side_by_side, *where, recorded, number_of_call())[
                0
            ]
        return self._fused_lookups(plan, tuple(tables))(anchor, ids)

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

            anchor = self._parameters[_ANCHOR]
            assert anchor is not None
            found = self._fused[plan, tables] = FusedLookups(plan, weights, anchor, self._apply_at)
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
        self._fused, self._last_fused, self._known_tables = {}, None, {}

    def _apply(self, fn: Any, recurse: bool = True):
        result = super()._apply(fn, recurse)
        anchor = self._parameters.get(_ANCHOR)
        if anchor is not None and anchor.dtype in (torch.float16, torch.bfloat16):
            anchor.data = anchor.data.float()  # a norm needs its range
        self._forget_lookups()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which look up tables of their own."""
        parent = getattr(super(), "__getstate__", None)
        state = self.__dict__.copy() if parent is None else dict(parent())
        state["_fused"], state["_last_fused"], state["_known_tables"] = {}, None, {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See :meth:`__getstate__`."""
        super().__setstate__(state)
        self._number = register_owner(self)
        anchor = self._parameters.get(_ANCHOR)
        if anchor is not None:
            anchor._torchsparse_rec_anchor = True  # type: ignore[attr-defined]  # copies lose it

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + _ANCHOR, None)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        anchor = self._parameters.pop(_ANCHOR, None)
        try:
            super()._load_from_state_dict(*args, **kwargs)
        finally:
            if anchor is not None:
                self._parameters[_ANCHOR] = anchor


def _follow_tables(module: AnchorOwner, _keys: Any) -> None:
    """After ``load_state_dict(assign=True)`` the tables may be elsewhere; an anchor on the meta device cannot move."""
    anchor = module._parameters.get(_ANCHOR)
    if anchor is not None and anchor.device != module._stored_weights()[0].device:
        module._set_anchor(False)
        module._set_anchor(True)
        module._parameters[_ANCHOR].requires_grad_(anchor.requires_grad)  # type: ignore[union-attr]
