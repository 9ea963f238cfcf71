"""Parity check of several feature columns in one ``FeatureTransform``, each against TensorFlow's column by itself."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import SparseTensor
from .bounds import near
from .case import Case, Operator, Outcome, Reference
from .column_sides import built, has_holes, offsets_of, our_parts, their_parts, transform_of
from .columns import DRAWS, Spec, batch_size, draw_integers, draw_words, laid_out, spec
from .draw import one_of

_NAME = "feature_column.FeatureTransform"
_PLAIN = ("categorical_column_with_identity", "categorical_column_with_hash_bucket")
_ANY = (
    *_PLAIN,
    "categorical_column_with_vocabulary_list",
    "numeric_column",
    "bucketized_column",
    "crossed_column",
    "weighted_categorical_column",
    "indicator_column",
    "sequence_categorical_column",
    "sequence_numeric_column",
)


# ---- Cases ----------------------------------------------------------------------------------------------------------


def _alike(rng: np.random.Generator, count: int, batch: int) -> tuple[list[Spec], dict[str, Any]]:
    """Draw columns that differ in little more than their feature, so that one call may make the ids of all."""
    columns, features = [], {}
    default, is_fixed = one_of(rng, (None, 3)), rng.random() < 0.5
    for k in range(count):
        key = f"x{k}"
        kind = rng.integers(6)
        if kind < 3:
            columns.append(spec(_PLAIN[1], key=key, hash_bucket_size=int(one_of(rng, (50, 50, 1000))), dtype="int64"))
        elif kind < 5:
            columns.append(spec(_PLAIN[0], key=key, num_buckets=40, default_value=default))
        else:
            columns.append(
                spec("categorical_column_with_vocabulary_list", key=key, vocabulary_list=["", "w1", "é", "2"])
            )
        draw = draw_integers if kind < 5 else draw_words
        features[key] = draw(rng, batch) if is_fixed else laid_out(rng, batch, partial(draw, rng))
    return columns, features


def _unlike(rng: np.random.Generator, count: int, batch: int) -> tuple[list[Spec], dict[str, Any]]:
    """Draw columns of any kinds; some also read the feature of another."""
    columns: list[Spec] = []
    features: dict[str, Any] = {}
    for k in range(count):
        column, more = DRAWS[one_of(rng, _ANY)](rng, f"x{k}", batch)
        columns.append(column)
        features |= more
    for column in list(columns):
        if (
            column["function"] in _PLAIN
            and column["arguments"].get("hash_bucket_size", 0) <= 1000
            and rng.random() < 0.5
        ):
            columns.append(spec("indicator_column", categorical_column=column))
        elif column["function"] == "bucketized_column" and rng.random() < 0.5:
            columns.append(column["arguments"]["source_column"])
    return columns, features


def _weighted(rng: np.random.Generator, key: str, batch: int) -> tuple[Spec, dict[str, Any]]:
    """Draw ids and weights ``[B, k]``; weights are 0 where ids are missing, so that TensorFlow drops both."""
    shape = (batch, int(rng.integers(1, 4)))
    ids = torch.from_numpy(rng.integers(-1, 30, shape))
    weights = torch.from_numpy(rng.integers(1, 9, shape) / 4.0).to(torch.float32)
    column = spec(_PLAIN[0], key=key, num_buckets=30)
    features = {key: ids, f"{key}w": torch.where(ids < 0, 0, weights)}
    return spec("weighted_categorical_column", categorical_column=column, weight_feature_key=f"{key}w"), features


def _random(rng: np.random.Generator, operator: str, elements: int) -> Case:
    count, alike = int(rng.integers(2, 7)), rng.random() < 0.5
    batch = 0 if alike and rng.random() < 0.1 else batch_size(rng, elements // count)
    columns, features = (_alike if alike else _unlike)(rng, count, batch)
    drop_missing = not alike or rng.random() < 0.7
    if drop_missing and rng.random() < 0.5:
        column, more = _weighted(rng, "v", batch)
        columns.append(column)
        features |= more
    # Nulls may replace the marks of missing values only if all columns leave these out.
    forms = {"seed": int(rng.integers(2**31)), "nulls": alike and drop_missing}
    arguments = {"columns": columns, "features": features, "forms": forms, "drop_missing": drop_missing}
    return Case(operator, arguments, "random", names=())


def _hand_picked(operator: str) -> list[Case]:
    cases = [_random(np.random.default_rng(seed), operator, 200) for seed in range(8)]
    without = cases[0].arguments | {"features": {}}
    return [*cases, Case(operator, without, "features that are missing", names=("batch must have",))]


# ---- Both sides -----------------------------------------------------------------------------------------------------


def _run_tensorflow(tf: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one column after the other."""
    tf.get_logger().setLevel("ERROR")
    features = {}
    for name, x in arguments["features"].items():
        x = tf.constant(x, tf.string) if isinstance(x, np.ndarray) else x
        if not arguments["drop_missing"] and isinstance(x, tf.Tensor):
            # In a sparse tensor the marks of missing values are values like others.
            x = x if len(x.shape) == 2 else tf.reshape(x, [-1, 1])
            x = tf.SparseTensor(tf.where(tf.ones_like(x, tf.bool)), tf.reshape(x, [-1]), tf.shape(x, tf.int64))
        features[name] = x
    with tempfile.TemporaryDirectory() as folder:
        columns = built(arguments["columns"], tf.feature_column, folder, tf.as_dtype, itertools.count())
        return _named(columns, lambda column: their_parts(tf, column, features))


def _run_ours(_: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run all columns at once."""
    from ... import features as ours

    rng = np.random.default_rng(arguments["forms"]["seed"])
    with tempfile.TemporaryDirectory() as folder:
        columns = built(arguments["columns"], ours, folder, str, itertools.count())
        transform = transform_of(columns, drop_missing=arguments["drop_missing"])
    made = transform({name: _formed(rng, x, arguments["forms"]["nulls"]) for name, x in arguments["features"].items()})
    return _named(columns, lambda column: our_parts(column, transform, made))


def _named(columns: list[Any], parts_of: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    return {f"{column.name}: {name}": x for column in columns for name, x in parts_of(column).items()}


def _formed(rng: np.random.Generator, x: Any, nulls: bool) -> Any:
    """Return a feature in one of its equivalent forms, drawn at random."""
    if isinstance(x, SparseTensor):
        return x if has_holes(x) else one_of(rng, _ROWS)(x)
    flat = x if isinstance(x, np.ndarray) else x.cpu().numpy()
    if isinstance(x, Tensor) and not x.is_floating_point() and rng.random() < 0.2 and not bool((x < 0).any()):
        return x.to(torch.uint8) if x.numel() == 0 or int(x.max()) < 256 else x.to(torch.uint64)
    forms: list[Callable[[], Any]] = [lambda: x, lambda: flat, lambda: _arrow(flat, nulls)]
    if flat.ndim == 1:
        forms.append(flat.tolist)
    return one_of(rng, forms)()


def _lists(x: SparseTensor) -> list[Any]:
    bounds, values = offsets_of(x).tolist(), x.values.tolist()
    return [values[a:b] for a, b in itertools.pairwise(bounds)]


def _arrow_lists(x: SparseTensor) -> Any:
    import pyarrow as pa

    values = pa.array(x.values if isinstance(x.values, np.ndarray) else x.values.cpu().numpy())
    return pa.LargeListArray.from_arrays(pa.array(offsets_of(x).cpu().numpy()), values)


_ROWS: tuple[Callable[[SparseTensor], Any], ...] = (
    lambda x: x,
    lambda x: (x.values, offsets_of(x)),
    lambda x: _lists(x) if x.values.shape[0] else (x.values, offsets_of(x)),
    _arrow_lists,
)


def _arrow(x: np.ndarray, nulls: bool) -> Any:
    """Return a pyarrow array, perhaps a slice, with nulls instead of the marks of missing values."""
    import pyarrow as pa

    flat = x.reshape(-1)
    mark: Any = b"" if flat.dtype == object else -1
    kind = pa.binary() if flat.dtype == object else None
    values = pa.array(flat, kind, mask=flat == mark) if nulls else pa.array(flat, kind)
    return values if x.ndim == 1 else pa.FixedSizeListArray.from_arrays(values, x.shape[1])


def _references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    """Return bounds: sums of weights may be rounded, all else is equal, and a NaN equals any NaN."""
    return near(theirs, 1e-6, 1e-5, lambda name: "_indicator" in name)


OPERATORS: dict[str, Operator] = {
    _NAME: Operator(_random, _hand_picked, references=_references, run_tensorflow=_run_tensorflow, run_ours=_run_ours)
}
