"""Statistics of a stream in one pass: words by frequency, approximate quantiles, means and variances."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import ops
from .raw import Strings


class WordCounts:
    """Counts of how often each word occurs."""

    def __init__(self) -> None:
        self._strings: dict[bytes, int] = {}
        self._numbers = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._strings) + len(self._numbers)

    def add(self, values: Tensor | Strings, present: Tensor | None = None) -> None:
        """Count the words of a batch that are not missing."""
        if isinstance(values, Strings):
            self._add_strings(values, present)
            return
        numbers = values.to(torch.int64) if present is None else values[present].to(torch.int64)
        unique, counts = np.unique(numbers.numpy(), return_counts=True)
        self._numbers, places = np.unique(np.concatenate([self._numbers, unique]), return_inverse=True)
        summed = np.zeros(len(self._numbers), np.int64)
        np.add.at(summed, places, np.concatenate([self._counts, counts]))
        self._counts = summed

    def _add_strings(self, values: Strings, present: Tensor | None) -> None:
        """Count strings by their fingerprints, so that only one of each becomes a Python object."""
        hashes = ops.string_fingerprint64(*values)
        lengths = values.lengths()
        places = torch.arange(len(values)) if present is None else present.nonzero()[:, 0]
        # Strings of one fingerprint and different lengths are distinguished; collisions of one length are not.
        keys = torch.stack([hashes[places], lengths[places]], 1).numpy()
        _, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
        chosen = places.numpy()[first]
        text, bounds = values.bytes.numpy(), values.offsets.numpy()
        for place, count in zip(chosen.tolist(), counts.tolist(), strict=True):
            word = text[bounds[place] : bounds[place + 1]].tobytes()
            self._strings[word] = self._strings.get(word, 0) + count

    def remove(self, word: Any) -> None:
        """Remove a word from the counts."""
        if isinstance(word, bytes):
            self._strings.pop(word, None)
        elif not isinstance(word, str) and len(self._numbers):
            kept = self._numbers != word
            self._numbers, self._counts = self._numbers[kept], self._counts[kept]

    def count(self, word: Any) -> int:
        """Return how often a word occurred."""
        if isinstance(word, bytes):
            return self._strings.get(word, 0)
        found = self._counts[self._numbers == word]
        return int(found[0]) if len(found) else 0

    def by_frequency(self, most: int | None = None) -> list[bytes] | list[int]:
        """Return the words, the most frequent first, of equally frequent ones the greater first, as Keras does."""
        if self._strings:
            words: Any = sorted(self._strings, key=lambda word: (self._strings[word], word), reverse=True)
        else:
            words = self._numbers[np.lexsort((self._numbers, self._counts))[::-1]].tolist()
        return words[:most]


class Moments:
    """Mean and variance of each column of a matrix, in float64. NaN does not count."""

    def __init__(self, width: int) -> None:
        self.counts = np.zeros(width)
        self._mean = np.zeros(width)
        self._squares = np.zeros(width)

    def add(self, x: np.ndarray) -> None:
        """Add the rows of a matrix; sums of squares are combined by the distance of the means."""
        there = ~np.isnan(x)
        counts = there.sum(0)
        some = np.maximum(counts, 1)
        numbers = np.where(there, x, 0).astype(np.float64)
        mean = numbers.sum(0) / some
        squares = (np.where(there, numbers - mean, 0) ** 2).sum(0)
        total = self.counts + counts
        share = counts / np.maximum(total, 1)
        distance = mean - self._mean
        self._squares += squares + distance**2 * self.counts * share
        self._mean += np.where(counts > 0, distance * share, 0)
        self.counts = total

    def result(self) -> tuple[list[float], list[float]]:
        """Return means and variances, as of a whole population."""
        return self._mean.tolist(), (self._squares / np.maximum(self.counts, 1)).tolist()


class Quantiles:
    """Approximate quantiles by Keras's algorithm, with equal results."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self.summary = np.zeros((2, 0), np.float32)

    def add(self, x: np.ndarray) -> None:
        """Add numbers; NaN does not count."""
        numbers = np.asarray(x, np.float32).reshape(-1)
        numbers = numbers[~np.isnan(numbers)]
        if numbers.size:
            self.summary = merged(summarized(numbers, self.epsilon), self.summary, self.epsilon)

    def boundaries(self, num_bins: int) -> list[float]:
        """Return the boundaries of ``num_bins`` buckets with about equally many numbers in each."""
        return compressed(self.summary, 1.0 / num_bins)[0, :-1].tolist()


def summarized(values: np.ndarray, epsilon: float) -> np.ndarray:
    """Return a summary, ``[2, n]``: numbers that stand for all values, and how many values each stands for."""
    ordered = np.sort(values.reshape(-1))
    step = max(ordered.size / (1.0 / epsilon), 1)
    kept = ordered[int(step - 1) :: int(step)]
    return np.stack([kept, np.ones_like(kept) * step])


def merged(one: np.ndarray, other: np.ndarray, epsilon: float) -> np.ndarray:
    """Return the summary of the values of two summaries."""
    both = np.concatenate((one, other), axis=1)
    return compressed(np.take(both, np.argsort(both[0]), axis=1), epsilon)


def compressed(summary: np.ndarray, epsilon: float) -> np.ndarray:
    """Return a summary compressed to about ``1 / epsilon`` numbers."""
    if summary.shape[1] * epsilon < 1:
        return summary
    percents = epsilon + np.arange(0.0, 1.0, epsilon)
    totals = summary[1].cumsum()
    shares = totals / totals[-1]
    numbers = np.interp(percents, shares, summary[0])
    ends = np.interp(percents, shares, totals)
    weights = ends - np.concatenate((np.array([0]), ends[:-1]))
    return np.stack((numbers, weights)).astype("float32")
