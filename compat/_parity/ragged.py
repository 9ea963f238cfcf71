"""Parity check of ``tf.RaggedTensor``'s factories and methods. A method's receiver is its argument ``self``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import RaggedTensor
from . import draw
from .case import FLOATS, INTEGERS, Case, Operator
from .draw import ints, sparse_of

_LIMIT = 200_000
_METHODS = (
    "row_lengths",
    "nrows",
    "value_rowids",
    "row_starts",
    "row_limits",
    "bounding_shape",
    "to_tensor",
    "to_sparse",
)


# Arguments that methods refuse; methods without an entry are given an argument that they do not have.
_WRONG: dict[str, dict[str, Any]] = {"row_lengths": {"axis": 2}, "to_tensor": {"shape": [2]}}


def _lengths(rng: np.random.Generator, elements: int) -> np.ndarray:
    """Draw row lengths; in one case of two half of them are 0."""
    rows = draw.size(rng, min(elements, _LIMIT) // 8)
    lengths = rng.integers(0, int(rng.integers(1, 9)), rows)
    return lengths * rng.integers(0, 2, rows) if rng.random() < 0.5 else lengths


def _splits(lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def _ragged(rng: np.random.Generator, elements: int) -> RaggedTensor:
    """Draw a ragged tensor of one or two levels, of values of any dtype, strings, or short vectors."""
    lengths = _lengths(rng, elements)
    count = int(lengths.sum())
    inner: Any
    if rng.random() < 0.3:
        deep = rng.integers(0, 4, count)
        inner = RaggedTensor(draw.values(rng, (int(deep.sum()),), torch.float32), _splits(deep))
    elif rng.random() < 0.15:
        inner = draw.strings(rng, count, 8)
    else:
        shape = (count,) if rng.random() < 0.7 else (count, int(rng.integers(1, 4)))
        inner = draw.values(rng, shape, draw.one_of(rng, (*FLOATS, *INTEGERS)))
    return RaggedTensor(inner, _splits(lengths))


def _method_case(operator: str, ragged: RaggedTensor, note: str, further: dict[str, Any] | None = None) -> Case:
    flat = ragged.flat_values
    output = {"to_tensor": "output", "to_sparse": "output.values"}.get(operator.split(".")[1])
    arguments = {"self": ragged, **(further or {})}
    if output is None or not isinstance(flat, Tensor) or not flat.is_floating_point():
        return Case(operator, arguments, note, names=("must",))
    upstream = {output: torch.arange(1, 8).to(flat.dtype)}
    return Case(operator, arguments, note, upstream, ("self",), ("must",))


def random_method(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw a ragged tensor and call a method of it."""
    ragged = _ragged(rng, elements)
    further: dict[str, Any] = {}
    if operator.endswith("to_tensor") and rng.random() < 0.4:
        inner = ragged.values.shape[1:]
        further["shape"] = [int(rng.integers(0, 9)), None if rng.random() < 0.5 else int(rng.integers(0, 9))]
        further["shape"] += [None for _ in inner]
    return _method_case(operator, ragged, "random", further)


def _picked_method(operator: str) -> list[Case]:
    flat = RaggedTensor(torch.arange(4.0), torch.tensor([0, 3, 3, 4]))
    deep = RaggedTensor(RaggedTensor(torch.arange(5), torch.tensor([0, 3, 4, 5])), torch.tensor([0, 2, 2, 3]))
    return [
        _method_case(operator, flat, "one level"),
        _method_case(operator, deep, "two levels"),
        _method_case(operator, flat.with_values(torch.arange(8.0).reshape(4, 2)), "vectors"),
        _method_case(operator, flat.with_values(["a", "b", "", "c"]), "strings"),
        _method_case(operator, RaggedTensor(torch.empty(0), torch.tensor([0])), "nothing"),
        _method_case(operator, RaggedTensor(torch.empty(0), torch.tensor([0, 0, 0])), "empty rows"),
        Case(operator, {"self": flat, **_WRONG.get(operator.split(".")[1], {"anything": 1})}, "a wrong argument"),
    ]


def random_factory(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw values and a partition of them, now and then one that does not fit."""
    lengths = _lengths(rng, elements)
    values = draw.values(rng, (int(lengths.sum()),), draw.one_of(rng, (*FLOATS, *INTEGERS)))
    splits = _splits(lengths)
    note = "random"
    if rng.random() < 0.1 and values.shape[0]:
        values, note = values[:-1], "a value too few"
    name = operator.split(".from_")[1]
    partition = {
        "row_splits": splits,
        "row_lengths": splits.diff(),
        "row_starts": splits[:-1],
        "row_limits": splits[1:],
        "value_rowids": torch.repeat_interleave(splits.diff()),
    }[name]
    if name == "row_starts" and note != "random":
        partition = partition + 1
    return Case(operator, {"values": values, name: partition}, note, names=("must",))


def _picked_factory(operator: str) -> list[Case]:
    name = operator.split(".from_")[1]
    values = ints(3, 1, 4)
    partitions = {
        "row_splits": ([0, 2, 3], [0, 2], [1, 3], [0, 2, 1, 3], []),
        "row_lengths": ([2, 0, 1], [2, 0, 2], [4, -1], []),
        "row_starts": ([0, 1, 1], [1, 1]),
        "row_limits": ([1, 1, 3], [1, 1], []),
        "value_rowids": ([0, 0, 2], [0, 2, 0], [-1, 0, 0], [0, 0], []),
    }[name]
    return [
        Case(operator, {"values": values, name: torch.tensor(given).long()}, f"{name} {given}", names=("must",))
        for given in partitions
    ]


def random_from_sparse(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw rows without holes, now and then with one."""
    lengths = _lengths(rng, elements)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    note = "random"
    if rng.random() < 0.2 and len(rows):
        columns[int(rng.integers(len(rows)))] += 1
        note = "a hole"
    values = draw.values(rng, (len(rows),), draw.one_of(rng, (*FLOATS, *INTEGERS)))
    indices = torch.from_numpy(np.stack([rows, columns], 1).astype(np.int64))
    sp = sparse_of(indices, values, torch.tensor([len(lengths), 9]))
    return Case(operator, {"st_input": sp}, note)


def _picked_from_sparse(operator: str) -> list[Case]:
    def case(note: str, indices: list, shape: list[int]) -> Case:
        return Case(operator, {"st_input": sparse_of(indices, torch.arange(len(indices)), shape)}, note)

    return [
        case("trailing empty rows", [[0, 0], [0, 1], [2, 0]], [4, 5]),
        case("a hole", [[0, 0], [0, 2]], [4, 5]),
        case("late", [[0, 1]], [4, 5]),
        case("unsorted", [[2, 0], [0, 0]], [4, 2]),
        case("repeated", [[0, 0], [0, 0]], [4, 2]),
        case("row outside", [[0, 0], [5, 0]], [4, 2]),
        case("nothing", [], [4, 2]),
        case("no rows", [], [0, 2]),
        case("rank 3", [[0, 0, 0]], [4, 2, 2]),
    ]


def random_from_tensor(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw a dense tensor, with padding at the ends of rows and inside, with lengths, or with neither."""
    rows, columns = draw.size(rng, min(elements, _LIMIT) // 16), int(rng.integers(0, 9))
    shape = (rows, columns) if rng.random() < 0.7 else (rows, columns, 2)
    dense = torch.from_numpy(rng.integers(0, 3, shape)).to(draw.one_of(rng, (*FLOATS, torch.int32, torch.int64)))
    arguments: dict[str, Any] = {"tensor": dense}
    kind = rng.random()
    if kind < 0.4 and len(shape) == 2:
        arguments["padding"] = torch.tensor(0).to(dense.dtype)
    elif kind < 0.8:
        arguments["lengths"] = torch.from_numpy(rng.integers(-1, columns + 2, rows))
    return Case(operator, arguments, "random")


def _picked_from_tensor(operator: str) -> list[Case]:
    table = torch.tensor([[1, 0, 2, 0], [0, 0, 0, 0], [3, 0, 0, 0]])
    return [
        Case(operator, {"tensor": table}, "whole"),
        Case(operator, {"tensor": table, "padding": 0}, "padding"),
        Case(operator, {"tensor": table, "lengths": torch.tensor([1, 9, -2])}, "lengths"),
        Case(operator, {"tensor": table, "lengths": torch.tensor([1, 1, 1]), "padding": 0}, "both"),
        Case(operator, {"tensor": table[0]}, "a vector"),
        Case(operator, {"tensor": np.array([[b"a", b""], [b"", b""]], dtype=object), "padding": b""}, "strings"),
    ]


RAGGED: dict[str, Operator] = {
    **{f"RaggedTensor.{name}": Operator(random_method, _picked_method) for name in _METHODS},
    **{
        f"RaggedTensor.from_{name}": Operator(random_factory, _picked_factory)
        for name in ("row_splits", "row_lengths", "row_starts", "row_limits", "value_rowids")
    },
    "RaggedTensor.from_sparse": Operator(random_from_sparse, _picked_from_sparse),
    "RaggedTensor.from_tensor": Operator(random_from_tensor, _picked_from_tensor),
}
