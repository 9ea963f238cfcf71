"""A layer of Keras that looks up the rows of a bag of ids and pools them."""

from __future__ import annotations

from typing import Any

import keras

from .. import nn
from .._reduction import COMBINERS
from ..typing import Combiner
from ._tables import are_looked_up_by_us, ids_of, pooled, rows_module

__all__ = ["EmbeddingBag"]


@keras.saving.register_keras_serializable(package="torchsparse_rec")
class EmbeddingBag(keras.layers.Layer):  # type: ignore[misc]
    """
    A table whose rows are pooled, bag by bag, in one pass: :class:`torchsparse_rec.nn.EmbeddingBag` for Keras.

    The gradient's layout follows the optimizer, as for :class:`Embedding`.

    Args:
        input_dim: the rows of the table.
        output_dim: the elements of a row.
        combiner: the pooling of a bag's rows ``x`` with weights ``w`` (1 if none are given): ``"sum"``: ``sum(w x)``;
            ``"mean"`` (default): ``sum(w x) / sum(w)``; ``"sqrtn"``: ``sum(w x) / sqrt(sum(w^2))``. A denominator of
            zero gives 0.
        embeddings_initializer, embeddings_regularizer, embeddings_constraint: the arguments of :class:`Embedding`.
        mask_zero: whether id 0 is padding, which counts in no bag. Default False.
        kwargs: ``name``, ``dtype``, ``trainable`` ... of every layer.

    Shape:
        ``inputs``: ``[B, L]``, B bags of L ids; other types than int32 and int64 are cast to int32. ``weights``: as
        ``inputs``, or None. The result: ``[B, output_dim]``, in the layer's compute dtype.

    Raises:
        IndexError: an id outside ``[0, input_dim)``, named with its position.
        ValueError: an unknown combiner; sizes that are not positive integers; inputs or weights of another shape.

    Source: ``tf.keras.layers.Embedding`` and ``tf.nn.embedding_lookup_sparse``.

    Example:
        >>> layer = EmbeddingBag(4, 1, combiner="sum", mask_zero=True)
        >>> layer.build()
        >>> layer.set_weights([torch.tensor([[7.0], [1.0], [2.0], [4.0]]).numpy()])
        >>> layer(torch.tensor([[1, 3], [2, 0]])).tolist()
        [[5.0], [2.0]]
    """

    built: bool

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        combiner: Combiner = "mean",
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        **kwargs: Any,
    ) -> None:
        for name, size in (("input_dim", input_dim), ("output_dim", output_dim)):
            if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
                raise ValueError(f"EmbeddingBag: {name} must be a positive integer, got {size!r}")
        if combiner not in COMBINERS:
            raise ValueError(
                f"EmbeddingBag: combiner must be one of {', '.join(map(repr, COMBINERS))}, got {combiner!r}"
            )
        super().__init__(**kwargs)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.combiner = combiner
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.mask_zero = mask_zero
        self.autocast = False

    def build(self, inputs_shape: Any = None, weights_shape: Any = None) -> None:
        """Make the table."""
        if not self.built:
            self.embeddings = self.add_weight(
                shape=(self.input_dim, self.output_dim),
                initializer=self.embeddings_initializer,
                name="embeddings",
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
            )
            self.built = True

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Look up and pool the bags of ``inputs``; see the class."""
        ids = ids_of(inputs)
        if ids.dim() != 2:
            raise ValueError(f"EmbeddingBag: inputs must have rank 2, [B, L], got shape {tuple(ids.shape)}")
        if weights is not None:
            weights = keras.ops.cast(weights, self.variable_dtype)
        if are_looked_up_by_us([self.embeddings]):
            bags = rows_module(self, [self.embeddings], self._make_rows)(ids, None, weights)
        else:
            bags = pooled(self.embeddings.value, ids, weights, self.combiner, 0 if self.mask_zero else None)
        return keras.ops.cast(bags, self.compute_dtype)

    def _make_rows(self) -> nn.EmbeddingBag:
        padding_idx = 0 if self.mask_zero else None
        sizes = self.input_dim, self.output_dim
        return nn.EmbeddingBag(*sizes, mode=self.combiner, padding_idx=padding_idx, device="meta")

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Return the shape and dtype of the result."""
        return keras.KerasTensor((inputs.shape[0], self.output_dim), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for ``from_config``."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "combiner": self.combiner,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            "mask_zero": self.mask_zero,
        }
