"""The gradient modes of single tables and of collections: the layout of a table's gradient, and ``explain()``."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .._torch import as_stored
from ..checkpoint.parts import SavedRows, SavedTable
from ..tables.boxes import kept_whole
from ..tables.table import table_of
from ..typing import GradMode
from ._described import as_bytes, described, with_size
from ._lookup import renormalise
from ._owner import FusedOwner, TableOwner
from ._route import OUTSIDE, explained, gradient_kinds, keep_way, look_up_by, route
from .auto import AutoChoice, choose
from .plan import NO_LOOKUPS, Ids, LookupPlan

__all__ = ["GRAD_MODES", "GradModeMixin", "HasGradMode", "OneTable"]

GRAD_MODES = (None, *get_args(GradMode))

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
        self.__dict__.pop("_by_device", None)  # a collection's mode is no longer the default
        for weight in self.stored_weights():
            table_of(weight).mark_owned()
            table_of(weight).flush()
        for module in self.modules():
            if isinstance(module, TableOwner):
                module._grad_mode = value
                if module is not self and isinstance(module, FusedOwner):  # a table of a collection
                    module.forget_lookups()
        self.forget_lookups()

    def describe(self) -> str:
        """
        Say what is in the tables: sizes and bytes, gradient mode, optimizer, norms of rows, rows with NaN or infinity.

        Returns:
            A text with some lines for each table. Of a table that grows also its tiers, and how often and when keys
            were looked up in training. It reads all rows, and on CUDA waits for the device.

        Example:
            >>> from torchsparse_rec.nn import Embedding
            >>> print(Embedding.from_pretrained(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 1.0]])).describe())
            Embedding: 3 rows x 2, float32, 24 bytes; grad_mode=None, optimizer: none of ours
              norms of rows: 0 to 5, median 1; zeros: 1
        """
        return described(self)

    def _explain_table(self, auto: AutoChoice, weight: Parameter, title: str, default: str) -> str:
        table = (
            f"  table: {weight.shape[0]:,} rows x {weight.shape[1]:,}, {weight.element_size()} bytes an element, "
            f"{as_bytes(weight.nbytes)}"
        )
        title = f"{title}: grad_mode={self._grad_mode!r} -> "
        if self._grad_mode == "auto":
            kind, heading, rest = auto.mode, auto.mode, auto.explain(weight)
        else:
            why = default if self._grad_mode is None else "as asked"
            kind = self._grad_mode or ("sparse" if default == "follows sparse=True" else "dense")
            heading, rest = f"{kind} ({why})", []
        if auto.has_loss:
            gives = "a step of each block in backward" if kind == "fused" else "a strided gradient"
            rest.append(f"  a loss over all rows: {gives}")
        return "\n".join([f"{title}{heading}", explained(self, weight, kind), table, *rest])


class OneTable(FusedOwner, TableOwner):
    """A module of one table: what reads the table without calling the module asks it for the layout of the gradient."""

    _auto: AutoChoice

    def stored_weights(self) -> list[Parameter]:
        return [self.stored_weight()]

    def _gradient_kind(self, weight: Tensor, ids: int) -> str:
        """Return the layout of the gradient that a lookup of ``ids`` ids gives the table."""
        return gradient_kinds(self, [weight], [self._auto], lambda: [ids])[0]

    # ---- The estimate travels with the state ------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None and self._auto.lookups:
            metadata[_METADATA_KEY] = self._auto.estimate()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        estimate = local_metadata.get(_METADATA_KEY)
        if estimate is not None:
            self._auto.restore(estimate)


class GradModeMixin(HasGradMode, OneTable):
    """The part of a table module that decides on the layout of its gradient."""

    max_norm: float | None
    _sparse: bool
    norm_type: float
    _last_plan: LookupPlan = NO_LOOKUPS
    _last_way: Any = None

    def _init_grad_mode(self, grad_mode: GradMode | None) -> None:
        if "sparse" in self.__dict__:  # the module was one of torch's before
            self._sparse = self.__dict__.pop("sparse")
        self._init_fused()
        self._auto = AutoChoice()
        self.grad_mode = grad_mode

    def _end_grad_mode(self) -> None:
        """Undo :meth:`_init_grad_mode`, before the module becomes one of torch's."""
        table_of(self.stored_weight()).disown()
        self._end_fused()
        self.__dict__["sparse"] = self._sparse
        for name in ("_grad_mode", "_auto", "_sparse", "_last_plan", "_last_way", "_qconfig"):
            self.__dict__.pop(name, None)

    @property
    def sparse(self) -> bool:
        """
        Whether the table's gradient is COO; may be set, for ``grad_mode=None``.

        In ``"auto"`` the first reading, as by DistributedDataParallel when it is made, settles the choice between dense
        and sparse for good. It depends only on sizes, so that all processes choose alike. Make the optimizer before:
        without one the choice is dense.
        """
        return self._sparse if self._grad_mode is None else gives_coo(self._grad_mode, self._auto, self)

    @sparse.setter
    def sparse(self, value: bool) -> None:
        self._sparse = value

    def _torchs_repr(self, base: Any) -> str:
        """
        Return the ``extra_repr()`` of torch's class, then the gradient mode and the bytes unless the mode is None.

        It does not read ``sparse``, which may settle ``"auto"``.
        """
        text: str = base.extra_repr(SimpleNamespace(**{**self.__dict__, "sparse": self._sparse}))
        return text if self.grad_mode is None else with_size(text, self.grad_mode, self.stored_weight())

    def saved_tables(self) -> list[SavedTable | SavedRows]:
        """Return the table, for checkpoints."""
        return [SavedTable("weight", self, kept_whole(*self.stored_weight().shape))]

    def _num_rows(self) -> int:
        """Return how many rows the table has: all ranks' if it is split."""
        return self.stored_weight().shape[0]

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """
        Tell ``"auto"`` which optimizer of torch updates this table, so that it may choose sparse gradients.

        Optimizers of :mod:`torchsparse_rec.optim` need no such call.

        Args:
            optimizer: an optimizer that holds ``self.weight``. It is not kept alive, saved or copied.

        Raises:
            ValueError: the optimizer does not hold ``self.weight``.
        """
        self._auto.announce(optimizer, self.stored_weight())
        choose([self._auto], [self.stored_weight()])

    def _may_be_stale(self) -> bool:
        if self._grad_mode == "auto":
            return self._auto.mode != "dense"  # a change to dense flushes all rows
        return super()._may_be_stale() or (self._grad_mode is None and self._sparse)

    def _is_outside(self, weight: Parameter, ids: int) -> bool:
        """Say whether a compiler must leave a lookup out of its graph. It is called where a graph can break."""
        with as_stored():
            return route(self, (0,), [weight], self._gradient_kind(weight, ids)) == OUTSIDE

    def _begin(self, weight: Parameter, ids: Tensor) -> tuple[str, str]:
        """Return the layout of a lookup's gradient and its route, with the rows scaled down to ``max_norm``."""
        kind = self._gradient_kind(weight, ids.numel())
        if self.max_norm is not None:
            if not torch.compiler.is_compiling():
                self._flush()
            renormalise(type(self).__name__, weight, ids, self.max_norm, self.norm_type)
        return kind, route(self, (0,), [weight], kind)

    def _gives_coo(self) -> bool:
        """Say whether a lookup in one of the simple modes gives a sparse gradient."""
        return self._sparse if self._grad_mode is None else self._grad_mode == "sparse"

    def _look_up_otherwise(
        self, way: str, kind: str, weight: Parameter, mode: int, padding: int | None, ids: Ids
    ) -> Tensor:
        """Look up rows by another route than the plain one."""
        sizes = weight.shape[0], weight.shape[1]
        plan = self._plan_of(mode, *sizes, -1 if padding is None else padding, bool(self.scale_grad_by_freq))
        result = look_up_by(way, self, (0,), [weight], kind, plan, ids)
        if self.max_norm is None:
            keep_way(self, plan, kind, (0,), [weight])
        return result

    def look_up_tables(self, plan: LookupPlan, tables: Sequence[int], ids: Ids) -> Tensor:
        """Look up the table, or its part of this rank, by a plan of any number of lookups."""
        weight = self.stored_weight()
        with as_stored():
            kind, way = self._begin(weight, ids.indices)
            return look_up_by(way, self, (0,), [weight], kind, plan, ids)

    def _plan_of(self, mode: int, num_embeddings: int, embedding_dim: int, padding: int, scaled: bool) -> LookupPlan:
        """Return the plan of the module's only lookup: the last plan again if it is equal, as that is found fastest."""
        plan = LookupPlan((0,), (0,), (mode,), (num_embeddings,), (embedding_dim,), (padding,), scaled)
        if torch.compiler.is_compiling():
            return plan
        if self._last_plan != plan:
            self._last_plan = plan
        return self._last_plan

    def explain(self) -> str:
        """
        Say which layout the table's gradient has, and why, with the numbers behind it.

        Returns:
            A text of several lines: the choice; the route of a training lookup, with the operators of its forward and
            its gradient; the table. Under ``grad_mode="auto"`` also the optimizer, the estimate of rows per lookup, and
            the bytes and time of a step in each mode.
        """
        default = f"follows sparse={self._sparse}"
        if self._grad_mode == "auto":
            choose([self._auto], [self.stored_weight()])
        return self._explain_table(self._auto, self.stored_weight(), type(self).__name__, default)


def gives_coo(grad_mode: GradMode | None, auto: AutoChoice, table: TableOwner) -> bool:
    """Say whether a table's gradient is COO in ``grad_mode``, where ``None`` counts as dense."""
    return grad_mode == "sparse" or (grad_mode == "auto" and auto.settle(table.stored_weight()) == "sparse")
