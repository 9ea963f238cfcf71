"""Random sizes, dtypes, shapes, ids, numbers and strings for the cases of all families; small fixed data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import SparseTensor
from .case import INF, INTEGERS, NAN


def size(rng: np.random.Generator, limit: int) -> int:
    """Draw a size from 0 to ``limit``, each magnitude as likely as the next."""
    return 0 if rng.random() < 0.06 else int(np.exp(rng.uniform(0, np.log(max(limit, 1) + 0.5))))


def one_of(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    """Draw one of the choices, each as likely as the next."""
    return choices[int(rng.integers(len(choices)))]


def index_dtype(rng: np.random.Generator) -> torch.dtype:
    """Draw int32 or int64."""
    return torch.int32 if rng.random() < 0.5 else torch.int64


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw floats or complex numbers of a random magnitude, integers of the whole range (sums wrap), or bools."""
    if dtype == torch.bool:
        return torch.from_numpy(np.asarray(rng.integers(0, 2, shape))).to(dtype)
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        numbers = rng.integers(info.min, info.max, shape, dtype=str(dtype).removeprefix("torch."), endpoint=True)
        return torch.from_numpy(np.asarray(numbers))
    scale = 10.0 ** rng.uniform(-2, 2)
    if dtype.is_complex:
        parts = rng.standard_normal((2, *shape)) * scale
        return torch.from_numpy(np.asarray(parts[0] + 1j * parts[1])).to(dtype)
    return torch.from_numpy(np.asarray(rng.standard_normal(shape) * scale)).to(dtype)


def with_specials(rng: np.random.Generator, numbers: Tensor) -> Tensor:
    """Return the same floats, in one of ten cases with a few infinities and NaNs among them."""
    if numbers.numel() and numbers.is_floating_point() and rng.random() < 0.1:
        numbers = numbers.clone()
        for special in rng.choice(np.array([INF, -INF, NAN]), 3):
            numbers.view(-1)[int(rng.integers(numbers.numel()))] = float(special)
    return numbers


def ids(rng: np.random.Generator, count: int, bound: int) -> np.ndarray:
    """Draw ``count`` ids in [0, bound): uniform, skewed so that few repeat often, or all at the two ends."""
    kind = rng.random()
    if kind < 0.5:
        return rng.integers(0, bound, count)
    if kind < 0.9:
        return (bound * rng.random(count) ** 6).astype(np.int64)
    return rng.choice(np.array([0, bound - 1]), count)


def inner_shape(rng: np.random.Generator) -> tuple[int, ...]:
    """Draw the dimensions after the first, of rank 0 to 3."""
    if rng.random() < 0.03:
        return (3, 0)
    rank = int(rng.integers(0, 4))
    return tuple(int(rng.integers(1, limit)) for limit in ((), (65,), (17, 9), (9, 5, 4))[rank])


def rows_limit(elements: int, inner: tuple[int, ...]) -> int:
    """Return how many rows of that inner shape have up to ``elements`` numbers."""
    return max(elements // max(int(np.prod(inner)), 1), 1)


def strings(rng: np.random.Generator, count: int, longest: int, distinct: int | None = None) -> np.ndarray:
    """Draw ``count`` byte strings shorter than ``longest``, of ``distinct`` different ones, as an array of objects."""
    words = [rng.bytes(int(length)) for length in rng.integers(0, longest, count if distinct is None else distinct)]
    result = np.empty(count, dtype=object)
    result[:] = words if distinct is None else [words[i] for i in ids(rng, count, distinct)]
    return result


def sparse(rng: np.random.Generator, shape: tuple[int, ...], numbers: Any, *, ordered: bool = True) -> SparseTensor:
    """Draw a SparseTensor with these values at random places, which may repeat, in row-major or in any order."""
    count = numbers.shape[0]
    columns = [ids(rng, count, max(bound, 1)) for bound in shape]
    if ordered and count:
        order = np.lexsort(columns[::-1])
        columns = [column[order] for column in columns]
    indices = torch.from_numpy(np.stack(columns, axis=1).astype(np.int64).reshape(count, len(shape)))
    return SparseTensor(indices, numbers, torch.tensor(shape, dtype=torch.int64))


# ---- Of hand-picked cases -------------------------------------------------------------------------------------------


def sparse_of(indices: Any, values: Any, dense_shape: Any) -> SparseTensor:
    """Make a SparseTensor of parts that may be anything its constructor takes, and indices an empty list too."""
    if isinstance(indices, list):
        indices = torch.tensor(indices, dtype=torch.int64).reshape(len(indices), len(dense_shape))
    return SparseTensor(indices, values, dense_shape)


def data(rows: int, columns: int = 3) -> Tensor:
    """Return a matrix of quarters, so that products and sums of few are exact."""
    return (torch.arange(rows * columns, dtype=torch.float32) / 4 - 2).reshape(rows, columns)


def ints(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return a vector of these integers."""
    return torch.tensor(numbers, dtype=dtype)
