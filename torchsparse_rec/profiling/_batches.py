"""Take batches from a loader one by one, measure the wait for each, and look at their contents."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .._torch import pytree
from .._torch_modules import version_of
from ..jagged import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "Batches",
    "Exhausted",
    "TrainingStep",
    "copied",
    "examples_in",
    "fresh",
    "moved",
    "parts_of",
    "prefetched",
    "versions",
]


# The depth to which a batch's nested containers are searched for columns.
_DEPTH = 4


class Exhausted(Exception):
    """A loader has no more batches, and cannot be iterated again."""


class Batches:
    """
    The batches of a loader, which is iterated again when it ends, if it can be.

    Args:
        loader: an iterable of batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] = iter(loader)
        self._once = self._iterator is loader
        self._ended = False
        self.taken = 0
        """The number of batches taken since the loader was last started."""

    def next(self) -> tuple[Any, float | None]:
        """
        Return the next batch and the seconds waited for it, or None for these if the loader was started again for it.

        Raises:
            Exhausted: there are no more batches.
        """
        if self._ended:
            raise Exhausted
        start = perf_counter()
        try:
            batch = next(self._iterator)
            seconds: float | None = perf_counter() - start
        except StopIteration:
            batch, seconds = self._restarted(), None
        self.taken += 1
        return batch, seconds

    def _restarted(self) -> Any:
        self._ended = self._once
        if not self._ended:
            self._iterator, self.taken = iter(self._loader), 0
            try:
                return next(self._iterator)
            except StopIteration:
                self._ended = True
        raise Exhausted

    def close(self) -> None:
        """Drop the loader's iterator, so that its workers end."""
        self._iterator, self._ended = iter(()), True


def prefetched(loader: Any) -> int:
    """Return how many batches a loader may hold ready, from a DataLoader's workers or the attribute ``depth``, or 0."""
    if isinstance(loader, DataLoader):
        return loader.num_workers * (loader.prefetch_factor or 2) if loader.num_workers else 0
    depth = getattr(loader, "depth", 0)
    return depth if isinstance(depth, int) else 0


def fresh(batch: Any) -> Any:
    """Return the same tensors in new containers, since a step may remove keys from its batch."""
    return pytree.tree_map(lambda leaf: copy.copy(leaf) if _is_record(leaf) else leaf, batch)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a copy of a batch with its tensors on ``device``."""
    return _mapped(
        batch,
        lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf,
        lambda leaf: _is_record(leaf) and not hasattr(leaf, "to"),
    )


def copied(batch: Any) -> Any:
    """Return a copy of a batch, its tensors and numpy arrays copied too."""

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf

    return _mapped(batch, copy_of, _is_record)


def versions(batch: Any) -> list[int]:
    """Return how often each of a batch's tensors was changed in place."""
    counts: list[int] = []

    def see(leaf: Any) -> None:
        if isinstance(leaf, Tensor) and not leaf.is_inference():
            counts.append(version_of(leaf))

    _mapped(batch, see, _is_record)
    return counts


def _mapped(batch: Any, change: Callable[[Any], Any], is_open: Callable[[Any], bool]) -> Any:
    """Return a copy of a batch with ``change`` applied to its leaves, and within leaves that ``is_open`` to fields."""

    def each(leaf: Any) -> Any:
        if not is_open(leaf):
            return change(leaf)
        other = copy.copy(leaf)
        other.__dict__.update({name: _mapped(value, change, is_open) for name, value in leaf.__dict__.items()})
        return other

    return pytree.tree_map(each, batch)


class TrainingStep:
    """
    A training step, and the way to prepare a batch for it.

    Args:
        call: the step, a function of a batch.
    """

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call
        self.changes_batches = False

    def __call__(self, batch: Any) -> Any:
        return self._call(batch)

    def try_on(self, batch: Any) -> None:
        """Run the step on a copy of a batch, and record whether it changes tensors of the copy in place."""
        own = copied(batch)
        before = versions(own)
        self(fresh(own))
        self.changes_batches = versions(own) != before

    def ready(self, batch: Any) -> Any:
        """Return a copy of a batch for the step, with copied tensors if the step changes tensors in place."""
        return copied(batch) if self.changes_batches else fresh(batch)


def parts_of(batch: Any) -> int:
    """Return the number of columns of a batch."""
    return sum(columns for _, columns in _columns(batch, 0))


def examples_in(batch: Any) -> int | None:
    """Return the number of examples of a batch: the length that most of its columns share, or None without columns."""
    counts: Counter[int] = Counter()
    for length, columns in _columns(batch, 0):
        counts[length] += columns
    return counts.most_common(1)[0][0] if counts else None


def _is_record(value: Any) -> bool:
    """Say whether a value is an instance of a dataclass with a ``__dict__``."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")


def _columns(value: Any, depth: int) -> Iterator[tuple[int, int]]:
    """
    Yield pairs of a length and the number of columns of this length.

    The batch may consist of tensors, arrays, tables, mappings, dataclasses and lists.
    """
    if isinstance(value, KeyedJaggedTensor):
        yield value.stride(), len(value.keys())
    elif isinstance(value, JaggedTensor):
        yield value.lengths().shape[0], 1
    elif hasattr(value, "num_rows") and hasattr(value, "num_columns"):  # pyarrow's tables
        yield value.num_rows, value.num_columns
    elif hasattr(value, "shape"):
        if len(value.shape):
            yield int(value.shape[0]), 1
    elif depth < _DEPTH and isinstance(value, Mapping):
        for each in value.values():
            yield from _columns(each, depth + 1)
    elif depth < _DEPTH and isinstance(value, (list, tuple)) and any(_has_columns(each) for each in value[:2]):
        for each in value:
            yield from _columns(each, depth + 1)
    elif depth < _DEPTH and _is_record(value):
        yield from _columns(value.__dict__, depth + 1)
    elif isinstance(value, (list, tuple)) or hasattr(value, "__arrow_array__") or hasattr(value, "null_count"):
        yield len(value), 1


def _has_columns(value: Any) -> bool:
    return hasattr(value, "shape") or isinstance(value, (KeyedJaggedTensor, JaggedTensor, Mapping, list, tuple))
