"""Wide & Deep beside TensorFlow, in its fastest form: the same weights and batches. This module imports TensorFlow."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from torchsparse_rec.examples.wide_deep import HOTS, NUMBERS, Batch, WideDeep, make_model, make_transform

from .compared import Comparison, compare_steps
from .tensorflow_training import Optimizer, Step, linear, use_torch_threads
from .wide_deep_training import our_step

LOOKUPS = ("safe_embedding_lookup_sparse", "gather")
TABLES = ("separate", "joined")


@dataclass(frozen=True)
class Form:
    """
    A way in which TensorFlow's side looks up.

    Args:
        lookup: ``"safe_embedding_lookup_sparse"``, its function for any number of ids, or ``"gather"``, which makes use
            of all examples having equally many.
        tables: ``"separate"`` for the embeddings and the wide part, or ``"joined"``: rows that hold both, as ours.
    """

    lookup: str
    tables: str

    def __str__(self) -> str:
        return f"{self.lookup}, {self.tables} tables"


FORMS = [Form(lookup, tables) for tables in TABLES for lookup in LOOKUPS]


class TensorflowTables:
    """
    TensorFlow's tables of all features.

    Args:
        rows: a table ``[rows, dim + 1]`` for each feature.
        hots: ids of each feature in an example.
        hashed: whether ids are hashed first, as their decimal text.
        batch: examples in a batch.
        form: how tables are looked up.
    """

    def __init__(self, rows: Sequence[np.ndarray], hots: Sequence[int], hashed: bool, batch: int, form: Form) -> None:
        self.form, self._hots, self._hashed, self._batch = form, list(hots), hashed, batch
        self._buckets = [table.shape[0] for table in rows]
        joined = form.tables == "joined"
        self.parts = [[tf.Variable(table) for table in rows]] if joined else _separated(rows)
        # Embeddings are pooled by mean, the wide part's weights by sum. Joined rows are pooled by mean and scaled
        # later.
        self._combiners = ["mean"] if joined else ["mean", "sum"]
        self._places = {hot: tf.constant(_places(batch, hot)) for hot in set(self._hots)}
        self.variables = [variable for part in self.parts for variable in part]

    def look_up(self, columns: Sequence[Any]) -> list[list[Any]]:
        """Return the pooled rows ``[batch, width]`` of each feature, in a list for each part of the tables."""
        if self._hashed:
            columns = [
                tf.strings.to_hash_bucket_fast(tf.as_string(ids), buckets)
                for ids, buckets in zip(columns, self._buckets, strict=True)
            ]
        return [
            [self._pooled(*each, combiner) for each in zip(part, columns, self._hots, strict=True)]
            for part, combiner in zip(self.parts, self._combiners, strict=True)
        ]

    def _pooled(self, table: Any, ids: Any, hot: int, combiner: str) -> Any:
        if self.form.lookup == "safe_embedding_lookup_sparse":
            sparse = tf.SparseTensor(self._places[hot], tf.cast(ids, tf.int64), [self._batch, hot])
            return tf.nn.safe_embedding_lookup_sparse(table, sparse, combiner=combiner)
        rows = tf.nn.embedding_lookup(table, ids)
        if hot == 1:
            return rows
        pooled = tf.reduce_mean if combiner == "mean" else tf.reduce_sum
        return pooled(tf.reshape(rows, [self._batch, hot, -1]), 1)

    def rows(self) -> list[np.ndarray]:
        """Return the trained tables ``[rows, dim + 1]``."""
        return [np.concatenate([part[n].numpy() for part in self.parts], 1) for n in range(len(self._hots))]


def _separated(rows: Sequence[np.ndarray]) -> list[list[Any]]:
    embeddings = [tf.Variable(np.ascontiguousarray(table[:, :-1])) for table in rows]
    return [embeddings, [tf.Variable(np.ascontiguousarray(table[:, -1:])) for table in rows]]


def _places(batch: int, hot: int) -> np.ndarray:
    """Return the row and column of each id in a batch, ``[batch * hot, 2]``."""
    places = np.arange(batch * hot)
    return np.stack([places // hot, places % hot], 1)


class TensorflowStep(Step):
    """
    Forward, backward and gradient descent in TensorFlow.

    Args:
        settings: the run's settings.
        model: the model with the initial weights; it is not trained.
        form: how tables are looked up.
    """

    def __init__(self, settings: Namespace, model: WideDeep, form: Form) -> None:
        use_torch_threads()
        self._names = model.names
        state, tables = model.state_dict(), model.bags.embedding_bag_configs()
        rows = [state.pop(f"bags.embedding_bags.{table.name}.weight").numpy() for table in tables]
        hots, is_hashed = [HOTS[name] for name in self._names], settings.columns == "hashed"
        self.tables = TensorflowTables(rows, hots, is_hashed, settings.batch_size, form)
        self._dense = {name: tf.Variable(value.numpy()) for name, value in state.items()}
        self._features, self._dim = model.features, model.embedding_dim
        self._chosen = tf.constant(model.get_buffer("chosen").numpy())
        self._layers = len(model.hidden)
        super().__init__(Optimizer("sgd", settings.lr, [*self._dense.values(), *self.tables.variables]))

    def prepare(self, batch: Batch) -> Any:
        """Copy a batch into TensorFlow's tensors: labels, numbers in one, ids flat for each feature."""
        numbers = torch.stack([batch.columns[name] for name in NUMBERS], 1)
        ids = [tf.constant(batch.columns[name].flatten().numpy()) for name in self._names]
        return tf.constant(batch.labels.numpy()), tf.constant(numbers.numpy()), ids

    def weights(self) -> dict[str, np.ndarray]:
        """Return the trained dense weights by name."""
        return {name: variable.numpy() for name, variable in self._dense.items()}

    def _logits(self, numbers: Any, ids: list[Any]) -> Any:
        dense, pooled = self._dense, self.tables.look_up(ids)
        hidden, wide = self._joined(numbers, pooled[0]) if len(pooled) == 1 else self._separate(numbers, *pooled)
        for layer in range(1, self._layers):
            hidden = tf.nn.relu(linear(hidden, dense[f"hidden.{layer}.weight"], dense[f"hidden.{layer}.bias"]))
        deep = linear(hidden, dense["output.weight"], dense["output.bias"])
        return tf.squeeze(deep + wide, axis=1)

    def _separate(self, numbers: Any, embeddings: list[Any], weights: list[Any]) -> tuple[Any, Any]:
        """Return the first hidden layer and the wide part's logit, from separate tables."""
        dense = self._dense
        product = tf.matmul(tf.concat([*embeddings, numbers], 1), dense["hidden.0.weight"], transpose_b=True)
        wide = tf.add_n(weights) + tf.matmul(numbers, dense["wide.weight"], transpose_b=True) + dense["wide.bias"]
        return tf.nn.relu(tf.nn.bias_add(product, dense["hidden.0.bias"])), wide

    def _joined(self, numbers: Any, rows: list[Any]) -> tuple[Any, Any]:
        """Return the first hidden layer and the wide part's logit, from joined rows by one product, as ours."""
        dense, embeddings = self._dense, self._features * self._dim
        weight = dense["hidden.0.weight"]
        deep = tf.pad(tf.reshape(weight[:, :embeddings], [-1, self._features, self._dim]), [[0, 0], [0, 0], [0, 1]])
        of_rows = tf.concat([tf.reshape(deep, [-1, self._features * (self._dim + 1)]), self._chosen], 0)
        of_numbers = tf.concat([weight[:, embeddings:], dense["wide.weight"]], 0)
        both = tf.matmul(tf.concat([*rows, numbers], 1), tf.concat([of_rows, of_numbers], 1), transpose_b=True)
        both = tf.nn.bias_add(both, tf.concat([dense["hidden.0.bias"], dense["wide.bias"]], 0))
        return tf.nn.relu(both[:, :-1]), both[:, -1:]


def compare(settings: Namespace, source: Any, steps: int, print_line: Callable[[str], None] = print) -> Comparison:
    """
    Compare as :func:`compare_steps` does. Columns are raw on both sides when a step begins.

    Args:
        settings: the run's settings; the optimizer is gradient descent.
        source: a source of batches, all of one size.
        steps: the number of steps.
        print_line: a function that is called with each line.

    Raises:
        ValueError: the optimizer is another one.
    """
    if settings.optimizer != "sgd":
        raise ValueError(f"--compare trains by gradient descent, got --optimizer {settings.optimizer}")
    model = make_model(make_transform(settings), settings)

    def theirs(form: Form) -> TensorflowStep:
        return TensorflowStep(settings, model, form)

    return compare_steps(our_step(settings, model), theirs, FORMS, source, steps, print_line)
