"""The bases of Keras's layers: a configuration, which makes an equal layer and is what ``repr`` shows, and a mode."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .encode import as_dtype


class Layer(torch.nn.Module):
    """A base class: a module with a configuration, whose subclasses compute something."""

    #: The fields of the configuration, which are attributes of the layer.
    _fields: ClassVar[tuple[str, ...]]
    #: Fields of the configuration that are too long to show.
    _hidden: ClassVar[tuple[str, ...]] = ()
    trainable = True

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Make a layer from ``get_config()``, its own or Keras's."""
        return cls(**config)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal layer, and what ``adapt`` found if Keras has it there."""
        values = {name: getattr(self, name) for name in self._fields}
        return {name: _name_of(x) if isinstance(x, torch.dtype) else x for name, x in values.items()}

    def extra_repr(self) -> str:
        """Return the arguments that ``repr`` shows."""
        shown = {name: value for name, value in self.get_config().items() if name not in self._hidden}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class Encoder(Layer):
    """A layer that gives places, or vectors of them, by its mode."""

    def __init__(
        self, output_mode: str, modes: tuple[str, ...], sparse: bool, name: str, dtype: Any, default: torch.dtype | None
    ) -> None:
        super().__init__()
        if output_mode not in modes:
            raise ValueError(f"output_mode must be one of {modes}, got {output_mode!r}")
        self.output_mode, self.sparse, self.name = output_mode, sparse, name
        self.dtype = as_dtype(dtype) or default or torch.get_default_dtype()

    def _refuse_sparse_places(self) -> None:
        if self.sparse and self.output_mode == "int":
            raise ValueError("sparse must be False for output_mode 'int'")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
