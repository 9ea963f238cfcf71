"""The parts of a model: its tables, its dense layers, and what is done to them while an experiment lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils import _pytree

from ..nn._owner import FusedOwner, TableOwner

__all__ = [
    "Shapes",
    "dense_layers",
    "has_compiled",
    "is_lookup",
    "lookups",
    "recording_shapes",
    "without_dense",
    "without_gradients",
]


class Shapes(NamedTuple):
    """Of a layer's one tensor in and one tensor out, in a step."""

    input: torch.Size
    output: torch.Size
    dtype: torch.dtype


def is_lookup(module: Module) -> bool:
    """Whether a module looks rows up in tables: torch's, ours and collections of ours, but not the tables of these."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return isinstance(module, FusedOwner) or (isinstance(module, tables) and not isinstance(module, TableOwner))


def lookups(models: list[Module]) -> dict[str, Module]:
    """The lookup modules by name; the tables within a collection are part of it."""
    found: dict[str, Module] = {}
    for model in models:
        for name, module in model.named_modules():
            if is_lookup(module):
                found.setdefault(name or type(module).__name__, module)
    return found


def has_compiled(models: list[Module]) -> bool:
    """Whether ``torch.compile`` has a part of it: such parts are left alone, or they would be compiled anew."""
    return any(
        isinstance(part, torch._dynamo.eval_frame.OptimizedModule) or part._compiled_call_impl is not None
        for model in models
        for part in model.modules()
    )


def dense_layers(models: list[Module], shapes: dict[Module, Shapes]) -> list[Module]:
    """The largest parts with parameters and without tables that took one tensor and gave one."""
    return [layer for model in models for layer in _dense_within(model, shapes)]


def _dense_within(module: Module, shapes: dict[Module, Shapes]) -> Iterator[Module]:
    if is_lookup(module):
        return
    if any(is_lookup(part) for part in module.modules()) or module not in shapes:
        for child in module.children():
            yield from _dense_within(child, shapes)
    elif next(module.parameters(), None) is not None:
        yield module


@contextmanager
def recording_shapes(models: list[Module]) -> Iterator[dict[Module, Shapes]]:
    """Gives what the parts take and give while the block lasts: those that take and give one tensor of floats."""
    shapes: dict[Module, Shapes] = {}

    def record(module: Module, arguments: tuple, output: Any) -> None:
        if len(arguments) == 1 and all(isinstance(x, Tensor) and x.is_floating_point() for x in (*arguments, output)):
            if arguments[0].dim() and output.dim() and arguments[0].layout is torch.strided:
                shapes[module] = Shapes(arguments[0].shape, output.shape, output.dtype)

    handles = [part.register_forward_hook(record) for model in models for part in model.modules()]
    try:
        yield shapes
    finally:
        for handle in handles:
            handle.remove()


def _stand_in(shapes: Shapes) -> Callable[[Tensor], Tensor]:
    """A function with the layer's shapes, through which a gradient passes, that does next to nothing."""

    def forward(x: Tensor) -> Tensor:
        if x.shape[0] == shapes.output[0] or shapes.input[0] == shapes.output[0]:
            seed = x.reshape(x.shape[0], -1)[:, :1].to(shapes.dtype)
            sizes = [x.shape[0], *shapes.output[1:]]
            y = seed.reshape(-1, *[1] * (len(sizes) - 1)).expand(sizes).contiguous()
        else:
            y = x.reshape(-1)[:1].to(shapes.dtype).expand(shapes.output.numel()).reshape(shapes.output)
        if torch.is_grad_enabled() and not y.requires_grad:
            y.requires_grad_()
        return y

    return forward


@contextmanager
def without_dense(layers: list[Module], shapes: dict[Module, Shapes]) -> Iterator[None]:
    """While the block lasts, layers do nothing but give tensors of the right shapes that depend on their input."""
    before = [(layer, layer.__dict__.get("forward")) for layer in layers]
    try:
        for layer in layers:
            layer.__dict__["forward"] = _stand_in(shapes[layer])
        yield
    finally:
        for layer, forward in before:
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.__dict__["forward"] = forward


@contextmanager
def without_gradients(models: list[Module], tables: list[Parameter]) -> Iterator[None]:
    """While the block lasts, some tables get no gradient; what was looked up in them still does."""
    chosen = {id(table) for table in tables}

    def train(_module: Module, _arguments: tuple, output: Any) -> None:
        for leaf in _pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and torch.is_grad_enabled():
                leaf.requires_grad_(True)

    owners = [m for m in lookups(models).values() if any(id(p) in chosen for p in m.parameters())]
    handles = [owner.register_forward_hook(train) for owner in owners]
    gradients = [table.grad for table in tables]
    try:
        for table in tables:
            table.requires_grad_(False)
            table.grad = None
        yield
    finally:
        for handle in handles:
            handle.remove()
        for table, gradient in zip(tables, gradients, strict=True):
            table.requires_grad_(True)
            table.grad = gradient
