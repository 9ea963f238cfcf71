"""Parity check of feature columns: the runs on both sides."""

from __future__ import annotations

import importlib
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import SparseTensor
from .bounds import near
from .case import Case, Outcome, Reference


def built(spec: Any, module: Any, folder: str, dtype: Callable[[str], Any], counter: Any) -> Any:
    """Make a column from its specification by a module's functions."""
    if isinstance(spec, (list, tuple)):
        return [built(item, module, folder, dtype, counter) for item in spec]
    if not isinstance(spec, dict):
        return spec
    arguments = {name: built(x, module, folder, dtype, counter) for name, x in spec["arguments"].items()}
    if "dtype" in arguments:
        arguments["dtype"] = dtype(arguments["dtype"])
    if "vocabulary_file" in arguments and isinstance(arguments["vocabulary_file"], bytes):
        file = Path(folder, f"words{next(counter)}")
        file.write_bytes(arguments["vocabulary_file"])
        arguments["vocabulary_file"] = str(file)
    return getattr(module, spec["function"])(**arguments)


def _table(column_buckets: int, dimension: int) -> np.ndarray:
    """Return a table of small integers, whose sums are exact."""
    return (np.arange(column_buckets * dimension) % 17 - 8).reshape(column_buckets, dimension).astype(np.float32)


# ---- TensorFlow -----------------------------------------------------------------------------------------------------


def run_tensorflow(tf: Any, arguments: dict[str, Any]) -> Any:
    tf.get_logger().setLevel("ERROR")
    v2 = importlib.import_module("tensorflow.python.feature_column.feature_column_v2")
    features = {
        name: tf.constant(x, tf.string) if isinstance(x, np.ndarray) else x for name, x in arguments["features"].items()
    }
    with tempfile.TemporaryDirectory() as folder:
        column = built(arguments["column"], tf.feature_column, folder, tf.as_dtype, itertools.count())
        if isinstance(column, v2.EmbeddingColumn):
            pair = column.categorical_column.get_sparse_tensors(v2.FeatureTransformationCache(features), None)
            table = tf.constant(_table(column.categorical_column.num_buckets, column.dimension))
            return tf.nn.safe_embedding_lookup_sparse(
                table, pair.id_tensor, pair.weight_tensor, combiner=column.combiner
            )
        return their_parts(tf, column, features)


def their_parts(tf: Any, column: Any, features: dict[str, Any]) -> dict[str, Any]:
    """Return the result of TensorFlow's column for a batch: numbers, ids, or both."""
    v2 = importlib.import_module("tensorflow.python.feature_column.feature_column_v2")
    cache = v2.FeatureTransformationCache(features)
    found: dict[str, Any] = {}
    if isinstance(column, v2.DenseColumn):
        dense = column.get_dense_tensor(cache, None)
        found["dense"] = tf.reshape(dense, [dense.shape[0], -1])
    if isinstance(column, v2.SequenceCategoricalColumn):
        found |= _steps_of(tf, column.get_sparse_tensors(cache, None).id_tensor, column.num_buckets)
    elif isinstance(column, v2.CategoricalColumn):
        found |= _rows_of(tf, column.get_sparse_tensors(cache, None))
    elif not found:
        steps, lengths = column.get_sequence_dense_tensor(cache, None)
        found |= {"dense": steps, "lengths": lengths}
    return found


def _rows_of(tf: Any, pair: Any) -> dict[str, Any]:
    """Return the ids that tables have rows for, the number of them in each row, and their weights if there are any."""
    ids = tf.cast(pair.id_tensor.values, tf.int64)
    kept = ids >= 0
    rows = tf.boolean_mask(pair.id_tensor.indices[:, 0], kept)
    counts = tf.math.bincount(tf.cast(rows, tf.int32), minlength=int(pair.id_tensor.dense_shape[0]), dtype=tf.int64)
    found = {"ids": tf.boolean_mask(ids, kept), "lengths": counts}
    if pair.weight_tensor is not None:
        found["weights"] = tf.boolean_mask(pair.weight_tensor.values, kept)
    return found


def _steps_of(tf: Any, ids: Any, num_buckets: int) -> dict[str, Any]:
    """Return the id of each step, -1 if a table has no row for it, and the lengths of the sequences."""
    utils = importlib.import_module("tensorflow.python.feature_column.utils")
    lengths = utils.sequence_length_from_sparse_tensor(ids)
    steps = tf.sparse.to_dense(tf.sparse.reshape(ids, ids.dense_shape[:2]), -1)
    longest = tf.reduce_max(tf.concat([lengths, [0]], 0))
    return {"steps": tf.clip_by_value(tf.cast(steps[:, :longest], tf.int64), -1, num_buckets), "lengths": lengths}


# ---- Ours -----------------------------------------------------------------------------------------------------------


def run_ours(_: Any, arguments: dict[str, Any]) -> Any:
    from ... import features as ours
    from ...nn import EmbeddingBagCollection, EmbeddingBagConfig

    batch = {name: _ours(x) for name, x in arguments["features"].items()}
    with tempfile.TemporaryDirectory() as folder:
        column = built(arguments["column"], ours, folder, str, itertools.count())
        # The column is made again from its configuration, which must give the same column.
        column = ours.column_from_config(column.to_config())
        transform = transform_of([column])
        features = transform(batch)
    if isinstance(column, ours.EmbeddingColumn):
        weighted = bool(transform.weighted_embedding_bag_configs())
        (config,) = transform.weighted_embedding_bag_configs() if weighted else transform.embedding_bag_configs()
        assert isinstance(config, EmbeddingBagConfig)
        bags = EmbeddingBagCollection([config], is_weighted=weighted)
        with torch.no_grad():
            next(bags.parameters()).copy_(torch.from_numpy(_table(config.num_embeddings, config.embedding_dim)))
            return bags(features.weighted if weighted else features.sparse).values()
    return our_parts(column, transform, features)


def transform_of(columns: list[Any], **options: Any) -> Any:
    """Return a transform that makes the numbers of the columns that have any, and the ids of the others."""
    from ... import features as ours

    linear = [
        x
        for x in columns
        if isinstance(x, ours.CategoricalColumn) and not isinstance(x, ours.SequenceCategoricalColumn)
    ]
    others = [x for x in columns if x not in linear or isinstance(x, ours.DenseColumn)]
    return ours.FeatureTransform(others, linear, **options)


def our_parts(column: Any, transform: Any, made: Any) -> dict[str, Any]:
    """Return what :func:`their_parts` does, of our column."""
    from ... import features as ours

    if isinstance(column, ours.SequenceNumericColumn):
        steps = made.sequence_dense[column.name]
        return {"dense": steps.to_padded_dense(), "lengths": steps.lengths()}
    found: dict[str, Any] = {}
    if isinstance(column, ours.DenseColumn):
        found["dense"] = made.dense[:, transform.dense_slices()[column.name]]
    if isinstance(column, ours.SequenceCategoricalColumn):
        found |= _our_steps(made.sequence[column.name], column.num_buckets)
    elif isinstance(column, ours.CategoricalColumn):
        is_weighted = isinstance(column, ours.WeightedCategoricalColumn)
        found |= _ids((made.weighted if is_weighted else made.sparse)[column.name])
    return found


def _our_steps(rows: Any, num_buckets: int) -> dict[str, Any]:
    """Return the steps of our ids as :func:`_steps_of` does: ours has ``num_buckets``, not -1, for a missing id."""
    ids = rows.values()
    steps = torch.where(ids == num_buckets, -1, torch.where(ids > num_buckets, num_buckets, ids))
    lengths = rows.lengths()
    padded = torch.full((len(lengths), int(lengths.max()) if len(lengths) else 0), -1)
    padded[torch.arange(padded.shape[1]) < lengths.unsqueeze(1)] = steps
    return {"steps": padded, "lengths": lengths}


def _ids(rows: Any) -> dict[str, Tensor]:
    """Return the ids that tables have rows for: where missing values are not dropped, negative ids must be removed."""
    kept = rows.values() >= 0
    which = torch.repeat_interleave(rows.lengths())[kept]
    found = {"ids": rows.values()[kept], "lengths": torch.bincount(which, minlength=rows.lengths().shape[0])}
    if rows.weights_or_none() is not None:
        found["weights"] = rows.weights()[kept]
    return found


def has_holes(x: SparseTensor) -> bool:
    """Say whether the values of some row have gaps between them, which only a sparse tensor can express."""
    rows, places = (column.contiguous() for column in x.indices.unbind(1))
    return not torch.equal(places, torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows))


def offsets_of(x: SparseTensor) -> Tensor:
    """Return where the rows of a sparse tensor without holes begin among its values, and where the last ends."""
    counts = torch.bincount(x.indices[:, 0], minlength=int(x.dense_shape[0]))
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _ours(x: Any) -> Any:
    return x if not isinstance(x, SparseTensor) or has_holes(x) else (x.values, offsets_of(x))


def references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    """Return bounds: sums of small integers are exact; quotients and weighted sums may be rounded. NaNs are alike."""
    return near(theirs, 1e-6, 1e-5, lambda _: case.operator.endswith(("embedding_column", "indicator_column")))
