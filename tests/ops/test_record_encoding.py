"""Encoding examples; and what TensorFlow and protobuf encode and parse, for both directions."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.record_cases import columns_of_any_kind, many_messages, messages_of, parse, parse_one, rows_of, tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import record as reference
from torchsparse_rec.compat._parity.reference.record import entry, example, field, list_of, varint_bytes
from torchsparse_rec.ops import ExampleColumn, ExampleValues

# ---- Encoding -------------------------------------------------------------------------------------------------------


def encoded(values: dict[str, ExampleValues], columns: dict[str, ExampleColumn], rows: int) -> list[bytes]:
    data, offsets = ops.encode_examples(values, columns, rows)
    assert offsets.shape == (rows + 1,) and offsets[0] == 0 and offsets[-1] == data.numel()
    text, at = data.numpy().tobytes(), offsets.tolist()
    return [text[a:b] for a, b in zip(at, at[1:], strict=False)]


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_encoding_is_the_inverse_of_parsing(draw: st.DataObject) -> None:
    columns = draw.draw(columns_of_any_kind())
    messages = draw.draw(st.lists(messages_of(columns), max_size=4))
    try:
        values = parse(messages, columns)
    except ops.ExampleError:
        return
    again = encoded(values, columns, len(messages))
    for message, row in zip(again, messages, strict=True):
        assert reference.parse(message, columns) == reference.parse(row, columns)


def test_encoded_bytes_by_hand() -> None:
    values = {
        "id": ExampleValues(torch.tensor([1, 300, 5, 6]), None, torch.tensor([0, 2, 4, 4])),
        "s": ExampleValues(tensor(b"abc"), torch.tensor([0, 1, 3, 3]), None, torch.tensor([True, True, False])),
        "f": ExampleValues(torch.tensor([0.5, 1.0, 2.0])),
    }
    columns = {"id": ExampleColumn("int64", None), "s": ExampleColumn("bytes"), "f": ExampleColumn("float32")}
    wanted = []
    for ids, text, f in (([1, 300], b"a", 0.5), ([5, 6], b"bc", 1.0), ([], None, 2.0)):
        # An empty list is one without a packed field.
        entries = [entry(b"id", list_of("int64", ids) if ids else field(3, b""))]
        entries += [] if text is None else [entry(b"s", list_of("bytes", [text]))]
        wanted.append(example([*entries, entry(b"f", list_of("float32", [f]))]))
    assert encoded(values, columns, 3) == wanted


def test_encoded_rows_without_features_are_empty() -> None:
    nothing = torch.tensor([False, False])
    values = {"x": ExampleValues(torch.tensor([1, 2]), None, None, nothing)}
    assert encoded(values, {"x": ExampleColumn("int64")}, 2) == [b"", b""]
    assert encoded({}, {}, 2) == [b"", b""]


def test_encoding_with_any_number_of_threads(restore_threads: None) -> None:
    """Encode many small rows, and one that holds all."""
    messages, columns = many_messages(1500)
    values = parse(messages, columns)
    whole = {name: ExampleColumn(column.dtype, None) for name, column in columns.items()}
    wide = {}
    for name, x in values.items():
        count = x.values.numel() if x.string_offsets is None else x.string_offsets.numel() - 1
        wide[name] = ExampleValues(x.values, x.string_offsets, torch.tensor([0, count]))
    torch.set_num_threads(1)
    rows, one = encoded(values, columns, 1500), encoded(wide, whole, 1)
    assert [reference.parse(row, columns) for row in rows] == [reference.parse(m, columns) for m in messages]
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert encoded(values, columns, 1500) == rows and encoded(wide, whole, 1) == one
        again = parse(one, whole)
        assert all(torch.equal(again[name].values, values[name].values) for name in columns)


def test_encoding_says_what_is_wrong() -> None:
    ids, one = ExampleValues(torch.tensor([1, 2])), {"x": ExampleColumn("int64")}
    text = {"x": ExampleColumn("bytes")}
    lists = {"x": ExampleColumn("int64", None)}
    none = torch.zeros(3, device="meta")
    parts = {"s": "string_offsets", "r": "row_offsets", "p": "present"}
    cases: list[tuple[str, ExampleValues | None, dict[str, ExampleColumn], int]] = [
        ("feature 'x': values must be torch.int64, got torch.float32", ExampleValues(torch.zeros(2)), one, 2),
        ("feature 'x': row_offsets must be on the CPU, got meta", ids._replace(row_offsets=none), one, 2),
        ("feature 'x' must have 1 values for each of the 3 rows, got 2", ids, one, 3),
        ("feature 'x' must have 0 values for each of the 2 rows, got 2", ids, {"x": ExampleColumn("int64", 0)}, 2),
        ("rows must be an integer >= 0, got -1", ids, one, -1),
        ("rows must be an integer >= 0, got 2.5", ids, one, 2.5),  # type: ignore[list-item]
        (f"rows must be an integer >= 0, got {2**70}", ids, one, 2**70),
        ("values must have the feature 'x', got none", None, one, 2),
        (
            "feature 'x' row offsets must be a vector of Long with 3 elements, got Long",
            ids._replace(row_offsets=torch.tensor([0, 2])),
            lists,
            2,
        ),
        ("feature 'x': string_offsets must be int64 offsets, got None", ExampleValues(tensor(b"ab")), text, 2),
        ("feature 'x': row_offsets must be int64 offsets, got None", ids, lists, 2),
    ]
    for name, given_offsets, columns, match in (
        ("s", [0], one, "feature 'x': string_offsets must be None"),
        ("r", [0, 1, 2], one, "feature 'x': row_offsets must be None"),
        ("r", [0, 1, 3], lists, r"feature 'x' row offsets must not decrease and stay in \[0, 2\], got 3 at position 2"),
        ("r", [0, 1, 1], lists, r"feature 'x' row offsets must go from 0 to 2, the number of values, got 0 to 1"),
        ("r", [1, 1, 2], lists, r"feature 'x' row offsets must go from 0 to 2, the number of values, got 1 to 2"),
        ("p", [1, 1], one, r"feature 'x': present must be torch.bool of shape \[2\], got torch.int64 of shape \[2\]"),
        ("p", [], one, r"feature 'x': present must be torch.bool of shape \[2\], got torch.float32 of shape \[0\]"),
    ):
        cases.append((match, ids._replace(**{parts[name]: torch.tensor(given_offsets)}), columns, 2))
    beyond = ExampleValues(tensor(b"ab"), torch.tensor([0, 5]))
    cases.append((r"feature 'x' string offsets must not decrease and stay in \[0, 2\], got 5", beyond, text, 1))
    for match, values, columns, rows in cases:
        with pytest.raises(ValueError, match=r"encode_examples: " + match):
            ops.encode_examples({} if values is None else {"x": values}, columns, rows)


@pytest.mark.full
def test_a_row_that_protobuf_could_not_read() -> None:
    values = {"x": ExampleValues(torch.zeros(2**29 + 1), None, torch.tensor([0, 2**29 + 1]))}
    with pytest.raises(
        ValueError, match=r"encode_examples: row 0 takes \d+ bytes, and no message has more than 21474836"
    ):
        ops.encode_examples(values, {"x": ExampleColumn("float32", None)}, 1)


# ---- TensorFlow -----------------------------------------------------------------------------------------------------


@pytest.mark.tensorflow
def test_tensorflow_reads_what_is_encoded_and_the_other_way_round(tensorflow: Any) -> None:
    tf = tensorflow
    generator = np.random.default_rng(3)
    messages = []
    for i in range(40):
        features = {
            "ids": tf.train.Feature(int64_list=tf.train.Int64List(value=generator.integers(-5, 2**62, 3).tolist())),
            "f": tf.train.Feature(float_list=tf.train.FloatList(value=generator.normal(size=2).tolist())),
            "s": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"\xffstr%d" % i])),
            "any": tf.train.Feature(int64_list=tf.train.Int64List(value=list(range(i % 5)))),
        }
        if i % 3:
            features["maybe"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[i]))
        messages.append(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    columns = {
        "ids": ExampleColumn("int64", 3),
        "f": ExampleColumn("float32", 2),
        "s": ExampleColumn("bytes"),
        "any": ExampleColumn("int64", None),
        "maybe": ExampleColumn("int64", 1, [-1]),
    }
    theirs = {
        "ids": tf.io.FixedLenFeature([3], tf.int64),
        "f": tf.io.FixedLenFeature([2], tf.float32),
        "s": tf.io.FixedLenFeature([1], tf.string),
        "any": tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64),
        "maybe": tf.io.FixedLenFeature([1], tf.int64, [-1]),
    }
    parsed = parse(messages, columns)
    # TensorFlow must parse the messages, and what is encoded from the parsed values.
    for serialized in (messages, encoded(parsed, columns, 40)):
        wanted = tf.io.parse_example(serialized, theirs)
        for name, column in columns.items():
            assert rows_of(parsed[name], column, 40) == [list(row) for row in as_lists(wanted[name])], name
    for message in encoded(parsed, columns, 40):
        assert set(tf.train.Example.FromString(message).features.feature) == set(columns)


def as_lists(x: Any) -> list[list[Any]]:
    return x.to_list() if hasattr(x, "to_list") else x.numpy().tolist()


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "feature",
    [b"", list_of("int64", []), list_of("int64", [1, 2], packed=False), list_of("int64", [1]), field(3, b"")],
    ids=["no list", "empty", "unpacked", "another count", "empty list"],
)
def test_tensorflow_has_the_same_rules(tensorflow: Any, feature: bytes) -> None:
    """Compare a column with a default, one without, and one of any length."""
    tf = tensorflow
    message = example(
        [entry(b"x", list_of("int64", [8, 9])), entry(b"y", list_of("int64", [3, 4])), entry(b"y", feature)]
    )
    for column, spec in (
        (ExampleColumn("int64", 2, [5, 6]), tf.io.FixedLenFeature([2], tf.int64, [5, 6])),
        (ExampleColumn("int64", 2), tf.io.FixedLenFeature([2], tf.int64)),
        (ExampleColumn("int64", None), tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64)),
    ):
        try:
            wanted = as_lists(tf.io.parse_example([message], {"y": spec})["y"])
        except tf.errors.InvalidArgumentError:
            with pytest.raises(ops.ExampleError):
                parse([message], {"y": column})
            continue
        assert rows_of(parse([message], {"y": column})["y"], column, 1) == wanted


@pytest.mark.tensorflow
def test_protobuf_reads_lists_of_every_form_as_the_reference_does(tensorflow: Any) -> None:
    for feature in (
        list_of("int64", [1, 2]) + list_of("int64", [3], packed=False),
        field(3, field(1, varint_bytes(5)) + b"\x08" + varint_bytes(-1) + field(1, varint_bytes(7))),
        field(2, b"\x0d" + struct.pack("<f", 1.5) + field(1, struct.pack("<f", 2.5))),
        field(1, field(1, b"a") + field(7, b"unknown") + field(1, b"")),
    ):
        theirs = tensorflow.train.Example.FromString(example([entry(b"x", feature)])).features.feature["x"]
        kind = theirs.WhichOneof("kind")
        dtype = {"int64_list": "int64", "float_list": "float32", "bytes_list": "bytes"}[kind]
        assert list(getattr(theirs, kind).value) == reference.list_values(feature, dtype)
        assert parse_one(feature, ExampleColumn(dtype, None)) == reference.list_values(feature, dtype)
