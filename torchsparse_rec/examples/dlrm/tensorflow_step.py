"""DLRM's training step in TensorFlow, in its fastest form. This module imports TensorFlow, an extra."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ...data.criteo import CATEGORIES
from .._tensorflow import Optimizer, Step, linear, use_torch_threads
from .data import Batch
from .model import DLRM
from .settings import Settings

TABLES = ("separate", "stacked")
PRODUCTS = ("gathered", "masked", "matmul")


@dataclass(frozen=True)
class Form:
    """
    A way in which TensorFlow's side computes the same.

    Args:
        tables: ``"separate"``, a lookup and an update for each, or ``"stacked"``: one table for all categories.
        products: those of all pairs of vectors are ``"gathered"`` from the square matrix of all products, or the whole
            matrix goes into the next layer, whose weights are ``"masked"``: 0 for the others.
    """

    tables: str
    products: str

    def __str__(self) -> str:
        return f"{self.tables} tables, {self.products} products"


FORMS = [Form(tables, products) for tables in TABLES for products in PRODUCTS]


class TensorflowStep(Step):
    """
    Forward, backward and update in TensorFlow.

    An example has one id in each category, so that a gather is all there is to a lookup.

    Args:
        settings: the run's settings; tables are hashed, the optimizer is Adagrad or gradient descent.
        model: where the initial weights come from; it is not trained.
        form: how it is computed.
    """

    def __init__(self, settings: Settings, model: DLRM, form: Form) -> None:
        use_torch_threads()
        self._buckets, self._form, self._vectors = settings.buckets, form, model.layers.vectors
        self._state = {name: value.numpy() for name, value in model.layers.state_dict().items()}
        self._dense = {name: tf.Variable(value) for name, value in self._state.items()}
        state = model.bags.state_dict()
        rows = [state[f"embedding_bags.{name}.weight"].numpy() for name in CATEGORIES]
        stacked = form.tables == "stacked"
        self._tables = [tf.Variable(np.concatenate(rows))] if stacked else [tf.Variable(table) for table in rows]
        self._firsts = tf.constant(np.arange(len(rows)) * settings.buckets)
        places, count = model.layers.places.numpy(), self._vectors**2
        self._places = tf.constant(places)
        # Where each product of the square matrix has its weight; those above and on the diagonal have the last one, 0.
        columns = np.full(count, len(places))
        columns[places] = np.arange(len(places))
        self._columns = tf.constant(columns)
        self._sel = tf.constant(np.eye(count, dtype=np.float32)[places])
        super().__init__(
            Optimizer(settings.optimizer, settings.learning_rate(), [*self._dense.values(), *self._tables])
        )

    def prepare(self, batch: Batch) -> tuple[Any, ...]:
        """Copy a batch into TensorFlow's tensors: labels, numbers, and raw ids in the order in which they are used."""
        ids = batch.ids.t().contiguous() if self._form.tables == "stacked" else batch.ids
        return tuple(tf.constant(x.numpy()) for x in (batch.labels, batch.numbers, ids))

    def _logits(self, numbers: Any, ids: Any) -> Any:
        ids = tf.strings.to_hash_bucket_fast(tf.as_string(ids), self._buckets)
        dense = tf.nn.relu(self._perceptron("bottom", numbers))
        if self._form.tables == "stacked":
            rows = tf.gather(self._tables[0], ids + self._firsts)  # [B, 26, D]
            vectors = tf.concat([dense[:, None], rows], 1)
        else:
            found = [tf.gather(table, each) for table, each in zip(self._tables, tf.unstack(ids), strict=True)]
            vectors = tf.stack([dense, *found], 1)
        products = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), [-1, self._vectors**2])
        first = self._dense["top.weights.0"]
        if self._form.products == "gathered":
            products = tf.gather(products, self._places, axis=1)
        elif self._form.products == "matmul":
            dim = dense.shape[1]
            first = tf.concat([first[:, :dim], tf.matmul(first[:, dim:], self._sel)], 1)
        else:
            dim = dense.shape[1]
            masked = tf.gather(tf.pad(first[:, dim:], [[0, 0], [0, 1]]), self._columns, axis=1)
            first = tf.concat([first[:, :dim], masked], 1)
        return tf.squeeze(self._perceptron("top", tf.concat([dense, products], 1), first), 1)

    def _perceptron(self, name: str, x: Any, first: Any = None) -> Any:
        """Return the last layer without a ReLU, by another first weight if it is given."""
        layers = sum(each.startswith(f"{name}.weights.") for each in self._dense)
        for layer in range(layers):
            weight = self._dense[f"{name}.weights.{layer}"] if layer or first is None else first
            x = linear(x if layer == 0 else tf.nn.relu(x), weight, self._dense[f"{name}.biases.{layer}"])
        return x
