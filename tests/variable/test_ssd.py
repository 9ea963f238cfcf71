"""The tier on an SSD: its segments, its disk, and its folder, which a single live process may use."""

import errno
import os
import resource
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from variable.test_tiers import WIDTH, content, keys_of, records_of

from torchsparse_rec.variable import _scratch, tiers
from torchsparse_rec.variable.tiers import SsdTier

ROOT = Path(__file__).resolve().parents[2]


# ---- Segments of an SSD tier -----------------------------------------------------------------------------------------


@pytest.fixture
def small_segments(monkeypatch):
    """Make segments of 16 KiB, so that there are many."""
    monkeypatch.setattr(tiers, "_SEGMENT", 1 << 14)


def full(*arguments):
    """Stand in for a call of the system on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wasted(tier):
    """Say whether a tier has segments more than half dead, but for the open one."""
    return len(tier._segments((tier._live > 0) & (2 * tier._live < tier._segment_rows))) > 0


@pytest.mark.parametrize("width", [1, 24, 100, 5000])
def test_compaction(small_segments, tmp_path, width):
    """Overwrite and erase many times, in calls of less than a segment and of several."""
    tier, expected = SsdTier(tmp_path / "tier", width), {}
    generator = torch.Generator().manual_seed(width)
    most = (1 << 18) // (width + 8)

    def some(count):
        return torch.randint(-most // 2, most // 2, (count,), generator=generator).unique()

    for turn in range(150):
        keys = some(int(torch.randint(1, (1, 30, most // 8, most)[turn % 4] + 1, (), generator=generator)))
        if turn % 5 == 4:
            there = [key for key in keys.tolist() if expected.pop(key, None) is not None]
            assert tier.erase(keys) == len(there)
        else:
            tier.put(keys, records_of(*(keys + turn).tolist(), width=1).expand(-1, width))
            expected.update(zip(keys.tolist(), ((keys + turn) * 31 % 256).tolist(), strict=True))
        if turn % 10 == 0:
            found, records = tier.get(torch.arange(-most, most))
            here = torch.arange(-most, most)[found]
            assert here.tolist() == sorted(expected) and not records[~found].any()
            assert records[found][:, 0].tolist() == [expected[key] for key in here.tolist()]
            assert torch.equal(records[found], records[found][:, :1].expand(-1, width))
        assert not wasted(tier) and tier._live.sum() == len(tier) == len(expected)
    assert tier._file.disk_bytes() <= 1 << 20  # at most a quarter of it is live
    assert tier.erase(torch.tensor(list(expected))) == len(expected) and not tier._live.any()
    tier.close()


def test_disk_holds_twice_what_is_live(tmp_path, monkeypatch):
    """Overwrite rows for long and in any order: the disk holds at most 2.5 times the live bytes."""
    monkeypatch.setattr(tiers, "_SEGMENT", 1 << 17)
    tier, count = SsdTier(tmp_path / "tier", 120), 1 << 17
    keys, generator = torch.arange(count), torch.Generator().manual_seed(0)
    tier.put(keys, torch.zeros(count, 120, dtype=torch.uint8))
    turns = torch.zeros(count, dtype=torch.uint8)
    for turn in range(1, 120):
        some = torch.randperm(count, generator=generator)[: 1 << 13]
        turns[some] = turn
        tier.put(some, turns[some, None].expand(-1, 120))
    assert torch.equal(tier.get(keys)[1], turns[:, None].expand(-1, 120))
    assert tier._file.disk_bytes() <= 2.5 * count * 128
    tier.close()


def test_reading_while_segments_come_and_go(small_segments, tmp_path):
    tier, done = SsdTier(tmp_path / "tier", 64), threading.Event()
    keys = torch.arange(4000)
    records = records_of(*range(4000), width=64)
    tier.put(keys, records)

    def read(seed):
        generator = torch.Generator().manual_seed(seed)
        while not done.is_set():
            some = torch.randperm(4000, generator=generator)[:500]
            found, got = tier.get(some)
            assert found.all() and torch.equal(got, records[some])

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, seed) for seed in range(2)]
        for turn in range(60):
            more = torch.arange(3000) + 4000 + turn % 3 * 1000
            tier.put(more, torch.zeros(3000, 64, dtype=torch.uint8))
            tier.put(keys[turn % 7 :: 7], records[turn % 7 :: 7])
            tier.erase(more[::2])
        done.set()
        for reader in readers:
            reader.result()
    tier.close()


def test_compaction_waits_while_the_disk_is_full(small_segments, tmp_path, monkeypatch):
    """Erase on a full disk: the other rows stay. The next call with enough room compacts."""
    tier, keys = SsdTier(tmp_path / "tier", 64), torch.arange(40_000)
    tier.put(keys, records_of(*range(40_000), width=64))
    with monkeypatch.context() as context:
        context.setattr(tier._file, "write", full)
        context.setattr(tier._file, "grow", full)
        erased = keys[keys % 3 > 0]
        assert tier.erase(erased) == len(erased)
        assert len(tier) == len(keys[::3])
        with pytest.raises(OSError, match="No space left"):
            tier.put(keys + 40_000, torch.zeros(40_000, 64, dtype=torch.uint8))
        kept = records_of(*range(0, 40_000, 3), width=64)
        assert torch.equal(tier.get(keys[::3])[1], kept)
    tier.put(keys_of(-1), records_of(1, width=64))
    assert not wasted(tier) and torch.equal(tier.get(keys[::3])[1], kept)
    tier.close()


# ---- The folder of an SSD tier ---------------------------------------------------------------------------------------


def test_nothing_is_left(tmp_path):
    made, there = tmp_path / "a" / "made", tmp_path / "there"
    there.mkdir()
    (there / "mine.txt").write_text("mine")
    for folder in (made, there):
        with_rows = SsdTier(folder, WIDTH)
        with_rows.put(keys_of(1), records_of(1))
        with_rows.close()
    assert not made.exists()
    assert [path.name for path in there.iterdir()] == ["mine.txt"]


def test_collected_without_close(tmp_path):
    tier = SsdTier(tmp_path / "tier", WIDTH)
    del tier
    assert not (tmp_path / "tier").exists()


def test_folder_in_use(tmp_path):
    tier = SsdTier(tmp_path / "tier", WIDTH)
    tier.put(keys_of(1), records_of(1))
    with pytest.raises(BlockingIOError, match=f"SsdTier: path is in use by process {os.getpid()}; .*/tier"):
        SsdTier(tmp_path / "tier", WIDTH)
    (tmp_path / "other").symlink_to(tmp_path / "tier")
    with pytest.raises(BlockingIOError, match="in use by process"):
        SsdTier(tmp_path / "other", WIDTH)
    assert torch.equal(tier.get(keys_of(1))[1], records_of(1))
    tier.close()
    SsdTier(tmp_path / "tier", WIDTH).close()


IN_USE = """
import sys, torch
from torchsparse_rec.variable.tiers import SsdTier
tier = SsdTier(sys.argv[1], 3)
tier.put(torch.tensor([1]), torch.ones(1, 3, dtype=torch.uint8))
print("ready", flush=True)
sys.stdin.read()
"""


def test_folder_of_another_process(tmp_path):
    """Refuse the folder of a live process; clear it once that process has been killed."""
    command = [sys.executable, "-c", IN_USE, tmp_path / "tier"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    other = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    try:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(BlockingIOError, match=f"in use by process {other.pid};"):
            SsdTier(tmp_path / "tier", WIDTH)
    finally:
        other.kill()
        other.communicate()
    assert (tmp_path / "tier" / _scratch.ROWS).exists()
    tier = SsdTier(tmp_path / "tier", WIDTH)
    assert len(tier) == 0 and content(tier) == {}
    tier.close()


def test_forked(tmp_path):
    """Refuse a forked process. Its end removes nothing."""
    tier = SsdTier(tmp_path / "tier", WIDTH)
    tier.put(keys_of(1), records_of(1))
    refused, answer = os.pipe()
    with warnings.catch_warnings():  # Python warns of threads, which the child does not have
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        for call in (lambda: tier.get(keys_of(1)), lambda: len(tier), tier.close):
            try:
                call()
            except RuntimeError as error:
                os.write(answer, f"{error}\n".encode())
        tier._ending()  # what the interpreter calls at its end, which pytest's child must not reach
        os._exit(0)
    os.close(answer)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(refused) as lines:
        text = f"the tier belongs to process {os.getpid()}, and this one is forked from it"
        assert lines.read().splitlines() == [f"SsdTier.{method}: {text}" for method in ("get", "len", "close")]
    assert torch.equal(tier.get(keys_of(1))[1], records_of(1))
    tier.close()


@pytest.mark.parametrize("reserves", [True, False])
def test_full_disk(tmp_path, monkeypatch, reserves):
    """Fill a disk, for which a limit on the size of files stands: earlier rows are all there, and later calls go on."""
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate")
    tier, written = SsdTier(tmp_path / "tier", 64), 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def batch(turn):
        return torch.arange(1000) * 7919 + turn, torch.full((1000, 64), turn % 251, dtype=torch.uint8)

    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="SsdTier: path has no room for 10[0-9]{5} bytes more: ") as error:
            while written < 100:
                tier.put(*batch(written))
                written += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG and error.value.filename == str(tmp_path / "tier")
    assert written > 5 and tier._file.disk_bytes() <= 3 << 20
    for more in range(2):
        assert len(tier) == 1000 * (written + more)
        for turn in range(written + more):
            keys, records = batch(turn)
            found, got = tier.get(keys)
            assert found.all() and torch.equal(got, records)
        tier.put(*batch(written))
    tier.close()


def test_erasing_makes_room_on_a_full_disk(tmp_path):
    """Erase most rows on a full disk: segments more than half dead go, even with no room for their live rows."""
    tier, limits = SsdTier(tmp_path / "tier", 120), resource.getrlimit(resource.RLIMIT_FSIZE)
    keys, records = torch.arange(1 << 17), records_of(*range(1 << 17), width=120)
    keys = keys[torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))]
    written = 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="no room"):
            for written in range(0, len(keys), 1000):
                tier.put(keys[written : written + 1000], records[keys[written : written + 1000]])
        erased, kept = keys[:written][keys[:written] % 3 > 0], keys[:written][keys[:written] % 3 == 0]
        assert tier.erase(erased) == len(erased)
        tier.put(erased[: written // 4], records[erased[: written // 4]])
        for some in (kept, erased[: written // 4]):
            found, got = tier.get(some)
            assert found.all() and torch.equal(got, records[some])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert written > 20_000
    tier.close()


def test_disk_full_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="SsdTier: path has no room for 10[0-9]{5} bytes more: No space left") as error:
        SsdTier(tmp_path / "tier", WIDTH)
    assert error.value.errno == errno.ENOSPC and error.value.filename == str(tmp_path / "tier")
    assert not (tmp_path / "tier").exists()


def test_systems_that_cannot_reserve_write_zeros(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    tier = SsdTier(tmp_path / "tier", 64)
    for turn in range(2):
        keys = torch.arange(20_000) + turn * 20_000
        tier.put(keys, torch.ones(20_000, 64, dtype=torch.uint8))
        assert tier.get(keys)[1].all() and tier.get(keys % 20_000)[1].all() and tier.nbytes() > len(tier) * 64
    tier.close()


def test_path_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file"):
        SsdTier(tmp_path / "file", WIDTH)
