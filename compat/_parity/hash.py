"""Parity check of hashes of integers and strings, fingerprints, and the text of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import draw
from .case import FLOATS, INF, INT64_MAX, INTEGERS, Case, Operator
from .draw import ints


def _case(
    operator: str, value: Any, num_buckets: Any, note: str, rng: np.random.Generator | None = None, **further: Any
) -> Case:
    """Return a call of a hash: fast, strong or old, by its function or by the raw operator."""
    arguments = {"string_tensor" if operator.endswith("HashBucket") else "input": value, "num_buckets": num_buckets}
    if "strong" in operator.lower():
        arguments["key"] = [5, -7] if rng is None else rng.integers(-(2**63), INT64_MAX, 2, endpoint=True).tolist()
    return Case(operator, arguments | further, note)


def _hash(operator: str) -> list[Case]:
    cases = []

    def add(note: str, value: Any, num_buckets: Any = INT64_MAX, **further: Any) -> None:
        cases.append(_case(operator, value, num_buckets, note, **further))

    if "Strong" in operator or "strong" in operator:
        for key in ([-1, -(2**63)], (2**63 - 1, 0), [0, 0], [1], [1, 2, 3], [1, "a"], 5):
            add(f"key {key!r}", ["a", b"\xff" * 40], 1000, key=key)
    if operator.endswith("of integers"):
        for dtype in INTEGERS:
            info = torch.iinfo(dtype)
            add("extremes", torch.tensor([info.max, info.min, 0, 1, 9, 10, 99, 100], dtype=dtype))
        powers = [sign * (10**digits + offset) for digits in range(19) for offset in (-1, 0) for sign in (1, -1)]
        add("every length", torch.tensor(powers))
        add("rank 0", torch.tensor(-12), 1000)
        add("rank 3", torch.arange(24).reshape(2, 3, 4), 7)
        add("empty", torch.empty(0, 3, dtype=torch.int64), 7)
        add("no buckets", ints(1), 0)
        return cases
    # Strings for every length class of the hash, with NULs and bytes that are not UTF-8.
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


def random_hash(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw strings of up to 300 bytes or integers of every length, and few or many buckets."""
    buckets = int(rng.choice(np.array([1, 2, 1000, 2**31, INT64_MAX]))) if rng.random() < 0.9 else 0
    note = "random" if buckets else "no buckets"
    if operator.endswith("of integers"):
        dtype = draw.one_of(rng, INTEGERS)
        values = draw.values(rng, (draw.size(rng, elements),), dtype)
        shifts = torch.from_numpy(rng.integers(0, 8 * values.element_size(), values.shape))
        signed = values.view(getattr(torch, str(dtype).removeprefix("torch.").removeprefix("u")))
        return _case(operator, (signed >> shifts.to(signed.dtype)).view(dtype), buckets, note, rng)
    limit = 300 if rng.random() < 0.5 else 12
    count = draw.size(rng, min(elements, 10_000))
    strings = draw.strings(rng, count, limit)
    if count % 2 == 0 and rng.random() < 0.5:
        return _case(operator, strings.reshape(2, count // 2), buckets, note, rng)
    return _case(operator, strings, buckets, note, rng)


def _of_decimal_text(tf: Any, arguments: dict[str, Any]) -> Any:
    """Hash integers in TensorFlow by their decimal text: it has no hash of integers."""
    hashed = tf.strings.to_hash_bucket_strong if "key" in arguments else tf.strings.to_hash_bucket_fast
    return hashed(**{**arguments, "input": tf.strings.as_string(arguments["input"])})


# ---- Fingerprints and the text of numbers ---------------------------------------------------------------------------


def _fingerprint(operator: str) -> list[Case]:
    cases = []

    def add(note: str, data: Any, **further: Any) -> None:
        method = {"method": "farmhash64"} if operator.startswith("raw_ops") else {}
        cases.append(Case(operator, {"data": data} | method | further, note))

    for dtype in (*INTEGERS, *FLOATS, torch.complex64, torch.bool):
        add(f"rows of {dtype}", torch.arange(24).reshape(2, 3, 4).to(dtype))
    add("numbers", [1, 2, 3])
    add("wide numbers", [1, 2**40])
    add("floats", [[1.5], [2.5]])
    add("a number", 5)
    add("no rows", torch.empty(0, 3))
    add("empty rows", torch.empty(2, 0))
    add("strings", ["a", b"\xff\x00", ""])
    add("strings in a column", [["a"], ["b"]])
    add("strings in rows", [["a", "b"], ["c", ""]])
    add("strings of rank 3", [[["a", "b"], ["c", ""]]])
    add("a string", "a")
    add("another method", [1, 2], method="md5")
    return cases


def _random_fingerprint(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw rows of numbers of any dtype, or of strings."""
    rows = draw.size(rng, min(elements, 20_000))
    if rng.random() < 0.3:
        columns = int(rng.integers(1, 4))
        data: Any = draw.strings(rng, rows * columns, 80).reshape((rows, columns) if columns > 1 else (rows,))
    else:
        inner = draw.inner_shape(rng)
        shape = (min(rows, draw.rows_limit(elements, inner)), *inner)
        data = draw.values(rng, shape, draw.one_of(rng, (*INTEGERS, *FLOATS, torch.bool)))
    method = {"method": "farmhash64"} if operator.startswith("raw_ops") else {}
    return Case(operator, {"data": data} | method, "random")


def _as_string(operator: str) -> list[Case]:
    cases = []

    def add(note: str, value: Any, **further: Any) -> None:
        cases.append(Case(operator, {"input": value} | further, note))

    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        add(f"{dtype}", torch.tensor([info.max, info.min, 0, 7], dtype=dtype))
    for dtype in (torch.float32, torch.float64):
        numbers = torch.tensor([0.0, -0.0, 1.5, -2.25e-7, 3e30, INF, -INF], dtype=dtype)
        add(f"{dtype}", numbers)
        for further in ({"precision": 2}, {"scientific": True}, {"shortest": True}, {"width": 12, "fill": "0"}):
            add(f"{dtype} with {further}", numbers, **further)
        add("both", numbers, scientific=True, shortest=True)
    add("booleans", torch.tensor([[True, False]]))
    add("a number", 5)
    add("empty", torch.empty(0, 2, dtype=torch.int64))
    for fill in ("", " ", "0", "+", "-", "x", "00"):
        add(f"fill {fill!r}", torch.tensor([5, -5]), width=4, fill=fill)
    add("fill without width", torch.tensor([5]), fill="0")
    add("integers with digits", torch.tensor([5]), precision=2)
    add("scientific integers", torch.tensor([5]), scientific=True)
    return cases


def _random_as_string(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw integers or booleans, now and then padded."""
    count = draw.size(rng, min(elements, 10_000))
    numbers = draw.values(rng, (count,), draw.one_of(rng, (*INTEGERS, torch.bool)))
    further = {"width": int(rng.integers(1, 25))} if rng.random() < 0.3 and numbers.dtype != torch.bool else {}
    return Case(operator, {"input": numbers} | further, "random")


_BY_TEXT = Operator(random_hash, _hash, run_tensorflow=_of_decimal_text)
OPERATORS = {
    "strings.to_hash_bucket_fast": Operator(random_hash, _hash),
    "strings.to_hash_bucket_fast of integers": _BY_TEXT,
    "strings.to_hash_bucket_strong": Operator(random_hash, _hash),
    "strings.to_hash_bucket_strong of integers": _BY_TEXT,
    "strings.to_hash_bucket": Operator(random_hash, _hash),
    "strings.as_string": Operator(_random_as_string, _as_string),
    "fingerprint": Operator(_random_fingerprint, _fingerprint),
    "raw_ops.StringToHashBucketFast": Operator(random_hash, _hash),
    "raw_ops.StringToHashBucketStrong": Operator(random_hash, _hash),
    "raw_ops.StringToHashBucket": Operator(random_hash, _hash),
    "raw_ops.AsString": Operator(_random_as_string, _as_string),
    "raw_ops.Fingerprint": Operator(_random_fingerprint, _fingerprint),
}
