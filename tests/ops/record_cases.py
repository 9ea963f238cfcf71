"""Messages of every form, and parsed columns as lists: shared by the tests of examples."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.record import entry, example, field, list_of
from torchsparse_rec.ops import ExampleColumn, ExampleValues

DTYPES = ["int64", "int32", "float32", "bytes"]
INTEGERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(0, 300))
VALUES = {
    "int64": INTEGERS,
    "int32": st.integers(-(2**31), 2**31 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "bytes": st.binary(max_size=12),
}
NAMES = st.sampled_from(
    ["", "a", "b", "id", "a name of seventeen", "a name of sevEnteen", "ein \xfcberlanger Name, 33 Bytes"]
)


def tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def joined(messages: list[bytes], gap: bytes = b"") -> tuple[Tensor, Tensor]:
    """Return the messages' bytes, each after a gap, and their ranges."""
    data, ranges = b"", []
    for message in messages:
        data += gap
        ranges.append([len(data), len(data) + len(message)])
        data += message
    return tensor(data), torch.tensor(ranges, dtype=torch.int64).reshape(-1, 2)


def parse(messages: list[bytes], columns: dict[str, ExampleColumn], gap: bytes = b"") -> dict[str, ExampleValues]:
    return ops.parse_examples(*joined(messages, gap), columns)


def parse_one(feature: bytes, column: ExampleColumn) -> list[Any]:
    return rows_of(parse([example([entry(b"x", feature)])], {"x": column})["x"], column, 1)[0]


def rows_of(values: ExampleValues, column: ExampleColumn, rows: int) -> list[list[Any] | None]:
    """Return each record's values, None where the feature is absent."""
    if values.string_offsets is None:
        flat = values.values.tolist()
    else:
        text, at = values.values.numpy().tobytes(), values.string_offsets.tolist()
        flat = [text[a:b] for a, b in zip(at, at[1:], strict=False)]
    k = column.size or 0
    bounds = [k * i for i in range(rows + 1)] if values.row_offsets is None else values.row_offsets.tolist()
    present = [True] * rows if values.present is None else values.present.tolist()
    lists = [flat[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert len(lists) == rows and bounds[-1] == len(flat)
    return [row if there else None for row, there in zip(lists, present, strict=True)]


@st.composite
def columns_of_any_kind(draw: st.DrawFn) -> dict[str, ExampleColumn]:
    columns = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        dtype, size = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([None, 0, 1, 1, 2, 5]))
        nullable = draw(st.booleans())
        default = None
        if size is not None and not nullable and draw(st.booleans()):
            default = draw(st.lists(VALUES[dtype], min_size=size, max_size=size))
        columns[name] = ExampleColumn(dtype, size, default, nullable)
    return columns


UNKNOWN = st.sampled_from([b"\x38\x05", field(9, b"abc"), b"\x79" + bytes(8), b"\x7d" + bytes(4), field(300, b"")])


@st.composite
def features_of(draw: st.DrawFn, column: ExampleColumn) -> bytes:
    """Draw a Feature that often fits the column: in pieces, packed or not, with unknown fields."""
    dtype = column.dtype if draw(st.integers(0, 9)) else draw(st.sampled_from(DTYPES))
    size = column.size if column.size is not None and draw(st.integers(0, 9)) else draw(st.integers(0, 6))
    values = draw(st.lists(VALUES[dtype], min_size=size, max_size=size))
    cut = draw(st.integers(0, size))
    pieces = [values[:cut], values[cut:]] if draw(st.booleans()) else [values]
    feature = b"".join(list_of(dtype, piece, draw(st.booleans())) for piece in pieces)
    return feature + (draw(UNKNOWN) if draw(st.booleans()) else b"")


@st.composite
def messages_of(draw: st.DrawFn, columns: dict[str, ExampleColumn]) -> bytes:
    entries = []
    for name, column in columns.items():
        for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2]))):
            entries.append(entry(name.encode(), draw(features_of(column))))
    if draw(st.booleans()):
        entries.append(entry(b"something else", draw(st.binary(max_size=9))))
    entries = draw(st.permutations(entries))
    parts = [example(entries[:2]), example(entries[2:])] if draw(st.booleans()) else [example(entries)]
    return b"".join(parts) + (draw(UNKNOWN) if draw(st.booleans()) else b"")


def many_messages(rows: int) -> tuple[list[bytes], dict[str, ExampleColumn]]:
    columns = {
        "id": ExampleColumn("int64", 3),
        "small": ExampleColumn("int32"),
        "price": ExampleColumn("float32", 2),
        "words": ExampleColumn("bytes", None),
        "clicks": ExampleColumn("int64", None),
        "name": ExampleColumn("bytes", default=[b"nobody"]),
        "weights": ExampleColumn("float32", None),
    }
    messages = []
    for i in range(rows):
        entries = [
            entry(b"id", list_of("int64", [i, i * i, -i])),
            entry(b"small", list_of("int32", [i % 7])),
            entry(b"price", list_of("float32", [i / 2, 1.0])),
            entry(b"words", list_of("bytes", [b"w%d" % j for j in range(i % 4)])),
            entry(b"clicks", list_of("int64", list(range(i % 200)))),
            entry(b"weights", list_of("float32", [0.5] * (i % 3))),
        ]
        messages.append(example(entries[i % 6 :] + entries[: i % 6]))
    return messages, columns
