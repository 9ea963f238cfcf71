"""Tiers compared with a dict: any keys, any order of calls; wrong arguments; and the memory of the tier in DRAM."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchsparse_rec.variable import tiers
from torchsparse_rec.variable.tiers import DramTier, SsdTier

WIDTH = 3
LEAST, MOST = -(2**63), 2**63 - 1


@pytest.fixture(params=["dram", "ssd"])
def make(request, tmp_path):
    """Return a function that makes tiers of one kind, and close them after the test."""
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
    """Return a record for each number, all of whose bytes depend on the number."""
    rows = [[(n * 31 + k * 7) % 256 for k in range(width)] for n in numbers]
    return torch.tensor(rows, dtype=torch.uint8).reshape(len(numbers), width)


def content(tier, batch=65536):
    """Return all rows of a tier by its ``items``, and check that the keys ascend."""
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
    # Sizes are so small that tables grow and calls are cut into parts.
    monkeypatch.setattr(tiers, "_FIRST_ROWS", 8)
    monkeypatch.setattr(tiers, "_SEGMENT", 4 * (WIDTH + 8))

    class Machine(TierMachine):
        def new(self):
            return DramTier(WIDTH) if kind == "dram" else SsdTier(tmp_path / "tier", WIDTH)

    Machine.TestCase.settings = settings(
        max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck)
    )
    Machine.TestCase().runTest()


# ---- Single rules ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("how", "rows", "measured"), [("erase", 4000, 3), ("clear", 20_000, 1)])
def test_space_is_used_again(make, how, rows, measured):
    tier = make(64)
    for turn in range(12):
        keys = torch.arange(rows) + turn * 4000
        tier.put(keys, torch.full((rows, 64), turn, dtype=torch.uint8))
        if turn == measured:
            taken = tier.nbytes()
        tier.clear() if how == "clear" else tier.erase(keys)
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
    """Read beside a writer: a record is wholly old or wholly new, and none is missing."""
    tier, width, done = make(64), 64, threading.Event()
    keys = torch.arange(500) - 250

    def write():
        for turn in range(60):
            tier.put(keys, torch.full((500, width), turn % 256, dtype=torch.uint8))
            # The tier grows beside the readers.
            tier.put(torch.arange(1000) + 1000 * (turn + 1), torch.zeros(1000, width, dtype=torch.uint8))
        done.set()

    def read(seed):
        generator = torch.Generator().manual_seed(seed)
        while not done.is_set():
            found, records = tier.get(keys[torch.randperm(500, generator=generator)[:100]])
            assert found.all() and bool((records == records[:1, :1]).all())

    tier.put(keys, torch.zeros(500, width, dtype=torch.uint8))
    with ThreadPoolExecutor(4) as pool:
        for ended in [*(pool.submit(read, seed) for seed in range(3)), pool.submit(write)]:
            ended.result()
    assert done.is_set() and len(tier) == 60_500


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
    """Fill an index beyond its buckets: keys that find no place in their bucket get one elsewhere."""
    tier = DramTier(1)
    tier._keys.index = tier._keys.index[:1].clone()  # room for 12 keys, not for the 1,024 for which there are rows
    tier.put(torch.arange(500), torch.arange(500).to(torch.uint8)[:, None])
    found, records = tier.get(torch.arange(501))
    assert found.tolist() == [True] * 500 + [False] and len(tier) == 500
    assert torch.equal(records[:500, 0], torch.arange(500).to(torch.uint8))


@pytest.mark.cuda
def test_dram_pinned():
    tier = DramTier(2, pin_memory=True)
    tier.put(keys_of(1), records_of(1, width=2))
    assert tier.get(keys_of(1, 2))[1].is_pinned()
