"""The base of Keras's layers: a configuration, which makes an equal layer and is what ``repr`` shows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class Layer(torch.nn.Module):
    """A base class: a module with a configuration, whose subclasses compute something."""

    #: Fields of the configuration that are too long to show.
    _hidden: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Make a layer from ``get_config()``, its own or Keras's."""
        return cls(**config)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal layer."""
        raise TypeError(f"{type(self).__name__} has no configuration")

    def extra_repr(self) -> str:
        """Return the arguments that ``repr`` shows."""
        shown = {name: value for name, value in self.get_config().items() if name not in self._hidden}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())
