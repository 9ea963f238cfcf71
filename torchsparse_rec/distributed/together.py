"""``nn.lookup_sparse`` of tables that are split over ranks: one exchange for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import as_stored, untraced
from ..nn import EmbeddingVariable
from ..nn.collection import Collection
from ..nn.grad_mode import GradModeMixin
from ..nn.lookup_sparse import SparseTables, check_lengths, checked, ids_of, part_of, weight_of
from ..nn.plan import Ids, LookupPlan, counts_of
from .shards import NO_GRAPH, Shards

__all__ = ["look_up_together", "module_of", "note_split"]

# The modules that shard() has split, by the ids of their tables' parameters, which live as long.
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_split(module: Any, weight: Parameter) -> None:
    """Note a module that looks up a table which is split over ranks, for calls that are given its parameter."""
    _modules[id(weight)] = module


def module_of(weight: Tensor) -> Any:
    """Return the module that looks up a table which is split over ranks, by its parameter; None if it is gone."""
    return _modules.get(id(weight))


@untraced(reason=NO_GRAPH)
def look_up_together(params: Sequence[Any], indices: Any, combiners: Any, sp_weights: Any) -> list[Tensor]:
    """
    Do what ``nn.lookup_sparse`` does, for tables that are split over ranks. All ranks call it with the same tables.

    Args:
        params: the tables, of which at least one is split.
        indices: the argument of the function.
        combiners: the argument of the function.
        sp_weights: the argument of the function.

    Raises:
        ValueError: a table is whole, of a collection, or was split by another call of ``shard``; the parameter of a
            table that grows. Also the errors of the function, of whichever rank.
    """
    known = [_modules.get(id(weight_of(given))) for given in params if part_of(given) is not None]
    teller = next((module for module in known if module is not None), None) or _module_of(params[0], 0)
    first = teller.shards
    first.refuse_export()
    with first.told(teller.training):
        check_lengths(params, indices, combiners, sp_weights)
        modules = [_module_of(given, k) for k, given in enumerate(params)]
        for k, module in enumerate(modules):
            if module.shards.ranks is not first.ranks:
                raise ValueError(
                    f"lookup_sparse: params[{k}] must have been split by the call of shard() that has split the "
                    "others: look it up in a separate call"
                )
        key = tuple(map(id, params)), tuple(combiners)
        if key not in first.together:
            tables = SparseTables(params, combiners)
            names = [f"{module.shards.name} ({combiner})" for module, combiner in zip(modules, combiners, strict=True)]
            name = f"lookup_sparse of {', '.join(names)}"
            # Its header may be longer than those so far: all ranks must be here.
            first.ranks.announce(name, "first lookup", teller.training)
            first.together[key] = _Together(name, tables, [_module_of(owner, 0) for owner in tables.owners])
    return first.together[key].look_up(indices, sp_weights)  # type: ignore[no-any-return]


def _module_of(given: Any, k: int) -> Any:
    """Return the module of a table that is split by itself."""
    part = part_of(checked(given, k))
    if part is None:
        raise ValueError(
            f"lookup_sparse: params[{k}] must be split over ranks, as others of params are, got a whole table: look it "
            "up in a separate call"
        )
    module = _modules.get(id(weight_of(given)))
    if module is None or isinstance(module, Collection):
        raise ValueError(
            f"lookup_sparse: params[{k}] must be a table that shard() has split by itself, got {part.name!r} of "
            "a collection: call the collection"
        )
    if isinstance(given, Tensor) and isinstance(module, EmbeddingVariable):
        raise ValueError(
            f"lookup_sparse: params[{k}] must be the EmbeddingVariable {part.name!r} itself, whose keys all ranks "
            "know, got its weight, whose row numbers only hold on this rank"
        )
    return module


class _Together:
    """
    Tables that are looked up together: the part of a module that :class:`Shards` needs.

    Args:
        name: the name of the lookup, for errors.
        tables: the tables and lookups.
        modules: the modules of each table.
    """

    def __init__(self, name: str, tables: SparseTables, modules: Sequence[Any]) -> None:
        self._tables, self._modules = tables, modules
        shards = [module.shards for module in modules]
        # The plan of the present tables has this rank's rows and columns.
        sizes = [(each.tables[0].rows or 1, each.tables[0].dim) for each in shards]
        rows, dims = zip(*sizes, strict=True)
        self._whole = tables.plan._replace(num_embeddings=rows, dims=dims)
        self._features = [f"params[{k}]" for k in range(len(tables.plan.keys))]
        its = [replace(each.tables[0], module=self, pooling="sum") for each in shards]
        plans, one = [each.plans[0] for each in shards], shards[0]
        self.shards = Shards(name, its, plans, one.merge, one.wire_dtype, one.ranks)

    @property
    def training(self) -> bool:
        """Whether one of the modules trains."""
        return any(module.training for module in self._modules)

    def look_up(self, indices: Any, sp_weights: Any) -> list[Tensor]:
        """Return ``[B, D]`` for each lookup."""
        _, ids, result = self.shards.look_up(self, indices, sp_weights)
        parts, dims = result.split(self._whole.sizes(ids)), self._whole.columns()
        return [part.view(bags, dim) for part, bags, dim in zip(parts, ids.bags, dims, strict=True)]

    def lookup_plan(self) -> tuple[LookupPlan, list[str]]:
        return self._whole, self._features

    def stored_weights(self) -> list[Parameter]:
        return [module.stored_weight() for module in self._modules]

    def inputs_of(self, indices: Any, sp_weights: Any) -> tuple[None, Sequence[int], Ids]:
        ids, _ = ids_of(indices, sp_weights)
        return None, range(len(ids.bags)), ids

    def check_fused(self) -> None:
        for owner in self._tables.owners:
            if isinstance(owner, GradModeMixin):
                owner.check_fused()

    def look_up_tables(
        self, plan: LookupPlan, tables: Sequence[int], ids: Ids, occurrences: Tensor | None = None
    ) -> Tensor:
        with as_stored():
            found = self._tables.look_up(plan, tables, ids, counts_of(ids), occurrences)
        return torch.cat([each.reshape(-1) for each in found])
