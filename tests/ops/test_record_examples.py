"""Parsing examples: the reference on messages of every form, rules, errors with their places, threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.record_cases import (
    DTYPES,
    columns_of_any_kind,
    joined,
    many_messages,
    messages_of,
    parse,
    parse_one,
    rows_of,
    tensor,
)
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import record as reference
from torchsparse_rec.compat._parity.reference.record import entry, example, field, list_of, varint_bytes
from torchsparse_rec.ops import ExampleColumn

# ---- Any message ----------------------------------------------------------------------------------------------------


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_messages_equal_the_reference(draw: st.DataObject) -> None:
    columns = draw.draw(columns_of_any_kind())
    messages = draw.draw(st.lists(messages_of(columns), max_size=4))
    check_against_reference(messages, columns)


def check_against_reference(messages: list[bytes], columns: dict[str, ExampleColumn]) -> None:
    try:
        wanted = [reference.parse(message, columns) for message in messages]
    except reference.Fault:
        with pytest.raises(ops.ExampleError):
            parse(messages, columns, gap=b"??")
        return
    parsed = parse(messages, columns, gap=b"??")
    assert list(parsed) == list(columns)
    for name, column in columns.items():
        assert parsed[name].values.dtype == {**COLUMN_DTYPES}[column.dtype]
        assert repr(rows_of(parsed[name], column, len(messages))) == repr([row[name] for row in wanted])


COLUMN_DTYPES = dict(zip(DTYPES, [torch.int64, torch.int32, torch.float32, torch.uint8], strict=True))


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_damaged_messages_equal_the_reference(draw: st.DataObject) -> None:
    """Change a byte or cut off the end: if that is an error, both parsers report it."""
    columns = draw.draw(columns_of_any_kind())
    message = bytearray(draw.draw(messages_of(columns)))
    if message and draw.draw(st.booleans()):
        message[draw.draw(st.integers(0, len(message) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    else:
        del message[draw.draw(st.integers(0, len(message))) :]
    check_against_reference([bytes(message)], columns)


# ---- Rules ----------------------------------------------------------------------------------------------------------


def test_a_message_by_hand() -> None:
    message = bytes.fromhex("0a12 0a10 0a02 6964 12 0a 1a08 0a06 01 ac02 ffff03".replace(" ", ""))
    assert rows_of(parse([message], {"id": ExampleColumn("int64", 3)})["id"], ExampleColumn("int64", 3), 1) == [
        [1, 300, 65535]
    ]


def test_the_last_of_equal_features_counts() -> None:
    entries = [entry(b"x", list_of("float32", [1.0])), entry(b"x", list_of("int64", [5])), entry(b"y", b"")]
    column = ExampleColumn("int64")
    assert parse([example(entries)], {"x": column})["x"].values.tolist() == [5]


@pytest.mark.parametrize("column", [ExampleColumn("int64"), ExampleColumn("int64", None)], ids=["fixed", "any"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 1), (1, 0, 1), (1,)])
def test_of_equal_features_an_empty_one_counts_only_among_lists_of_any_length(
    column: ExampleColumn, order: tuple[int, ...]
) -> None:
    entries = [entry(b"x", b"" if i else list_of("int64", [5])) for i in order]
    column = ExampleColumn("int64", column.size, None if column.size is None else [9])
    wanted = [5] if column.size == 1 and 0 in order else [9] if column.size == 1 else [5] if order[-1] == 0 else []
    values = parse([example(entries)], {"x": column})["x"]
    assert values.values.tolist() == wanted


def test_a_list_in_pieces_is_one_list() -> None:
    feature = list_of("int64", [1, 2]) + list_of("int64", [3], packed=False) + list_of("int64", [4])
    assert parse_one(feature, ExampleColumn("int64", 4)) == [1, 2, 3, 4]


@pytest.mark.parametrize("size", [5, None])
def test_varints_of_every_length(size: int | None) -> None:
    values = [0, -1, -(2**63), 2**63 - 1, 1 << 56]
    assert parse_one(list_of("int64", values), ExampleColumn("int64", size)) == values
    for bits in range(63):
        near = [2**bits - 1, 2**bits, 2**bits + 1, 7, -(2**bits)]
        assert parse_one(list_of("int64", near), ExampleColumn("int64", size)) == near


def test_varints_with_more_bytes_than_needed() -> None:
    """Drop the bits beyond 64 of a varint's tenth byte."""
    run = b"\x85\x80\x00" + b"\xff" * 9 + b"\x7f"
    assert parse_one(field(3, field(1, run)), ExampleColumn("int64", 2)) == [5, -1]


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_long_runs_of_varints(dtype: str) -> None:
    """Parse varints by four lanes, whatever their lengths, at the end of the bytes and within."""
    generator = np.random.default_rng(0)
    for most in (2**7, 2**21, 2**31 - 1) if dtype == "int32" else (2**7, 2**40, 2**63 - 1):
        for count in (900, 1025, 5003):
            values = generator.integers(-5 if count == 5003 else 0, most, count)
            message = example([entry(b"x", list_of(dtype, values.tolist()))])
            for size in (count, None):
                for gap in (b"", b"\xff" * 9):
                    data, ranges = tensor(message + gap), torch.tensor([[0, len(message)]])
                    parsed = ops.parse_examples(data, ranges, {"x": ExampleColumn(dtype, size)})["x"].values
                    assert np.array_equal(parsed.numpy(), values)


def test_names_that_differ_in_few_places() -> None:
    """Match names of which the parser compares the ends first; features come in any order, among others."""
    names = [n * "a" + c + n * "b" for n in (0, 3, 4, 7, 8, 9, 20) for c in "xyz"] + ["", "a" * 8, "a" * 16, "a" * 17]
    columns = {name: ExampleColumn("int64") for name in names}
    generator = np.random.default_rng(1)
    messages = []
    for i in range(50):
        entries = [entry(name.encode(), list_of("int64", [100 * i + j])) for j, name in enumerate(names)]
        entries += [entry(b"a" * n + b"w", b"\xff\xff") for n in range(30)]
        messages.append(example([entries[j] for j in generator.permutation(len(entries))]))
    parsed = parse(messages, columns)
    for j, name in enumerate(names):
        assert parsed[name].values.tolist() == [100 * i + j for i in range(50)]


def test_more_features_than_are_remembered() -> None:
    entries = [entry(b"skipped %d" % i, list_of("int64", [i])) for i in range(500)]
    message = example([*entries, entry(b"x", list_of("int64", [7]))])
    assert parse([message] * 3, {"x": ExampleColumn("int64")})["x"].values.tolist() == [7, 7, 7]


def test_absent_features() -> None:
    messages = [example([]), b"", example([entry(b"x", b"")]), example([entry(b"x", list_of("bytes", [b"p", b"q"]))])]
    default, null = ExampleColumn("bytes", 2, [b"abc", b""]), ExampleColumn("bytes", 2, nullable=True)
    assert rows_of(parse(messages, {"x": default})["x"], default, 4) == [[b"abc", b""]] * 3 + [[b"p", b"q"]]
    values = parse(messages, {"x": null})["x"]
    assert rows_of(values, null, 4) == [None, None, None, [b"p", b"q"]]
    assert values.string_offsets is not None and values.string_offsets.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 2]
    any_number = ExampleColumn("bytes", None)
    assert rows_of(parse(messages, {"x": any_number})["x"], any_number, 4) == [[], [], [], [b"p", b"q"]]
    numbers = ExampleColumn("int32", 2, nullable=True)
    assert parse(messages[:3], {"x": numbers})["x"].values.tolist() == [0] * 6


def test_no_records_and_no_columns() -> None:
    data, ranges = joined([])
    assert ops.parse_examples(data, ranges, {}) == {}
    columns = {"a": ExampleColumn("int64", 3), "b": ExampleColumn("bytes", None), "c": ExampleColumn("bytes")}
    parsed = ops.parse_examples(data, ranges, columns)
    assert [rows_of(parsed[name], column, 0) for name, column in columns.items()] == [[], [], []]


def test_many_records_with_any_number_of_threads(restore_threads: None) -> None:
    messages, columns = many_messages(1500)
    wanted = [reference.parse(message, columns) for message in messages]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        parsed = parse(messages, columns)
        for name, column in columns.items():
            assert rows_of(parsed[name], column, 1500) == [row[name] for row in wanted]


def test_the_first_fault_with_any_number_of_threads(restore_threads: None) -> None:
    messages, columns = many_messages(1500)
    for where in (1400, 700, 3):
        messages[where] = example([entry(b"id", list_of("int64", [where]))])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with pytest.raises(ops.ExampleError, match=f"record {where}: .*expected 3 values, got 1"):
                parse(messages, columns)
    # Errors in a column whose size is known only after all records have been looked at.
    messages, columns = many_messages(1500)
    for where in (1300, 900):
        messages[where] += example([entry(b"clicks", list_of("bytes", [b"x"]))])
        with pytest.raises(ops.ExampleError, match=f"record {where}: .*feature 'clicks': expected a list of int64"):
            parse(messages, columns)


# ---- Faults ---------------------------------------------------------------------------------------------------------

X = {"x": ExampleColumn("int64", 2)}
FAULTS: list[tuple[str, bytes, dict[str, ExampleColumn], str, int]] = [
    ("truncated tag", b"\x8a", {}, "the message ends within a value", 0),
    ("truncated fixed", b"\x0d\x01\x02", {}, "the message ends within a value", 1),
    ("length", b"\x0a\x05abc", {}, "a length of 5 goes beyond the end of its container", 1),
    ("huge length", b"\x0a" + varint_bytes(2**64 - 1), {}, f"a length of {2**63 - 1} goes beyond", 1),
    ("long varint", b"\x08" + b"\x80" * 10 + b"\x01", {}, "a varint of more than 10 bytes", 1),
    ("group", b"\x0b", {}, "a group, which no Example has", 0),
    ("end of a group", b"\x0c", {}, "a group's end, which no Example has", 0),
    ("wire type 7", b"\x0f", {}, "an unknown wire type, which no Example has", 0),
    ("field 0", b"\x02\x00", {}, "a field number of 0, which no Example has", 0),
    ("large tag", varint_bytes(2**32 | 8), {}, "a tag of more than 32 bits, which no Example has", 0),
    ("packed floats", example([entry(b"x", field(2, field(1, b"abc")))]), {"x": ExampleColumn("float32", None)},
     "feature 'x': packed floats take 3 bytes, which 4 does not divide", 12),
    ("kind", example([entry(b"x", list_of("bytes", [b"a"]))]), X,
     "feature 'x': expected a list of int64, got one of bytes", 9),
    ("kinds", example([entry(b"x", list_of("int64", [1, 2]) + list_of("float32", [1.0]))]), X,
     "feature 'x': expected a list of int64, got one of float", 15),
    ("count", example([entry(b"x", list_of("int64", [1, 2, 3]))]), X, "feature 'x': expected 2 values, got 3", 9),
    ("empty list", example([entry(b"x", list_of("int64", []))]), X, "feature 'x': expected 2 values, got 0", 9),
    ("absent", example([]), X, "feature 'x': is missing, and the column has no default", 0),
    ("int32", example([entry(b"x", list_of("int64", [7, 2**31]))]), {"x": ExampleColumn("int32", 2)},
     "feature 'x': 2147483648 is not in the range of int32", 14),
    ("int32, any number", example([entry(b"x", list_of("int64", [7, -(2**31) - 1]))]),
     {"x": ExampleColumn("int32", None)}, "feature 'x': -2147483649 is not in the range of int32", 14),
    ("cut varint", example([entry(b"x", field(3, field(1, b"\x01\x80")))]), X,
     "feature 'x': the message ends within a value", 14),
    ("long varint in a run", example([entry(b"x", field(3, field(1, b"\x01" + b"\x80" * 10 + b"\x01")))]), X,
     "feature 'x': a varint of more than 10 bytes", 14),
    ("strings", example([entry(b"x", list_of("bytes", [b"a"]))]), {"x": ExampleColumn("bytes", 2)},
     "feature 'x': expected 2 values, got 1", 9),
    ("absent string", example([]), {"x": ExampleColumn("bytes", 1)}, "feature 'x': is missing", 0),
]  # fmt: skip


@pytest.mark.parametrize("name", [fault[0] for fault in FAULTS])
def test_faults_say_record_place_and_problem(name: str) -> None:
    _, message, columns, problem, offset = next(fault for fault in FAULTS if fault[0] == name)
    good = example([entry(b"x", list_of(next(iter(columns.values())).dtype if columns else "int64", []))])
    good = good if columns and next(iter(columns.values())).size is None else b""
    given = [good, message] if good else [message]
    with pytest.raises(ops.ExampleError) as error:
        parse(given, columns, gap=b"gap")
    start = sum(len(x) + 3 for x in given[:-1]) + 3
    assert error.value.record == len(given) - 1
    assert error.value.offset == start + offset
    assert problem in error.value.problem
    assert str(error.value) == (
        f"parse_examples: record {error.value.record}: byte {error.value.offset}: {error.value.problem}"
    )


def test_arguments_say_what_is_wrong() -> None:
    data, ranges = joined([b"", b""])
    cases: list[tuple[str, Tensor, Tensor]] = [
        (r"bytes must be a uint8 vector, got Int of shape \[2\]", torch.zeros(2, dtype=torch.int32), ranges),
        (r"ranges must be an int64 matrix of two columns, got Long of shape \[2\]", data, ranges[0]),
        (r"ranges must be an int64 matrix of two columns, got Int of shape \[2, 2\]", data, ranges.int()),
        (
            r"ranges\[1\] must be a range within the 4 bytes, got \[3, 5\]",
            tensor(b"\0" * 4),
            torch.tensor([[0, 0], [3, 5]]),
        ),
        (r"ranges\[0\] must be a range within the 4 bytes, got \[3, 2\]", tensor(b"\0" * 4), torch.tensor([[3, 2]])),
        (r"ranges\[0\] must be a range within the 4 bytes, got \[-1, 2\]", tensor(b"\0" * 4), torch.tensor([[-1, 2]])),
        (r"bytes must be on the CPU, got meta", data.to("meta"), ranges),
        (r"ranges must be on the CPU, got meta", data, ranges.to("meta")),
    ]
    for match, first, second in [
        *cases,
        (r"bytes must be a dense tensor, got one of layout torch", data.to_sparse(), ranges),
    ]:
        with pytest.raises(ValueError, match="parse_examples: " + match):
            ops.parse_examples(first, second, {})
    for column, match in (
        (lambda: ExampleColumn("float64"), r"dtype must be one of int64, int32, float32, bytes, got 'float64'"),
        (lambda: ExampleColumn("int64", -1), r"size must be an integer in \[0, 2147483647\] or None, got -1"),
        (lambda: ExampleColumn("int64", 2**31), r"size must be an integer in .* got 2147483648"),
        (lambda: ExampleColumn("int64", 2.5), r"size must be an integer in .* got 2.5"),  # type: ignore[arg-type]
        (lambda: ExampleColumn(["int64"]), r"dtype must be one of .* got \['int64'\]"),  # type: ignore[arg-type]
        (lambda: ExampleColumn("int64", 1, 5), r"default must be a sequence of values, got 5"),  # type: ignore[arg-type]
        (lambda: ExampleColumn("bytes", 2, "ab"), r"default must be a sequence of values, got 'ab'"),
        (lambda: ExampleColumn("int64", 2, [1]), r"default must be 2 values, got \[1\]"),
        (lambda: ExampleColumn("int64", None, [1]), r"default must be None, since size is, got \[1\]"),
        (lambda: ExampleColumn("int64", 1, [1], nullable=True), r"default must be None, since nullable is set, got"),
    ):
        with pytest.raises(ValueError, match=match):
            column()
    wrong = (("int64", [1.5]), ("int32", [2**31]), ("int64", ["a"]), ("float32", ["a"]), ("float32", [1e300]))
    for dtype, bad in wrong:
        with pytest.raises(ValueError, match="ExampleColumn: default must be values of torch"):
            ExampleColumn(dtype, 1, bad)
    for text in (3, 2.5, None):
        with pytest.raises(ValueError, match="ExampleColumn: default must be strings, got"):
            ExampleColumn("bytes", 1, [text])


def test_types_say_what_is_wrong() -> None:
    data, ranges = joined([b""])
    with pytest.raises(TypeError, match="parse_examples: bytes must be a tensor, got bytes"):
        ops.parse_examples(b"", ranges, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"parse_examples: columns\['x'\] must be an ExampleColumn, got str"):
        ops.parse_examples(data, ranges, {"x": "int64"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="parse_examples: columns must have names that are text, got 5"):
        ops.parse_examples(data, ranges, {5: ExampleColumn("int64")})  # type: ignore[dict-item]


def test_more_values_than_memory_holds() -> None:
    ranges = torch.zeros(2**16 + 1, 2, dtype=torch.int64)
    for dtype in DTYPES:
        column = ExampleColumn(dtype, 2**31 - 1, nullable=True)
        with pytest.raises(ValueError, match="feature 'x' has 2147483647 values in each of 65537 records, which no"):
            ops.parse_examples(tensor(b""), ranges, {"x": column})


def test_the_operators_check_what_python_does_not() -> None:
    """Refuse bad arguments of the schema, which the public function always makes right."""
    call = torch.ops.torchsparse_rec.parse_examples.default
    data, ranges = joined([b""])
    names, two = tensor(b"xx"), torch.tensor([0, 1, 2])
    none = torch.empty(0, dtype=torch.int64)
    one = [tensor(b"x"), torch.tensor([0, 1])]
    for arguments, match in (
        ([names, two, [0, 0], [1, 1], [0, 0], [none] * 4], "names must be distinct, but 0 and 1 are the same"),
        ([*one, [0, 0], [1], [0], [none] * 2], "dtypes and sizes must have 1 elements, one per name, got 2 and 1"),
        ([*one, [4], [1], [0], [none] * 2], r"dtypes\[0\] must be 0, 1, 2 or 3, got 4"),
        ([*one, [0], [-2], [0], [none] * 2], r"sizes\[0\] must be in \[-1, 2147483647\], got -2"),
        ([*one, [0], [2**31], [0], [none] * 2], r"sizes\[0\] must be in \[-1, 2147483647\], got 2147483648"),
        ([*one, [0], [1], [3], [none] * 2], r"absent\[0\] must be 0, 1 or 2, got 3"),
        ([*one, [0], [-1], [1], [none] * 2], r"absent\[0\] must be 0 or 2, since sizes\[0\] is -1, got 1"),
        ([*one, [0], [1], [0], [none]], "absent and defaults must have 1 and 2 elements, got 1 and 1"),
        ([*one, [0], [2], [1], [none] * 2], r"defaults\[0\] must be a vector of Long with 2 elements, got Long of"),
        ([*one, [3], [1], [1], [names, none]], r"defaults\[1\] must be a vector of Long with 2 elements, got Long of"),
        ([*one, [3], [1], [1], [names, torch.tensor([0, 1])]], r"defaults\[1\] must go from 0 to 2, .* got 0 to 1"),
        ([tensor(b"x"), torch.tensor([0, 2]), [0], [1], [0], [none] * 2], r"name_offsets must not decrease and stay"),
    ):
        with pytest.raises(ValueError, match=match):
            call(data, ranges, *arguments)
