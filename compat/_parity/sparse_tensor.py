"""Parity check of ``tf.sparse`` and the raw operators behind it. Ragged tensors are in ragged.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import SparseTensor
from . import draw
from .case import COMPLEX, FLOATS, INT64_MAX, INTEGERS, Case, Operator, Outcome, Reference
from .draw import sparse_of
from .ragged import RAGGED
from .reference.numbers import wide
from .reference.sparse_tensor import sparse_fill_empty_rows, sparse_fill_empty_rows_grad
from .sparse_draw import (
    DEFAULT,
    INDICES,
    SHAPE,
    as_arguments,
    case_of,
    default_for,
    drawn,
    has_gradient,
    regrouped,
    total,
    upstream_for,
)
from .sparse_order import (
    dense_references,
    picked_dense,
    picked_from_dense,
    picked_reorder,
    picked_retain,
    random_dense,
    random_from_dense,
    random_reorder,
    random_retain,
)

# ---- Reshape --------------------------------------------------------------------------------------------------------


def _reshape_case(operator: str, sp: SparseTensor, shape: Any, note: str, upstream: Tensor | None = None) -> Case:
    if operator.startswith("raw"):
        arguments = {"input_indices": sp.indices, "input_shape": sp.dense_shape, "new_shape": shape}
        return Case(operator, arguments, note, names=SHAPE)
    arguments = {"sp_input": sp, "shape": shape}
    return case_of(operator, arguments, note, upstream, "output.values", ("sp_input",), SHAPE)


def random_reshape(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw another shape for the same elements, now and then for more; in some cases indices are anywhere."""
    sp = drawn(rng, elements, ordered=bool(rng.random() < 0.5))
    sizes, note = regrouped(rng, sp.shape), "random"
    if rng.random() < 0.2:
        anywhere = torch.from_numpy(rng.integers(-INT64_MAX, INT64_MAX, tuple(sp.indices.shape)))
        sp, note = sparse_of(anywhere, sp.values, sp.dense_shape), "indices anywhere"
    if rng.random() < 0.3:
        sizes[int(rng.integers(len(sizes)))] = -1
    if rng.random() < 0.05:
        sizes, note = [*sizes, 2**20 + 7], "too many elements"
    shape = torch.tensor(sizes, dtype=torch.int64)
    return _reshape_case(operator, sp, shape, note, upstream_for(rng, sp.values, sp.values.shape[0]))


def _picked_reshape(operator: str) -> list[Case]:
    cases = []

    def add(note: str, indices: list, shape: list[int], new_shape: list[int]) -> None:
        sp = sparse_of(indices, torch.arange(float(len(indices))), torch.tensor(shape, dtype=torch.int64))
        new = torch.tensor(new_shape, dtype=torch.int64)
        cases.append(_reshape_case(operator, sp, new, note, torch.ones(1)))

    inside = [[0, 2], [1, 0]]
    add("two to three dimensions", inside, [2, 3], [3, 1, 2])
    add("inferred", inside, [2, 3], [-1])
    add("inferred, the same", [[5, 7]], [2, 3], [2, -1])
    add("two inferred", inside, [2, 3], [-1, -1])
    add("negative", inside, [2, 3], [-2, 3])
    add("does not divide", inside, [2, 3], [4, -1])
    add("other size", inside, [2, 3], [7])
    add("outside", [[5, 7], [-5, 1], [-1, -1]], [2, 3], [3, 2])
    add("wraps", [[2**62, 2**62], [2**62 + 1, 3]], [2**31, 2**31], [2**10, 2**30, 2**22])
    add("no elements", [], [0, 3], [3, 0])
    add("no elements, inferred", [], [0, 3], [4, -1])
    add("inferred beside 0", [], [0, 3], [4, 0, -1])
    add("entries, no elements", [[0, 0]], [0, 3], [3, 0])
    add("overflow", [], [2**40, 2**40], [2**40, 2**40])
    add("overflow before a 0", [], [2**62, 4, 0], [0])
    add("overflow behind a 0", [], [0, 2**62, 4], [0])
    add("negative shape", [[0, 0]], [-2, -3], [6])
    if operator.startswith("raw"):
        add("to a scalar", [[0]], [1], [])
        add("from a scalar", [[]], [], [1, 1])
        # The Python wrapper of tf.sparse.reshape rounds the number of elements to a float64 (a TensorFlow bug).
        add("inferred, beyond 2^53", [[2**30, 5]], [2**31, 2**31 - 1], [-1])
    return cases


# ---- Empty rows -----------------------------------------------------------------------------------------------------

_FILL_WORDS = ("indices", "values", "dense_shape")


def _fill_case(operator: str, sp: SparseTensor, default: Any, note: str, upstream: Tensor | None = None) -> Case:
    arguments = {**as_arguments(operator, sp, _FILL_WORDS), "default_value": default}
    values = "output[0].values"
    if operator.startswith("raw"):
        values = "output_values"
    if "Ragged" in operator:
        arguments["value_rowids"] = arguments.pop("indices")[:, 0]
        arguments["nrows"] = arguments.pop("dense_shape")[0]
    sources = ("sp_input" if operator.startswith("sparse.") else "values", "default_value")
    return case_of(operator, arguments, note, upstream, values, sources, INDICES)


def random_fill(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw rows, sorted or not, now and then one outside."""
    sp = drawn(rng, elements, ordered=bool(rng.random() < 0.5))
    note = "random"
    if rng.random() < 0.05 and sp.indices.shape[0]:
        sp.indices[int(rng.integers(sp.indices.shape[0])), 0] = int(rng.choice(np.array([-1, sp.shape[0], INT64_MAX])))
        note = "a row outside"
    if "Ragged" in operator:
        sp = sparse_of(sp.indices[:, :1], sp.values, sp.dense_shape[:1])
    return _fill_case(operator, sp, default_for(rng, sp.values), note, upstream_for(rng, sp.values, 100))


def _picked_fill(operator: str) -> list[Case]:
    cases = []

    def add(note: str, rows: list[int], nrows: int, default: Any = -1.0, values: Any = None) -> None:
        indices = torch.tensor([[row, 9] for row in rows], dtype=torch.int64).reshape(len(rows), 2)
        values = torch.arange(1.0, len(rows) + 1) if values is None else values
        sp = sparse_of(indices, values, torch.tensor([nrows, 3]))
        if "Ragged" in operator:
            sp = sparse_of(indices[:, :1], values, torch.tensor([nrows]))
        default = torch.tensor(default) if isinstance(default, float) else default
        upstream = torch.arange(1.0, 4.0) if has_gradient(values) and isinstance(default, Tensor) else None
        case = _fill_case(operator, sp, default, note, upstream)
        cases.append(case if nrows >= 0 else replace(case, names=("num_rows",)))

    add("unordered, repeated", [1, 0, 1], 4)
    add("nothing empty", [0, 1, 2], 3)
    add("all empty", [], 3)
    add("nothing", [], 0)
    add("an entry, no rows", [0], 0)
    add("row too large", [0, 5], 3)
    add("row negative", [0, -5], 3)
    add("no such shape", [], -3)
    add("strings", [1], 3, b"none", np.array([b"a"], dtype=object))
    add("bools", [1], 3, torch.tensor(True), torch.tensor([False]))
    add("default a Python number", [1], 3, 7, torch.tensor([5], dtype=torch.int16))
    cases.append(
        _fill_case(
            operator,
            sparse_of([[1]], torch.tensor([5]), [3]),
            torch.tensor([1]),
            "default a vector",
        )
    )
    wrong = _fill_case(operator, sparse_of([[1]], torch.tensor([5]), [3]), 0.5, "a float for integers")
    return [*cases[:-1], replace(cases[-1], names=DEFAULT), replace(wrong, names=DEFAULT)]


def _fill_references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    name = "gradient of default_value"
    if name not in theirs.values:
        return {}
    arguments = case.arguments
    if "sp_input" in arguments:
        rows, nrows = arguments["sp_input"].indices[:, 0], arguments["sp_input"].shape[0]
    elif "nrows" in arguments:
        rows, nrows = arguments["value_rowids"], int(arguments["nrows"])
    else:
        rows, nrows = arguments["indices"][:, 0], int(arguments["dense_shape"][0])
    (output,) = case.upstream_names
    upstream = case.upstream_of(output, tuple(theirs.values[output].shape))
    entries = rows.numpy()
    reverse = sparse_fill_empty_rows(entries[:, None], entries, nrows, 0)[3]
    return {name: _of_default(reverse, upstream)}


def _of_default(reverse: np.ndarray, grad: Tensor) -> Reference:
    """Return the default's gradient, with its bound."""
    numbers = wide(grad)
    value, magnitude = (sparse_fill_empty_rows_grad(reverse, x)[1] for x in (numbers, np.abs(numbers)))
    return total(value, magnitude, len(numbers) - len(np.unique(reverse)), grad.dtype)


def _fill_grad_references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    grad = case.arguments["grad_values"]
    if not has_gradient(grad) or "d_default_value" not in theirs.values:
        return {}
    return {"d_default_value": _of_default(case.arguments["reverse_index_map"].numpy(), grad)}


def random_fill_grad(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw positions that repeat, now and then one outside."""
    filled = max(draw.size(rng, elements), 1)
    positions = torch.from_numpy(draw.ids(rng, draw.size(rng, filled), filled).astype(np.int64))
    note = "random"
    if rng.random() < 0.05 and positions.shape[0]:
        positions[-1], note = int(rng.choice(np.array([-1, filled, INT64_MAX]))), "a position outside"
    grad = draw.values(rng, (filled,), draw.one_of(rng, (*FLOATS, *INTEGERS, *COMPLEX)))
    return Case(operator, {"reverse_index_map": positions, "grad_values": grad}, note)


def _picked_fill_grad(operator: str) -> list[Case]:
    def case(note: str, positions: list[int], grad: Tensor) -> Case:
        return Case(operator, {"reverse_index_map": torch.tensor(positions).long(), "grad_values": grad}, note)

    return [
        case("repeated", [0, 0, 2], torch.tensor([1.0, 2.0, 4.0, 8.0])),
        case("no entries", [], torch.tensor([1.0, 2.0])),
        case("nothing", [], torch.empty(0)),
        case("wraps", [], torch.tensor([100, 100, 100], dtype=torch.int8)),
        case("too large", [0, 4], torch.ones(4)),
        case("negative", [-1], torch.ones(4)),
        case("bools", [0], torch.tensor([True, False])),
        case("a matrix", [0], torch.ones(2, 2)),
    ]


OPERATORS: dict[str, Operator] = {
    **{name: Operator(random_reshape, _picked_reshape) for name in ("sparse.reshape", "raw_ops.SparseReshape")},
    **{
        name: Operator(random_fill, _picked_fill, _fill_references)
        for name in ("sparse.fill_empty_rows", "raw_ops.SparseFillEmptyRows", "raw_ops.RaggedFillEmptyRows")
    },
    **{
        name: Operator(random_fill_grad, _picked_fill_grad, _fill_grad_references)
        for name in ("raw_ops.SparseFillEmptyRowsGrad", "raw_ops.RaggedFillEmptyRowsGrad")
    },
    **{name: Operator(random_reorder, picked_reorder) for name in ("sparse.reorder", "raw_ops.SparseReorder")},
    "sparse.retain": Operator(random_retain, picked_retain),
    **{
        name: Operator(random_dense, picked_dense, dense_references)
        for name in ("sparse.to_dense", "raw_ops.SparseToDense")
    },
    "sparse.from_dense": Operator(random_from_dense, picked_from_dense),
    **RAGGED,
}
