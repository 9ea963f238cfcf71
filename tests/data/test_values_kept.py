"""What every format does with the values that files of numbers and text lose most easily: keep them, or refuse them."""

import math
import re
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from data.cases import joined

from torchsparse_rec.data import (
    DataError,
    _text,
    convert,
    read_criteo,
    read_csv,
    read_movielens,
    read_parquet,
    read_prebatched,
    read_tfrecord,
    to_record_batch,
    to_tensors,
    write_criteo,
    write_csv,
    write_movielens,
    write_parquet,
    write_prebatched,
    write_tfrecord,
)

#: Columns of values that a reader or writer may change, by name.
COLUMNS = {
    "int64": pa.array([-(2**63), 2**63 - 1, 2**53 + 1, None, 0]),
    "uint64": pa.array([2**64 - 1, 0, None], pa.uint64()),
    "uint64 that int64 holds": pa.array([2**63 - 1, 0], pa.uint64()),
    "int32": pa.array([-(2**31), None, 2**31 - 1], pa.int32()),
    "doubles": pa.array([6510615555426900571.0, 0.5, -0.0, 1e15, 2.0**53, None, math.inf, -math.inf]),
    "whole doubles": pa.array([-0.0, 3.0, 7e15]),
    "times in seconds": pa.array([1700000047.0, 0.5]),
    "huge": pa.array([1e300, 1.0]),
    "tiny": pa.array([1e-300, 1.0]),
    "not a number": pa.array([math.nan, 1.0, None]),
    "floats": pa.array([0.1, 3e38, 1e-40, -0.0, None, 16777216.0], pa.float32()),
    "halves": pa.array(np.array([0.1, 65504, -0.0], np.float16)),
    "bools": pa.array([True, None, False]),
    "digits": pa.array(["7", "07", "007", " 7", "7 ", "+7", "7.0", "1e3", "0x7", None, ""]),
    "digits only": pa.array(["7", "8"]),
    "numbers of exponents": pa.array(["68e1", "6.80e2"]),
    "words of types": pa.array(["true", "nan", "1", "2020-01-01"]),
    "true": pa.array(["true", "false"]),
    "nan": pa.array(["nan", "NaN", "inf"]),
    "quotes": pa.array(['"7"', 'a,"7', '"', '7",8', ',"7,', "|"]),
    "large strings": pa.array(["007", None, "7"], pa.large_string()),
    "views of strings": pa.array(["007", None, "a string that is longer than its view"], pa.string_view()),
    "binaries": pa.array([b"007", None, b"7"]),
    "fixed binaries": pa.array([b"07", b"7 "], pa.binary(2)),
    "a dictionary of strings": pa.array(["07", "7", None, "07"]).dictionary_encode(),
    "a dictionary of integers": pa.array([2**53 + 1, None, 5]).dictionary_encode(),
    "decimals": pa.array([Decimal("123.450"), None], pa.decimal128(9, 3)),
    "timestamps": pa.array([1, None], pa.timestamp("ms")),
    "durations": pa.array([1, None], pa.duration("ms")),
    "dates": pa.array([1, None], pa.date32()),
    "lists of integers": pa.array([[2**63 - 1, -(2**63)], [], [5]]),
    "null lists": pa.array([[1], None, []], pa.list_(pa.int64())),
    "lists of digits": pa.array([["7", "07"], [], [" 7", "1e3"]]),
    "lists of doubles": pa.array([[1700000047.5], [1e300, 0.1], []]),
    "lists of halves": pa.array([[np.float16(0.1)], []], pa.list_(pa.float16())),
    "lists of decimals": pa.array([[Decimal("1.50")]], pa.list_(pa.decimal128(9, 2))),
    "fixed lists": pa.array([[-0.0, 0.5], None, [3, 4]], pa.list_(pa.float32(), 2)),
    "all null": pa.nulls(2),
}


def csv(path, batch):
    write_csv(path, [batch])
    lists = {field.name: field.type for field in batch.schema if pa.types.is_nested(field.type)}
    return read_csv(path, types=lists)


FORMATS = {
    "csv": csv,
    "parquet": lambda path, batch: (write_parquet(path, [batch]), read_parquet(path))[1],
    "prebatched": lambda path, batch: (write_prebatched(path, [batch]), read_prebatched(path))[1],
    "zstd": lambda path, batch: (write_prebatched(path, [batch], compression="zstd"), read_prebatched(path))[1],
    "tfrecord": lambda path, batch: (write_tfrecord(path, [batch]), read_tfrecord(path))[1],
    "tfrecord-prebatched": lambda path, batch: (
        write_tfrecord(path, [batch], prebatched=True),
        read_tfrecord(path, prebatched=True),
    )[1],
}


#: The columns that each format refuses.
TIMES = {"decimals", "timestamps", "durations", "dates", "lists of decimals"}
EXAMPLES = {
    "fixed binaries",
    "all null",
    "uint64",
    "doubles",
    "lists of doubles",
    "times in seconds",
    "huge",
    "tiny",
    "whole doubles",
}
REFUSED = {
    "csv": TIMES | {"uint64"},
    "parquet": set(),
    "prebatched": TIMES | {"fixed binaries", "all null"},
    "zstd": TIMES | {"fixed binaries", "all null"},
    "tfrecord": TIMES | EXAMPLES,
    # A record that holds a batch holds no nulls, but takes null lists for empty ones.
    "tfrecord-prebatched": TIMES
    | EXAMPLES
    | {name for name, column in COLUMNS.items() if column.null_count and name != "null lists"},
}


def plain(value, tfrecord):
    """Return a value as one that compares equal to what docs/data.md says that it is read as."""
    if isinstance(value, list):
        return [plain(item, tfrecord) for item in value]
    if isinstance(value, float):
        value = float(np.float32(value)) if tfrecord else value
        return "nan" if math.isnan(value) else (value, math.copysign(1, value)) if value == 0 else value
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("form", FORMATS)
def test_a_value_is_kept_or_refused_by_name(form, tmp_path):
    """Try every format with every column, beside a column of numbers that says how many rows there are."""
    tfrecord, refused = form.startswith("tfrecord"), set()
    for name, column in COLUMNS.items():
        batch = pa.record_batch({"x": column, "row": list(range(1, len(column) + 1))})
        try:
            found = joined(FORMATS[form](tmp_path / name.replace(" ", "_"), batch))
        except ValueError as error:
            assert "column 'x'" in str(error), (name, error)
            refused.add(name)
            continue
        wanted, values = column.to_pylist(), [None] * len(column)
        if "x" in found.column_names:  # a feature that no record has is no column
            values = found.column("x")
            # CSV's floats are shortest texts, which are read as doubles.
            floats = form == "csv" and pa.types.is_floating(column.type)
            values = (values.cast(column.type, safe=False) if floats else values).to_pylist()
        if tfrecord and pa.types.is_list(column.type):
            wanted = [row or [] for row in wanted]
        assert [plain(x, tfrecord) for x in values] == [plain(x, tfrecord) for x in wanted], name
    assert refused == REFUSED[form]


@pytest.mark.parametrize(
    ("other", "refused"),
    [
        ("NaN", "would round"),
        ("+5", "would round"),
        ("1e3", "would round"),
        ("7.0", "would round"),
        ("18446744073709551615", "beyond int64: say its type, types={'user': pa.uint64"),
        ("6510615555426900571.0", "would round"),
        ("1e400", "beyond the range of double"),
        ("1" * 400, "beyond int64"),
    ],
)
@pytest.mark.parametrize("where", ["before", "after", "in a later block"])
def test_no_id_is_rounded(other, refused, where, tmp_path, monkeypatch):
    """Refuse the integer or the other number, by column and value, and take the type that the message names."""
    ids = ["6510615555426900570", "6510615555426900571", "5"]
    fields = [other, *ids] if where == "before" else [*ids, other] if where == "after" else ["0.5", "7", other, *ids]
    if where == "in a later block":
        monkeypatch.setattr(_text.blocks, "__defaults__", (8,))
    (tmp_path / "f.csv").write_text("user,x\n" + "".join(f"{field},1\n" for field in fields))
    with pytest.raises(DataError, match=r"f.csv: line \d: column 'user' has ") as raised:
        list(read_csv(tmp_path / "f.csv"))
    assert "would round" in str(raised.value) or refused in str(raised.value)
    with pytest.raises(DataError, match="column 'user' has "):
        convert(tmp_path / "f.csv", tmp_path / "f.arrow")
    assert not (tmp_path / "f.arrow").exists()
    assert joined(read_csv(tmp_path / "f.csv", columns=["x"])).column("x").to_pylist() == [1] * len(fields)
    found = joined(read_csv(tmp_path / "f.csv", types={"user": pa.string()}))
    assert found.column("user").to_pylist() == fields


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (["7", "007"], pa.string()),
        (["0x1F", "31"], pa.string()),
        (["-07", "7"], pa.string()),
        ([" 07", "7"], pa.string()),
        (['"7"', "7"], pa.string()),
        (['"1.0"', '"1.00"'], pa.string()),
        (['"true"', "true"], pa.string()),
        (['"a,""7"', '"7"'], pa.string()),
        (["-0", "7"], pa.float64()),
        (["0", "-7", "10"], pa.int64()),
        (["0.5", "-0.5", "1e-05"], pa.float64()),
        (["9007199254740992", "0.5"], pa.float64()),
        (["12345678901234567890.5", "0.5"], pa.float64()),
        (["-9223372036854775808", "0.5"], pa.float64()),
        (["true", "False"], pa.bool_()),
    ],
)
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_only_plain_unquoted_numbers_are_numbers(fields, kind, delimiter, tmp_path):
    for quiet in ("a", '"'):  # a second column of text, perhaps with quotes within
        text = "".join(f"{field}{delimiter}x{quiet}y\n" for field in fields)
        (tmp_path / "f.csv").write_text(f"x{delimiter}y\n{text}")
        found = joined(read_csv(tmp_path / "f.csv", delimiter=delimiter)).column("x")
        wanted = joined(read_csv(tmp_path / "f.csv", delimiter=delimiter, types={"x": kind})).column("x")
        assert found.type == kind and found.equals(wanted)


@pytest.mark.parametrize("late", ["007", '"007"', " 0x1F", "-0"])
def test_a_late_field_that_is_no_plain_number_is_an_error(late, tmp_path, monkeypatch):
    monkeypatch.setattr(_text.blocks, "__defaults__", (16,))
    (tmp_path / "f.csv").write_text("id,x\n" + "70,0.5\n" * 9 + f"{late},0.5\n")
    text = f"f.csv: line 11: column 'id' has {re.escape(late.strip(chr(34)))}, and holds int64 in the lines before: say"
    with pytest.raises(DataError, match=text):
        list(read_csv(tmp_path / "f.csv"))
    assert joined(read_csv(tmp_path / "f.csv", types={"id": pa.string()})).num_rows == 10


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1e300", pa.float32()),
        ("-1e400", pa.float64()),
        ("1|1e300", pa.list_(pa.float32())),
        ("70000|1", pa.list_(pa.float16(), 2)),
    ],
)
def test_numbers_beyond_a_given_type_are_not_infinite(text, kind, tmp_path):
    (tmp_path / "f.csv").write_text(f"id,x\n1,\n2,{text}\n")
    with pytest.raises(DataError, match="line 3: column 'x' has .*, beyond the range of"):
        list(read_csv(tmp_path / "f.csv", types={"x": kind}))
    text = "inf|-Infinity" if pa.types.is_nested(kind) else "inf"
    (tmp_path / "f.csv").write_text(f"id,x\n2,{text}\n")
    assert joined(read_csv(tmp_path / "f.csv", types={"x": kind})).num_rows == 1


@pytest.mark.parametrize(
    "column",
    [pa.array([881250949000] * 2, pa.timestamp("ms")), pa.array(["007", "7"]), pa.array([1, 2], pa.date64())],
    ids=lambda column: str(column.type),
)
def test_ratings_and_clicks_take_numbers_of_no_unit(column, tmp_path):
    """Refuse times, whose integers depend on their unit, and text, which may have several forms of a number."""
    ratings = pa.record_batch({"user": [1, 2], "item": [1, 2], "rating": [3, 4], "timestamp": column})
    with pytest.raises(ValueError, match="column 'timestamp' must hold numbers, got"):
        write_movielens(tmp_path / "u.data", [ratings])
    clicks = {name: pa.array([1, 0]) for name in ("label", *(f"I{i}" for i in range(1, 14)))}
    clicks |= {f"C{i}": pa.array(["07", "7"]) for i in range(1, 27)}
    with pytest.raises(ValueError, match="column 'I3' must hold numbers, got"):
        write_criteo(tmp_path / "t.txt", [pa.record_batch(clicks | {"I3": column})])
    assert list(tmp_path.iterdir()) == []
    write_movielens(tmp_path / "u.data", [ratings.set_column(3, "timestamp", pa.array([1.0, 881250949.0]))])
    assert joined(read_movielens(tmp_path / "u.data")).column("timestamp").to_pylist() == [1, 881250949]
    write_criteo(tmp_path / "t.txt", [pa.record_batch(clicks)])
    assert joined(read_criteo(tmp_path / "t.txt")).column("C9").to_pylist() == ["07", "7"]


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([2**24, None, 2**24 + 1]), "has 16777217 at row 2, not torch.float32, which would round it"),
        (pa.array([[5], [-(2**24) - 1]]), "has -16777217 at value 1, not torch.float32"),
        (pa.array([2**64 - 1], pa.uint64()), "has 18446744073709551615 at row 0, not torch.float32"),
    ],
)
def test_nan_for_nulls_rounds_no_integer(column, text):
    with pytest.raises(ValueError, match=f"column 'x' {text}"):
        to_tensors(pa.record_batch({"x": column}), fill=math.nan)


def test_arrays_of_numpy_keep_their_unit_or_are_refused():
    dates = np.array(["2020-01-01", "2020-01-02"], "datetime64[ns]")
    assert to_record_batch({"x": dates}).column("x").to_numpy().tolist() == dates.tolist()
    with pytest.raises(ValueError, match="column 'x' must hold numbers, .*, got timestamp"):
        to_tensors(to_record_batch({"x": dates}))
    with pytest.raises(TypeError, match="column 'x' must have no mask"):
        to_record_batch({"x": np.ma.array([1, 2], mask=[False, True])})
    with pytest.raises(ValueError, match="column 'x' cannot be made an Arrow array"):
        to_record_batch({"x": [2**64, 1]})
