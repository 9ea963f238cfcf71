"""The base of the types: tensors by name beside a context without tensors. This makes the types nodes of pytrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._torch import pytree

NodeT = TypeVar("NodeT", bound="Node")
_SHOWN = 100  # elements of an object whose text still shows them all
_Names = tuple[str, ...]


class Node:
    """
    An object made of named tensors and a hashable context.

    The children of the pytree node are exactly the tensors that it was made of. Computing more of them later (offsets
    from lengths, say) does not change the structure, so that an exported program still takes the object.
    """

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the object was made of, by name, in a fixed order."""
        raise NotImplementedError

    def _context(self) -> tuple:
        """Return all else that the object was made of: nested tuples of strings and integers."""
        raise NotImplementedError

    @classmethod
    def _build(cls: type[NodeT], tensors: dict[str, Any], context: tuple) -> NodeT:
        """Make an object of its tensors and context, unchecked: while trees are mapped, leaves may be anything."""
        raise NotImplementedError

    def _map(self: NodeT, function: Callable[[Tensor], Tensor]) -> NodeT:
        """Return a copy of the object with every tensor replaced by the function's result."""
        return self._build({name: function(x) for name, x in self._tensors().items()}, self._context())

    def to(self: NodeT, device: torch.device | str, non_blocking: bool = False) -> NodeT:
        """
        Copy the tensors to a device, as :meth:`torch.Tensor.to`.

        Args:
            device: the device to which the tensors go.
            non_blocking: whether not to wait for copies from pinned memory. Default False.
        """
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self: NodeT) -> NodeT:
        """Copy the tensors to page-locked memory, as :meth:`torch.Tensor.pin_memory`; a DataLoader calls it."""
        return self._map(lambda x: x.pin_memory())

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._tensors()["values"].device

    def record_stream(self, stream: torch.Stream) -> None:
        """Mark the tensors as in use on another stream: :meth:`torch.Tensor.record_stream` of each."""
        for x in self._tensors().values():
            x.record_stream(stream)

    def _is_shown(self) -> bool:
        """Say whether ``repr`` shows the values: few, on the CPU, and real (no fake, batched or meta tensors)."""
        return all(
            type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.numel() <= _SHOWN
            for x in self._tensors().values()
        )

    def _in_lines(self, entries: list[str]) -> str:
        """Write the text of TorchRec's ``str()``: an entry a line."""
        shown = "{\n" + ",\n".join(f"    {entry}" for entry in entries) + "\n}" if entries else ""
        return f"{type(self).__name__}({shown})\n"

    def _summary(self) -> str:
        """Write dtypes, shapes and device of the tensors, for ``repr`` where it does not show the values."""
        shapes = (f"{name}={str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in self._tensors().items())
        return f"{', '.join(shapes)}, device='{self.device()}'"


def _flatten(node: Node) -> tuple[list[Tensor], tuple[_Names, tuple]]:
    tensors = node._tensors()
    return list(tensors.values()), (tuple(tensors), node._context())


def _flatten_with_keys(node: Node) -> tuple[list[tuple[Any, Tensor]], tuple[_Names, tuple]]:
    leaves, context = _flatten(node)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context


def _tuples(x: Any) -> Any:
    """Turn JSON's lists back into the tuples that they were."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def register(cls: type[NodeT]) -> type[NodeT]:
    """Make a class of nodes known to :mod:`torch.utils._pytree` and to :func:`torch.load`; a decorator."""

    def unflatten(leaves: Iterable[Any], context: tuple[_Names, tuple]) -> NodeT:
        names, own = context
        return cls._build(dict(zip(names, leaves, strict=True)), own)

    pytree.register_pytree_node(
        cls,
        _flatten,
        unflatten,
        serialized_type_name=f"torchsparse_rec.{cls.__name__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=_tuples,
        flatten_with_keys_fn=_flatten_with_keys,
    )
    # Its state is tensors and plain data: it may be read with weights_only=True.
    torch.serialization.add_safe_globals([cls])
    return cls
