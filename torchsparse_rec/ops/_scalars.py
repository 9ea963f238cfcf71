"""Numbers that fill up tensors."""

from __future__ import annotations

from torch import Tensor


def scalar_like(argument: str, value: Tensor | float, values: Tensor) -> Tensor:
    """Return a number as a scalar tensor of the dtype of ``values``, and a tensor unchanged. Fractions are not cut."""
    if isinstance(value, Tensor):
        return value
    inexact = values.is_floating_point() or values.is_complex()
    if isinstance(value, float) and not (inexact or value.is_integer()):
        raise ValueError(f"{argument} must be an integer as values are, {values.dtype}, got {value}")
    return values.new_full((), value)
