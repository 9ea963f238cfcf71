"""
Compares the outcomes of a case: integers, strings, shapes, dtypes and order exactly, floats by their distance from a
reference in higher precision.

A float32 or float64 sum of n terms may be off by eps * sqrt(n) * sum|terms|, eps = 2^-23 or 2^-52. Where the same row
is added m times its errors are alike, not independent, and the root is that of n * m. The factor 1 / n or 1 / sqrt(n)
is rounded too, alike for all terms: eps / 2 * sum|terms| more. A float16 or bfloat16 result must be a float32 result of
that quality, rounded once. Both sides are held to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ._cases import FLOATS, Case
from ._evaluate import Outcome


@dataclass
class Verdict:
    """Whether the two sides agree."""

    #: What differs, in words; empty if nothing does.
    mismatches: list[str]
    #: The largest error of our floats, as a fraction of what is allowed.
    our_error: float = 0.0
    #: The same of TensorFlow's.
    their_error: float = 0.0


@dataclass
class _Reference:
    """What a float result should be, and by how much a good one may miss it."""

    value: np.ndarray
    tolerance: np.ndarray


def compare(case: Case, ours: Outcome, theirs: Outcome) -> Verdict:
    """Compare names, dtypes, shapes and values; of two errors only that there are two."""
    if ours.error is not None or theirs.error is not None:
        agree = (ours.error is None) == (theirs.error is None)
        told = f"ours: {ours.error or 'no error'}; TensorFlow: {theirs.error or 'no error'}"
        return Verdict([] if agree else [told[:500]])
    verdict = Verdict([])
    if ours.values.keys() != theirs.values.keys():
        verdict.mismatches.append(f"results {list(ours.values)}, TensorFlow's {list(theirs.values)}")
        return verdict
    references = _references(case, theirs)
    for name, expected in theirs.values.items():
        _compare_values(verdict, case, name, ours.values[name], expected, references.get(name))
    return verdict


def _compare_values(
    verdict: Verdict, case: Case, name: str, mine: object, expected: object, reference: _Reference | None
) -> None:
    if not isinstance(mine, Tensor) or not isinstance(expected, Tensor):
        if mine != expected:
            verdict.mismatches.append(f"{name}: {mine!r:.200}, TensorFlow's {expected!r:.200}")
        return
    if mine.dtype != expected.dtype or mine.shape != expected.shape:
        verdict.mismatches.append(
            f"{name}: {mine.dtype} {list(mine.shape)}, TensorFlow's {expected.dtype} {list(expected.shape)}"
        )
        return
    if reference is None:
        if not _same_bits(mine, expected):
            verdict.mismatches.append(f"{name}: {mine!s:.200}, TensorFlow's {expected!s:.200}")
        return
    our_error = _error(mine, reference)
    verdict.our_error = max(verdict.our_error, our_error)
    if our_error > 1:
        verdict.mismatches.append(f"{name}: error {our_error:.3g} times what is allowed")
    if _is_uninitialised(case, name):
        return
    their_error = _error(expected, reference)
    verdict.their_error = max(verdict.their_error, their_error)
    if their_error > 1:
        verdict.mismatches.append(f"{name}: TensorFlow's error is {their_error:.3g} times what is allowed")


def _is_uninitialised(case: Case, name: str) -> bool:
    """TensorFlow 2.21's dense gradient of empty indices is uninitialised memory; ours is compared to zeros alone."""
    dense = name == "gradient" or case.operator.endswith("Grad")
    return dense and case.arguments["indices"].numel() == 0


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


# ---- References -----------------------------------------------------------------------------------------------------


def _references(case: Case, theirs: Outcome) -> dict[str, _Reference]:
    """The references of a segment operator's float results; nothing for other cases, which are compared bit by bit."""
    values = case.arguments.get("data", case.arguments.get("grad"))
    if case.reduction is None or not isinstance(values, Tensor) or values.dtype not in FLOATS:
        return {}
    indices, segment_ids = (case.arguments[name].numpy() for name in ("indices", "segment_ids"))
    if "data" in case.arguments:
        rows = theirs.values["output"].shape[0]
        result = {"output": _forward(case, values, indices, segment_ids, rows)}
        if case.upstream is not None:
            size = values.shape[0]
            result["gradient"] = _gradient(case, case.upstream, indices, segment_ids, size)
            ids, positions = np.unique(indices, return_inverse=True)
            result["gradient values"] = _gradient(case, case.upstream, positions, segment_ids, len(ids))
        return result
    if case.operator.endswith("V2"):
        ids, positions = np.unique(indices, return_inverse=True)
        return {"output": _gradient(case, values, positions, segment_ids, len(ids))}
    return {"output": _gradient(case, values, indices, segment_ids, case.arguments["output_dim0"])}


def _scale(case: Case, segment_ids: np.ndarray, segments: int) -> np.ndarray:
    """What the sum of each segment is multiplied by."""
    counts = np.maximum(np.bincount(segment_ids, minlength=segments), 1).astype(np.longdouble)
    return {"sum": np.ones_like(counts), "mean": 1 / counts, "sqrt_n": 1 / np.sqrt(counts)}[case.reduction or "sum"]


def _forward(case: Case, data: Tensor, indices: np.ndarray, segment_ids: np.ndarray, segments: int) -> _Reference:
    terms = _wide(data)[indices]
    terms = terms * _scale(case, segment_ids, segments)[segment_ids].reshape(-1, *[1] * (terms.ndim - 1))
    return _sums(terms, indices, segment_ids, segments, _epsilons(case, data.dtype))


def _gradient(case: Case, grad: Tensor, rows: np.ndarray, segment_ids: np.ndarray, size: int) -> _Reference:
    terms = _wide(grad)[segment_ids]
    terms = terms * _scale(case, segment_ids, grad.shape[0])[segment_ids].reshape(-1, *[1] * (terms.ndim - 1))
    return _sums(terms, segment_ids, rows, size, _epsilons(case, grad.dtype))


def _wide(x: Tensor) -> np.ndarray:
    """More precise than float64 where the machine has such a type."""
    return x.to(torch.float64).numpy().astype(np.longdouble)


def _epsilons(case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """What a sum may be off by, relative to sum|terms|: per root of the number of terms, and for the factor."""
    epsilon = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    return epsilon, 0.0 if case.reduction == "sum" else epsilon / 2


def _sums(
    terms: np.ndarray, sources: np.ndarray, ids: np.ndarray, size: int, epsilons: tuple[float, float]
) -> _Reference:
    """The sum of the terms of each id, and its tolerance; ``sources`` are the rows that the terms come from."""
    value, magnitude = np.zeros((2, size, *terms.shape[1:]), np.longdouble)
    independent = np.zeros((size, *[1] * (terms.ndim - 1)), np.longdouble)
    if len(ids):
        order = np.lexsort((sources, ids))
        present, starts, counts = np.unique(ids[order], return_index=True, return_counts=True)
        with np.errstate(invalid="ignore"):
            value[present] = np.add.reduceat(terms[order], starts, axis=0)
            magnitude[present] = np.add.reduceat(np.abs(terms[order]), starts, axis=0)
        changes = np.diff(ids[order], prepend=-1).astype(bool) | np.diff(sources[order], prepend=-1).astype(bool)
        runs = np.flatnonzero(changes)
        repeats = np.diff(runs, append=len(ids))
        most = np.maximum.reduceat(repeats, np.searchsorted(runs, starts))
        independent[present] = (counts * most).reshape(-1, *[1] * (terms.ndim - 1))
    return _Reference(value, (epsilons[0] * np.sqrt(independent) + epsilons[1]) * magnitude)


# ---- Errors ---------------------------------------------------------------------------------------------------------


def _error(result: Tensor, reference: _Reference) -> float:
    """The largest |result - reference|, as a fraction of what is allowed; infinite where NaNs or infinities differ."""
    if result.numel() == 0:
        return 0.0
    value, allowed = reference.value, reference.tolerance
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = _round(value, result.dtype)
        if result.dtype in (torch.float16, torch.bfloat16):
            # The rounding of the ends of the interval in which a good float32 result lies.
            low, high = _round(value - allowed, result.dtype), _round(value + allowed, result.dtype)
            allowed = np.maximum(np.abs(high - value), np.abs(low - value))
        got = _wide(result)
        exact = (got == rounded) | (np.isnan(got) & np.isnan(value))
        distance = np.abs(got - value)
        fraction = np.where(allowed > 0, distance / np.where(allowed > 0, allowed, 1), np.inf)
        # The correctly rounded result is always good, also where it is infinite or far below the normal numbers.
        fraction = np.where(exact, 0, fraction)
    return float(np.nan_to_num(fraction, nan=np.inf).max())


def _round(wide: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Rounded to ``dtype``, half types by way of float32."""
    narrow = torch.from_numpy(np.asarray(wide.astype(np.float64)))
    if dtype in (torch.float16, torch.bfloat16):
        narrow = narrow.to(torch.float32)
    return _wide(narrow.to(dtype))
