"""NeuMF's training step in TensorFlow, as its official model does it. This module imports TensorFlow, an extra."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch

from .._comparison import use_torch_threads
from .model import NeuMF
from .sampling import Batch

BETA1, BETA2, EPS = 0.9, 0.999, 1e-7


class TensorflowStep:
    """
    Forward, backward and update in one ``tf.function``.

    The tables' IndexedSlices are made dense, as TensorFlow's NCF does, and each optimizer is TensorFlow's fused dense
    kernel. Adam's has Keras's place of eps.

    Args:
        model: where the initial weights come from; it is not trained.
        optimizer: ``adam``, ``sgd`` or ``adagrad``.
        lr: learning rate.
    """

    def __init__(self, model: NeuMF, optimizer: str, lr: float) -> None:
        use_torch_threads()
        self._model = model
        self._optimizer = optimizer
        self._lr = lr
        self._variables = {name: tf.Variable(value.numpy()) for name, value in model.state_dict().items()}
        slots = {"adam": 2, "adagrad": 1, "sgd": 0}[optimizer]
        self._slots = {
            name: [tf.Variable(tf.zeros_like(variable)) for _ in range(slots)]
            for name, variable in self._variables.items()
        }
        self._steps = tf.Variable(0.0, dtype=tf.float64)
        signature = [tf.TensorSpec([None], dtype) for dtype in (tf.int32, tf.int32, tf.float32)]
        self._function = tf.function(self._train, input_signature=signature).get_concrete_function()

    def prepare(self, batches: list[Batch]) -> list[tuple[Any, ...]]:
        """Copy the batches into TensorFlow's tensors."""
        return [tuple(tf.constant(column.cpu().numpy()) for column in batch) for batch in batches]

    def __call__(self, batch: tuple[Any, ...]) -> Any:
        """Train on one prepared batch, and return its mean loss."""
        return self._function(*batch)

    def network(self) -> NeuMF:
        """Return a PyTorch network with the trained weights."""
        state = {name: torch.from_numpy(variable.numpy()) for name, variable in self._variables.items()}
        self._model.load_state_dict(state)
        return self._model

    def _logits(self, users: Any, items: Any) -> Any:
        weights, model = self._variables, self._model
        widths = [model.factors, model.mlp_width]
        gmf_user, mlp_user = tf.split(tf.gather(weights["user_table.weight"], users), widths, axis=1)
        gmf_item, mlp_item = tf.split(tf.gather(weights["item_table.weight"], items), widths, axis=1)
        hidden = tf.concat([mlp_user, mlp_item], axis=1)
        for layer in range(len(model.mlp)):
            product = tf.matmul(hidden, weights[f"mlp.{layer}.weight"], transpose_b=True)
            hidden = tf.nn.relu(tf.nn.bias_add(product, weights[f"mlp.{layer}.bias"]))
        last = tf.concat([gmf_user * gmf_item, hidden], axis=1)
        return tf.squeeze(tf.matmul(last, weights["output.weight"], transpose_b=True) + weights["output.bias"], axis=1)

    def _train(self, users: Any, items: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = self._logits(users, items)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
        names = list(self._variables)
        gradients = tape.gradient(loss, [self._variables[name] for name in names])
        self._steps.assign_add(1.0)
        for name, gradient in zip(names, gradients, strict=True):
            self._update(self._variables[name], self._slots[name], tf.convert_to_tensor(gradient))
        return loss

    def _update(self, variable: Any, slots: list[Any], gradient: Any) -> None:
        if self._optimizer == "sgd":
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=self._lr, delta=gradient)
        elif self._optimizer == "adagrad":
            tf.raw_ops.ResourceApplyAdagradV2(
                var=variable.handle, accum=slots[0].handle, lr=self._lr, epsilon=1e-10, grad=gradient
            )
        else:
            # The kernel computes lr sqrt(1 - beta2_power) / (1 - beta1_power) in float32. Here it is computed in
            # float64.
            bias1, bias2 = 1.0 - BETA1**self._steps, 1.0 - BETA2**self._steps
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=slots[0].handle,
                v=slots[1].handle,
                beta1_power=0.0,
                beta2_power=0.0,
                lr=tf.cast(self._lr * tf.sqrt(bias2) / bias1, tf.float32),
                beta1=BETA1,
                beta2=BETA2,
                epsilon=EPS,
                grad=gradient,
            )
