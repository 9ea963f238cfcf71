"""The description of a collection's tables, with TorchRec's names and fields."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..variable.options import EmbeddingVariableOption

__all__ = ["BaseEmbeddingConfig", "EmbeddingBagConfig", "EmbeddingConfig", "PoolingType"]

_CAPACITY = ": it is the rows that the table starts with, its capacity, and keys may have any value"
# float32 cannot hold the square of a larger max_norm.
_LARGEST_NORM = 1e19


class PoolingType(enum.Enum):
    """
    The ways to pool the rows of a bag into one, see :func:`torchsparse_rec.ops.embedding_bag`.

    Example:
        >>> PoolingType("MEAN")
        <PoolingType.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    SQRTN = "SQRTN"
    MAX = "MAX"
    MIN = "MIN"


# The dtypes by the values of TorchRec's DataType.
_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16, "FP64": torch.float64}


@dataclass
class BaseEmbeddingConfig:
    """What a table has in both kinds of collections; :class:`EmbeddingBagConfig` describes the fields."""

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
        """Return how many features look up the table."""
        return len(self.feature_names)

    def get_weight_init_max(self) -> float:
        """Return the upper bound of the rows at the start."""
        return math.sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Return the lower bound of the rows at the start."""
        return -math.sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """
    A table whose lookups are pooled.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: elements of a row, at least 1.
        name: the table's key in the ``state_dict``: without a dot, and distinct in a collection.
        data_type: the type of the elements: a torch.dtype, TorchRec's DataType, or the value of one, ``"FP32"`` (the
            default), ``"FP16"``, ``"BF16"`` or ``"FP64"``.
        feature_names: the features that look up the table, at least one.
        weight_init_max: the upper bound of the rows, which start uniformly distributed. Default
            ``1 / sqrt(num_embeddings)``.
        weight_init_min: their lower bound. Default ``-1 / sqrt(num_embeddings)``.
        init_fn: a function that is given the table and initialises it instead.
        padding_idx: a row that counts in no bag and gets no gradient. Default: none. (Not in TorchRec.)
        ev_option: options that make the table an :class:`EmbeddingVariable`, which takes keys of any range:
            ``num_embeddings`` is then its first number of rows. Default: a table of fixed size. (Not in TorchRec.)
        initializer: the initial values of rows with ``ev_option``, as for :class:`EmbeddingVariable`. Default: by
            ``weight_init_max`` and ``weight_init_min`` or ``init_fn``.
        max_norm: the largest norm with which a row counts. A longer row is clipped in reading, before it is pooled, and
            the derivative goes through the clipping. The table stays unchanged, unlike in ``torch.nn.Embedding``. It
            takes memory for a row for each id, pooling waits for a CUDA device, and ``torch.compile`` breaks the graph
            there. Default: none. (Not in TorchRec.)
        pooling: a :class:`PoolingType`, TorchRec's, or its name in any case. Default ``"sum"``.

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

    Args: those of :class:`EmbeddingBagConfig`, without ``pooling``.

    Source: ``torchrec.modules.embedding_configs.EmbeddingConfig``.

    Example:
        >>> EmbeddingConfig(num_embeddings=1000, embedding_dim=8, name="t", feature_names=["f"]).num_features()
        1
    """


def check_kinds(owner: str, tables: Any, pooled: bool) -> None:
    """Raise ``TypeError`` unless a collection's tables are configs of its kind, in a list."""
    wanted, other = "EmbeddingBagConfig", "EmbeddingCollection"
    if not pooled:
        wanted, other = "EmbeddingConfig", "EmbeddingBagCollection"
    if isinstance(tables, Mapping) or not hasattr(tables, "__iter__"):
        raise TypeError(f"{owner}: tables must be a list, each an {wanted}, got {type(tables).__name__}")
    for k, config in enumerate(tables):
        if not hasattr(config, "feature_names") or hasattr(config, "pooling") != pooled:
            way = f" for table {config.name!r}, which {other} takes" if hasattr(config, "feature_names") else ""
            raise TypeError(f"{owner}: tables[{k}] must be an {wanted}, got {type(config).__name__}{way}")


def as_pooling(pooling: Any) -> PoolingType:
    """Return the :class:`PoolingType` for one of ours, one of TorchRec's or a name."""
    value = getattr(pooling, "value", pooling)
    try:
        return PoolingType(value.upper())
    except (AttributeError, ValueError):
        known = ", ".join(repr(x.value.lower()) for x in PoolingType)
        raise ValueError(f"pooling must be a PoolingType or one of {known}, got {pooling!r}") from None


def as_dtype(data_type: Any) -> torch.dtype:
    """Return the torch.dtype of a config's ``data_type``."""
    if isinstance(data_type, torch.dtype):
        found = data_type if data_type in _DTYPES.values() else None
    else:
        found = _DTYPES.get(getattr(data_type, "value", data_type))
    if found is None:
        raise ValueError(f"data_type must be FP32, FP16, BF16, FP64 or such a torch.dtype, got {data_type!r}")
    return found


def embedding_names_by_table(tables: list[Any]) -> list[list[str]]:
    """Return the names of each table's results: the feature, or ``feature@table`` if several tables have it."""
    seen: dict[str, int] = {}
    for config in tables:
        for feature in config.feature_names:
            seen[feature] = seen.get(feature, 0) + 1
    return [
        [feature if seen[feature] == 1 else f"{feature}@{config.name}" for feature in config.feature_names]
        for config in tables
    ]


def check_configs(owner: str, configs: Sequence[Any]) -> None:
    """Raise ``ValueError`` if the configs of a collection are wrong by themselves or together."""
    if len(configs) == 0:
        raise ValueError(f"{owner}: tables must have at least one config, got none")
    names = set()
    for k, config in enumerate(configs):
        if not config.name or "." in config.name or config.name in names:
            raise ValueError(f"{owner}: tables[{k}].name must be distinct and without a dot, got {config.name!r}")
        names.add(config.name)
        grows = getattr(config, "ev_option", None) is not None
        if not config.feature_names:
            raise ValueError(f"{owner}: tables[{k}].feature_names must have at least one feature, got none")
        for what in ("num_embeddings", "embedding_dim"):
            if getattr(config, what) < 1:
                is_capacity = grows and what == "num_embeddings"
                raise ValueError(
                    f"{owner}: tables[{k}].{what} must be at least 1, got {getattr(config, what)} for table "
                    f"{config.name!r}{_CAPACITY if is_capacity else ''}"
                )
        padding, rows = getattr(config, "padding_idx", None), config.num_embeddings
        if grows and rows >= 2**31:
            raise ValueError(
                f"{owner}: tables[{k}].num_embeddings must be below 2 ** 31 with ev_option, got {rows} for table "
                f"{config.name!r}{_CAPACITY}"
            )
        if padding is not None and grows:
            raise ValueError(f"{owner}: tables[{k}].padding_idx must be None with ev_option, got {padding}")
        if padding is not None and not -rows <= padding < rows:
            raise ValueError(f"{owner}: tables[{k}].padding_idx must be None or in [{-rows}, {rows}), got {padding}")
        max_norm = getattr(config, "max_norm", None)
        if max_norm is not None and not (isinstance(max_norm, (int, float)) and 0 < max_norm <= _LARGEST_NORM):
            raise ValueError(
                f"{owner}: tables[{k}].max_norm must be None, for no limit, or above 0 and at most {_LARGEST_NORM:g}, "
                f"got {max_norm!r}"
            )
