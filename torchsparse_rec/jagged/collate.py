"""Collation of examples with lists of ids, as a DataLoader's workers give them, to one batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from .._foreign import is_array, is_arrow, own_array
from .checks import check_keys
from .keyed_jagged_tensor import KeyedJaggedTensor


class KeyedJaggedCollate:
    """
    A ``collate_fn`` for :class:`torch.utils.data.DataLoader` that puts the ids of all features into one object.

    Called with a list of examples, each a mapping, it gives a dict of one :class:`KeyedJaggedTensor` and of all other
    entries, put together by :func:`torch.utils.data.default_collate`. An example's ids of one feature are an integer, a
    list or tuple of integers, an array or tensor of rank 0 or 1 of numpy, torch, pyarrow, TensorFlow or whatever has
    Arrow's methods or ``__array__``, or None for no ids. None in a list, and a null in an array, is no id. It can be
    pickled, and works in worker processes and with ``pin_memory=True``.

    Args:
        keys: the features' names, which are keys of each example.
        weighted: the features whose entries are pairs ``(ids, weights)`` of equal lengths. If there are any, the ids of
            the others get the weight 1. Default: none.
        name: the object's key in the batch. Default "features".
        bits: whether unsigned ids of 64 bits become the int64 of the same bits, in which those from 2^63 on are
            negative. Default False: these are an error.

    Raises:
        TypeError: keys that are no strings.
        ValueError: keys that are not distinct, weighted features that are none of the keys. In a call: no examples; an
            example without one of the keys; ids that are no integers or of higher rank. Also weights of another number,
            and an entry called ``name``.

    Ids are int64, lengths int64, weights float32.

    Example:
        >>> collate = KeyedJaggedCollate(["user", "items"])
        >>> batch = collate([{"user": 7, "items": [3, 1], "label": 1.0}, {"user": 9, "items": [], "label": 0.0}])
        >>> batch["features"]
        KeyedJaggedTensor({'user': [[7], [9]], 'items': [[3, 1], []]})
        >>> batch["label"]
        tensor([1., 0.], dtype=torch.float64)
    """

    def __init__(
        self, keys: Sequence[str], *, weighted: Iterable[str] = (), name: str = "features", bits: bool = False
    ) -> None:
        self.keys = check_keys("KeyedJaggedCollate", keys)
        if not self.keys:
            raise ValueError("KeyedJaggedCollate: keys must have at least one key, got none")
        self.weighted = check_keys("KeyedJaggedCollate", weighted)
        unknown = [key for key in self.weighted if key not in self.keys]
        if unknown:
            raise ValueError(f"KeyedJaggedCollate: weighted must name keys, {list(self.keys)}, got {unknown[0]!r}")
        self.name, self.bits = name, bits

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Put at least one example together to a batch."""
        if len(examples) == 0:
            raise ValueError("KeyedJaggedCollate: examples must have at least one element, got none")
        columns = [self._column(key, examples) for key in self.keys]
        values = [ids for ids, _, _ in columns]
        weights = np.concatenate([weights for _, _, weights in columns]) if self.weighted else None
        features = KeyedJaggedTensor(
            self.keys,
            torch.from_numpy(np.concatenate(values)),
            None if weights is None else torch.from_numpy(weights),
            lengths=torch.from_numpy(np.concatenate([lengths for _, lengths, _ in columns])),
            length_per_key=[len(ids) for ids in values],
        )
        keys = set(self.keys)
        others = [{name: x for name, x in example.items() if name not in keys} for example in examples]
        if any(self.name in other for other in others):
            raise ValueError(f"KeyedJaggedCollate: examples must have no entry {self.name!r}, the features' own name")
        return {self.name: features, **(default_collate(others) if others[0] else {})}

    def _column(self, key: str, examples: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return one feature's ids, lengths and weights in all examples."""
        try:
            entries = [example[key] for example in examples]
        except KeyError:
            missing = next(i for i, example in enumerate(examples) if key not in example)
            raise ValueError(
                f"KeyedJaggedCollate: examples must have the key {key!r}, got none at {missing}: example {missing} "
                f"has {list(examples[missing])}"
            ) from None
        ids, given = entries, None
        if key in self.weighted:
            for i, entry in enumerate(entries):
                if entry is not None and not (isinstance(entry, (tuple, list)) and len(entry) == 2):
                    raise ValueError(f"KeyedJaggedCollate: {key!r} must be a pair (ids, weights), got {entry!r} at {i}")
            ids = [None if entry is None else entry[0] for entry in entries]
            given = [None if entry is None else entry[1] for entry in entries]
        values, lengths = _concatenated(ids, np.int64, repr(key), self.bits)
        if given is None:
            return values, lengths, np.ones(len(values), np.float32) if self.weighted else _NO_WEIGHTS
        weights, counts = _concatenated(given, np.float32, f"the weights of {key!r}")
        if not np.array_equal(counts, lengths):
            i = int(np.argmax(counts != lengths))
            raise ValueError(
                f"KeyedJaggedCollate: {key!r} must have as many weights as ids, got {counts[i]} for {lengths[i]} at {i}"
            )
        return values, lengths, weights


_NO_WEIGHTS = np.empty(0, np.float32)
# The kinds of numbers, numpy's letters, that may become a dtype; and the same in words.
_KINDS = {
    np.int64: ("iu", "integers in the range of int64, of rank 0 or 1"),
    np.float32: ("iuf", "numbers, of rank 0 or 1"),
}


def _concatenated(entries: Sequence[Any], dtype: Any, what: str, bits: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Join the numbers of all examples; return them and the count of each. No Python loop runs over the numbers."""
    numbers, lengths = _joined(entries, dtype, bits)
    if numbers is None or not _fits(numbers, dtype):
        # What makes numpy refuse a list may be a None in it.
        numbers, lengths = _joined([_without_none(x) for x in entries], dtype, bits)
    if numbers is None or not _fits(numbers, dtype):
        wrong = _first_wrong(entries, dtype, bits)
        raise ValueError(f"KeyedJaggedCollate: {what} must be {_KINDS[dtype][1]}, got {wrong}")
    return numbers.astype(dtype, copy=False), lengths


def _joined(entries: Sequence[Any], dtype: Any, bits: bool) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the numbers of all examples in one array, None if numpy makes none, and the count of each example."""
    types = set(map(type, entries))
    try:
        if types == {int}:
            return _vector(entries, dtype, bits), np.ones(len(entries), np.int64)
        # One array of all is several times faster than one of each list.
        are_lists = types <= {list, tuple}
        parts: Sequence[Any] = entries if are_lists else [_vector(x, dtype, bits) for x in entries]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        if are_lists:
            return _vector(list(chain.from_iterable(parts)), dtype, bits), lengths
        return np.concatenate(parts), lengths
    except (TypeError, ValueError):  # of numpy: lists of lists, arrays of different ranks
        return None, np.empty(0, np.int64)


def _without_none(x: Any) -> Any:
    return [item for item in x if item is not None] if isinstance(x, (list, tuple)) else x


def _first_wrong(entries: Sequence[Any], dtype: Any, bits: bool) -> str:
    """Describe the first entry that does not fit, and its place."""
    for i, x in enumerate(entries):
        try:
            if _fits(_vector(_without_none(x), dtype, bits), dtype):
                continue
        except (TypeError, ValueError):
            pass
        return f"{x!r} at {i}"
    return "kinds of integers that have no common dtype"


def _fits(numbers: np.ndarray, dtype: Any) -> bool:
    """Say whether numbers are a vector of the dtype's kinds, none above int64, which ``astype`` would change."""
    if numbers.dtype == np.uint64 and dtype is np.int64 and numbers.size > 0 and numbers.max() >= 2**63:
        return False
    return numbers.ndim == 1 and numbers.dtype.kind in _KINDS[dtype][0]


def _vector(x: Any, dtype: Any, bits: bool) -> np.ndarray:
    """Return the numbers of one example as a vector; an empty one has a dtype that does not change the others'."""
    if isinstance(x, Tensor):
        array = (x.float() if x.is_floating_point() else x).numpy(force=True)
    elif not isinstance(x, (np.ndarray, np.generic)) and is_array(x):
        own = own_array(x, "KeyedJaggedCollate", "KeyedJaggedCollate")
        array = own.drop_null().to_numpy(zero_copy_only=False) if is_arrow(own) else own
    else:
        array = np.empty(0, dtype) if x is None else np.asarray(x)
    if bits and array.dtype == np.uint64:
        array = array.astype(np.int64)  # which keeps the bits
    elif bits and array.dtype.kind in "fO" and isinstance(x, (list, tuple)) and set(map(type, x)) == {int}:
        # Of numbers below and above 2**63 numpy makes floats.
        array = np.array([item - 2**64 if 2**63 <= item < 2**64 else item for item in x])
    if array.dtype == np.bool_:  # which numpy would join with integers
        raise TypeError
    if array.ndim == 0:
        return array.reshape(1)
    return np.empty(0, dtype) if array.shape == (0,) else array
