"""The state of ``KeyedJaggedTensor``: rows, the features that they belong to, and the sizes that follow."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._rows import JaggedRows, rows_of
from .checks import check_contents

InverseIndices = tuple[list[str], Tensor]
KeyedRowsT = TypeVar("KeyedRowsT", bound="KeyedRows")


class KeyedRows(JaggedRows):
    """Rows, feature after feature. Every method that waits for a CUDA device waits in :meth:`length_per_key`."""

    _keys: tuple[str, ...]
    # The batch size where rows do not determine it: without keys, and with some features of an object whose batch sizes
    # differ.
    _stride: int | None
    _strides: tuple[tuple[int, ...], ...] | None
    _length_per_key: list[int] | None
    _inverse_keys: tuple[str, ...] | None
    _inverse: Tensor | None

    # ---- Keys and sizes ---------------------------------------------------------------------------------------------

    def keys(self) -> list[str]:
        """Return the names of the features, in order."""
        return list(self._keys)

    def index_per_key(self) -> dict[str, int]:
        """Return the place of each name among the keys."""
        return {key: i for i, key in enumerate(self._keys)}

    def stride(self) -> int:
        """
        Return the batch size.

        Where features have batches of different sizes, it is the full batch's size if inverse indices contain it, else
        the largest. Objects made by :meth:`split` and :meth:`permute` then keep the batch size of the whole.
        """
        if self._stride is not None:
            return self._stride
        if self._strides is None:
            return self._num_rows() // len(self._keys)
        if self._inverse is not None and self._inverse.numel():
            return self._inverse.shape[-1]
        return max([0, *self.stride_per_key()])

    def stride_per_key(self) -> list[int]:
        """Return the batch size of each feature."""
        return [self.stride()] * len(self._keys) if self._strides is None else [sum(s) for s in self._strides]

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the batch sizes by process that each feature's adds up from; one for each, where none were given."""
        if self._strides is None:
            return [[self.stride()] for _ in self._keys]
        return [list(s) for s in self._strides]

    def variable_stride_per_key(self) -> bool:
        """Say whether batch sizes were given by feature. They may be equal all the same."""
        return self._strides is not None

    def inverse_indices(self) -> InverseIndices:
        """Return the inverse indices; raise ``ValueError`` if there are none."""
        found = self.inverse_indices_or_none()
        if found is None:
            raise ValueError("KeyedJaggedTensor.inverse_indices: it was made without inverse_indices")
        return found

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Return the inverse indices, or None."""
        if self._inverse_keys is None or self._inverse is None:
            return None
        return list(self._inverse_keys), self._inverse

    def lengths_offset_per_key(self) -> list[int]:
        """Return the first row of each feature, and the number of rows."""
        return [0, *accumulate(self.stride_per_key())]

    def length_per_key(self) -> list[int]:
        """
        Return the number of ids of each feature.

        The first call reads the numbers back, which waits for a CUDA device (see the class). Raises ValueError if the
        lengths do not add up to the number of values. On the meta device, where lengths hold nothing, the values are
        divided equally, and the first feature has the rest: TorchRec's numbers, good for shapes only.
        """
        known = self._known_length_per_key()
        if known is None and self._values.is_meta:
            share, rest = divmod(self._values.shape[0], len(self._keys))
            known = self._length_per_key = [share + rest] + [share] * (len(self._keys) - 1)
        if known is None:
            if self._strides is None:
                sums = self.lengths().view(len(self._keys), self.stride()).sum(1)
            else:
                sums = torch.stack([x.sum() for x in self.lengths().split(self.stride_per_key())])
            known = sums.tolist()
            if not torch.compiler.is_compiling() and sum(known) != self._values.shape[0]:
                check_contents("KeyedJaggedTensor", self)
            self._length_per_key = known
        return list(known)

    def length_per_key_or_none(self) -> list[int] | None:
        """Return :meth:`length_per_key` if it is known without waiting for a device, else None."""
        known = self._known_length_per_key()
        return None if known is None else list(known)

    def _known_length_per_key(self) -> list[int] | None:
        if self._length_per_key is None and len(self._keys) <= 1:
            return [self._values.shape[0]] * len(self._keys)
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return where the ids of each feature begin, and the end; it may wait for a device, as length_per_key."""
        return [0, *accumulate(self.length_per_key())]

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return :meth:`offset_per_key` if it is known without waiting for a device, else None."""
        known = self._known_length_per_key()
        return None if known is None else [0, *accumulate(known)]

    def sync(self: KeyedRowsT) -> KeyedRowsT:
        """Find :meth:`length_per_key` now, which waits for a CUDA device; return the object. In graphs, do nothing."""
        if not torch.compiler.is_compiling():
            self.length_per_key()
        return self

    def unsync(self: KeyedRowsT) -> KeyedRowsT:
        """Forget :meth:`length_per_key`, and return the object."""
        self._length_per_key = None
        return self

    # ---- As a node --------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        tensors = super()._tensors()
        return tensors if self._inverse is None else {**tensors, "inverse_indices": self._inverse}

    def _map(self: KeyedRowsT, function: Callable[[Tensor], Tensor]) -> KeyedRowsT:
        mapped = super()._map(function)
        mapped._length_per_key = self._length_per_key
        return mapped

    def _context(self) -> tuple:
        return self._keys, self._stride, self._strides, self._inverse_keys

    @classmethod
    def _build(cls: type[KeyedRowsT], tensors: dict[str, Any], context: tuple) -> KeyedRowsT:
        made = super()._build(tensors, context)
        made._keys, made._stride, made._strides, made._inverse_keys = context
        made._inverse = tensors.get("inverse_indices")
        made._length_per_key = None
        return made

    def _made(
        self: KeyedRowsT,
        chosen: slice | list[int],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor,
        known: list[int] | None,
    ) -> KeyedRowsT:
        """Make an object of some of the features, without checks: the arguments are known to be right."""
        places = range(len(self._keys))[chosen] if isinstance(chosen, slice) else chosen
        made = object.__new__(type(self))
        made._set_rows(values, weights, lengths, None)
        made._keys = tuple(self._keys[i] for i in places)
        made._stride = None if made._keys and self._strides is None else self.stride()
        made._strides = None if self._strides is None else tuple(self._strides[i] for i in places)
        made._length_per_key = known
        made._inverse_keys, made._inverse = None, None
        return made

    def _bounds_by_key(self) -> dict[str, list[int]]:
        """Return where each row of a feature begins, and the end, by key: for ``repr`` and ``str``."""
        bounds, rows = self.offsets().tolist(), self.lengths_offset_per_key()
        return {key: bounds[rows[i] : rows[i + 1] + 1] for i, key in enumerate(self._keys)}

    def __repr__(self) -> str:
        if not self._is_shown():
            return f"KeyedJaggedTensor({list(self._keys)}, {self._summary()}, stride={self.stride()})"
        of_key, weights = self._bounds_by_key(), ""
        if self._weights is not None:
            weights = f", weights={ {key: rows_of(self._weights, x) for key, x in of_key.items()} }"
        return f"KeyedJaggedTensor({ {key: rows_of(self._values, x) for key, x in of_key.items()} }{weights})"

    def __str__(self) -> str:
        if not self._is_shown():
            return repr(self)
        entries = []
        for key, bounds in self._bounds_by_key().items():
            shown = str(rows_of(self._values, bounds))
            if self._weights is not None:
                weights = rows_of(self._weights, bounds)
                shown = f'{{\n        "values": {shown},\n        "weights": {weights}\n    }}'
            entries.append(f'"{key}": {shown}')
        return self._in_lines(entries)
