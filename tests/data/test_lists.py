"""Files as people have them: without a header, with words for nulls, and with lists that are text."""

import pyarrow as pa
import pytest
from data.cases import joined

from torchsparse_rec.data import (
    DataError,
    convert,
    read_csv,
    read_parquet,
    read_prebatched,
    read_tfrecord,
    write_parquet,
    write_prebatched,
    write_tfrecord,
)

ROWS = [{"tags": ["a", "b"], "id": 7}, {"tags": None, "id": None}, {"tags": [], "id": 9}, {"tags": ["NA"], "id": 5}]


def test_csv_without_a_header_with_words_for_nulls_and_lists_by_another_separator(tmp_path):
    path = tmp_path / "f.csv"
    path.write_bytes(b'\xef\xbb\xbfa;b,7\nNA,NA\n"",9\n"NA",5\n')
    given = {"names": ["tags", "id"], "null_values": ["NA"], "split": {"tags": ";"}}
    assert joined(read_csv(path, **given)).to_pylist() == ROWS
    assert joined(read_csv([path] * 2, **given)).to_pylist() == ROWS * 2
    found = joined(read_csv(path, **given, types={"tags": "string[]", "id": "int32"}, columns=["id", "tags"]))
    assert found.schema == pa.schema({"id": pa.int32(), "tags": pa.list_(pa.string())}) and found["id"][0].as_py() == 7
    path.write_text("a|1\n3|4\n")
    assert joined(read_csv(path, types={"a|1": "int64[2]"})).to_pylist() == [{"a|1": [3, 4]}]
    path.write_text("x,y\n1,2\n")
    assert convert(path, tmp_path / "f.parquet", types={"x": "float32"}) == 1
    assert joined(read_parquet(tmp_path / "f.parquet")).schema.field("x").type == pa.float32()
    path.write_text("")
    assert list(read_csv(path, names=["x"])) == []


def test_text_is_split_in_every_format_that_holds_text(tmp_path):
    text = pa.array(["a|b", None, "", "NA"])
    batch = pa.record_batch({"tags": text, "id": [7, None, 9, 5]})
    coded = pa.record_batch({"tags": text.dictionary_encode(), "id": batch["id"]})
    write_parquet(tmp_path / "f.parquet", [coded])
    write_prebatched(tmp_path / "f.arrow", [batch])
    assert joined(read_parquet(tmp_path / "f.parquet", split={"tags": "|"}, batch_size=3)).to_pylist() == ROWS
    assert joined(read_prebatched(tmp_path / "f.arrow", split={"tags": "|"})).to_pylist() == ROWS
    write_tfrecord(tmp_path / "f.tfrecord", [batch.slice(0, 1), batch.slice(2)])
    found = joined(read_tfrecord(tmp_path / "f.tfrecord", columns=["tags"], split={"tags": "|"})).to_pylist()
    assert found == [{"tags": [b"a", b"b"]}, {"tags": []}, {"tags": [b"NA"]}]


def test_what_does_not_fit_is_named(tmp_path):
    path = tmp_path / "f.csv"
    path.write_text("1,x\n")
    for given, problem in (
        ({"names": "ab"}, "read_csv: names must be distinct names, at least one, got 'ab'"),
        ({"names": ["a", "a"]}, "names must be distinct names"),
        ({"names": ["a", "b"], "types": {"c": "int64"}}, "names must have every column, got none named 'c'"),
        ({"null_values": "NA"}, "null_values must be texts in a list, got 'NA'"),
        ({"types": {"x": "number[]"}}, r"read_csv: types: Arrow has no type 'number\[\]', for column 'x'"),
        ({"split": {"x": ""}}, "read_csv: split of column 'x' must be the text between items, got ''"),
        ({"split": {"x": "|"}, "types": {"x": "string"}}, "column 'x' of split must be lists, got types of string"),
    ):
        with pytest.raises(ValueError, match=problem):
            read_csv(path, **given)
    with pytest.raises(DataError, match="f.csv: line 1: CSV parse error: Expected 3 columns, got 2"):
        list(read_csv(path, names=["a", "b", "c"]))
    with pytest.raises(DataError, match="f.csv: line 1: column 'c' is missing"):
        list(read_csv(path, split={"c": "|"}))
    write_parquet(tmp_path / "f.parquet", [pa.record_batch({"id": [7]})])
    with pytest.raises(ValueError, match="read_parquet: column 'id' must hold text to be split, got int64"):
        list(read_parquet(tmp_path / "f.parquet", split={"id": "|"}))
    with pytest.raises(ValueError, match=r"read_parquet: split must name columns among \['id'\], got 'x'"):
        list(read_parquet(tmp_path / "f.parquet", split={"x": "|"}))
