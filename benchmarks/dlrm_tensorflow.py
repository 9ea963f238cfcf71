"""DLRM beside TensorFlow: the same weights, the same batches. This module imports TensorFlow."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from torchsparse_rec.data.criteo import CATEGORIES
from torchsparse_rec.distributed.torchrun import Ranks
from torchsparse_rec.examples import _common
from torchsparse_rec.examples.dlrm import DLRM, Batch, make_model

from .compared import Comparison, compare_steps
from .tensorflow_training import Optimizer, Step, linear, use_torch_threads

KERAS_SUM = 0.1

#: A lookup and an update for each category's table, or one of both for all tables in one.
FORMS = ("separate tables", "stacked tables")


class TensorflowStep(Step):
    """
    Forward, backward and update in TensorFlow.

    An example has one id in each category, so that a gather is all there is to a lookup.

    Args:
        settings: the run's settings; tables are hashed, the optimizer is Adagrad by Keras's rule or gradient descent.
        model: the model with the initial weights; it is not trained.
        form: one of FORMS.
    """

    def __init__(self, settings: Namespace, model: DLRM, form: str) -> None:
        use_torch_threads()
        self._stacked, self._buckets, self._vectors = form == FORMS[1], settings.buckets, model.layers.vectors
        state = model.bags.state_dict()
        rows = [state[f"embedding_bags.{name}.weight"].numpy() for name in CATEGORIES]
        self._tables = [tf.Variable(table) for table in ([np.concatenate(rows)] if self._stacked else rows)]
        self._firsts = tf.constant(np.arange(len(rows)) * settings.buckets)
        self._places = tf.constant(model.layers.places.numpy())
        self._dense = {name: tf.Variable(value.numpy()) for name, value in model.layers.state_dict().items()}
        variables = [*self._dense.values(), *self._tables]
        super().__init__(Optimizer(settings.optimizer, settings.lr, variables, KERAS_SUM))

    def prepare(self, batch: Batch) -> tuple[Any, ...]:
        """Copy a batch into TensorFlow's tensors: labels, numbers, and raw ids in the order of the lookup."""
        ids = batch.ids.t().contiguous() if self._stacked else batch.ids
        return tuple(tf.constant(x.numpy()) for x in (batch.labels, batch.numbers, ids))

    def weights(self) -> dict[str, np.ndarray]:
        """Return the trained weights, as the network's ``state_dict()`` names them."""
        rows = [part for table in self._tables for part in table.numpy().reshape(-1, self._buckets, table.shape[1])]
        tables = {f"bags.embedding_bags.{name}.weight": part for name, part in zip(CATEGORIES, rows, strict=True)}
        return {**tables, **{f"layers.{name}": variable.numpy() for name, variable in self._dense.items()}}

    def _logits(self, numbers: Any, ids: Any) -> Any:
        ids = tf.strings.to_hash_bucket_fast(tf.as_string(ids), self._buckets)
        dense = tf.nn.relu(self._perceptron("bottom", numbers))
        if self._stacked:
            vectors = tf.concat([dense[:, None], tf.gather(self._tables[0], ids + self._firsts)], 1)
        else:
            rows = [tf.gather(table, each) for table, each in zip(self._tables, tf.unstack(ids), strict=True)]
            vectors = tf.stack([dense, *rows], 1)
        products = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), [-1, self._vectors**2])
        products = tf.gather(products, self._places, axis=1)
        return tf.squeeze(self._perceptron("top", tf.concat([dense, products], 1)), 1)

    def _perceptron(self, name: str, x: Any) -> Any:
        """Return the last layer without a ReLU."""
        for layer in range(sum(each.startswith(f"{name}.weights.") for each in self._dense)):
            x = tf.nn.relu(x) if layer else x
            x = linear(x, self._dense[f"{name}.weights.{layer}"], self._dense[f"{name}.biases.{layer}"])
        return x


def our_step(settings: Namespace, model: DLRM) -> Callable[[Batch], Any]:
    """Return our training step. Adagrad's sums begin at Keras's 0.1 and not at 0, from where it amplifies rounding."""
    options: dict[str, Any] = {"initial_accumulator_value": KERAS_SUM} if settings.optimizer == "adagrad" else {}
    make: Any = _common.OPTIMIZERS[settings.optimizer]
    optimizer, ranks = make(model.parameters(), lr=settings.lr, in_backward=True, **options), Ranks()
    return lambda batch: _common.train(model, optimizer, model(batch.numbers, batch.ids), batch.labels, ranks)


def compare(settings: Namespace, source: Any, steps: int, print_line: Callable[[str], None] = print) -> Comparison:
    """
    Compare as :func:`compare_steps` does. Ids are raw on both sides when a step begins.

    Args:
        settings: the run's settings; tables are hashed, the optimizer is Adagrad or gradient descent.
        source: a source of batches, all of one size.
        steps: the number of steps.
        print_line: a function that is called with each line.
    """
    model = make_model(settings)

    def theirs(form: str) -> TensorflowStep:
        return TensorflowStep(settings, model, form)

    return compare_steps(our_step(settings, model), theirs, FORMS, source, steps, print_line)
