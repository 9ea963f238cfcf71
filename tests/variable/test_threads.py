"""Lookups of an EmbeddingVariable beside its training: each returns rows from before or after an update."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from torchsparse_rec import ops, optim
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import EmbeddingVariableOption, LFUEvict, LRUEvict

KEYS, DIM, READERS, BATCH = 2000, 16, 8, 100

OPTIMIZERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.5),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": partial(optim.Adagrad, lr=0.3, initial_accumulator_value=0.1),
    "adam": partial(optim.Adam, lr=0.1),  # moves rows without gradient too, which leaves them stale
    "lazy_adam": partial(optim.Adam, lr=0.1, lazy=True),
}
MODES = ("sparse", "fused")
CAPACITIES = {"grows": None, "lru": LRUEvict(400), "lfu": LFUEvict(400)}


def run_all(threads: list[threading.Thread], errors: list[BaseException]) -> None:
    """Start threads, wait until all have ended, and raise the first error."""
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def thread_of(work: Callable[[], None], errors: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except BaseException as error:  # the test gets every error
            errors.append(error)

    return threading.Thread(target=run)


# ---- Lookups beside a trainer ----------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """The rows that a lookup returned, and the phases of training between which it ran."""

    first: int
    last: int
    table: int
    ids: Tensor
    values: Tensor


class Training:
    """
    Tables whose rows have equal elements, before and after every update: a torn row shows as unequal ones.

    Each step has two phases: keys are inserted and evicted, then rows are updated. All depends on the seed alone.
    """

    def __init__(self, optimizer: str, mode: str, capacity: str, tables: int = 1) -> None:
        option = EmbeddingVariableOption(evict_option=CAPACITIES[capacity])
        self.tables = [
            EmbeddingVariable(DIM, initializer=0.5, ev_option=option, capacity=8, grad_mode=mode, name=f"table{k}")
            for k in range(tables)
        ]
        self.optimizer = OPTIMIZERS[optimizer]([table.weight for table in self.tables], in_backward=True)
        self.phase = 0

    def run(self, steps: int, after_phase: Callable[[], None]) -> None:
        """Train; ``after_phase`` is called after each phase."""
        random = torch.Generator().manual_seed(3)
        for step in range(steps):
            # With several tables a step leaves some out.
            tables = [t for k, t in enumerate(self.tables) if len(self.tables) == 1 or (step + k) % 3]
            loss = torch.zeros(())
            for table in tables:
                # The range of keys grows with the steps.
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
        """Return the first column of all rows, ``[tables, KEYS]``."""
        ids = torch.arange(KEYS) - KEYS // 2
        return torch.stack([table.lookup(ids)[:, 0] for table in self.tables])


def _recorded(make: Callable[[], Training], steps: int) -> Tensor:
    """Return the results of lookups after each phase of a run alone, ``[phases + 1, tables, KEYS]``."""
    training = make()
    states = [training.all_rows()]
    training.run(steps, lambda: states.append(training.all_rows()))
    return torch.stack(states)


def _beside(training: Training, steps: int) -> tuple[list[Seen], list[int]]:
    """Return all lookups of 8 threads beside training, and each thread's number of lookups."""
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
            # The next phase may have written before it is counted.
            seen[k].append(Seen(first, training.phase + 1, table, ids, values))

    readers = [thread_of(partial(look_up, k), errors) for k in range(READERS)]
    run_all([*readers, thread_of(train, errors)], errors)
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
    # No thread starved: each had at least one lookup in four phases.
    assert min(lookups) >= len(states) // 4, lookups
    for table in training.tables:
        assert table.stats()["failed"] == 0
        assert table.keys.capacity > 8


@pytest.mark.parametrize(
    ("optimizer", "mode", "capacity"),
    [
        ("sgd", "sparse", "grows"),
        ("momentum", "fused", "lru"),
        ("adagrad", "fused", "lru"),
        ("adagrad", "sparse", "lfu"),
        ("adam", "sparse", "grows"),
        ("adam", "fused", "lru"),
        ("adam", "fused", "grows"),
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


@pytest.mark.parametrize("mode", ["sparse", "fused"])
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
    # The old buffers still have their content, for threads that are reading them.
    assert torch.equal(weight[ops.table_find(index, entries, ids)], rows)
