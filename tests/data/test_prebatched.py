"""Prebatched files: batches that are written are read back, integers are narrow, and damage is never taken for data."""

import gc
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchsparse_rec import JaggedTensor
from torchsparse_rec.compat._parity.reference import record as reference_record
from torchsparse_rec.data import (
    PrebatchedDataset,
    _planes,
    _prebatched_writer,
    read_prebatched,
    write_prebatched,
)

COMPRESSIONS = [None, "zstd"]
compressions = pytest.mark.parametrize("compression", COMPRESSIONS, ids=["mapped", "compressed"])


def sample(rows, seed=0):
    """Return a batch with a column of every kind."""
    random = np.random.default_rng(seed)
    lists = [random.integers(0, 9, random.integers(0, 4)).tolist() for _ in range(rows)]
    missing = random.random(rows) < 0.3
    return pa.record_batch(
        {
            "label": pa.array(random.integers(0, 2, rows)),
            "id": pa.array(random.integers(0, 400_000, rows)),
            "price": pa.array(random.standard_normal(rows).astype(np.float32)),
            "half": pa.array(random.standard_normal(rows).astype(np.float16)),
            "count": pa.array(random.integers(-5, 5, rows), mask=missing),
            "flag": pa.array(random.random(rows) < 0.5, mask=missing),
            "fixed": pa.FixedSizeListArray.from_arrays(pa.array(random.integers(0, 300, 3 * rows)), 3),
            "seen": pa.array(lists, pa.list_(pa.int64())),
            "wide": pa.array([x if i % 5 else None for i, x in enumerate(lists)], pa.large_list(pa.float64())),
            "city": pa.array([None if gone else "ü" * i for i, gone in enumerate(missing)], pa.string()),
            "tags": pa.array([["a"] * len(x) for x in lists], pa.list_(pa.string())),
            "blob": pa.array([b"\0" * len(x) for x in lists], pa.large_binary()),
        }
    )


def nulls_within():
    """Return columns whose nulls lie at one level or another of their lists."""
    return pa.record_batch(
        {
            "items": pa.array([[1, None], [3, 4], [None, 6], [7, 8]], pa.list_(pa.int64(), 2)),
            "every": pa.array([[1.0, None]] * 4, pa.list_(pa.float32(), 2)),
            "rows": pa.array([[1, 2], None, [5, 6], [7, 8]], pa.list_(pa.int64(), 2)),
            "both": pa.array([[1], None, [None], [7]], pa.list_(pa.int64(), 1)),
            "deep": pa.array([[[1, 2]], [None], [[None, 4]], None], pa.list_(pa.list_(pa.int64(), 2), 1)),
            "lists": pa.array([[[1, None]], None, [], [None]], pa.list_(pa.list_(pa.int64(), 2))),
        }
    )


def same(found, expected):
    """Check that a batch has the values of another, perhaps in narrower types."""
    assert found.schema.names == expected.schema.names
    for name in expected.schema.names:
        assert found.column(name).to_pylist() == expected.column(name).to_pylist(), name


# ---- Writing and reading --------------------------------------------------------------------------------------------


@compressions
def test_what_is_written_is_read(compression, tmp_path):
    batches = [sample(rows, rows) for rows in (5, 1, 0, 64, 7)]
    assert write_prebatched(tmp_path / "f.arrow", batches, compression=compression) == 77
    found = list(read_prebatched(tmp_path / "f.arrow"))
    assert len(found) == 5
    for one, other in zip(found, batches, strict=True):
        same(one, other)
    types = {field.name: str(field.type) for field in found[0].schema}
    assert types["label"] == "int8" and types["id"] == "int32" and types["fixed"] == "fixed_size_list<item: int16>[3]"
    assert types["seen"] == "list<item: int8>" and types["price"] == "float" and types["half"] == "halffloat"
    assert list(tmp_path.iterdir()) == [tmp_path / "f.arrow"]


@compressions
@pytest.mark.parametrize(
    "batches",
    [
        [nulls_within(), nulls_within().slice(0, 1), nulls_within().slice(1)],
        [sample(40).slice(3, 9), sample(40).slice(0, 0), sample(40).slice(11)],
    ],
    ids=["nulls within lists", "columns of every kind"],
)
def test_slices_are_written_without_what_they_leave_out(batches, compression, tmp_path):
    write_prebatched(tmp_path / "f.arrow", batches, compression=compression)
    for one, other in zip(read_prebatched(tmp_path / "f.arrow"), batches, strict=True):
        same(one, other)


@compressions
def test_values_under_nulls_are_no_values(compression, tmp_path):
    values, mask = pa.array([1, 2, 2**40, -5]), pa.array([False, True])
    batch = pa.record_batch(
        {
            "l": pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), values, mask=mask),
            "f": pa.FixedSizeListArray.from_arrays(values, 2, mask=mask),
        }
    )
    write_prebatched(tmp_path / "f.arrow", [batch], compression=compression)
    (found,) = read_prebatched(tmp_path / "f.arrow")
    same(found, batch)
    assert {str(kind.value_type) for kind in found.schema.types} == {"int8"}


@compressions
def test_tensors_are_written_and_read_as_tensors(compression, tmp_path):
    batch = {
        "id": torch.tensor([7, 300]),
        "seen": JaggedTensor(torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1])),
        "topics": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "price": torch.tensor([0.5, 1.5]),
        "flag": torch.tensor([True, False]),
        "city": ["a", "b"],
    }
    write_prebatched(tmp_path / "f.arrow", [batch], compression=compression)
    (found,) = PrebatchedDataset(tmp_path / "f.arrow")
    assert found["id"].dtype == torch.int16 and found["id"].tolist() == [7, 300]
    assert found["seen"].to_dense()[0].tolist() == [3, 1] and found["seen"].values().dtype == torch.int8
    assert found["topics"].tolist() == [[1, 2], [3, 4]] and found["price"].tolist() == [0.5, 1.5]
    assert found["flag"].tolist() == [True, False] and found["city"].to_pylist() == ["a", "b"]
    chosen = PrebatchedDataset(tmp_path / "f.arrow", columns=["price", "id"], integers=torch.int64).get_batch(0)
    assert list(chosen) == ["price", "id"] and chosen["id"].dtype == torch.int64


def test_planes_are_compressed_where_that_saves_enough(tmp_path):
    """Compress bytes by plane: the lower byte has 130 values, which saves less than an eighth, the upper one 2."""
    generator = torch.Generator().manual_seed(0)
    low, high = (torch.randint(0, count, (50_000,), generator=generator) for count in (130, 2))
    ids = low + 256 * high
    sizes = {}
    for saving in (0.0, 0.125, 1.0):
        write_prebatched(tmp_path / "f.arrow", [{"x": ids}], compression="zstd", min_saving=saving)
        sizes[saving] = (tmp_path / "f.arrow").stat().st_size
        assert torch.equal(PrebatchedDataset(tmp_path / "f.arrow").get_batch(0)["x"].long(), ids)
    assert sizes[0.0] < 57_000 < sizes[0.125] < 65_000 < 100_000 < sizes[1.0]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1023, 1024, 1025, 5000])
def test_few_values_take_few_bits(count, tmp_path):
    """Pack few values as the operator that reads them expects; zstd makes random values no smaller."""
    for bits in range(1, 8):
        plane = np.random.default_rng(count).integers(0, 2**bits, count, dtype=np.uint8)
        assert _planes._pack(plane, bits).tobytes() == reference_record.packed(plane.tobytes(), bits)
    ids = torch.randint(0, 8 << 16, (count,), generator=torch.Generator().manual_seed(count))
    write_prebatched(tmp_path / "f.arrow", [{"x": ids}], compression="zstd")
    assert torch.equal(PrebatchedDataset(tmp_path / "f.arrow").get_batch(0)["x"].long(), ids)
    with pa.ipc.open_file(tmp_path / "f.arrow") as reader:
        directory = json.loads(reader.get_batch_with_custom_metadata(0)[1][b"parts"])
    if count > 1000:
        assert directory["planes"][::2] == [0, 0, 3, 2]


def test_decoded_memory_comes_back_when_nobody_looks_at_it(tmp_path, monkeypatch):
    monkeypatch.setattr(_planes, "_MEMORY", _planes._Recycled(1 << 20))
    batches = [{"x": torch.randint(0, 1 << 30, (5000,), dtype=torch.int32)} for _ in range(4)]
    write_prebatched(tmp_path / "f.arrow", batches, compression="zstd")
    dataset = PrebatchedDataset(tmp_path / "f.arrow", threads=2)
    kept = [(batch["x"], batch["x"].clone()) for batch in dataset]
    assert len({x.data_ptr() for x, _ in kept}) == 4
    addresses = {x.data_ptr() for x, _ in kept}
    kept[2][0].fill_(7)
    del kept[0]
    gc.collect()
    again = [dataset.get_batch(i)["x"] for i in range(4)]
    assert all(torch.equal(x, batch["x"]) for x, batch in zip(again, batches, strict=True))
    assert len(addresses & {x.data_ptr() for x in again}) == 1
    assert kept[1][0].eq(7).all() and torch.equal(kept[0][0], kept[0][1]) and torch.equal(kept[2][0], kept[2][1])


def test_any_reader_of_arrow_reads_the_mapped_file(tmp_path):
    batches = [sample(5, 1), sample(6, 2)]
    write_prebatched(tmp_path / "f.arrow", batches)
    with pa.ipc.open_file(tmp_path / "f.arrow") as reader:
        assert reader.schema.metadata[b"torchsparse_rec.format"] == b"prebatched"
        for i, batch in enumerate(batches):
            same(reader.get_batch(i), batch)
        _, metadata = reader.get_batch_with_custom_metadata(0)
    assert len(bytes.fromhex(metadata[b"crc32c"].decode())) % 4 == 0


def test_schema_metadata_is_kept(tmp_path):
    batch = pa.record_batch({"x": [1]}).replace_schema_metadata({"made": "today"})
    for compression in COMPRESSIONS:
        write_prebatched(tmp_path / "f.arrow", [batch], compression=compression)
        with pa.ipc.open_file(tmp_path / "f.arrow") as reader:
            assert reader.schema.metadata[b"made"] == b"today"


def test_memory_that_is_kept_has_a_limit():
    memory = _planes._Recycled(1000)
    loans = [memory.lend(memory.take(size)) for size in (400, 500, 300)]
    del loans
    assert sorted(map(len, memory._free)) in ([300, 400], [300, 500], [400, 500])
    with memory._lock:  # held as by a thread that fork() does not copy
        assert len(memory.take(400)) == 400
        assert memory.lend(memory.take(100)).size == 100
    assert len(memory._free) == 2


@settings(max_examples=30)
@given(
    columns=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), min_size=1, max_size=5),
    compression=st.sampled_from(COMPRESSIONS),
)
def test_integers_are_as_narrow_as_the_whole_file_allows(columns, compression, tmp_path_factory):
    path = tmp_path_factory.mktemp("narrow") / "f.arrow"
    write_prebatched(path, [pa.record_batch({"x": pa.array(x, pa.int64())}) for x in columns], compression=compression)
    found = list(read_prebatched(path))
    assert [batch.column("x").to_pylist() for batch in found] == columns
    values = [value for x in columns for value in x]
    bits = next(b for b in (8, 16, 32, 64) if all(-(2 ** (b - 1)) <= v < 2 ** (b - 1) for v in values))
    assert {str(batch.schema.field("x").type) for batch in found} == {f"int{bits}"}


@compressions
def test_widening_writes_what_came_before_again(compression, tmp_path):
    values = [1, 200, 3, 70_000, 5, 2**40, -1]
    batches = [{"x": torch.tensor([v]), "l": JaggedTensor.from_dense([torch.tensor([v, v])])} for v in values]
    assert write_prebatched(tmp_path / "f.arrow", batches, compression=compression) == 7
    dataset = PrebatchedDataset(tmp_path / "f.arrow", verify="always")
    assert [batch["x"].item() for batch in dataset] == values
    assert [batch["l"].values().tolist() for batch in dataset] == [[v, v] for v in values]
    assert list(tmp_path.iterdir()) == [tmp_path / "f.arrow"]


def test_what_came_before_is_written_again_once(tmp_path, monkeypatch):
    """Write earlier batches again only once, although columns are widened one at a time."""
    written = []
    write = _prebatched_writer._Sink.write
    monkeypatch.setattr(
        _prebatched_writer._Sink, "write", lambda sink, batch, i: (written.append(i), write(sink, batch, i))
    )
    batches = [{f"c{j}": [300 if j == i else 1] for j in range(12)} for i in range(12)]
    write_prebatched(tmp_path / "f.arrow", batches)
    assert written == [*range(12), *range(12)]
    assert [batch.to_pydict() for batch in read_prebatched(tmp_path / "f.arrow")] == batches
    assert list(tmp_path.iterdir()) == [tmp_path / "f.arrow"]


@pytest.mark.parametrize("widened", [False, True])
def test_a_failing_source_leaves_what_was_there(widened, tmp_path):
    (tmp_path / "f.arrow").write_text("before")

    def batches():
        yield {"x": [1]}
        yield {"x": [300 if widened else 2]}
        assert len(list(tmp_path.iterdir())) == 2 + widened
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_prebatched(tmp_path / "f.arrow", batches())
    assert (tmp_path / "f.arrow").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_batches_that_would_decode_to_far_more_are_not_written(tmp_path):
    """Refuse to write such batches, since readers would refuse them: see test_prebatched_damage.py."""
    text = r"batches\[0\] may have 268435456 bytes, .* got 320000000: make smaller batches"
    with pytest.raises(ValueError, match=text):
        write_prebatched(tmp_path / "f.arrow", [{"x": torch.full((40_000_000,), 2**40)}], compression="zstd")
    assert list(tmp_path.iterdir()) == []


def test_unsigned_integers(tmp_path):
    big = pa.array([2**64 - 1, 3], pa.uint64())
    write_prebatched(tmp_path / "f.arrow", [pa.record_batch({"x": [5, 6]}), pa.record_batch({"x": big})])
    found = [batch.column("x").to_pylist() for batch in read_prebatched(tmp_path / "f.arrow")]
    assert found == [[5, 6], [2**64 - 1, 3]]
    with pytest.raises(ValueError, match="column 'x' of batches.0. cannot be stored as uint64"):
        write_prebatched(tmp_path / "g.arrow", [pa.record_batch({"x": [-5]}), pa.record_batch({"x": big})])
    assert not (tmp_path / "g.arrow").exists()


def test_without_narrowing_types_are_as_they_come(tmp_path):
    batch = pa.record_batch({"x": pa.array([1, 2], pa.uint16())})
    write_prebatched(tmp_path / "f.arrow", [batch], narrow=False)
    assert next(read_prebatched(tmp_path / "f.arrow")).schema.field("x").type == pa.uint16()
    with pytest.raises(ValueError, match=r"column 'x' of batches\[1\] must be uint16 as in those before, got int64"):
        write_prebatched(tmp_path / "f.arrow", [batch, pa.record_batch({"x": [1]})], narrow=False)


@pytest.mark.parametrize(
    ("batches", "keywords", "text"),
    [
        ([], {}, "batches must have at least one batch, got none"),
        ([{"x": [1]}, {"y": [1]}], {}, r"batches\[1\] must have the columns of the first, \['x'\], got \['y'\]"),
        ([{"x": [1]}, {"x": [0.5]}], {}, r"column 'x' of batches\[1\] must be int8 as in those before, got double"),
        ([pa.record_batch({"x": pa.nulls(2)})], {}, r"batches\[0\]: column 'x' must hold numbers, .*got null: cast it"),
        ([{"x": [1]}], {"compression": "lz4"}, "compression must be None or 'zstd', got 'lz4'"),
        ([{"x": [1]}], {"min_saving": 1.5}, r"min_saving must be in \[0, 1\], got 1.5"),
        ([{"x": [1]}], {"level": 3}, "level needs compression='zstd', got 3 without"),
        ([{"x": [1]}], {"level": "high", "compression": "zstd"}, "level must be one of zstd's, got 'high'"),
    ],
    ids=lambda x: "",
)
def test_what_cannot_be_written(batches, keywords, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        write_prebatched(tmp_path / "f.arrow", batches, **keywords)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory):
    """Return what each writer reports and leaves, in a process whose files may have 100,000 bytes."""
    folder = tmp_path_factory.mktemp("full")
    done = subprocess.run([sys.executable, "-c", FULL_DISK, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


FULL_DISK = """
import os, pathlib, resource, signal, sys
import numpy as np, pyarrow as pa
from torchsparse_rec.data import convert, write_criteo, write_csv, write_movielens, write_parquet, write_prebatched
from torchsparse_rec.data.criteo import COLUMNS

def batches(columns, bits=62):
    random = np.random.default_rng(0)
    for i in range(50):
        # At first small: "widened" has to write again what it has.
        x = random.integers(1, 2 ** (bits if i < 10 else 62), 5000)
        text = pa.array(x).cast(pa.string())
        numbers = {name: pa.array(x if name == "X" else x % 2 + 1 - (name == "label")) for name in columns}
        yield pa.record_batch({name: text if name[0] == "C" else numbers[name] for name in columns})

ratings = ["user", "item", "rating", "timestamp"]
writers = {
    "mapped": lambda path: write_prebatched(path, batches("x")),
    "compressed": lambda path: write_prebatched(path, (pa.record_batch({"x": np.random.rand(5000)}) for _ in range(50)),
                                                compression="zstd"),
    "widened": lambda path: write_prebatched(path, batches("X", bits=7), narrow=True),
    "parquet": lambda path: write_parquet(path, (pa.record_batch({"x": np.random.rand(5000)}) for _ in range(50)),
                                          row_group_size=9000),
    "csv": lambda path: write_csv(path, batches("xy")),
    "criteo": lambda path: write_criteo(path, batches(COLUMNS)),
    "movielens": lambda path: write_movielens(path, batches(ratings), layout="ml-100k"),
}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for kind, write in writers.items():
    folder = pathlib.Path(sys.argv[1]) / kind
    folder.mkdir()
    try:
        write(folder / "file")
        said = "written"
    except OSError as error:
        said = "refused"
    print(f"{kind}: {said}, {len(list(folder.iterdir()))} files", flush=True)
"""


@pytest.mark.parametrize("kind", ["mapped", "compressed", "widened", "parquet", "csv", "criteo", "movielens"])
def test_a_full_disk_leaves_no_file(kind, full_disk):
    assert full_disk[kind] == "refused, 0 files"
