"""The converter: every format to every other, the command, and errors for what cannot be converted."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from torchsparse_rec.data import DataError, convert, read_criteo, write_criteo, write_movielens, write_parquet
from torchsparse_rec.data.__main__ import main, parse_columns
from torchsparse_rec.data.convert import FORMATS, Options, format_of, read_format
from torchsparse_rec.data.criteo import CATEGORIES, COLUMNS, INTEGERS

DATA = os.environ.get("TORCHSPARSE_REC_DATA")

# The path of each format's file, by name.
FILES = {
    "criteo": "f.txt.gz",
    "csv": "f.csv",
    "movielens": "f.data",
    "parquet": "f.parquet",
    "prebatched": "f.arrow",
    "tfrecord": "f.tfrecord",
    "tfrecord-prebatched": "f.batches.tfrecord",
}


LISTS = [name for name in FORMATS if name not in ("criteo", "movielens")]


def criteo_batch(rows, seed=0):
    random = np.random.default_rng(seed)
    columns = {"label": pa.array(random.integers(0, 2, rows), pa.int8())}
    for name in INTEGERS:
        columns[name] = pa.array(random.integers(-3, 1000, rows), mask=random.random(rows) < 0.2)
    for name in CATEGORIES:
        values = [f"{x:08x}" for x in random.integers(0, 2**32, rows)]
        columns[name] = pa.array(values, mask=random.random(rows) < 0.2)
    return pa.record_batch(columns)


def rating_batch(rows):
    random = np.random.default_rng(0)
    names = ("user", "item", "rating", "timestamp")
    values = [random.integers(1, most, rows) for most in (900, 1600, 6, 900_000_000)]
    columns = {name: pa.array(x) for name, x in zip(names, values, strict=True)}
    return pa.record_batch({**columns, "rating": columns["rating"].cast(pa.float32())})


def typed(batch):
    """Return the types by column, for formats whose files do not name them."""
    return dict(zip(batch.schema.names, batch.schema.types, strict=True))


def types_for(name, batch):
    """Return the ``types`` that ``convert`` needs for files of a format; an Example has no int8."""
    types = {column: pa.int64() if kind == pa.int8() else kind for column, kind in typed(batch).items()}
    return types if FORMATS[name].takes_types else None


def rows_of(path, name, batch):
    """Return all rows of a file."""
    options = Options(batch_size=64, columns=batch.schema.names, types=types_for(name, batch) or {})
    return [row for found in read_format(path, options, name) for row in found.to_pylist()]


# Criteo's rows have nulls and strings, which MovieLens's files and prebatched records cannot hold.
HOLDS = {
    "criteo": [name for name in FORMATS if name not in {"movielens", "tfrecord-prebatched"}],
    "movielens": [name for name in FORMATS if name != "criteo"],
}


@pytest.mark.parametrize(("data", "first"), [(data, first) for data in HOLDS for first in HOLDS[data]])
def test_every_format_becomes_every_other(data, first, tmp_path):
    batch = criteo_batch(100) if data == "criteo" else rating_batch(100)
    names, write = batch.schema.names, write_criteo if data == "criteo" else write_movielens
    source = tmp_path / ("source.txt" if data == "criteo" else "source.data")
    write(source, [batch])
    assert convert(source, tmp_path / FILES[first], target_format=first, batch_size=30) == 100
    for name in HOLDS[data]:
        if name == first:
            continue
        target = tmp_path / f"to-{FILES[name]}"
        keywords = {"source_format": first, "target_format": name, "columns": names, "batch_size": 30}
        assert convert(tmp_path / FILES[first], target, types=types_for(first, batch), **keywords) == 100
        assert rows_of(target, name, batch) == batch.to_pylist(), name


@pytest.mark.parametrize("first", LISTS)
@pytest.mark.parametrize("second", LISTS)
def test_lists_travel_between_the_formats_that_have_them(first, second, tmp_path):
    batch = pa.record_batch(
        {
            "id": pa.array([5, 6, 7]),
            "seen": pa.array([[3, 1], [], [4]], pa.list_(pa.int64())),
            "pair": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
            "tags": pa.array([["a"], ["b", "c"], []], pa.list_(pa.string())),
        }
    )
    write_parquet(tmp_path / "a.parquet", [batch])
    path, source = tmp_path / "a.parquet", "parquet"
    for place, name in enumerate((first, second, first)):
        target, types = tmp_path / f"{place}.x", types_for(source, batch)
        keywords = {"source_format": source, "target_format": name, "columns": batch.schema.names, "types": types}
        assert convert(path, target, batch_size=2, **keywords) == 3
        assert rows_of(target, name, batch) == batch.to_pylist(), name
        path, source = target, name


def test_the_criteo_sample_goes_around(tmp_path):
    if not DATA:
        pytest.skip("needs TORCHSPARSE_REC_DATA, with criteo-sample/train.txt")
    sample = Path(DATA) / "criteo-sample" / "train.txt"
    expected = pa.Table.from_batches(read_criteo(sample))
    types = {**dict(zip(COLUMNS, expected.schema.types, strict=True)), "label": pa.int64()}
    path = sample
    for name in ("a.arrow", "b.parquet", "c.tfrecord.gz", "d.csv.gz", "e.txt.gz"):
        of_it = types if FORMATS[format_of(path)].takes_types else None
        compression = "zstd" if name == "a.arrow" else None
        convert(path, tmp_path / name, columns=COLUMNS, types=of_it, compression=compression)
        path = tmp_path / name
    assert pa.Table.from_batches(read_criteo(path)).equals(expected)


# ---- The command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def csv(tmp_path):
    (tmp_path / "f.csv").write_text("id,price,seen\n" + "".join(f"{i},{i}.5,{i}|7\n" for i in range(100)))
    return tmp_path / "f.csv"


def test_the_command_converts_and_says_what_is_in_files(csv, tmp_path, capsys):
    target = tmp_path / "f.arrow"
    arguments = f"convert {csv} {csv} {target} --batch-size 30 --compression zstd --columns id,seen:int64[2]"
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out == f"{target}: 200 rows, {target.stat().st_size:,} bytes\n"
    assert main(["info", str(target)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{target}: prebatched, compressed, 200 rows in 7 batches, {target.stat().st_size:,} bytes"
    assert printed[1:] == ["  id: int8", "  seen: fixed_size_list<item: int8>[2]"]
    assert main(["info", str(csv)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{csv}: csv, 100 rows, {csv.stat().st_size:,} bytes",
        "  id: int64",
    ]
    assert main(f"convert {csv} {tmp_path}/f.tfrecord --columns id,price --prebatched-records".split()) == 0
    assert main(["info", str(tmp_path / "f.tfrecord"), "--from", "tfrecord-prebatched"]) == 0
    assert "tfrecord-prebatched, 100 rows" in capsys.readouterr().out


def test_the_command_as_a_program(csv, tmp_path):
    command = [sys.executable, "-m", "torchsparse_rec.data", "convert", csv, tmp_path / "f.parquet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "100 rows" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("nowhere.csv f.arrow", "nowhere.csv"),
        ("f.csv f.bin", "the format of f.bin cannot be told from its suffix: name one of criteo, csv"),
        ("f.csv f.csv", "target must not be one of the sources, got f.csv"),
        ("f.csv g.parquet h.arrow", "sources must be of one format, got csv and, in g.parquet, parquet"),
        (
            "f.csv f.arrow --columns id,nothing",
            "f.csv: line 1: column 'nothing' is missing: the header has id, price, seen",
        ),
        ("f.csv f.arrow --columns id,id", "--columns must be distinct names"),
        ("f.csv f.arrow --columns id:number", "--columns: Arrow has no type 'number', for column 'id'"),
        ("g.parquet f.arrow --columns id:float32", "parquet has its own, got float for 'id'"),
        ("f.csv o.parquet.gz", "o.parquet.gz must end in no compression: it is parquet"),
        ("f.csv o.arrow.zst", "o.arrow.zst must end in no compression: it is prebatched"),
        ("f.csv o.tfrecord.bz2", "o.tfrecord.bz2 must end in .gz: it is tfrecord"),
        ("f.csv o.gz --to parquet", "o.gz must end in no compression: it is parquet"),
        ("f.csv new/f.arrow", "there is no such folder to write into: 'new'"),
        ("s.parquet f.csv", "column 'point' must hold numbers, strings or lists of them, got struct<x: int64>"),
        ("t.parquet f.csv", "t.parquet: column 'x' is there twice"),
        ("q.csv f.arrow", "q.csv: line 3: a quoted value has no end on this line"),
        ("f.csv f.arrow --batch-size 0", "batch_size must be at least 1, got 0"),
        ("f.csv f.arrow --compression lz4", "compression must be None or 'zstd', got 'lz4'"),
        ("f.csv g.csv --compression zstd", "compression of g.csv is chosen by its suffix, .gz, got 'zstd'"),
        ("f.csv f.parquet --prebatched-records", "prebatched_records is for a TFRecord target, got parquet"),
        ("f.csv f.data", "columns must be user, item, rating, timestamp, got"),
        ("f.csv f.arrow --from criteo", "f.csv: line 1: "),
        ("f.csv f.tfrecord --from parquet", "Parquet's footer, which ends here, is damaged"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, text, csv, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_parquet("s.parquet", [pa.record_batch({"point": [{"x": 1}]})])
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pyarrow.parquet.write_table(twice, "t.parquet")
    Path("q.csv").write_text('id,city\n1,Paris\n2,"Rome\n3,Oslo\n')
    before = sorted(os.listdir())
    assert main(["convert", *arguments.split()]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("convert: ") and text in printed.err and printed.out == ""
    assert printed.err.count("\n") == 1
    assert sorted(os.listdir()) == before


def test_types_of_a_file_that_has_its_own_are_refused_by_info_too(tmp_path, capsys):
    for name in ("f.parquet", "f.arrow"):
        write_parquet(tmp_path / "g.parquet", [pa.record_batch({"id": [1]})])
        convert(tmp_path / "g.parquet", tmp_path / name)
        assert main(["info", str(tmp_path / name), "--columns", "id:float32"]) == 1
        assert "has its own, got float for 'id'" in capsys.readouterr().err


def test_wrong_flags_are_refused(capsys):
    for arguments in (["convert", "only-one"], ["nothing"], ["convert", "a", "b", "--from", "xml"]):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code == 2
    capsys.readouterr()


def test_columns_of_the_command_line():
    names, types = parse_columns("a, b:float32,c:string[],d:int64[3]")
    assert names == ["a", "b", "c", "d"]
    assert types == {"b": pa.float32(), "c": pa.list_(pa.string()), "d": pa.list_(pa.int64(), 3)}


def test_formats_are_told_by_suffixes():
    for path, name in {"a.txt": "criteo", "b.csv.gz": "csv", "u.data": "movielens", "x.pq": "parquet"}.items():
        assert format_of(path) == name
    assert format_of("a.tfrecord.gz") == "tfrecord" and format_of("a.prebatched") == "prebatched"
    with pytest.raises(ValueError, match="the format must be one of criteo, .*, got 'xml'"):
        format_of("a.csv", "xml")


def test_files_of_other_columns_name_file_and_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", [pa.record_batch({"x": [1]})])
    write_parquet(tmp_path / "b.parquet", [pa.record_batch({"y": [1]})])
    with pytest.raises(DataError, match="b.parquet: column 'x' is missing, which .*a.parquet has"):
        convert([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "c.arrow")
    assert not (tmp_path / "c.arrow").exists()


# ---- Without what is optional ---------------------------------------------------------------------------------------

WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None
from torchsparse_rec import data
calls = {
    "to_tensors": lambda: data.to_tensors(None),
    "to_record_batch": lambda: data.to_record_batch({}),
    "write_prebatched": lambda: data.write_prebatched("f", []),
    "PrebatchedDataset": lambda: data.PrebatchedDataset("f"),
    "read_criteo": lambda: data.read_criteo("f"),
    "read_csv": lambda: data.read_csv("f"),
    "read_movielens": lambda: data.read_movielens("f.data"),
    "read_parquet": lambda: data.read_parquet("f"),
    "convert": lambda: data.convert("f", "g"),
}
for name, call in calls.items():
    try:
        call()
    except ImportError as error:
        assert "pip install 'torchsparse_rec[arrow]'" in str(error) and name in str(error), (name, error)
    else:
        raise AssertionError(name)
print([int(x) for x in data.DeviceLoader([1, 2], "cpu")])
"""


def test_without_pyarrow_the_error_names_the_extra():
    done = subprocess.run([sys.executable, "-c", WITHOUT_PYARROW], capture_output=True, text=True)
    assert done.stdout.strip() == "[1, 2]", done.stderr


def test_a_bar_is_shown_on_request(tmp_path, csv, capsys, monkeypatch):
    assert convert(csv, tmp_path / "f.arrow", progress=True) == 100
    assert "f.arrow" in capsys.readouterr().err
    assert convert(csv, tmp_path / "f.arrow") == 100
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert convert(csv, tmp_path / "f.arrow") == 100
    with pytest.raises(ImportError, match=r"progress=True needs tqdm: pip install 'torchsparse_rec\[examples\]'"):
        convert(csv, tmp_path / "f.arrow", progress=True)
