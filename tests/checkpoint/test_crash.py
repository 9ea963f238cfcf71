"""Checkpoints whose writer is killed, whose disk is full or fails, or whose power goes: the last whole one remains."""

import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from checkpoint.cases import CHANGING, Savers, check_whole, save, watched

from torchsparse_rec import files
from torchsparse_rec.checkpoint import CheckpointStore

pytest.importorskip("safetensors")
ROWS = 50


@pytest.fixture(scope="module")
def savers():
    process = Savers()
    yield process
    process.close()


def leftovers(path):
    """Return the names that a save leaves in the folder and that are no versions."""
    return [p.name for p in path.iterdir() if p.name != ".lock" and not (p / "manifest.json").exists()]


# ---- Every moment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [True, False], ids=["killed", "power lost"])
def test_a_crash_before_every_change_of_the_disk(power, tmp_path, monkeypatch):
    """
    Copy the folder before every call that changes it, as a crash would leave it, and go on from the copy.

    Where power is lost, files that were not synced to the disk are empty. (Their names may be lost as well: see the
    next test.)
    """
    path, copies = tmp_path / "run", tmp_path / "copies"
    store, on_disk, committed, seen = CheckpointStore(path, keep=2), set(), [0], set()

    def copy(source, target):
        survives = power or os.stat(source).st_ino in on_disk
        shutil.copyfile(source if survives else os.devnull, target)

    def before(name, arguments):
        if path.exists():
            crashed = copies / str(len(os.listdir(copies)))
            shutil.copytree(path, crashed, copy_function=copy)
            after = CheckpointStore(crashed, keep=2)
            number = check_whole(after, ROWS)
            assert number in (committed[0], committed[0] + 1), name
            seen.add((name, number - committed[0]))
            # The next save goes on from there, and removes the leftovers.
            assert save(after, ROWS).number == number + 1 == check_whole(after, ROWS)
            assert leftovers(crashed) == []
        if name == "fsync":
            on_disk.add(os.fstat(arguments[0]).st_ino)

    copies.mkdir()
    with watched(monkeypatch, before):
        for number in range(1, 11):
            if number == 5:
                # Two writers have left these folders: a crash may also come while they are removed.
                for folder in (path / ".000005.partial", path / "000005"):
                    shutil.copytree(path / "000004", folder, ignore=shutil.ignore_patterns("manifest.json"))
            assert save(store, ROWS).number == number
            committed[0] = number
    assert {name for name, _ in seen} == set(CHANGING)
    assert {("fsync", 0), ("fsync", 1), ("unlink", 1), ("replace", 0)} <= seen
    assert len(os.listdir(copies)) > 50


def test_all_is_on_the_disk_before_the_manifest_gets_its_name(tmp_path, monkeypatch):
    """Check the order of syncs, because the system promises no order of writes but the one that is asked for."""
    path, calls = tmp_path / "new" / "run", []

    def before(name, arguments):
        where = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else str(arguments[-1])
        calls.append((name, os.path.relpath(where, tmp_path)))

    with watched(monkeypatch, before):
        for _ in range(5):
            save(CheckpointStore(path, keep=1), ROWS)
    first = calls[: next(i for i, call in enumerate(calls) if call[0] == "replace") + 2]
    shards_of_version_4 = [f"new/run/000004/shard-{k:05d}.safetensors" for k in range(2)]
    shards = [("fsync", f"new/run/.000001.partial/shard-{k:05d}.safetensors") for k in range(4)]
    assert [call for call in first if call[0] != "mkdir"] == [
        ("fsync", "new"),
        ("fsync", "."),
        *shards,
        ("fsync", "new/run/.000001.partial/.manifest.json.partial"),
        ("fsync", "new/run/.000001.partial"),
        ("rename", "new/run/000001"),
        ("fsync", "new/run"),
        ("replace", "new/run/000001/manifest.json"),
        ("fsync", "new/run/000001"),
    ]
    # A shard, too, is removed only after its manifest has gone.
    begin = calls.index(("unlink", "new/run/000004/manifest.json"))
    assert begin > calls.index(("fsync", "new/run/000005"))
    assert calls[begin + 1] == ("fsync", "new/run/000004")
    assert sorted(calls[begin + 2 : begin + 4]) == [("unlink", shard) for shard in shards_of_version_4]


# ---- Disks that are full or fail ------------------------------------------------------------------------------------


def saved_twice(path):
    store = CheckpointStore(path, keep=1)
    assert [save(store, ROWS).number, save(store, ROWS).number] == [1, 2]
    return store


def unharmed(store, number):
    """Check that the older version is whole, that nothing else is left, and that the next save succeeds."""
    assert check_whole(store, ROWS) == number
    assert leftovers(store.path) == []
    assert save(store, ROWS).number == number + 1 == check_whole(store, ROWS)


def test_a_full_disk_at_every_file(tmp_path, monkeypatch):
    """Write each of the files to /dev/full, which is always full."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    names = []
    for failing in range(3):
        store, opened = saved_twice(tmp_path / str(failing)), []

        def full(path, mode, opened=opened, failing=failing):
            if mode == "xb":
                opened.append(path)
                path, mode = ("/dev/full", "wb") if len(opened) == failing + 1 else (path, mode)
            return open(path, mode)

        with monkeypatch.context() as patch:
            patch.setattr(files, "open", full, raising=False)
            text = "version 3 was not written, those before it are as they were: "
            with pytest.raises(OSError, match=text) as raised:
                save(store, ROWS)
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.filename == str(opened[-1])
        names.append(opened[-1].name)
        unharmed(store, 2)
    assert names == ["shard-00000.safetensors", "shard-00001.safetensors", ".manifest.json.partial"]


def test_a_limit_of_the_system(savers, tmp_path):
    """Limit the size of files, so that a real error of the system cuts off a file in the middle."""
    store = saved_twice(tmp_path)
    savers.start("limited", tmp_path, 100_000)
    (said, ended) = savers.lines()
    large = tmp_path / ".000003.partial" / "shard-00001.safetensors"
    assert said == f"EFBIG {large} version 3 was not written, those before it are as they were: File too large"
    assert ended == "ended 0"
    unharmed(store, 2)


def test_a_disk_that_fails_at_every_call(tmp_path, monkeypatch):
    calls, failed_at = 0, set()
    for failing in range(100):
        path = tmp_path / str(failing)
        store, calls = saved_twice(path), 0

        def before(name, arguments, failing=failing):
            nonlocal calls
            calls += 1
            # One call of the third save fails. The later calls, which remove its files, do not.
            if calls == failing + 1:
                failed_at.add(name)
                raise OSError(errno.EIO, os.strerror(errno.EIO), None if name == "fsync" else str(arguments[0]))

        with watched(monkeypatch, before):
            try:
                # The save writes a delta, so that it prunes nothing.
                save(store, ROWS)
            except OSError as error:
                assert error.errno == errno.EIO and error.filename.startswith(str(path))
            else:
                break
        unharmed(store, 2)
    assert failed_at == {"mkdir", "fsync", "rename", "replace"}
    assert failing == calls > 8


# ---- Writers at the same time ---------------------------------------------------------------------------------------


def test_a_second_writer_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    with store.writer() as writer:
        with pytest.raises(BlockingIOError, match=rf"another writer \(process {os.getpid()}\) is writing .*{tmp_path}"):
            with CheckpointStore(tmp_path).writer():
                pass
        assert writer.number == 1
    with CheckpointStore(tmp_path).writer() as writer:
        assert writer.number == 2


def test_a_writer_of_another_process_is_left_to_its_work(savers, tmp_path):
    store = saved_twice(tmp_path)
    process = savers.start("hold", tmp_path, ROWS)
    assert savers.line() == "holding"
    at_work = tmp_path / ".000003.partial" / "shard-00000.safetensors"
    with pytest.raises(BlockingIOError, match=rf"another writer \(process {process}\) is writing a version here"):
        save(store, ROWS)
    assert at_work.exists() and check_whole(store, ROWS) == 2
    os.kill(process, signal.SIGKILL)
    assert savers.lines() == ["ended -9"]
    # Its leftovers stay until the next writer comes.
    assert at_work.exists()
    assert save(store, ROWS).number == 3 == check_whole(store, ROWS)
    assert leftovers(tmp_path) == []


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    """Save while another process has the lock's file open, as DataLoader's workers have that were forked meanwhile."""
    store = CheckpointStore(tmp_path)
    with store.writer() as writer:
        lock = os.dup(writer._lock)
    try:
        save(store, ROWS)
    finally:
        os.close(lock)


# ---- Writers that are killed ----------------------------------------------------------------------------------------


def kill(savers, path, rows, times, longest):
    """Kill savers at random moments; return the phases in which they were."""
    store, draw, phases = CheckpointStore(path), random.Random(), []
    last = 0
    for _ in range(times):
        process = savers.start("save", path, rows)
        said = [savers.line()]
        time.sleep(draw.uniform(0, longest))
        os.kill(process, signal.SIGKILL)
        said += savers.lines()
        assert said.pop() == "ended -9", said
        phases.append(said[-1])
        # Versions that were reported as committed are there, and at most one more.
        last += said.count("committed")
        number = check_whole(store, rows)
        assert number - last in (0, 1), (number, last, said)
        last = number
    assert last > 0
    return phases


def in_a_save(phase):
    return not phase.startswith("saved ")


@pytest.mark.always("the only one that kills a process in a save")
def test_killed_savers(savers, tmp_path):
    phases = kill(savers, tmp_path, 20_000, times=15, longest=0.15)
    assert sum(map(in_a_save, phases)) >= 5


@pytest.mark.full
def test_two_hundred_killed_savers(savers, tmp_path):
    phases = kill(savers, tmp_path, 100_000, times=200, longest=0.3)
    assert sum(map(in_a_save, phases)) >= 150
    found = {phase.split(" shard")[0] for phase in phases}
    assert {"write", "fsync", "rename manifest", "prune"} <= found, found
