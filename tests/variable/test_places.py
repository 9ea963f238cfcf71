"""Names and links that lead elsewhere: files there are neither followed nor written."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked, needs_fork
from variable.cases import on_disk

from torchsparse_rec._lock import release_lock, take_lock
from torchsparse_rec.checkpoint import CheckpointStore
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import EmbeddingVariableOption
from torchsparse_rec.variable._scratch import ROWS

PRECIOUS = "precious data of the user\n"


@pytest.mark.parametrize("make", ["link", "link to nothing", "fifo", "folder"])
@pytest.mark.parametrize("place", ["checkpoint", "tier"])
def test_what_lies_in_the_place_of_a_lock(place: str, make: str, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    lock = tmp_path / "there" / (".lock" if place == "checkpoint" else f"embedding_variable-1/{ROWS}")
    lock.parent.mkdir(parents=True)
    if make == "link":
        target.write_text(PRECIOUS)
    if make in ("link", "link to nothing"):
        lock.symlink_to(target)
    else:
        {"fifo": os.mkfifo, "folder": os.mkdir}[make](lock)
    with pytest.raises(OSError, match="a lock must be a regular file") as raised:
        if place == "checkpoint":
            EmbeddingVariable(2).save(tmp_path / "there")
        else:
            EmbeddingVariable(2, ev_option=EmbeddingVariableOption(storage_option=on_disk(tmp_path / "there")))
    assert raised.value.filename == str(lock)
    assert target.exists() == (make == "link")
    assert make != "link" or target.read_text() == PRECIOUS


def test_a_lock_is_of_the_file_that_has_its_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = take_lock(path, str)
    with pytest.raises(BlockingIOError, match=f"{os.getpid()}: '{tmp_path}'"):
        take_lock(path, str)
    path.unlink()  # as the lock's owner does
    second = take_lock(path, str)
    assert not os.path.samestat(os.fstat(first), os.fstat(second))
    release_lock(first)
    release_lock(second)
    release_lock(take_lock(path, str))


@needs_fork
def test_a_forked_process_does_not_hold_a_lock(tmp_path: Path) -> None:
    """Kill a process that has locked a file, and has forked another, as a trainer does with DataLoader's workers."""
    path, (out, into) = tmp_path / "lock", os.pipe()
    trainer = os.fork()
    if trainer == 0:
        take_lock(path, str)
        if os.fork() == 0:
            os.write(into, str(os.getpid()).encode())
        time.sleep(60)
        os._exit(0)
    worker = int(os.read(out, 20))
    try:
        with pytest.raises(BlockingIOError, match=f"{trainer}: '{tmp_path}'"):
            take_lock(path, str)
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        release_lock(take_lock(path, str))
    finally:
        os.kill(worker, signal.SIGKILL)


@needs_fork
def test_a_forked_process_that_releases_a_lock_of_its_parent_releases_nothing(tmp_path: Path) -> None:
    lock = take_lock(tmp_path / "lock", str)
    assert forked(lambda: release_lock(lock)) == "None"
    with pytest.raises(BlockingIOError):
        take_lock(tmp_path / "lock", str)
    release_lock(lock)


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "..", "a/b", "a%2Fb", "../../x/y", "a\0b"])
def test_the_rows_of_any_name_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    """Keep the rows of any name in the folder, and those of two names apart."""
    folder = tmp_path / "a" / "b"

    def made(name: str) -> EmbeddingVariable:
        return EmbeddingVariable(2, name=name, ev_option=EmbeddingVariableOption(storage_option=on_disk(folder)))

    tables: Any = [made(name), made("plain")]
    for table in tables:
        table(torch.arange(16))
        table(torch.arange(16, 32))
        assert table.stats()["rows_ssd"] > 0
    assert os.listdir(tmp_path) == ["a"] and os.listdir(tmp_path / "a") == ["b"]
    assert len(os.listdir(folder)) == 2
    del table
    tables.clear()
    assert os.listdir(folder) == []


def test_a_sweep_follows_no_links(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    store, other = CheckpointStore(tmp_path / "a"), CheckpointStore(tmp_path / "b")
    for each in (store, other):
        with each.writer("full", {}) as writer:
            writer.write("x", {"x": torch.zeros(1)})
    (tmp_path / "a" / ".000009.partial").symlink_to(tmp_path / "b" / "000001")
    (tmp_path / "a" / "000007").symlink_to(tmp_path / "c")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "shard-00000.safetensors").write_text(PRECIOUS)
    with store.writer("full", {}):
        pass
    assert [info.problem for info in other.versions()] == [None]
    assert (tmp_path / "c" / "shard-00000.safetensors").read_text() == PRECIOUS
