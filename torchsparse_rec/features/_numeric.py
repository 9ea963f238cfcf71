"""Columns of numbers: plain, in buckets, or in sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ._base import CategoricalColumn, DenseColumn, check_count, check_key, dtype_name
from ._functions import as_normalizer, is_open, parts_of, standardizers
from ._plain import make_fields_plain, plain, set_field

Normalizer = Callable[[Tensor], Tensor]


class NumbersColumn(DenseColumn):
    """The base class of columns that read one feature of numbers, and have the feature's name."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    normalizer_fn: Normalizer | None

    def __post_init__(self) -> None:
        make_fields_plain(self)
        check_key(self.key)
        set_field(self, "shape", _checked_shape(self.shape, self.key))
        set_field(self, "dtype", _number_dtype(self.dtype, self.key))
        set_field(self, "normalizer_fn", _normalizer(self.normalizer_fn, self.shape, self.key))
        if sum(map(is_open, parts_of(self.normalizer_fn))) > self.needs_adapt:
            raise ValueError(
                f"column {self.key!r}: normalizer_fn must have its mean and variance, got {self.normalizer_fn!r}: "
                "adapt() finds those of one Standardize() of a numeric_column"
            )

    @property
    def needs_adapt(self) -> bool:
        """Whether ``adapt()`` must still find mean and variance."""
        return False

    @property
    def name(self) -> str:
        """The feature's name."""
        return self.key

    @property
    def width(self) -> int:
        """The product of the shape: the numbers of an example, or of one step of a sequence."""
        return math.prod(self.shape)

    def features(self) -> list[str]:
        """Return the name of the one feature that the column reads."""
        return [self.key]


@dataclass(frozen=True, eq=False, repr=False)
class NumericColumn(NumbersColumn):
    """Plain or normalized numbers: see :func:`numeric_column`."""

    key: str
    shape: tuple[int, ...] = (1,)
    default_value: Any = None
    dtype: str = "float32"
    normalizer_fn: Normalizer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "default_value", _default(self.default_value, self.shape, self.dtype, self.key))

    @property
    def needs_adapt(self) -> bool:
        """Whether ``adapt()`` must still find mean and variance."""
        return any(map(is_open, parts_of(self.normalizer_fn)))


@dataclass(frozen=True, eq=False, repr=False)
class BucketizedColumn(DenseColumn, CategoricalColumn):
    """The bucket of each number: see :func:`bucketized_column`."""

    PARENTS: ClassVar[tuple[str, ...]] = ("source_column",)

    source_column: NumericColumn
    boundaries: tuple[float, ...] | None = None
    num_bins: int | None = None
    epsilon: float = 0.01

    def __post_init__(self) -> None:
        make_fields_plain(self)
        source = self.source_column
        if not isinstance(source, NumericColumn):
            raise ValueError(f"bucketized_column: source_column must be a numeric_column, got {source!r}")
        if len(source.shape) > 1:
            raise ValueError(
                f"bucketized_column {source.key!r}: source_column must have one dimension, got shape {source.shape}"
            )
        if (self.boundaries is None) == (self.num_bins is None):
            raise ValueError(
                f"bucketized_column {source.key!r}: either boundaries or num_bins must be given, got "
                f"{self.boundaries!r} and {self.num_bins!r}"
            )
        if self.boundaries is not None:
            set_field(self, "boundaries", _checked_boundaries(self.boundaries, source.key))
        else:
            check_count("num_bins", self.num_bins, 1, source.key)
        if not (isinstance(self.epsilon, (int, float)) and 0 < self.epsilon < 1):
            raise ValueError(f"bucketized_column {source.key!r}: epsilon must be in (0, 1), got {self.epsilon!r}")

    @property
    def name(self) -> str:
        """The feature's name, and ``_bucketized``."""
        return f"{self.source_column.name}_bucketized"

    @property
    def depth(self) -> int:
        """How many buckets one number has."""
        if self.boundaries is None:
            raise ValueError(f"column {self.name!r}: boundaries must be found by adapt() before it is used")
        return len(self.boundaries) + 1

    @property
    def num_buckets(self) -> int:
        """The buckets of all elements of the feature together."""
        return self.depth * self.source_column.shape[0]

    @property
    def width(self) -> int:
        """The number of buckets: each has one number."""
        return self.num_buckets

    @property
    def needs_adapt(self) -> bool:
        """Whether ``adapt()`` must still find the boundaries."""
        return self.boundaries is None


@dataclass(frozen=True, eq=False, repr=False)
class SequenceNumericColumn(NumbersColumn):
    """Sequences of numbers: see :func:`sequence_numeric_column`."""

    key: str
    shape: tuple[int, ...] = (1,)
    default_value: float = 0.0
    dtype: str = "float32"
    normalizer_fn: Normalizer | None = None


def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: Any = None,
    dtype: Any = "float32",
    normalizer_fn: Normalizer | None = None,
) -> NumericColumn:
    """
    Make a column of numbers, plain or normalized.

    Args:
        key: the feature.
        shape: the shape of one example. Default ``(1,)``.
        default_value: the replacement of missing numbers (nulls; NaN is a number and stays): one number, or one for
            each element. Default: a missing number is an error.
        dtype: the dtype of the feature in files, for :func:`parse_example_features`: a name or a dtype. Default
            float32. Inputs may have any dtype; results are float32.
        normalizer_fn: the function that transforms the numbers: :class:`Standardize`, :class:`Log`, :class:`Clip`,
            :class:`FillNaN`, :class:`Compose` of these, or any function of a tensor, which cannot be written as a
            configuration. ``adapt()`` finds mean and variance of a ``Standardize()`` without arguments, in a
            :class:`Compose` those of what the normalizers before it return. Default: none.

    Raises:
        ValueError: for arguments that TensorFlow refuses too.

    Source: ``tf.feature_column.numeric_column``.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, Standardize, numeric_column
        >>> age = numeric_column("age", normalizer_fn=Standardize(mean=40.0, variance=100.0))
        >>> FeatureTransform([age])({"age": [20, 45]}).dense
        tensor([[-2.0000],
                [ 0.5000]])
    """
    return NumericColumn(key, shape, default_value, dtype, normalizer_fn)  # type: ignore[arg-type]


def bucketized_column(
    source_column: NumericColumn,
    boundaries: Sequence[float] | None = None,
    *,
    num_bins: int | None = None,
    epsilon: float = 0.01,
) -> BucketizedColumn:
    """
    Make a column of the buckets of numbers: one-hot, or as ids for an embedding, an indicator or a cross.

    Bucket ``b`` is ``boundaries[b - 1] <= x < boundaries[b]``, compared in float32; NaN falls into the last bucket. The
    ids of a feature's second element follow the ids of its first, and so on.

    Args:
        source_column: a :func:`numeric_column` of one dimension.
        boundaries: the boundaries, ascending, no two equal.
        num_bins: the number of buckets, instead of boundaries; ``adapt()`` finds boundaries with about equally many
            numbers in each. Fewer if boundaries coincide. (An argument of Keras, not of TensorFlow.)
        epsilon: the error of these boundaries, as a fraction of the numbers. Default 0.01.

    Raises:
        ValueError: for arguments that TensorFlow refuses too.

    Source: ``tf.feature_column.bucketized_column``; ``keras.layers.Discretization``.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, bucketized_column, numeric_column
        >>> FeatureTransform([bucketized_column(numeric_column("age"), [18, 65])])({"age": [3, 18, 70]}).dense
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    return BucketizedColumn(source_column, boundaries, num_bins, epsilon)  # type: ignore[arg-type]


def sequence_numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: float = 0.0,
    dtype: Any = "float32",
    normalizer_fn: Normalizer | None = None,
) -> SequenceNumericColumn:
    """
    Make a column of sequences of numbers: a float32 :class:`JaggedTensor` in ``Features.sequence_dense``.

    Args:
        key: the feature: rows of any length.
        shape: the shape of one step; the values are ``[N, *shape]``. Default ``(1,)``; with ``(2,)``, a row of 6
            numbers has 3 steps.
        default_value: the replacement of numbers that are missing before others; pass it to
            :meth:`JaggedTensor.to_padded_dense` as padding too.
        dtype: the argument of :func:`numeric_column`.
        normalizer_fn: the argument of :func:`numeric_column`, but a ``Standardize`` must have mean and variance.

    Raises:
        ValueError: for arguments that TensorFlow refuses too, and for ``Standardize()`` without arguments; when used,
            for a row whose length is no multiple of the numbers of a step.

    Source: ``tf.feature_column.sequence_numeric_column``.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, sequence_numeric_column
        >>> FeatureTransform([sequence_numeric_column("t")])({"t": [[1.0, 2.0], [3.0]]}).sequence_dense["t"].lengths()
        tensor([2, 1])
    """
    return SequenceNumericColumn(key, shape, default_value, dtype, normalizer_fn)  # type: ignore[arg-type]


def _number_dtype(dtype: Any, key: str) -> str:
    name = dtype_name(dtype, key)
    if name == "string":
        raise ValueError(f"column {key!r}: dtype must be an integer or a float, got 'string'")
    return name


def _checked_shape(shape: Any, key: str) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, (list, tuple)) else (shape,)
    return tuple(check_count("shape", size, 1, key) for size in sizes)


def _normalizer(value: Any, shape: tuple[int, ...], key: str) -> Normalizer | None:
    made = as_normalizer(value)
    for part in standardizers(made):
        if isinstance(part.mean, tuple) and isinstance(part.variance, tuple):
            count = max(len(part.mean), len(part.variance))
            if count not in (1, *shape[-1:], math.prod(shape)):
                raise ValueError(
                    f"column {key!r}: normalizer_fn must have one mean and variance for each of the "
                    f"{math.prod(shape)} elements of an example, got {count}"
                )
    return made


def _checked_boundaries(boundaries: Any, key: str) -> tuple[float, ...]:
    if not isinstance(boundaries, (list, tuple)) or not boundaries:
        raise ValueError(f"bucketized_column {key!r}: boundaries must be a list that is not empty, got {boundaries!r}")
    numbers = tuple(boundaries)
    for position, number in enumerate(numbers):
        if not isinstance(number, (int, float)) or math.isnan(number):
            raise ValueError(
                f"bucketized_column {key!r}: boundaries must be numbers, got {number!r} at position {position}"
            )
    for position, (low, high) in enumerate(zip(numbers, numbers[1:], strict=False)):
        if not low < high:
            raise ValueError(
                f"bucketized_column {key!r}: boundaries must be ascending, got {low} followed by {high} at position "
                f"{position + 1}"
            )
    return numbers


def _default(value: Any, shape: tuple[int, ...], dtype: str, key: str) -> Any:
    """Return one default for each element, in tuples nested as the shape is; None stays None."""
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    value = plain(value)
    if isinstance(value, (int, float)):
        for size in reversed(shape):
            value = (value,) * size
    flat = flattened(value, shape)
    if flat is None:
        raise ValueError(f"column {key!r}: default_value must be numbers of the column's shape {shape}, got {value!r}")
    if any(isinstance(x, float) for x in flat) and not dtype.startswith(("float", "bfloat")):
        raise ValueError(f"column {key!r}: default_value must be of the dtype {dtype}, got {value!r}")
    return _as_tuple(value)


def flattened(value: Any, shape: tuple[int, ...]) -> list[Any] | None:
    """Return the numbers of a nested list of this shape; None if the value is no such list."""
    if not shape:
        return [value] if isinstance(value, (int, float)) else None
    if not isinstance(value, (list, tuple)) or len(value) != shape[0]:
        return None
    parts = [flattened(part, shape[1:]) for part in value]
    return None if any(part is None for part in parts) else [x for part in parts for x in part or ()]


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, (list, tuple)) else value
