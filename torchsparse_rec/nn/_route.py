"""
The routes of lookups: by which operators a lookup goes, and by which its gradient.

Single modules, collections and :func:`lookup_sparse` ask the same two questions of a list of tables.
:func:`gradient_kinds` returns the layout of each table's gradient. :func:`route` returns the way of a lookup whose
tables have gradients of one kind:

* ``"plain"``: stored rows. No row is stale. Forward: ``embedding_collection``, for a single module ``embedding`` or
  ``embedding_bag`` (``aten::embedding`` for a few ids). Gradient: ``embedding_collection_`` or ``embedding_``, then
  ``dense_backward`` or ``coo_backward``. In a graph the same operators, with dense gradients.
* ``"current"``: an optimizer has left rows stale, and they are read up to date. Forward:
  ``embedding_collection_current``. Gradient: ``embedding_collection_dense_backward`` or ``..._coo_backward``. In a
  graph ``current_lookup``, without a gradient to the tables.
* ``"fused"``: backward updates the tables. Forward: ``embedding_collection``, or ``..._current`` if rows are stale.
  Gradient: ``embedding_collection_update_``. In a graph ``fused_lookup``.
* ``"outside"``: only in a graph, for sparse gradients, and for ``max_norm`` where rows may be stale: the graph breaks,
  and the lookup goes one of the other ways.

Eager lookups of the middle two ways use a plan that the kernels hold (:class:`Held`); so do their updates, from the
second step on. The operators' names then begin with ``planned_`` instead of ``embedding_``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import as_stored, is_run_again, is_seen, is_traced, is_wrapped
from .._torch_modules import is_in_fsdp
from ..ops.autograd import is_bare
from ..ops.embedding_collection import lookup
from ..tables.stale import are_trained, is_parameter
from ..tables.table import Table
from ._fused import FusedLookups, fused_bare
from ._fused_graph import current_lookup, fused_lookup, number_of_call
from ._lookup import ID_DTYPES
from ._owner import FusedOwner
from ._read import TableSet, look_up_stale, owned_table, read, stale_bare
from ._refusals import check_export, check_shards, lookup_untraced
from .auto import AutoChoice, choose
from .plan import Ids, LookupPlan

__all__ = [
    "CURRENT",
    "FUSED",
    "OUTSIDE",
    "PLAIN",
    "Way",
    "bare_table",
    "explained",
    "gradient_kinds",
    "keep_way",
    "kept_way",
    "look_up",
    "look_up_by",
    "route",
]

PLAIN, CURRENT, FUSED, OUTSIDE = "plain", "current", "fused", "outside"

# Modes that determine the layout of a lookup's gradient by themselves.
_SIMPLE = (None, "sparse", "dense")
# The attributes of a module of one table on which a lookup depends, besides its weight and gradient mode.
_OPTIONS = ("padding_idx", "max_norm", "scale_grad_by_freq", "mode", "_sparse")


# ---- The two questions -----------------------------------------------------------------------------------------------


def gradient_kinds(
    module: FusedOwner,
    weights: Sequence[Tensor],
    autos: Sequence[AutoChoice],
    counts: Callable[[], Sequence[int]],
    together: bool = False,
) -> list[str]:
    """
    Return the layout of the gradient that a lookup gives each of a module's tables: dense, sparse or fused.

    Args:
        module: the module that owns the tables.
        weights: the tables.
        autos: their states of ``"auto"``.
        counts: a function that returns the number of the lookup's ids in each table.
        together: the argument of :func:`choose`.
    """
    mode: str = module._grad_mode or ("sparse" if module._sparse else "dense")
    if torch.compiler.is_exporting():  # a program in eval() needs no other gradients
        check_export(module, mode)
        return ["dense"] * len(weights)
    if not torch.is_grad_enabled() or not any([weight.requires_grad for weight in weights]):
        return ["dense"] * len(weights)
    if mode in _SIMPLE:
        kinds = [mode] * len(weights)
    else:  # a frozen or computed table has no optimizer
        trained: Sequence[int] = range(len(weights))
        if not are_trained(weights):
            trained = [k for k, weight in enumerate(weights) if are_trained([weight])]
        kinds = ["dense"] * len(weights)
        if mode == "auto":
            its = [autos[k] for k in trained]
            _count(module, its, trained, counts)
            made = _auto_kinds(its, [weights[k] for k in trained], together)
        else:
            made = [mode] * len(trained)
        for k, kind in zip(trained, made, strict=True):
            kinds[k] = kind
    check_shards(module, kinds)
    return kinds


def _count(
    module: FusedOwner, autos: Sequence[AutoChoice], trained: Sequence[int], counts: Callable[[], Sequence[int]]
) -> None:
    """Count the ids of a training lookup, for the estimates of ``"auto"``."""
    if torch.compiler.is_compiling() or not module.training or is_run_again():
        return
    if not all([auto.frozen for auto in autos]):
        found = counts()
        for auto, k in zip(autos, trained, strict=True):
            auto.count(found[k])


def _auto_kinds(autos: Sequence[AutoChoice], weights: Sequence[Tensor], together: bool) -> list[str]:
    if torch.compiler.is_compiling():
        for auto in autos:
            auto.asked = True
        return ["dense" if auto.mode == "sparse" else auto.mode for auto in autos]
    return choose(autos, weights, together)


def route(module: FusedOwner, tables: Sequence[int], weights: list[Parameter], kind: str) -> str:
    """
    Return the route of a lookup, see above.

    Args:
        module: the module that owns the tables.
        tables: the tables' numbers in the module.
        weights: the tables, stored or computed.
        kind: the layout of their gradients.
    """
    compiles = torch.compiler.is_compiling()
    if compiles and _is_untraceable(module, kind):
        return OUTSIDE
    if kind == "fused":
        return FUSED
    if not any([is_parameter(weight) for weight in weights]):
        return PLAIN
    if compiles:
        # A lookup that gives dense gradients need not read stale rows: in a mode that has them, no row is stale.
        wanted = torch.is_grad_enabled() and any([weight.requires_grad for weight in weights])
        return CURRENT if module._may_be_stale() and not wanted and not torch.compiler.is_exporting() else PLAIN
    return CURRENT if module._table_set(tables, weights).is_stale() else PLAIN


def _is_untraceable(module: FusedOwner, kind: str) -> bool:
    """Say whether a compiler must leave a lookup out: ``max_norm`` writes rows, and operators are not given them."""
    if kind == "sparse":
        return True
    writes = getattr(module, "max_norm", None) is not None
    return writes and module._may_be_stale() and not torch.compiler.is_exporting()


# ---- The routes ------------------------------------------------------------------------------------------------------


def look_up(
    module: FusedOwner, tables: Sequence[int], weights: list[Parameter], kind: str, plan: LookupPlan, ids: Ids
) -> Tensor:
    """Look up some of a module's tables by a plan of their own; they have one dtype and gradients of one kind."""
    if ids.per_sample_weights is not None and ids.per_sample_weights.dtype != weights[0].dtype:
        ids = ids._replace(per_sample_weights=ids.per_sample_weights.to(weights[0].dtype))
    return look_up_by(route(module, tables, weights, kind), module, tables, weights, kind, plan, ids)


def look_up_by(
    way: str, module: FusedOwner, tables: Sequence[int], weights: list[Parameter], kind: str, plan: LookupPlan, ids: Ids
) -> Tensor:
    """Do as :func:`look_up`, by a known route."""
    if way == OUTSIDE:
        return lookup_untraced(look_up, module, tables, weights, kind, plan, ids)  # type: ignore[no-any-return]
    compiles = torch.compiler.is_compiling()
    if way == PLAIN:
        marks = module._table_set(tables, weights).marks() if kind == "sparse" and not compiles else None
        return lookup(weights, *ids[:3], *plan.lists(ids), kind == "sparse", marks)[0]  # type: ignore[arg-type]
    module._refuse_tracing()
    if compiles:
        inputs = *ids[:3], list(ids.bags), ids.side_by_side, module._number, list(tables), plan.numbers()
        if way == CURRENT:
            return current_lookup(*inputs)[0]
        how = torch.is_grad_enabled(), module.training, number_of_call()
        return fused_lookup(module._leaf, *inputs, *how)[0]
    if way == FUSED:
        return module._fused_lookups(plan, tuple(tables))(ids, module.training)
    its = module._table_set(tables, weights)
    return look_up_stale(plan, kind, its, ids) if torch.is_grad_enabled() else read(plan, its, ids)[0]


def explained(module: FusedOwner, weight: Parameter, kind: str) -> str:
    """Return a line about the route that a training lookup of a table takes now, with both operators' names."""
    stale = is_parameter(weight) and owned_table(weight).is_stale()
    way = FUSED if kind == "fused" else CURRENT if stale else PLAIN
    forward = module._operator if way == PLAIN else "embedding_collection_current" if stale else "embedding_collection"
    scaled = getattr(module, "scale_grad_by_freq", False)
    gradient = (
        module._operator.removesuffix("_bag") if way == PLAIN else "embedding" if scaled else "embedding_collection"
    )
    if way != FUSED:
        gradient += "_coo_backward" if kind == "sparse" else "_dense_backward"
    else:
        gradient = f"{gradient}_sparse_backward, row_optimizer_update_" if scaled else f"{gradient}_update_"
    return f"  route: {way}: forward {forward}, gradient {gradient if weight.requires_grad else 'none'}"


# ---- Short ways of small lookups -------------------------------------------------------------------------------------


def bare_table(module: Any) -> Parameter | None:
    """
    Return a module's table if a lookup needs only its stored rows, and a simple gradient.

    Most of a small lookup's time is the Python around the operators, and the usual lookup needs no more than these
    questions. The others take the complete way, to the same bits.
    """
    weight = module._parameters.get("weight")
    if type(weight) is not Parameter or not is_bare(weight):
        return None
    simple = module._grad_mode in _SIMPLE or (module._grad_mode == "auto" and module._auto.stays_dense(weight))
    if not simple or module.max_norm is not None or is_in_fsdp(module):
        return None
    return None if owned_table(weight).is_stale() else weight


class Way(NamedTuple):
    """
    The way of a lookup that gives its tables gradients, and reads rows that may be stale or lets backward step them.

    Most of a small lookup's time is the Python that finds the way. The next lookup only compares what the way depends
    on.
    """

    options: Sequence[Any]
    """The values of a module's ``_OPTIONS``, if it has one table."""
    plan: LookupPlan
    kind: str
    lookups: FusedLookups | None
    tables: TableSet

    def is_of(self, weights: Sequence[Parameter], ids: Tensor, per_sample_weights: Tensor | None) -> bool:
        """Say whether a lookup in these tables by these ids, which only autograd sees, goes this way too."""
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
                tables = self.tables if self.tables.changes == Table.changes else self.tables.refresh()
                return fused_bare(self.lookups.leaf, *inputs, self.lookups, tables, training)  # type: ignore[no-any-return]
            tables = self.tables
            return stale_bare(self.plan, self.kind, *inputs[3:], tables, *inputs[:3], *tables.weights)  # type: ignore[no-any-return]


def kept_way(module: FusedOwner, ids: Tensor, per_sample_weights: Tensor | None = None) -> Way | None:
    """Return the way of the last lookup of a module of one table, if the next one may go it."""
    # Compilers and modes are asked for first: a compiler must not depend on what an earlier lookup has kept.
    way: Way | None = None if is_seen() else module._last_way
    if way is None or not isinstance(ids, Tensor) or ids.dtype not in ID_DTYPES:
        return None
    if any(map(is_not, map(module.__dict__.get, _OPTIONS), way.options)):
        return None
    weight = module._parameters.get("weight")
    return way if weight is not None and way.is_of([weight], ids, per_sample_weights) else None


def keep_way(module: FusedOwner, plan: LookupPlan, kind: str, tables: Sequence[int], weights: list[Parameter]) -> None:
    """Keep the way that a lookup has just gone, if the next one may go it by the comparison in :class:`Way` only."""
    if module._grad_mode == "auto" or not torch.is_grad_enabled() or is_seen() or not are_trained(weights):
        return
    options = [*map(module.__dict__.get, _OPTIONS)]
    if kind == "fused":
        lookups = module._fused_lookups(plan, tuple(tables))
        module._last_way = Way(options, plan, kind, lookups, lookups.tables())
    elif (its := module._table_set(tables, weights)).is_stale():
        module._last_way = Way(options, plan, kind, None, its)
