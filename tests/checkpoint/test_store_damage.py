"""Damaged checkpoints: the error names the damaged file, and older versions can still be read."""

import os
import pickle
import random
import shutil

import pytest
import torch
from checkpoint.cases import rewrite

from torchsparse_rec.checkpoint import CheckpointError, CheckpointStore
from torchsparse_rec.checkpoint.manifest import checksum

pytest.importorskip("safetensors")


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Replace fsync, because no test takes the power away."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def chain(path, rows=3):
    """Write a full version and two deltas."""
    store = CheckpointStore(path)
    for number in (1, 2, 3):
        with store.writer("full" if number == 1 else "delta", {"step": number}) as writer:
            for name in ("keys", "values")[: 3 - number + 1]:
                writer.write(name, {name: torch.arange(rows) + 10 * number, "x": torch.rand(rows, dtype=torch.float16)})
    return store


def files(path):
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != ".lock")


def refused(store, file, problem=None):
    """Check that reading the newest version fails, with an error that names the file."""
    with pytest.raises(CheckpointError, match=problem) as raised:
        for _ in store.open():
            pass
    assert raised.value.path == str(file)
    assert str(raised.value) == f"{file}: {raised.value.problem}"


# ---- Bytes ----------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_a_small_checkpoint(tmp_path):
    store, draw, count = chain(tmp_path), random.Random(0), 0
    for file in files(tmp_path):
        data = file.read_bytes()
        with open(file, "r+b", buffering=0) as changed:
            for position in range(len(data)):
                # One bit is flipped, then a random number of bits.
                for mask in (1 << position % 8, draw.randrange(1, 256)):
                    os.pwrite(changed.fileno(), bytes([data[position] ^ mask]), position)
                    refused(store, file, "checksum")
                    count += 1
                os.pwrite(changed.fileno(), data[position : position + 1], position)
    assert count > 2 * 8 * 150
    store.open().verify()


def test_flipped_bytes_of_a_larger_checkpoint(tmp_path):
    store, draw = chain(tmp_path, rows=50_000), random.Random(1)
    for file in files(tmp_path):
        size = file.stat().st_size
        for position in {0, 7, 8, size - 1, *(draw.randrange(size) for _ in range(40))}:
            data = file.read_bytes()
            file.write_bytes(data[:position] + bytes([data[position] ^ draw.randrange(1, 256)]) + data[position + 1 :])
            refused(store, file, "checksum")
            with pytest.raises(CheckpointError, match=str(file)):
                store.open().verify()
            file.write_bytes(data)
    store.open().verify()


def test_every_truncation_of_a_small_checkpoint(tmp_path):
    store = chain(tmp_path)
    for file in files(tmp_path):
        data = file.read_bytes()
        file.write_bytes(data + b"\0")
        for size in [len(data) + 1, *reversed(range(len(data)))]:
            os.truncate(file, size)
            refused(store, file, "checksum" if file.suffix == ".json" else f"must have {len(data)} bytes, got {size}")
        file.write_bytes(data)
    assert len(list(store.open())) == 5


# ---- Files ----------------------------------------------------------------------------------------------------------


def test_missing_files(tmp_path):
    store = chain(tmp_path)
    for file in files(tmp_path):
        if file == tmp_path / "000003" / "manifest.json":
            continue  # Without this file there is no version 3.
        file.rename(tmp_path / "aside")
        refused(store, file, "the file is missing")
        if file.parent.name != "000003":
            assert "000003" not in str(file) and f"{file}: the file is missing" in store.versions()[-1].problem
        (tmp_path / "aside").rename(file)
    assert len(list(store.open())) == 5


@pytest.mark.parametrize("make", ["mkdir", "mkfifo", "symlink"])
def test_what_is_no_file(make, tmp_path):
    store = chain(tmp_path)
    for file in files(tmp_path):
        file.rename(tmp_path / "aside")
        {"mkdir": os.mkdir, "mkfifo": os.mkfifo, "symlink": lambda path: os.symlink("nowhere", path)}[make](file)
        refused(store, file, "the file is missing" if make == "symlink" else "is no regular file")
        (os.rmdir if make == "mkdir" else os.unlink)(file)
        (tmp_path / "aside").rename(file)
    assert len(list(store.open())) == 5


def test_files_of_other_versions_and_checkpoints(tmp_path):
    store, other = chain(tmp_path / "a"), chain(tmp_path / "b")
    everything = files(tmp_path / "a")
    for file in everything:
        data = file.read_bytes()
        for foreign in [*everything, *files(tmp_path / "b")]:
            if foreign.read_bytes() == data:
                continue
            file.write_bytes(foreign.read_bytes())
            with pytest.raises(CheckpointError) as raised:
                list(store.open())
            # The other checkpoint's manifest of this version is whole, so that the error names its shards or its base,
            # which do not fit.
            fits = file.suffix == ".json" and foreign == tmp_path / "b" / file.relative_to(tmp_path / "a")
            assert raised.value.path.startswith(str(tmp_path / "a")) if fits else raised.value.path == str(file)
            file.write_bytes(data)
    assert len(list(store.open())) == len(list(other.open())) == 5


def test_a_version_of_another_checkpoint_is_no_base(tmp_path):
    """Copy a folder over another checkpoint's: each version is whole, but together they are a mix."""
    store, _ = chain(tmp_path / "a"), chain(tmp_path / "b")
    shutil.rmtree(tmp_path / "a" / "000001")
    shutil.copytree(tmp_path / "b" / "000001", tmp_path / "a" / "000001")
    manifest = tmp_path / "a" / "000001" / "manifest.json"
    refused(store, manifest, "is not the one on top of which version 2 was written")
    assert len(list(store.open(1))) == 2
    shutil.copytree(tmp_path / "b" / "000001", tmp_path / "a" / "000004")
    refused(store, tmp_path / "a" / "000004" / "manifest.json", "is the manifest of version 1, expected that of 4")


# ---- Manifests with the right checksum ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f: f.update(format_version=2), r"expected the format \('torchsparse_rec checkpoint', 1\), got .* 2"),
        (lambda f: f.update(format="parquet"), "expected the format"),
        (lambda f: f.update(kind="half"), "kind 'half' with base 2"),
        (lambda f: f.update(kind="full"), "kind 'full' with base 2"),
        (lambda f: f.update(base=3), "version 3 with base 3"),
        (lambda f: f.update(base=None), "kind 'delta' with base None"),
        (lambda f: f["shards"][0].update(file="../000002/shard-00000.safetensors"), "shards in files"),
        (lambda f: f["shards"][0].pop("crc32c"), "crc32c"),
        (lambda f: f.pop("metadata"), "metadata"),
        (lambda f: f.update(shards=3), "is no manifest of a checkpoint: TypeError"),
    ],
)
def test_manifests_that_no_writer_writes(change, problem, tmp_path):
    store, file = chain(tmp_path), tmp_path / "000003" / "manifest.json"
    rewrite(file, change)
    refused(store, file, problem)


def test_shards_that_are_not_what_the_manifest_says(tmp_path):
    store, file = chain(tmp_path), tmp_path / "000003" / "manifest.json"
    shard = tmp_path / "000003" / "shard-00000.safetensors"
    rewrite(file, lambda f: f["shards"][0]["tensors"].update(x=["float16", [4]]))
    refused(store, shard, r"must hold .*\[4\].*, as the manifest says, got .*\[3\]")
    shard.write_bytes(b"no safetensors")
    rewrite(file, lambda f: f["shards"][0].update(nbytes=14, crc32c=checksum(b"no safetensors")))
    refused(store, shard, "is no file of safetensors: ")


# ---- What remains ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.safetensors"])
def test_older_versions_are_for_who_asks(name, tmp_path):
    store = chain(tmp_path)
    file = tmp_path / "000003" / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=str(file)):
        store.latest()
    with pytest.raises(CheckpointError, match=str(file)):
        store.open(3)
    versions = store.versions()
    assert [info.number for info in versions if info.problem is None] == [1, 2]
    assert versions[-1].number == 3 and str(file) in versions[-1].problem
    assert len(list(store.open(2))) == 4
    # A delta on top of a damaged version is refused as well, unless its base is an older one.
    with pytest.raises(CheckpointError, match=str(file)):
        with store.writer("delta"):
            pass
    with store.writer("delta", base=2) as writer:
        assert writer.number == 4
    assert store.latest().base == 2 and len(list(store.open())) == 4


def test_a_damaged_base_is_the_problem_of_all_above(tmp_path):
    store = chain(tmp_path)
    file = tmp_path / "000001" / "manifest.json"
    file.write_bytes(file.read_bytes()[:-1])
    assert [str(file) in info.problem for info in store.versions()] == [True] * 3
    refused(store, file)


def test_the_error_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(CheckpointError("a/b", "is missing")))
    assert (error.path, error.problem, str(error)) == ("a/b", "is missing", "a/b: is missing")
