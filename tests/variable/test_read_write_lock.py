"""The reader-writer lock between lookups of an EmbeddingVariable and its training: who waits for whom, and its cost."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from variable.test_threads import run_all, thread_of

from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable.read_write_lock import ReadWriteLock, reading

# ---- The lock --------------------------------------------------------------------------------------------------------


@contextmanager
def _elsewhere(work: Callable[[], None]) -> Iterator[threading.Event]:
    """Run ``work`` in another thread beside the block; join it at the end. The event is set when ``work`` has ended."""
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        work()
        ended.set()

    thread = thread_of(run, errors)
    thread.start()
    yield ended
    thread.join()
    assert not errors


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.0005)


def _write(lock: ReadWriteLock) -> None:
    with lock.writing():
        pass


def _read(lock: ReadWriteLock) -> None:
    with lock.reading():
        pass


def _is_free(lock: ReadWriteLock) -> bool:
    return lock._readers == lock._waiting == lock._blocked == lock._depth == 0 and lock._writer is None


def test_readers_read_together_and_a_writer_waits_for_all() -> None:
    lock = ReadWriteLock()
    with lock.reading():
        with _elsewhere(partial(_read, lock)) as read:
            assert read.wait()
        with _elsewhere(partial(_write, lock)) as wrote:
            _until(lambda: lock._waiting == 1)
            assert not wrote.is_set()
            # The read lock must be left before the writer's thread is joined.
            lock._reading.__exit__()
            assert wrote.wait()
            lock._reading.__enter__()
    assert _is_free(lock)


@pytest.mark.parametrize(
    ("held", "wanted"), [("reading", ["writing", "reading"]), ("writing", ["reading", "reading", "writing"])]
)
def test_a_writer_and_readers_that_waited_take_turns(held: str, wanted: list[str]) -> None:
    """Let a writer and then readers wait: it goes before them if others read now, and after them if one wrote."""
    lock, readers = ReadWriteLock(), wanted.count("reading")
    order: list[str] = []
    errors: list[BaseException] = []

    def enter(way: str) -> None:
        with getattr(lock, way)():
            order.append(way)

    threads = [thread_of(partial(enter, way), errors) for way in ["writing", *["reading"] * readers]]
    with getattr(lock, held)():
        threads[0].start()
        _until(lambda: lock._waiting == 1)
        for thread in threads[1:]:
            thread.start()
        _until(lambda: lock._blocked == readers)
        assert order == []
    for thread in threads:
        thread.join()
    assert not errors and _is_free(lock)
    assert order == wanted


def test_a_reader_has_its_turn_beside_a_writer_that_never_rests() -> None:
    lock, done, turns = ReadWriteLock(), threading.Event(), []

    def write() -> None:
        while not done.is_set():
            with lock.writing():
                time.sleep(0.0005)

    def read() -> None:
        for _ in range(20):
            with lock.reading():
                turns.append(1)

    with ThreadPoolExecutor(5) as pool:
        writers, readers = [pool.submit(write) for _ in range(2)], [pool.submit(read) for _ in range(3)]
        wait(readers)
        done.set()
    assert all(ended.exception() is None for ended in [*writers, *readers])
    assert len(turns) == 60 and _is_free(lock)


def test_the_thread_that_writes_may_write_and_read_inside() -> None:
    lock = ReadWriteLock()
    with lock.writing():
        with lock.writing(), lock.reading(), lock.writing():
            pass
        with lock.reading():
            with _elsewhere(partial(_read, lock)) as read:
                _until(lambda: lock._blocked == 1)
                assert not read.is_set()
                lock._writing.__exit__()
                assert read.wait()
                lock._writing.__enter__()
    assert _is_free(lock)


@pytest.mark.parametrize("way", ["reading", "writing"])
def test_an_error_inside_frees_the_lock(way: str) -> None:
    lock = ReadWriteLock()
    with pytest.raises(ZeroDivisionError):
        with getattr(lock, way)():
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        with lock.writing(), getattr(lock, way)():
            raise ZeroDivisionError
    assert _is_free(lock)
    with _elsewhere(partial(_write, lock)) as wrote:
        assert wrote.wait()


def test_a_wait_that_is_broken_off_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a wait, as Ctrl-C does."""
    lock = ReadWriteLock()

    def interrupt() -> None:
        raise KeyboardInterrupt

    def wait(way: str) -> None:
        with pytest.raises(KeyboardInterrupt), getattr(lock, way)():
            pass

    with monkeypatch.context() as patch:
        patch.setattr(lock._writer_goes, "wait", interrupt)
        with lock.reading(), _elsewhere(partial(wait, "writing")):
            pass
        patch.setattr(lock._readers_go, "wait", interrupt)
        with lock.writing(), _elsewhere(partial(wait, "reading")):
            pass
        with lock.writing(), _elsewhere(partial(wait, "writing")):
            pass
    assert _is_free(lock)
    with _elsewhere(partial(_write, lock)), _elsewhere(partial(_read, lock)):
        pass


def test_several_tables_are_read_in_the_order_of_their_numbers_each_once() -> None:
    locks = [ReadWriteLock() for _ in range(4)]
    first = locks[0]
    with first.writing():
        with _elsewhere(lambda: _read_all([locks[2], first, locks[1], first, locks[2]])):
            _until(lambda: first._blocked == 1)
            assert all(_is_free(lock) for lock in locks[1:])
            first._writing.__exit__()
            _until(lambda: _is_free(first))
            first._writing.__enter__()
    assert all(_is_free(lock) for lock in locks)
    # A writer between two entries into one lock would wait for the first entry, and the second entry for the writer.
    entered = threading.Event()

    def read() -> None:
        with reading([first, first]):
            entered.set()
            _until(lambda: first._waiting == 1)

    with _elsewhere(read):
        assert entered.wait()
        _write(first)
    assert _is_free(first)


def _read_all(locks: list[ReadWriteLock]) -> None:
    with reading(locks):
        pass


@pytest.mark.parametrize(
    ("seed", "rounds"),
    [
        *((seed, 60) for seed in range(3)),
        *(pytest.param(seed, 1000, marks=pytest.mark.full) for seed in range(100, 120)),
    ],
)
def test_random_programs_of_threads_end(seed: int, rounds: int) -> None:
    """Read and write tables in threads, alone and several, nested. No thread may see half a write."""
    locks = [ReadWriteLock() for _ in range(3)]
    pairs = [[0, 0] for _ in locks]
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
                    with reading(locks[k] for k in some):
                        assert all(pairs[k][0] == pairs[k][1] for k in some)
                case 1:
                    with locks[some[0]].writing():
                        write(some[0])
                        with locks[some[0]].reading(), locks[some[0]].writing():
                            write(some[0])
                case 2:
                    first, last = min(some), max(some)
                    with locks[first].writing(), locks[last].writing():
                        write(first)
                        write(last)
                case _:
                    try:
                        with locks[some[0]].writing():
                            write(some[0])
                            raise ZeroDivisionError
                    except ZeroDivisionError:
                        pass

    run_all([thread_of(partial(work, number), errors) for number in range(8)], errors)
    assert all(_is_free(lock) for lock in locks)
    assert all(a == b for a, b in pairs)


def test_copies_have_a_lock_of_their_own() -> None:
    lock = ReadWriteLock()
    with lock.writing():
        for other in (copy.deepcopy(lock), pickle.loads(pickle.dumps(lock))):
            assert _is_free(other) and other.number != lock.number


# ---- What the lock costs ---------------------------------------------------------------------------------------------


def test_a_lookup_takes_the_lock_once_however_many_ids_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    table = EmbeddingVariable(32, initializer=0.5)
    with torch.no_grad():
        table(torch.arange(1000))
    taken: list[str] = []
    for way in ("reading", "writing"):
        take = getattr(ReadWriteLock, way)
        monkeypatch.setattr(ReadWriteLock, way, lambda self, take=take, way=way: taken.append(way) or take(self))
    table.lookup(torch.randint(1000, (65_536,)))
    assert taken == ["reading"]
