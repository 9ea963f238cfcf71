"""TensorFlow's training step, which the comparisons share. This module imports TensorFlow, an extra."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import tensorflow as tf
import torch


def use_torch_threads() -> None:
    """Give TensorFlow as many threads as torch has, unless it has already started its own."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    except RuntimeError:
        pass


class Optimizer:
    """
    Gradient descent or Adagrad by TensorFlow's fused operators, as its own optimizers use them.

    With IndexedSlices it updates only the rows of a table that occur. Adagrad adds up a row's gradients first.

    Args:
        name: ``sgd`` or ``adagrad``.
        lr: learning rate.
        variables: the variables to train.
        initial: the initial value of Adagrad's sums of squares. Default 0.
    """

    #: The number of numbers kept for each weight, by name.
    STATES: ClassVar[Mapping[str, int]] = {"sgd": 0, "adagrad": 1}

    def __init__(self, name: str, lr: float, variables: Iterable[Any], initial: float = 0.0) -> None:
        self.variables, self._rate = list(variables), tf.constant(lr, tf.float32)
        count = self.STATES[name]
        self._states = [[tf.Variable(tf.fill(each.shape, initial)) for _ in range(count)] for each in self.variables]
        self._update: Callable[[Any, list[Any], Any], None] = getattr(self, f"_{name}")

    def step(self, gradients: Iterable[Any]) -> None:
        """Update the variables by their gradients, tensors or IndexedSlices."""
        for variable, states, gradient in zip(self.variables, self._states, gradients, strict=True):
            self._update(variable, states, gradient)

    def _sgd(self, variable: Any, states: list[Any], gradient: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            updates = self._rate * gradient.values
            tf.raw_ops.ResourceScatterSub(resource=variable.handle, indices=gradient.indices, updates=updates)
        else:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=self._rate, delta=gradient)

    def _adagrad(self, variable: Any, states: list[Any], gradient: Any) -> None:
        where = {"var": variable.handle, "accum": states[0].handle, "lr": self._rate, "epsilon": 1e-10}
        if isinstance(gradient, tf.IndexedSlices):
            rows, places = tf.unique(gradient.indices)
            summed = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
            tf.raw_ops.ResourceSparseApplyAdagradV2(**where, grad=summed, indices=rows)
        else:
            tf.raw_ops.ResourceApplyAdagradV2(**where, grad=gradient)


class Step(ABC):
    """
    Forward, backward and update in one ``tf.function``, whose inputs are TensorFlow's tensors already.

    It uses no feature columns and no Keras.

    Args:
        optimizer: the optimizer of the trained variables.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._function = optimizer, tf.function(self._train)

    def __call__(self, prepared: Any) -> Any:
        """Train on a batch, labels and inputs of the network, and return its mean loss."""
        return self._function(*prepared)

    @abstractmethod
    def _logits(self, *inputs: Any) -> Any:
        """Return the logits ``[B]``."""

    def _train(self, labels: Any, *inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = self._logits(*inputs)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
        self._optimizer.step(tape.gradient(loss, self._optimizer.variables))
        return loss


def linear(x: Any, weight: Any, bias: Any) -> Any:
    """Return what :func:`torch.nn.functional.linear` does."""
    return tf.nn.bias_add(tf.matmul(x, weight, transpose_b=True), bias)
