"""The gradient modes of single tables and of collections: the layout of a table's gradient, and ``explain()``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import is_not
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .._torch import as_stored, is_in_fsdp, is_run_again, is_seen, untraced
from ..ops.autograd import is_bare
from ..ops.embedding_collection import lookup
from ..tables.stale import is_parameter
from ..tables.table import table_of
from ..typing import GradMode
from ._lookup import ID_DTYPES, NO_TORCHSCRIPT, WHY_UNTRACED, renormalise
from ._owner import FusedOwner, TableOwner
from ._read import look_up_stale, owned_table, read
from ._route import Way
from .auto import AutoChoice, as_bytes, choose
from .gradients import coalesced_mark
from .plan import NO_LOOKUPS, Ids, Plan

__all__ = ["GRAD_MODES", "GradModeMixin", "HasGradMode"]

GRAD_MODES = (None, *get_args(GradMode))
# Those in which a lookup's gradient has a layout that depends on nothing else.
_SIMPLE = (None, "sparse", "dense")
# What of a module's attributes a lookup depends on, besides its weight and gradient mode.
_OPTIONS = ("padding_idx", "max_norm", "scale_grad_by_freq", "mode", "_sparse")

# Key of the estimate in a module's metadata within a state_dict; the state_dict's own keys stay torch's.
_METADATA_KEY = "torchsparse_rec_lookups"


class HasGradMode(FusedOwner):
    """A module with one or more tables and one ``grad_mode``."""

    @property
    def grad_mode(self) -> GradMode | None:
        """The mode: ``None``, ``"sparse"``, ``"dense"``, ``"fused"`` or ``"auto"``; may be set at any time."""
        return self._grad_mode

    @grad_mode.setter
    def grad_mode(self, value: GradMode | None) -> None:
        if value not in GRAD_MODES:
            raise ValueError(f"grad_mode must be one of {', '.join(map(repr, GRAD_MODES))}, got {value!r}")
        self._grad_mode = value
        for weight in self._stored_weights():
            table_of(weight).mark_owned()
            table_of(weight).flush()
        for module in self.modules():
            if isinstance(module, TableOwner):
                module._grad_mode = value
        self._forget_lookups()

    def __prepare_scriptable__(self) -> None:
        """Raise ``RuntimeError``: ``torch.jit.script``, which calls this method, cannot compile the lookups."""
        raise RuntimeError(NO_TORCHSCRIPT.format(type(self).__name__))

    @property
    def qconfig(self) -> Any:
        """The value that ``torch.ao.quantization`` sets in every module of a model; to set it warns."""
        if "_qconfig" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'qconfig'")
        return self.__dict__["_qconfig"]

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        if "_qconfig" not in self.__dict__:
            warnings.warn(
                f"{type(self).__name__}: torch.ao.quantization converts torch's own classes alone and leaves this "
                "table as it is: to quantise tables, call torchsparse_rec.nn.revert(model) first",
                stacklevel=2,
            )
        self.__dict__["_qconfig"] = value

    @qconfig.deleter
    def qconfig(self) -> None:
        self.__dict__.pop("_qconfig", None)

    def _refuse_tracing(self) -> None:
        if torch.jit.is_tracing():
            raise RuntimeError(NO_TORCHSCRIPT.format(type(self).__name__))

    def _may_be_stale(self) -> bool:
        """Say whether rows can become stale: only in modes whose gradients are not dense."""
        return self._grad_mode not in (None, "dense")

    def _reads_in_graph(self, weights: Sequence[Tensor]) -> bool:
        """
        Say whether a compiled lookup must bring stale rows up to date, as it gives its tables no gradient.

        A lookup that gives dense gradients need not: in a mode that has them, no row is stale.
        """
        wanted = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        return self._may_be_stale() and not wanted and not torch.compiler.is_exporting()

    def _kind_to_export(self, kind: str | None) -> str:
        """
        Return ``"dense"``, by which lookups are exported: a program in ``eval()`` needs no other gradients.

        Raises:
            RuntimeError: the module is in ``train()``, and ``kind`` is neither None nor ``"dense"``.
        """
        if self.training and kind not in (None, "dense"):
            raise RuntimeError(
                f"{type(self).__name__}: grad_mode={kind!r} cannot be exported in train(): an exported program "
                "cannot have its gradients. Call eval() on the model before torch.export, or use grad_mode='dense'"
            )
        return "dense"

    def _auto_kinds(
        self, autos: Sequence[AutoChoice], weights: Sequence[Tensor], ids: Sequence[int | None], together: bool = False
    ) -> list[str]:
        """Return the layouts of gradients under ``"auto"`` of a lookup of so many ids (None: unknown) in each table."""
        if torch.compiler.is_compiling():
            return ["dense" if auto.mode == "sparse" else auto.mode for auto in autos]
        if self.training and not is_run_again():
            for auto, count in zip(autos, ids, strict=True):
                if count is not None:
                    auto.count(count)
        return choose(autos, weights, together)

    def _check_shards(self, kind: str) -> None:
        """Raise ``RuntimeError`` if ``kind`` is not ``"dense"`` and ``fully_shard`` holds the table."""
        if kind != "dense" and not torch.compiler.is_compiling() and is_in_fsdp(self):
            raise RuntimeError(
                f"grad_mode={kind!r}: the table is in fully_shard, which can add up only strided gradients over "
                "processes: choose grad_mode='dense' or 'auto' for the table, or leave it out by ignored_params"
            )

    def _explain_table(self, auto: AutoChoice, weight: Tensor, title: str, default: str) -> str:
        size = weight.numel() * weight.element_size()
        table = (
            f"  table: {weight.shape[0]:,} rows x {weight.shape[1]:,}, {weight.element_size()} bytes an element, "
            f"{as_bytes(size)}"
        )
        title = f"{title}: grad_mode={self._grad_mode!r} -> "
        if self._grad_mode == "auto":
            return "\n".join([f"{title}{auto.mode}", table, *auto.explain(weight)])
        why = default if self._grad_mode is None else "as asked"
        kind = "sparse" if self._grad_mode is None and default == "follows sparse=True" else self._grad_mode or "dense"
        return f"{title}{kind} ({why})\n{table}"


@untraced(reason=WHY_UNTRACED)
def forward_untraced(module: torch.nn.Module, *inputs: Tensor | None) -> Tensor:
    """Call a module's ``forward`` outside of the compiled graph."""
    return module.forward(*inputs)  # type: ignore[no-any-return]


class GradModeMixin(HasGradMode, TableOwner):
    """The part of a table module that decides on the layout of its gradient."""

    max_norm: float | None
    _sparse: bool
    _auto: AutoChoice
    norm_type: float
    _last_plan: Plan = NO_LOOKUPS
    _last_way: Way | None = None

    def _init_grad_mode(self, grad_mode: GradMode | None) -> None:
        if "sparse" in self.__dict__:  # the module was one of torch's before
            self._sparse = self.__dict__.pop("sparse")
        self._init_fused()
        self._auto = AutoChoice()
        self.grad_mode = grad_mode

    def _end_grad_mode(self) -> None:
        """Undo :meth:`_init_grad_mode`, before the module becomes one of torch's."""
        table_of(self._stored_weight()).disown()
        self._end_fused()
        self.__dict__["sparse"] = self._sparse
        for name in ("_grad_mode", "_auto", "_sparse", "_last_plan", "_last_way", "_qconfig"):
            self.__dict__.pop(name, None)

    @property
    def sparse(self) -> bool:
        """
        Whether the table's gradient is COO; may be set, for ``grad_mode=None``.

        In ``"auto"`` the first reading, as by DistributedDataParallel when it is made, settles the choice between dense
        and sparse for good, by sizes alone, so that all processes settle it alike. Make the optimizer before: without
        one the choice is dense.
        """
        return self._sparse if self._grad_mode is None else gives_coo(self._grad_mode, self._auto, self)

    @sparse.setter
    def sparse(self, value: bool) -> None:
        self._sparse = value

    def _torchs_repr(self, base: Any) -> str:
        """Return the ``extra_repr()`` of torch's class without reading ``sparse``, which may settle ``"auto"``."""
        return base.extra_repr(SimpleNamespace(**{**self.__dict__, "sparse": self._sparse}))  # type: ignore[no-any-return]

    def _stored_weights(self) -> list[Parameter]:
        stored = self._parameters.get("weight")
        return [self.weight if stored is None else stored]  # type: ignore[list-item]

    def _num_rows(self) -> int:
        """Return how many rows the table has: all ranks' if it is split."""
        return self._stored_weight().shape[0]

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """
        Tell ``"auto"`` which optimizer of torch updates this table, so that it may choose sparse gradients.

        Optimizers of :mod:`torchsparse_rec.optim` need no such call.

        Args:
            optimizer: an optimizer that holds ``self.weight``. It is not kept alive, saved or copied.

        Raises:
            ValueError: the optimizer does not hold ``self.weight``.
        """
        self._auto.announce(optimizer, self._stored_weight())
        choose([self._auto], [self._stored_weight()])

    def _may_be_stale(self) -> bool:
        if self._grad_mode == "auto":
            return self._auto.mode != "dense"  # a change to dense flushes all rows
        return super()._may_be_stale() or (self._grad_mode is None and self._sparse)

    def _gradient_kind(self, weight: Tensor, ids: int) -> str:
        """Return the layout of the gradient that a lookup of ``ids`` ids gives the table."""
        if torch.compiler.is_exporting():
            return self._kind_to_export("sparse" if self._grad_mode is None and self._sparse else self._grad_mode)
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return "dense"
        if self._grad_mode is None:
            kind = "sparse" if self._sparse else "dense"
        elif not is_parameter(weight):  # the weight is computed, so it has no optimizer
            return "sparse" if self._grad_mode == "sparse" else "dense"
        elif self._grad_mode == "auto":
            kind = self._auto_kinds([self._auto], [weight], [ids])[0]
        else:
            kind = self._grad_mode
        self._check_shards(kind)
        return kind

    def _is_untraceable(self, weight: Tensor, ids: int) -> bool:
        """
        Say whether a compiler must leave the lookup out of its graph.

        It must for sparse gradients, and where ``max_norm`` first writes rows that an operator then reads without being
        given the table.
        """
        writes = self.max_norm is not None and self._may_be_stale() and not torch.compiler.is_exporting()
        with as_stored():
            return writes or self._gradient_kind(weight, ids) == "sparse"

    def _is_plain(self, weight: Tensor, kind: str) -> bool:
        """Say whether a lookup needs no more than the table as stored, and a gradient such as torch's modules give."""
        if kind == "fused" or not is_parameter(weight):
            return kind != "fused"
        if torch.compiler.is_compiling():
            return not self._reads_in_graph([weight])
        return not owned_table(weight).is_stale()

    def _bare_table(self) -> Parameter | None:
        """
        Return the table if a lookup needs no more than its rows as they are stored, by :func:`look_up_bare`.

        Of a small lookup, most of the time is the Python around the operators: these questions are all that the usual
        one needs. The others take the complete way, to the same bits.
        """
        weight = self._parameters.get("weight")
        if type(weight) is not Parameter or not is_bare(weight):
            return None
        simple = self._grad_mode in _SIMPLE or (self._grad_mode == "auto" and self._auto.stays_dense(weight))
        if not simple or self.max_norm is not None or is_in_fsdp(self):
            return None
        return None if owned_table(weight).is_stale() else weight

    def _way_again(self, ids: Tensor, per_sample_weights: Tensor | None = None) -> Way | None:
        """Return the way of the module's last lookup that was neither plain nor without gradient, if it is open."""
        # Who sees the call comes first: a compiler must not depend on what a lookup before has kept.
        way = None if is_seen() else self._last_way
        if way is None or not isinstance(ids, Tensor) or ids.dtype not in ID_DTYPES:
            return None
        if any(map(is_not, map(self.__dict__.get, _OPTIONS), way.options)):
            return None
        weight = self._parameters.get("weight")
        return way if weight is not None and way.is_of([weight], ids, per_sample_weights) else None

    def _gives_coo(self) -> bool:
        """Say whether a lookup in one of the simple modes gives a sparse gradient."""
        return self._sparse if self._grad_mode is None else self._grad_mode == "sparse"

    def _look_up_otherwise(self, kind: str, weight: Parameter, mode: int, padding: int | None, ids: Ids) -> Tensor:
        """Look up rows in mode ``"fused"``, or of a table that may have stale rows."""
        sizes = weight.shape[0], weight.shape[1]
        plan = self._plan_of(mode, *sizes, -1 if padding is None else padding, bool(self.scale_grad_by_freq))
        result = self._look_up_by(plan, kind, weight, ids)
        if self.max_norm is None:
            self._keep_way([*map(self.__dict__.get, _OPTIONS)], plan, kind, (0,), [weight])
        return result

    def _look_up_tables(self, plan: Plan, tables: Sequence[int], ids: Ids) -> Tensor:
        """Look up the table, or its part of this rank, by a plan of any number of lookups."""
        weight = self._stored_weight()
        with as_stored():
            kind = self._gradient_kind(weight, ids.indices.numel())
            if self.max_norm is not None:
                self._flush()
                renormalise(type(self).__name__, weight, ids.indices, self.max_norm, self.norm_type)
            if not self._is_plain(weight, kind):
                return self._look_up_by(plan, kind, weight, ids)
            marks = [coalesced_mark(weight)] if kind == "sparse" else None
            return lookup([weight], *ids[:3], *plan.lists(ids), kind == "sparse", marks)[0]  # type: ignore[arg-type]

    def _look_up_by(self, plan: Plan, kind: str, weight: Parameter, ids: Ids) -> Tensor:
        """Look up in mode ``"fused"``, or rows of a table that may have stale rows."""
        self._refuse_tracing()
        if kind == "fused":
            return self._look_up_fused(plan, (0,), ids)
        if torch.compiler.is_compiling():
            return self._read_in_graph(plan, (0,), ids)
        if not torch.is_grad_enabled():
            return read(plan, self._table_set((0,), [weight]), ids)[0]
        return look_up_stale(plan, kind, self._table_set((0,), [weight]), ids)

    def _plan_of(self, mode: int, num_embeddings: int, embedding_dim: int, padding: int, scaled: bool) -> Plan:
        """Return the plan of the module's only lookup: the last plan again if it is equal, as that is found fastest."""
        plan = Plan((0,), (0,), (mode,), (num_embeddings,), (embedding_dim,), (padding,), scaled)
        if torch.compiler.is_compiling():
            return plan
        if self._last_plan != plan:
            self._last_plan = plan
        return self._last_plan

    def explain(self) -> str:
        """
        Say which layout the table's gradient has, and why, with the numbers behind it.

        Returns:
            A text of several lines: the choice; the table; under ``grad_mode="auto"`` the optimizer, the estimate of
            rows per lookup, and the bytes and time of a step in each mode.
        """
        default = f"follows sparse={self._sparse}"
        if self._grad_mode == "auto":
            choose([self._auto], [self._stored_weight()])
        return self._explain_table(self._auto, self._stored_weight(), type(self).__name__, default)

    # ---- The estimate travels with the state ------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_estimate(self._auto, destination, prefix)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        load_estimate(self._auto, local_metadata)


def gives_coo(grad_mode: GradMode | None, auto: AutoChoice, table: TableOwner) -> bool:
    """Say whether a table's gradient is COO in ``grad_mode``, where ``None`` counts as dense."""
    return grad_mode == "sparse" or (grad_mode == "auto" and auto.settle(table._stored_weight()) == "sparse")


def save_estimate(auto: AutoChoice, destination: Any, prefix: str) -> None:
    """Save the estimate in a state_dict's metadata."""
    metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
    if metadata is not None and auto.lookups:
        metadata[_METADATA_KEY] = auto.estimate()


def load_estimate(auto: AutoChoice, local_metadata: dict[str, Any]) -> None:
    """Load the estimate from a module's metadata in a state_dict, if it is there."""
    estimate = local_metadata.get(_METADATA_KEY)
    if estimate is not None:
        auto.restore(estimate)
