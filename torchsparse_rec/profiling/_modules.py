"""Find the lookup modules and dense layers of a model, and take them out while an experiment lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from .._torch import pytree
from .._torch_modules import is_compiled
from ..nn.grad_mode import HasGradMode

__all__ = [
    "Shapes",
    "dense_layers",
    "has_compiled",
    "is_lookup",
    "lookups",
    "recording_shapes",
    "removing",
    "without_dense",
    "without_gradients",
]


class Shapes(NamedTuple):
    """The shapes of the one tensor that a layer takes and the one that it returns in a step, and the latter's dtype."""

    input: torch.Size
    output: torch.Size
    dtype: torch.dtype


def is_lookup(module: Module) -> bool:
    """Say whether a module looks rows up in tables: torch's tables, ours, and our collections do."""
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag, HasGradMode))


def lookups(model: Module) -> dict[str, Module]:
    """Return a model's lookup modules by name; a collection is one, without the tables within it."""
    found: dict[str, Module] = {}
    inner: set[Module] = set()
    for name, module in model.named_modules():
        if is_lookup(module) and module not in inner:
            found[name or type(module).__name__] = module
            inner.update(module.modules())
    return found


def has_compiled(model: Module) -> bool:
    """Say whether ``torch.compile`` has compiled a part of a model: to take parts out would make it compile again."""
    return any(is_compiled(part) for part in model.modules())


def dense_layers(module: Module, shapes: dict[Module, Shapes]) -> Iterator[Module]:
    """Yield the largest modules with parameters and without tables that take one tensor and return one."""
    if is_lookup(module):
        return
    if any(is_lookup(part) for part in module.modules()) or module not in shapes:
        for child in module.children():
            yield from dense_layers(child, shapes)
    elif next(module.parameters(), None) is not None:
        yield module


@contextmanager
def removing(handles: Iterable[Any]) -> Iterator[None]:
    """Remove hooks when the block ends."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recording_shapes(model: Module) -> Iterator[dict[Module, Shapes]]:
    """
    Record the shapes of modules while the block lasts, as a context manager that yields them by module.

    Only modules are recorded that take one tensor of floats and return one.
    """
    shapes: dict[Module, Shapes] = {}

    def record(module: Module, arguments: tuple, output: Any) -> None:
        if len(arguments) == 1 and all(isinstance(x, Tensor) and x.is_floating_point() for x in (*arguments, output)):
            if arguments[0].dim() and output.dim() and arguments[0].layout is torch.strided:
                shapes[module] = Shapes(arguments[0].shape, output.shape, output.dtype)

    with removing([part.register_forward_hook(record) for part in model.modules()]):
        yield shapes


def _stand_in(shapes: Shapes) -> Callable[[Tensor], Tensor]:
    """Return a cheap function that gives a tensor of the layer's output shape, and passes gradients to its input."""

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
    """Make layers return a cheap tensor of the right shape that depends on their input, while the block lasts."""
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
def without_gradients(model: Module, tables: list[Parameter]) -> Iterator[None]:
    """Freeze some tables while the block lasts; the outputs of their lookups still get gradients."""
    chosen = {id(table) for table in tables}

    def train(_module: Module, _arguments: tuple, output: Any) -> None:
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and torch.is_grad_enabled():
                leaf.requires_grad_(True)

    owners = [m for m in lookups(model).values() if any(id(p) in chosen for p in m.parameters())]
    gradients = [table.grad for table in tables]
    try:
        for table in tables:
            table.requires_grad_(False)
            table.grad = None
        with removing([owner.register_forward_hook(train) for owner in owners]):
            yield
    finally:
        for table, gradient in zip(tables, gradients, strict=True):
            table.requires_grad_(True)
            table.grad = gradient
