"""A layer of Keras with many tables, which are looked up in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import keras
import torch

from .. import nn
from .._reduction import COMBINERS
from ._tables import are_looked_up_by_us, ids_of, pooled, rows_module

__all__ = ["EmbeddingBagCollection"]

_TAKEN = ("num_embeddings", "embedding_dim", "name", "feature_names", "padding_idx", "pooling")


@keras.saving.register_keras_serializable(package="torchsparse_rec")
class EmbeddingBagCollection(keras.layers.Layer):  # type: ignore[misc]
    """
    Tables that are looked up and pooled together: :class:`torchsparse_rec.nn.EmbeddingBagCollection` for Keras.

    The layout of the gradients follows the optimizer, as for :class:`Embedding`, for all tables alike.

    Args:
        tables: a :class:`torchsparse_rec.nn.EmbeddingBagConfig` for each table, or a dict of its arguments. These are
            ``num_embeddings``, ``embedding_dim``, ``name``, ``feature_names``, ``padding_idx`` (an id that counts in no
            bag; default None) and ``pooling`` (``"sum"``, the default, ``"mean"`` or ``"sqrtn"``).
        embeddings_initializer: the initial values of the tables. Default ``"uniform"``.
        kwargs: ``name``, ``dtype``, ``trainable`` ... of every layer.

    Shape:
        ``inputs``: a dict from features to ids, ``[B, L]``, each with its own L, or ``[B]``; other types than int32 and
        int64 are cast to int32. The result: ``[B, W]``, the pooled rows of each table's features side by side in the
        order of ``tables``, in the layer's compute dtype.

    Raises:
        IndexError: an id outside its table.
        ValueError: a config with another field than those above; inputs without one of the features.

    Source: ``torchrec.EmbeddingBagCollection``.

    Example:
        >>> users = {"num_embeddings": 5, "embedding_dim": 2, "name": "users", "feature_names": ["user"]}
        >>> items = {"num_embeddings": 9, "embedding_dim": 4, "name": "items", "feature_names": ["item", "seen"]}
        >>> layer = EmbeddingBagCollection([users, items])
        >>> ids = {"user": torch.tensor([3, 1]), "item": torch.tensor([8, 7]), "seen": torch.tensor([[1, 2], [0, 3]])}
        >>> tuple(layer(ids).shape)
        (2, 10)
    """

    built: bool

    def __init__(self, tables: Sequence[Any], embeddings_initializer: Any = "uniform", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._configs = [_checked(config, k) for k, config in enumerate(tables)]
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.autocast = False
        self._make_rows()  # it checks the configs together

    def build(self, inputs_shape: Any = None) -> None:
        """Make the tables."""
        if not self.built:
            self.tables = [
                self.add_weight(
                    shape=(config.num_embeddings, config.embedding_dim),
                    initializer=_copied(self.embeddings_initializer),
                    name=config.name,
                )
                for config in self._configs
            ]
            self.built = True

    def call(self, inputs: Any) -> Any:
        """Look up and pool the features; see the class."""
        features = self._features_of(inputs)
        ids = {feature: ids_of(inputs[feature]) for feature in features}
        if are_looked_up_by_us(self.tables):
            bags = rows_module(self, list(self.tables), self._make_rows)(ids).values()
        else:
            parts = [
                pooled(table.value, ids[feature], None, config.pooling.value.lower(), config.padding_idx)
                for config, table in zip(self._configs, self.tables, strict=True)
                for feature in config.feature_names
            ]
            bags = torch.cat(parts, 1)
        return keras.ops.cast(bags, self.compute_dtype)

    def _features_of(self, inputs: Any) -> list[str]:
        """Return the features of all tables, each once; inputs must have them."""
        features = list(dict.fromkeys(feature for config in self._configs for feature in config.feature_names))
        if not isinstance(inputs, Mapping) or not all(feature in inputs for feature in features):
            got = list(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
            raise ValueError(f"EmbeddingBagCollection: inputs must be a dict with the features {features}, got {got}")
        return features

    def _make_rows(self) -> nn.EmbeddingBagCollection:
        return nn.EmbeddingBagCollection(self._configs, device="meta")

    def compute_output_spec(self, inputs: Any) -> Any:
        """Return the shape and dtype of the result."""
        first = inputs[self._features_of(inputs)[0]]
        width = sum(config.embedding_dim * len(config.feature_names) for config in self._configs)
        return keras.KerasTensor((first.shape[0], width), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for ``from_config``."""
        tables = [
            {**{name: getattr(config, name) for name in _TAKEN}, "pooling": config.pooling.value.lower()}
            for config in self._configs
        ]
        initializer = keras.initializers.serialize(self.embeddings_initializer)
        return {**super().get_config(), "tables": tables, "embeddings_initializer": initializer}


def _copied(initializer: Any) -> Any:
    """Return an initializer with its own seed: one of Keras's gives every table of one shape the same values."""
    return initializer.clone() if isinstance(initializer, keras.initializers.Initializer) else initializer


def _checked(config: Any, number: int) -> nn.EmbeddingBagConfig:
    if isinstance(config, Mapping):
        unknown = sorted(set(config) - set(_TAKEN))
        if unknown:
            raise ValueError(
                f"EmbeddingBagCollection: tables[{number}] may have {', '.join(_TAKEN)}, got {', '.join(unknown)}"
            )
        config = nn.EmbeddingBagConfig(**config)
    for field in fields(config):
        default = [] if field.default is MISSING else field.default
        if field.name not in _TAKEN and getattr(config, field.name) != default:
            raise ValueError(
                f"EmbeddingBagCollection: tables[{number}].{field.name} must be left out in a layer of Keras, got "
                f"{getattr(config, field.name)!r}: torchsparse_rec.nn.EmbeddingBagCollection takes it"
            )
    if config.pooling.value.lower() not in COMBINERS:
        raise ValueError(
            f"EmbeddingBagCollection: tables[{number}].pooling must be one of {', '.join(map(repr, COMBINERS))}, got "
            f"{config.pooling.value.lower()!r}"
        )
    return config  # type: ignore[no-any-return]
