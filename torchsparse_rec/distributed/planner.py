"""Which plan each table gets where nobody says: the fastest of those that fit, by a model of a step's time."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .blocks import MOST_BLOCKS, Blocks
from .machine import Machine
from .plan import ColumnWise, Plan, Replicated, RowWise, TableWise, as_plan

__all__ = ["Chosen", "Planned", "Use", "choose", "expected_distinct"]

# The slowest rank may take so many times the mean; else tables of its own are split by rows.
_BALANCE = 1.2
# Messages of a step, whatever the number of tables: header, ids, results and gradients; a replicated table's rows.
_MESSAGES, _MESSAGES_OF_REPLICATED = 4, 2
# Ids of one block of expected_distinct: a fraction of all that come before it.
_BLOCK = 64


@dataclass(frozen=True)
class Use:
    """
    A table, and what a step does with it.

    Args:
        name: of the table.
        rows: V; None for a table that grows.
        dim: D.
        element_bytes: of an element.
        row_bytes: of a row with its optimizer's states.
        ids: of a rank's batch, all features together.
        distinct: of those ids. An example batch tells, or :func:`expected_distinct`.
        bags: results of a rank's batch, all features together: as many as ids where nothing is pooled.
        pooled: whether ids are pooled.
        row_numbers: whether a state of the optimizer has one number for each row.

    Example:
        >>> use = Use("users", rows=1_000_000, dim=16, element_bytes=4, row_bytes=128, ids=4096, distinct=3000, bags=4096)
        >>> use.bytes()
        128000000
    """

    name: str
    rows: int | None
    dim: int
    element_bytes: int
    row_bytes: int
    ids: float
    distinct: float
    bags: float
    pooled: bool = True
    row_numbers: bool = False

    def bytes(self) -> int:
        """Return how many bytes the whole table takes with its states; 0 for a table that grows."""
        return (self.rows or 0) * self.row_bytes

    def replicates_dense(self, ranks: int) -> bool:
        """Return whether the gradient of a table that every rank has is sent whole, as it is shorter than its rows."""
        assert self.rows is not None
        width = self.dim * self.element_bytes
        return 2 * self.rows * width <= ranks * self.distinct * (8 + width)


def expected_distinct(ids: float, rows: int, exponent: float = 1.05) -> float:
    """
    Return how many different ids are expected in a batch whose ids follow a power law.

    Args:
        ids: of the batch.
        rows: V. Id i is drawn as often as a number in ``[i + 1, i + 2)`` of density ``x ** -exponent``.
        exponent: 0 for ids that are all as frequent.

    Returns:
        The expectation, to about 0.1 %.

    Example:
        >>> round(expected_distinct(4096, 100_000))
        1836
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


@functools.lru_cache(maxsize=1024)
def _edges(rows: int) -> np.ndarray:
    """Return where blocks of ids begin, from 1 to V + 1: single ids, then ever more that are about as frequent."""
    edges = [1]
    while edges[-1] <= rows:
        edges.append(min(rows + 1, edges[-1] + max(1, edges[-1] // _BLOCK)))
    return np.array(edges, dtype=np.float64)


# ---- What was chosen -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """
    What was chosen for a table.

    Args:
        use: the table.
        plan: where it is.
        sent: bytes that a rank sends for it in a step, the mean of all ranks.
        seconds: of a step on the rank that takes longest for it, by the model.
        why: in words.

    Example:
        >>> use = Use("days", rows=7, dim=16, element_bytes=4, row_bytes=128, ids=4096, distinct=7, bags=4096)
        >>> Chosen(use, Replicated(), sent=448.0, seconds=1e-4, why="given").plan
        Replicated()
    """

    use: Use
    plan: Plan
    sent: float
    seconds: float
    why: str

    @property
    def ranks(self) -> Sequence[int] | None:
        """The ranks that have some of the table; None: all."""
        if isinstance(self.plan, TableWise):
            return None if self.plan.rank is None else [self.plan.rank]
        return self.plan.ranks if isinstance(self.plan, ColumnWise) else None


@dataclass(frozen=True)
class Planned:
    """
    The plans of all tables, and what each rank has of them: printable.

    Args:
        tables: by name, in the order in which they were given.
        seconds: of a step, of each rank, by the model.
        bytes: that each rank has, tables and states.

    Example:
        >>> from torchsparse_rec.distributed.machine import MACHINES
        >>> use = Use("days", rows=7, dim=16, element_bytes=4, row_bytes=128, ids=4096, distinct=7, bags=4096)
        >>> print(choose([use], ranks=2, memory=None, machine=MACHINES["gloo"], given={"days": "table_wise"}))
        table  rows  bytes  plan       ranks  sent a step  time      why
        days   7     896 B  TableWise  0      ...
        2 ranks: ...
    """

    tables: Mapping[str, Chosen]
    seconds: Sequence[float]
    bytes: Sequence[int]

    def __str__(self) -> str:
        lines = [("table", "rows", "bytes", "plan", "ranks", "sent a step", "time", "why")]
        for name, each in self.tables.items():
            grows = each.use.rows is None
            lines.append(
                (
                    name,
                    "grows" if grows else f"{each.use.rows:,}",
                    f"{_bytes(each.use.row_bytes)} a row" if grows else _bytes(each.use.bytes()),
                    type(each.plan).__name__,
                    "all" if each.ranks is None else ", ".join(map(str, each.ranks)),
                    _bytes(each.sent),
                    _milliseconds(each.seconds),
                    each.why,
                )
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        ranks = len(self.seconds)
        slowest, fullest = self.seconds.index(max(self.seconds)), self.bytes.index(max(self.bytes))
        return "\n".join(
            [
                *table,
                f"{ranks} ranks: a step takes {_milliseconds(max(self.seconds))} on rank {slowest}, "
                f"{_milliseconds(sum(self.seconds) / ranks)} in the mean; rank {fullest} has "
                f"{_bytes(max(self.bytes))}, {_bytes(sum(self.bytes) / ranks)} in the mean",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it; the ranks of a table are None where all have some of it."""
        tables = {
            name: {
                "rows": each.use.rows,
                "dim": each.use.dim,
                "bytes": each.use.bytes(),
                "plan": type(each.plan).__name__,
                "ranks": None if each.ranks is None else list(each.ranks),
                "sent": each.sent,
                "seconds": each.seconds,
                "why": each.why,
            }
            for name, each in self.tables.items()
        }
        return {"tables": tables, "seconds": list(self.seconds), "bytes": list(self.bytes)}

    def digest(self) -> str:
        """Return a digest of tables and plans, by which ranks see that they planned alike; of no estimates."""
        rows = [(name, t["rows"], t["dim"], t["plan"], t["ranks"]) for name, t in self.to_dict()["tables"].items()]
        return hashlib.sha256(json.dumps([len(self.seconds), rows]).encode()).hexdigest()


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


# ---- What a plan costs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Option:
    """A plan of a table, and what it costs: ``seconds`` of every rank and those of the owners, by their ``shares``."""

    plan: Plan
    seconds: float
    owners_seconds: float
    sent: float
    ranks: slice | list[int]
    shares: np.ndarray
    bytes: np.ndarray
    messages: int

    def slowest(self) -> float:
        """Return the seconds of the rank that takes longest."""
        return self.seconds + self.owners_seconds * float(self.shares.max())

    def on(self, rank: int) -> _Option:
        """Return the option of a whole table with its rank."""
        return replace(self, plan=TableWise(rank), ranks=[rank], shares=np.ones(1))


def _option(use: Use, plan: Plan, ranks: int, machine: Machine) -> _Option:
    """Return what a plan of a table costs. One of a whole table without a rank is shared evenly: others balance it."""
    if isinstance(plan, Replicated):
        return _replicated(use, ranks, machine)
    where: slice | list[int] = slice(None)
    if isinstance(plan, RowWise):
        blocks = Blocks(use.rows if use.rows is not None else MOST_BLOCKS**2)
        each = _blocks(blocks.count, ranks)
        shares, held = each / blocks.count, each * (blocks.places * use.row_bytes if use.rows is not None else 0)
    elif isinstance(plan, ColumnWise):
        where = list(plan.ranks or ())
        shares = np.array([end - begin for begin, end in ColumnWise.columns(use.dim, len(where))]) / use.dim
        held = np.ceil(shares * use.bytes()).astype(np.int64)
    else:
        where = [] if plan.rank is None else [plan.rank]
        shares, held = np.array([1.0 if where else 1.0 / ranks]), np.array([use.bytes()])
    parts = len(shares) if isinstance(plan, ColumnWise) else 1
    by_rows = isinstance(plan, RowWise) or not use.pooled
    return _Option(plan, *_exchanged(use, ranks, machine, by_rows, parts), where, shares, held, _MESSAGES)


def _exchanged(use: Use, ranks: int, machine: Machine, by_rows: bool, parts: int) -> tuple[float, float, float]:
    """Return the seconds of every rank, those of the owners together, and the bytes that a rank sends."""
    width, away = use.dim * use.element_bytes, (ranks - 1) / ranks
    asked, results = (use.distinct, use.distinct) if by_rows else (use.ids, use.bags)
    ids_sent, results_sent = away * parts * asked * 4, away * results * width
    seconds = (ids_sent + results_sent) / machine.bytes_per_second
    owners = ranks * results_sent / machine.bytes_per_second
    if by_rows:
        # Ids are made distinct; what came is pooled, and so are gradients, all of it in caches.
        seconds += _read(use.ids, 0, machine) + 2 * use.ids * width / machine.copied_per_second
        read = _read(parts * use.distinct, width / parts, machine)
        owners += ranks * (read + _read(parts * use.distinct, 2 * use.row_bytes / parts, machine))
    else:
        # As one process on the whole batch: rows are pooled, gradients merged, rows updated.
        owners += ranks * 2 * _read(parts * use.ids, width / parts, machine)
        owners += _read(parts * _distinct_of_all(use, ranks), 2 * use.row_bytes / parts, machine)
    return seconds, owners, ids_sent + 2 * results_sent


def _replicated(use: Use, ranks: int, machine: Machine) -> _Option:
    assert use.rows is not None
    width = use.dim * use.element_bytes
    seconds = 2 * _read(use.ids, width, machine)
    if use.replicates_dense(ranks):
        sent = 2 * (ranks - 1) / ranks * use.rows * width
        seconds += use.rows * (width + 2 * use.row_bytes) / machine.copied_per_second
    else:
        sent = (ranks - 1) * use.distinct * (8 + width)
        seconds += _read(ranks * use.distinct, width, machine)
        seconds += _read(_distinct_of_all(use, ranks), 2 * use.row_bytes, machine)
    messages = 0 if use.replicates_dense(ranks) else _MESSAGES_OF_REPLICATED  # dense ones are among DDP's
    seconds += sent / machine.bytes_per_second
    return _Option(
        Replicated(), seconds, 0.0, sent, slice(None), np.zeros(ranks), np.full(ranks, use.bytes()), messages
    )


def _read(rows: float, row_bytes: float, machine: Machine) -> float:
    return rows / machine.rows_per_second + rows * row_bytes / machine.copied_per_second


def _distinct_of_all(use: Use, ranks: int) -> float:
    return min(ranks * use.distinct, float("inf") if use.rows is None else use.rows)


@functools.lru_cache(maxsize=64)
def _blocks(count: int, ranks: int) -> np.ndarray:
    """Return how many of a table's blocks each rank has, ``[W]``."""
    # A table of 16 S rows has S blocks.
    blocks = Blocks(16 * count)
    return np.array([blocks.begin(rank + 1, ranks) - blocks.begin(rank, ranks) for rank in range(ranks)])


# ---- The choice ------------------------------------------------------------------------------------------------------


def choose(
    uses: Sequence[Use],
    ranks: int,
    memory: int | None,
    machine: Machine,
    given: Mapping[str, Plan | str] | None = None,
    constraints: Mapping[str, Sequence[Plan | str]] | None = None,
) -> Planned:
    """
    Choose a plan for each table: the fastest that fits.

    Tables too large for a rank are split by rows; each other gets the plan in which a step takes the least time. Tables
    that one rank has go, the largest first, to the rank with the least to do. While the slowest rank takes more than 1.2
    times the mean, its largest such table is split by rows, as far as that makes the step shorter.

    Args:
        uses: the tables.
        ranks: W.
        memory: bytes of a rank for tables and states. None: they fit.
        machine: the constants of the model.
        given: plans that are not chosen, by table.
        constraints: the plans that a table may have, by table. Default: all but ColumnWise.

    Returns:
        The plans: the same wherever the arguments are the same.

    Raises:
        ValueError: nothing fits (the text has the table of :class:`Planned`); a plan that a table cannot have; an
            unknown table.

    Example:
        >>> from torchsparse_rec.distributed.machine import MACHINES
        >>> days = Use("days", rows=7, dim=16, element_bytes=4, row_bytes=128, ids=4096, distinct=7, bags=4096)
        >>> users = replace(days, name="users", rows=10**9, distinct=3000)
        >>> planned = choose([days, users], ranks=4, memory=10**11, machine=MACHINES["gloo"])
        >>> [type(each.plan).__name__ for each in planned.tables.values()]
        ['Replicated', 'RowWise']
    """
    if ranks < 1:
        raise ValueError(f"choose: ranks must be at least 1, got {ranks}")
    options = _options(uses, ranks, machine, given or {}, constraints or {})
    state = _State(options, ranks, float("inf") if memory is None else memory, machine)
    whole = []
    # Short tables first: those that all ranks have cost the least memory for what they save.
    for use in sorted(uses, key=lambda use: (use.bytes(), use.name)):
        option, why = state.fastest(use) if use.name not in (given or {}) else (options[use.name][1][0], "given")
        if option.plan == TableWise():
            whole.append((use, option, why))
        else:
            state.put(use, option, why)
    for use, option, why in sorted(whole, key=lambda each: (-each[1].owners_seconds, each[0].name)):
        state.put_whole(use, option, why)
    state.fit()
    state.balance()
    state.replicate_all()
    planned = state.planned()
    if max(planned.bytes) > state.memory:
        over = planned.bytes.index(max(planned.bytes))
        raise ValueError(
            f"shard: memory must hold the tables and their states, got {memory:,} bytes a rank, of which rank {over} "
            f"would need {max(planned.bytes):,}:\n{planned}"
        )
    return planned


def _options(
    uses: Sequence[Use],
    ranks: int,
    machine: Machine,
    given: Mapping[str, Plan | str],
    constraints: Mapping[str, Sequence[Plan | str]],
) -> dict[str, tuple[Use, list[_Option]]]:
    """Return each table's options, by name."""
    names = {use.name for use in uses}
    if len(names) != len(uses):
        raise ValueError(f"shard: names of tables must differ, got {[use.name for use in uses]}")
    for what, of in (("plan", given), ("constraints", constraints)):
        for name in of:
            if name not in names:
                raise ValueError(f"shard: {what} must name tables of the module, {sorted(names)}, got {name!r}")
    made = {}
    for use in uses:
        plans: Iterable[Plan | str]
        if use.name in given:
            if use.name in constraints:
                raise ValueError(f"shard: table {use.name!r} must have a plan or constraints, got both")
            plans = [given[use.name]]
        elif use.name in constraints:
            plans = constraints[use.name]
        else:
            plans = [RowWise(), TableWise()] + ([] if use.rows is None else [Replicated()])
        checked = [as_plan(use.name, plan, ranks, use.dim) for plan in plans]
        if not checked:
            raise ValueError(f"shard: constraints of table {use.name!r} must have a plan, got none")
        for plan in checked:
            _check(use, plan)
        made[use.name] = use, [_option(use, plan, ranks, machine) for plan in checked]
    return made


def _check(use: Use, plan: Plan) -> None:
    if use.rows is None and not isinstance(plan, (RowWise, TableWise)):
        raise ValueError(
            f"shard: the plan of table {use.name!r}, which grows, must be RowWise() or TableWise(), got {plan}"
        )
    if use.row_numbers and isinstance(plan, ColumnWise):
        raise ValueError(
            f"shard: the plan of table {use.name!r} must not be {plan}: its optimizer has one number for each row, and "
            "slices of the row would each follow another; use RowWise() or TableWise()"
        )


class _State:
    """
    What has been chosen so far, and what each rank has of it.

    Args:
        options: of each table.
        ranks: W.
        memory: bytes of a rank.
        machine: the constants of the model.
    """

    def __init__(
        self, options: Mapping[str, tuple[Use, list[_Option]]], ranks: int, memory: float, machine: Machine
    ) -> None:
        self.options, self.ranks, self.memory, self.machine = options, ranks, memory, machine
        self.chosen: dict[str, tuple[Use, _Option, str]] = {}
        self.seconds, self.bytes = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
        # What is left of a rank's memory if no table is replicated that need not be.
        self.spare = memory - sum(self._least_bytes(use, of) for use, of in options.values())

    def _least_bytes(self, use: Use, options: Sequence[_Option]) -> float:
        if all(isinstance(each.plan, Replicated) for each in options):
            return use.bytes()
        rows = self._by_rows(use)
        return use.bytes() / self.ranks if rows is None else float(rows.bytes.max())

    def _by_rows(self, use: Use) -> _Option | None:
        """Return the option that splits a table by rows, if it may and can be split."""
        found = (each for each in self.options[use.name][1] if isinstance(each.plan, RowWise))
        return next((each for each in found if use.rows is None or each.bytes.max() < use.bytes()), None)

    def fastest(self, use: Use) -> tuple[_Option, str]:
        """Return the option that takes the least time of those that fit, and why."""
        options = self.options[use.name][1]
        if len(options) == 1:
            return options[0], "all that constraints allow"
        rows = next((each for each in options if isinstance(each.plan, RowWise)), None)
        if use.rows is None and rows is not None:
            return rows, "it grows"
        fit = [each for each in options if self._fits(use, each)]
        best = min(fit or options, key=_Option.slowest)
        if isinstance(best.plan, Replicated):
            self.spare -= use.bytes() * (1 - 1 / self.ranks)
        others = (
            f"{type(each.plan).__name__} {_milliseconds(each.slowest()) if each in fit else 'does not fit'}"
            for each in options
            if each is not best
        )
        return best, f"{'the fastest' if fit else 'nothing fits'}: {', '.join(others)}"

    def _fits(self, use: Use, option: _Option) -> bool:
        if isinstance(option.plan, Replicated):
            return use.bytes() * (1 - 1 / self.ranks) <= self.spare
        return int(option.bytes.max()) <= self.memory

    def put(self, use: Use, option: _Option, why: str) -> None:
        """Choose an option for a table, instead of what was chosen before."""
        if use.name in self.chosen:
            self._add(self.chosen[use.name][1], -1)
        self._add(option, 1)
        self.chosen[use.name] = use, option, why

    def _add(self, option: _Option, sign: int) -> None:
        self.seconds += sign * option.seconds
        self.seconds[option.ranks] += sign * option.owners_seconds * option.shares
        self.bytes[option.ranks] += sign * option.bytes

    def put_whole(self, use: Use, option: _Option, why: str) -> None:
        """Choose the rank that has a table: of those with room the one with the least to do."""
        room = self.bytes + use.bytes() <= self.memory
        rows = self._by_rows(use)
        if room.any():
            self.put(use, option.on(int(np.where(room, self.seconds, np.inf).argmin())), why)
        elif rows is not None:
            self.put(use, rows, "no rank has room for all of it")
        else:
            self.put(use, option.on(int(self.bytes.argmin())), why)

    def fit(self) -> None:
        """Split tables by rows, the largest of the fullest rank first, until every rank has room for what it has."""
        whole = self._splittable(lambda use, option: use.bytes())
        while self.bytes.max() > self.memory:
            rank = int(self.bytes.argmax())
            queue = whole[rank] or whole[-1]
            if not queue:
                return
            use = self.chosen[queue.pop()][0]
            rows = self._by_rows(use)
            assert rows is not None
            self.put(use, rows, f"rank {rank} has no room for all of it")

    def balance(self) -> None:
        """Split tables by rows, the largest of the slowest rank first, as far as that makes the step shorter."""
        whole = self._splittable(lambda use, option: option.slowest())
        best, undo = self.seconds.max(), []
        while self.seconds.max() > _BALANCE * self.seconds.mean():
            rank = int(self.seconds.argmax())
            if not whole[rank]:
                break
            use, option, why = self.chosen[whole[rank].pop()]
            rows = self._by_rows(use)
            if rows is None or rows.slowest() >= option.slowest():
                continue
            self.put(use, rows, f"rank {rank} had more to do than others")
            if self.bytes.max() > self.memory:
                self.put(use, option, why)
                continue
            undo.append((use, option, why))
            if self.seconds.max() < best:
                best = self.seconds.max()
                undo.clear()
        for each in reversed(undo):
            self.put(*each)

    def _splittable(self, size: Callable[[Use, _Option], float]) -> list[list[str]]:
        """Return the tables that each rank has whole and that can be split, the largest last; at last all ranks'."""
        found: list[list[str]] = [[] for _ in range(self.ranks + 1)]
        for use, option, _ in sorted(self.chosen.values(), key=lambda each: (size(each[0], each[1]), each[0].name)):
            if isinstance(option.plan, (TableWise, Replicated)) and self._by_rows(use) is not None:
                rank = option.plan.rank if isinstance(option.plan, TableWise) else None
                found[-1 if rank is None else rank].append(use.name)
        return found

    def replicate_all(self) -> None:
        """Replicate all tables, if they may and fit, and if what messages take is more than what that takes."""
        found = [(use, each) for use, of in self.options.values() for each in of if isinstance(each.plan, Replicated)]
        if len(found) < len(self.options) or sum(use.bytes() for use, _ in found) > self.memory:
            return
        messages = sum({each.messages for _, each in found}) * self.machine.message_seconds
        if sum(each.seconds for _, each in found) + messages < self.seconds.max() + self._messages():
            for use, each in found:
                if self.chosen[use.name][1] is not each:
                    self.put(use, each, "it saves the messages of a step")

    def _messages(self) -> float:
        """Return the seconds that messages take to begin."""
        return sum({option.messages for _, option, _ in self.chosen.values()}) * self.machine.message_seconds

    def planned(self) -> Planned:
        """Return what was chosen."""
        tables = {
            name: Chosen(use, option.plan, option.sent, option.slowest(), why)
            for name, (use, option, why) in ((name, self.chosen[name]) for name in self.options)
        }
        return Planned(tables, (self.seconds + self._messages()).tolist(), self.bytes.tolist())
