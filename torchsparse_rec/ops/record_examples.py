"""
Family ``record``: messages of the type ``tf.train.Example``, between bytes and columns. CPU only.

Contract: csrc/record_example.h. Kernels: csrc/cpu/record_parse.cpp, csrc/cpu/record_encode.cpp.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..typing import ExampleDtype
from .autograd import not_differentiable
from .record import check_cpu

__all__ = ["ExampleColumn", "ExampleError", "ExampleValues", "encode_examples", "parse_examples"]

_ops = torch.ops.torchsparse_rec

# The numbers are from csrc/record_example.h.
_DTYPES = {"int64": 0, "int32": 1, "float32": 2, "bytes": 3}
_TORCH_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bytes": torch.uint8}
_ANY_NUMBER = -1
_MOST_VALUES = 2**31 - 1
_ERROR, _DEFAULT, _REPORTED = range(3)
_KINDS = {1: "bytes", 2: "float", 3: "int64"}
_KIND_OF_DTYPE = {"int64": "int64", "int32": "int64", "float32": "float", "bytes": "bytes"}
_WIRE_TYPES = {3: "a group", 4: "a group's end", 6: "an unknown wire type", 7: "an unknown wire type"}


@dataclass(frozen=True)
class ExampleColumn:
    """
    A feature's type, for ``parse_examples`` and ``encode_examples``.

    Args:
        dtype: ``"int64"``, ``"int32"`` (of an int64 feature whose values fit), ``"float32"`` or ``"bytes"``.
        size: the number of values of every record, below ``2 ** 31``; None: any number of them.
        default: the ``size`` values of a record without the feature; None: such a record is an error, unless
            ``nullable``. With ``size`` None there is no default: a record without the feature has no values.
        nullable: whether a record may lack the feature: ``ExampleValues.present`` marks the records that have it.

    Raises:
        ValueError: for another dtype, a size out of range, or a default that does not fit.

    Example:
        >>> from torchsparse_rec import ops
        >>> ops.ExampleColumn("int64", size=2, default=[0, 0])
        ExampleColumn(dtype='int64', size=2, default=[0, 0], nullable=False)
    """

    dtype: ExampleDtype
    size: int | None = 1
    default: Sequence[Any] | None = None
    nullable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in _DTYPES:
            raise ValueError(f"ExampleColumn: dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if self.size is not None and not _is_count(self.size, _MOST_VALUES):
            raise ValueError(
                f"ExampleColumn: size must be an integer in [0, {_MOST_VALUES}] or None, got {self.size!r}"
            )
        if self.default is None:
            return
        if isinstance(self.default, (str, bytes)) or not hasattr(self.default, "__len__"):
            raise ValueError(f"ExampleColumn: default must be a sequence of values, got {self.default!r}")
        if self.nullable or len(self.default) != self.size:
            wanted = "None, since nullable is set" if self.nullable else f"{self.size} values"
            wanted = "None, since size is" if self.size is None else wanted
            raise ValueError(f"ExampleColumn: default must be {wanted}, got {self.default!r}")
        _default(self)


class ExampleValues(NamedTuple):
    """
    One feature of n records, as a column: ``parse_examples`` returns it, ``encode_examples`` takes it.

    Attributes:
        values: ``[n * size]``, or all records' values in order; for strings all their bytes, as uint8.
        string_offsets: int64, where each string begins in ``values``, and where the last ends; None for numbers.
        row_offsets: ``[n + 1]``, int64, where each record's values (strings) begin; None if all have as many.
        present: ``[n]``, bool, which records have the feature; None: all.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> two_lists = ops.ExampleValues(torch.tensor([7, 8, 9]), row_offsets=torch.tensor([0, 1, 3]))
        >>> two_lists.row_offsets.diff()
        tensor([1, 2])
    """

    values: Tensor
    string_offsets: Tensor | None = None
    row_offsets: Tensor | None = None
    present: Tensor | None = None


class ExampleError(ValueError):
    """
    A message that is no ``tf.train.Example``, or one that lacks the requested columns.

    Attributes:
        record: the number of the record among the given ones, from 0. If there are several faults, it need not be the
            first: faults of messages and of numbers of a fixed count are found before faults of strings and of lists of
            any length.
        offset: the position of the fault among all bytes given.
        problem: the fault, in words.
    """

    def __init__(self, record: int, offset: int, problem: str):
        self.record, self.offset, self.problem = record, offset, problem
        super().__init__(f"parse_examples: record {record}: byte {offset}: {problem}")

    def __reduce__(self) -> tuple:
        """Pickle the error as its arguments."""
        return ExampleError, (self.record, self.offset, self.problem)


def parse_examples(bytes: Tensor, ranges: Tensor, columns: Mapping[str, ExampleColumn]) -> dict[str, ExampleValues]:
    """
    Parse serialized ``tf.train.Example`` messages into columns.

    The rules are from ``tf.io.parse_example``. Where a message holds a feature twice, the last one counts (for columns
    of a fixed size the last that is not empty). Features that are not asked for are skipped. Packed and unpacked lists
    are read. In an entry that has its value twice, which ``tf.io.parse_example`` refuses, the last counts. Not
    differentiable.

    Args:
        bytes: ``[M]``, uint8, on the CPU.
        ranges: ``[n, 2]``, int64: record i is ``bytes[ranges[i, 0]:ranges[i, 1]]``. :func:`tfrecord_frames` returns
            such ranges.
        columns: the columns to read, by their features' names.

    Returns:
        The values of each column, by the same names in the same order.

    Raises:
        ExampleError: (a ValueError) for a record that is no Example or lacks a feature. Also for a feature of another
            kind, of another number of values, or with a value that int32 cannot hold.
        ValueError: for a wrong dtype or rank, ranges that leave ``[0, M]``, a name that is not text, or more values
            than memory could hold.

    Source:
        ``tf.io.parse_example``; tensorflow/core/example/example.proto.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> rows = {"id": ops.ExampleValues(torch.tensor([7, 300]))}
        >>> message, offsets = ops.encode_examples(rows, {"id": ops.ExampleColumn("int64")}, 2)
        >>> ranges = torch.stack([offsets[:-1], offsets[1:]], dim=1)
        >>> ops.parse_examples(message, ranges, {"id": ops.ExampleColumn("int32")})["id"].values
        tensor([  7, 300], dtype=torch.int32)
    """
    check_cpu("parse_examples", "bytes", bytes)
    check_cpu("parse_examples", "ranges", ranges)
    specs = _checked_columns("parse_examples", columns)
    defaults = [part for spec in specs for part in _default(spec)]
    outputs, fault = _ops.parse_examples.default(
        bytes, ranges, *_names("parse_examples", columns), *_layout(specs), [_absent(spec) for spec in specs], defaults
    )
    if fault[0] != 0:
        raise _error(fault.tolist(), columns)
    values: dict[str, ExampleValues] = {}
    for i, (name, spec) in enumerate(columns.items()):
        column, strings, rows, present = outputs[4 * i : 4 * i + 4]
        values[name] = ExampleValues(
            column.view(-1),
            strings if spec.dtype == "bytes" else None,
            rows if spec.size is None else None,
            present.view(torch.bool) if spec.nullable else None,
        )
    return values


def encode_examples(
    values: Mapping[str, ExampleValues], columns: Mapping[str, ExampleColumn], rows: int
) -> tuple[Tensor, Tensor]:
    """
    Encode columns as serialized ``tf.train.Example`` messages: the inverse of ``parse_examples``.

    Features are in the order of ``columns``, numbers are packed, and a feature that a row lacks is left out. Not
    differentiable.

    Args:
        values: the values of each column, by its feature's name.
        columns: the columns, by their features' names; ``default`` and ``nullable`` are not looked at.
        rows: the number of messages.

    Returns:
        ``(bytes, offsets)``: message i is ``bytes[offsets[i]:offsets[i + 1]]``; uint8, and int64 ``[rows + 1]``.

    Raises:
        ValueError: for values whose dtypes, sizes or offsets do not fit or are missing, or a message of 2 GiB or more.

    Source:
        ``tf.train.Example.SerializeToString``; tensorflow/core/example/example.proto; protobuf's encoding.

    Example:
        >>> import torch
        >>> from torchsparse_rec import ops
        >>> label = {"label": ops.ExampleValues(torch.tensor([0.5]))}
        >>> message, offsets = ops.encode_examples(label, {"label": ops.ExampleColumn("float32")}, 1)
        >>> bytes(message[6:11].tolist()), offsets
        (b'label', tensor([ 0, 21]))
    """
    specs = _checked_columns("encode_examples", columns)
    if not _is_count(rows, 2**62):
        raise ValueError(f"encode_examples: rows must be an integer >= 0, got {rows!r}")
    flat: list[Tensor] = []
    for name, spec in columns.items():
        if name not in values:
            raise ValueError(
                f"encode_examples: values must have the feature {name!r}, got {', '.join(values) or 'none'}"
            )
        flat += _parts(name, spec, values[name], rows)
    return _ops.encode_examples.default(
        *_names("encode_examples", columns), *_layout(specs), flat, operator.index(rows)
    )


# ---- Columns in the form of the schemas ------------------------------------------------------------------------------


def _is_count(value: Any, most: int) -> bool:
    """Say whether ``value`` is an integer in ``[0, most]``."""
    try:
        return 0 <= operator.index(value) <= most
    except TypeError:
        return False


def _checked_columns(op: str, columns: Mapping[str, ExampleColumn]) -> list[ExampleColumn]:
    for name, spec in columns.items():
        if not isinstance(spec, ExampleColumn):
            raise TypeError(f"{op}: columns[{name!r}] must be an ExampleColumn, got {type(spec).__name__}")
    return list(columns.values())


def _parts(name: str, spec: ExampleColumn, column: ExampleValues, rows: int) -> list[Tensor]:
    """Return a column's four tensors for the encoder; the ones that it lacks are empty."""
    op = f"encode_examples: feature {name!r}"
    if not isinstance(column, ExampleValues):
        raise TypeError(f"{op} must be ExampleValues, got {type(column).__name__}")
    for part, x in column._asdict().items():
        if x is not None or part == "values":
            check_cpu(op, part, x)
    if column.values.dtype != _TORCH_DTYPES[spec.dtype]:
        raise ValueError(f"{op}: values must be {_TORCH_DTYPES[spec.dtype]}, got {column.values.dtype}")
    for part, wanted in (("string_offsets", spec.dtype == "bytes"), ("row_offsets", spec.size is None)):
        if (getattr(column, part) is None) is wanted:
            raise ValueError(f"{op}: {part} must be {'int64 offsets, got None' if wanted else 'None'}")
    present = column.present
    if present is not None and (present.dtype not in (torch.bool, torch.uint8) or present.shape != (rows,)):
        got = f"{present.dtype} of shape {list(present.shape)}"
        raise ValueError(f"{op}: present must be torch.bool of shape [{rows}], got {got}")
    empty = torch.empty(0, dtype=torch.int64)
    strings, bounds = (empty if x is None else x for x in (column.string_offsets, column.row_offsets))
    flags = torch.empty(0, dtype=torch.uint8) if present is None else present.to(torch.uint8)
    return [column.values.reshape(-1), strings, bounds, flags]


def _strings(texts: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Join byte strings to one tensor of bytes; return it and where each string begins."""
    whole = b"".join(texts)
    data = torch.frombuffer(bytearray(whole), dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8)
    lengths = torch.tensor([0, *map(len, texts)], dtype=torch.int64)
    return data, lengths.cumsum(0)


def _names(op: str, columns: Mapping[str, ExampleColumn]) -> tuple[Tensor, Tensor]:
    try:
        return _strings([name.encode() for name in columns])
    except (AttributeError, UnicodeEncodeError) as error:
        bad = next(name for name in columns if not isinstance(name, str) or not _is_text(name))
        raise ValueError(f"{op}: columns must have names that are text, got {bad!r}") from error


def _is_text(name: str) -> bool:
    """Say whether a name is text: it has no half of a surrogate pair, which UTF-8 cannot encode."""
    return name == name.encode(errors="replace").decode()


def _layout(columns: Sequence[ExampleColumn]) -> tuple[list[int], list[int]]:
    sizes = [_ANY_NUMBER if column.size is None else operator.index(column.size) for column in columns]
    return [_DTYPES[column.dtype] for column in columns], sizes


def _absent(column: ExampleColumn) -> int:
    if column.nullable:
        return _REPORTED
    return _ERROR if column.default is None else _DEFAULT


def _default(column: ExampleColumn) -> tuple[Tensor, Tensor]:
    """Return the values of a record without the feature, and for strings where each begins."""
    given = [] if column.default is None else list(column.default)
    dtype = _TORCH_DTYPES[column.dtype]
    # torch would cut fractions off, and `bytes` of a number makes so many zeros.
    kinds: dict[str, tuple[type, ...]] = {"float32": (object,), "bytes": (str, bytes, bytearray, memoryview)}
    try:
        if all(isinstance(value, kinds.get(column.dtype, (int, np.integer))) for value in given):
            if column.dtype == "bytes" and column.default is not None:
                return _strings([value.encode() if isinstance(value, str) else bytes(value) for value in given])
            made = torch.tensor(given, dtype=dtype)
            if not any(
                math.isfinite(value) and math.isinf(kept) for value, kept in zip(given, made.tolist(), strict=True)
            ):
                return made, torch.empty(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    wanted = "strings" if column.dtype == "bytes" else f"values of {dtype}"
    raise ValueError(f"ExampleColumn: default must be {wanted}, got {column.default!r}")


# ---- Faults ----------------------------------------------------------------------------------------------------------


def _error(fault: list[int], columns: Mapping[str, ExampleColumn]) -> ExampleError:
    kind, record, offset, column, detail = fault
    name = list(columns)[column] if column >= 0 else None
    problem = _problem(kind, detail, None if name is None else columns[name])
    return ExampleError(record, offset, problem if name is None else f"feature {name!r}: {problem}")


def _problem(kind: int, detail: int, column: ExampleColumn | None) -> str:
    """Describe an ExampleFault of csrc/record_example.h in words."""
    wanted = "" if column is None else _KIND_OF_DTYPE[column.dtype]
    size = 0 if column is None else column.size
    wire = _WIRE_TYPES.get(detail & 7, "a field number of 0" if detail >> 3 == 0 else "a tag of more than 32 bits")
    texts = {
        1: "the message ends within a value",
        2: f"a length of {detail} goes beyond the end of its container",
        3: "a varint of more than 10 bytes",
        4: f"{wire}, which no Example has",
        5: f"packed floats take {detail} bytes, which 4 does not divide",
        6: f"expected a list of {wanted}, got one of {_KINDS.get(detail)}",
        7: f"expected {size} values, got {detail}",
        8: "is missing, and the column has no default",
        9: f"{detail} is not in the range of int32",
    }
    return texts[kind]


# ---- Registrations ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("torchsparse_rec::parse_examples")
def _parse_examples_fake(
    bytes: Tensor,
    ranges: Tensor,
    name_bytes: Tensor,
    name_offsets: Tensor,
    dtypes: list[int],
    sizes: list[int],
    absent: list[int],
    defaults: list[Tensor],
) -> tuple[list[Tensor], Tensor]:
    n, outputs = ranges.shape[0], []
    kinds = list(_TORCH_DTYPES.values())
    for dtype, size, policy in zip(dtypes, sizes, absent, strict=True):
        strings, counted = kinds[dtype] == torch.uint8, size == _ANY_NUMBER
        of_all = strings or counted
        shape: tuple = (torch.library.get_ctx().new_dynamic_size(),) if of_all else (n, size)
        strings_end = torch.library.get_ctx().new_dynamic_size() if counted else n * size + 1
        outputs += [
            bytes.new_empty(shape, dtype=kinds[dtype]),
            bytes.new_empty((strings_end if strings else 0,), dtype=torch.int64),
            bytes.new_empty((n + 1 if counted else 0,), dtype=torch.int64),
            bytes.new_empty((n if policy == _REPORTED else 0,), dtype=torch.uint8),
        ]
    return outputs, bytes.new_empty((5,), dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::encode_examples")
def _encode_examples_fake(
    name_bytes: Tensor, name_offsets: Tensor, dtypes: list[int], sizes: list[int], columns: list[Tensor], rows: int
) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return name_bytes.new_empty((size,)), name_bytes.new_empty((rows + 1,), dtype=torch.int64)


not_differentiable("parse_examples", "encode_examples")
