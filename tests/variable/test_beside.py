"""Other threads and processes beside training: state dicts of one moment, and forks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Held, forked, needs_fork
from variable.cases import on_disk, step
from variable.test_threads import run_all, thread_of

from torchsparse_rec import optim
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import EmbeddingVariableOption, StorageOption
from torchsparse_rec.variable.read_write_lock import ReadWriteLock
from torchsparse_rec.variable.tiers import DramTier

# ---- Threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [False, True])
def test_states_beside_training(tiers: bool, tmp_path: Path) -> None:
    """Take state dicts beside training, with as many rows as keys, and figures, which must not read a removed tier."""
    option = EmbeddingVariableOption(storage_option=on_disk(tmp_path) if tiers else StorageOption())
    table = EmbeddingVariable(2, initializer=0.5, capacity=2, ev_option=option)
    errors: list[BaseException] = []
    done = threading.Event()

    def train() -> None:
        try:
            for k in range(40):
                # Now and then the optimizer changes, and the tiers' records must have room for its states.
                if k % 8 == 0:
                    kind: Any = optim.Adagrad if k % 16 else partial(optim.SGD, momentum=0.5)
                    optimizer = kind(table.parameters(), lr=0.1)
                step(table, optimizer, torch.arange(3 * k % 70, 3 * k % 70 + 16))
        finally:
            done.set()

    def look(what: Callable[[], None]) -> None:
        while not done.is_set():
            what()

    def see_state() -> None:
        state = table.state_dict()
        rows = state["keys.entries"].shape[0]
        assert rows == state["weight"].shape[0]
        assert "cold.keys" not in state or len(state["cold.keys"]) == len(state["cold.values"])
        time.sleep(0.001)

    def see_numbers() -> None:
        assert table.stats()["keys"] <= 100
        assert table.total_count() <= 100
        table.prefetch(torch.arange(20, 40))

    run_all(
        [thread_of(partial(look, what), errors) for what in (see_state, see_numbers)] + [thread_of(train, errors)],
        errors,
    )


# ---- Forks -----------------------------------------------------------------------------------------------------------


@needs_fork
@pytest.mark.usefixtures("one_thread")
def test_a_process_that_was_forked_while_another_thread_wrote_refuses_the_table() -> None:
    table = EmbeddingVariable(2, initializer=0.5)
    table(torch.tensor([1, 2]))
    ids = torch.tensor([1])
    with Held(table._lock.writing()):
        for call in (partial(table.lookup, ids), partial(table, ids), table.total_count, table.state_dict):
            assert "RuntimeError: another thread was writing a table when this process was forked" in forked(call)
    assert [forked(table.total_count), table.total_count()] == ["2", 2]


@needs_fork
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("held", ["reading", "the lock itself"])
def test_a_process_that_was_forked_while_others_read_goes_on(held: str) -> None:
    table = EmbeddingVariable(2, initializer=0.5)
    table(torch.tensor([1, 2]))
    with Held(table._lock.reading() if held == "reading" else table._lock._mutex):
        assert forked(lambda: table(torch.tensor([1, 3])).tolist()) == "[[0.5, 0.5], [0.5, 0.5]]"
    assert table.total_count() == 2


@needs_fork
def test_who_forks_while_it_writes_goes_on_in_both_processes() -> None:
    lock = ReadWriteLock()

    def work() -> str:
        with lock.writing():
            pass
        return "done"

    with lock.writing():
        assert forked(work) == "done"
        work()
    work()


@needs_fork
@pytest.mark.usefixtures("one_thread")
def test_a_process_that_was_forked_while_rows_were_read_ahead(tmp_path: Path) -> None:
    """Use a tier on disk in a forked process: an error says whose it is. No call waits for a thread that is lost."""
    table = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(storage_option=on_disk(tmp_path)))
    for begin in (0, 16):
        table(torch.arange(begin, begin + 16))
    assert table.cold is not None
    with Held(table.cold._tiers[0]._lock):
        table.prefetch(torch.arange(8))  # it waits for the lock
        assert "forked from it" in forked(lambda: table(torch.arange(8)))
    tier = DramTier(2)
    tier.put(torch.tensor([7]), torch.ones(1, 2, dtype=torch.uint8))
    with Held(tier._lock):
        assert forked(lambda: len(tier)) == "1"
