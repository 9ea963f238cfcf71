"""
Bounds on the error of a good float result, against the result in higher precision that reference/ computes.

A sum of n terms may be off by eps * sqrt(n) * sum|terms|, eps = 2^-23 (2^-52 for float64). A product may be off by n *
eps of itself, a maximum not at all. A float16 or bfloat16 result is held to the bound of a float32 result, rounded
once.

Two things make the bound of sums wider. The factor of a mean is rounded too, in the same way for all terms: this adds
eps / 2 * sum|terms|. And if the same row is added m times, its errors are equal, not independent. So the bound has the
root of n * m, for TensorFlow and for our sums of float64, which are not added in blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .case import Outcome, Reference
from .reference.numbers import wide


def epsilon(dtype: torch.dtype) -> float:
    """Return the relative precision that a result of this dtype must have."""
    return 2.0**-52 if dtype in (torch.float64, torch.complex128) else 2.0**-23


def sums(
    value: np.ndarray,
    magnitude: np.ndarray,
    ids: np.ndarray,
    dtype: torch.dtype,
    *,
    sources: np.ndarray | None = None,
    scaled: bool = False,
) -> Reference:
    """
    Return sums of terms with the bounds of their errors.

    Args:
        value: ``[S, ...]``, the sums.
        magnitude: ``[S, ...]``, the sums of the terms' absolute values.
        ids: ``[N]``, the sum that each term is part of; negative: part of none.
        dtype: the dtype of the result.
        sources: ``[N]``, the rows that the terms are copies of, for the wider bound; default: all different.
        scaled: whether the terms were multiplied by something that is rounded too (a mean, weights).
    """
    eps, number = epsilon(dtype), _numbers(ids, value)
    with np.errstate(invalid="ignore", over="ignore"):
        factor = eps / 2 * magnitude if scaled else 0
        allowed = eps * np.sqrt(number) * magnitude + factor
        if sources is None:
            return Reference(value, allowed)
        repeats = np.zeros_like(number)
        kept = ids >= 0
        if kept.any():
            order = np.lexsort((sources[kept], ids[kept]))
            repeats[np.unique(ids[kept]), ...] = _repeats(ids[kept][order], sources[kept][order], number.ndim)
        wider = eps * np.sqrt(number * repeats) * magnitude + factor
        return Reference(value, wider if dtype == torch.float64 else allowed, wider)


def _numbers(ids: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return how many terms each sum has, in a shape that broadcasts over its elements."""
    counts = np.bincount(ids[ids >= 0], minlength=len(value)).astype(np.longdouble)
    return counts.reshape(-1, *[1] * (value.ndim - 1))


def _repeats(ids: np.ndarray, sources: np.ndarray, rank: int) -> np.ndarray:
    """Return how often the most frequent source occurs in each id's terms; ids and sources are sorted."""
    changes = np.diff(ids, prepend=-1).astype(bool) | np.diff(sources, prepend=-1).astype(bool)
    runs = np.flatnonzero(changes)
    repeats = np.diff(runs, append=len(ids))
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    return np.maximum.reduceat(repeats, np.searchsorted(runs, starts)).reshape(-1, *[1] * (rank - 1))


def products(value: np.ndarray, ids: np.ndarray, dtype: torch.dtype) -> Reference:
    """Return the product of the terms of each id with its bound; the arguments are as in :func:`sums`."""
    with np.errstate(invalid="ignore", over="ignore"):
        return Reference(value, epsilon(dtype) * _numbers(ids, value) * np.abs(value))


def near(theirs: Outcome, relative: float, absolute: float, rounded: Callable[[str], bool]) -> dict[str, Reference]:
    """Return TensorFlow's own floats, which NaNs of any bits meet; those in ``rounded`` may be a little off."""
    return {
        name: Reference(wide(x), relative * np.abs(wide(x)) + absolute if rounded(name) else np.zeros(x.shape))
        for name, x in theirs.values.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }


def extremes(value: np.ndarray) -> Reference:
    """Return the largest or smallest term of each id; TensorFlow 2.21 loses NaNs, so only ours are compared there."""
    return Reference(value, np.zeros_like(value), ours_only=np.isnan(value))
