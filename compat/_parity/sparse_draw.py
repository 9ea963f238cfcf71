"""Random cases of sparse tensors, in the form that ``tf.sparse`` takes and in the form of the raw operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import SparseTensor
from . import draw
from .bounds import sums
from .case import COMPLEX, FLOATS, HALVES, INTEGERS, Case, Reference

DTYPES = (*FLOATS, *FLOATS, *INTEGERS, torch.bool, *COMPLEX)
# The words of our messages for parts of a SparseTensor, which are not arguments of their own.
INDICES, SHAPE, DEFAULT = ("indices",), ("shape",), ("default_value",)


def any_values(rng: np.random.Generator, count: int) -> Any:
    """Draw numbers of any dtype, or strings."""
    if rng.random() < 0.12:
        return draw.strings(rng, count, 12)
    return draw.with_specials(rng, draw.values(rng, (count,), draw.one_of(rng, DTYPES)))


def shape_of(rng: np.random.Generator, rows: int) -> tuple[int, ...]:
    """Draw a shape of rank 1 to 4 with so many rows."""
    return (rows, *(int(rng.integers(1, 40)) for _ in range(int(rng.integers(0, 4)))))


def drawn(rng: np.random.Generator, elements: int, *, ordered: bool) -> SparseTensor:
    rows = max(draw.size(rng, elements // 4), 1)
    return draw.sparse(rng, shape_of(rng, rows), any_values(rng, draw.size(rng, elements // 4)), ordered=ordered)


def default_for(rng: np.random.Generator, values: Any) -> Any:
    if isinstance(values, np.ndarray):
        return rng.bytes(3)
    return draw.values(rng, (), values.dtype)


def has_gradient(values: Any) -> bool:
    return isinstance(values, Tensor) and (values.is_floating_point() or values.is_complex())


def upstream_for(rng: np.random.Generator, values: Any, size: int) -> Tensor | None:
    return draw.values(rng, (max(size, 1),), values.dtype) if has_gradient(values) else None


def case_of(
    operator: str,
    arguments: dict[str, Any],
    note: str,
    upstream: Tensor | None = None,
    output: str = "",
    gradients: tuple[str, ...] = (),
    names: tuple[str, ...] | None = None,
) -> Case:
    """Return a case, with gradients if there is an upstream."""
    if upstream is None:
        return Case(operator, arguments, note, names=names)
    return Case(operator, arguments, note, {output: upstream}, gradients, names)


def as_arguments(operator: str, sp: SparseTensor, words: tuple[str, str, str]) -> dict[str, Any]:
    """Return a SparseTensor as an argument of ``tf.sparse``, or its parts under the raw operator's names."""
    if operator.startswith("sparse."):
        return {"sp_input": sp}
    return dict(zip(words, (sp.indices, sp.values, sp.dense_shape), strict=True))


def regrouped(rng: np.random.Generator, shape: tuple[int, ...]) -> list[int]:
    """Draw other sizes with the same product."""
    factors = []
    for size in shape:
        for prime in (2, 3, 5, 7):
            while size % prime == 0 and size > 1:
                factors.append(prime)
                size //= prime
        factors.append(size)
    sizes = [1] * int(rng.integers(1, 6))
    for factor in factors:
        sizes[int(rng.integers(len(sizes)))] *= factor
    return sizes


def total(value: np.ndarray, magnitude: np.ndarray, count: int, dtype: torch.dtype) -> Reference:
    """Return the bounds of one sum of so many terms; TensorFlow adds half types up in half precision."""
    total = sums(value.reshape(1), magnitude.reshape(1), np.zeros(count, np.int64), dtype)
    return Reference(total.value[0], total.tolerance[0], ours_only=dtype in HALVES)
