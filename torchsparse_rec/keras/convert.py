"""Conversion of whole Keras models: Keras's layers into ours and back."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from .. import nn
from ._by_rows import revert_optimizer
from .embedding import Embedding
from .embedding_bag import EmbeddingBag
from .embedding_bag_collection import EmbeddingBagCollection

__all__ = ["convert", "revert"]


def convert(model: Any) -> Any:
    """
    Turn every ``keras.layers.Embedding`` of a model into :class:`Embedding`, in place.

    The layer objects stay and change their class. Weights, names, the graph of a functional model, and layers shared
    between places stay unchanged. The optimizer stays too, and its slots are kept. Layers that extend Keras's class
    stay unchanged, and a warning names them. A warning also says if nothing was changed.

    Args:
        model: a Keras model, built or not, or a layer.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no layer or model of Keras.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.layers.Embedding(10, 3), keras.layers.Dense(1)])
        >>> type(convert(model).layers[0])
        <class 'torchsparse_rec.keras.embedding.Embedding'>
    """
    left = []
    layers = [x for x in _layers("convert", model) if isinstance(x, keras.layers.Embedding)]
    for layer in layers:
        if type(layer) is keras.layers.Embedding:
            object.__setattr__(layer, "__class__", Embedding)
        elif not isinstance(layer, Embedding):
            left.append(f"{layer.name} ({type(layer).__name__})")
    if left:
        warnings.warn(f"convert: left unchanged, because their classes extend Keras's: {', '.join(left)}", stacklevel=2)
    elif not layers:
        warnings.warn("convert: nothing was changed: the model has no keras.layers.Embedding", stacklevel=2)
    return model


def revert(model: Any) -> Any:
    """
    Turn every :class:`Embedding` of a model into Keras's, and a compiled optimizer of ours too, in place.

    All rows and slots are brought up to date first; no other bit changes. A model that is then saved with
    ``model.save("model.keras")`` loads where torchsparse_rec is not installed, on any backend. Layers that Keras does
    not have stay unchanged, and a warning names them: :class:`EmbeddingBag`, :class:`EmbeddingBagCollection`.

    Args:
        model: a Keras model, or a layer.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no layer or model of Keras.

    Example:
        >>> import keras
        >>> type(revert(keras.Sequential([Embedding(10, 3)])).layers[0]) is keras.layers.Embedding
        True
    """
    layers = _layers("revert", model)
    optimizers = {id(x): x for layer in layers if (x := getattr(layer, "optimizer", None)) is not None}
    for optimizer in optimizers.values():
        revert_optimizer(optimizer)
    left = []
    for layer in layers:
        if type(layer) is Embedding:
            rows = layer.__dict__.pop("_rows", None)
            if rows is not None:
                nn.revert(rows[0])  # it brings the table up to date
            object.__setattr__(layer, "__class__", keras.layers.Embedding)
        elif isinstance(layer, (Embedding, EmbeddingBag, EmbeddingBagCollection)):
            left.append(f"{layer.name} ({type(layer).__name__})")
    if left:
        warnings.warn(f"revert: left unchanged, because Keras has no such layer: {', '.join(left)}", stacklevel=2)
    return model


def _layers(function: str, model: Any) -> list[Any]:
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(f"{function}: model must be a model or a layer of Keras, got {type(model).__name__}")
    return model._flatten_layers()  # type: ignore[no-any-return]
