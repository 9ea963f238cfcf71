"""The hand-picked cases of the parity check: the edges, one per sentence of the operators' contracts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._cases import FLOATS, HALVES, INT64_MAX, INTEGERS, OPERATORS, Case, random_forward, random_grad, random_unique

NAN, INF = float("nan"), float("inf")
_INT32_MAX = 2**31 - 1


def hand_picked() -> list[Case]:
    """All of them, in the order of the table."""
    cases = []
    for operator, maker in OPERATORS.items():
        if maker is random_forward:
            cases += _forward(operator)
        elif maker is random_grad:
            cases += _grad(operator)
        elif maker is random_unique:
            cases += _unique(operator)
        else:
            cases += _hash(operator)
    return cases


def _data(rows: int, columns: int = 3) -> Tensor:
    """Quarters, so that products and sums of few are exact."""
    return (torch.arange(rows * columns, dtype=torch.float32) / 4 - 2).reshape(rows, columns)


def _ints(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def _forward(operator: str) -> list[Case]:
    sized = "WithNumSegments" in operator
    cases = []

    def add(
        note: str, data: Any, indices: Any, segment_ids: Any, num_segments: Any = None, upstream: Tensor | None = None
    ) -> None:
        arguments = {"data": data, "indices": indices, "segment_ids": segment_ids}
        if sized and num_segments is None:
            num_segments = 1 + max([0, *segment_ids.reshape(-1).tolist()])
        if num_segments is not None:
            if not sized and not operator.startswith("sparse"):
                return
            arguments["num_segments"] = num_segments
        cases.append(Case(operator, arguments, note, upstream))

    floats = _data(4)
    add("gap, duplicate rows", floats, _ints(0, 2, 2, 3), _ints(0, 0, 2, 2), None, _data(3))
    add("num_segments", floats, _ints(0, 2), _ints(1, 1), 5, _data(5))
    add("num_segments int64", floats, _ints(0, 2), _ints(1, 1), torch.tensor(3), _data(3))
    add("num_segments of the wrong dtype", floats, _ints(0, 2), _ints(1, 1), torch.tensor(3.0))
    add("num_segments a vector", floats, _ints(0, 2), _ints(1, 1), _ints(3))
    add("num_segments negative", floats, _ints(0, 2), _ints(0, 1), -1)
    add("num_segments 0 with entries", floats, _ints(0), _ints(0), 0)
    add("num_segments too small", floats, _ints(1, 2, 1), _ints(0, 1, 2), 2)
    add("no entries", floats, _ints(), _ints(), None, _data(1)[: int(sized)])
    add("no entries, 3 segments", floats, _ints(), _ints(), 3, _data(3))
    add("no entries, no rows", floats[:0], _ints(), _ints(), 2, _data(2))
    add("entries, no rows", floats[:0], _ints(0), _ints(0))
    add("no columns", floats[:, :0], _ints(1, 2), _ints(0, 1), None, _data(2)[:, :0])
    add("no columns, index out of range", floats[:, :0], _ints(1, 9), _ints(0, 1))
    add("no columns, unsorted", floats[:, :0], _ints(1, 2), _ints(1, 0))
    add("rank 1", floats[:, 0], _ints(1, 2, 1), _ints(0, 1, 1), None, _data(2)[:, 0])
    add("rank 3", floats.reshape(2, 2, 3), _ints(1, 0, 1), _ints(0, 1, 1), None, _data(4).reshape(2, 2, 3))
    add("scalar data", floats[0, 0], _ints(0), _ints(0))
    add("scalar indices", floats, torch.tensor(0, dtype=torch.int32), _ints(0))
    add("indices of rank 2", floats, _ints(0).unsqueeze(0), _ints(0))
    add("segment_ids of rank 2", floats, _ints(0), _ints(0).unsqueeze(0))
    add("lengths differ", floats, _ints(0, 1), _ints(0))
    add("index too large", floats, _ints(0, 4), _ints(0, 0))
    add("index negative", floats, _ints(0, -1), _ints(0, 0))
    add("index above 2^32", floats, _ints(2**32, dtype=torch.int64), _ints(0))
    add("index 2^63 - 1", floats, _ints(INT64_MAX, dtype=torch.int64), _ints(0))
    add("unsorted", floats, _ints(0, 1, 2), _ints(0, 2, 1))
    add("unsorted, above num_segments in between", floats, _ints(0, 1, 2), _ints(0, 9, 2), 3)
    add("first segment id negative", floats, _ints(0, 1), _ints(-1, 0))
    add("all segment ids negative", floats, _ints(0, 1), _ints(-2, -1), 3)
    add("segment id above 2^32", floats, _ints(0, 1), _ints(2**32, 1, dtype=torch.int64), 3)
    add("indices int16", floats, _ints(0, dtype=torch.int16), _ints(0))
    add("indices float", floats, torch.zeros(1), _ints(0))
    add(
        "infinities and NaN",
        torch.tensor([INF, -INF, NAN, 1.0]),
        _ints(0, 3, 1, 0, 1, 2, 3),
        _ints(0, 0, 1, 2, 2, 3, 4),
    )
    if not operator.endswith(("mean", "Mean", "MeanWithNumSegments")):  # whose sum overflows, though the mean would not
        add("overflow of float32", torch.tensor([3e38, 3e38, 1.0]), _ints(0, 1, 2), _ints(0, 0, 1), None, torch.ones(2))
    add("overflow of float16", torch.tensor([6e4, 6e4, 1.0]).half(), _ints(0, 1, 2), _ints(0, 0, 1))
    for dtype in (torch.float16, torch.bfloat16):
        # 2048 + 8 * 1 stays 2048 where the sum itself is kept in float16, 256 + 8 * 1 in bfloat16.
        start = 2048.0 if dtype == torch.float16 else 256.0
        add("summed in float32", torch.tensor([start, 1.0], dtype=dtype), _ints(0, *[1] * 8), _ints(*[0] * 9))
    for dtype in FLOATS:
        upstream = torch.tensor([1.0, 3.0], dtype=dtype)
        add("every dtype", torch.tensor([1.0, 0.1, 3.0], dtype=dtype), _ints(0, 1, 1), _ints(0, 0, 1), None, upstream)
    for dtype in INTEGERS:
        top = torch.iinfo(dtype).max
        numbers = torch.tensor([top, 1, top - 1], dtype=dtype)
        add("integers wrap", numbers, _ints(0, 1, 2, 2, 0), _ints(0, 0, 2, 2, 2))
    for bad in (torch.bool, torch.complex64):
        add(f"data {bad}", torch.ones(2, dtype=bad), _ints(0), _ints(0))
    return cases


def _grad(operator: str) -> list[Case]:
    size_name = "dense_output_dim0" if operator.endswith("V2") else "output_dim0"
    cases = []

    def add(note: str, grad: Tensor, indices: Tensor, segment_ids: Tensor, size: Any = 4) -> None:
        arguments = {"grad": grad, "indices": indices, "segment_ids": segment_ids, size_name: size}
        cases.append(Case(operator, arguments, note))

    grad = _data(3)
    add("duplicates, rows without entries", grad, _ints(3, 0, 3), _ints(0, 0, 2))
    add("segment ids unsorted", grad, _ints(0, 1, 0, 3), _ints(2, 0, 1, 0))
    add("int64", grad, _ints(0, 1, dtype=torch.int64), _ints(2, 0, dtype=torch.int64))
    add("int64 indices", grad, _ints(3, 1, dtype=torch.int64), _ints(2, 0))
    add("no entries", grad, _ints(), _ints())
    add("no entries, no rows", grad[:0], _ints(), _ints(), 0)
    add("entries, no rows", grad[:0], _ints(0), _ints(0))
    add("no columns", grad[:, :0], _ints(1, 1), _ints(0, 1))
    add("no columns, index out of range", grad[:, :0], _ints(5), _ints(0))
    add("rank 1", grad[:, 0], _ints(1, 1), _ints(0, 1))
    add("rank 3", _data(4).reshape(2, 2, 3), _ints(1, 0, 1), _ints(0, 1, 1))
    add("index too large", grad, _ints(4), _ints(0))
    add("index negative", grad, _ints(-1), _ints(0))
    add("last segment id too large", grad, _ints(0, 1), _ints(0, 3))
    add("segment id too large in between", grad, _ints(0, 1, 1), _ints(0, 3, 1))
    add("segment id negative", grad, _ints(0, 1, 1), _ints(0, -1, 1))
    add("segment id above 2^32", grad, _ints(0, 1), _ints(2**32, 0, dtype=torch.int64))
    add("segment id 2^63 - 1", grad, _ints(0), _ints(INT64_MAX, dtype=torch.int64))
    add("lengths differ", grad, _ints(0, 1), _ints(0))
    add("rank 2", grad, _ints(0, 1).unsqueeze(0), _ints(0, 1).unsqueeze(0))
    add("scalar grad", grad[0, 0], _ints(0), _ints(0))
    add("integer grad", _ints(1, 2), _ints(0), _ints(0))
    add("negative size", grad, _ints(0), _ints(0), -2)
    add("negative size, no entries", grad, _ints(), _ints(), -2)
    add("size a vector", grad, _ints(0), _ints(0), _ints(2))
    add("size int64", grad, _ints(0), _ints(0), torch.tensor(2))
    add("infinities and NaN", torch.tensor([INF, -INF, NAN]), _ints(0, 0, 1, 2), _ints(0, 1, 2, 0))
    if operator.endswith("V2"):
        add("the highest id", grad, _ints(_INT32_MAX - 1, 0), _ints(0, 1), _INT32_MAX)
    for dtype in FLOATS:
        add("every dtype", torch.tensor([0.1, 3.0], dtype=dtype), _ints(0, 1, 1, 0, 0), _ints(0, 0, 0, 1, 1))
    return cases


def _unique(operator: str) -> list[Case]:
    cases = []

    def add(note: str, x: Any, out_idx: torch.dtype = torch.int32) -> None:
        cases.append(Case(operator, {"x": x, "out_idx": out_idx}, note))

    add("order of first appearance", _ints(7, 3, 7, 9, 3))
    add("out_idx int64", _ints(7, 3, 7, 9, 3), torch.int64)
    for out_idx in (torch.int16, torch.float32, torch.uint32):
        add(f"out_idx {out_idx}", _ints(1, 2), out_idx)
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        add("extremes", torch.tensor([info.max, info.min, 0, 1, info.max, info.min], dtype=dtype))
    for dtype in FLOATS:
        # TensorFlow's hash of a half type tells -0.0 from 0.0, although they are equal.
        zero = 0.0 if dtype in HALVES else -0.0
        add("zeros and NaN", torch.tensor([0.0, zero, NAN, 1.0, NAN, zero, 1.0, INF, -INF, INF], dtype=dtype))
        if dtype not in HALVES:
            add("-0.0 first", torch.tensor([-0.0, 0.0, 2.0], dtype=dtype))
    add("bool", torch.tensor([True, False, True]))
    add("complex", torch.ones(2, dtype=torch.complex64))
    for dtype in (torch.int64, torch.float16, torch.bool):
        add("empty", torch.empty(0, dtype=dtype))
    add("scalar", torch.tensor(3))
    add("rank 2", _ints(3).unsqueeze(0))
    add("rank 2, empty", torch.empty(0, 2))
    add("strings", ["a", "b", b"a", "é", "a\0", "", "a"])
    add("strings of rank 2", [["a"], ["b"]])
    add("strings mixed with numbers", ["a", 1])
    add("a string", "a")
    return cases


def _hash(operator: str) -> list[Case]:
    cases = []

    def add(note: str, value: Any, num_buckets: Any = INT64_MAX) -> None:
        cases.append(Case(operator, {"input": value, "num_buckets": num_buckets}, note))

    if operator.endswith("of integers"):
        for dtype in INTEGERS:
            info = torch.iinfo(dtype)
            add("extremes", torch.tensor([info.max, info.min, 0, 1, 9, 10, 99, 100], dtype=dtype))
        powers = [sign * (10**digits + offset) for digits in range(19) for offset in (-1, 0) for sign in (1, -1)]
        add("every length", torch.tensor(powers))
        add("rank 0", torch.tensor(-12), 1000)
        add("rank 3", torch.arange(24).reshape(2, 3, 4), 7)
        add("empty", torch.empty(0, 3, dtype=torch.int64), 7)
        add("no buckets", _ints(1), 0)
        return cases
    # Every length class of the hash, with NULs and bytes that are no UTF-8.
    add("every length", [bytes((7 * i + 31 * length) % 256 for i in range(length)) for length in range(0, 150)])
    add("a string", "abc", 7)
    add("rank 2", [["a", "b"], ["c", "d"]], 7)
    add("str and bytes", ["é", "é".encode(), b"\xff\x00"], 1000)
    add("empty list", [], 7)
    add("numpy S", np.array([b"a", b"bcd"]))
    add("numpy U", np.array(["a", "ü"]))
    add("numpy object", np.array(["a", b"a\0"], dtype=object))
    add("mixed with numbers", ["a", 1], 7)
    add("mixed with None", ["a", None], 7)
    add("ragged", ["a", ["b"]], 7)
    add("a lone surrogate", ["\ud800"], 7)
    add("one bucket", ["a"], 1)
    for buckets in (0, -1, 2**63, None, "7"):
        add(f"num_buckets {buckets!r}", ["a"], buckets)
    return cases
