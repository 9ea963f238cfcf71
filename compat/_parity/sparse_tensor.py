"""Of the parity check: ``tf.sparse`` and the raw operators behind it. Ragged tensors are in ragged.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import SparseTensor
from . import draw
from .case import COMPLEX, FLOATS, HALVES, INT64_MAX, INTEGERS, NAN, Case, Operator, Outcome, Reference
from .ragged import RAGGED
from .references import sums, wide

_DTYPES = (*FLOATS, *FLOATS, *INTEGERS, torch.bool, *COMPLEX)
# Our messages name what is wrong inside a SparseTensor, which is no argument of its own.
_INDICES, _SHAPE, _DEFAULT = ("indices",), ("shape",), ("default_value",)

# ---- Drawing --------------------------------------------------------------------------------------------------------


def _values(rng: np.random.Generator, count: int) -> Any:
    """Numbers of any dtype, or strings."""
    if rng.random() < 0.12:
        return draw.strings(rng, count, 12)
    return draw.with_specials(rng, draw.values(rng, (count,), draw.one_of(rng, _DTYPES)))


def _shape(rng: np.random.Generator, rows: int) -> tuple[int, ...]:
    """Rank 1 to 4, with so many rows."""
    return (rows, *(int(rng.integers(1, 40)) for _ in range(int(rng.integers(0, 4)))))


def _drawn(rng: np.random.Generator, elements: int, *, ordered: bool) -> SparseTensor:
    rows = max(draw.size(rng, elements // 4), 1)
    return draw.sparse(rng, _shape(rng, rows), _values(rng, draw.size(rng, elements // 4)), ordered=ordered)


def _default(rng: np.random.Generator, values: Any) -> Any:
    if isinstance(values, np.ndarray):
        return rng.bytes(3)
    return draw.values(rng, (), values.dtype)


def _has_gradient(values: Any) -> bool:
    return isinstance(values, Tensor) and (values.is_floating_point() or values.is_complex())


def _upstream(rng: np.random.Generator, values: Any, size: int) -> Tensor | None:
    return draw.values(rng, (max(size, 1),), values.dtype) if _has_gradient(values) else None


def _case(
    operator: str,
    arguments: dict[str, Any],
    note: str,
    upstream: Tensor | None = None,
    output: str = "",
    gradients: tuple[str, ...] = (),
    names: tuple[str, ...] | None = None,
) -> Case:
    """With gradients where there is an upstream."""
    if upstream is None:
        return Case(operator, arguments, note, names=names)
    return Case(operator, arguments, note, {output: upstream}, gradients, names)


def _as_arguments(operator: str, sp: SparseTensor, words: tuple[str, str, str]) -> dict[str, Any]:
    """A SparseTensor as tf.sparse takes it, or its parts by the raw operator's names."""
    if operator.startswith("sparse."):
        return {"sp_input": sp}
    return dict(zip(words, (sp.indices, sp.values, sp.dense_shape), strict=True))


# ---- Reshape --------------------------------------------------------------------------------------------------------


def _reshape_case(operator: str, sp: SparseTensor, shape: Any, note: str, upstream: Tensor | None = None) -> Case:
    if operator.startswith("raw"):
        arguments = {"input_indices": sp.indices, "input_shape": sp.dense_shape, "new_shape": shape}
        return Case(operator, arguments, note, names=_SHAPE)
    arguments = {"sp_input": sp, "shape": shape}
    return _case(operator, arguments, note, upstream, "output.values", ("sp_input",), _SHAPE)


def _regrouped(rng: np.random.Generator, shape: tuple[int, ...]) -> list[int]:
    """Other sizes of the same product."""
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


def random_reshape(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Sizes regrouped; some indices anywhere; now and then a size too much."""
    sp = _drawn(rng, elements, ordered=bool(rng.random() < 0.5))
    sizes, note = _regrouped(rng, sp.shape), "random"
    if rng.random() < 0.2:
        anywhere = torch.from_numpy(rng.integers(-INT64_MAX, INT64_MAX, tuple(sp.indices.shape)))
        sp, note = SparseTensor(anywhere, sp.values, sp.dense_shape), "indices anywhere"
    if rng.random() < 0.3:
        sizes[int(rng.integers(len(sizes)))] = -1
    if rng.random() < 0.05:
        sizes, note = [*sizes, 2**20 + 7], "too many elements"
    shape = torch.tensor(sizes, dtype=torch.int64)
    return _reshape_case(operator, sp, shape, note, _upstream(rng, sp.values, sp.values.shape[0]))


def _picked_reshape(operator: str) -> list[Case]:
    cases = []

    def add(note: str, indices: list, shape: list[int], new_shape: list[int]) -> None:
        places = torch.tensor(indices, dtype=torch.int64).reshape(len(indices), len(shape))
        sp = SparseTensor(places, torch.arange(float(len(indices))), torch.tensor(shape, dtype=torch.int64))
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
    arguments = {**_as_arguments(operator, sp, _FILL_WORDS), "default_value": default}
    values = "output[0].values"
    if operator.startswith("raw"):
        values = "output_values"
    if "Ragged" in operator:
        arguments["value_rowids"] = arguments.pop("indices")[:, 0]
        arguments["nrows"] = arguments.pop("dense_shape")[0]
    sources = ("sp_input" if operator.startswith("sparse.") else "values", "default_value")
    return _case(operator, arguments, note, upstream, values, sources, _INDICES)


def random_fill(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Rows in order or in any; now and then one outside."""
    sp = _drawn(rng, elements, ordered=bool(rng.random() < 0.5))
    note = "random"
    if rng.random() < 0.05 and sp.indices.shape[0]:
        sp.indices[int(rng.integers(sp.indices.shape[0])), 0] = int(rng.choice(np.array([-1, sp.shape[0], INT64_MAX])))
        note = "a row outside"
    if "Ragged" in operator:
        sp = SparseTensor(sp.indices[:, :1], sp.values, sp.dense_shape[:1])
    return _fill_case(operator, sp, _default(rng, sp.values), note, _upstream(rng, sp.values, 100))


def _picked_fill(operator: str) -> list[Case]:
    cases = []

    def add(note: str, rows: list[int], nrows: int, default: Any = -1.0, values: Any = None) -> None:
        indices = torch.tensor([[row, 9] for row in rows], dtype=torch.int64).reshape(len(rows), 2)
        values = torch.arange(1.0, len(rows) + 1) if values is None else values
        sp = SparseTensor(indices, values, torch.tensor([nrows, 3]))
        if "Ragged" in operator:
            sp = SparseTensor(indices[:, :1], values, torch.tensor([nrows]))
        default = torch.tensor(default) if isinstance(default, float) else default
        upstream = torch.arange(1.0, 4.0) if _has_gradient(values) and isinstance(default, Tensor) else None
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
            SparseTensor([[1]], torch.tensor([5]), [3]),
            torch.tensor([1]),
            "default a vector",
        )
    )
    wrong = _fill_case(operator, SparseTensor([[1]], torch.tensor([5]), [3]), 0.5, "a float for integers")
    return [*cases[:-1], replace(cases[-1], names=_DEFAULT), replace(wrong, names=_DEFAULT)]


def _unfilled(rows: np.ndarray, nrows: int) -> np.ndarray:
    """Where the results hold the default."""
    counts = np.bincount(rows, minlength=nrows)
    begins = np.cumsum(np.maximum(counts, 1)) - np.maximum(counts, 1)
    return begins[counts == 0]


def _total(terms: np.ndarray, dtype: torch.dtype) -> Reference:
    """Of one sum. TensorFlow adds half types up in half precision."""
    total = sums(terms, np.zeros(len(terms), np.int64), 1, dtype)
    return Reference(total.value[0], total.tolerance[0], ours_only=dtype in HALVES)


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
    places = _unfilled(rows.numpy(), nrows)
    return {name: _total(wide(upstream)[places], upstream.dtype)}


def _fill_grad_references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    grad = case.arguments["grad_values"]
    if not _has_gradient(grad) or "d_default_value" not in theirs.values:
        return {}
    rest = np.ones(grad.shape[0], bool)
    rest[case.arguments["reverse_index_map"].numpy()] = False
    return {"d_default_value": _total(wide(grad)[rest], grad.dtype)}


def random_fill_grad(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Positions that repeat; now and then one outside."""
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


# ---- Order ----------------------------------------------------------------------------------------------------------

_ORDER_WORDS = ("input_indices", "input_values", "input_shape")


def _reorder_case(operator: str, sp: SparseTensor, note: str, upstream: Tensor | None = None) -> Case:
    if operator.startswith("raw"):
        return _case(
            operator, _as_arguments(operator, sp, _ORDER_WORDS), note, upstream, "output_values", ("input_values",)
        )
    return _case(operator, {"sp_input": sp}, note, upstream, "output.values", ("sp_input",))


def random_reorder(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Distinct indices, negative ones too: TensorFlow's sort of many is not stable."""
    sp = _drawn(rng, elements // 8, ordered=False)
    places = np.unique(sp.indices.numpy() - int(rng.integers(0, 20)), axis=0)
    places = torch.from_numpy(rng.permutation(places))
    sp = SparseTensor(places, sp.values[: places.shape[0]], sp.dense_shape)
    return _reorder_case(operator, sp, "random", _upstream(rng, sp.values, places.shape[0]))


def _picked_reorder(operator: str) -> list[Case]:
    extremes = [[1, 2], [0, -5], [INT64_MAX, 0], [0, 1], [-INT64_MAX - 1, 3], [0, -5]]
    values = torch.arange(6.0)
    empty = SparseTensor(torch.empty(0, 2).long(), values[:0], [2, 3])
    return [
        _reorder_case(operator, SparseTensor(extremes, values, [2, 3]), "extremes, repeated", values + 1),
        _reorder_case(operator, empty, "empty"),
        _reorder_case(operator, SparseTensor([[5], [3]], ["a", "b"], [2]), "strings"),
    ]


def random_retain(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """A mask of bools or numbers; now and then too long."""
    sp = _drawn(rng, elements, ordered=True)
    count, note = sp.indices.shape[0], "random"
    if rng.random() < 0.05:
        count, note = count + 1, "a mask too long"
    mask = torch.from_numpy(rng.integers(0, 3, count))
    mask = mask.bool() if rng.random() < 0.7 else mask.to(torch.int32)
    arguments = {"sp_input": sp, "to_retain": mask}
    return _case(operator, arguments, note, _upstream(rng, sp.values, 100), "output.values", ("sp_input",))


def _picked_retain(operator: str) -> list[Case]:
    numbers = SparseTensor([[5], [3]], torch.tensor([1.0, 2.0]), [2])
    texts = SparseTensor([[5], [3]], ["a", "b"], [2])
    ones = torch.ones(2)
    return [
        _case(
            operator,
            {"sp_input": numbers, "to_retain": torch.tensor([True, False])},
            "one",
            ones,
            "output.values",
            ("sp_input",),
        ),
        _case(operator, {"sp_input": texts, "to_retain": torch.tensor([0.5, 0.0])}, "floats"),
        _case(operator, {"sp_input": texts, "to_retain": torch.tensor([False, False])}, "none"),
        _case(operator, {"sp_input": texts, "to_retain": torch.tensor([[True, False]])}, "a matrix"),
    ]


# ---- Dense ----------------------------------------------------------------------------------------------------------

_DENSE_WORDS = ("sparse_indices", "sparse_values", "output_shape")


def _dense_case(
    operator: str, sp: SparseTensor, default: Any, validate: bool, note: str, upstream: Tensor | None = None
) -> Case:
    arguments = {**_as_arguments(operator, sp, _DENSE_WORDS), "default_value": default, "validate_indices": validate}
    sources = ("sp_input" if operator.startswith("sparse.") else "sparse_values", "default_value")
    return _case(operator, arguments, note, upstream, "output", sources, _INDICES)


def random_dense(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Sorted and distinct with validation; repeated and in any order without; now and then outside."""
    shape = _regrouped(rng, (max(draw.size(rng, elements), 1),))
    validate = bool(rng.random() < 0.5)
    sp = draw.sparse(rng, tuple(shape), _values(rng, draw.size(rng, elements // 4)), ordered=validate)
    note = "random"
    if validate and rng.random() < 0.9:
        places = torch.from_numpy(np.unique(sp.indices.numpy(), axis=0))
        sp = SparseTensor(places, sp.values[: places.shape[0]], sp.dense_shape)
    if rng.random() < 0.05 and sp.indices.shape[0]:
        sp.indices[-1, -1], note = int(rng.choice(np.array([-1, shape[-1], INT64_MAX]))), "an index outside"
    default = _default(rng, sp.values)
    return _dense_case(operator, sp, default, validate, note, _upstream(rng, sp.values, math.prod(shape)))


def _picked_dense(operator: str) -> list[Case]:
    def case(note: str, places: list, shape: list[int], validate: bool = True) -> Case:
        indices = torch.tensor(places, dtype=torch.int64).reshape(len(places), len(shape))
        sp = SparseTensor(indices, torch.arange(1.0, len(places) + 1), shape)
        names = ("shape",) if note == "too many elements" else _INDICES
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
    texts = SparseTensor([[0, 1], [1, 0]], ["a", "b"], [2, 2])
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


def _dense_references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    """TensorFlow takes the sum of the entries' gradients from the sum of all."""
    name = "gradient of default_value"
    if name not in theirs.values:
        return {}
    upstream = case.upstream_of("output", tuple(theirs.values["output"].shape))
    given = case.arguments.get("sp_input")
    indices = case.arguments["sparse_indices"] if given is None else given.indices
    taken = wide(upstream[tuple(indices.unbind(1))])
    return {name: _total(np.concatenate([wide(upstream).reshape(-1), -taken]), upstream.dtype)}


def random_from_dense(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Half of the elements zeros, -0.0 among them."""
    shape = _regrouped(rng, (max(draw.size(rng, elements), 1),))
    count = math.prod(shape)
    if rng.random() < 0.1:
        return Case(operator, {"tensor": draw.strings(rng, count, 3).reshape(shape)}, "random strings")
    numbers = draw.with_specials(rng, draw.values(rng, (count,), draw.one_of(rng, _DTYPES)))
    keep = torch.from_numpy(rng.integers(0, 2, count)).to(torch.bool)
    zero = torch.tensor(-0.0 if numbers.is_floating_point() and rng.random() < 0.5 else 0).to(numbers.dtype)
    numbers = torch.where(keep, numbers, zero).reshape(shape)
    upstream = _upstream(rng, numbers, 100)
    return _case(operator, {"tensor": numbers}, "random", upstream, "output.values", ("tensor",))


def _picked_from_dense(operator: str) -> list[Case]:
    return [
        Case(operator, {"tensor": torch.tensor([[0.0, -0.0, NAN], [1.0, 2.0, 0.0]])}, "zeros and NaN"),
        Case(operator, {"tensor": torch.tensor([True, False])}, "bools"),
        Case(operator, {"tensor": np.array([b"a", b""], dtype=object)}, "strings"),
        Case(operator, {"tensor": torch.empty(0, 3)}, "empty"),
        Case(operator, {"tensor": torch.tensor(3.0)}, "a scalar"),
    ]


_Draw = Callable[[np.random.Generator, str, int], Case]
_Pick = Callable[[str], list[Case]]
_References = Callable[[Case, Outcome], dict[str, Reference]]


def _operators(names: tuple[str, ...], random: _Draw, picked: _Pick, references: _References | None = None) -> dict:
    more = {} if references is None else {"references": references}
    return {name: Operator(random, picked, **more) for name in names}


OPERATORS: dict[str, Operator] = {
    **_operators(("sparse.reshape", "raw_ops.SparseReshape"), random_reshape, _picked_reshape),
    **_operators(
        ("sparse.fill_empty_rows", "raw_ops.SparseFillEmptyRows", "raw_ops.RaggedFillEmptyRows"),
        random_fill,
        _picked_fill,
        _fill_references,
    ),
    **_operators(
        ("raw_ops.SparseFillEmptyRowsGrad", "raw_ops.RaggedFillEmptyRowsGrad"),
        random_fill_grad,
        _picked_fill_grad,
        _fill_grad_references,
    ),
    **_operators(("sparse.reorder", "raw_ops.SparseReorder"), random_reorder, _picked_reorder),
    **_operators(("sparse.retain",), random_retain, _picked_retain),
    **_operators(("sparse.to_dense", "raw_ops.SparseToDense"), random_dense, _picked_dense, _dense_references),
    **_operators(("sparse.from_dense",), random_from_dense, _picked_from_dense),
    **RAGGED,
}
