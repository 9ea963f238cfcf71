"""The base of ``JaggedTensor`` and ``KeyedJaggedTensor``: values in rows, by lengths or offsets, weighted or not."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from ..ops.jagged import lengths_to_offsets
from ._node import Node

RowsT = TypeVar("RowsT", bound="JaggedRows")


class JaggedRows(Node):
    """Values in rows. At least one of ``_lengths`` and ``_offsets`` was given; the other is computed when asked for."""

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None
    # The lengths or the offsets that were not given, once computed.
    _derived: Tensor | None

    def _set_rows(self, values: Any, weights: Any, lengths: Any, offsets: Any) -> None:
        self._values, self._weights, self._lengths, self._offsets = values, weights, lengths, offsets
        self._derived = None

    @classmethod
    def _build(cls: type[RowsT], tensors: dict[str, Any], context: tuple) -> RowsT:
        made = object.__new__(cls)
        made._set_rows(tensors["values"], tensors.get("weights"), tensors.get("lengths"), tensors.get("offsets"))
        return made

    def _tensors(self) -> dict[str, Tensor]:
        named = {"values": self._values, "weights": self._weights, "lengths": self._lengths, "offsets": self._offsets}
        return {name: x for name, x in named.items() if x is not None}

    def values(self) -> Tensor:
        """Return all values, row after row."""
        return self._values

    def weights(self) -> Tensor:
        """Return the weight of each value; raise ``ValueError`` if there are none."""
        if self._weights is None:
            name = type(self).__name__
            raise ValueError(f"{name}.weights: it was made without weights; weights_or_none() gives None for such")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weight of each value, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the number of values of each row, ``[S]``: computed, in their dtype, if only offsets were given."""
        if self._lengths is not None:
            return self._lengths
        if self._derived is None:
            assert self._offsets is not None
            self._derived = self._offsets.diff()
        return self._derived

    def offsets(self) -> Tensor:
        """Return where each row begins, and the end, ``[S + 1]``: computed, int64, if only lengths were given."""
        if self._offsets is not None:
            return self._offsets
        if self._derived is None:
            assert self._lengths is not None
            self._derived = lengths_to_offsets(self._lengths)
        return self._derived

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they were given or have been computed, else None."""
        return self._derived if self._lengths is None else self._lengths

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they were given or have been computed, else None."""
        return self._derived if self._offsets is None else self._offsets

    def _num_rows(self) -> int:
        """Return the number of rows, without computing anything."""
        if self._lengths is not None:
            return self._lengths.shape[0]
        assert self._offsets is not None
        return self._offsets.shape[0] - 1


def rows_of(values: Tensor, offsets: list[int]) -> list:
    """Return the rows as lists of numbers, for ``repr``."""
    return [values[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
