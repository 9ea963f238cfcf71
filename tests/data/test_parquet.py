"""Parquet: files that are written are read back, and an error about damage names the row group."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.cases import MIXED, joined

from torchsparse_rec.data import DataError, read_parquet, write_parquet


@pytest.mark.parametrize("compression", ["zstd", "none", "snappy"])
def test_parquet_is_written_and_read(compression, tmp_path):
    path = tmp_path / "f.parquet"
    assert write_parquet(path, [MIXED] * 5, compression=compression, row_group_size=4) == 15
    found = list(read_parquet(path, batch_size=6))
    assert [batch.num_rows for batch in found] == [6, 6, 3] and joined(found).equals(joined([MIXED] * 5))
    assert pq.ParquetFile(path).num_row_groups == 4
    assert joined(read_parquet(path, columns=["tags", "id"])).column_names == ["tags", "id"]


def test_damaged_parquet_names_the_row_group(tmp_path):
    path = tmp_path / "f.parquet"
    column = pa.array(np.random.default_rng(0).integers(0, 2**62, 5000))
    write_parquet(path, [pa.record_batch({"x": column})], row_group_size=1000, compression="none")
    data = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(3).column(0)
    data[group.data_page_offset + 100] ^= 1
    start = group.dictionary_page_offset or group.data_page_offset
    data[start + 4000] ^= 16
    path.write_bytes(data)
    text = f"f.parquet: byte {start}: row group 3 is damaged: .*(CRC|could not verify page)"
    with pytest.raises(DataError, match=text):
        list(read_parquet(path))
    path.write_bytes(data[:-1])
    text = f"f.parquet: byte {len(data) - 9}: Parquet's footer, which ends here, is damaged"
    with pytest.raises(DataError, match=text):
        list(read_parquet(path))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (b"\x19\x18\x01x\x15\x02", b"\x19\x18\x01x\x15\x06", "byte 4: row group 0 cannot be read by pyarrow: .*LZO"),
        (b"PAR1", b"PARE", "footer, which ends here, cannot be read by pyarrow: .*encrypted"),
    ],
)
def test_what_pyarrow_lacks_is_no_damage(old, new, text, tmp_path):
    """Name the cause of files that are whole: the codec of the only column is made another, or the footer encrypted."""
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "f", compression="snappy")
    data = (tmp_path / "f").read_bytes()
    at = data.rindex(old)
    (tmp_path / "f").write_bytes(data[:at] + new + data[at + len(old) :])
    with pytest.raises(DataError, match=text):
        list(read_parquet(tmp_path / "f"))


def test_files_that_differ_in_what_they_say_of_nulls(tmp_path):
    """Join files that differ in nullability, metadata and names of list items, as files of Spark do."""
    kinds = {"id": pa.int64(), "seen": pa.list_(pa.int64()), "pair": pa.list_(pa.int64(), 2)}
    rows = {"id": [7, 8], "seen": [[1], []], "pair": [[1, 2], [3, 4]]}
    plain = pa.schema(kinds)
    strict = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False, metadata={"a": "b"}),
            pa.field("seen", pa.list_(pa.field("element", pa.int64(), nullable=False)), nullable=False),
            pa.field("pair", pa.list_(pa.field("item", pa.int64(), nullable=False), 2), nullable=False),
        ],
        metadata={"c": "d"},
    )
    for place, schema in enumerate((strict, plain, strict)):
        pq.write_table(pa.table(rows, schema=schema), tmp_path / str(place))
    batches = list(read_parquet([tmp_path / str(place) for place in range(3)], batch_size=3))
    assert [batch.num_rows for batch in batches] == [3, 3] and all(batch.schema == plain for batch in batches)
    assert joined(batches).to_pydict() == {name: values * 3 for name, values in rows.items()}


def test_types_that_are_no_lists_stay(tmp_path):
    batch = pa.record_batch(
        {
            "point": pa.array([{"x": 1}, None]),
            "city": pa.array(["a", "b"]).dictionary_encode(),
            "time": pa.array([1, 2], pa.timestamp("us", "UTC")),
            "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        }
    )
    write_parquet(tmp_path / "f", [batch])
    assert joined(read_parquet(tmp_path / "f")).equals(joined([batch]))


def test_columns_that_are_there_twice_are_named(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]), tmp_path / "f")
    with pytest.raises(DataError, match="f: column 'x' is there twice"):
        list(read_parquet(tmp_path / "f"))


def test_parquet_files_that_do_not_fit(tmp_path):
    write_parquet(tmp_path / "a", [pa.record_batch({"x": [1], "y": [1]})])
    for columns, text in (
        ({"x": [1]}, "column 'y' is missing"),
        ({"x": [1], "y": [0.5]}, "column 'y' is double, expected int64"),
    ):
        write_parquet(tmp_path / "b", [pa.record_batch(columns)])
        with pytest.raises(DataError, match=f"b: {text}"):
            list(read_parquet([tmp_path / "a", tmp_path / "b"]))
    with pytest.raises(ValueError, match="columns must be among .*, got 'z'"):
        list(read_parquet(tmp_path / "a", columns=["z"]))


@pytest.mark.parametrize(
    ("batches", "keywords", "text"),
    [
        ([], {}, "batches must have at least one row, got none"),
        (
            [pa.record_batch({"x": [1]}), pa.record_batch({"y": [1]})],
            {},
            r"batches\[1\] must have the schema of the first",
        ),
        ([pa.record_batch({"x": [1]})], {"compression": "best"}, "compression must be one of pyarrow's, got 'best'"),
        ([pa.record_batch({"x": [1]})], {"row_group_size": 0}, "row_group_size must be at least 1, got 0"),
    ],
)
def test_what_parquet_refuses(batches, keywords, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        write_parquet(tmp_path / "f.parquet", batches, **keywords)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [pa.list_(pa.int64(), 0), pa.list_(pa.list_(pa.int64(), 0))], ids=str)
def test_lists_of_no_items_are_refused(kind, tmp_path):
    """Refuse to write lists of zero items, which pyarrow writes and then cannot read."""
    batch = pa.record_batch({"x": pa.array([[], []], kind)})
    with pytest.raises(ValueError, match="column 'x' of .* cannot be written: its fixed-size lists have no items"):
        write_parquet(tmp_path / "f", [batch])
    assert list(tmp_path.iterdir()) == []


def test_files_that_differ_in_width_are_unified_on_request(tmp_path):
    one = pa.record_batch(
        {
            "id": pa.array([1, None], pa.int32()),
            "word": pa.array(["a", None], pa.large_string()),
            "x": pa.array([0.5, None], pa.float32()),
            "seen": pa.array([[1], None], pa.list_(pa.uint8())),
            "pair": pa.array([[1, 2], None], pa.list_(pa.int8(), 2)),
            "none": pa.nulls(2),
        }
    )
    two = pa.record_batch(
        {
            "none": pa.array(["b", "c"]),
            "seen": pa.array([[-3], []], pa.large_list(pa.int8())),
            "pair": pa.array([[3, 4], None], pa.list_(pa.int16(), 2)),
            "x": pa.array([1.5, 2.5]),
            "id": pa.array([2**40, 2]),
            "word": pa.array(["b", "c"]).dictionary_encode(),
        }
    )
    three = one.set_column(1, "word", pa.nulls(2)).set_column(0, "id", pa.array([7, 8], pa.uint32()))
    files = [tmp_path / f"{k}.parquet" for k in range(3)]
    for path, batch in zip(files, (one, two, three), strict=True):
        write_parquet(path, [batch])
    with pytest.raises(DataError, match="1.parquet: column 'none' is .*, expected null as in .*0.parquet"):
        list(read_parquet(files))
    found = joined(read_parquet(files, unify=True, batch_size=4))
    kinds = dict(zip(found.schema.names, map(str, found.schema.types), strict=True))
    assert kinds == {
        "id": "int64",
        "word": "large_string",
        "x": "double",
        "seen": "large_list<item: int16>",
        "pair": "fixed_size_list<item: int16>[2]",
        "none": "string",
    }
    assert found.to_pylist() == [row for batch in (one, two, three) for row in batch.to_pylist()]
    assert joined(read_parquet(files, unify=True, columns=["id"]))["id"].to_pylist() == [1, None, 2**40, 2, 7, 8]
    others = ([1.5, 2.5], pa.array([1, 2], pa.uint64()), ["a", "b"], [[1], [2]], [True, False])
    for other in others:
        write_parquet(files[2], [three.set_column(0, "id", pa.array(other))])
        with pytest.raises(DataError, match="2.parquet: column 'id' is .*, expected int64 as in .*0.parquet"):
            next(read_parquet(files, unify=True))
