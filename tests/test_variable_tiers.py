"""Tiers against a dict: any keys, any order of calls; and the SSD's folder, which one live process has for itself."""

import copy
import errno
import os
import pickle
import resource
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchsparse_rec.nn.variable import _scratch, tiers
from torchsparse_rec.nn.variable.tiers import DramTier, SsdTier

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 3
LEAST, MOST = -(2**63), 2**63 - 1


@pytest.fixture(params=["dram", "ssd"])
def make(request, tmp_path):
    """Makes tiers of one kind; closes them after the test."""
    made = []

    def new(record_bytes=WIDTH):
        tier = DramTier(record_bytes) if request.param == "dram" else SsdTier(tmp_path / str(len(made)), record_bytes)
        made.append(tier)
        return tier

    yield new
    for tier in made:
        tier.close()


def keys_of(*keys):
    return torch.tensor(keys, dtype=torch.int64)


def records_of(*numbers, width=WIDTH):
    """A record for each number, all of whose bytes depend on it."""
    return torch.tensor([[(n * 31 + k * 7) % 256 for k in range(width)] for n in numbers], dtype=torch.uint8).reshape(
        len(numbers), width
    )


def content(tier, batch=65536):
    """All that is in a tier, by its items, whose keys must ascend."""
    found = {}
    for keys, records in tier.items(batch):
        assert 0 < len(keys) <= batch and keys.dtype == torch.int64
        assert records.dtype == torch.uint8 and records.shape == (len(keys), tier.record_bytes)
        assert all(list(found)[-1:] < [key] for key in keys[:1].tolist())
        assert keys.tolist() == sorted(set(keys.tolist()))
        found.update(zip(keys.tolist(), map(tuple, records.tolist()), strict=True))
    return found


# ---- Against a dict -------------------------------------------------------------------------------------------------

some_keys = st.lists(
    st.sampled_from([LEAST, LEAST + 1, -256, -1, 0, 1, 255, 256, MOST - 1, MOST])
    | st.integers(LEAST, MOST)
    | st.integers(-20, 20),
    unique=True,
    max_size=40,
)


class TierMachine(RuleBasedStateMachine):
    """Random programs on a tier and on a dict."""

    def __init__(self):
        super().__init__()
        self.expected, self.writes = {}, 0
        self.tier = self.new()

    @rule(keys=some_keys)
    def put(self, keys):
        self.writes += 1
        records = records_of(*(key + self.writes for key in keys))
        self.tier.put(keys_of(*keys), records)
        self.expected.update(zip(keys, map(tuple, records.tolist()), strict=True))

    @rule(keys=some_keys, known=st.booleans())
    def get(self, keys, known):
        keys = list({*keys, *self.expected}) if known else keys
        found, records = self.tier.get(keys_of(*keys))
        assert found.dtype == torch.bool and records.dtype == torch.uint8
        assert found.tolist() == [key in self.expected for key in keys]
        assert records.shape == (len(keys), WIDTH)
        assert list(map(tuple, records.tolist())) == [self.expected.get(key, (0,) * WIDTH) for key in keys]

    @rule(keys=some_keys, part=st.integers(0, 3))
    def erase(self, keys, part):
        keys = list({*keys, *list(self.expected)[: len(self.expected) * part // 3]})
        assert self.tier.erase(keys_of(*keys)) == len([key for key in keys if key in self.expected])
        for key in keys:
            self.expected.pop(key, None)

    @rule(batch=st.integers(1, 50))
    def items(self, batch):
        assert content(self.tier, batch) == self.expected

    @rule()
    def clear(self):
        self.tier.clear()
        self.expected = {}

    @invariant()
    def size(self):
        assert len(self.tier) == len(self.expected)

    def teardown(self):
        try:
            assert content(self.tier) == self.expected
        finally:
            self.tier.close()


@pytest.mark.parametrize("kind", ["dram", "ssd"])
def test_random_programs(kind, tmp_path, monkeypatch):
    # So small that tables grow and calls are cut into parts.
    monkeypatch.setattr(tiers, "_FIRST_ROWS", 8)
    monkeypatch.setattr(tiers, "_LEAST_SEGMENT", 1)
    monkeypatch.setattr(tiers, "_MOST_SEGMENT", 1)

    class Machine(TierMachine):
        def new(self):
            return DramTier(WIDTH) if kind == "dram" else SsdTier(tmp_path / "tier", WIDTH)

    Machine.TestCase.settings = settings(
        max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    Machine.TestCase().runTest()


# ---- Single rules ---------------------------------------------------------------------------------------------------


def test_all_keys_are_legal_and_ascend_as_numbers(make):
    tier = make()
    keys = [0, MOST, -1, LEAST, 255, 256, -256, -257, 1 << 40, -(1 << 40)]
    tier.put(keys_of(*keys), records_of(*range(len(keys))))
    assert list(content(tier, 3)) == sorted(keys)
    found, records = tier.get(keys_of(*keys))
    assert found.all() and torch.equal(records, records_of(*range(len(keys))))


def test_nothing(make):
    tier = make()
    none = keys_of()
    tier.put(none, records_of())
    found, records = tier.get(none)
    assert found.shape == (0,) and records.shape == (0, WIDTH)
    assert tier.erase(none) == 0 and len(tier) == 0 and content(tier) == {}
    found, records = tier.get(keys_of(5))
    assert not found.any() and not records.any()


def test_arguments_need_not_be_contiguous_and_are_not_kept(make):
    tier = make()
    keys, records = keys_of(5, 9, 7, 9)[::2], records_of(1, 2)[:, torch.tensor([2, 1, 0])].t().contiguous().t()
    before = records.clone()
    tier.put(keys, records)
    records.fill_(0)
    keys.fill_(0)
    assert content(tier) == dict(zip([5, 7], map(tuple, before.tolist()), strict=True))
    tier.get(keys_of(5))[1].fill_(9)
    assert torch.equal(tier.get(keys_of(5))[1], before[:1])


def test_more_than_one_transaction(make):
    tier = make(16)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(LEAST, MOST, (70_000,), generator=generator).unique()
    keys = keys[torch.randperm(len(keys), generator=generator)]
    records = torch.randint(0, 256, (len(keys), 16), dtype=torch.uint8, generator=generator)
    small = tier.nbytes()
    tier.put(keys, records)
    assert tier.nbytes() > small + len(keys) * 16
    found, got = tier.get(keys)
    assert found.all() and torch.equal(got, records)
    order = keys.argsort()
    batches = list(tier.items(9999))
    assert torch.equal(torch.cat([k for k, _ in batches]), keys[order])
    assert torch.equal(torch.cat([r for _, r in batches]), records[order])
    assert tier.erase(keys[:40_000]) == 40_000 and len(tier) == len(keys) - 40_000
    found, got = tier.get(keys)
    assert not found[:40_000].any() and not got[:40_000].any() and torch.equal(got[40_000:], records[40_000:])


def test_space_is_used_again(make):
    tier = make(64)
    for turn in range(12):
        keys = torch.arange(4000) + turn * 4000
        tier.put(keys, torch.full((4000, 64), turn, dtype=torch.uint8))
        if turn == 3:
            taken = tier.nbytes()
        tier.erase(keys)
    assert tier.nbytes() <= 1.1 * taken


def test_clear_gives_space_back_to_later_records(make):
    tier = make(64)
    for turn in range(4):
        tier.put(torch.arange(20_000), torch.full((20_000, 64), turn, dtype=torch.uint8))
        if turn == 1:
            taken = tier.nbytes()
        tier.clear()
        assert len(tier) == 0 and content(tier) == {}
    assert tier.nbytes() <= 1.1 * taken


def test_items_while_records_come_and_go(make):
    tier = make()
    tier.put(torch.arange(10), records_of(*range(10)))
    walk = tier.items(2)
    assert next(walk)[0].tolist() == [0, 1]
    tier.erase(keys_of(2, 3, 5))
    tier.put(keys_of(4), records_of(77))
    rest = {key: tuple(r) for keys, records in walk for key, r in zip(keys.tolist(), records.tolist(), strict=True)}
    assert sorted(rest) == [4, 6, 7, 8, 9] and rest[4] == tuple(records_of(77)[0].tolist())


def test_threads(make):
    """Readers beside a writer: a record is wholly an old one or wholly a new one, and none is missing."""
    tier, width, wrong, done = make(64), 64, [], threading.Event()
    keys = torch.arange(500) - 250

    def write():
        for turn in range(60):
            tier.put(keys, torch.full((500, width), turn % 256, dtype=torch.uint8))
            # Growth, beside the readers.
            tier.put(torch.arange(1000) + 1000 * (turn + 1), torch.zeros(1000, width, dtype=torch.uint8))
        done.set()

    def read(seed):
        generator = torch.Generator().manual_seed(seed)
        while not done.is_set():
            found, records = tier.get(keys[torch.randperm(500, generator=generator)[:100]])
            if not found.all() or bool((records != records[:1, :1]).any()):
                wrong.append(records)

    tier.put(keys, torch.zeros(500, width, dtype=torch.uint8))
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)] + [threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert done.is_set() and not wrong and len(tier) == 60_500


def test_closed(make):
    tier = make()
    tier.put(keys_of(1, 2), records_of(1, 2))
    walk = tier.items(1)
    next(walk)
    tier.close()
    tier.close()
    name = type(tier).__name__
    calls = {
        "get": lambda: tier.get(keys_of(1)),
        "put": lambda: tier.put(keys_of(1), records_of(1)),
        "erase": lambda: tier.erase(keys_of(1)),
        "items": lambda: next(walk),
        "clear": tier.clear,
        "nbytes": tier.nbytes,
        "len": lambda: len(tier),
    }
    for method, call in calls.items():
        with pytest.raises(RuntimeError, match=f"^{name}.{method}: the tier is closed$"):
            call()


def test_no_copies(make):
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        tier = make()
        with pytest.raises(TypeError, match=f"^{type(tier).__name__} cannot be pickled or copied: .* save the table$"):
            copied(tier)


# ---- Wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["get", "put", "erase"])
@pytest.mark.parametrize(
    "keys, problem",
    [
        (torch.tensor([1, 2], dtype=torch.int32), r"keys must be int64 \[N\] on the CPU, got int32 \[2\] on cpu"),
        (torch.tensor([[1, 2]]), r"keys must be int64 \[N\] on the CPU, got int64 \[1, 2\] on cpu"),
        (torch.tensor(1), r"keys must be int64 \[N\] on the CPU, got int64 \[\] on cpu"),
        (torch.empty(2, dtype=torch.int64, device="meta"), r"keys must be .* got int64 \[2\] on meta"),
        ([1, 2], r"keys must be int64 \[N\] on the CPU, got \[1, 2\]"),
        (torch.tensor([4, -7, 5, -7]), r"keys must be distinct, got -7 at positions 1 and 3"),
    ],
)
def test_wrong_keys(make, method, keys, problem):
    tier = make()
    rest = (records_of(*range(len(keys) if getattr(keys, "ndim", 1) else 1)),) if method == "put" else ()
    with pytest.raises(ValueError, match=rf"^{type(tier).__name__}.{method}: {problem}$"):
        getattr(tier, method)(keys, *rest)


@pytest.mark.parametrize(
    "records, got",
    [
        (records_of(1), r"uint8 \[1, 3\] on cpu"),
        (records_of(1, 2, width=4), r"uint8 \[2, 4\] on cpu"),
        (records_of(1, 2).to(torch.int8), r"int8 \[2, 3\] on cpu"),
        (records_of(1, 2).flatten(), r"uint8 \[6\] on cpu"),
        (None, "None"),
    ],
)
def test_wrong_records(make, records, got):
    tier = make()
    with pytest.raises(ValueError, match=rf"put: records must be uint8 \[2, 3\] on the CPU, got {got}$"):
        tier.put(keys_of(1, 2), records)
    assert len(tier) == 0


@pytest.mark.parametrize("value", [0, -1, 1.5, None, "3"])
def test_wrong_numbers(make, value):
    with pytest.raises(ValueError, match=rf"Tier: record_bytes must be an integer of at least 1, got {value!r}$"):
        make(value)
    tier = make()
    with pytest.raises(ValueError, match=rf"Tier.items: batch must be an integer of at least 1, got {value!r}$"):
        tier.items(value)


# ---- Memory ---------------------------------------------------------------------------------------------------------


def test_memory_of_dram():
    tier = DramTier(100)
    tier.put(torch.arange(1024 * 8), torch.zeros(1024 * 8, 100, dtype=torch.uint8))
    assert 100 + 16 + 7 <= tier.nbytes() / (1024 * 8) <= 100 + 24


def test_dram_spreads_keys_that_crowd_a_bucket():
    """With nine keys a bucket some region of many may overflow; its keys are found a place all the same."""
    tier = DramTier(1)
    tier._keys.index = tier._keys.index[:1].clone()  # room for 12 keys of the 1,024 there are rows for
    tier.put(torch.arange(500), torch.arange(500).to(torch.uint8)[:, None])
    found, records = tier.get(torch.arange(501))
    assert found.tolist() == [True] * 500 + [False] and len(tier) == 500
    assert torch.equal(records[:500, 0], torch.arange(500).to(torch.uint8))


@pytest.mark.cuda
def test_dram_pinned():
    tier = DramTier(2, pin_memory=True)
    tier.put(keys_of(1), records_of(1, width=2))
    assert tier.get(keys_of(1, 2))[1].is_pinned()


# ---- Segments of an SSD tier ----------------------------------------------------------------------------------------


@pytest.fixture
def small_segments(monkeypatch):
    """Of 16 KiB at most, so that there are many."""
    monkeypatch.setattr(tiers, "_LEAST_SEGMENT", 1 << 12)
    monkeypatch.setattr(tiers, "_MOST_SEGMENT", 1 << 14)


@pytest.mark.parametrize("width", [1, 24, 100, 5000])
def test_compaction(small_segments, tmp_path, width):
    """Long programs of overwriting and erasing, with calls of less than a segment and of several."""
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
        _, rows, live = tier._segments
        assert (2 * live >= rows)[rows > 0].all() and live.sum() == len(tier) == len(expected)
    assert tier._folder.disk_bytes() <= 1 << 20  # a quarter is live at most
    assert tier.erase(torch.tensor(list(expected))) == len(expected) and not tier._segments[1].any()
    tier.close()


def test_disk_holds_twice_what_is_live(tmp_path, monkeypatch):
    """However long rows are overwritten, in whatever order."""
    monkeypatch.setattr(tiers, "_MOST_SEGMENT", 1 << 18)
    tier, count = SsdTier(tmp_path / "tier", 120), 1 << 17
    keys, generator = torch.arange(count), torch.Generator().manual_seed(0)
    tier.put(keys, torch.zeros(count, 120, dtype=torch.uint8))
    turns = torch.zeros(count, dtype=torch.uint8)
    for turn in range(1, 120):
        some = torch.randperm(count, generator=generator)[: 1 << 13]
        turns[some] = turn
        tier.put(some, turns[some, None].expand(-1, 120))
    assert torch.equal(tier.get(keys)[1], turns[:, None].expand(-1, 120))
    assert tier._folder.disk_bytes() <= 2.5 * count * 128
    tier.close()


def test_reading_while_segments_come_and_go(small_segments, tmp_path):
    tier, wrong, done = SsdTier(tmp_path / "tier", 64), [], threading.Event()
    keys = torch.arange(4000)
    records = records_of(*range(4000), width=64)
    tier.put(keys, records)

    def read(seed):
        generator = torch.Generator().manual_seed(seed)
        while not done.is_set():
            some = torch.randperm(4000, generator=generator)[:500]
            found, got = tier.get(some)
            if not found.all() or not torch.equal(got, records[some]):
                wrong.append(some)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        more = torch.arange(3000) + 4000 + turn % 3 * 1000
        tier.put(more, torch.zeros(3000, 64, dtype=torch.uint8))
        tier.put(keys[turn % 7 :: 7], records[turn % 7 :: 7])
        tier.erase(more[::2])
    done.set()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    tier.close()


def test_compaction_waits_while_the_disk_is_full(small_segments, tmp_path, monkeypatch):
    """Erasing does not fail, and what is left is there; the next call that has the room makes up for it."""
    tier, keys = SsdTier(tmp_path / "tier", 64), torch.arange(40_000)
    tier.put(keys, records_of(*range(40_000), width=64))
    with monkeypatch.context() as context:

        def full(*arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        context.setattr(tier, "_write", full)
        erased = keys[keys % 3 > 0]
        assert tier.erase(erased) == len(erased)
        assert len(tier) == len(keys[::3])
        with pytest.raises(OSError, match="No space left"):
            tier.put(keys + 40_000, torch.zeros(40_000, 64, dtype=torch.uint8))
        kept = records_of(*range(0, 40_000, 3), width=64)
        assert torch.equal(tier.get(keys[::3])[1], kept)
    tier.put(keys_of(-1), records_of(1, width=64))
    _, rows, live = tier._segments
    assert (2 * live >= rows)[rows > 0].all() and torch.equal(tier.get(keys[::3])[1], kept)
    tier.close()


# ---- The folder of an SSD tier --------------------------------------------------------------------------------------


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
from torchsparse_rec.nn.variable.tiers import SsdTier
tier = SsdTier(sys.argv[1], 3)
tier.put(torch.tensor([1]), torch.ones(1, 3, dtype=torch.uint8))
print("ready", flush=True)
sys.stdin.read()
"""


def test_folder_of_another_process(tmp_path):
    """Refused while it lives; cleared once it has been killed."""
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
    """A forked process is refused, and its end takes nothing away."""
    tier = SsdTier(tmp_path / "tier", WIDTH)
    tier.put(keys_of(1), records_of(1))
    refused, answer = os.pipe()
    with warnings.catch_warnings():  # of threads that the child does not have
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        for call in (lambda: tier.get(keys_of(1)), lambda: len(tier), tier.close):
            try:
                call()
            except RuntimeError as error:
                os.write(answer, f"{error}\n".encode())
        tier._ending()  # as at the interpreter's end, which pytest's child must not have
        os._exit(0)
    os.close(answer)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(refused) as lines:
        text = f"the tier belongs to process {os.getpid()}, and this one is forked from it"
        assert lines.read().splitlines() == [f"SsdTier.{method}: {text}" for method in ("get", "len", "close")]
    assert torch.equal(tier.get(keys_of(1))[1], records_of(1))
    tier.close()


def test_full_disk(tmp_path):
    """A limit on the size of files stands for it: what was put before is all there, and later calls go on."""
    tier, written = SsdTier(tmp_path / "tier", 64), 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def batch(turn):
        return torch.arange(1000) * 7919 + turn, torch.full((1000, 64), turn % 251, dtype=torch.uint8)

    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="SsdTier: path has no room for 1048576 bytes more: ") as error:
            while written < 100:
                tier.put(*batch(written))
                written += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG and error.value.filename == str(tmp_path / "tier")
    assert written > 5 and tier._folder.disk_bytes() <= 3 << 20
    for more in range(2):
        assert len(tier) == 1000 * (written + more)
        for turn in range(written + more):
            keys, records = batch(turn)
            found, got = tier.get(keys)
            assert found.all() and torch.equal(got, records)
        tier.put(*batch(written))
    tier.close()


def test_erasing_makes_room_on_a_full_disk(tmp_path):
    """Segments that are more than half dead go, even where there is no room to write what is alive in them first."""
    tier, generator, limits = (
        SsdTier(tmp_path / "tier", 120),
        torch.Generator(),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    keys, records = torch.arange(1 << 17), records_of(*range(1 << 17), width=120)
    keys = keys[torch.randperm(len(keys), generator=generator.manual_seed(0))]
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
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

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


def test_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ImportError, match=r"^SsdTier needs lmdb: pip install 'torchsparse_rec\[ssd\]'$"):
        SsdTier(tmp_path / "tier", WIDTH)
    assert not (tmp_path / "tier").exists()
