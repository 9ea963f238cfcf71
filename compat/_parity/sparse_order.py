"""Parity check of the order of a sparse tensor's entries, and of dense tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import SparseTensor
from . import draw
from .case import INT64_MAX, NAN, Case, Outcome, Reference
from .draw import sparse_of
from .reference.numbers import wide
from .sparse_draw import (
    DTYPES,
    INDICES,
    any_values,
    as_arguments,
    case_of,
    default_for,
    drawn,
    regrouped,
    total,
    upstream_for,
)

# ---- Order ----------------------------------------------------------------------------------------------------------

_ORDER_WORDS = ("input_indices", "input_values", "input_shape")


def _reorder_case(operator: str, sp: SparseTensor, note: str, upstream: Tensor | None = None) -> Case:
    if operator.startswith("raw"):
        return case_of(
            operator, as_arguments(operator, sp, _ORDER_WORDS), note, upstream, "output_values", ("input_values",)
        )
    return case_of(operator, {"sp_input": sp}, note, upstream, "output.values", ("sp_input",))


def random_reorder(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw distinct indices, also negative: TensorFlow's sort of many entries is not stable."""
    sp = drawn(rng, elements // 8, ordered=False)
    places = np.unique(sp.indices.numpy() - int(rng.integers(0, 20)), axis=0)
    sp = sparse_of(rng.permutation(places), sp.values[: places.shape[0]], sp.dense_shape)
    return _reorder_case(operator, sp, "random", upstream_for(rng, sp.values, places.shape[0]))


def picked_reorder(operator: str) -> list[Case]:
    extremes = [[1, 2], [0, -5], [INT64_MAX, 0], [0, 1], [-INT64_MAX - 1, 3], [0, -5]]
    values = torch.arange(6.0)
    empty = sparse_of(torch.empty(0, 2).long(), values[:0], [2, 3])
    wrong = {"sp_input": values}
    if operator.startswith("raw"):
        wrong = {"input_indices": torch.ones(3, 2).long(), "input_values": values, "input_shape": torch.tensor([2, 3])}
    return [
        _reorder_case(operator, sparse_of(extremes, values, [2, 3]), "extremes, repeated", values + 1),
        _reorder_case(operator, empty, "empty"),
        _reorder_case(operator, sparse_of([[5], [3]], ["a", "b"], [2]), "strings"),
        Case(operator, wrong, "parts that do not fit"),
    ]


def random_retain(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw a mask of bools or numbers, now and then too long."""
    sp = drawn(rng, elements, ordered=True)
    count, note = sp.indices.shape[0], "random"
    if rng.random() < 0.05:
        count, note = count + 1, "a mask too long"
    mask = torch.from_numpy(rng.integers(0, 3, count))
    mask = mask.bool() if rng.random() < 0.7 else mask.to(torch.int32)
    arguments = {"sp_input": sp, "to_retain": mask}
    return case_of(operator, arguments, note, upstream_for(rng, sp.values, 100), "output.values", ("sp_input",))


def picked_retain(operator: str) -> list[Case]:
    numbers = sparse_of([[5], [3]], torch.tensor([1.0, 2.0]), [2])
    texts = sparse_of([[5], [3]], ["a", "b"], [2])
    ones = torch.ones(2)
    return [
        case_of(
            operator,
            {"sp_input": numbers, "to_retain": torch.tensor([True, False])},
            "one",
            ones,
            "output.values",
            ("sp_input",),
        ),
        case_of(operator, {"sp_input": texts, "to_retain": torch.tensor([0.5, 0.0])}, "floats"),
        case_of(operator, {"sp_input": texts, "to_retain": torch.tensor([False, False])}, "none"),
        case_of(operator, {"sp_input": texts, "to_retain": torch.tensor([[True, False]])}, "a matrix"),
    ]


# ---- Dense ----------------------------------------------------------------------------------------------------------

_DENSE_WORDS = ("sparse_indices", "sparse_values", "output_shape")


def _dense_case(
    operator: str, sp: SparseTensor, default: Any, validate: bool, note: str, upstream: Tensor | None = None
) -> Case:
    arguments = {**as_arguments(operator, sp, _DENSE_WORDS), "default_value": default, "validate_indices": validate}
    sources = ("sp_input" if operator.startswith("sparse.") else "sparse_values", "default_value")
    return case_of(operator, arguments, note, upstream, "output", sources, INDICES)


def random_dense(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw sorted, distinct indices with validation, else repeated ones in any order; now and then one is outside."""
    shape = regrouped(rng, (max(draw.size(rng, elements), 1),))
    validate = bool(rng.random() < 0.5)
    sp = draw.sparse(rng, tuple(shape), any_values(rng, draw.size(rng, elements // 4)), ordered=validate)
    note = "random"
    if validate and rng.random() < 0.9:
        places = torch.from_numpy(np.unique(sp.indices.numpy(), axis=0))
        sp = sparse_of(places, sp.values[: places.shape[0]], sp.dense_shape)
    if rng.random() < 0.05 and sp.indices.shape[0]:
        sp.indices[-1, -1], note = int(rng.choice(np.array([-1, shape[-1], INT64_MAX]))), "an index outside"
    default = default_for(rng, sp.values)
    return _dense_case(operator, sp, default, validate, note, upstream_for(rng, sp.values, math.prod(shape)))


def picked_dense(operator: str) -> list[Case]:
    def case(note: str, places: list, shape: list[int], validate: bool = True) -> Case:
        sp = sparse_of(places, torch.arange(1.0, len(places) + 1), shape)
        names = ("shape",) if note == "too many elements" else INDICES
        made = _dense_case(operator, sp, torch.tensor(0.5), validate, note, torch.arange(1.0, 6.0))
        return replace(made, names=names)

    cases = [
        case("sorted", [[0, 1], [1, 0]], [2, 2]),
        case("repeated", [[0, 1], [0, 1]], [2, 2]),
        case("unsorted", [[0, 1], [0, 0]], [2, 2]),
        case("unsorted and outside", [[1, 0], [0, 5]], [2, 2]),
        case("outside", [[0, 1], [0, 2]], [2, 2]),
        case("outside, unchecked", [[0, 1], [0, -1]], [2, 2], False),
        case("repeated, unchecked", [[1, 1], [0, 1], [1, 1]], [2, 2], False),
        case("empty", [], [2, 3]),
        case("no elements", [], [0, 3]),
        case("an entry, no elements", [[0, 0]], [0, 3]),
        case("too many elements", [], [2**40, 2**40]),
    ]
    texts = sparse_of([[0, 1], [1, 0]], ["a", "b"], [2, 2])
    cases.append(_dense_case(operator, texts, b"-", True, "strings"))
    if operator.startswith("raw"):
        for note, places, values in (
            ("a vector of indices", torch.tensor([1, 3]), torch.tensor([1.0, 2.0])),
            ("one value", torch.tensor([1, 3]), torch.tensor(7.0)),
            ("one index", torch.tensor(2), torch.tensor(7.0)),
            ("one index, a vector of values", torch.tensor(2), torch.tensor([7.0])),
            ("too many values", torch.tensor([1, 2]), torch.tensor([7.0, 8.0, 9.0])),
        ):
            shape = torch.tensor([4])
            arguments = dict(zip(_DENSE_WORDS, (places, values, shape), strict=True))
            cases.append(Case(operator, {**arguments, "default_value": torch.tensor(0.0)}, note, names=("values",)))
    return cases


def dense_references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    """Return bounds: TensorFlow subtracts the sum of the entries' gradients from the sum of all."""
    name = "gradient of default_value"
    if name not in theirs.values:
        return {}
    upstream = case.upstream_of("output", tuple(theirs.values["output"].shape))
    given = case.arguments.get("sp_input")
    indices = case.arguments["sparse_indices"] if given is None else given.indices
    numbers = wide(upstream)
    terms = np.concatenate([numbers.reshape(-1), -numbers[tuple(indices.numpy().T)]])
    with np.errstate(all="ignore"):
        return {name: total(terms.sum(), np.abs(terms).sum(), len(terms), upstream.dtype)}


def random_from_dense(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw a tensor whose elements are zero in half of the places, -0.0 among them."""
    shape = regrouped(rng, (max(draw.size(rng, elements), 1),))
    count = math.prod(shape)
    if rng.random() < 0.1:
        return Case(operator, {"tensor": draw.strings(rng, count, 3).reshape(shape)}, "random strings")
    numbers = draw.with_specials(rng, draw.values(rng, (count,), draw.one_of(rng, DTYPES)))
    keep = torch.from_numpy(rng.integers(0, 2, count)).to(torch.bool)
    zero = torch.tensor(-0.0 if numbers.is_floating_point() and rng.random() < 0.5 else 0).to(numbers.dtype)
    numbers = torch.where(keep, numbers, zero).reshape(shape)
    upstream = upstream_for(rng, numbers, 100)
    return case_of(operator, {"tensor": numbers}, "random", upstream, "output.values", ("tensor",))


def picked_from_dense(operator: str) -> list[Case]:
    return [
        Case(operator, {"tensor": torch.tensor([[0.0, -0.0, NAN], [1.0, 2.0, 0.0]])}, "zeros and NaN"),
        Case(operator, {"tensor": torch.tensor([True, False])}, "bools"),
        Case(operator, {"tensor": np.array([b"a", b""], dtype=object)}, "strings"),
        Case(operator, {"tensor": torch.empty(0, 3)}, "empty"),
        Case(operator, {"tensor": torch.tensor(3.0)}, "a scalar"),
    ]
