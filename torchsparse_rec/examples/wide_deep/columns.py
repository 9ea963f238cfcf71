"""The features of a data set: raw columns, and their transform to numbers for the network and ids for a table each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.criteo import CATEGORIES, INTEGERS
from ...features import (
    CategoricalColumn,
    Clip,
    Compose,
    FeatureTransform,
    Log,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    embedding_column,
    numeric_column,
)
from . import data

KINDS = ("identity", "hashed")


@dataclass(frozen=True)
class JoinedRows:
    """
    An initializer of tables whose rows hold an embedding and, in the last column, a weight of the wide part.

    Embeddings are uniform in ``[-0.05, 0.05)``, as Keras's; the wide part starts at 0, as TensorFlow's linear models.
    """

    def __call__(self, weight: Tensor) -> Tensor:
        """Fill the table."""
        torch.nn.init.uniform_(weight, -0.05, 0.05)
        with torch.no_grad():
            weight[:, -1] = 0.0
        return weight


@dataclass(frozen=True)
class Columns:
    """
    The features of a data set.

    Args:
        transform: makes numbers ``[B, n]`` and ids of a batch.
        numbers: the names of the numbers, in the order of their columns.
        hots: for each categorical feature the number of its ids in an example.
        kind: how ids come about: ``"identity"``, ``"hashed"`` integers or hashed ``"strings"``.
    """

    transform: FeatureTransform
    numbers: tuple[str, ...]
    hots: Mapping[str, int]
    kind: str


def generated_columns(kind: str, rows: int, embedding_dim: int) -> Columns:
    """
    Return the features of :class:`.data.Generator`.

    Args:
        kind: ``"identity"``: raw ids are rows of the table; ``"hashed"``: their text's hash is.
        rows: the number of rows of each table.
        embedding_dim: of the deep part; a table's rows have one column more.
    """
    if kind not in KINDS:
        raise ValueError(f"columns must be one of {', '.join(KINDS)}, got {kind!r}")
    make = categorical_column_with_identity if kind == "identity" else _hashed_integers
    made = [embedding_column(make(name, rows), embedding_dim + 1, "mean", JoinedRows()) for name in data.HOTS]
    numbers = [numeric_column(name) for name in data.NUMBERS]
    # No generated id is missing, so that the transform need not look for missing ones.
    transform = FeatureTransform([*numbers, *made], drop_missing=False)
    return Columns(transform, tuple(transform.dense_slices()), data.HOTS, kind)


def _hashed_integers(name: str, rows: int) -> CategoricalColumn:
    return categorical_column_with_hash_bucket(name, rows, dtype="int64")


def criteo_columns(rows: int, embedding_dim: int) -> Columns:
    """Return Criteo's features: ``log(1 + x)`` of 13 counts (0 for missing and negative ones) and 26 hashed strings."""
    logarithm = Compose((Clip(0.0), Log()))
    numbers = [numeric_column(name, default_value=0.0, normalizer_fn=logarithm) for name in INTEGERS]
    ids = [categorical_column_with_hash_bucket(name, rows) for name in CATEGORIES]
    tables = [embedding_column(column, embedding_dim + 1, "mean", JoinedRows()) for column in ids]
    hots = dict.fromkeys(CATEGORIES, 1)
    transform = FeatureTransform([*numbers, *tables])
    return Columns(transform, tuple(transform.dense_slices()), hots, "strings")
