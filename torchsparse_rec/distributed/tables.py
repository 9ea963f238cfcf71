"""The tables of modules, for splitting them over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._reduction import POOLING, SUM
from .._torch import as_stored
from ..initializers import Constant, Normal, TruncatedNormal, Uniform
from ..nn import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingVariable
from ..nn.plan import LookupPlan
from ..tables.stale import is_parameter
from ..tables.table import table_of
from .plan import ColumnWise, TablePlan

__all__ = ["ModuleTable", "check_columns", "digest", "growth_of", "lookups_of", "tables_of"]


@dataclass
class ModuleTable:
    """
    A table of a module that will be split, or is split.

    Args:
        module: the module that looks it up.
        key: the key of its weight in the module's state.
        name: the name by which plans may refer to it.
        child: the module whose parameter it is.
        rows: the number of rows of the whole table, V; None if it grows.
        dim: the dimension of the whole table, D.
        features: the features that are looked up in it.
        pooling: the pooling of their rows, or None.
        padding_idx: the padding id, as in the owning module.
        max_norm: the largest norm of a row, as in the owning module.
        initializer: the initializer of its rows, if it is on meta.
    """

    module: Any
    key: str
    name: str
    child: Any
    rows: int | None
    dim: int
    features: Sequence[str]
    pooling: str | None
    padding_idx: int | None
    max_norm: float | None
    initializer: Any

    @property
    def weight(self) -> Parameter:
        """The parameter; once the table is split, it holds a rank's part."""
        return self.child.stored_weight()  # type: ignore[no-any-return]

    @property
    def grows(self) -> bool:
        """Whether rows are made as keys come."""
        return self.rows is None

    @property
    def is_on_meta(self) -> bool:
        """Whether the table has no values yet: ranks will draw them."""
        return self.weight.device.type == "meta"

    def check(self, name: str) -> None:
        """Raise ``ValueError`` or ``RuntimeError`` if the table cannot be split."""
        if not is_parameter(self.weight):
            raise ValueError(f"shard: the weight of table {name!r} must be a parameter, got one that is computed")
        if getattr(self.child, "scale_grad_by_freq", False):
            raise ValueError(
                f"shard: table {name!r} must have scale_grad_by_freq=False, got True, which counts the ids of one "
                "process"
            )
        record = table_of(self.weight)
        if record.rows is not None:
            raise RuntimeError(
                f"shard: the optimizer of table {name!r}, {type(record.optimizer).__name__}, has states of the whole "
                "table: make it afterwards"
            )
        if not self.is_on_meta:
            return
        if record.optimizer is not None:
            raise RuntimeError(
                f"shard: table {name!r} is on meta, and gets a new parameter, which its optimizer, "
                f"{type(record.optimizer).__name__}, would not know: make the optimizer afterwards"
            )
        if not isinstance(self.initializer, (Constant, Normal, TruncatedNormal, Uniform)):
            raise ValueError(
                f"shard: init_fn of table {name!r}, which is on meta, must be Constant, Normal, TruncatedNormal or "
                "Uniform of torchsparse_rec.initializers, by which each rank draws its own rows, got "
                f"{self.initializer!r}: give one of them, or make the table on a device"
            )


def tables_of(title: str, module: Any) -> list[ModuleTable]:
    """
    Return the tables that a module looks up, in the order of its plan.

    Args:
        title: the module's name.
        module: a collection, an :class:`Embedding`, an :class:`EmbeddingBag` or an :class:`EmbeddingVariable`.
    """
    if isinstance(module, EmbeddingVariable):
        name = title or module.name
        return [ModuleTable(module, "weight", name, module, None, module.embedding_dim, [name], None, None, None, None)]
    if isinstance(module, (Embedding, EmbeddingBag)):
        name = title or type(module).__name__
        pooling = module.mode if isinstance(module, EmbeddingBag) else None
        sizes = module.num_embeddings, module.embedding_dim
        padding, clip, begins = module.padding_idx, module.max_norm, Normal()  # as those of torch.nn.Embedding
        return [ModuleTable(module, "weight", name, module, *sizes, [name], pooling, padding, clip, begins)]
    pools = isinstance(module, EmbeddingBagCollection)
    return [
        ModuleTable(
            module,
            key,
            config.name,
            child,
            None if isinstance(child, EmbeddingVariable) else config.num_embeddings,
            config.embedding_dim,
            config.feature_names,
            str(config.pooling) if pools else None,
            getattr(config, "padding_idx", None),
            getattr(config, "max_norm", None),
            config.init_fn or Uniform(config.get_weight_init_min(), config.get_weight_init_max()),
        )
        for key, config, child in module.configured()
    ]


def lookups_of(module: Any, tables: Sequence[ModuleTable]) -> tuple[LookupPlan, Sequence[str]]:
    """Return the plan of a module's lookups, and the names of what that calls keys."""
    if not isinstance(module, (Embedding, EmbeddingBag, EmbeddingVariable)):
        return module.lookup_plan()  # type: ignore[no-any-return]
    (table,) = tables
    rows = table.rows or 1  # of a table that grows nobody asks
    padding = -1 if table.padding_idx is None else table.padding_idx % rows
    mode = SUM if table.pooling is None else POOLING[table.pooling]
    return LookupPlan((0,), (0,), (mode,), (rows,), (table.dim,), (padding,)), table.features


def check_columns(name: str, plan: TablePlan, weight: Parameter, max_norm: float | None) -> None:
    """Raise ``ValueError`` if columns of a table are split whose rows must stay whole."""
    if not isinstance(plan, ColumnWise):
        return
    if max_norm is not None:
        raise ValueError(
            f"table {name!r} is ColumnWise, but has max_norm, a norm of whole rows: use RowWise() or TableWise() for it"
        )
    optimizer = table_of(weight).optimizer
    obstacle = None if optimizer is None else optimizer.column_obstacle(weight)
    if obstacle is not None:
        raise ValueError(f"table {name!r} is ColumnWise, but {obstacle}")


def growth_of(variable: EmbeddingVariable) -> dict[str, Any]:
    """Return the facts of a table that grows that must be the same on all ranks, beside the facts of all tables."""
    initial, option = variable.initial, variable.ev_option
    return {
        "key_dtype": variable.key_dtype,
        "seed": initial.seed,
        "initializer": (initial.kind, initial.numbers, 0 if initial.values is None else digest(initial.values)),
        "default_value_no_permission": option.init_option.default_value_no_permission,
        "filter_option": option.filter_option,
        "evict_option": option.evictions,
        "keys": (variable.total_count(), int(variable.table_rows.all_entries()[:, 0].sum())),
        "global_step": variable.global_step,
    }


def digest(weight: Tensor) -> int:
    """Return a number that differs for different values of a table, with little memory beside them."""
    found = 0
    with torch.no_grad(), as_stored():
        for part in weight.detach().contiguous().view(-1).view(torch.uint8).split(2**20):
            places = torch.arange(part.numel(), device=part.device)
            found = (found * 31 + int((part * (places * 2654435761 + 1)).sum())) % 2**63
    return found
