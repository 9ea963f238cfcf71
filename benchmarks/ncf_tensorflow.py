"""NeuMF's training step in TensorFlow, as its official model does it. This module imports TensorFlow, an extra."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
import torch

from torchsparse_rec.examples.ncf import Batch, NeuMF

from .tensorflow_training import Optimizer, Step, linear, use_torch_threads

BETA1, BETA2, EPS = 0.9, 0.999, 1e-7


class DenseOptimizer(Optimizer):
    """Adam with Keras's place of eps, too. IndexedSlices are made dense, as TensorFlow's NCF does."""

    STATES = {**Optimizer.STATES, "adam": 2}

    def __init__(self, name: str, lr: float, variables: Iterable[Any]) -> None:
        super().__init__(name, lr, variables)
        self._lr, self._steps = lr, tf.Variable(0.0, dtype=tf.float64)

    def step(self, gradients: Iterable[Any]) -> None:
        """Update the variables by their gradients."""
        self._steps.assign_add(1.0)
        super().step(map(tf.convert_to_tensor, gradients))

    def _adam(self, variable: Any, states: list[Any], gradient: Any) -> None:
        # The kernel computes lr sqrt(1 - beta2_power) / (1 - beta1_power) in float32. Here it is computed in float64.
        bias1, bias2 = 1.0 - BETA1**self._steps, 1.0 - BETA2**self._steps
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=states[0].handle,
            v=states[1].handle,
            beta1_power=0.0,
            beta2_power=0.0,
            lr=tf.cast(self._lr * tf.sqrt(bias2) / bias1, tf.float32),
            beta1=BETA1,
            beta2=BETA2,
            epsilon=EPS,
            grad=gradient,
        )


class TensorflowStep(Step):
    """
    Forward, backward and update in TensorFlow.

    Args:
        model: the model with the initial weights; it is not trained.
        settings: the run's settings.
    """

    def __init__(self, model: NeuMF, settings: Namespace) -> None:
        use_torch_threads()
        self._model = model
        self._variables = {name: tf.Variable(value.numpy()) for name, value in model.state_dict().items()}
        super().__init__(DenseOptimizer(settings.optimizer, settings.lr, self._variables.values()))
        signature = [tf.TensorSpec([None], dtype) for dtype in (tf.float32, tf.int32, tf.int32)]
        self._function = self._function.get_concrete_function(*signature)

    def prepare(self, batches: list[Batch]) -> list[tuple[Any, ...]]:
        """Copy the batches into TensorFlow's tensors, the labels first."""
        return [
            tuple(tf.constant(column.cpu().numpy()) for column in (batch.labels, batch.users, batch.items))
            for batch in batches
        ]

    def network(self) -> NeuMF:
        """Return a PyTorch network with the trained weights."""
        state = {name: torch.from_numpy(variable.numpy()) for name, variable in self._variables.items()}
        self._model.load_state_dict(state)
        return self._model

    def _logits(self, users: Any, items: Any) -> Any:
        weights, model = self._variables, self._model
        widths = model.widths
        gmf_user, mlp_user = tf.split(tf.gather(weights["user_table.weight"], users), widths, axis=1)
        gmf_item, mlp_item = tf.split(tf.gather(weights["item_table.weight"], items), widths, axis=1)
        hidden = tf.concat([mlp_user, mlp_item], axis=1)
        for layer in range(len(model.mlp)):
            hidden = tf.nn.relu(linear(hidden, weights[f"mlp.{layer}.weight"], weights[f"mlp.{layer}.bias"]))
        last = tf.concat([gmf_user * gmf_item, hidden], axis=1)
        return tf.squeeze(linear(last, weights["output.weight"], weights["output.bias"]), axis=1)
