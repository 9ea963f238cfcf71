"""The features of TFRecord's Examples as columns: specifications, Arrow's types, and arrays without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from ..ops import ExampleColumn, ExampleValues
from ..typing import ExampleDtype
from ._arrow import arrow

_DTYPES = {
    **{name: name for name in ("int64", "int32", "float32", "bytes", "str")},
    # The names that TensorFlow, torch, numpy and Python have for these.
    **{"string": "bytes", "object": "bytes", "int": "int64", "float": "float32", "torch.int64": "int64"},
    **{"torch.int32": "int32", "torch.float32": "float32"},
}


def dtype_name(dtype: Any) -> str:
    """Return ``int64``, ``int32``, ``float32``, ``bytes`` or ``str`` for TensorFlow's, torch's or numpy's dtype."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
    if name not in _DTYPES:
        raise ValueError(f"dtype must be int64, int32, float32, bytes or str, got {dtype!r}")
    return _DTYPES[name]


@dataclass(frozen=True)
class FixedLenFeature:
    """
    A feature that has the same number of values in every row, like ``tf.io.FixedLenFeature``.

    Args:
        shape: ``()`` or ``[]`` for one value, which makes a column of numbers or strings; ``[k]`` for k values, which
            makes a column of fixed-size lists.
        dtype: ``"int64"``, ``"int32"`` (for int64 values that fit), ``"float32"``, ``"bytes"`` or ``"str"`` (bytes that
            are UTF-8); or TensorFlow's, torch's or numpy's dtype, where a string type means ``"bytes"``.
        default_value: the value, or the k values, of rows without the feature. Default None: such a row is an error,
            unless ``nullable``.
        nullable: whether a row without the feature is a null. Default False.

    Raises:
        ValueError: another dtype, more than one dimension, or a default that does not fit.

    Example:
        >>> from torchsparse_rec.data import FixedLenFeature
        >>> FixedLenFeature([3], "int64", default_value=0)
        FixedLenFeature(shape=(3,), dtype='int64', default_value=0, nullable=False)
    """

    shape: Sequence[int]
    dtype: Any
    default_value: Any = None
    nullable: bool = False

    def __post_init__(self) -> None:
        given = self.shape
        shape = (given,) if isinstance(given, int) else tuple(given)
        if len(shape) > 1 or any(k < 0 for k in shape):
            raise ValueError(f"FixedLenFeature: shape must be () or (k,), got {given!r}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        self.column()

    @property
    def size(self) -> int:
        """The number of values of a row."""
        return self.shape[0] if self.shape else 1

    def column(self) -> ExampleColumn:
        """Return the feature as the column that the parser of Examples takes."""
        given = self.default_value
        if given is None:
            default = None
        elif isinstance(given, (str, bytes)) or np.ndim(given) == 0:
            default = [given] * self.size
        else:
            default = list(given)
        return ExampleColumn(_parsed_dtype(self.dtype), self.size, default, self.nullable)


@dataclass(frozen=True)
class VarLenFeature:
    """
    A feature with any number of values in a row, none if it is absent, like ``tf.io.VarLenFeature``: a column of lists.

    Args:
        dtype: the argument of :class:`FixedLenFeature`.

    Raises:
        ValueError: another dtype.

    Example:
        >>> from torchsparse_rec.data import VarLenFeature
        >>> VarLenFeature("bytes")
        VarLenFeature(dtype='bytes')
    """

    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def column(self) -> ExampleColumn:
        """Return the feature as the column that the parser of Examples takes."""
        return ExampleColumn(_parsed_dtype(self.dtype), None)


Feature: TypeAlias = FixedLenFeature | VarLenFeature


def _parsed_dtype(dtype: Any) -> ExampleDtype:
    return "bytes" if dtype == "str" else dtype


def checked_features(reader: str, features: Mapping[str, Any]) -> dict[str, Feature]:
    """Return features by name, checked, with TensorFlow's specifications turned into ours."""
    for name in features:
        # Python turns bytes that are no UTF-8 into halves of surrogate pairs, which Arrow refuses.
        if not isinstance(name, str) or name != name.encode(errors="replace").decode():
            raise ValueError(f"{reader}: features must have names that are text, got {name!r}")
    return {name: _checked(reader, name, spec) for name, spec in features.items()}


def _checked(reader: str, name: str, spec: Any) -> Feature:
    if isinstance(spec, (FixedLenFeature, VarLenFeature)):
        return spec
    kind = type(spec).__name__
    if kind == "FixedLenFeature":
        return FixedLenFeature(spec.shape, spec.dtype, spec.default_value)
    if kind == "VarLenFeature":
        return VarLenFeature(spec.dtype)
    raise ValueError(f"{reader}: features[{name!r}] must be a FixedLenFeature or a VarLenFeature, got {spec!r}")


def arrow_type(feature: Feature) -> Any:
    """Return the Arrow type of the feature's column."""
    pa = arrow("TFRecord")
    types = {"int64": pa.int64(), "int32": pa.int32(), "float32": pa.float32(), "bytes": pa.large_binary()}
    value = types.get(feature.dtype, pa.large_string())
    if isinstance(feature, VarLenFeature):
        return pa.large_list(value)
    return pa.list_(value, feature.shape[0]) if feature.shape else value


def arrow_schema(features: Mapping[str, Feature]) -> Any:
    """Return the Arrow schema of the columns of all features."""
    pa = arrow("TFRecord")
    return pa.schema([pa.field(name, arrow_type(feature)) for name, feature in features.items()])


def to_array(kind: Any, rows: int, values: ExampleValues) -> Any:
    """Return a parsed column as an Arrow array of the type from :func:`arrow_type`, in the memory of its tensors."""
    pa = arrow("TFRecord")
    present = None
    if values.present is not None and not bool(values.present.all()):
        present = pa.py_buffer(np.packbits(values.present.numpy(), bitorder="little"))
    if pa.types.is_large_list(kind):
        child = _flat_array(kind.value_type, None, values)
        return pa.Array.from_buffers(kind, rows, [present, _buffer(values.row_offsets)], children=[child])
    if pa.types.is_fixed_size_list(kind):
        child = _flat_array(kind.value_type, None, values)
        return pa.Array.from_buffers(kind, rows, [present], children=[child])
    return _flat_array(kind, present, values)


def _flat_array(kind: Any, present: Any, values: ExampleValues) -> Any:
    pa = arrow("TFRecord")
    if values.string_offsets is None:
        return pa.Array.from_buffers(kind, values.values.shape[0], [present, _buffer(values.values)])
    buffers = [present, _buffer(values.string_offsets), _buffer(values.values)]
    return pa.Array.from_buffers(kind, values.string_offsets.shape[0] - 1, buffers)


def _buffer(x: Tensor | None) -> Any:
    assert x is not None
    return arrow("TFRecord").py_buffer(x.numpy())
