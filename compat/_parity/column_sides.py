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


def run_tensorflow(tf: Any, arguments: dict[str, Any]) -> Any:
    tf.get_logger().setLevel("ERROR")
    v2 = importlib.import_module("tensorflow.python.feature_column.feature_column_v2")
    features = {
        name: tf.constant(x, tf.string) if isinstance(x, np.ndarray) else x for name, x in arguments["features"].items()
    }
    with tempfile.TemporaryDirectory() as folder:
        column = built(arguments["column"], tf.feature_column, folder, tf.as_dtype, itertools.count())
        cache = v2.FeatureTransformationCache(features)
        if isinstance(column, v2.EmbeddingColumn):
            pair = column.categorical_column.get_sparse_tensors(cache, None)
            table = tf.constant(_table(column.categorical_column.num_buckets, column.dimension))
            return tf.nn.safe_embedding_lookup_sparse(
                table, pair.id_tensor, pair.weight_tensor, combiner=column.combiner
            )
        results: dict[str, Any] = {}
        if isinstance(column, v2.DenseColumn):
            dense = column.get_dense_tensor(cache, None)
            results["dense"] = tf.reshape(dense, [dense.shape[0], -1])
        if isinstance(column, v2.SequenceCategoricalColumn):
            results |= steps_of(tf, column.get_sparse_tensors(cache, None).id_tensor, column.num_buckets)
        elif isinstance(column, v2.CategoricalColumn):
            results |= rows_of(tf, column.get_sparse_tensors(cache, None))
        if type(column).__name__ == "SequenceNumericColumn":
            dense, lengths = column.get_sequence_dense_tensor(cache, None)
            results |= {"dense": dense, "lengths": lengths}
        return results


def rows_of(tf: Any, pair: Any) -> dict[str, Any]:
    """Return the ids that tables have rows for, the number of them in each row, and their weights if there are any."""
    ids = tf.cast(pair.id_tensor.values, tf.int64)
    kept = ids >= 0
    rows = tf.boolean_mask(pair.id_tensor.indices[:, 0], kept)
    counts = tf.math.bincount(tf.cast(rows, tf.int32), minlength=int(pair.id_tensor.dense_shape[0]), dtype=tf.int64)
    found = {"ids": tf.boolean_mask(ids, kept), "lengths": counts}
    if pair.weight_tensor is not None:
        found["weights"] = tf.boolean_mask(pair.weight_tensor.values, kept)
    return found


def steps_of(tf: Any, ids: Any, num_buckets: int) -> dict[str, Any]:
    """Return the id of each step, -1 if a table has no row for it, and the lengths of the sequences."""
    utils = importlib.import_module("tensorflow.python.feature_column.utils")
    lengths = utils.sequence_length_from_sparse_tensor(ids)
    steps = tf.sparse.to_dense(tf.sparse.reshape(ids, ids.dense_shape[:2]), -1)
    longest = tf.reduce_max(tf.concat([lengths, [0]], 0))
    return {"steps": tf.clip_by_value(tf.cast(steps[:, :longest], tf.int64), -1, num_buckets), "lengths": lengths}


def our_steps(rows: Any, num_buckets: int) -> dict[str, Any]:
    """Return the steps of our ids as :func:`steps_of` does: ours has ``num_buckets``, not -1, for a missing id."""
    ids = rows.values()
    steps = torch.where(ids == num_buckets, -1, torch.where(ids > num_buckets, num_buckets, ids))
    lengths = rows.lengths()
    padded = torch.full((len(lengths), int(lengths.max()) if len(lengths) else 0), -1)
    padded[torch.arange(padded.shape[1]) < lengths.unsqueeze(1)] = steps
    return {"steps": padded, "lengths": lengths}


def run_ours(_: Any, arguments: dict[str, Any]) -> Any:
    from ... import features as ours
    from ...nn import EmbeddingBagCollection, EmbeddingBagConfig

    batch = {name: _ours(x) for name, x in arguments["features"].items()}
    with tempfile.TemporaryDirectory() as folder:
        column = built(arguments["column"], ours, folder, str, itertools.count())
        # The column is made again from its configuration, which must give the same column.
        column = ours.column_from_config(column.to_config())
        categorical = isinstance(column, ours.CategoricalColumn)
        columns = [column] if not categorical or isinstance(column, ours.DenseColumn) else []
        linear: list[Any] = [column] if categorical and not isinstance(column, ours.SequenceCategoricalColumn) else []
        transform = ours.FeatureTransform(columns or ([] if linear else [column]), linear)
        features = transform(batch)
    if isinstance(column, ours.EmbeddingColumn):
        weighted = bool(transform.weighted_embedding_bag_configs())
        (config,) = transform.weighted_embedding_bag_configs() if weighted else transform.embedding_bag_configs()
        assert isinstance(config, EmbeddingBagConfig)
        bags = EmbeddingBagCollection([config], is_weighted=weighted)
        with torch.no_grad():
            next(bags.parameters()).copy_(torch.from_numpy(_table(config.num_embeddings, config.embedding_dim)))
            return bags(features.weighted if weighted else features.sparse).values()
    results: dict[str, Any] = {}
    if features.dense is not None:
        results["dense"] = features.dense
    ids = features.sparse or features.weighted
    if features.sequence is not None:
        assert isinstance(column, ours.CategoricalColumn)
        results |= our_steps(features.sequence["x"], column.num_buckets)
    elif ids is not None:
        results |= {"ids": ids.values(), "lengths": ids.lengths()}
        if ids.weights_or_none() is not None:
            results["weights"] = ids.weights()
    if features.sequence_dense is not None:
        steps = features.sequence_dense["x"]
        results |= {"dense": steps.to_padded_dense(), "lengths": steps.lengths()}
    return results


def has_holes(x: SparseTensor) -> bool:
    """Say whether the values of some row have gaps between them, which only a sparse tensor can express."""
    rows, places = x.indices.unbind(1)
    return not torch.equal(places, torch.arange(len(rows)) - torch.searchsorted(rows.contiguous(), rows.contiguous()))


def _ours(x: Any) -> Any:
    if not isinstance(x, SparseTensor) or has_holes(x):
        return x
    batch = int(x.dense_shape[0])
    counts = torch.bincount(x.indices[:, 0], minlength=batch)
    return x.values, torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    """Return bounds: sums of small integers are exact; quotients and weighted sums may be rounded. NaNs are alike."""
    rounded = case.operator.endswith(("embedding_column", "indicator_column"))
    return {
        name: Reference(x.numpy().astype(np.float64), np.abs(x.numpy()) * 1e-6 + 1e-5 if rounded else np.zeros(x.shape))
        for name, x in theirs.values.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
