"""
What float results should be, in higher precision, and how far a good one may be off.

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
    terms: np.ndarray,
    ids: np.ndarray,
    size: int,
    dtype: torch.dtype,
    *,
    sources: np.ndarray | None = None,
    scaled: bool = False,
) -> Reference:
    """
    The sum of the terms of each id.

    Args:
        terms: ``[N, ...]``, exact, as :func:`wide` makes them: already multiplied by weights and divided by counts.
        ids: ``[N]``, in [0, size); negative ones are left out.
        size: the number of rows of the result.
        dtype: of the result.
        sources: ``[N]``, the rows that the terms are copies of, for the wider bound; default: all different.
        scaled: whether the terms were multiplied by something that is rounded too (a mean, weights).
    """
    terms, ids, sources = _kept(terms, ids, sources)
    value, magnitude = (
        np.zeros((size, *terms.shape[1:]), terms.dtype),
        np.zeros((size, *terms.shape[1:]), np.longdouble),
    )
    number, repeats = np.zeros((2, size, *[1] * (terms.ndim - 1)), np.longdouble)
    if len(ids):
        order = np.lexsort((sources, ids)) if sources is not None else np.argsort(ids, kind="stable")
        present, starts, counts = np.unique(ids[order], return_index=True, return_counts=True)
        with np.errstate(invalid="ignore", over="ignore"):
            value[present] = np.add.reduceat(terms[order], starts, axis=0)
            magnitude[present] = np.add.reduceat(np.abs(terms[order]), starts, axis=0)
        number[present] = counts.reshape(-1, *[1] * (terms.ndim - 1))
        if sources is not None:
            repeats[present] = _repeats(ids[order], sources[order], starts).reshape(number[present].shape)
    eps = epsilon(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        factor = eps / 2 * magnitude if scaled else 0
        allowed = eps * np.sqrt(number) * magnitude + factor
        if sources is None:
            return Reference(value, allowed)
        wider = eps * np.sqrt(number * repeats) * magnitude + factor
        return Reference(value, wider if dtype == torch.float64 else allowed, wider)


def _kept(
    terms: np.ndarray, ids: np.ndarray, sources: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    kept = ids >= 0
    return terms[kept], ids[kept], None if sources is None else sources[kept]


def _repeats(ids: np.ndarray, sources: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """How often the most frequent source occurs in each id; both sorted."""
    changes = np.diff(ids, prepend=-1).astype(bool) | np.diff(sources, prepend=-1).astype(bool)
    runs = np.flatnonzero(changes)
    repeats = np.diff(runs, append=len(ids))
    return np.maximum.reduceat(repeats, np.searchsorted(runs, starts))


def products(terms: np.ndarray, ids: np.ndarray, size: int, dtype: torch.dtype) -> Reference:
    """The product of the terms of each id, 1 where there are none; arguments as of :func:`sums`."""
    terms, ids, _ = _kept(terms, ids, None)
    value = np.ones((size, *terms.shape[1:]), terms.dtype)
    number = np.zeros((size, *[1] * (terms.ndim - 1)), np.longdouble)
    if len(ids):
        order = np.argsort(ids, kind="stable")
        present, starts, counts = np.unique(ids[order], return_index=True, return_counts=True)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            value[present] = np.multiply.reduceat(terms[order], starts, axis=0)
        number[present] = counts.reshape(-1, *[1] * (terms.ndim - 1))
    with np.errstate(invalid="ignore", over="ignore"):
        return Reference(value, epsilon(dtype) * number * np.abs(value))


def maxima(terms: np.ndarray, ids: np.ndarray, size: int, empty: float, *, smallest: bool = False) -> Reference:
    """
    The largest (or smallest) term of each id, ``empty`` where there are none; NaN where a term is NaN.

    TensorFlow 2.21 loses NaNs, so that it is not held to them.
    """
    terms, ids, _ = _kept(terms, ids, None)
    value = np.full((size, *terms.shape[1:]), empty, terms.dtype)
    if len(ids):
        order = np.argsort(ids, kind="stable")
        present, starts = np.unique(ids[order], return_index=True)
        reduce = np.minimum if smallest else np.maximum
        with np.errstate(invalid="ignore"):
            value[present] = reduce.reduceat(terms[order], starts, axis=0)
    return Reference(value, np.zeros_like(value), ours_only=np.isnan(value))
