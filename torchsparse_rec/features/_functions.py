"""Normalizers of numbers, small functions with a JSON form; TensorFlow's names of the initializers of tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import initializers
from ..initializers import Constant
from ._plain import make_fields_plain, set_field

__all__ = [
    "Clip",
    "Compose",
    "FillNaN",
    "Log",
    "RandomNormal",
    "RandomUniform",
    "Standardize",
    "TruncatedNormal",
    "as_initializer",
    "as_normalizer",
]

_EPSILON = 1e-7  # the least standard deviation, as in Keras


class _Function:
    """The base class of functions of a tensor that have a JSON form."""

    def __post_init__(self) -> None:
        make_fields_plain(self)

    def to_config(self) -> dict[str, Any]:
        """Return plain data for JSON that makes an equal function."""
        return {"class_name": type(self).__name__, "config": asdict(self)}  # type: ignore[call-overload]


# ---- Normalizers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standardize(_Function):
    """
    A normalizer: ``(x - mean) / max(sqrt(variance), 1e-7)`` in float32.

    Args:
        mean: a number, or one for each element of the feature. Default None: ``adapt()`` finds it.
        variance: the variance, in the form of ``mean``, but not negative.

    Raises:
        ValueError: for one argument without the other, different numbers of means and variances, or a wrong value.

    Source: ``keras.layers.Normalization``.

    Example:
        >>> Standardize(mean=3.0, variance=4.0)(torch.tensor([1.0, 5.0]))
        tensor([-1.,  1.])
    """

    mean: float | tuple[float, ...] | None = None
    variance: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.mean is None) != (self.variance is None):
            raise ValueError(
                f"Standardize: mean and variance must both be given or both not, got {self.mean} and {self.variance}"
            )
        for field in ("mean", "variance"):
            object.__setattr__(self, field, _numbers(field, getattr(self, field)))
        if self.mean is not None and self.variance is not None:
            if np.size(self.mean) != np.size(self.variance) and 1 not in (np.size(self.mean), np.size(self.variance)):
                raise ValueError(
                    f"Standardize: mean and variance must have as many numbers, got {self.mean} and {self.variance}"
                )
            deviation = np.maximum(np.sqrt(np.asarray(self.variance, np.float32)), np.float32(_EPSILON))
            object.__setattr__(self, "_deviation", deviation.tolist())

    def __call__(self, x: Tensor) -> Tensor:
        """Return the standardized numbers."""
        if self.mean is None or self.variance is None:
            raise ValueError("Standardize: mean and variance must be given, or found by adapt(), before it is used")
        return (x.to(torch.float32) - _on(self.mean, x)) / _on(self._deviation, x)  # type: ignore[attr-defined]


def _numbers(field: str, value: Any) -> float | tuple[float, ...] | None:
    """Return a mean or a variance as one number, or as a tuple of numbers."""
    if value is None:
        return None
    numbers = np.asarray(value.tolist() if hasattr(value, "tolist") else value, dtype=object).reshape(-1).tolist()
    if not all(isinstance(x, (int, float)) and not (field == "variance" and x < 0) for x in numbers):
        least = " that are not negative" if field == "variance" else ""
        raise ValueError(f"Standardize: {field} must be a number or numbers{least}, got {value!r}")
    return value if isinstance(value, (int, float)) else tuple(map(float, numbers))


def _on(values: float | Sequence[float], x: Tensor) -> Tensor | float:
    """Return numbers on a tensor's device; one number stays Python's, since copying it would wait for the device."""
    if isinstance(values, (int, float)):
        return values
    if len(values) == 1:
        return values[0]
    numbers = torch.tensor(values, dtype=torch.float32)
    # One number for each element of an example, or for each place of its last dimension.
    if x.dim() > 2 and len(values) == math.prod(x.shape[1:]):
        numbers = numbers.reshape(x.shape[1:])
    return numbers.to(x.device, non_blocking=True)


@dataclass(frozen=True)
class Log(_Function):
    """
    A normalizer: ``log(x + shift)`` in float32.

    Args:
        shift: the number that is added before the logarithm. Default 1.

    Example:
        >>> Log()(torch.tensor([0.0]))
        tensor([0.])
    """

    shift: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logarithms."""
        return torch.log(x.to(torch.float32) + self.shift)


@dataclass(frozen=True)
class Clip(_Function):
    """
    A normalizer that clips numbers to a range. NaN stays.

    Args:
        low: the lower end of the range. Default: none.
        high: the upper end of the range. Default: none.

    Example:
        >>> Clip(0, 10)(torch.tensor([-5.0, 3.0, 99.0]))
        tensor([ 0.,  3., 10.])
    """

    low: float | None = None
    high: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the clipped numbers."""
        return x if self.low is None and self.high is None else x.clamp(self.low, self.high)


@dataclass(frozen=True)
class FillNaN(_Function):
    """
    A normalizer that makes a number of NaN. ``adapt()`` counts it as that number: without this, NaN does not count.

    Args:
        value: the number.

    Raises:
        ValueError: a value that is no number.

    Example:
        >>> FillNaN(-1)(torch.tensor([5.0, float("nan")]))
        tensor([ 5., -1.])
    """

    value: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.value, (int, float)) or math.isnan(self.value):
            raise ValueError(f"FillNaN: value must be a number, got {self.value!r}")

    def __call__(self, x: Tensor) -> Tensor:
        """Return the numbers, without NaN."""
        return torch.where(x.isnan(), self.value, x) if x.is_floating_point() else x


@dataclass(frozen=True, init=False)
class Compose(_Function):
    """
    A normalizer that applies several normalizers in order.

    Args:
        in_order: the functions of a tensor, one by one.
        normalizers: the functions in a tuple, instead.

    Raises:
        ValueError: what is no function and no configuration of one.

    Example:
        >>> Compose(FillNaN(-5), Clip(0), Log())(torch.tensor([float("nan"), 0.0]))
        tensor([0., 0.])
    """

    normalizers: tuple[Any, ...]

    def __init__(self, *in_order: Any, normalizers: Iterable[Any] = ()) -> None:
        if len(in_order) == 1 and not callable(in_order[0]) and not isinstance(in_order[0], Mapping):
            in_order = tuple(in_order[0])
        set_field(self, "normalizers", tuple(map(as_normalizer, [*in_order, *normalizers])))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the result of the last normalizer."""
        for normalizer in self.normalizers:
            x = normalizer(x)
        return x

    def to_config(self) -> dict[str, Any]:
        """Return plain data for JSON that makes an equal function."""
        configs = []
        for normalizer in self.normalizers:
            if not hasattr(normalizer, "to_config"):
                raise ValueError(f"Compose: normalizers must have a to_config() to be written, got {normalizer!r}")
            configs.append(normalizer.to_config())
        return {"class_name": "Compose", "config": {"normalizers": configs}}


_NORMALIZERS = {x.__name__: x for x in (Standardize, Log, Clip, FillNaN, Compose)}


def as_normalizer(value: Any) -> Callable[[Tensor], Tensor] | None:
    """Return a normalizer unchanged, or make it from its configuration; None stays None."""
    return _made("normalizer_fn", value, _NORMALIZERS)


def parts_of(normalizer: Any) -> list[Any]:
    """Return the normalizers that a normalizer consists of, in order."""
    if isinstance(normalizer, Compose):
        return [part for inner in normalizer.normalizers for part in parts_of(inner)]
    return [normalizer]


def is_own(normalizer: Any) -> bool:
    """Say whether a normalizer consists of this module's only: they do not write to their arguments."""
    return all(isinstance(part, (Standardize, Log, Clip, FillNaN)) for part in parts_of(normalizer))


def is_open(normalizer: Any) -> bool:
    """Say whether a normalizer is a ``Standardize`` whose mean and variance ``adapt()`` must still find."""
    return isinstance(normalizer, Standardize) and normalizer.mean is None


def standardizers(normalizer: Any) -> list[Standardize]:
    """Return every ``Standardize`` in a normalizer, in order."""
    return [part for part in parts_of(normalizer) if isinstance(part, Standardize)]


def with_standardizers(normalizer: Any, others: Iterator[Any]) -> Any:
    """Return a normalizer with each ``Standardize`` in it replaced by the next of the others."""
    if isinstance(normalizer, Compose):
        return Compose(*[with_standardizers(part, others) for part in normalizer.normalizers])
    return next(others) if isinstance(normalizer, Standardize) else normalizer


# ---- Initializers ---------------------------------------------------------------------------------------------------


def TruncatedNormal(mean: float = 0.0, stddev: float = 1.0) -> initializers.TruncatedNormal:
    """
    Return :class:`torchsparse_rec.initializers.TruncatedNormal` by TensorFlow's names.

    Example:
        >>> TruncatedNormal(stddev=0.1)
        TruncatedNormal(mean=0.0, std=0.1)
    """
    return initializers.TruncatedNormal(mean, stddev)


def RandomNormal(mean: float = 0.0, stddev: float = 1.0) -> initializers.Normal:
    """
    Return :class:`torchsparse_rec.initializers.Normal` by TensorFlow's names.

    Example:
        >>> RandomNormal(stddev=0.1)
        Normal(mean=0.0, std=0.1)
    """
    return initializers.Normal(mean, stddev)


def RandomUniform(minval: float = -0.05, maxval: float = 0.05) -> initializers.Uniform:
    """
    Return :class:`torchsparse_rec.initializers.Uniform` by TensorFlow's names.

    Example:
        >>> RandomUniform(maxval=0.1)
        Uniform(low=-0.05, high=0.1)
    """
    return initializers.Uniform(minval, maxval)


_INITIALIZERS: dict[str, Any] = {x.__name__: x for x in (TruncatedNormal, RandomNormal, RandomUniform, Constant)}
_SAME = {"Zeros": Constant(0.0), "Ones": Constant(1.0)}


def as_initializer(value: Any, dimension: int) -> Callable[[Tensor], Any]:
    """Return an initializer unchanged, or make it from its configuration; None gives a column's default."""
    if value is None:
        return TruncatedNormal(0.0, 1 / math.sqrt(dimension))
    if isinstance(value, Mapping) and value.get("class_name") in _SAME:
        return _SAME[value["class_name"]]
    made = _made("initializer", value, _INITIALIZERS)
    assert made is not None
    return made


def _made(argument: str, value: Any, known: Mapping[str, Any]) -> Callable[..., Any] | None:
    if value is None or callable(value):
        return value
    if (
        not isinstance(value, Mapping)
        or not isinstance(value.get("config"), Mapping)
        or value.get("class_name") not in list(known)
    ):
        raise ValueError(f"{argument} must be callable, or the configuration of one of {sorted(known)}, got {value!r}")
    # TensorFlow's configurations also have a seed and a dtype; here the table's apply.
    arguments = {field: x for field, x in value["config"].items() if field not in ("seed", "dtype")}
    for field, x in arguments.items():
        arguments[field] = tuple(x) if isinstance(x, list) else x
    try:
        return known[value["class_name"]](**arguments)
    except TypeError as error:
        raise ValueError(f"{argument}: a configuration must have the arguments of its class, got {value!r}") from error
