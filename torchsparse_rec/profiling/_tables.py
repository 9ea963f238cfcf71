"""Watch a step's effects on tables: the ids that it looks up, the rows that they name, and the form of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from .._torch import pytree
from ..jagged import KeyedJaggedTensor
from ..nn import EmbeddingBagCollection, EmbeddingCollection
from ..nn.auto import as_bytes
from ..nn.grad_mode import HasGradMode
from ._modules import lookups, removing

__all__ = ["TableUse", "Watch"]

# A parameter outside of lookup modules counts as a table if it has at least this number of rows, and at least half of
# its gradient's rows are zeros.
_LEAST_ROWS = 1024
# Layers whose parameters are no tables, even if the model uses the parameters without calling the layer.
_DENSE = (
    *(torch.nn.Linear, torch.nn.Bilinear, torch.nn.MultiheadAttention, torch.nn.RNNBase, torch.nn.RNNCellBase),
    *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
    *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
)


@dataclass
class TableUse:
    """The use of one table in one step."""

    name: str
    rows: int
    width: int
    bytes: int
    gradient: str = "none"
    """``"dense"``, ``"sparse"``, ``"fused"`` (no ``.grad``) or ``"none"`` (frozen)."""
    touched: int = 0
    """The number of rows that ids name, or whose gradient is not zero."""
    ids: int = 0
    lookups: int = 0
    grad_mode: str = ""
    """The ``grad_mode`` of the table's module, as its ``repr``; empty for a table that is none of ours."""
    states: int = 0
    """The number of tensors of the table's shape that its optimizer keeps."""

    @property
    def idle(self) -> float:
        """The fraction of rows that the batch did not touch."""
        return 1.0 - self.touched / max(self.rows, 1)

    @property
    def idle_bytes(self) -> float:
        """The bytes of the rows that the batch did not touch."""
        return self.idle * self.bytes

    def looked_up_bytes(self) -> int:
        """Return the bytes that a lookup must at least read: one row for each id."""
        return self.ids * self.bytes // max(self.rows, 1)

    def updated_bytes(self) -> int:
        """
        Return the bytes that an update must at least move.

        It reads one row of the gradient for each id, and reads and writes the touched rows with their states.
        """
        row = self.bytes // max(self.rows, 1)
        return self.ids * row + 2 * self.touched * row * (1 + self.states)

    def describe(self) -> str:
        """Return the table's name, shape and size as text."""
        return f"{self.name}: {self.rows:,} x {self.width:,} ({as_bytes(self.bytes)})"


class Watch:
    """
    Watches the tables of a model while a step runs.

    Args:
        model: the model.
        optimizers: the model's optimizers, for the number of states of each table.
    """

    def __init__(self, model: Module, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self._uses: dict[int, TableUse] = {}
        self._names: dict[int, str] = {}
        self._parameters: dict[int, Parameter] = {}
        self._modules = lookups(model)
        self._owners = [part for part in model.modules() if next(part.parameters(recurse=False), None) is not None]
        dense = [part for part in model.modules() if isinstance(part, _DENSE)]
        self._dense = {id(p) for part in dense for p in part.parameters(recurse=False)}
        for name, module in self._modules.items():
            for inner, p in module.named_parameters():
                if p.dim() == 2:
                    self._use(_joined(name, inner), p, module)
        for name, p in model.named_parameters():
            if p.dim() == 2:
                self._parameters.setdefault(id(p), p)
                self._names[id(p)] = name

    def _use(self, name: str, p: Parameter, module: Module | None) -> TableUse:
        use = self._uses.get(id(p))
        if use is None:
            mode = f"{module.grad_mode!r}" if isinstance(module, HasGradMode) else ""
            bytes_ = p.numel() * p.element_size()
            kind = "fused" if p.requires_grad and mode in ("'fused'", "'auto'") else "none"
            use = TableUse(name, p.shape[0], p.shape[1], bytes_, gradient=kind, grad_mode=mode)
            self._uses[id(p)] = use
            self._parameters[id(p)] = p
        return use

    def watching(self) -> AbstractContextManager[None]:
        """Watch lookups and gradients while a block lasts."""
        hooks: list[Any] = [module.register_forward_hook(self._see_lookup) for module in self._modules.values()]
        hooks += [part.register_forward_pre_hook(self._see_owner, with_kwargs=True) for part in self._owners]
        hooks += [
            p.register_post_accumulate_grad_hook(self._see_gradient)
            for p in self._parameters.values()
            if p.requires_grad
        ]
        return removing(hooks)

    def uses(self) -> list[TableUse]:
        """Return the use of each table: of lookup modules' tables, and parameters with mostly zero gradient rows."""
        for key, use in self._uses.items():
            parameter = self._parameters[key]
            states = [optimizer.state.get(parameter, {}) for optimizer in self._optimizers]
            use.states = sum(
                isinstance(each, Tensor) and each.shape == parameter.shape
                for state in states
                for each in state.values()
            )
        return list(self._uses.values())

    def tables(self, gradient: str) -> list[tuple[TableUse, Parameter]]:
        """Return the tables whose gradient has this form, each with its parameter."""
        return [(use, self._parameters[key]) for key, use in self._uses.items() if use.gradient == gradient]

    def _see_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        use = self._uses.get(id(parameter))
        if gradient.layout is torch.sparse_coo:
            use = use or self._use(self._names[id(parameter)], parameter, None)  # type: ignore[arg-type]
            use.gradient, use.touched = "sparse", gradient.coalesce().indices().shape[1]
            return
        touched = int((gradient != 0).any(dim=1).sum())
        is_small = parameter.shape[0] < _LEAST_ROWS or touched > 0.5 * parameter.shape[0]
        if use is None and (is_small or id(parameter) in self._dense):
            return  # a dense layer's weight
        use = use or self._use(self._names[id(parameter)], parameter, None)  # type: ignore[arg-type]
        use.gradient, use.touched = "dense", touched

    def _see_owner(self, module: Module, arguments: tuple, named: dict[str, Any]) -> None:
        """Mark the parameters of a module as no tables if it takes only tensors of floats, which cannot be ids."""
        taken = [leaf for leaf in pytree.tree_leaves((arguments, named)) if leaf is not None]
        if taken and all(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in taken):
            self._dense.update(id(p) for p in module.parameters(recurse=False))

    @torch.no_grad()
    def _see_lookup(self, module: Module, arguments: tuple, _output: Any) -> None:
        if not arguments:
            return
        # By names, since a reading of the attribute ``weight`` may flush stale rows.
        weights = dict(module.named_parameters(remove_duplicate=False))
        for name, feature in _tables_of(module):
            if name in weights:  # else it is computed, and no parameter
                self._count(weights[name], _ids_of(arguments[0], feature))

    def _count(self, weight: Parameter, ids: Tensor | None) -> None:
        use = self._uses.get(id(weight))
        if use is not None:
            use.lookups += 1
            if ids is not None:
                use.ids += ids.numel()
                if use.gradient != "dense":  # else the gradient will tell
                    use.touched = min(use.rows, use.touched + int(ids.unique().numel()))


def _tables_of(module: Module) -> list[tuple[str, str | None]]:
    """Return for each lookup of a module its table's name and its feature, which is None where there is only one."""
    if isinstance(module, EmbeddingBagCollection):
        return [(f"embedding_bags.{c.name}.weight", f) for c in module.embedding_bag_configs() for f in c.feature_names]
    if isinstance(module, EmbeddingCollection):
        return [(f"embeddings.{c.name}.weight", f) for c in module.embedding_configs() for f in c.feature_names]
    return [("weight", None)]


def _ids_of(features: Any, feature: str | None) -> Tensor | None:
    """Return the ids of a lookup module's input, or of one feature of it; None if they are not cheap to read."""
    if feature is not None:
        if isinstance(features, (KeyedJaggedTensor, Mapping)):
            features = features[feature] if feature in features.keys() else None
        else:
            return None
    if isinstance(features, Tensor) and not features.is_nested:
        return features.reshape(-1)
    values = getattr(features, "values", None)
    found = values() if callable(values) else None
    return found if isinstance(found, Tensor) else None


def _joined(name: str, inner: str) -> str:
    return f"{name}.{inner}" if name else inner
