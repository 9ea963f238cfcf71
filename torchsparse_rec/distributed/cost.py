"""The cost of a step with each plan of a table, by a model of four constants."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..tables.blocks import MOST_BLOCKS, Blocks
from .machine import Machine
from .plan import ColumnWise, Replicated, RowWise, TablePlan, TableWise, Use

__all__ = ["Option", "expected_distinct", "option"]

# Messages of a step, whatever the number of tables: header, ids, results and gradients; where all are replicated, no
# results.
_MESSAGES, _MESSAGES_OF_REPLICATED = 4, 3
# Ids that expected_distinct takes together: a fraction of all that come before them.
_TOGETHER = 64


def expected_distinct(ids: float, rows: int, exponent: float = 1.05) -> float:
    """
    Return how many different ids are expected in a batch whose ids follow a power law.

    Args:
        ids: the number of ids of the batch.
        rows: the number of rows, V. Id i is drawn as often as a number in ``[i + 1, i + 2)`` of density ``x **
            -exponent``.
        exponent: the exponent of the power law; 0 for ids of equal frequency.

    Returns:
        The expectation, to about 0.1 %.

    Example:
        >>> round(expected_distinct(4096, 100_000))
        1883
        >>> expected_distinct(4096, 3)
        3.0
    """
    edges = _edges(rows)
    if exponent == 1.0:
        below = np.log(edges) / np.log(rows + 1.0)
    else:
        below = (edges ** (1.0 - exponent) - 1.0) / ((rows + 1.0) ** (1.0 - exponent) - 1.0)
    count = np.diff(edges)
    chance = np.minimum(np.diff(below) / count, 1.0 - 1e-16)
    return float(-(count * np.expm1(ids * np.log1p(-chance))).sum())


def _edges(rows: int) -> np.ndarray:
    """Return where ids that are taken together begin, from 1 to V + 1: first single ids, then ever more."""
    edges = _all_edges()
    return np.append(edges[edges <= rows], rows + 1.0)


@functools.cache
def _all_edges() -> np.ndarray:
    edges = [1]
    while edges[-1] < 1 << 62:
        edges.append(edges[-1] + max(1, edges[-1] // _TOGETHER))
    return np.array(edges, dtype=np.float64)


# ---- What a plan costs -----------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """How a table is spread over ranks."""

    ranks: slice | list[int]
    """That have some of it; none where its one rank is not known yet."""
    units: np.ndarray
    """Of the table, int64, that each of them has."""
    shares: np.ndarray
    """Of the owners' work, that each of them does."""
    most: int
    """Units that one rank has."""
    largest: float
    """Share of one rank; an even one where the rank is not known yet: other tables balance it."""


@dataclass(frozen=True)
class Option:
    """
    A plan of a table, and its cost.

    Args:
        plan: the place of the table.
        seconds: the seconds of every rank.
        owners_seconds: the seconds of all owners together, by their shares.
        sent: the bytes that a rank sends, the mean of all ranks.
        messages: the number of messages of a step, which all tables with as many messages share.
        unit_bytes: the bytes of a unit of the spread.
        spread: the spread over ranks.

    Example:
        >>> from torchsparse_rec.distributed.machine import MACHINES
        >>> use = Use("users", rows=1000, dim=16, element_bytes=4, row_bytes=128, ids=4096, distinct=612, bags=4096)
        >>> each = option(use, RowWise(), 2, MACHINES["gloo"])
        >>> each.sent, each.most_bytes()
        (40392.0, 65536)
    """

    plan: TablePlan
    seconds: float
    owners_seconds: float
    sent: float
    messages: int
    unit_bytes: int
    spread: Spread

    def slowest(self) -> float:
        """Return the seconds of the rank that takes longest."""
        return self.seconds + self.owners_seconds * self.spread.largest

    def most_bytes(self) -> int:
        """Return the bytes of the rank that has most of the table."""
        return self.unit_bytes * self.spread.most

    def on(self, rank: int) -> Option:
        """Return the option of a whole table with its rank."""
        return replace(self, plan=TableWise(rank), spread=_of_parts((rank,), (1,)))


def option(use: Use, plan: TablePlan, ranks: int, machine: Machine) -> Option:
    """Return the cost of a plan of a table."""
    if isinstance(plan, Replicated):
        return Option(plan, *_replicated(use, ranks, machine), use.bytes(), _of_all(ranks))
    by_rows, parts = isinstance(plan, RowWise) or not use.pooled, 1
    if isinstance(plan, RowWise):
        blocks = Blocks(use.rows if use.rows is not None else 16 * MOST_BLOCKS)
        unit, spread = (0 if use.rows is None else blocks.places * use.row_bytes), _of_blocks(blocks.count, ranks)
    elif isinstance(plan, ColumnWise):
        assert plan.ranks is not None
        parts = len(plan.ranks)
        columns = tuple(end - begin for begin, end in ColumnWise.columns(use.dim, parts))
        unit, spread = -(-use.bytes() // use.dim), _of_parts(tuple(plan.ranks), columns)
    else:
        unit, spread = use.bytes(), _of_one(ranks) if plan.rank is None else _of_parts((plan.rank,), (1,))
    return Option(plan, *_exchanged(use, ranks, machine, by_rows, parts), _MESSAGES, unit, spread)


@functools.lru_cache(maxsize=64)
def _of_blocks(count: int, ranks: int) -> Spread:
    blocks = Blocks(16 * count)
    assert blocks.count == count
    units = np.array([blocks.begin(rank + 1, ranks) - blocks.begin(rank, ranks) for rank in range(ranks)])
    return Spread(slice(None), units, units / count, int(units.max()), float(units.max() / count))


@functools.lru_cache(maxsize=4096)
def _of_parts(ranks: tuple[int, ...], parts: tuple[int, ...]) -> Spread:
    units = np.array(parts)
    return Spread(list(ranks), units, units / units.sum(), max(parts), max(parts) / sum(parts))


@functools.lru_cache(maxsize=64)
def _of_one(ranks: int) -> Spread:
    return Spread([], np.ones(1, np.int64), np.ones(1), 1, 1 / ranks)


@functools.lru_cache(maxsize=64)
def _of_all(ranks: int) -> Spread:
    return Spread(slice(None), np.ones(ranks, np.int64), np.zeros(ranks), 1, 0.0)


def _exchanged(use: Use, ranks: int, machine: Machine, by_rows: bool, parts: int) -> tuple[float, float, float]:
    """Return the seconds of every rank, the seconds of all owners together, and the bytes that a rank sends."""
    away = (ranks - 1) / ranks
    asked, results = (use.distinct, use.distinct) if by_rows else (use.ids, use.bags)
    ids_sent, results_sent = away * parts * asked * 4, away * results * use.width_on_the_way()
    seconds = (ids_sent + results_sent) / machine.bytes_per_second
    owners = ranks * results_sent / machine.bytes_per_second
    if by_rows:
        seconds += _merged(use.ids, machine) + _pooled(use, machine)
        owners += ranks * _stepped(use, use.distinct, parts, machine)
    else:  # as one process on the whole batch
        owners += ranks * (_merged(parts * use.ids, machine) + _pooled(use, machine))
        owners += _stepped(use, use.distinct_of_all(ranks), parts, machine)
    return seconds, owners, ids_sent + 2 * results_sent


def _replicated(use: Use, ranks: int, machine: Machine) -> tuple[float, float, float, int]:
    """Return the seconds of every rank, none of owners, the bytes that a rank sends, and its messages."""
    assert use.rows is not None
    seconds = _merged(use.ids, machine) + _pooled(use, machine)
    sent = (ranks - 1) * use.distinct * (4 + use.width_on_the_way())
    seconds += _merged(ranks * use.distinct, machine) + _stepped(use, use.distinct_of_all(ranks), 1, machine)
    return seconds + sent / machine.bytes_per_second, 0.0, sent, _MESSAGES_OF_REPLICATED


def _merged(ids: float, machine: Machine) -> float:
    """Return the seconds in which ids are made distinct: each is looked for in a hash table."""
    return ids / machine.rows_per_second


def _pooled(use: Use, machine: Machine) -> float:
    """Return the seconds in which a rank's results are pooled, and their gradients, of rows that are in caches."""
    return 2 * use.ids * use.width() / machine.copied_per_second


def _stepped(use: Use, rows: float, parts: int, machine: Machine) -> float:
    """Return the seconds in which rows, or parts of them, are read from memory, and read and written with states."""
    return (
        2 * parts * rows / machine.rows_per_second
        + rows * (use.width() + 2 * use.row_bytes) / machine.copied_per_second
    )
