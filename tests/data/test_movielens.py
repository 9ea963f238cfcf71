"""MovieLens's files: what they hold, what is written, and the number of a line that is wrong."""

import io
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from data.cases import joined

from torchsparse_rec.data import (
    DataError,
    _ratings,
    _text,
    read_movielens,
    write_movielens,
)

DATA = os.environ.get("TORCHSPARSE_REC_DATA")


RATINGS = pa.record_batch(
    {
        "user": pa.array([196, 22, 1], pa.int32()),
        "item": pa.array([242, 377, 9_999_999], pa.int32()),
        "rating": pa.array([3.0, 1.0, 5.0], pa.float32()),
        "timestamp": pa.array([881250949, 878887116, 978300760]),
    }
)


@pytest.mark.parametrize("name", ["u.data", "ratings.dat", "ratings.csv", "u.data.gz", "ratings.csv.zst"])
def test_ratings_are_written_and_read(name, tmp_path):
    batches = [RATINGS, RATINGS, RATINGS.slice(0, 0), RATINGS]
    if ".csv" in name:
        batches.append(RATINGS.set_column(2, "rating", pa.array([3.5, 0.5, 4.25], pa.float32())))
    assert write_movielens(tmp_path / name, batches) == 3 * (len(batches) - 1)
    found = list(read_movielens(tmp_path / name, batch_size=4))
    assert [batch.num_rows for batch in found][:2] == [4, 4] and joined(found).equals(joined(batches))
    assert joined(read_movielens(tmp_path / name, columns=["item"])).column_names == ["item"]


def test_the_ratings_of_movielens_themselves():
    if not DATA:
        pytest.skip("needs TORCHSPARSE_REC_DATA, with ml-100k/u.data")
    path = Path(DATA) / "ml-100k" / "u.data"
    expected = np.loadtxt(path, dtype=np.int64)
    found = joined(read_movielens(path))
    for place, name in enumerate(("user", "item", "rating", "timestamp")):
        np.testing.assert_array_equal(found.column(name).to_numpy(), expected[:, place])


def test_malformed_ratings_name_their_line(tmp_path):
    (tmp_path / "u.data").write_text("1\t2\t3\t881250949\n1\t2\tx\t881250949\n")
    with pytest.raises(DataError, match="u.data: line 2: expected user<TAB>item.*got '1.t2.tx"):
        list(read_movielens(tmp_path / "u.data"))
    (tmp_path / "empty.data").write_text("")
    with pytest.raises(DataError, match="empty.data: line 1: the file ends here"):
        list(read_movielens(tmp_path / "empty.data"))
    with pytest.raises(ValueError, match="layout must be given for .*u.bin: one of ml-100k, ml-1m, ml-20m"):
        read_movielens(tmp_path / "u.bin")
    with pytest.raises(ValueError, match="layout must be one of ml-100k, ml-1m, ml-20m, got 'ml'"):
        read_movielens(tmp_path / "u.data", layout="ml")


@pytest.mark.parametrize("name", ["ratings.csv", "u.data"])
@pytest.mark.parametrize("batches", [[], [RATINGS.slice(0, 0)]], ids=len)
def test_no_ratings_are_not_written(batches, name, tmp_path):
    with pytest.raises(ValueError, match="batches must have at least one row, got none"):
        write_movielens(tmp_path / name, batches)
    assert list(tmp_path.iterdir()) == []


def test_ratings_are_written_as_the_quick_path_reads_them(tmp_path, monkeypatch):
    batch = RATINGS.set_column(2, "rating", pa.array([3.0, 0.5, -0.0]))
    write_movielens(tmp_path / "ratings.csv", [batch])
    lines = (tmp_path / "ratings.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in lines] == ["rating", "3.0", "0.5", "0.0"]
    monkeypatch.delattr(_ratings, "_parse_lines")
    assert joined(read_movielens(tmp_path / "ratings.csv")).column("rating").to_pylist() == [3.0, 0.5, 0.0]
    monkeypatch.undo()
    batch = RATINGS.set_column(2, "rating", pa.array([3.7, 0.125, 4.0], pa.float32()))
    write_movielens(tmp_path / "ratings.csv", [batch])
    assert joined(read_movielens(tmp_path / "ratings.csv")).column("rating").equals(joined([batch]).column("rating"))


@pytest.mark.parametrize("chunk", [20, 1 << 20])
@pytest.mark.parametrize(
    ("times", "end"),
    [
        ([1000000003, 1046454590, 999999999], ""),  # the last one is no cut timestamp: longer ones begin with 1
        ([956703932, 1046454590, 999999999], ""),
        ([10, 9], ""),
        ([881250949, 878887116], "\r"),  # half of the line's end
        ([881250949, 8], "\r"),
        ([7], ""),
    ],
)
def test_a_last_line_without_an_end(times, end, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(_ratings, "_CHUNK", chunk)
    lines = (f"1\t2\t3\t{time}" for time in times)
    (tmp_path / "u.data").write_bytes(("\r\n".join(lines) + end).encode())
    assert joined(read_movielens(tmp_path / "u.data")).column("timestamp").to_pylist() == times


@pytest.mark.parametrize("chunk", [20, 1 << 20])
@pytest.mark.parametrize("cut", range(1, 14))  # within the last timestamp, at its start, and in a field before it
def test_a_cut_timestamp(cut, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(_ratings, "_CHUNK", chunk)
    text = "1\t2\t3\t956703932\n1\t2\t3\t1046454590\n1\t3\t3\t978300760"
    (tmp_path / "u.data").write_text(text[:-cut])
    end, got = ".* and the end of the line" if cut < 9 else ".*timestamp", re.escape(repr(text[:-cut].split("\n")[2]))
    with pytest.raises(DataError, match=f"u.data: line 3: expected user<TAB>item{end}, got {got}"):
        list(read_movielens(tmp_path / "u.data"))


@pytest.mark.parametrize(
    ("name", "column", "values", "text"),
    [
        ("u.data", "user", [0, 1, 2], r"column 'user' must be in \[1, 10000000\] without nulls, got 0 in row 3"),
        ("u.data", "user", [1, None, 2], r"column 'user' .* without nulls, got None in row 4"),
        ("u.data", "rating", [1.5, 2, 3], "column 'rating' cannot be written"),
        ("u.data", "timestamp", ["a", "b", "c"], "column 'timestamp' must hold numbers, got string"),
        ("ratings.csv", "rating", [1.0, 2.5, 3.0004], "column 'rating' must have at most three decimals, got 3.0004"),
        ("ratings.csv", "rating", [1.0, 2.5, float("nan")], "column 'rating' must be in"),
    ],
)
def test_what_files_of_ratings_cannot_hold(name, column, values, text, tmp_path):
    place = RATINGS.schema.names.index(column)
    with pytest.raises(ValueError, match=text):
        write_movielens(tmp_path / name, [RATINGS, RATINGS.set_column(place, column, pa.array(values))])
    assert list(tmp_path.iterdir()) == []


class Endless:
    """A file that begins with some text and goes on with one endless line."""

    def __init__(self, text):
        self.text, self.given = text, 0

    def read(self, size):
        given, self.text = (self.text + b"1" * size)[:size], self.text[size:]
        self.given += size
        return given


@pytest.mark.parametrize(
    ("text", "layout", "line"),
    [
        (b"1\t2\t3\t4\n1\t2\t3\t4\n", _ratings.TAB_LAYOUT, 3),
        (b"", _ratings.COLON_LAYOUT, 1),
        (b"user", _ratings.CSV_LAYOUT, 1),
        (_ratings.CSV_LAYOUT.header + b"\r\n", _ratings.CSV_LAYOUT, 2),
    ],
)
def test_a_line_without_an_end_is_not_read_to_the_end(text, layout, line, monkeypatch):
    monkeypatch.setattr(_text, "LONGEST_LINE", 1000)
    monkeypatch.setattr(_ratings, "_CHUNK", 100)
    stream = Endless(text)
    with pytest.raises(DataError, match=f"^endless: line {line}: a line has more than 1000 bytes: no text file$"):
        list(_ratings.rating_blocks(stream, "endless", layout))
    assert stream.given <= len(text) + 1200


def test_headers_of_rating_files():
    for text, error in (
        (b"", "line 1: the file ends here"),
        (_ratings.CSV_LAYOUT.header, "line 2: the file ends here"),
        (_ratings.CSV_LAYOUT.header + b"\n", "line 2: the file ends here"),
        (b"1,2,3.5,4\n", "line 1: expected the header userId,movieId,rating,timestamp, got '1,2,3.5,4'"),
    ):
        with pytest.raises(DataError, match=error):
            list(_ratings.rating_blocks(io.BytesIO(text), "f", _ratings.CSV_LAYOUT))


def test_a_damaged_archive_of_ratings_names_its_line(tmp_path):
    write_movielens(tmp_path / "u.data.gz", [RATINGS] * 2000)
    whole = (tmp_path / "u.data.gz").read_bytes()
    for cut in (5, len(whole) // 2, len(whole) - 5):
        (tmp_path / "u.data.gz").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"u.data.gz: line \d+: "):
            list(read_movielens(tmp_path / "u.data.gz"))
