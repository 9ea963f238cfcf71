"""
Comparison of the two outcomes of a case.

Integers, strings, shapes, dtypes and order are compared exactly. Floats are compared by their distance from a reference
in higher precision if the operator has one, else bit by bit. The module bounds.py has the distances allowed. If both
calls fail, our message must name the fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import IndexedSlices
from . import OPERATORS
from .case import HALVES, Case, Outcome, Reference
from .convert import dense
from .reference.numbers import narrow, wide


@dataclass
class Verdict:
    """Whether the two sides agree."""

    #: What differs, in words; empty if nothing does.
    mismatches: list[str]
    #: The largest error of our floats, as a fraction of the allowed one.
    our_error: float = 0.0
    #: The largest error of TensorFlow's floats, as a fraction of the allowed one.
    their_error: float = 0.0


def compare(case: Case, ours: Outcome, theirs: Outcome) -> Verdict:
    """Compare names, dtypes, shapes and values; if both sides fail, check that our message names the fault."""
    if ours.error is not None or theirs.error is not None:
        return Verdict(_compare_errors(case, ours.error, theirs.error))
    verdict = Verdict([])
    if ours.values.keys() != theirs.values.keys():
        verdict.mismatches.append(f"results {list(ours.values)}, TensorFlow's {list(theirs.values)}")
        return verdict
    references = OPERATORS[case.operator].references(case, theirs)
    for name, expected in theirs.values.items():
        _compare_values(verdict, name, ours.values[name], expected, references.get(name))
    return verdict


def _compare_errors(case: Case, ours: str | None, theirs: str | None) -> list[str]:
    if ours is None or theirs is None:
        return [f"ours: {ours or 'no error'}; TensorFlow: {theirs or 'no error'}"[:500]]
    words = re.findall(r"\w+", ours)
    if case.names is None:
        named = any(name in words for name in case.arguments)
        return [] if named else [f"the error names none of {list(case.arguments)}: {ours:.300}"]
    return [f"the error does not say {text!r}: {ours:.300}" for text in case.names if text not in ours]


def _compare_values(verdict: Verdict, name: str, mine: Any, expected: Any, reference: Reference | None) -> None:
    if isinstance(mine, IndexedSlices) and isinstance(expected, IndexedSlices):
        _compare_values(verdict, f"{name} (rows)", mine.indices, expected.indices, None)
        if verdict.mismatches:
            return
        reference = None if reference is None else _rows(reference, expected.indices.numpy())
        mine, expected = mine.values, expected.values
    mine, expected = (dense(x) if isinstance(x, IndexedSlices) else x for x in (mine, expected))
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
    their_tolerance = _either(reference.their_tolerance, reference.tolerance)
    # If ours is TensorFlow's very number, it may be off as far as TensorFlow's may.
    our_tolerance = np.where((mine == expected).numpy(), their_tolerance, reference.tolerance)
    our_error = float(_errors(mine, reference.value, our_tolerance).max(initial=0))
    theirs = _errors(expected, reference.value, their_tolerance)
    their_error = float(np.where(reference.ours_only, 0, theirs).max(initial=0))
    verdict.our_error = max(verdict.our_error, our_error)
    verdict.their_error = max(verdict.their_error, their_error)
    if our_error > 1:
        verdict.mismatches.append(f"{name}: error {our_error:.3g} times what is allowed")
    if their_error > 1:
        verdict.mismatches.append(f"{name}: TensorFlow's error is {their_error:.3g} times what is allowed")


def _either(first: np.ndarray | None, second: np.ndarray) -> np.ndarray:
    return second if first is None else first


def _rows(reference: Reference, rows: np.ndarray) -> Reference:
    """Return the given rows of the reference of a dense gradient."""
    theirs, only = reference.their_tolerance, reference.ours_only
    return Reference(
        reference.value[rows],
        reference.tolerance[rows],
        None if theirs is None else theirs[rows],
        only[rows] if isinstance(only, np.ndarray) else only,
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _errors(result: Tensor, value: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Return each |result - value| as a fraction of the allowed one; infinite where NaNs or infinities differ."""
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = _round(value, result.dtype)
        if result.dtype in HALVES:
            # A half result may be anything to which the interval of good float32 results is rounded.
            low, high = _round(value - allowed, result.dtype), _round(value + allowed, result.dtype)
            allowed = np.maximum(np.abs(high - value), np.abs(low - value))
        got = wide(result)
        exact = (got == rounded) | (np.isnan(got) & np.isnan(value))
        distance = np.abs(got - value)
        fraction = np.where(allowed > 0, distance / np.where(allowed > 0, allowed, 1), np.inf)
        # The correctly rounded result is always good, also where it is infinite or far below the normal numbers.
        fraction = np.where(exact, 0, fraction)
    return np.nan_to_num(fraction, nan=np.inf)


def _round(exact: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round exact numbers to the numbers of this dtype."""
    return wide(narrow(exact, dtype)) if dtype.is_floating_point or dtype.is_complex else exact
