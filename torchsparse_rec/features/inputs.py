"""The forms in which users give a raw column, and their conversion to :class:`Raw`."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._foreign import columns_by_name, is_array, is_arrow, own_array, rows_of_arrow, tensor_of_numpy
from ..jagged import JaggedTensor
from ..ops.jagged import lengths_to_offsets, nested_to_jagged, row_ids_to_offsets
from .raw import Raw, Strings

_FORMS = (
    "a tensor, a numpy array or a list of [B] or [B, k], a list of lists, a JaggedTensor, a torch.nested jagged "
    "tensor, (values, offsets), a SparseTensor, a RaggedTensor, a pyarrow array, or an array of another library"
)


class RawBatch:
    """Raw columns by name: a mapping, a frame, or Arrow's batches. Each is read once, and copied to a device."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._columns: Any = columns_by_name(batch, "FeatureTransform")
        if self._columns is None:
            raise ValueError(
                "FeatureTransform: batch must be a mapping from features to columns, a frame or a batch of Arrow's, "
                f"such as pyarrow's RecordBatch, got {type(batch).__name__}"
            )
        self.device = device
        self._raw: dict[str, Raw] = {}
        #: The feature that was read first, and its number of examples.
        self._first: tuple[str, int] | None = None

    def raw(self, name: str, column: str | None = None, shaped: bool = False) -> Raw:
        """Return a raw column on the device; unless ``shaped``, raise ``ValueError`` for more than two dimensions."""
        found = self._raw.get(name)
        if found is None:
            if name not in self._columns:
                wanted = "" if column in (None, name) else f", which column {column!r} reads"
                raise ValueError(
                    f"batch must have every feature, got none named {name!r}{wanted}: {list(self._columns)}"
                )
            found = self._raw[name] = read_raw(self._columns[name], name).to(self.device)
            if not self.has_examples(name, found.batch):
                assert self._first is not None
                first, count = self._first
                raise ValueError(
                    f"batch: columns must have the same number of examples, got {count} in {first!r} and "
                    f"{found.batch} in {name!r}"
                )
        if not shaped and found.shape is not None and len(found.shape) > 1:
            raise ValueError(
                f"column {column or name!r}: {name!r} must be of shape [B] or [B, k], got one of shape "
                f"{[found.batch, *found.shape]}"
            )
        return found

    def tensors(self, names: Sequence[str]) -> list[Tensor] | None:
        """Return the given columns; None unless all are tensors of torch's own class, and none is nested."""
        # Other mappings may make a new value at each access.
        if type(self._columns) is not dict or not all(map(self._columns.__contains__, names)):
            return None
        found = [self._columns[name] for name in names]
        # A nested tensor has no sizes to ask for.
        return found if set(map(type, found)) == {Tensor} and not any([x.is_nested for x in found]) else None

    def has_examples(self, name: str, count: int) -> bool:
        """Say whether a feature of so many examples fits the features that were read before."""
        if self._first is None:
            self._first = name, count
        return self._first[1] == count


def read_raw(x: Any, name: str) -> Raw:
    """
    Convert a user's column to a raw column.

    Raises:
        ValueError: for a column in none of the known forms; the error names the column.
    """
    if isinstance(x, Tensor):
        return _of_tensor(x, name)
    if isinstance(x, JaggedTensor):
        if x.weights_or_none() is not None:
            raise ValueError(
                f"column {name!r}: a JaggedTensor must have no weights, got some: give them as a separate feature, and "
                "name it in weighted_categorical_column"
            )
        return _of_jagged(x.values(), x.offsets(), name)
    if isinstance(x, np.ndarray):
        return _of_numpy(x, name)
    if is_arrow(x):
        values, count, width, offsets, valid = rows_of_arrow(x, f"column {name!r}")
        return Raw(name, Strings(*values) if isinstance(values, tuple) else values, count, width, offsets, valid)
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], (Tensor, np.ndarray)):
        return _of_offsets(x[0], x[1], name)
    if isinstance(x, (list, tuple)):
        return _of_list(x, name)
    if all(hasattr(x, part) for part in ("indices", "values", "dense_shape")):
        return _of_sparse(x, name)
    if hasattr(x, "row_splits") and hasattr(x, "values"):
        return _of_offsets(x.values, _own(x.row_splits, name), name)
    return read_raw(_own(x, name), name)


def _own(x: Any, name: str) -> Any:
    """Return another library's array as a numpy or pyarrow array."""
    if not is_array(x):
        raise ValueError(f"column {name!r}: must be {_FORMS}, got {type(x).__name__}")
    return own_array(x, f"column {name!r}", "FeatureTransform")


def _of_tensor(x: Tensor, name: str) -> Raw:
    if x.is_nested:
        values, offsets = nested_to_jagged(x)
        return _of_jagged(values, offsets, name)
    if x.dim() == 0 or x.layout != torch.strided or x.is_complex():
        raise ValueError(
            f"column {name!r}: a tensor must be strided numbers of shape [B] or [B, k], got {x.dtype} {x.layout} of "
            f"shape {list(x.shape)}"
        )
    shape = tuple(x.shape[1:])
    return Raw(name, x.detach().reshape(-1), x.shape[0], width=math.prod(shape), shape=shape)


def _of_jagged(values: Tensor, offsets: Tensor, name: str) -> Raw:
    if values.dim() != 1:
        raise ValueError(f"column {name!r}: values must have rank 1, got shape {list(values.shape)}")
    return Raw(name, values.detach(), offsets.shape[0] - 1, offsets=offsets.to(torch.int64))


def _of_offsets(values: Any, offsets: Any, name: str) -> Raw:
    """Convert values in any flat form, and the offsets at which rows begin."""
    flat = read_raw(values, name)
    bounds = tensor_of_numpy(offsets) if isinstance(offsets, np.ndarray) and offsets.dtype.kind in "iu" else offsets
    if flat.width != 1:
        raise ValueError(f"column {name!r}: the values of (values, offsets) must be one-dimensional")
    if (
        not isinstance(bounds, Tensor)
        or bounds.dim() != 1
        or bounds.shape[0] == 0
        or bounds.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"column {name!r}: offsets must be a vector of int32 or int64 with one element more than there are rows, "
            f"got {bounds.dtype} of shape {list(bounds.shape)}"
        )
    if bounds.device.type == "cpu" and (
        int(bounds[0]) != 0 or int(bounds[-1]) != flat.count() or bool((bounds.diff() < 0).any())
    ):
        raise ValueError(f"column {name!r}: offsets must rise from 0 to the number of values, {flat.count()}")
    flat.offsets, flat.width, flat.batch = bounds.to(torch.int64), None, bounds.shape[0] - 1
    return flat


def _of_sparse(x: Any, name: str) -> Raw:
    """Convert a SparseTensor, TensorFlow's or compat's, to rows; if rows have holes, note each value's place."""
    given, shape = _own(x.indices, name), _own(x.dense_shape, name).tolist()
    indices = given = tensor_of_numpy(given) if isinstance(given, np.ndarray) else given
    if len(shape) == 3 and 1 in shape[1:]:
        indices = indices[:, [0, 2 if shape[1] == 1 else 1]]
    elif len(shape) != 2:
        raise ValueError(
            f"column {name!r}: a SparseTensor must have the shape [B, k], [B, 1, k] or [B, k, 1], got {shape}: look "
            "ids of higher rank up by compat.tensorflow.nn.safe_embedding_lookup_sparse"
        )
    rows, places = indices.unbind(1)
    wrong = ((rows < 0) | (rows >= shape[0]) | (places < 0)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(
            f"column {name!r}: indices must be in rows [0, {shape[0]}) and not negative, got "
            f"{given[place].tolist()} at position {place}"
        )
    if bool((rows.diff() < 0).any()):
        raise ValueError(f"column {name!r}: indices must be sorted by row, got rows {repr(rows.tolist()):.200}")
    found = _of_offsets(x.values, row_ids_to_offsets(rows, shape[0]), name)
    assert found.offsets is not None
    following = torch.arange(len(rows), device=rows.device) - found.offsets[rows]
    found.places, found.sparse = None if torch.equal(places, following) else places, True
    return found


def _of_numpy(x: np.ndarray, name: str) -> Raw:
    if x.ndim == 0:
        raise ValueError(f"column {name!r}: an array must have shape [B] or [B, k], got []")
    shape = x.shape[1:]
    width = math.prod(shape)
    if isinstance(x, np.ma.MaskedArray):
        if x.dtype.kind == "O":
            items = x.data.copy()
            items[np.ma.getmaskarray(x)] = None
            return _of_numpy(items, name)
        # Values under a mask may be anything: one value replaces them all.
        found = _of_numpy(x.filled(x.dtype.type()), name)
        there = torch.from_numpy(~np.ma.getmaskarray(x).reshape(-1))
        return replace(found, valid=there if found.valid is None else there & found.valid)
    if x.dtype.kind in "biuf":
        if x.dtype.kind == "f" and x.dtype.itemsize > 8:
            x = x.astype(np.float64)  # torch has nothing wider
        return Raw(name, tensor_of_numpy(x).reshape(-1), x.shape[0], width=width, shape=shape)
    if x.dtype.kind == "O" and x.ndim == 1 and any(map(_is_row, x)):
        return _of_list(x.tolist(), name)
    if x.dtype.kind in "SUOT":
        values, valid = _flat_list(x.reshape(-1).tolist(), name)
        return Raw(name, values, x.shape[0], width=width, valid=valid, shape=shape)
    raise ValueError(f"column {name!r}: must hold numbers or strings, got numpy {x.dtype}")


def _of_list(x: Sequence[Any], name: str) -> Raw:
    if not any(_is_row(row) for row in x):
        values, valid = _flat_list(x, name)
        return Raw(name, values, len(x), width=1, valid=valid)
    for position, row in enumerate(x):
        if row is not None and not _is_row(row):
            raise ValueError(
                f"column {name!r}: a list must hold values or lists, and not both, got {row!r} at position {position}"
            )
    rows = [[] if row is None else row.tolist() if hasattr(row, "tolist") else row for row in x]
    values, valid = _flat_list(list(chain.from_iterable(rows)), name)
    return Raw(name, values, len(rows), offsets=_offsets(rows), valid=valid)


def _is_row(x: Any) -> bool:
    return isinstance(x, (list, tuple)) or (isinstance(x, (np.ndarray, Tensor)) and x.ndim == 1)


def _flat_list(x: Sequence[Any], name: str) -> tuple[Tensor | Strings, Tensor | None]:
    """
    Return the numbers or strings of a flat list, and a mask that is false for what is missing; no mask if nothing is.

    Missing is None, pandas' NA, and NaN among strings: frames of objects have no other mark for a missing string.
    """
    marks = {kind for kind in set(map(type, x)) if kind.__module__.startswith("pandas.") and kind.__name__ == "NAType"}
    if marks:
        x = [None if type(item) in marks else item for item in x]
    there = [item is not None for item in x]
    some = next((item for item in x if item is not None and not _is_nan(item)), None)
    if isinstance(some, (str, bytes)):
        there = [item is not None and not _is_nan(item) for item in x]
    valid = None if all(there) else torch.from_numpy(np.array(there))
    if valid is not None:
        some = next((item for item, is_there in zip(x, there, strict=True) if is_there), 0)
        filler: Any = "" if isinstance(some, (str, bytes)) else type(some)(0) if _is_number(some) else 0
        x = [item if is_there else filler for item, is_there in zip(x, there, strict=True)]
    if len(x) and isinstance(x[0], (str, bytes)):
        return strings_of_list(x, name), valid
    try:
        numbers = np.array(x) if len(x) else np.zeros(0, np.int64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"column {name!r}: must hold numbers or strings, got {error}") from error
    if numbers.dtype.kind not in "biuf" or numbers.ndim != 1:
        position = next((k for k, item in enumerate(x) if not _is_number(item)), 0)
        raise ValueError(
            f"column {name!r}: must hold numbers or strings, and not both, got {x[position]!r} at position {position}"
        )
    return torch.from_numpy(numbers), valid


def _is_nan(item: Any) -> bool:
    return isinstance(item, (float, np.floating)) and item != item


def _is_number(item: Any) -> bool:
    """Say whether an item is a number of at most 64 bits."""
    return isinstance(item, (int, float, np.number)) and not (isinstance(item, int) and not -(2**63) <= item < 2**64)


def strings_of_list(x: Sequence[Any], name: str) -> Strings:
    """Convert a list of strings: ``str`` to UTF-8, ``bytes`` unchanged."""
    try:
        pieces = [item if isinstance(item, bytes) else item.encode() for item in x]
    except (AttributeError, UnicodeEncodeError) as error:
        position = next(k for k, item in enumerate(x) if not _encodes(item))
        raise ValueError(
            f"column {name!r}: must hold str or bytes that can be encoded, got {x[position]!r} at position {position}"
        ) from error
    text = bytearray().join(pieces)
    # torch.frombuffer refuses an empty buffer.
    joined = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    return Strings(joined, _offsets(pieces))


def _offsets(rows: Sequence[Sized]) -> Tensor:
    """Return where each row begins, and where the last ends."""
    return lengths_to_offsets(torch.from_numpy(np.fromiter(map(len, rows), np.int64, len(rows))))


def _encodes(item: Any) -> bool:
    if isinstance(item, bytes):
        return True
    try:
        item.encode()
    except (AttributeError, UnicodeEncodeError):
        return False
    return True
