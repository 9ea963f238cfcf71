"""Prebatched files in memory: mappings, files that change while they are read, and what is kept open."""

import errno
import gc
import os
import pickle
import time
from unittest.mock import Mock

import pytest
import torch

from torchsparse_rec.data import (
    DataError,
    PrebatchedDataset,
    _prebatched_file,
    write_prebatched,
)

compressions = pytest.mark.parametrize("compression", [None, "zstd"], ids=["mapped", "compressed"])


def test_a_tensor_that_is_written_to_changes_neither_the_file_nor_later_reads(path):
    write_prebatched(path, [{"x": torch.arange(10_000.0), "k": torch.ones(10_000, 2)}])
    before = path.read_bytes()
    dataset = PrebatchedDataset(path, verify="always")
    batch = dataset.get_batch(0)
    batch["x"].zero_()
    batch["k"].add_(1)
    assert batch["x"].sum() == 0 and batch["k"].sum() == 40_000
    assert path.read_bytes() == before
    again = dataset.get_batch(0)
    assert again["x"].sum() == torch.arange(10_000.0).sum() and again["k"].sum() == 20_000


def test_tensors_lie_in_the_mapping_and_outlive_dataset_and_file(path):
    write_prebatched(path, [{"x": torch.arange(50_000)}, {"x": torch.arange(50_000)}])
    dataset = PrebatchedDataset(path)
    batches = [batch["x"] for batch in dataset]
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(str(path))]
    for x in batches:
        assert any(int(low, 16) <= x.data_ptr() < int(high, 16) for low, high in ranges)
    del dataset
    path.unlink()
    assert all(x.sum() == torch.arange(50_000).sum() for x in batches)
    del batches, x
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()


@compressions
def test_a_file_that_has_shrunk_is_an_error(compression, path):
    write_prebatched(path, ({"x": torch.rand(20_000)} for _ in range(5)), compression=compression)
    size = path.stat().st_size
    dataset = PrebatchedDataset(path, threads=1)
    batches = iter(dataset)
    assert len(next(batches)["x"]) == 20_000
    # A read while the file shrinks would end the process: wait until the thread, two batches ahead, reads no more.
    while len(dataset._files[0]._seen) < (1 if compression is None else 3):
        time.sleep(0.002)
    os.truncate(path, 30_000)
    with pytest.raises(DataError, match=f"byte 30000: the file has shrunk from {size} bytes since it was opened"):
        list(batches)
    with pytest.raises(DataError, match="f.arrow: byte 29994: expected b'ARROW1' at the end"):
        PrebatchedDataset(path)


def test_a_compressed_file_that_shrinks_while_it_is_read_ends_no_process(path):
    for _ in range(30):
        write_prebatched(path, ({"x": torch.rand(5_000)} for _ in range(30)), compression="zstd")
        batches = iter(PrebatchedDataset(path, threads=2))
        next(batches)
        os.truncate(path, 20_000)
        with pytest.raises(DataError, match="the file has shrunk from"):
            list(batches)


@compressions
def test_a_file_that_is_written_to_is_an_error(compression, path):
    write_prebatched(path, [{"x": torch.zeros(100)}] * 2, compression=compression)
    dataset = PrebatchedDataset(path, verify="never")
    dataset.get_batch(0)
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, 10**9))
    with pytest.raises(DataError, match="f.arrow: the file has been written to since it was opened"):
        dataset.get_batch(1)


@compressions
def test_a_file_that_is_replaced_goes_on_here_and_is_an_error_elsewhere(compression, path):
    write_prebatched(path, [{"x": torch.zeros(100)}], compression=compression)
    dataset = PrebatchedDataset(path)
    pickled = pickle.dumps(dataset)
    write_prebatched(path, [{"x": torch.zeros(100)}], compression=compression)
    assert pickle.loads(pickled).get_batch(0)["x"].sum() == 0
    write_prebatched(path, [{"x": torch.ones(100)}], compression=compression)
    assert dataset.get_batch(0)["x"].sum() == 0
    with pytest.raises(DataError, match="f.arrow: the file is not the one that the other process had opened"):
        pickle.loads(pickled)


def test_kept_batches_hold_no_files(path):
    write_prebatched(path, ({"x": torch.full((8,), i)} for i in range(50)))
    dataset = PrebatchedDataset(path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    kept = list(dataset)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [int(batch["x"][0]) for batch in kept] == list(range(50))


def test_only_chosen_columns_are_brought_in(path, monkeypatch):
    write_prebatched(path, [{name: torch.rand(10_000) for name in "abc"}])
    sizes = []
    monkeypatch.setattr(_prebatched_file, "populate", lambda address, size: sizes.append(size))
    assert len(PrebatchedDataset(path, columns=["b"], verify="never").get_batch(0)["b"]) == 10_000
    assert sizes == [40_000]
    PrebatchedDataset(path, verify="never").get_batch(0)
    assert sizes[1] > 120_000 and len(sizes) == 2


def test_a_process_without_room_for_a_mapping_says_so(path, monkeypatch):
    write_prebatched(path, [{"x": [1]}])
    dataset = PrebatchedDataset(path)
    full = OSError(errno.ENOMEM, "Cannot allocate memory")
    monkeypatch.setattr(_prebatched_file, "mapped", Mock(side_effect=full))
    with pytest.raises(OSError, match="batch 0 cannot be mapped: Cannot.*; each batch that is kept takes a") as raised:
        dataset.get_batch(0)
    assert not isinstance(raised.value, DataError)


def test_files_are_closed(tmp_path):
    write_prebatched(tmp_path / "f.arrow", [{"x": [1]}])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        list(PrebatchedDataset(tmp_path / "f.arrow"))
    (tmp_path / "broken").write_bytes(b"ARROW1\0\0" + bytes(100))
    for _ in range(5):
        with pytest.raises(DataError):
            PrebatchedDataset(tmp_path / "broken")
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_dataset_travels_to_another_process(tmp_path):
    write_prebatched(tmp_path / "f.arrow", [{"x": [1, 2]}, {"x": [3]}])
    dataset = pickle.loads(pickle.dumps(PrebatchedDataset(tmp_path / "f.arrow", columns=["x"], batch_size=2)))
    assert [batch["x"].tolist() for batch in dataset] == [[1, 2], [3]]
