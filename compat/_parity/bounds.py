"""
How far a good float result may be off what it should be: what reference/ says, in higher precision.

A sum of n terms may be off by eps * sqrt(n) * sum|terms|, eps = 2^-23 (2^-52 for float64); a product by n * eps of
itself; a maximum not at all. A float16 or bfloat16 result is held to what a float32 result may be, rounded once.

Two things make that bound of sums wider. The factor of a mean is rounded too, alike for all terms: eps / 2 *
sum|terms| more. And where the same row is added m times its errors are alike, not independent: the root is that of
n * m, for TensorFlow, and for our sums of float64, which are not added in blocks.
"""

from __future__ import annotations

import numpy as np
import torch

from .case import Reference


def epsilon(dtype: torch.dtype) -> float:
    """The relative precision that a result of this dtype is held to."""
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
    Sums of terms.

    Args:
        value: ``[S, ...]``, the sums.
        magnitude: the same of the terms' absolute values.
        ids: ``[N]``, the sum that each term is part of; negative: of none.
        dtype: of the result.
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
    """How many terms each result has, beside its elements."""
    counts = np.bincount(ids[ids >= 0], minlength=len(value)).astype(np.longdouble)
    return counts.reshape(-1, *[1] * (value.ndim - 1))


def _repeats(ids: np.ndarray, sources: np.ndarray, rank: int) -> np.ndarray:
    """How often the most frequent source occurs in each id; both sorted."""
    changes = np.diff(ids, prepend=-1).astype(bool) | np.diff(sources, prepend=-1).astype(bool)
    runs = np.flatnonzero(changes)
    repeats = np.diff(runs, append=len(ids))
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    return np.maximum.reduceat(repeats, np.searchsorted(runs, starts)).reshape(-1, *[1] * (rank - 1))


def products(value: np.ndarray, ids: np.ndarray, dtype: torch.dtype) -> Reference:
    """The product of the terms of each id; arguments as of :func:`sums`."""
    with np.errstate(invalid="ignore", over="ignore"):
        return Reference(value, epsilon(dtype) * _numbers(ids, value) * np.abs(value))


def extremes(value: np.ndarray) -> Reference:
    """The largest or smallest term of each id. TensorFlow 2.21 loses NaNs, so that it is not held to them."""
    return Reference(value, np.zeros_like(value), ours_only=np.isnan(value))
