"""The loader as a diagnosis sees it: batches one after the other, how long each is waited for, and what is in them."""

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
from torch.utils import _pytree
from torch.utils.data import DataLoader

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


# How far into a batch's containers to look.
_DEPTH = 4


class Exhausted(Exception):
    """A loader that can be iterated once has no more batches."""


class Batches:
    """
    Batches of a loader, from its start again where it can be started again.

    Args:
        loader: the loader.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] = iter(loader)
        self._once = self._iterator is loader
        self._ended = False
        self.taken = 0
        """Batches since the loader was last started."""

    def next(self) -> tuple[Any, float | None]:
        """
        The next batch and the seconds it was waited for, None where the loader had to be started anew for it.

        Raises:
            Exhausted: there is none.
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
        """Let go of the loader: its workers end."""
        self._iterator, self._ended = iter(()), True


def prefetched(loader: Any) -> int:
    """How many batches a loader may hold ready, as far as it says: a DataLoader's workers, or a ``depth``."""
    if isinstance(loader, DataLoader):
        return loader.num_workers * (loader.prefetch_factor or 2) if loader.num_workers else 0
    depth = getattr(loader, "depth", 0)
    return depth if isinstance(depth, int) else 0


def fresh(batch: Any) -> Any:
    """The same tensors in new containers: a step may take keys out of its batch."""
    return _pytree.tree_map(lambda leaf: copy.copy(leaf) if _is_record(leaf) else leaf, batch)


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``."""
    return _mapped(
        batch,
        lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf,
        lambda leaf: _is_record(leaf) and not hasattr(leaf, "to"),
    )


def copied(batch: Any) -> Any:
    """The batch with tensors and arrays of its own."""

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf

    return _mapped(batch, copy_of, _is_record)


def versions(batch: Any) -> list[int]:
    """How often each of the batch's tensors was changed in place."""
    counts: list[int] = []

    def see(leaf: Any) -> None:
        if isinstance(leaf, Tensor) and not leaf.is_inference():
            counts.append(leaf._version)

    _mapped(batch, see, _is_record)
    return counts


def _mapped(batch: Any, change: Callable[[Any], Any], is_open: Callable[[Any], bool]) -> Any:
    """The batch with its leaves changed, and the fields of those of its objects that are open."""

    def each(leaf: Any) -> Any:
        if not is_open(leaf):
            return change(leaf)
        other = copy.copy(leaf)
        other.__dict__.update({name: _mapped(value, change, is_open) for name, value in leaf.__dict__.items()})
        return other

    return _pytree.tree_map(each, batch)


class TrainingStep:
    """
    A step as it is given, and how a batch has to be made ready for it.

    Args:
        call: the step.
    """

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call
        self.changes_batches = False

    def __call__(self, batch: Any) -> Any:
        return self._call(batch)

    def try_on(self, batch: Any) -> None:
        """Run on a copy of a batch, and see whether that changes it in place."""
        own = copied(batch)
        before = versions(own)
        self(fresh(own))
        self.changes_batches = versions(own) != before

    def ready(self, batch: Any) -> Any:
        """A batch that the step may take apart, and change if it does, while ``batch`` stays what it is."""
        return copied(batch) if self.changes_batches else fresh(batch)


def parts_of(batch: Any) -> int:
    """How many columns a batch is made of."""
    return sum(columns for _, columns in _columns(batch, 0))


def examples_in(batch: Any) -> int | None:
    """How many examples a batch has: the length that most of its columns share. None if it has no columns."""
    counts: Counter[int] = Counter()
    for length, columns in _columns(batch, 0):
        counts[length] += columns
    return counts.most_common(1)[0][0] if counts else None


def _is_record(value: Any) -> bool:
    """Whether a value is an object with fields, as a dataclass is."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")


def _columns(value: Any, depth: int) -> Iterator[tuple[int, int]]:
    """Lengths, and how many columns have each, of a batch in any form: tensors, arrays, mappings, objects, lists."""
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
