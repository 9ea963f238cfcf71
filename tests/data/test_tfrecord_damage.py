"""Damaged TFRecord files: the place of the damage, and the rows before it."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import pytest
from data.tfrecord_cases import SIZE, damaged, ids, reading

from torchsparse_rec import data
from torchsparse_rec.compat._parity.reference import record as reference
from torchsparse_rec.compat._parity.reference.record import entry, example, framed, list_of
from torchsparse_rec.data import DataError, FixedLenFeature, TFRecordReader, VarLenFeature


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (1, "the length of a record does not fit its checksum"),
        (15, f"the data of a record of {SIZE - 16} bytes do not fit their checksum"),
    ],
)
def test_what_does_not_fit_its_checksum(tmp_path: Path, small_chunks: None, place: int, problem: str) -> None:
    def change(content: bytearray) -> None:
        content[12 * SIZE + place] ^= 1

    rows_before, error = reading(damaged(tmp_path, change))
    assert len(rows_before) == 12 and error.offset == 12 * SIZE and error.unit == "byte"
    assert error.problem == problem


@pytest.mark.parametrize("cut", [5, 12, SIZE - 1])
def test_a_file_that_ends_within_a_record(tmp_path: Path, small_chunks: None, cut: int) -> None:
    rows_before, error = reading(damaged(tmp_path, lambda content: content[: 19 * SIZE + cut]))
    assert len(rows_before) == 19 and error.offset == 19 * SIZE
    what = "the header of a record" if cut < 12 else f"a record of {SIZE - 16} bytes"
    assert error.problem == f"the file ends within {what}, of whose frame and data {cut} bytes are there"


def test_a_length_beyond_the_file_takes_no_memory(tmp_path: Path) -> None:
    length = (2**62).to_bytes(8, "little")
    content = framed(ids(3)) + length + reference.masked_crc32c(length).to_bytes(4, "little") + bytes(50)
    for name, written in (("x", content), ("y.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(written)
        rows_before, error = reading(tmp_path / name)
        assert len(rows_before) == 3 and error.offset == 3 * SIZE
        assert error.unit == ("byte" if name == "x" else "decompressed byte")
        what = f"a record of {2**62} bytes"
        assert error.problem == f"the file ends within {what}, of whose frame and data 62 bytes are there"


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, small_chunks: None) -> None:
    path = damaged(tmp_path, lambda content: None, count=100)
    stream = iter(TFRecordReader(path, {"x": FixedLenFeature([], "int64")}, 1))
    next(stream)
    with path.open("r+b") as file:
        file.truncate(40 * SIZE)
    text = rf"byte {40 * SIZE}: the file ends here, but had {100 * SIZE} bytes when it was"
    with pytest.raises(DataError, match=text):
        list(stream)


@pytest.mark.parametrize("kind", ["gzip", "zlib"])
def test_bad_compressed_data(tmp_path: Path, small_chunks: None, kind: str) -> None:
    path = tmp_path / "x"
    whole = (gzip if kind == "gzip" else zlib).compress(framed(ids(300)))
    path.write_bytes(whole[:-5])
    rows_before, error = reading(path)
    assert error.offset == len(whole) - 5 and error.problem == f"the file ends within its {kind} data"
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 0xFF
    path.write_bytes(changed)
    rows_before, error = reading(path)
    # Damaged data decompress to other bytes, which the records' checksums notice, or not at all.
    of_records = "checksum" in error.problem
    assert of_records or error.problem.startswith(f"no valid {kind} data from here on: ")
    assert error.unit == ("decompressed byte" if of_records else "byte")
    assert 0 < error.offset <= (len(framed(ids(300))) if of_records else len(whole))
    path.write_bytes(whole + b"rubbish")
    rows_before, error = reading(path)
    assert rows_before == [{"x": i} for i in range(len(rows_before))] and len(rows_before) > 280
    assert error.problem.startswith(f"no valid {kind} data from here on: ")
    path.write_bytes(b"")
    with pytest.raises(DataError, match=f"byte 0: the file ends within its {kind} data"):
        list(TFRecordReader(path, {"x": VarLenFeature("int64")}, compression=kind))


def test_messages_that_are_no_examples(tmp_path: Path, small_chunks: None) -> None:
    """Name the place in the file, also if a batch's records come from several blocks or files."""
    messages = ids(20)
    messages[12] = example([entry(b"x", list_of("int64", [1, 2]))])
    path = tmp_path / "x"
    path.write_bytes(framed(messages))
    place = 12 * SIZE + 12 + 9
    for batch_size in (1, 3, 7, 100):
        with pytest.raises(DataError) as error:
            list(TFRecordReader(path, {"x": FixedLenFeature([], "int64")}, batch_size))
        assert str(error.value) == f"{path}: byte {place}: feature 'x': expected 1 values, got 2"
    other = tmp_path / "other"
    other.write_bytes(framed(ids(5)))
    with pytest.raises(DataError, match=f"^{path}: byte {place}: "):
        list(TFRecordReader([other, path], {"x": FixedLenFeature([], "int64")}, 100, num_shards=1))
    with pytest.raises(DataError, match=f"^{path}: byte {place}: "):
        list(TFRecordReader([other, path], {"x": FixedLenFeature([], "int64")}, 100, num_shards=17, index=0))


def test_text_that_is_none(tmp_path: Path) -> None:
    words = [[b"a"], [b"b", b"c"], [], [b"\xff\xfe", b"d"]]
    messages = [example([entry(b"x", list_of("bytes", each))]) for each in words]
    path = tmp_path / "x"
    path.write_bytes(framed(messages))
    place = sum(16 + len(message) for message in messages[:3]) + 12
    with pytest.raises(DataError, match=rf"byte {place}: feature 'x' must be UTF-8, got b'\\xff\\xfe'"):
        list(TFRecordReader(path, {"x": VarLenFeature("str")}))
    path.write_bytes(framed([example([entry(b"x", list_of("bytes", [b"ok", b"\xff"]))])]))
    with pytest.raises(DataError, match=r"byte 12: feature 'x' must be UTF-8, got b'\\xff'"):
        list(TFRecordReader(path, {"x": FixedLenFeature([], "str")}, prebatched=True))


@pytest.mark.parametrize(
    ("values", "lengths", "match"),
    [
        ([1, 2, 3], [1, 1], "feature 'x/row_lengths' adds up to 2 values, and 'x' has 3"),
        ([1, 2, 3], [4, -1], r"must have lengths in \[0, 3\], the values of 'x', got 4 for row 0"),
        ([1, 2, 3], [3, -1], r"must have lengths in \[0, 3\], the values of 'x', got -1 for row 1"),
        ([1, 2, 3], [3], "feature 'y' has values for 2 rows, and 'x' for 1"),
        ([1, 2, 3], None, "feature 'x/row_lengths' is missing, which says where the rows of 'x' begin"),
    ],
)
def test_prebatched_records_that_do_not_fit(tmp_path: Path, values: Any, lengths: Any, match: str) -> None:
    entries = [entry(b"x", list_of("int64", values)), entry(b"y", list_of("float32", [1.0] * 4))]
    entries += [] if lengths is None else [entry(b"x/row_lengths", list_of("int64", lengths))]
    path = tmp_path / "x"
    path.write_bytes(framed([example(entries)]))
    with pytest.raises(DataError, match=rf"^{path}: byte 12: .*{match}"):
        list(TFRecordReader(path, {"x": VarLenFeature("int64"), "y": FixedLenFeature([2], "float32")}, prebatched=True))


def test_more_prebatched_records_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(framed([example([entry(b"y", list_of("int64", [1, 2, 3]))])]))
    for features, match in (
        ({"y": FixedLenFeature([2], "int64")}, "feature 'y' has 3 values, no multiple of the 2 of a row"),
        ({"z": FixedLenFeature([], "int64", 0)}, "none of the features 'z' says how many rows there are"),
        ({"y": FixedLenFeature([], "int64"), "z": FixedLenFeature([], "int64")}, "feature 'z': is missing, and the"),
        ({"y": FixedLenFeature([], "float32")}, "feature 'y': expected a list of float, got one of int64"),
    ):
        with pytest.raises(DataError, match=rf"^{path}: byte \d+: {match}"):
            list(TFRecordReader(path, features, prebatched=True))


def test_features_that_cannot_be_inferred(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=f"^{path}: there are no records, from which to tell their features"):
        data.infer_features(path)
    kinds = [example([entry(b"x", list_of(dtype, [1]))]) for dtype in ("int64", "float32")]
    path.write_bytes(framed(kinds))
    with pytest.raises(DataError, match=f"^{path}: feature 'x' has values of float32 and of int64"):
        data.infer_features(path)
    for message, place in ((b"\x0a\x05a", 2), (b"\x0b", 0), (b"\x08\x80", 1), (b"\x0d\0", 1)):
        path.write_bytes(framed([b"", message]))
        with pytest.raises(DataError, match=rf"^{path}: byte {16 + 12 + place}: "):
            data.infer_features(path)


def test_values_where_no_row_is_to_have_any(tmp_path: Path) -> None:
    path = tmp_path / "x"
    entries = [entry(b"x", list_of("int64", [1, 2])), entry(b"y", list_of("int64", [1]))]
    path.write_bytes(framed([example(entries)]))
    features = {"x": FixedLenFeature([], "int64"), "y": FixedLenFeature([0], "int64")}
    with pytest.raises(DataError, match=rf"^{path}: byte 12: feature 'y' has 1 values, and no row may have any"):
        list(TFRecordReader(path, features, prebatched=True))


def test_names_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(framed([b"", example([entry(b"\xff", list_of("int64", [1]))])]))
    with pytest.raises(DataError, match=rf"^{path}: byte 34: the name of a feature must be UTF-8, got b'\\xff'"):
        data.infer_features(path)
    # Features with other names can be read from the same file.
    assert list(TFRecordReader(path, {"x": FixedLenFeature([], "int64", 7)}))[0].column(0).to_pylist() == [7, 7]
    with pytest.raises(ValueError, match=r"TFRecordReader: features must have names that are text, got '\\udcff'"):
        list(TFRecordReader(path, {"\udcff": FixedLenFeature([], "int64")}))
