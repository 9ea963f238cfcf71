"""
Numbers in high precision, with bounds on how far the same calculation in a float dtype may be off.

Every operation may round once (roots and powers a few times: TensorFlow approximates them) and passes on the errors of
its operands, to first order. If an error is no longer small beside its number, the bound is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import numpy as np

#: The number of roundings allowed for a root or a power, which Eigen's vectorised ones need.
_ROUNDINGS_OF_ROOTS = 4


@dataclass(frozen=True)
class Precision:
    """The precision of a float dtype."""

    #: The largest relative error of a rounding.
    unit: float
    #: The largest absolute error of a result that is too small for the dtype.
    smallest: float


@dataclass(frozen=True)
class Rounded:
    """Values, bounds on their errors, and the precision of operations with them."""

    value: np.ndarray
    error: np.ndarray
    precision: Precision

    @classmethod
    def exact(cls, value: np.ndarray, precision: Precision) -> Rounded:
        """Return numbers without an error so far."""
        return cls(value, np.zeros_like(value), precision)

    def like(self, number: float) -> Rounded:
        """Return ``number`` in every place."""
        return Rounded.exact(np.full_like(self.value, number), self.precision)

    def __getitem__(self, rows: np.ndarray) -> Rounded:
        return Rounded(self.value[rows], self.error[rows], self.precision)

    def __setitem__(self, rows: np.ndarray, other: Rounded) -> None:
        self.value[rows], self.error[rows] = other.value, other.error

    def _result(self, value: np.ndarray, error: np.ndarray, roundings: int = 1) -> Rounded:
        rounding = roundings * (self.precision.unit * np.abs(value) + self.precision.smallest)
        # An infinite bound times zero is NaN.
        return Rounded(value, np.where(np.isnan(error), np.inf, error + rounding), self.precision)

    def _operand(self, other: Operand) -> Rounded:
        if isinstance(other, Rounded):
            return other
        return Rounded(np.longdouble(other), np.longdouble(0), self.precision)

    def __add__(self, other: Operand) -> Rounded:
        other = self._operand(other)
        return self._result(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Operand) -> Rounded:
        other = self._operand(other)
        return self._result(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Operand) -> Rounded:
        other = self._operand(other)
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error + self.error * other.error
        return self._result(self.value * other.value, error)

    def __truediv__(self, other: Operand) -> Rounded:
        other = self._operand(other)
        value = self.value / other.value
        left = np.abs(other.value) - other.error
        error = (self.error + np.abs(value) * other.error) / np.where(left > 0, left, np.nan)
        return self._result(value, np.where(left > 0, error, np.inf))

    def __neg__(self) -> Rounded:
        return Rounded(-self.value, self.error, self.precision)

    def __pow__(self, exponent: float) -> Rounded:
        """Return a power of numbers that are not negative."""
        value = self.value ** np.longdouble(exponent)
        # The slope is largest at the end of the interval.
        low = np.maximum(self.value - self.error, 0)
        steepest = low if exponent < 1 else self.value + self.error
        slope = np.abs(exponent) * steepest ** np.longdouble(exponent - 1) if exponent else np.zeros_like(value)
        error = np.where(self.error > 0, slope * self.error, 0)
        return self._result(value, error, _ROUNDINGS_OF_ROOTS)

    def shrunk(self, by: Operand) -> Rounded:
        """Move the numbers towards zero, but not beyond."""
        by = self._operand(by)
        size = np.abs(self.value) - by.value
        value = np.sign(self.value) * np.where(size <= 0, 0, size)
        return self._result(value, self.error + by.error)

    def clamp(self, low: float, high: float) -> Rounded:
        return Rounded(np.clip(self.value, low, high), self.error, self.precision)


Operand = Union[Rounded, float, np.longdouble]  # noqa: UP007  (Python 3.10 evaluates it)
