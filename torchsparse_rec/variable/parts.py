"""Some rows of a table, of any tier, with all that belongs to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Part", "select"]


class Part(NamedTuple):
    """Rows with their keys, frequencies, versions and optimizer states."""

    keys: Tensor
    """``[N]`` int64."""
    values: Tensor
    """``[N, D]``."""
    frequencies: Tensor
    """``[N]`` int64."""
    versions: Tensor
    """``[N]`` int64."""
    states: dict[str, Tensor]
    """``[N, ...]`` each, by the names that the optimizer gives them."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names that they have in files."""
        return {
            "keys": self.keys,
            "values": self.values,
            "frequencies": self.frequencies,
            "versions": self.versions,
            **{f"states.{name}": values for name, values in self.states.items()},
        }

    @staticmethod
    def of_tensors(tensors: dict[str, Tensor], device: torch.device) -> Part:
        """Make a part, on a device, from the tensors of :meth:`tensors`."""
        there = {name: x.to(device) for name, x in tensors.items()}
        states = {name.removeprefix("states."): x for name, x in there.items() if name.startswith("states.")}
        return Part(there["keys"], there["values"], there["frequencies"], there["versions"], states)


def select(part: Part, which: Tensor) -> Part:
    """Return some rows of a part, by a mask or by positions."""
    states = {name: values[which] for name, values in part.states.items()}
    return Part(part.keys[which], part.values[which], part.frequencies[which], part.versions[which], states)
