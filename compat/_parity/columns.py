"""Parity check of each kind of ``tf.feature_column``, on random batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import SparseTensor
from .case import INF, NAN, Case, Operator
from .column_sides import references, run_ours, run_tensorflow
from .draw import one_of, size

# A column's specification names the function that makes it and has its arguments, which may be columns too.
Spec = dict[str, Any]
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def spec(function: str, **arguments: Any) -> Spec:
    return {"function": function, "arguments": arguments}


# ---- Batches --------------------------------------------------------------------------------------------------------


def draw_words(rng: np.random.Generator, count: int, distinct: int = 30) -> np.ndarray:
    """Draw short words, the text of numbers, empty strings, and bytes that are not text."""
    pool = [
        b"",
        b"-1",
        b"\xff\x00",
        "é".encode(),
        *(str(k).encode() for k in range(10)),
        *(b"w%d" % k for k in range(distinct)),
    ]
    result = np.empty(count, dtype=object)
    result[:] = [pool[k] for k in rng.integers(0, len(pool), count)]
    return result


def draw_integers(rng: np.random.Generator, count: int) -> Tensor:
    """Draw small numbers, also the marks of missing values, and now and then large numbers."""
    dtype = one_of(rng, _INTEGERS)
    numbers = rng.integers(-3, 40, count)
    if dtype == torch.int64 and rng.random() < 0.3:
        numbers = np.where(rng.random(count) < 0.2, rng.integers(-(2**63), 2**63 - 1, count), numbers)
    return torch.from_numpy(numbers).to(dtype)


def laid_out(rng: np.random.Generator, batch: int, draw: Callable[[int], Any]) -> Any:
    """Lay drawn values out as one or several per example, or as rows of any length."""
    kind = rng.integers(4)
    if kind == 0:
        return draw(batch)
    if kind == 1:
        width = int(rng.integers(1, 4))
        return draw(batch * width).reshape(batch, width)
    return _rows(rng.integers(0, 4, batch), draw)


def _rows(lengths: np.ndarray, draw: Callable[[int], Any]) -> SparseTensor:
    rows = np.repeat(np.arange(len(lengths)), lengths)
    places = np.concatenate([np.arange(n) for n in lengths] or [np.zeros(0, np.int64)])
    indices = torch.from_numpy(np.stack([rows, places], 1).astype(np.int64))
    widest = int(max(lengths, default=0))
    return SparseTensor(indices, draw(len(rows)), torch.tensor([len(lengths), max(widest, 1)]))


def batch_size(rng: np.random.Generator, elements: int) -> int:
    return max(size(rng, min(elements // 4, 200)), 1)


# ---- Random columns, each with a feature of its own -----------------------------------------------------------------


def _identity(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    buckets = int(rng.integers(1, 40))
    default = int(rng.integers(buckets)) if rng.random() < 0.5 else None
    column = spec("categorical_column_with_identity", key=key, num_buckets=buckets, default_value=default)
    return column, {key: laid_out(rng, batch, lambda n: draw_integers(rng, n))}


def _hashed(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    buckets = int(one_of(rng, (1, 2, 10, 1000, 2**31, 2**63 - 1)))
    strings = rng.random() < 0.5
    column = spec(
        "categorical_column_with_hash_bucket",
        key=key,
        hash_bucket_size=buckets,
        dtype="string" if strings else str(one_of(rng, ("int32", "int64"))),
    )
    return column, {key: laid_out(rng, batch, lambda n: (draw_words if strings else draw_integers)(rng, n))}


def _oov(rng: np.random.Generator) -> dict[str, int]:
    kind = rng.integers(3)
    return (
        {}
        if kind == 0
        else {"num_oov_buckets": int(rng.integers(1, 5))}
        if kind == 1
        else {"default_value": int(rng.integers(-2, 8))}
    )


def _vocabulary(rng: np.random.Generator, strings: bool) -> list[Any]:
    if strings:
        pool: list[Any] = [
            "",
            "é",
            *(str(k) for k in range(10)),
            *(f"w{k}" for k in range(30)),
            *(f"no{k}" for k in range(5)),
        ]
    else:
        pool = [*range(-3, 40), 2**40, -(2**63), 2**63 - 1]
    chosen = rng.permutation(len(pool))[: int(rng.integers(1, 30))]
    return [pool[k] for k in chosen]


def _vocabulary_list(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    strings = rng.random() < 0.6
    column = spec(
        "categorical_column_with_vocabulary_list", key=key, vocabulary_list=_vocabulary(rng, strings), **_oov(rng)
    )
    return column, {key: laid_out(rng, batch, lambda n: (draw_words if strings else draw_integers)(rng, n))}


def _vocabulary_file(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    strings = rng.random() < 0.6
    words = _vocabulary(rng, strings)
    text = b"".join(str(word).encode() + one_of(rng, (b"\n", b"\n", b"\r\n")) for word in words)
    if text.endswith(b"\n") and words[-1] != "" and rng.random() < 0.3:
        text = text[:-1]
    column = spec(
        "categorical_column_with_vocabulary_file",
        key=key,
        vocabulary_file=text,
        vocabulary_size=int(rng.integers(1, len(words) + 1)) if rng.random() < 0.5 else None,
        dtype="string" if strings else "int64",
        **_oov(rng),
    )
    return column, {key: laid_out(rng, batch, lambda n: (draw_words if strings else draw_integers)(rng, n))}


def _numeric(rng: np.random.Generator, key: str, batch: int, rank: int = 3) -> tuple[Spec, dict[str, Any]]:
    shape = [int(k) for k in rng.integers(1, 3, int(rng.integers(1, rank)))]
    count = batch * int(np.prod(shape))
    dtype = one_of(rng, (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.uint8))
    numbers = torch.from_numpy(rng.standard_normal(count) * 10.0 ** rng.integers(-2, 3))
    if dtype.is_floating_point and rng.random() < 0.3:
        numbers[int(rng.integers(count))] = one_of(rng, (NAN, INF, -INF))
    numbers = numbers.abs().clamp(max=255).to(dtype) if dtype == torch.uint8 else numbers.to(dtype)
    flat = shape == [1] and rng.random() < 0.5
    column = spec("numeric_column", key=key, shape=shape)
    return column, {key: numbers if flat else numbers.reshape(batch, -1)}


def _bucketized(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    source, features = _numeric(rng, key, batch, 2)
    found = {float(np.round(x, int(rng.integers(0, 3)))) for x in rng.standard_normal(int(rng.integers(1, 12))) * 3}
    return spec("bucketized_column", source_column=source, boundaries=sorted(found)), features


def _crossed(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    keys: list[Any] = []
    features: dict[str, Any] = {}
    for place in range(int(rng.integers(2, 5))):
        name = f"{key}{place}"
        kind = rng.integers(4)
        if kind == 0:
            keys.append(name)
            draw = draw_words if rng.random() < 0.7 else draw_integers
            features[name] = laid_out(rng, batch, partial(draw, rng))
            continue
        make = (_identity, _vocabulary_list, _bucketized)[int(kind) - 1]
        column, more = make(rng, name, batch)
        keys.append(column)
        features |= more
    if rng.random() < 0.2:
        keys = [spec("crossed_column", keys=keys[:2], hash_bucket_size=7), *keys[2:], keys[0]]
    hash_key = one_of(rng, (None, 0, 17, 2**63 - 1))
    buckets = int(one_of(rng, (1, 10, 1000, 2**40)))
    return spec("crossed_column", keys=keys, hash_bucket_size=buckets, hash_key=hash_key), features


_PLAIN = (_identity, _hashed, _vocabulary_list, _crossed)


def _weighted(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    """Draw a weighted column with rows of any length; each weight belongs to one id for certain."""
    make = one_of(rng, _PLAIN[:3])
    column, features = make(rng, key, batch)
    lengths = rng.integers(0, 4, batch)
    strings = isinstance(_values_of(features[key]), np.ndarray)
    features[key] = _rows(lengths, lambda n: (draw_words if strings else draw_integers)(rng, n))
    weights = torch.from_numpy(np.round(rng.standard_normal(int(lengths.sum())), 1)).to(torch.float32)
    features[f"{key}w"] = _rows(lengths, lambda n: weights)
    return spec("weighted_categorical_column", categorical_column=column, weight_feature_key=f"{key}w"), features


def _values_of(x: Any) -> Any:
    return x.values if isinstance(x, SparseTensor) else x


def _small(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    """Draw a column of few buckets."""
    make = one_of(rng, (_identity, _vocabulary_list, _bucketized, _weighted, _hashed, _crossed))
    column, features = make(rng, key, batch)
    for name in ("hash_bucket_size",):
        if name in column["arguments"]:
            column["arguments"][name] = min(column["arguments"][name], 50)
    if make is _weighted and "hash_bucket_size" in column["arguments"]["categorical_column"]["arguments"]:
        column["arguments"]["categorical_column"]["arguments"]["hash_bucket_size"] = 20
    return column, features


def _indicator(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    column, features = _small(rng, key, batch)
    return spec("indicator_column", categorical_column=column), features


def _embedding(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    column, features = _small(rng, key, batch)
    if column["function"] == "categorical_column_with_identity":
        column["arguments"]["num_buckets"] = 200  # ids that are too large are errors of both lookups
    column = spec(
        "embedding_column",
        categorical_column=column,
        dimension=int(rng.integers(1, 9)),
        combiner=str(one_of(rng, ("sum", "mean", "sqrtn"))),
    )
    return column, features


def _sequence(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    make = one_of(rng, (_identity, _hashed, _vocabulary_list))
    column, features = make(rng, key, batch)
    if isinstance(features[key], SparseTensor):
        features[key] = _with_holes(rng, features[key])
    return spec("sequence_" + column["function"], **column["arguments"]), features


def _with_holes(rng: np.random.Generator, x: SparseTensor) -> SparseTensor:
    """Return the same values in the same rows, perhaps further to the right."""
    rows, places = x.indices.unbind(1)
    if rng.random() < 0.5:
        places = places * int(rng.integers(1, 3)) + int(rng.integers(0, 2))
    shape = [int(x.dense_shape[0]), int(x.dense_shape[1]) * 2 + 1]
    return SparseTensor(torch.stack([rows, places], 1), x.values, torch.tensor(shape))


def _sequence_numeric(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    shape = [int(k) for k in rng.integers(1, 3, int(rng.integers(1, 3)))]
    step = int(np.prod(shape))
    lengths = rng.integers(0, 4, batch) * step
    lengths[0] = 4 * step  # TensorFlow reshapes rows padded to the longest
    numbers = _rows(lengths, lambda n: torch.from_numpy(rng.standard_normal(n)).to(torch.float32))
    if rng.random() < 0.3:
        # Some numbers are left out, but not the last of a step: lists of the same numbers, which have no places, would
        # end within one. Nor is the last of the longest row, where TensorFlow's result ends.
        kept = torch.from_numpy(rng.random(len(numbers.values)) < 0.7)
        kept |= (numbers.indices[:, 1] + 1) % step == 0 if step > 1 else numbers.indices[:, 1] == int(lengths.max()) - 1
        numbers = SparseTensor(numbers.indices[kept], numbers.values[kept], numbers.dense_shape)
    return spec("sequence_numeric_column", key=key, shape=shape), {key: numbers}


DRAWS: dict[str, Callable[..., tuple[Spec, dict[str, Any]]]] = {
    "numeric_column": _numeric,
    "bucketized_column": _bucketized,
    "categorical_column_with_identity": _identity,
    "categorical_column_with_hash_bucket": _hashed,
    "categorical_column_with_vocabulary_list": _vocabulary_list,
    "categorical_column_with_vocabulary_file": _vocabulary_file,
    "crossed_column": _crossed,
    "weighted_categorical_column": _weighted,
    "indicator_column": _indicator,
    "embedding_column": _embedding,
    "sequence_categorical_column": _sequence,
    "sequence_numeric_column": _sequence_numeric,
}


def _random(rng: np.random.Generator, operator: str, elements: int) -> Case:
    column, features = DRAWS[operator.split(".")[1]](rng, "x", batch_size(rng, elements))
    # The lookup finds ids beyond the table; it cannot name the column.
    names = ("must be in",) if operator.endswith("embedding_column") else None
    return Case(operator, {"column": column, "features": features}, "random", names=names)


# ---- Hand-picked ----------------------------------------------------------------------------------------------------


def _hand_picked(operator: str) -> list[Case]:
    rng = np.random.default_rng(0)
    function = operator.split(".")[1]
    column, features = DRAWS[function](rng, "x", 4)
    every: dict[str, list[tuple[dict[str, Any], str]]] = {
        "numeric_column": [
            ({"shape": [0]}, "shape"),
            ({"dtype": "string"}, "dtype"),
            ({"default_value": [1.0, 2.0, 3.0]}, "default_value"),
        ],
        "bucketized_column": [({"boundaries": [2.0, 1.0]}, "boundaries"), ({"boundaries": []}, "boundaries")],
        "categorical_column_with_identity": [
            ({"num_buckets": 0}, "num_buckets"),
            ({"default_value": 99}, "default_value"),
        ],
        "categorical_column_with_hash_bucket": [
            ({"hash_bucket_size": 0}, "hash_bucket_size"),
            ({"dtype": "float32"}, "dtype"),
        ],
        "categorical_column_with_vocabulary_list": [
            ({"vocabulary_list": []}, "vocabulary_list"),
            ({"vocabulary_list": ["a", "a"]}, "vocabulary_list"),
            ({"vocabulary_list": [1.5]}, "vocabulary_list"),
            ({"num_oov_buckets": 1, "default_value": 3}, "num_oov_buckets"),
        ],
        "categorical_column_with_vocabulary_file": [
            ({"vocabulary_file": "no such file", "vocabulary_size": None}, "vocabulary_file"),
            ({"vocabulary_size": 0}, "vocabulary_size"),
        ],
        "crossed_column": [({"keys": ["a"]}, "keys"), ({"hash_bucket_size": 0}, "hash_bucket_size")],
        "weighted_categorical_column": [({"dtype": "string"}, "dtype")],
        "indicator_column": [({"categorical_column": 5}, "categorical_column")],
        "embedding_column": [({"dimension": 0}, "dimension")],
        "sequence_categorical_column": [],
        "sequence_numeric_column": [({"shape": [0]}, "shape"), ({"dtype": "string"}, "dtype")],
    }
    cases = [
        Case(
            operator,
            {"column": column | {"arguments": column["arguments"] | changed}, "features": features},
            f"a wrong {name}",
            names=(name,),
        )
        for changed, name in every[function]
    ]
    # A few cases that do not depend on the random ones.
    for seed in range(1, 4):
        other, batch = DRAWS[function](np.random.default_rng(seed), "x", 5)
        names = ("must be in",) if function == "embedding_column" else None
        cases.append(Case(operator, {"column": other, "features": batch}, f"drawn by {seed}", names=names))
    cases.append(
        Case(operator, {"column": column, "features": {}}, "a feature that is missing", names=("batch must have",))
    )
    return cases


OPERATORS: dict[str, Operator] = {
    f"feature_column.{function}": Operator(
        _random, _hand_picked, references=references, run_tensorflow=run_tensorflow, run_ours=run_ours
    )
    for function in DRAWS
}
