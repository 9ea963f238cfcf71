"""Rows with all that belongs to them: as tensors, and as records of bytes, their form outside of the first tier."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .keys import packed, unpacked

__all__ = ["Export", "Field", "RecordLayout", "RowPart", "Records"]


class Export(NamedTuple):
    """The result of :meth:`EmbeddingVariable.export`, in the order of rows; its fields are in DeepRec's order."""

    #: ``[K]``, the variable's key_dtype.
    keys: Tensor
    #: ``[K, D]``.
    values: Tensor
    #: The step of each key's last lookup in training, ``[K]`` int64; -1: none.
    versions: Tensor
    #: How often each key has been looked up in training, ``[K]`` int64.
    frequencies: Tensor


class RowPart(NamedTuple):
    """Rows of a table, of any tier, with their keys, frequencies, versions and optimizer states."""

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
    def of_tensors(tensors: dict[str, Tensor], device: torch.device) -> RowPart:
        """Make a part, on a device, from the tensors of :meth:`tensors`."""
        there = {name: x.to(device) for name, x in tensors.items()}
        states = {name.removeprefix("states."): x for name, x in there.items() if name.startswith("states.")}
        return RowPart(there["keys"], there["values"], there["frequencies"], there["versions"], states)

    def select(self, which: Tensor) -> RowPart:
        """Return some of the rows, by a mask or by positions."""
        states = {name: values[which] for name, values in self.states.items()}
        return RowPart(self.keys[which], self.values[which], self.frequencies[which], self.versions[which], states)


class Field(NamedTuple):
    """One optimizer state of a row: its name, dtype, shape and initial value."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    initial: float


class Records(NamedTuple):
    """Rows in the form in which they left the first tier."""

    part: RowPart
    steps: Tensor
    """The optimizer step up to which each row is up to date, int64; BEFORE_HISTORY: the beginning of the history."""


class RecordLayout(NamedTuple):
    """The layout of a record: the values, the states, frequency and version, and the step."""

    dtype: torch.dtype
    embedding_dim: int
    states: tuple[Field, ...]

    def _parts(self) -> list[Field]:
        numbers = [Field(name, torch.int64, (), 0.0) for name in ("numbers", "steps")]
        return [Field("", self.dtype, (self.embedding_dim,), 0.0), *self.states, *numbers]

    def row_bytes(self) -> int:
        """Return how many bytes the values and the states take."""
        return sum(_bytes(field) for field in self._parts()[:-2])

    def record_bytes(self) -> int:
        """Return how many bytes a whole record takes."""
        return sum(_bytes(field) for field in self._parts())

    def pack(self, part: RowPart, steps: Tensor) -> Tensor:
        """Return records, ``[N, record bytes]`` uint8 on the host; missing states get their initial value."""
        values = {"": part.values, "numbers": packed(part.frequencies, part.versions), "steps": steps, **part.states}
        pieces = []
        for name, dtype, shape, initial in self._parts():
            x = values.get(name)
            x = torch.full((len(part.keys), *shape), initial, dtype=dtype) if x is None else x.to("cpu", dtype)
            pieces.append(x.contiguous().view(torch.uint8).view(len(part.keys), -1))
        return torch.cat(pieces, 1)

    def unpack(self, keys: Tensor, records: Tensor) -> Records:
        """Return the rows that records of :meth:`pack` hold."""
        values: dict[str, Tensor] = {}
        begin = 0
        for field in self._parts():
            end = begin + _bytes(field)
            piece = records[:, begin:end].clone(memory_format=torch.contiguous_format)  # aligned
            values[field.name] = piece.view(field.dtype).view(len(keys), *field.shape)
            begin = end
        rows, numbers, steps = (values.pop(name) for name in ("", "numbers", "steps"))
        return Records(RowPart(keys, rows, *unpacked(numbers), values), steps)

    def numbers(self, records: Tensor) -> Tensor:
        """Return frequency and version of each record in one number, int64, as :func:`packed` does."""
        begin = self.row_bytes()
        return records[:, begin : begin + 8].clone(memory_format=torch.contiguous_format).view(torch.int64).flatten()


def _bytes(field: Field) -> int:
    return math.prod(field.shape) * torch.empty(0, dtype=field.dtype).element_size()
