"""Of the parity check: hashes of integers and strings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import draw
from .case import INT64_MAX, INTEGERS, Case, Operator
from .draw import ints


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
        add("no buckets", ints(1), 0)
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


def random_hash(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Strings of up to 300 bytes, or integers of every length; few or many buckets."""
    buckets = int(rng.choice(np.array([1, 2, 1000, 2**31, INT64_MAX]))) if rng.random() < 0.9 else 0
    note = "random" if buckets else "no buckets"
    if operator.endswith("of integers"):
        dtype = draw.one_of(rng, INTEGERS)
        values = draw.values(rng, (draw.size(rng, elements),), dtype)
        shifts = torch.from_numpy(rng.integers(0, 8 * values.element_size(), values.shape))
        signed = values.view(getattr(torch, str(dtype).removeprefix("torch.").removeprefix("u")))
        return Case(operator, {"input": (signed >> shifts.to(signed.dtype)).view(dtype), "num_buckets": buckets}, note)
    limit = 300 if rng.random() < 0.5 else 12
    count = draw.size(rng, min(elements, 10_000))
    strings = draw.strings(rng, count, limit)
    if count % 2 == 0 and rng.random() < 0.5:
        return Case(operator, {"input": strings.reshape(2, count // 2), "num_buckets": buckets}, note)
    return Case(operator, {"input": strings, "num_buckets": buckets}, note)


def _of_decimal_text(tf: Any, arguments: dict[str, Any]) -> Any:
    """TensorFlow hashes integers by way of their text."""
    return tf.strings.to_hash_bucket_fast(**{**arguments, "input": tf.strings.as_string(arguments["input"])})


OPERATORS = {
    "strings.to_hash_bucket_fast": Operator(random_hash, _hash),
    "strings.to_hash_bucket_fast of integers": Operator(random_hash, _hash, run_tensorflow=_of_decimal_text),
    "raw_ops.StringToHashBucketFast": Operator(random_hash, _hash),
}
