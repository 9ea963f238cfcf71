"""The description of a collection's tables, with TorchRec's names and fields."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .variable.options import EmbeddingVariableOption

__all__ = ["BaseEmbeddingConfig", "EmbeddingBagConfig", "EmbeddingConfig", "PoolingType"]


class PoolingType(enum.Enum):
    """
    How the rows of a bag become one, see :func:`torchsparse_rec.ops.embedding_bag`.

    Example:
        >>> PoolingType("MEAN")
        <PoolingType.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    SQRTN = "SQRTN"
    MAX = "MAX"


# TorchRec's DataType by its values.
_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16, "FP64": torch.float64}


@dataclass
class BaseEmbeddingConfig:
    """
    One table.

    Args:
        num_embeddings: its rows.
        embedding_dim: elements of a row, at least 1.
        name: unlike the other tables', without a dot: the key of its state.
        data_type: of its elements: a torch.dtype, TorchRec's DataType, or the value of one, ``"FP32"`` (the default),
            ``"FP16"``, ``"BF16"`` or ``"FP64"``.
        feature_names: the features that look it up, at least one.
        weight_init_max: rows start uniformly distributed between the two. Default ``1 / sqrt(num_embeddings)``.
        weight_init_min: default ``-weight_init_max``'s default.
        init_fn: starts the rows instead: it is given the table and writes it.
        padding_idx: a row that counts in no bag and gets no gradient. Default: none. (Not in TorchRec.)
        ev_option: makes the table an :class:`EmbeddingVariable` with these options, which takes ids of any range:
            ``num_embeddings`` is then how many rows it has at first. Default: a table of fixed size. (Not in TorchRec.)
        initializer: with ``ev_option``, how rows begin, as of :class:`EmbeddingVariable`. Default: as
            ``weight_init_max`` and ``weight_init_min`` or ``init_fn`` say.
        max_norm: the largest norm with which a row counts: a longer one is clipped as it is read, before it is pooled,
            and the derivative goes through that; the table stays as it is, unlike that of ``torch.nn.Embedding``. It
            costs a row for each id, on CUDA bags wait for the device, and ``torch.compile`` breaks the graph there.
            Default: none. (Not in TorchRec.)

    Source: ``torchrec.modules.embedding_configs``.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: Any = "FP32"
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Tensor], Any] | None = None
    padding_idx: int | None = None
    ev_option: EmbeddingVariableOption | None = None
    initializer: Any = None
    max_norm: float | None = None

    def num_features(self) -> int:
        """How many features look it up."""
        return len(self.feature_names)

    def get_weight_init_max(self) -> float:
        """The upper bound of the rows at the start."""
        return math.sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """The lower bound of the rows at the start."""
        return -math.sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """
    A table whose lookups are pooled.

    Args:
        pooling: a :class:`PoolingType`, TorchRec's, or its name in any case: ``"sum"`` (the default), ``"mean"``,
            ``"sqrtn"`` or ``"max"``. All others: as for :class:`BaseEmbeddingConfig`.

    Source: ``torchrec.modules.embedding_configs.EmbeddingBagConfig``.

    Example:
        >>> EmbeddingBagConfig(num_embeddings=9, embedding_dim=8, name="t", feature_names=["f"], pooling="mean").pooling
        <PoolingType.MEAN: 'MEAN'>
    """

    pooling: Any = PoolingType.SUM

    def __post_init__(self) -> None:
        self.pooling = as_pooling(self.pooling)


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """
    A table whose lookups are not pooled: one row per id.

    Args: as for :class:`BaseEmbeddingConfig`.

    Source: ``torchrec.modules.embedding_configs.EmbeddingConfig``.

    Example:
        >>> EmbeddingConfig(num_embeddings=1000, embedding_dim=8, name="t", feature_names=["f"]).num_features()
        1
    """


def as_pooling(pooling: Any) -> PoolingType:
    """One of ours for ours, TorchRec's or a name."""
    value = getattr(pooling, "value", pooling)
    try:
        return PoolingType(value.upper())
    except (AttributeError, ValueError):
        known = ", ".join(repr(x.value.lower()) for x in PoolingType)
        raise ValueError(f"pooling must be a PoolingType or one of {known}, got {pooling!r}") from None


def as_dtype(data_type: Any) -> torch.dtype:
    """The torch.dtype of a config's ``data_type``."""
    if isinstance(data_type, torch.dtype):
        found = data_type if data_type in _DTYPES.values() else None
    else:
        found = _DTYPES.get(getattr(data_type, "value", data_type))
    if found is None:
        raise ValueError(f"data_type must be FP32, FP16, BF16, FP64 or such a torch.dtype, got {data_type!r}")
    return found


def embedding_names_by_table(tables: list[Any]) -> list[list[str]]:
    """Of each table, the names of its results: the feature, or ``feature@table`` where several tables have it."""
    seen: dict[str, int] = {}
    for config in tables:
        for feature in config.feature_names:
            seen[feature] = seen.get(feature, 0) + 1
    return [
        [feature if seen[feature] == 1 else f"{feature}@{config.name}" for feature in config.feature_names]
        for config in tables
    ]
