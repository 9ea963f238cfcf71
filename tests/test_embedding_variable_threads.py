"""Lookups of an EmbeddingVariable beside its training, and the lock between them."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from torchsparse_rec import ops, optim
from torchsparse_rec.nn import EmbeddingVariable, EmbeddingVariableOption, LFUEvict, LRUEvict
from torchsparse_rec.nn.variable.guard import Guard, reading

KEYS, DIM, READERS, BATCH = 2000, 16, 8, 100
# Nothing here takes more than a few seconds, alone.
PATIENCE = 100.0

OPTIMIZERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.5),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": partial(optim.Adagrad, lr=0.3, initial_accumulator_value=0.1),
    "adam": partial(optim.Adam, lr=0.1),  # rows without gradient move too: they are behind
    "lazy_adam": partial(optim.Adam, lr=0.1, lazy=True),
}
MODES = {"sparse": ("sparse", "step"), "fused": ("fused", "step"), "in_backward": ("fused", "backward")}
CAPACITIES = {"grows": None, "lru": LRUEvict(400), "lfu": LFUEvict(400)}


def _join(threads: list[threading.Thread], errors: list[BaseException]) -> None:
    """Start them all, and wait until they end."""
    for thread in threads:
        thread.daemon = True
        thread.start()
    end = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "some threads wait for ever"


def _thread(work: Callable[[], None], errors: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except BaseException as error:  # all are told to the test
            errors.append(error)

    return threading.Thread(target=run)


# ---- Lookups beside a trainer ----------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a lookup returned, and between which phases of training it came."""

    first: int
    last: int
    table: int
    ids: Tensor
    values: Tensor


class Training:
    """
    Tables whose rows have equal elements, before and after every update: a torn row shows as unequal ones.

    Each step has two phases: rows come and go, then they are updated. All is a function of the seed.
    """

    def __init__(self, optimizer: str, mode: str, capacity: str, tables: int = 1) -> None:
        grad_mode, apply = MODES[mode]
        option = EmbeddingVariableOption(evict_option=CAPACITIES[capacity])
        self.tables = [
            EmbeddingVariable(
                DIM, initializer=0.5, ev_option=option, capacity=8, grad_mode=grad_mode, apply=apply, name=f"table{k}"
            )
            for k in range(tables)
        ]
        self.optimizer = OPTIMIZERS[optimizer]([table.weight for table in self.tables])
        self.phase = 0

    def run(self, steps: int, after_phase: Callable[[], None]) -> None:
        """Train; ``after_phase`` is called after each phase."""
        random = torch.Generator().manual_seed(3)
        for step in range(steps):
            # Of several tables not all at each step.
            tables = [t for k, t in enumerate(self.tables) if len(self.tables) == 1 or (step + k) % 3]
            loss = torch.zeros(())
            for table in tables:
                # More keys as time goes by.
                ids = torch.randint(0, KEYS * (step + 1) // steps, (BATCH,), generator=random) - KEYS // 2
                slopes = torch.randint(-4, 5, (BATCH, 1), generator=random).float()
                loss = loss + (table(ids) * slopes).sum()
                self._end_phase(after_phase)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self._end_phase(after_phase)

    def _end_phase(self, after_phase: Callable[[], None]) -> None:
        after_phase()
        self.phase += 1

    def all_rows(self) -> Tensor:
        """``[tables, KEYS]``, the first column."""
        ids = torch.arange(KEYS) - KEYS // 2
        return torch.stack([table.lookup(ids)[:, 0] for table in self.tables])


def _recorded(make: Callable[[], Training], steps: int) -> Tensor:
    """``[phases + 1, tables, KEYS]``: what all lookups return after each phase of a run alone."""
    training = make()
    states = [training.all_rows()]
    training.run(steps, lambda: states.append(training.all_rows()))
    return torch.stack(states)


def _beside(training: Training, steps: int) -> tuple[list[Seen], list[int]]:
    """All lookups of 8 threads while it trains, and how many each had."""
    errors: list[BaseException] = []
    seen: list[list[Seen]] = [[] for _ in range(READERS)]
    done = threading.Event()

    def train() -> None:
        try:
            training.run(steps, lambda: None)
        finally:
            done.set()

    def look_up(k: int) -> None:
        random = torch.Generator().manual_seed(100 + k)
        sizes = [1, 20, 200]
        while not done.is_set():
            number = len(seen[k])
            table = number % len(training.tables)
            ids = torch.randint(-KEYS // 2, KEYS // 2, (sizes[number % 3],), generator=random)
            first = training.phase
            values = training.tables[table].lookup(ids)
            # The next phase may have written already, without having said so.
            seen[k].append(Seen(first, training.phase + 1, table, ids, values))

    readers = [_thread(partial(look_up, k), errors) for k in range(READERS)]
    _join([*readers, _thread(train, errors)], errors)
    return [x for its in seen for x in its], [len(its) for its in seen]


def _check_beside(make: Callable[[], Training], steps: int) -> None:
    states = _recorded(make, steps)
    training = make()
    seen, lookups = _beside(training, steps)
    assert torch.equal(training.all_rows(), states[-1])
    for first, last, table, ids, values in seen:
        assert (values == values[:, :1]).all(), "a row is half from before an update"
        wanted = states[first : last + 1, table, ids + KEYS // 2]
        assert (wanted == values[:, 0]).all(1).any(), f"no state from {first} to {last} has these rows"
    # Nobody starved: at one phase in four at least each reader had a turn.
    assert min(lookups) >= len(states) // 4, lookups
    for table in training.tables:
        assert table.stats()["failed"] == 0
        assert table.keys.capacity > 8


@pytest.mark.parametrize(
    ("optimizer", "mode", "capacity"),
    [
        ("sgd", "sparse", "grows"),
        ("momentum", "fused", "lru"),
        ("adagrad", "in_backward", "lru"),
        ("adagrad", "sparse", "lfu"),
        ("adam", "sparse", "grows"),
        ("adam", "fused", "lru"),
        ("adam", "in_backward", "grows"),
        ("lazy_adam", "fused", "grows"),
    ],
)
def test_rows_are_wholly_from_before_or_after_an_update(optimizer: str, mode: str, capacity: str) -> None:
    _check_beside(partial(Training, optimizer, mode, capacity), 10)


@pytest.mark.full
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_are_wholly_from_before_or_after_an_update_for_long(optimizer: str, mode: str, capacity: str) -> None:
    _check_beside(partial(Training, optimizer, mode, capacity), 150)


@pytest.mark.parametrize("mode", ["sparse", "in_backward"])
def test_two_tables_of_one_optimizer_of_which_not_all_are_stepped(mode: str) -> None:
    _check_beside(partial(Training, "adam", mode, "grows", 2), 8)


def test_what_a_lookup_has_returned_stays_when_the_table_grows() -> None:
    table = EmbeddingVariable(DIM, initializer=0.5, capacity=8)
    ids = torch.arange(8)
    table(ids)
    weight, index, entries = table.weight.detach(), table.keys.index, table.keys.entries
    rows = table.lookup(ids)
    table(torch.arange(10_000))
    assert table.keys.capacity > 8
    # Whoever still reads the buffers of before finds in them what was there.
    assert torch.equal(weight[ops.table_find(index, entries, ids)], rows)


# ---- The lock --------------------------------------------------------------------------------------------------------


@contextmanager
def _elsewhere(work: Callable[[], None]) -> Iterator[threading.Event]:
    """Work in another thread, which ends after this; the event says that it has."""
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        work()
        ended.set()

    thread = _thread(run, errors)
    thread.start()
    yield ended
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not errors


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it has not come to pass"
        time.sleep(0.0005)


def _write(guard: Guard) -> None:
    with guard.writing():
        pass


def _read(guard: Guard) -> None:
    with guard.reading():
        pass


def _is_free(guard: Guard) -> bool:
    return guard._readers == guard._waiting == guard._blocked == guard._depth == 0 and guard._writer is None


def test_readers_read_together_and_a_writer_waits_for_all() -> None:
    guard = Guard()
    with guard.reading():
        with _elsewhere(partial(_read, guard)) as read:
            assert read.wait(PATIENCE)
        with _elsewhere(partial(_write, guard)) as wrote:
            assert not wrote.wait(0.02)
            # This must end before the writer's thread is waited for.
            guard._reading.__exit__()
            assert wrote.wait(PATIENCE)
            guard._reading.__enter__()
    assert _is_free(guard)


def test_a_writer_that_waits_goes_before_readers_that_come_after_it() -> None:
    guard, order = Guard(), []

    def write() -> None:
        with guard.writing():
            order.append("writer")

    def read() -> None:
        with guard.reading():
            order.append("reader")

    errors: list[BaseException] = []
    writer, reader = _thread(write, errors), _thread(read, errors)
    with guard.reading():
        writer.start()
        _until(lambda: guard._waiting == 1)
        reader.start()
        _until(lambda: guard._blocked == 1)
        assert order == []
    for thread in (writer, reader):
        thread.join(PATIENCE)
    assert order == ["writer", "reader"] and not errors and _is_free(guard)


def test_readers_that_waited_go_before_the_next_writer() -> None:
    guard, order = Guard(), []

    def write() -> None:
        with guard.writing():
            order.append("writer")

    def read() -> None:
        with guard.reading():
            order.append("reader")

    errors: list[BaseException] = []
    threads = [_thread(write, errors), _thread(read, errors), _thread(read, errors)]
    with guard.writing():
        threads[0].start()
        _until(lambda: guard._waiting == 1)
        for thread in threads[1:]:
            thread.start()
        _until(lambda: guard._blocked == 2)
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["reader", "reader", "writer"] and not errors and _is_free(guard)


def test_a_reader_has_its_turn_beside_a_writer_that_never_rests() -> None:
    guard, done, turns = Guard(), threading.Event(), []
    errors: list[BaseException] = []

    def write() -> None:
        while not done.is_set():
            with guard.writing():
                time.sleep(0.0005)

    def read() -> None:
        for _ in range(20):
            with guard.reading():
                turns.append(1)

    writers = [_thread(write, errors) for _ in range(2)]
    readers = [_thread(read, errors) for _ in range(3)]
    for thread in [*writers, *readers]:
        thread.start()
    for thread in readers:
        thread.join(PATIENCE)
    done.set()
    for thread in writers:
        thread.join(PATIENCE)
    assert len(turns) == 60 and not errors and _is_free(guard)


def test_the_thread_that_writes_may_write_and_read_inside() -> None:
    guard = Guard()
    with guard.writing():
        with guard.writing(), guard.reading(), guard.writing():
            pass
        with guard.reading():
            with _elsewhere(partial(_read, guard)) as read:
                _until(lambda: guard._blocked == 1)
                assert not read.is_set()
                guard._writing.__exit__()
                assert read.wait(PATIENCE)
                guard._writing.__enter__()
    assert _is_free(guard)


@pytest.mark.parametrize("way", ["reading", "writing"])
def test_an_error_inside_frees_the_lock(way: str) -> None:
    guard = Guard()
    with pytest.raises(ZeroDivisionError):
        with getattr(guard, way)():
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        with guard.writing(), getattr(guard, way)():
            raise ZeroDivisionError
    assert _is_free(guard)
    with _elsewhere(partial(_write, guard)) as wrote:
        assert wrote.wait(PATIENCE)


def test_a_wait_that_is_broken_off_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C."""
    guard = Guard()

    def interrupt() -> None:
        raise KeyboardInterrupt

    def wait(way: str) -> None:
        with pytest.raises(KeyboardInterrupt), getattr(guard, way)():
            pass

    with monkeypatch.context() as patch:
        patch.setattr(guard._writer_goes, "wait", interrupt)
        with guard.reading(), _elsewhere(partial(wait, "writing")):
            pass
        patch.setattr(guard._readers_go, "wait", interrupt)
        with guard.writing(), _elsewhere(partial(wait, "reading")):
            pass
        with guard.writing(), _elsewhere(partial(wait, "writing")):
            pass
    assert _is_free(guard)
    with _elsewhere(partial(_write, guard)), _elsewhere(partial(_read, guard)):
        pass


def test_several_tables_are_read_in_the_order_of_their_numbers_each_once() -> None:
    guards = [Guard() for _ in range(4)]
    first = guards[0]
    with first.writing():
        with _elsewhere(lambda: _read_all([guards[2], first, guards[1], first, guards[2]])):
            _until(lambda: first._blocked == 1)
            assert all(_is_free(guard) for guard in guards[1:])
            first._writing.__exit__()
            _until(lambda: _is_free(first))
            first._writing.__enter__()
    assert all(_is_free(guard) for guard in guards)
    # A writer between two entries of one guard would wait for the first and be waited for by the second.
    entered = threading.Event()

    def read() -> None:
        with reading([first, first]):
            entered.set()
            _until(lambda: first._waiting == 1)

    with _elsewhere(read):
        assert entered.wait(PATIENCE)
        _write(first)
    assert _is_free(first)


def _read_all(guards: list[Guard]) -> None:
    with reading(guards):
        pass


def _random_program(seed: int, rounds: int) -> None:
    """Threads that read and write tables, alone and several, nested: what is written is never seen half."""
    guards = [Guard() for _ in range(3)]
    pairs = [[0, 0] for _ in guards]
    errors: list[BaseException] = []

    def write(k: int) -> None:
        pairs[k][0] += 1
        time.sleep(0)
        pairs[k][1] += 1

    def work(number: int) -> None:
        draw = random.Random(1000 * seed + number)
        for _ in range(rounds):
            some = draw.sample(range(3), draw.randint(1, 3))
            match draw.randrange(4):
                case 0:
                    with reading(guards[k] for k in some):
                        assert all(pairs[k][0] == pairs[k][1] for k in some)
                case 1:
                    with guards[some[0]].writing():
                        write(some[0])
                        with guards[some[0]].reading(), guards[some[0]].writing():
                            write(some[0])
                case 2:
                    first, last = min(some), max(some)
                    with guards[first].writing(), guards[last].writing():
                        write(first)
                        write(last)
                case _:
                    try:
                        with guards[some[0]].writing():
                            write(some[0])
                            raise ZeroDivisionError
                    except ZeroDivisionError:
                        pass

    _join([_thread(partial(work, number), errors) for number in range(8)], errors)
    assert all(_is_free(guard) for guard in guards)
    assert all(a == b for a, b in pairs)


def test_random_programs_of_threads_end() -> None:
    for seed in range(3):
        _random_program(seed, 60)


@pytest.mark.full
def test_long_random_programs_of_threads_end() -> None:
    for seed in range(100, 120):
        _random_program(seed, 1000)


def test_copies_have_a_lock_of_their_own() -> None:
    guard = Guard()
    with guard.writing():
        for other in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
            assert _is_free(other) and other.number != guard.number


# ---- What the lock costs ---------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("ids", "repeats"), [(1, 1000), (1000, 300), (65_536, 10)])
def test_the_lock_takes_a_tenth_of_a_lookup_at_most(ids: int, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = EmbeddingVariable(32, initializer=0.5)
    with torch.no_grad():
        table(torch.arange(100_000))
    wanted = torch.randint(100_000, (ids,))
    nothing = nullcontext()

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            table.lookup(wanted)
        return time.perf_counter() - begin

    # In turns, as the machine may be busy; the fastest of each.
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(30):
        times[True].append(seconds())
        with monkeypatch.context() as patch:
            patch.setattr(Guard, "reading", lambda self: nothing)
            times[False].append(seconds())
    assert min(times[True]) <= 1.1 * min(times[False])
