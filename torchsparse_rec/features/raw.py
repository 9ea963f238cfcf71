"""One raw column of a batch, in the form to which all inputs are converted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Strings(NamedTuple):
    """Strings in Arrow's layout: string ``i`` is ``bytes[offsets[i] : offsets[i + 1]]``."""

    bytes: Tensor
    offsets: Tensor

    def to(self, device: torch.device) -> Strings:
        """Return the strings on a device."""
        return Strings(_moved(self.bytes, device), _moved(self.offsets, device))

    def lengths(self) -> Tensor:
        """Return the lengths of the strings, in bytes."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1


@dataclass
class Raw:
    """A raw column: ``width`` values per example, or rows that begin at ``offsets``."""

    name: str
    #: The values of all examples, in order.
    values: Tensor | Strings
    batch: int
    width: int | None = None
    offsets: Tensor | None = None
    #: False where a value is missing. None: no value is missing.
    valid: Tensor | None = None
    #: The step of each value, for sparse tensors whose rows have holes. None: values follow one another.
    places: Tensor | None = None
    #: Whether it was a sparse tensor: its rows may end within a step.
    sparse: bool = False
    #: The shape of an example: all dimensions but the first. None: no array with dimensions was given.
    shape: tuple[int, ...] | None = None

    @property
    def kind(self) -> str:
        """The kind of the values: ``"string"``, ``"integer"``, ``"float"`` or ``"bool"``."""
        if isinstance(self.values, Strings):
            return "string"
        dtype = self.values.dtype
        return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "integer"

    def count(self) -> int:
        """Return the number of values, including missing ones."""
        return len(self.values) if isinstance(self.values, Strings) else self.values.shape[0]

    def is_all_null(self) -> bool:
        """Say whether all values are missing, so that the kind does not matter."""
        return self.count() == 0 or (
            self.valid is not None and self.valid.device.type != "meta" and not bool(self.valid.any())
        )

    def blank(self, kind: str) -> Raw:
        """Return the same column, all null, with values of another kind: zeros, or empty strings."""
        count = self.count()
        device = self.values.bytes.device if isinstance(self.values, Strings) else self.values.device
        zeros = torch.zeros(count + (kind == "string"), dtype=torch.int64, device=device)
        text = torch.empty(0, dtype=torch.uint8, device=device)
        return replace(self, values=Strings(text, zeros) if kind == "string" else zeros)

    def of_strings(self) -> Raw:
        """Return the column for a reader of strings: floats that are all NaN, as frames have them, are missing ones."""
        values = self.values
        if isinstance(values, Strings) or self.kind != "float" or values.is_meta:
            return self
        there = ~values.isnan() if self.valid is None else self.valid & ~values.isnan()
        return self if bool(there.any()) else replace(self.blank("string"), valid=there)

    def to(self, device: torch.device) -> Raw:
        """Return the column on a device."""
        values: Any = self.values.to(device) if isinstance(self.values, Strings) else _moved(self.values, device)
        others = (self.offsets, self.valid, self.places)
        offsets, valid, places = (x if x is None else _moved(x, device) for x in others)
        return replace(self, values=values, offsets=offsets, valid=valid, places=places)

    def present(self) -> Tensor | None:
        """
        Return a mask of values that are neither null nor, with ``width`` values per example, ``-1`` or ``""``.

        Rows of any length keep ``-1`` and ``""``, as TensorFlow's sparse tensors do, and unsigned integers have no such
        mark. None: no value is missing.
        """
        if self.width is None:
            return self.valid
        if isinstance(self.values, Strings):
            marked = self.values.lengths() > 0
        elif self.values.dtype.is_signed and not self.values.is_floating_point():
            marked = self.values != -1
        else:
            return self.valid
        return marked if self.valid is None else marked & self.valid


def _moved(x: Tensor, device: torch.device) -> Tensor:
    if x.device == device:  # of a batch of small columns, to() itself takes a quarter of the time
        return x
    # A copy to the CPU is waited for: otherwise it can be read before it has arrived.
    return x.to(device, non_blocking=device.type != "cpu")
