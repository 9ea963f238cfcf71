"""Damaged prebatched files: an error that names file and byte, wherever the damage is, whatever is verified."""

import base64
import json
import os

import numpy as np
import pyarrow as pa
import pytest
import torch

from torchsparse_rec import JaggedTensor
from torchsparse_rec.data import DataError, PrebatchedDataset, _index, _planes, write_prebatched

compressions = pytest.mark.parametrize("compression", [None, "zstd"], ids=["mapped", "compressed"])


def flip(path, position, bit=0):
    """Flip one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def place_of(path, column, i):
    """Return the position in the file of a column's values in batch i."""
    with pa.memory_map(str(path)) as memory, pa.ipc.open_file(memory) as reader:
        base = memory.read_buffer().address
        return reader.get_batch(i).column(column).buffers()[-1].address - base


@compressions
def test_damaged_data_names_file_byte_column_and_batch(compression, path):
    write_prebatched(path, [{"a": torch.rand(100), "b": torch.rand(100)} for _ in range(3)], compression=compression)
    start = place_of(path, "b", 1)
    flip(path, start + 17)
    dataset = PrebatchedDataset(path)
    text = rf"f.arrow: byte {start}: the checksum of column 'b' in batch 1 is wrong"
    with pytest.raises(DataError, match=text) as raised:
        list(dataset)
    assert (raised.value.path, raised.value.offset) == (str(path), start)
    assert len(list(PrebatchedDataset(path, columns=["a"]))) == 3


def test_verify_says_when_checksums_are_compared(path):
    write_prebatched(path, [{"a": torch.rand(100)}])
    datasets = {verify: PrebatchedDataset(path, verify=verify) for verify in ("first", "always", "never")}
    for dataset in datasets.values():
        dataset.get_batch(0)
    written = path.stat().st_mtime_ns
    flip(path, place_of(path, "a", 0))
    os.utime(path, ns=(written, written))  # as a failing disk would
    datasets["first"].get_batch(0)
    datasets["never"].get_batch(0)
    with pytest.raises(DataError, match="the checksum of column 'a' in batch 0 is wrong"):
        datasets["always"].get_batch(0)
    PrebatchedDataset(path, verify="never").get_batch(0)
    with pytest.raises(DataError, match="the checksum of column 'a'"):
        PrebatchedDataset(path).get_batch(0)
    with pytest.raises(ValueError, match="verify must be one of first, always, never, got 'last'"):
        PrebatchedDataset(path, verify="last")


@compressions
def test_damaged_offsets_are_an_error_even_unverified(compression, path):
    """Refuse offsets by which operators would read beyond the values."""
    write_prebatched(path, [{"l": JaggedTensor.from_dense([torch.arange(5)] * 4)}], compression=compression)
    if compression is None:
        with pa.memory_map(str(path)) as memory, pa.ipc.open_file(memory) as reader:
            start = reader.get_batch(0).column("l").buffers()[1].address - memory.read_buffer().address
        flip(path, start + 4, bit=6)
    else:
        flip(path, place_of(path, "l", 0), bit=7)
    with pytest.raises(DataError, match="batch 0 is damaged"):
        PrebatchedDataset(path, verify="never").get_batch(0)


def test_every_byte_of_the_index_is_protected(path, tmp_path):
    copy = tmp_path / "g.arrow"
    write_prebatched(path, [{"x": [1, 2]}, {"x": [3]}])
    data = path.read_bytes()
    footer = int.from_bytes(data[-10:-6], "little")
    begin = len(data) - 10 - footer - _index.TAIL.itemsize - 2 * _index.ENTRY.itemsize
    for position in range(begin, len(data)):
        copy.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(DataError, match=r"g.arrow: byte \d+: "):
            PrebatchedDataset(copy)


def rewrite_entries(path, name, value):
    """Change a field of all entries of the index and make the checksums fit: damage that checksums cannot see."""
    data = path.read_bytes()
    start = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    tail = np.frombuffer(data[start - 24 : start], _index.TAIL).copy()
    first = start - 24 - int(tail["count"][0]) * _index.ENTRY.itemsize
    entries = np.frombuffer(data[first : start - 24], _index.ENTRY).copy()
    entries[name] = value
    tail["entries_crc"] = _index.checksum(entries.tobytes())
    path.write_bytes(data[:first] + entries.tobytes() + tail.tobytes() + data[start:])


@pytest.mark.parametrize(
    ("name", "value"),
    [("offset", -8), ("offset", 2**62), ("offset", 13), ("body", 2**62), ("body", -1), ("metadata", 2**31), ("metadata", 0), ("rows", -1)],  # noqa: E501
)  # fmt: skip
def test_places_outside_the_file_are_refused(name, value, path):
    write_prebatched(path, [{"x": [1, 2]}])
    rewrite_entries(path, name, value)
    with pytest.raises(DataError, match="batch 0 must lie between bytes 8 and"):
        PrebatchedDataset(path)


def test_rows_beyond_counting_are_refused(path):
    write_prebatched(path, [{"x": [1, 2]}] * 4)
    rewrite_entries(path, "rows", 2**62)
    with pytest.raises(DataError, match="a file may have 281474976710656 rows, got 18446744073709551616"):
        PrebatchedDataset(path)


def test_crafted_rows_take_no_memory(path):
    """Raise when the batch is read; until then, an epoch of so many rows is only arithmetic."""
    write_prebatched(path, [{"x": [1, 2]}])
    rewrite_entries(path, "rows", 2**47)
    dataset = PrebatchedDataset(path, batch_size=1)
    assert len(dataset) == 2**47
    with pytest.raises(DataError, match="batch 0 has 2 rows, the index says otherwise"):
        dataset.get_batch(2**46)


def test_small_files_do_not_stand_for_gigabytes(path, monkeypatch):
    """Refuse a batch that decodes to more than the limit, here 0.1 GB."""
    write_prebatched(path, [{"x": torch.full((10**7,), 2**40), "y": torch.full((10**7,), 1.5)}], compression="zstd")
    assert path.stat().st_size < 5000 and len(PrebatchedDataset(path).get_batch(0)["x"]) == 10**7
    monkeypatch.setattr(_planes, "_MOST_FREE", 10**8)
    assert len(PrebatchedDataset(path, columns=["y"]).get_batch(0)["y"]) == 10**7
    with pytest.raises(DataError, match="batch 0 is damaged: the stored bytes cannot decode to"):
        PrebatchedDataset(path).get_batch(0)


@pytest.mark.parametrize("what", ["name", "twice"])
def test_schemas_that_nobody_wrote_are_damage(what, tmp_path, monkeypatch):
    """Refuse a damaged schema even though its checksums fit."""
    schema = pa.schema([("xxxx", pa.int64()), ("xxxy", pa.int64())])
    changed = {
        "name": schema.serialize().to_pybytes().replace(b"xxxx", b"\xff\xfe\xff\xfe"),
        "twice": schema.serialize().to_pybytes().replace(b"xxxx", b"xxxy"),
    }
    monkeypatch.setattr(base64, "b64encode", lambda data, encode=base64.b64encode: encode(changed[what]))
    write_prebatched(tmp_path / "f.arrow", [{"xxxx": [1], "xxxy": [2]}], compression="zstd")
    monkeypatch.undo()
    with pytest.raises(DataError, match="f.arrow: "):
        PrebatchedDataset(tmp_path / "f.arrow").get_batch(0)


def test_a_directory_that_is_too_deep_is_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(json, "dumps", lambda parts, **keywords: "[" * 100_000)
    write_prebatched(tmp_path / "f.arrow", [{"x": [1]}], compression="zstd")
    monkeypatch.undo()
    with pytest.raises(DataError, match="f.arrow: byte [0-9]+: batch 0 is damaged: maximum recursion depth"):
        PrebatchedDataset(tmp_path / "f.arrow").get_batch(0)


@compressions
def test_wrong_row_counts_are_refused(compression, path):
    write_prebatched(path, [{"x": [1, 2]}], compression=compression)
    rewrite_entries(path, "rows", 2**40)
    text = "batch 0 has 2 rows, the index says otherwise|batch 0 is damaged: expected a part"
    with pytest.raises(DataError, match=text):
        PrebatchedDataset(path).get_batch(0)


def test_files_of_another_kind_are_refused(tmp_path):
    table = pa.table({"x": [1, 2]})
    with pa.ipc.new_file(tmp_path / "arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="not written by write_prebatched|no prebatched file"):
        PrebatchedDataset(tmp_path / "arrow")
    (tmp_path / "text").write_text("a,b\n" * 100)
    with pytest.raises(DataError, match="text: byte 0: expected b'ARROW1': no Arrow IPC file"):
        PrebatchedDataset(tmp_path / "text")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DataError, match="empty: byte 0: expected an Arrow IPC file of more than 18 bytes, got 0"):
        PrebatchedDataset(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        PrebatchedDataset(tmp_path / "nowhere")


def test_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_index, "VERSION", b"2")
    write_prebatched(tmp_path / "f.arrow", [{"x": [1]}])
    monkeypatch.undo()
    with pytest.raises(DataError, match="its version is b'2', this release reads b'1'"):
        PrebatchedDataset(tmp_path / "f.arrow")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.clear(),
        lambda d: d["columns"].append(0),
        lambda d: d["columns"].__setitem__(0, 3),
        lambda d: d["columns"].__setitem__(0, -1),
        lambda d: d["columns"].__setitem__(0, "two"),
        lambda d: d["columns"].__setitem__(0, 2**70),
        lambda d: d["parts"].pop(),
        lambda d: d["parts"].extend([2, 1, 0]),
        lambda d: d["parts"].append(0),
        lambda d: d["parts"].__setitem__(4, 3),
        lambda d: d["parts"].__setitem__(4, 4),
        lambda d: d["parts"].__setitem__(5, -1),
        lambda d: d["parts"].__setitem__(5, 0),
        lambda d: d["parts"].__setitem__(5, 999),
        lambda d: d["parts"].__setitem__(5, 2**40),
        lambda d: d["parts"].__setitem__(5, 2**50),
        lambda d: d["parts"].__setitem__(0, None),
        lambda d: d["parts"].__setitem__(2, 1),
        lambda d: d["parts"].reverse(),
        lambda d: d["planes"].pop(),
        lambda d: d["planes"].extend([2, 1]),
        lambda d: d["planes"].__setitem__(0, 9),
        lambda d: d["planes"].__setitem__(0, 1),
        lambda d: d["planes"].__setitem__(0, 3),
        lambda d: d["planes"].__setitem__(1, 0),
        lambda d: d["planes"].__setitem__(1, -1),
        lambda d: d["planes"].__setitem__(1, 2**40),
        lambda d: d["planes"].__setitem__(2, 2),
        lambda d: d["planes"].__setitem__(2, 0),
        lambda d: d["planes"].__setitem__(3, 125),
        lambda d: d["planes"].__setitem__(3, 8 * 125),
    ],
)
def test_directories_that_do_not_fit_are_refused(change, tmp_path, monkeypatch):
    """Refuse a directory of the compressed layout even though its checksums fit."""
    dumps = json.dumps

    def changed(directory, **keywords):
        change(directory)
        return dumps(directory, **keywords)

    monkeypatch.setattr(json, "dumps", changed)
    ids = torch.randint(0, 1000, (1000,), generator=torch.Generator().manual_seed(0))
    write_prebatched(tmp_path / "f.arrow", [{"x": ids}], compression="zstd")
    monkeypatch.undo()
    with pytest.raises(DataError, match="f.arrow: byte [0-9]+: batch 0 is damaged"):
        PrebatchedDataset(tmp_path / "f.arrow").get_batch(0)
