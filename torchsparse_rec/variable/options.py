"""The options of an EmbeddingVariable, under DeepRec's names."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .tiers import DramTier, SsdTier, Tier

__all__ = [
    "CBFFilter",
    "CacheStrategy",
    "CheckpointOption",
    "CounterFilter",
    "EmbeddingVariableOption",
    "GlobalStepEvict",
    "InitializerOption",
    "L2WeightEvict",
    "LFUEvict",
    "LRUEvict",
    "StorageOption",
    "StorageType",
    "tiers_below",
]

_INTEGERS = {torch.int8: 1, torch.int16: 2, torch.int32: 4, torch.int64: 8}

# The tiers that may lie below the first one, the fastest first.
_TIERS: tuple[type[Tier], ...] = (DramTier, SsdTier)


class StorageType(enum.Enum):
    """
    The tiers that hold the rows of a table, the fastest first.

    Example:
        >>> StorageType("DRAM_SSD").tiers()
        ['DRAM', 'SSD']
    """

    # Written out for type checkers: HBM or DRAM, then those of _TIERS that follow it, up to any of them.
    DRAM = "DRAM"
    HBM = "HBM"
    HBM_DRAM = "HBM_DRAM"
    DRAM_SSD = "DRAM_SSD"
    HBM_DRAM_SSD = "HBM_DRAM_SSD"

    def tiers(self) -> list[str]:
        """Return the names of the tiers, the fastest first."""
        return self.value.split("_")


def tiers_below(storage_type: StorageType) -> list[type[Tier]]:
    """Return the tiers below the first one, the fastest first."""
    tiers = {tier.kind: tier for tier in _TIERS}
    return [tiers[name] for name in storage_type.tiers()[1:]]


class CacheStrategy(enum.Enum):
    """
    Which rows leave a full tier: the least recently, or the least frequently used.

    Example:
        >>> CacheStrategy("LFU")
        <CacheStrategy.LFU: 'LFU'>
    """

    LRU = "LRU"
    LFU = "LFU"


@dataclass(frozen=True)
class CounterFilter:
    """
    Admit a key once it has occurred ``filter_freq`` times; until then it is counted exactly, at 24 bytes a key.

    As in DeepRec, a key is admitted when the optimizer steps. Lookups in the step of the last of these occurrences
    still return the default value. That step's gradient is the first of the row, and later lookups return the row.

    Args:
        filter_freq: the number of occurrences, the current batch's included. 0: there is no filter. Default 0.

    Source: DeepRec's ``CounterFilter``.

    Example:
        >>> EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=3)).filter_option.filter_freq
        3
    """

    filter_freq: int = 0

    def __post_init__(self) -> None:
        _check_at_least("CounterFilter", "filter_freq", self.filter_freq, 0)


@dataclass(frozen=True)
class CBFFilter:
    """
    Admit a key as :class:`CounterFilter` does, but count with a counting Bloom filter, in a fixed amount of memory.

    Keys are never admitted late; early with a probability of at most ``false_positive_probability`` while no more than
    ``max_element_size`` distinct keys have been counted. The filter has ``counters`` of ``counter_type``; each key
    uses ``num_hashes`` of them.

    Args:
        filter_freq: the number of occurrences, the current batch's included; at most what ``counter_type`` holds.
            Default 0.
        max_element_size: the expected number of distinct keys, at least 1.
        false_positive_probability: a probability in (0, 1).
        counter_type: int8, int16, int32 or int64 (the default). A counter at its maximum stays there.

    Source: DeepRec's ``CBFFilter``; the sizes are from Bloom's filter, 1970.

    Example:
        >>> option = CBFFilter(3, max_element_size=2**20, false_positive_probability=0.01, counter_type=torch.int8)
        >>> option.num_hashes, option.counters, option.nbytes
        (7, 10050662, 10050662)
    """

    filter_freq: int = 0
    max_element_size: int = 0
    false_positive_probability: float = -1.0
    counter_type: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        _check_at_least("CBFFilter", "filter_freq", self.filter_freq, 0)
        _check_at_least("CBFFilter", "max_element_size", self.max_element_size, 1)
        if not 0 < self.false_positive_probability < 1:
            raise ValueError(
                f"CBFFilter: false_positive_probability must be in (0, 1), got {self.false_positive_probability}"
            )
        if self.counter_type not in _INTEGERS:
            raise ValueError(
                f"CBFFilter: counter_type must be torch.int8, int16, int32 or int64, got {self.counter_type}"
            )
        most = torch.iinfo(self.counter_type).max
        if self.filter_freq > most:
            raise ValueError(f"CBFFilter: filter_freq must be at most {most}, got {self.filter_freq}")

    @property
    def num_hashes(self) -> int:
        """How many counters each key uses."""
        return max(1, round(-_log2(self.false_positive_probability)))

    @property
    def counters(self) -> int:
        """How many counters the filter has."""
        return max(1, round(-self.max_element_size * _log2(self.false_positive_probability) / _LOG_2))

    @property
    def nbytes(self) -> int:
        """The bytes of all counters."""
        return self.counters * _INTEGERS[self.counter_type]


_LOG_2 = 0.6931471805599453


def _log2(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).log2())


@dataclass(frozen=True)
class GlobalStepEvict:
    """
    Evict keys that no training step has looked up for more than ``steps_to_live`` steps.

    Args:
        steps_to_live: a number of optimizer steps, at least 0.
        every: the number of steps between evictions; 0 (default): only by :meth:`EmbeddingVariable.evict` and at
            ``save``.

    Source: DeepRec's ``GlobalStepEvict``, which evicts at checkpoints only.

    Example:
        >>> GlobalStepEvict(steps_to_live=4000, every=1000)
        GlobalStepEvict(steps_to_live=4000, every=1000)
    """

    steps_to_live: int
    every: int = 0

    def __post_init__(self) -> None:
        _check_at_least("GlobalStepEvict", "steps_to_live", self.steps_to_live, 0)
        _check_at_least("GlobalStepEvict", "every", self.every, 0)


@dataclass(frozen=True)
class L2WeightEvict:
    """
    Evict keys whose row is small: half the sum of its squares is below a threshold.

    Args:
        l2_weight_threshold: the threshold, not negative.
        every: the argument of :class:`GlobalStepEvict`.

    Source: DeepRec's ``L2WeightEvict``, which evicts at checkpoints only.

    Example:
        >>> L2WeightEvict(l2_weight_threshold=1e-4).every
        0
    """

    l2_weight_threshold: float
    every: int = 0

    def __post_init__(self) -> None:
        if not self.l2_weight_threshold >= 0:
            raise ValueError(f"L2WeightEvict: l2_weight_threshold must be at least 0, got {self.l2_weight_threshold}")
        _check_at_least("L2WeightEvict", "every", self.every, 0)


@dataclass(frozen=True)
class LRUEvict:
    """
    Keep at most ``capacity`` keys: evict the ones that have not been looked up in training for longest.

    Args:
        capacity: the number of keys, at least 1; it must hold the keys of one training step.

    Example:
        >>> LRUEvict(capacity=5_000_000)
        LRUEvict(capacity=5000000)
    """

    capacity: int

    def __post_init__(self) -> None:
        _check_at_least(type(self).__name__, "capacity", self.capacity, 1)


@dataclass(frozen=True)
class LFUEvict(LRUEvict):
    """
    Keep at most ``capacity`` keys: evict the ones that have been looked up in training least often.

    Args:
        capacity: the number of keys, at least 1; it must hold the keys of one training step.

    Example:
        >>> LFUEvict(capacity=5_000_000)
        LFUEvict(capacity=5000000)
    """


@dataclass(frozen=True)
class InitializerOption:
    """
    The initial values of the rows of new keys.

    Args:
        initializer: the argument of :class:`EmbeddingVariable`. Default: the variable's own argument.
        default_value_dim: the number of rows of the table that the initializer fills, if it is a function; a key begins
            with row ``key mod default_value_dim``. Default 4096.
        default_value_no_permission: the value of each element for a key that is not admitted yet. Default 0.

    Source: DeepRec's ``InitializerOption``.

    Example:
        >>> InitializerOption(initializer=0.25).default_value_dim
        4096
    """

    initializer: Any = None
    default_value_dim: int = 4096
    default_value_no_permission: float = 0.0

    def __post_init__(self) -> None:
        _check_at_least("InitializerOption", "default_value_dim", self.default_value_dim, 1)


@dataclass(frozen=True)
class StorageOption:
    """
    The tiers that hold rows. With more than one, rows that are rarely or no longer used are demoted to the next tier.

    Args:
        storage_type: a :class:`StorageType` or its name. ``"DRAM"`` (the default) is host memory, ``"HBM"`` the GPU's;
            with ``"HBM_DRAM"``, ``"DRAM_SSD"`` and ``"HBM_DRAM_SSD"`` every tier but the last has a size.
        storage_path: a folder for the SSD tier: scratch, cleared with the table; save checkpoints elsewhere.
        storage_size: the bytes of each tier but the last, rows with their optimizer state and keys counted. Default: 1
            GiB each.
        cache_strategy: the choice of rows that leave a full tier: a :class:`CacheStrategy` or its name. Default
            ``"LFU"``.

    Source: DeepRec's ``StorageOption``. DeepRec's SSD tiers, on LevelDB and on hashed files, are one here.

    Example:
        >>> StorageOption("DRAM_SSD", storage_path="/tmp/rows", storage_size=[2**30]).storage_type.tiers()
        ['DRAM', 'SSD']
    """

    storage_type: Any = StorageType.DRAM
    storage_path: str | None = None
    storage_size: Sequence[int] = field(default_factory=lambda: [2**30, 2**30])
    cache_strategy: Any = CacheStrategy.LFU

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage_type", _member(StorageType, "storage_type", self.storage_type))
        object.__setattr__(self, "cache_strategy", _member(CacheStrategy, "cache_strategy", self.cache_strategy))
        tiers = tiers_below(self.storage_type)
        if any(tier.on_disk for tier in tiers) and self.storage_path is None:
            raise ValueError(f"StorageOption: storage_path must be a folder for {self.storage_type.value}, got None")
        sizes = [self.storage_size] if isinstance(self.storage_size, int) else list(self.storage_size)
        if len(sizes) < len(tiers):
            raise ValueError(
                f"StorageOption: storage_size must have the bytes of {len(tiers)} tiers, got {len(sizes)}: of all of "
                f"{self.storage_type.value} but the last"
            )
        for k, size in enumerate(sizes):
            _check_at_least("StorageOption", f"storage_size[{k}]", size, 1)
        object.__setattr__(self, "storage_size", sizes)


@dataclass(frozen=True)
class CheckpointOption:
    """
    The checkpoint that a variable starts from.

    Args:
        ckpt_to_load_from: the path that :meth:`EmbeddingVariable.save` was given. Default: none.

    Source: DeepRec's ``CheckpointOption``.

    Example:
        >>> CheckpointOption().ckpt_to_load_from is None
        True
    """

    ckpt_to_load_from: str | None = None


Evict = GlobalStepEvict | L2WeightEvict | LRUEvict


@dataclass(frozen=True)
class EmbeddingVariableOption:
    """
    The options of an :class:`EmbeddingVariable`: filters, evictions, tiers. They may be combined.

    Args:
        filter_option: the choice of keys that get a row: a :class:`CounterFilter` or :class:`CBFFilter`. Default: all.
        evict_option: the choice of keys that lose their row: a :class:`GlobalStepEvict`, :class:`L2WeightEvict`,
            :class:`LRUEvict` or :class:`LFUEvict`, or several of them in a list. Default: none.
        storage_option: the tiers that hold the rows. Default: one, the memory of the variable's device.
        init_option: the initial values of rows.
        ckpt: the checkpoint that the variable starts from. Default: none.

    Source: DeepRec's ``EmbeddingVariableOption``.

    Example:
        >>> EmbeddingVariableOption(evict_option=GlobalStepEvict(4000)).evictions
        (GlobalStepEvict(steps_to_live=4000, every=0),)
    """

    filter_option: CounterFilter | CBFFilter | None = None
    evict_option: Evict | Sequence[Evict] | None = None
    storage_option: StorageOption = field(default_factory=StorageOption)
    init_option: InitializerOption = field(default_factory=InitializerOption)
    ckpt: CheckpointOption | None = None

    def __post_init__(self) -> None:
        _check_type("filter_option", self.filter_option, (CounterFilter, CBFFilter, type(None)))
        for k, option in enumerate(self.evictions):
            _check_type(f"evict_option[{k}]", option, (GlobalStepEvict, L2WeightEvict, LRUEvict))
        if sum(isinstance(option, LRUEvict) for option in self.evictions) > 1:
            raise ValueError("EmbeddingVariableOption: evict_option must have one capacity at most, got several")
        _check_type("storage_option", self.storage_option, (StorageOption,))
        _check_type("init_option", self.init_option, (InitializerOption,))
        _check_type("ckpt", self.ckpt, (CheckpointOption, type(None)))

    @property
    def evictions(self) -> tuple[Evict, ...]:
        """The evict options, in order."""
        if self.evict_option is None:
            return ()
        return tuple(self.evict_option) if isinstance(self.evict_option, Sequence) else (self.evict_option,)

    @property
    def capacity(self) -> int | None:
        """The largest number of keys; None: any number."""
        return next((option.capacity for option in self.evictions if isinstance(option, LRUEvict)), None)


Initializer = None | float | Sequence | Tensor | Callable[[Tensor], Any] | tuple


def _check_type(argument: str, value: Any, types: tuple[type, ...]) -> None:
    if not isinstance(value, types):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in types)
        raise TypeError(f"EmbeddingVariableOption: {argument} must be {names}, got {type(value).__name__}")


def _check_at_least(owner: str, argument: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}: {argument} must be an integer of at least {least}, got {value!r}")


def _member(kind: type[enum.Enum], argument: str, value: Any) -> Any:
    name = getattr(value, "value", value)
    try:
        return kind(name.upper())
    except (AttributeError, ValueError):
        known = ", ".join(repr(x.value) for x in kind)
        raise ValueError(f"StorageOption: {argument} must be one of {known}, got {value!r}") from None
