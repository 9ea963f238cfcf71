"""CSV: what files hold, what is written, and the number of a line that is wrong."""

import sys
import time

import pyarrow as pa
import pytest
from data.cases import MIXED, joined
from hypothesis import given, settings
from hypothesis import strategies as st

from torchsparse_rec.data import (
    DataError,
    _text,
    csv,
    read_csv,
    write_csv,
    write_parquet,
)

TYPES = {name: MIXED.schema.field(name).type for name in ("seen", "pair", "tags", "quote")}


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_is_written_and_read(name, delimiter, tmp_path):
    assert write_csv(tmp_path / name, [MIXED, MIXED], delimiter=delimiter) == 6
    found = list(read_csv(tmp_path / name, types=TYPES, delimiter=delimiter, batch_size=4))
    assert [batch.num_rows for batch in found] == [4, 2]
    assert joined(found).cast(MIXED.schema).equals(joined([MIXED, MIXED]))
    assert joined(read_csv(tmp_path / name, columns=["flag", "id"], delimiter=delimiter)).column_names == ["flag", "id"]


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\n\0"), max_size=5)


@settings(max_examples=40)
@given(rows=st.lists(st.tuples(st.none() | texts, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=6))
def test_csv_keeps_any_text(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "f.csv"
    batch = pa.record_batch({"s": pa.array([s for s, _ in rows], pa.string()), "i": pa.array([i for _, i in rows])})
    write_csv(path, [batch])
    assert joined(read_csv(path, types={"s": pa.string()})).equals(joined([batch]))


@pytest.mark.parametrize("block", [64, 1 << 24])
def test_csv_names_the_malformed_line(block, tmp_path, monkeypatch):
    monkeypatch.setattr(_text.blocks, "__defaults__", (block,))
    lines = ["id,price", *(f"{i},{i}.5" for i in range(60))]
    for bad, text in (
        ("7,x", "invalid value 'x'"),
        ("7", "Expected 2 columns, got 1"),
        ("7,1,2", "Expected 2 columns, got 3"),
    ):
        lines[41] = bad
        (tmp_path / "f.csv").write_text("\n".join(lines))
        with pytest.raises(DataError, match=f"f.csv: line 42: .*{text}"):
            list(read_csv(tmp_path / "f.csv", types={"price": pa.float64()}))


def test_files_that_do_not_fit_name_file_and_column(tmp_path):
    (tmp_path / "a.csv").write_text("id,price\n1,2\n")
    (tmp_path / "b.csv").write_text("price,id\n4,3\n")
    both = joined(read_csv([tmp_path / "a.csv", tmp_path / "b.csv"]))
    assert both.to_pylist() == [{"id": 1, "price": 2}, {"id": 3, "price": 4}]
    for text, problem in (
        ("id\n1\n", "line 1: column 'price' is missing, unlike in .*a.csv"),
        ("id,price,x\n", "line 1: column 'x' is not in"),
        ("id,price\n1,two\n", "line 2: .*invalid value 'two'"),
    ):
        (tmp_path / "c.csv").write_text(text)
        with pytest.raises(DataError, match=f"c.csv: {problem}"):
            list(read_csv([tmp_path / "a.csv", tmp_path / "c.csv"]))


@pytest.mark.parametrize(
    ("text", "keywords", "problem"),
    [
        ("", {}, "line 1: the file is empty, expected a header"),
        ('a,"b\n1,2\n', {}, "line 1: expected a header of names: unexpected end of data"),
        ("a,a\n1,2\n", {}, "line 1: column 'a' is there twice"),
        ("a,b\n1,2\n", {"columns": ["c"]}, "line 1: column 'c' is missing: the header has a, b"),
        ("a,b\n1,2\n", {"types": {"c": pa.int64()}}, "line 1: column 'c' is missing"),
        ("\xff\n1\n", {}, "line 1: expected a header of names"),
        ("a,b\n1,3|x\n", {"types": {"b": pa.list_(pa.int64())}}, "line 2: column 'b': Failed to parse string: 'x'"),
        ("a,b\n1,3|4\n", {"types": {"b": pa.list_(pa.int64(), 3)}}, "line 2: column 'b': ListType can only be"),
        ("a,b\n1,\xff\n", {}, "line 2: column 'b': CSV conversion error to string: invalid UTF8 data"),
        ("a,b\n1,x\n", {"types": {"b": pa.int64()}, "columns": ["b"]}, "line 2: column 'b': CSV conversion"),
    ],
)
def test_malformed_csv(text, keywords, problem, tmp_path):
    (tmp_path / "f.csv").write_bytes(text.encode("latin1"))
    with pytest.raises(DataError, match=f"f.csv: {problem}"):
        list(read_csv(tmp_path / "f.csv", **keywords))


@pytest.mark.parametrize("block", [30, 1 << 24])
@pytest.mark.parametrize(
    ("bad", "types"),
    [
        ('41,"Paris', {}),
        ('41,"Paris', {"id": pa.int64(), "city": pa.binary()}),
        ('41,"Paris', {"city": pa.list_(pa.string())}),
        ('41,"Paris', {"city": pa.dictionary(pa.int32(), pa.string())}),
        ('41,"Pa""ris', {}),
        ('"41,Paris', {}),
        ('"41,Paris', {"id": pa.string()}),
    ],
)
def test_a_quote_that_is_not_closed_names_its_line(bad, types, block, tmp_path, monkeypatch):
    """Name the line of the quote, rather than lose the rows after it within its value."""
    monkeypatch.setattr(_text.blocks, "__defaults__", (block,))
    lines = ["id,city", *(f'{i},"Rome {i}, Lazio"' for i in range(60))]
    lines[41] = bad
    for end in ("\n", "\r\n"):
        (tmp_path / "f.csv").write_bytes(end.join(lines).encode())
        with pytest.raises(DataError, match="f.csv: line 42: "):
            list(read_csv(tmp_path / "f.csv", types=types))
    lines[41] = '41,"Paris"'
    lines[43] = '43,"two\nlines"'
    (tmp_path / "f.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match="f.csv: line 44: a quoted value has no end on this line, got '43,\"two'"):
        list(read_csv(tmp_path / "f.csv"))


@pytest.mark.parametrize("values", [[1, None, 3], [None, None], [None, 2, None], [None], ["", None, "x"]])
def test_one_column_keeps_its_nulls(values, tmp_path):
    batch = pa.record_batch({"x": pa.array(values, pa.string() if "x" in values else pa.int64())})
    write_csv(tmp_path / "f.csv", [batch, batch])
    types = {"x": batch.schema.field("x").type}
    assert joined(read_csv(tmp_path / "f.csv", types=types)).equals(joined([batch, batch]))


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, -(2**64), 10**25])
def test_integers_beyond_int64_are_not_rounded(number, tmp_path):
    lines = [*range(500), number, 7]
    (tmp_path / "f.csv").write_text("id,x\n" + "".join(f"{line},1\n" for line in lines))
    kind = "uint64" if 0 < number < 2**64 else "string"
    text = f"f.csv: line 502: column 'id' has {number}, beyond int64: say its type, .* --columns id:{kind}"
    with pytest.raises(DataError, match=text):
        list(read_csv(tmp_path / "f.csv"))
    found = joined(read_csv(tmp_path / "f.csv", types={"id": pa.string()}))
    assert found.column("id")[500].as_py() == str(number)
    assert joined(read_csv(tmp_path / "f.csv", columns=["x"])).num_rows == len(lines)
    if 0 < number < 2**64:
        found = joined(read_csv(tmp_path / "f.csv", types={"id": pa.uint64()}))
        assert found.column("id").to_pylist() == lines


def test_large_floats_are_no_integers(tmp_path):
    (tmp_path / "f.csv").write_text("x\n1e30\n0.5\n12345678901234567890.5\n")
    assert joined(read_csv(tmp_path / "f.csv")).to_pydict() == {"x": [1e30, 0.5, 12345678901234567890.5]}


def test_an_only_header_and_empty_lines(tmp_path):
    (tmp_path / "f.csv").write_text("a,b\n\n\n1,2\n\n")
    assert joined(read_csv(tmp_path / "f.csv")).to_pylist() == [{"a": 1, "b": 2}]
    (tmp_path / "f.csv").write_text("a,b\n")
    assert list(read_csv(tmp_path / "f.csv")) == []


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array(["a\nb"]), "column 'x' must have no line ends, got 'a.nb'"),
        (pa.array([["a|b"]]), "column 'x' must have no '|' in the items"),
        (pa.array([[1, None]]), "column 'x' must have no nulls among the items"),
        (pa.array([[[1]]]), "column 'x' must not hold lists of lists"),
        (pa.array([b"\xff"]), "column 'x' of binary cannot be written"),
        (pa.array([["a"], [""]]), "column 'x' must have no list of one empty string"),
        (pa.array([{"y": 1}]), "column 'x' must hold numbers, strings or lists of them, got struct<y: int64>"),
        (pa.array([[{"y": 1}]]), "column 'x' "),
        (
            pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
            "column 'x' must hold .* got month_day_nano_interval: cast",
        ),
    ],
)
def test_what_csv_cannot_hold(column, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        write_csv(tmp_path / "f.csv", [pa.record_batch({"x": column})])
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_lines_is_no_text(tmp_path, monkeypatch):
    monkeypatch.setattr(_text, "LONGEST_LINE", 1000)
    monkeypatch.setattr(_text.blocks, "__defaults__", (400,))
    (tmp_path / "f.csv").write_bytes(b"a" * 5000)
    with pytest.raises(DataError, match="f.csv: line 1: a line has more than 1000 bytes"):
        list(read_csv(tmp_path / "f.csv"))


def test_a_header_of_many_names_takes_no_more_time_for_each(tmp_path):
    names = [f"c{i}" for i in range(100_000)]
    (tmp_path / "f.csv").write_text(",".join(names) + "\n")
    begun = time.monotonic()
    with pytest.raises(DataError, match="column 'x' is missing: the header has c0, c1, .*, c99, ...$"):
        list(read_csv(tmp_path / "f.csv", columns=["x"]))
    (tmp_path / "f.csv").write_text(",".join([*names, "c7", "c5"]) + "\n")
    with pytest.raises(DataError, match="line 1: column 'c7' is there twice"):
        list(read_csv(tmp_path / "f.csv"))
    # Comparing each name with all others would take minutes.
    assert time.monotonic() - begun < 20


def test_a_header_has_no_more_names_than_there_may_be_columns(tmp_path, monkeypatch):
    (tmp_path / "f.csv").write_text("a,b,c\n1,2,3\n")
    monkeypatch.setattr(csv, "MOST_COLUMNS", 3)
    assert joined(read_csv(tmp_path / "f.csv")).num_columns == 3
    monkeypatch.setattr(csv, "MOST_COLUMNS", 2)
    with pytest.raises(DataError, match="f.csv: line 1: expected a header of at most 2 names, got 3"):
        list(read_csv(tmp_path / "f.csv"))


def test_columns_of_one_name_are_not_written(tmp_path):
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    for write in (write_csv, write_parquet):
        with pytest.raises(ValueError, match=r"columns must have distinct names, got \['x', 'x'\]"):
            write(tmp_path / "f", [batch])
    assert list(tmp_path.iterdir()) == []


def test_lines_longer_than_what_is_parsed_at_once(tmp_path):
    """Parse lines longer than two of pyarrow's default blocks of 1 MiB."""
    long = "x" * 2_500_000
    texts = ["a", long, "b", long, "c"] + ["short"] * 300_000
    write_csv(tmp_path / "f.csv", [pa.record_batch({"s": texts, "i": range(len(texts))})])
    assert joined(read_csv(tmp_path / "f.csv")).column("s").to_pylist() == texts


def test_parsers_read_memory_that_pyarrow_owns():
    """Copy the block: else a pyarrow thread that frees it last may need the interpreter while it ends, which aborts."""
    block = b"1,2\n" * 9
    before = sys.getrefcount(block)
    reader = _text.reader_of(block)
    assert sys.getrefcount(block) == before
    assert reader.read() == block
