"""Keras's embedding layer, whose gradient has the rows that the optimizer steps."""

from __future__ import annotations

from typing import Any

import keras

from .. import nn
from ._tables import are_looked_up_by_us, ids_of, rows_module

__all__ = ["Embedding"]


@keras.saving.register_keras_serializable(package="torchsparse_rec")
class Embedding(keras.layers.Embedding):
    """
    :class:`keras.layers.Embedding` with Keras's results: a training step costs only what the batch touches.

    The gradient has the rows that occur, each once, where the optimizer gives the exact results with it. Such
    optimizers are :mod:`torchsparse_rec.keras.optimizers`, and Keras's ``SGD`` without momentum, clipping, accumulation
    or loss scale. Under any other optimizer it is dense, as Keras's. The optimizer is the one of the compiled model
    which is called. In your own training loop it is one of ours that has been built:
    ``optimizer.build(model.trainable_variables)``.

    Args:
        input_dim: the rows of the table.
        output_dim: the elements of a row.
        embeddings_initializer: the initial values of the table. Default ``"uniform"``.
        embeddings_regularizer: a penalty on the table. Keras computes it from all rows in each step, so the gradient is
            dense. Default: none.
        embeddings_constraint: a function that Keras applies to all rows after each step, so the gradient is dense.
            Default: none.
        mask_zero: whether id 0 is padding that later layers mask. Default False.
        weights: the table to begin with, ``[input_dim, output_dim]``.
        lora_rank, lora_alpha, quantization_config: Keras's arguments; such a table is looked up by Keras's own code.
        kwargs: ``name``, ``dtype``, ``trainable`` ... of every layer.

    Shape:
        ``inputs``: of any shape; other types than int32 and int64 are cast to int32. The result has ``output_dim``
        appended, in the layer's compute dtype.

    Raises:
        IndexError: an id outside ``[0, input_dim)``, named with its position. Keras takes negative ids from the end.
        ValueError: as Keras's.

    Source: ``keras.layers.Embedding``.

    Example:
        >>> layer = Embedding(4, 1, weights=torch.tensor([[0.0], [1.0], [2.0], [3.0]]).numpy())
        >>> layer(torch.tensor([[1, 3]])).tolist()
        [[[1.0], [3.0]]]
    """

    def call(self, inputs: Any) -> Any:
        """Look up the rows of ``inputs``; see the class."""
        if self.lora_enabled or self.quantization_mode or not are_looked_up_by_us([self._embeddings]):
            return super().call(inputs)
        rows = rows_module(self, [self._embeddings], self._make_rows)
        return keras.ops.cast(rows(ids_of(inputs)), self.compute_dtype)

    def _make_rows(self) -> nn.Embedding:
        return nn.Embedding(self.input_dim, self.output_dim, device="meta")
