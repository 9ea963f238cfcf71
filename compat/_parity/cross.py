"""Parity check of crosses of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import RaggedTensor, SparseTensor
from . import draw
from .case import FLOATS, INF, INT64_MAX, INTEGERS, NAN, Case, Operator
from .draw import sparse_of

# TensorFlow 2.21 does not hash integers of sparse columns as SparseCrossHashed intends: see PARITY.md.
_WITHOUT_SPARSE_INTEGERS = "raw_ops.SparseCrossHashed"


def _words(*texts: str | bytes) -> np.ndarray:
    result = np.empty(len(texts), dtype=object)
    result[:] = [text.encode() if isinstance(text, str) else text for text in texts]
    return result


def _case(operator: str, inputs: Any, note: str, **further: Any) -> Case:
    """Return a call of any of the operators; ``further`` holds its arguments beside the columns."""
    further = {name: value for name, value in further.items() if name in _FURTHER[operator]}
    if not operator.startswith("raw_ops") or not isinstance(inputs, list):
        return Case(operator, {"inputs": inputs} | further, note)
    sparse = [column for column in inputs if isinstance(column, SparseTensor)]
    dense = [column for column in inputs if not isinstance(column, SparseTensor)]
    parts = {
        "indices": [column.indices for column in sparse],
        "values": [_raw_values(column.values) for column in sparse],
        "shapes": [column.dense_shape for column in sparse],
        "dense_inputs": [_raw_values(column) for column in dense],
    }
    return Case(operator, parts | _FURTHER[operator] | further, note)


def _raw_values(values: Any) -> Any:
    return values.to(torch.int64) if isinstance(values, Tensor) else values


# The arguments of each operator beside the columns, with the values that a case has by default.
_FURTHER: dict[str, dict[str, Any]] = {
    "sparse.cross": {"separator": None},
    "sparse.cross_hashed": {"num_buckets": 0, "hash_key": None},
    "raw_ops.SparseCross": {
        "hashed_output": True,
        "num_buckets": 0,
        "hash_key": 99,
        "out_type": torch.int64,
        "internal_type": torch.int64,
    },
    "raw_ops.SparseCrossV2": {"sep": "_X_"},
    "raw_ops.SparseCrossHashed": {
        "num_buckets": torch.tensor(1000),
        "strong_hash": torch.tensor(False),
        "salt": torch.tensor([3, -4]),
    },
}


def _hand_picked(operator: str) -> list[Case]:
    cases = []
    raw = operator.startswith("raw_ops")

    def add(note: str, inputs: Any, **further: Any) -> None:
        cases.append(_case(operator, inputs, note, **further))

    words = sparse_of([[0, 0], [1, 0], [1, 1]], _words("a", "b", b"\xff\x00"), [2, 2])
    more = sparse_of([[0, 0], [1, 0]], _words("d", ""), [2, 1])
    dense = _words("f", "g", "h", "i").reshape(2, 2)
    numbers = torch.tensor([[1, -2], [2**62, 3]])
    add("sparse words", [words, more])
    add("sparse and dense words", [words, more, dense])
    add("dense before sparse", [dense, words])
    add("dense words", [dense, dense, dense])
    add("dense numbers", [numbers, numbers])
    add("numbers and words", [numbers, dense, words])
    add("one column", [numbers])
    add("an empty row", [sparse_of([[1, 0]], _words("a"), [3, 1]), _words("x", "y", "z").reshape(3, 1)])
    add("unsorted rows", [sparse_of([[1, 0], [0, 0], [2, 0]], _words("a", "b", "c"), [3, 1]), more_of(3)])
    add("a negative row", [sparse_of([[-1, 0], [0, 0]], _words("a", "b"), [2, 1]), dense])
    add("a row too far", [sparse_of([[0, 0], [7, 0]], _words("a", "b"), [2, 1]), dense])
    add("columns out of order", [sparse_of([[0, 9], [0, 0], [0, 0]], _words("a", "b", "c"), [1, 2]), more_of(1)])
    add("no columns", [])
    add("no rows", [torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 1, dtype=torch.int64)])
    add("no values", [torch.empty(2, 0, dtype=torch.int64), numbers])
    add("other rows", [numbers, torch.ones(3, 1, dtype=torch.int64)])
    add("other rows, sparse", [words, sparse_of([[0, 0]], _words("a"), [3, 1])])
    add("a vector", [numbers, torch.tensor([1, 2])])
    add("a sparse tensor of rank 3", [sparse_of([[0, 0, 0]], _words("a"), [2, 1, 1]), dense])
    if operator != _WITHOUT_SPARSE_INTEGERS:
        add("sparse numbers", [sparse_of([[0, 0], [1, 0]], torch.tensor([5, 2**40 + 5]), [2, 1]), numbers])
    for buckets in (1, 7, INT64_MAX, -1):
        add(f"num_buckets {buckets}", [numbers, dense], num_buckets=buckets)
    for key in (0, 1, -1, -(2**63), INT64_MAX):
        add(f"hash_key {key}", [numbers, dense], hash_key=key)
    for separator in ("", "-", b"\xff\x00", ["a", "b"], 5):
        add(f"separator {separator!r}", [numbers, dense], separator=separator, sep=separator)
    for strong in (True, False):
        add(f"strong_hash {strong}", [words, dense], strong_hash=torch.tensor(strong))
        add("long words", [more_of(2, b"\xfe" * 99), dense], strong_hash=torch.tensor(strong))
    add("a salt of 1", [words], salt=torch.tensor([1]))
    if raw:
        return [case for case in cases if _can_be_called(case)]
    for dtype in (*INTEGERS, torch.bool, torch.float32, torch.float64):
        add(f"{dtype}", [torch.tensor([[0, 1], [2, 3]]).to(dtype), numbers])
    add("floats are cut", [torch.tensor([[1.9, -1.9], [-0.5, 3e9]]), numbers])
    add("special floats", [torch.tensor([[NAN], [INF], [-INF]]), torch.ones(3, 1, dtype=torch.int64)])
    add("not a list", numbers)
    add("a ragged column", [RaggedTensor.from_row_splits([1, 2], [0, 2]), numbers])
    add("a list of lists", [[[1, 2]], [[3, 4]]])
    return cases


def _can_be_called(case: Case) -> bool:
    """Say whether TensorFlow can be called with the case: it crashes for the strong hash of dense integers."""
    strong = case.arguments.get("strong_hash")
    integers = any(isinstance(column, Tensor) for column in case.arguments["dense_inputs"])
    return not (strong is not None and bool(strong) and integers)


def more_of(rows: int, word: bytes = b"w") -> np.ndarray:
    """Return a column that repeats one word."""
    return _words(*[word] * rows).reshape(rows, 1)


def _random(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw one to four columns of any kind, with empty rows, now and then unsorted."""
    count = int(rng.integers(1, 5))
    rows = draw.size(rng, min(elements // 8, 3000 if "ashed" in operator else 500))
    note, inputs = "random", []
    for _ in range(count):
        words = rng.random() < 0.4 or (operator == _WITHOUT_SPARSE_INTEGERS and count % 2 == 0)
        if rng.random() < 0.5:
            width = 0 if rng.random() < 0.03 else int(rng.integers(1, 4))
            inputs.append(_values(rng, rows * width, words, operator).reshape(rows, width))
            continue
        entries = draw.size(rng, 2 * rows) if rows else 0
        words = words or operator == _WITHOUT_SPARSE_INTEGERS
        column = draw.sparse(rng, (rows, 5), _values(rng, entries, words, operator), ordered=rng.random() < 0.9)
        inputs.append(column)
    further: dict[str, Any] = {}
    if rng.random() < 0.7:
        buckets = int(rng.choice(np.array([1, 2, 1000, 2**40, INT64_MAX])))
        raw_hashed = operator == _WITHOUT_SPARSE_INTEGERS
        further = {"num_buckets": torch.tensor(buckets) if raw_hashed else buckets}
        further["hash_key"] = int(rng.integers(-(2**63), INT64_MAX, endpoint=True))
    # TensorFlow crashes for the strong hash of integers.
    only_words = all(isinstance(getattr(column, "values", column), np.ndarray) for column in inputs)
    further["strong_hash"] = torch.tensor(only_words and rng.random() < 0.7)
    further["separator"] = further["sep"] = str(rng.choice(np.array(["", "_X_", ",", "é"])))
    return _case(operator, inputs, note, **further)


def _values(rng: np.random.Generator, count: int, words: bool, operator: str) -> Any:
    if words:
        return draw.strings(rng, count, 40)
    choices = INTEGERS if operator.startswith("raw_ops") else (*INTEGERS, *FLOATS, torch.bool)
    return draw.values(rng, (count,), draw.one_of(rng, choices))


def _with_tensors(tf: Any, arguments: dict[str, Any], function: Any) -> Any:
    """Call TensorFlow with strings as its tensors: these functions take no numpy arrays."""

    def changed(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return tf.constant(value, tf.string)
        return [changed(item) for item in value] if isinstance(value, list) else value

    names = ("inputs", "values", "dense_inputs")
    return function(**{name: changed(value) if name in names else value for name, value in arguments.items()})


def _operator(name: str) -> Operator:
    module, function = name.split(".")
    return Operator(
        _random,
        _hand_picked,
        run_tensorflow=lambda tf, arguments: _with_tensors(tf, arguments, getattr(getattr(tf, module), function)),
        run_ours=lambda ours, arguments: getattr(getattr(ours, module), function)(**arguments),
    )


OPERATORS: dict[str, Operator] = {name: _operator(name) for name in _FURTHER}
