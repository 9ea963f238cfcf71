"""The base of both collections: their tables, the features of each table, and the calls that look them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .._torch import as_stored, is_seen
from ..checkpoint.parts import SavedRows, SavedTable
from ..initializers import Uniform
from ..jagged import KeyedJaggedTensor
from ..jagged.inputs import check_present
from ..tables.boxes import kept_whole
from ..tables.stale import are_trained
from ..tables.table import are_same
from ..typing import GradMode
from ..variable.read_write_lock import ReadWriteLock, reading
from ._described import described, with_size
from ._growing import rows_of_keys
from ._max_norm import look_up_clipped
from ._refusals import check_shards, growing_untraced, refuse_clipped, refused
from ._route import gradient_kinds, keep_way, look_up
from .auto import AutoChoice, choose
from .configs import as_dtype, as_pooling, check_configs, embedding_names_by_table
from .embedding_variable import EmbeddingVariable
from .grad_mode import HasGradMode, OneTable, gives_coo
from .plan import Ids, LookupPlan, counts_of, joined


class CollectionTable(OneTable):
    """
    One table of a collection; it can be saved, loaded, frozen or cast by itself.

    Its subclasses extend torch's embedding classes: tools read from these whether a gradient is sparse. Called by
    itself it is torch's module, which gives a dense gradient.
    """

    # The largest norm with which the collection reads a row, for whoever reads rows without it; None: any.
    _clip: float | None = None

    def __init__(self, config: Any, device: torch.device | str | None) -> None:
        rows = torch.empty(config.num_embeddings, config.embedding_dim, device=device, dtype=as_dtype(config.data_type))
        with torch.no_grad():
            if config.init_fn is not None:
                config.init_fn(rows)
            elif rows.numel():
                rows.uniform_(config.get_weight_init_min(), config.get_weight_init_max())
            padding_idx = getattr(config, "padding_idx", None)
            if padding_idx is not None:
                rows[padding_idx] = 0
        super().__init__(*rows.shape, padding_idx=padding_idx, _weight=rows)
        self._init_fused()
        self._auto = AutoChoice()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Look up as torch's module."""
        refuse_clipped("table of a collection", "its config", self)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    @property
    def sparse(self) -> bool:
        """Whether the table's gradient is COO, as of :class:`Embedding`."""
        return gives_coo(self._grad_mode, self._auto, self)

    @sparse.setter
    def sparse(self, value: bool) -> None:
        """Ignore the value, which torch's constructors set."""

    def _gradient_kind(self, weight: Tensor, ids: int) -> str:
        if self._grad_mode != "auto" or torch.compiler.is_exporting():
            return super()._gradient_kind(weight, ids)
        if not torch.is_grad_enabled() or not are_trained([weight]):
            return "dense"
        # The collection chooses for all its tables together: a call without the others follows, or settles it.
        kind = "fused" if self._auto.is_fused(weight) else self._auto.settle(weight)
        check_shards(self, [kind])
        return kind

    def extra_repr(self) -> str:
        """Return the number of rows, their width, and the bytes."""
        weight = self.stored_weight()
        return with_size(f"{weight.shape[0]}, {weight.shape[1]}", None, weight)


class BagTable(CollectionTable, torch.nn.EmbeddingBag):  # type: ignore[misc]
    """A table of a collection whose lookups are pooled."""

    def __init__(self, config: Any, device: torch.device | str | None) -> None:
        super().__init__(config, device)
        self.mode = as_pooling(config.pooling).value.lower()


class RowTable(CollectionTable, torch.nn.Embedding):  # type: ignore[misc]
    """A table of a collection whose lookups give one row per id."""


class Collection(HasGradMode):
    """
    A module of several tables that are looked up together.

    Args:
        configs: a config for each table.
        modes: the reduction of each table's lookups.
        device: the device on which the tables are made.
        grad_mode: the layout of the tables' gradients, see the subclasses.
    """

    _children: str
    # Whether the mode is the default, which goes by the device.
    _by_device: bool = False
    # A call's inputs: its features as one tensor, the place of each of the collection's among them, and their ids.
    inputs_of: Callable[..., tuple[KeyedJaggedTensor, list[int], Ids]]

    def __init__(
        self,
        configs: Sequence[Any],
        modes: Sequence[int],
        device: torch.device | str | None,
        grad_mode: GradMode | Literal["default"] | None,
    ) -> None:
        super().__init__()
        check_configs(type(self).__name__, configs)
        self._configs = list(configs)
        self._features = list(dict.fromkeys(feature for config in configs for feature in config.feature_names))
        self._lookup_features = [feature for config in configs for feature in config.feature_names]
        self._names = [name for names in embedding_names_by_table(list(configs)) for name in names]
        self._widths = [config.embedding_dim for config in configs for _ in config.feature_names]
        children = torch.nn.ModuleDict()
        for config in configs:  # not by add_module, which refuses names that ModuleDict's methods have, such as "items"
            children._modules[config.name] = _new_table(config, device)
        self.add_module(self._children, children)
        tables = [k for k, config in enumerate(configs) for _ in config.feature_names]
        self._whole = LookupPlan(
            tuple(tables),
            tuple(self._features.index(feature) for feature in self._lookup_features),
            tuple(modes[k] for k in tables),
            tuple(config.num_embeddings for config in configs),
            tuple(config.embedding_dim for config in configs),
            tuple(_padding(config) for config in configs),
        )
        self._max_norms = [getattr(config, "max_norm", None) for config in configs]
        self._clips = any(self._max_norms)
        for table, max_norm in zip(self._tables, self._max_norms, strict=True):
            table._clip = max_norm
        self._plans: dict[tuple, LookupPlan] = {}
        self._growing = {k: child for k, child in enumerate(self._tables) if isinstance(child, EmbeddingVariable)}
        lock = ReadWriteLock()
        for variable in self._growing.values():
            variable._lock = lock
        self._in_order = list(range(len(self._features)))
        self._init_fused()
        self.grad_mode = grad_mode if grad_mode != "default" else self._default_mode()
        self._by_device = grad_mode == "default"

    def embedding_names(self) -> list[str]:
        """Return the names of the results, in order."""
        return list(self._names)

    @property
    def device(self) -> torch.device:
        """The device where the tables are now. TorchRec's property names the device where they were made."""
        return self._tables[0].stored_weight().device

    def _default_mode(self) -> GradMode | None:
        """Return the mode of collections whose user has named none. On CUDA nobody has measured ``"auto"`` yet."""
        return None if self.device.type == "cuda" else "auto"

    def _apply(self, fn: Any, recurse: bool = True):
        result = super()._apply(fn, recurse)
        if self._by_device and self._grad_mode != self._default_mode():
            self.grad_mode = self._default_mode()
            self._by_device = True
        return result

    @property
    def _tables(self) -> list[CollectionTable | EmbeddingVariable]:
        return list(self._modules[self._children]._modules.values())  # type: ignore[arg-type, union-attr]

    def configured(self) -> list[tuple[str, Any, CollectionTable | EmbeddingVariable]]:
        """Return the tables, each as the name of its weight in the state, its config, and its module."""
        tables = zip(self._configs, self._tables, strict=True)
        return [(f"{self._children}.{config.name}.weight", config, table) for config, table in tables]

    def saved_tables(self) -> list[SavedTable | SavedRows]:
        """Return the tables, for checkpoints."""
        return [
            SavedRows(key, table)
            if isinstance(table, EmbeddingVariable)
            else SavedTable(key, table, kept_whole(config.num_embeddings, config.embedding_dim))
            for key, config, table in self.configured()
        ]

    def lookup_plan(self) -> tuple[LookupPlan, list[str]]:
        """Return the plan of all lookups, and the names of the features that it numbers."""
        return self._whole, self._features

    def stored_weights(self) -> list[Parameter]:
        try:
            return [table._parameters["weight"] for table in self._tables]  # type: ignore[misc]
        except KeyError:  # a table's weight is computed and is no parameter
            for name, table in self._modules[self._children]._modules.items():  # type: ignore[union-attr]
                if "weight" not in table._parameters and table._forward_pre_hooks:  # type: ignore[union-attr]
                    raise RuntimeError(
                        f"{type(self).__name__}: a forward hook computes the weight of table {name!r}, as "
                        "torch.nn.utils.prune does; a collection does not call its tables, so the hook would not run: "
                        "use torch.nn.utils.parametrize, or Embedding and EmbeddingBag in place of the collection"
                    ) from None
            return [table.stored_weight() for table in self._tables]

    # ---- Where features are -----------------------------------------------------------------------------------------

    def _wanted(self, features: Any) -> list[str] | None:
        """Return which features of a mapping to take, or None for a KeyedJaggedTensor, taken whole without a copy."""
        return self._features if isinstance(features, Mapping) else None

    def _places(self, x: KeyedJaggedTensor) -> list[int]:
        """Return the position in ``x`` of each feature of the collection."""
        if x.keys() == self._features:
            return self._in_order
        found = x.index_per_key()
        check_present(self._features, found, type(self).__name__)
        return [found[feature] for feature in self._features]

    def _plan(self, places: list[int]) -> LookupPlan:
        if places is self._in_order:
            return self._whole
        key = tuple(places)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._whole._replace(keys=tuple(places[key] for key in self._whole.keys))
        return plan

    # ---- Lookups ----------------------------------------------------------------------------------------------------

    def _looked_up(self, features: Any, **how: bool) -> tuple[KeyedJaggedTensor, Ids, Tensor]:
        """Look up a call's features; return them as one tensor, their ids, and the results of all lookups."""
        x, places, ids = self.inputs_of(features, **how)
        # Only tables that grow need the lengths: to read them back from a device takes time.
        lengths = x.length_per_key() if self._growing else None
        if torch.compiler.is_compiling():
            return x, ids, self._look_up(places, ids, lengths)
        try:
            return x, ids, self._look_up(places, ids, lengths)
        except (IndexError, ValueError) as error:
            raise refused(error, type(self).__name__, features, x, partial(self._names_of, x)) from None

    def _names_of(self, x: KeyedJaggedTensor, key: int, rows: int) -> tuple[str, str]:
        """Name a feature, and the table of so many rows that looks it up, for errors."""
        feature = x.keys()[key]
        tables = [its.name for its in self._configs if feature in its.feature_names and its.num_embeddings == rows]
        return f"feature {feature!r}", f" of table {tables[0]!r}" if tables else ""

    def _look_up(self, places: list[int], ids: Ids, lengths: Sequence[int] | None = None) -> Tensor:
        """Return the results of all lookups; if tables grow, ``lengths``, the number of ids of each key, is needed."""
        if not self._growing:
            plan, weights = self._plan(places), self.stored_weights()
            way = None if is_seen() else self._last_way  # a compiler must not depend on it
            if way is not None and way.plan is plan and way.is_of(weights, ids.indices, ids.per_sample_weights):
                return way.look_up(*ids, self.training)
            with as_stored():
                kinds = self._kinds(plan, weights, ids)
                result = self._look_up_rows(plan, weights, ids, kinds)
                if kinds.count(kinds[0]) == len(kinds) and not self._clips:
                    keep_way(self, plan, kinds[0], range(len(weights)), weights)
                return result
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return growing_untraced(self._look_up, places, ids, lengths)  # type: ignore[no-any-return]
        assert lengths is not None
        return self._look_up_growing(self._plan(places), range(len(self._configs)), self._growing, ids, lengths)

    def _look_up_growing(
        self,
        plan: LookupPlan,
        tables: Sequence[int],
        growing: Mapping[int, EmbeddingVariable],
        ids: Ids,
        lengths: Sequence[int],
        occurrences: Tensor | None = None,
    ) -> Tensor:
        """Look up some tables; ``growing`` has the growing ones by their numbers in ``plan``."""
        stored = self.stored_weights()
        its = [stored[k] for k in tables]
        plan, weights, ids = rows_of_keys(plan, its, growing, ids, lengths, occurrences)
        with as_stored():
            kinds = self._kinds(plan, weights, ids, tables)  # before the tables are locked, as it may write them
            if torch.compiler.is_exporting():  # a program has no locks, and its sizes may be no numbers
                return self._look_up_rows(plan, weights, ids, kinds, tables)
            with reading([table._lock for table in growing.values()]):
                sized = plan.of_sizes(weights)
                if are_same(weights, its):  # otherwise its sizes are those of this batch, and of no use to the next
                    sized = self._plans.setdefault(sized, sized)  # type: ignore[arg-type]
                return self._look_up_rows(sized, weights, ids, kinds, tables)

    def look_up_tables(
        self, plan: LookupPlan, tables: Sequence[int], ids: Ids, occurrences: Tensor | None = None
    ) -> Tensor:
        """
        Look up some tables; table k of ``plan`` is table ``tables[k]`` of the collection.

        Args:
            plan: the lookups; no two have the same ids if tables grow.
            tables: the tables' numbers in the collection.
            ids: the ids of the lookups.
            occurrences: the occurrences of ids without offsets in tables that grow, see ``rows_of_keys``.
        """
        growing = {k: self._growing[table] for k, table in enumerate(tables) if table in self._growing}
        if growing:
            return self._look_up_growing(plan, tables, growing, ids, counts_of(ids), occurrences)
        stored = self.stored_weights()
        weights = [stored[k] for k in tables]
        with as_stored():
            return self._look_up_rows(plan, weights, ids, self._kinds(plan, weights, ids, tables), tables)

    def _look_up_rows(
        self,
        plan: LookupPlan,
        weights: list[Parameter],
        ids: Ids,
        kinds: list[str],
        tables: Sequence[int] | None = None,
    ) -> Tensor:
        tables = range(len(weights)) if tables is None else tables
        alike = kinds.count(kinds[0]) == len(kinds) and len({weight.dtype for weight in weights}) == 1
        if alike and not self._clips:
            return look_up(self, tables, weights, kinds[0], plan, ids)
        clips = [self._max_norms[table] for table in tables]
        parts: dict[tuple[str, torch.dtype, float | None], list[int]] = {}
        for k, (kind, weight) in enumerate(zip(kinds, weights, strict=True)):
            parts.setdefault((kind, weight.dtype, clips[k]), []).append(k)
        results = []
        for (kind, _, clip), chosen in parts.items():
            part = plan.part(chosen)
            look_up_some = partial(look_up, self, [tables[k] for k in chosen], [weights[k] for k in chosen], kind)
            result = look_up_some(part, ids) if clip is None else look_up_clipped(look_up_some, part, ids, clip)
            results.append((plan.lookups_of(chosen), result, part.sizes(ids)))
        return joined(results)

    def _kinds(
        self, plan: LookupPlan, weights: list[Parameter], ids: Ids, tables: Sequence[int] | None = None
    ) -> list[str]:
        """Return the layout of each table's gradient."""
        autos: list[AutoChoice] = []
        if self._grad_mode == "auto":
            its = self._tables
            autos = [table._auto for table in its] if tables is None else [its[k]._auto for k in tables]

        def counts() -> list[int]:
            by_key, by_table = _ids_of_keys(ids), [0] * len(weights)
            for table, key in zip(plan.tables, plan.keys, strict=True):
                by_table[table] += by_key[key]
            return by_table

        # A table that other calls look up without the rest must find the same mode in all of them.
        together = len(weights) == len(self._configs)
        return gradient_kinds(self, weights, autos, counts, together)

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """
        Tell ``"auto"`` which optimizer of torch updates the tables, so that it may choose sparse gradients.

        Optimizers of :mod:`torchsparse_rec.optim` need no such call.

        Args:
            optimizer: an optimizer that holds the tables, or some of them. It is not kept alive, saved or copied.

        Raises:
            ValueError: the optimizer holds none of the tables.
        """
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        chosen = [table for table in self._tables if id(table.stored_weight()) in held]
        if not chosen:
            name = type(optimizer).__name__
            raise ValueError(f"use_optimizer: optimizer must hold a table of the collection, got a {name} with none")
        for table in chosen:
            table._auto.announce(optimizer, table.stored_weight())  # type: ignore[arg-type]

    def describe(self) -> str:
        """Say what is in each table, as :meth:`Embedding.describe`."""
        names = [config.name for config in self._configs]
        return "\n".join(described(table, name) for name, table in zip(names, self._tables, strict=True))

    def explain(self) -> str:
        """
        Say of every table which layout its gradient has, and why, with the numbers behind it.

        Returns:
            The tables' explanations, in order.
        """
        autos, weights = [table._auto for table in self._tables], self.stored_weights()
        if self._grad_mode == "auto":
            asked = [k for k, weight in enumerate(weights) if _can_be_fused(weight)]
            choose([autos[k] for k in asked], [weights[k] for k in asked], together=True)
        return "\n".join(
            self._explain_table(auto, weight, config.name, "the default")
            for auto, weight, config in zip(autos, weights, self._configs, strict=True)
        )

    def extra_repr(self) -> str:
        """Return the gradient mode, or nothing if it is None."""
        return "" if self.grad_mode is None else f"grad_mode={self.grad_mode!r}"


def _new_table(config: Any, device: torch.device | str | None) -> CollectionTable | EmbeddingVariable:
    """Make the table that a config describes."""
    option = getattr(config, "ev_option", None)
    if option is None:
        return (BagTable if hasattr(config, "pooling") else RowTable)(config, device)
    initializer = config.initializer
    if initializer is None and option.init_option.initializer is None:
        initializer = config.init_fn or Uniform(config.get_weight_init_min(), config.get_weight_init_max())
    return EmbeddingVariable(
        config.embedding_dim,
        name=config.name,
        initializer=initializer,
        ev_option=option,
        capacity=max(config.num_embeddings, 2),
        device=device,
        dtype=as_dtype(config.data_type),
    )


def _can_be_fused(weight: Tensor) -> bool:
    """Say whether backward can update a table: a frozen one it cannot, nor a computed one, which has no optimizer."""
    return are_trained([weight])


def _ids_of_keys(ids: Ids) -> list[int]:
    """Return how many ids each feature has; on CUDA, to avoid waiting, an estimate: equally many in every bag."""
    if ids.offsets is None or ids.offsets.device.type == "cpu":
        return counts_of(ids)
    bags = max(sum(ids.bags), 1)
    return [ids.indices.shape[0] * its // bags for its in ids.bags]


def _padding(config: Any) -> int:
    padding = getattr(config, "padding_idx", None)
    return -1 if padding is None else padding % config.num_embeddings
