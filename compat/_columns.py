"""Feature columns of TensorFlow and preprocessing layers of Keras as this library's columns, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .. import features, initializers
from .installed import tensorflow

_SHARED = "SharedEmbeddingColumn"


def feature_column_to_torch(column: Any, *, normalizers: Mapping[str, Any] | None = None) -> Any:
    """
    Return this library's column for one of TensorFlow's: the same ids, so that tables trained there stay valid.

    Args:
        column: the result of a function of ``tf.feature_column``, or its configuration as ``serialize_feature_column``
            writes it, ``{"class_name": ..., "config": {...}}``.
        normalizers: the functions of a tensor that replace TensorFlow's, by feature, for numeric columns with a
            ``normalizer_fn``; such as :class:`torchsparse_rec.features.Standardize`.

    Returns:
        A column of :mod:`torchsparse_rec.features`. The table of an embedding column is not copied.

    Raises:
        ValueError: for a column with no counterpart, or a ``normalizer_fn`` that ``normalizers`` does not have.

    Example:
        >>> import tensorflow as tf
        >>> feature_column_to_torch(tf.feature_column.categorical_column_with_identity("user", 943))
        IdentityCategoricalColumn(key='user', number_buckets=943)
    """
    return features.column_from_config(_config(column, normalizers or {}))


def _config(column: Any, normalizers: Mapping[str, Any]) -> Any:
    """Return the configuration of a column of TensorFlow's, in the names and values of this library's columns."""
    if isinstance(column, features.Column):
        return column
    if isinstance(column, Mapping):
        name, values = column["class_name"], dict(column["config"])
    else:
        name = type(column).__name__
        if not hasattr(column, "_fields"):
            raise ValueError(f"column must be a column of tf.feature_column or its configuration, got {column!r}")
        values = _shared(column) if name == _SHARED else dict(zip(column._fields, column, strict=True))
    if values.get("normalizer_fn") is not None:
        key = values["key"]
        if key not in normalizers:
            raise ValueError(
                f"column {key!r}: normalizers must have a function in place of normalizer_fn, got {normalizers}"
            )
        values["normalizer_fn"] = normalizers[key]
    for field, value in values.items():
        if field in ("categorical_column", "source_column"):
            values[field] = _config(value, normalizers)
        elif field == "keys":
            values[field] = [key if isinstance(key, str) else _config(key, normalizers) for key in value]
        elif field == "initializer" and value is not None and not isinstance(value, Mapping):
            values[field] = {"class_name": type(value).__name__, "config": value.get_config()}
    return {"class_name": name, "config": values}


def _shared(column: Any) -> dict[str, Any]:
    """Return the fields of a shared embedding column; TensorFlow keeps most of them with the table."""
    creator = column.shared_embedding_column_creator
    return {
        "categorical_column": column.categorical_column,
        "dimension": creator.dimension,
        "combiner": column.combiner,
        "initializer": creator._initializer,
        "shared_embedding_collection_name": creator._name,
        "max_norm": column.max_norm,
        "trainable": creator._trainable,
    }


_FUNCTIONS = {
    "NumericColumn": "numeric_column",
    "BucketizedColumn": "bucketized_column",
    "IdentityCategoricalColumn": "categorical_column_with_identity",
    "HashedCategoricalColumn": "categorical_column_with_hash_bucket",
    "VocabularyListCategoricalColumn": "categorical_column_with_vocabulary_list",
    "VocabularyFileCategoricalColumn": "categorical_column_with_vocabulary_file",
    "CrossedColumn": "crossed_column",
    "WeightedCategoricalColumn": "weighted_categorical_column",
    "IndicatorColumn": "indicator_column",
    "EmbeddingColumn": "embedding_column",
    "SequenceNumericColumn": "sequence_numeric_column",
}
_RENAMED = {"number_buckets": "num_buckets"}
_OWN = ("num_bins", "epsilon", "max_tokens")


def feature_column_to_tensorflow(column: features.Column) -> Any:
    """
    Return TensorFlow's column for one of this library's, made by the functions of ``tf.feature_column``.

    Args:
        column: any column without a normalizer, except a shared embedding, which TensorFlow makes only in graphs.

    Returns:
        A column of ``tf.feature_column``.

    Raises:
        ValueError: for a shared embedding, a normalizer, an initializer that has no configuration, a table that grows,
            ``drop_missing=False``, or a column that needs ``adapt()`` first.

    Example:
        >>> from torchsparse_rec.features import categorical_column_with_identity
        >>> feature_column_to_tensorflow(categorical_column_with_identity("user", 943)).number_buckets
        943
    """
    tf = tensorflow()
    name = type(column).__name__
    if isinstance(column, features.SequenceCategoricalColumn):
        inner = type(column.categorical_column).__name__
        return getattr(tf.feature_column, "sequence_" + _FUNCTIONS[inner])(**_arguments(column.categorical_column, tf))
    if name not in _FUNCTIONS:
        raise ValueError(f"column must be one that TensorFlow can make outside of a graph, got {column!r}")
    return getattr(tf.feature_column, _FUNCTIONS[name])(**_arguments(column, tf))


def _arguments(column: Any, tf: Any) -> dict[str, Any]:
    """Return the arguments with which a function of ``tf.feature_column`` makes TensorFlow's column for ``column``."""
    if getattr(column, "needs_adapt", False):
        raise ValueError(f"column {column.name!r}: adapt() must find what it was made without before it is converted")
    found = {}
    for field in fields(column):
        value = getattr(column, field.name)
        if field.name in _OWN or (field.name == "ev_option" and value is None):
            continue
        if field.name == "drop_missing":
            if not value:
                raise ValueError(
                    f"column {column.name!r}: drop_missing must be True: TensorFlow's columns leave out '' and -1"
                )
            continue
        if field.name == "ev_option":
            raise ValueError(f"column {column.name!r}: ev_option must be None: TensorFlow's tables do not grow")
        if field.name == "normalizer_fn" and value is not None:
            raise ValueError(
                f"column {column.name!r}: normalizer_fn must be None, got {value!r}: it takes tensors of torch"
            )
        if field.name == "initializer":
            value = _initializer(value, column, tf)
        elif field.name == "dtype":
            value = tf.as_dtype(value)
        elif field.name == "keys":
            value = [key if isinstance(key, str) else feature_column_to_tensorflow(key) for key in value]
        elif isinstance(value, features.Column):
            value = feature_column_to_tensorflow(value)
        elif field.name == "num_oov_buckets" and value == 0:
            continue
        elif field.name == "default_value" and value == -1 and hasattr(column, "num_oov_buckets"):
            continue
        elif field.name == "shape":
            value = list(value)
        found[_RENAMED.get(field.name, field.name)] = value
    return found


def _initializer(value: Any, column: Any, tf: Any) -> Any:
    v1 = tf.compat.v1
    if isinstance(value, initializers.TruncatedNormal):
        return v1.truncated_normal_initializer(value.mean, value.std)
    if isinstance(value, initializers.Normal):
        return v1.random_normal_initializer(value.mean, value.std)
    if isinstance(value, initializers.Uniform):
        return v1.random_uniform_initializer(value.low, value.high)
    if isinstance(value, initializers.Constant):
        return v1.constant_initializer(value.value)
    raise ValueError(f"column {column.name!r}: initializer must be one of torchsparse_rec.initializers, got {value!r}")


# ---- Keras ----------------------------------------------------------------------------------------------------------


def keras_layer_to_column(layer: Any, key: Any, *, dtype: Any = "string") -> Any:
    """
    Return the column that gives the ids, or the dense numbers, of one of Keras's preprocessing layers.

    Args:
        layer: a layer of Keras or of ``compat.keras``, or its configuration with its class's name, ``{"class_name":
            ..., "config": {...}}``. Lookups, bins and hashes in the mode ``"int"`` give a categorical column. In the
            modes ``"one_hot"`` and ``"multi_hot"`` (both with one id per example) and ``"count"`` they give an
            indicator column of it.
        key: the feature's name; for ``HashedCrossing`` a list of names.
        dtype: the dtype of a ``Hashing`` layer's feature, which the layer does not contain: ``"string"`` (default), or
            an integer dtype.

    Returns:
        A column with the layer's ids, also for ``""`` and ``-1``. Tables trained on them stay valid. If the mask of a
        lookup is ``""`` or ``-1``, the column treats it as missing where the number of values per example is fixed.

    Raises:
        ValueError: for a layer that is not adapted, and for a layer whose ids no column has. Such layers have salts,
            masks of hashes, several places of unknown tokens, ``tf_idf``, ``invert``, ``pad_to_max_tokens``, masks of
            counts other than ``""`` and -1, or the token of unknown words among the words.

    Example:
        >>> from torchsparse_rec.compat.keras import Hashing
        >>> keras_layer_to_column(Hashing(1000), "city")
        HashedCategoricalColumn(key='city', hash_bucket_size=1000, drop_missing=False)
    """
    if isinstance(layer, Mapping):
        name, config, made = layer["class_name"], dict(layer["config"]), None
    else:
        name, config, made = type(layer).__name__, layer.get_config(), layer
    makers = {
        "Hashing": _hashing,
        "HashedCrossing": _crossing,
        "Discretization": _discretization,
        "StringLookup": _lookup,
        "IntegerLookup": _lookup,
        "CategoryEncoding": _encoding,
        "Normalization": _normalization,
    }
    if name not in makers:
        raise ValueError(f"layer must be one of {sorted(makers)}, got {name}")
    if name == "Hashing":
        config["dtype"] = dtype
    elif dtype != "string":
        raise ValueError(f"dtype must be given for Hashing alone, got {dtype!r} for {name}")
    return makers[name](config, key, made)


def _in_mode(column: Any, config: Mapping[str, Any]) -> Any:
    mode = config.get("output_mode", "int")
    if mode == "int":
        return column
    if mode in ("count", "multi_hot", "one_hot"):
        return features.indicator_column(column)
    raise ValueError(f"layer: output_mode must not be {mode!r}, which no column has")


def _refuse(config: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if config.get(name) not in (None, False):
            raise ValueError(f"layer: {name} must not be given, which no column has, got {config[name]!r}")


def _hashing(config: Mapping[str, Any], key: Any, made: Any) -> Any:
    _refuse(config, "salt", "mask_value")
    column = features.categorical_column_with_hash_bucket(key, config["num_bins"], config["dtype"], drop_missing=False)
    return _in_mode(column, config)


def _crossing(config: Mapping[str, Any], key: Any, made: Any) -> Any:
    if config["num_bins"] == 0:
        raise ValueError("layer: num_bins must not be 0, which no column has")
    return _in_mode(features.crossed_column(key, config["num_bins"]), config)


def _discretization(config: Mapping[str, Any], key: Any, made: Any) -> Any:
    if config.get("bin_boundaries") is None:
        raise ValueError("layer: bin_boundaries must be given, or found by adapt(), before it is converted")
    column = features.bucketized_column(features.numeric_column(key), list(config["bin_boundaries"]))
    return _in_mode(column, config)


def _lookup(config: Mapping[str, Any], key: Any, made: Any) -> Any:
    _refuse(config, "invert", "salt")
    words = config.get("vocabulary")
    if made is not None:
        words = made.get_vocabulary(include_special_tokens=False)
    words = [_token(x) for x in words or []]
    if not words:
        raise ValueError("layer: vocabulary must be given, or found by adapt(), before it is converted")
    unknown, mask, mode = config["num_oov_indices"], config.get("mask_token"), config.get("output_mode", "int")
    if unknown > 1:
        raise ValueError(
            f"layer: num_oov_indices must be 0 or 1, since no column has more before its words, got {unknown}"
        )
    if mode != "int":
        _refuse(config, "pad_to_max_tokens")
        if mask not in (None, "", -1):
            raise ValueError(f"layer: mask_token of a {mode!r} must be '' or -1, which columns leave out, got {mask!r}")
    # Special tokens stand first in the vocabulary; an unknown word gets the id of the token for unknown words.
    before = ([mask] if mask is not None and mode == "int" else []) + ([config["oov_token"]] if unknown else [])
    if any(token is None for token in before):
        raise ValueError("layer: oov_token must be given to stand for its place")
    for token in before:
        if token in words:
            raise ValueError(
                f"layer: vocabulary must not hold a special token, which no column tells apart, got {token!r}"
            )
    default = len(before) - 1 if unknown else -1
    column = features.categorical_column_with_vocabulary_list(
        key, [*before, *words], default_value=default, drop_missing=mask in ("", b"", -1)
    )
    return _in_mode(column, config)


def _token(x: Any) -> Any:
    """Return a vocabulary's token as Python's ``str``, ``bytes`` or ``int``: errors would show numpy's as such."""
    return str(x) if isinstance(x, str) else x if isinstance(x, bytes) else int(x)


def _encoding(config: Mapping[str, Any], key: Any, made: Any) -> Any:
    return _in_mode(features.categorical_column_with_identity(key, config["num_tokens"]), config)


def _normalization(config: Mapping[str, Any], key: Any, made: Any) -> Any:
    _refuse(config, "invert")
    mean, variance = config.get("mean"), config.get("variance")
    if mean is None and made is not None and getattr(made, "mean", None) is not None:
        mean, variance = made.mean, made.variance
    if mean is None:
        raise ValueError("layer: mean and variance must be given, or found by adapt(), before it is converted")
    import numpy as np

    means, variances = (tuple(np.asarray(x, np.float64).reshape(-1).tolist()) for x in (mean, variance))
    normalizer = features.Standardize(means, variances)
    return features.numeric_column(key, shape=(len(means),), normalizer_fn=normalizer)
