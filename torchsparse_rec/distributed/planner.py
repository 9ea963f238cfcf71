"""The plan of each table without a given one: the fastest that fits, by a model of a step's time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from .cost import Option, expected_distinct, option
from .machine import Machine
from .plan import Chosen, ColumnWise, Planned, Replicated, RowWise, TablePlan, TableWise, Use, as_plan, milliseconds

__all__ = ["Chosen", "Planned", "Use", "choose", "expected_distinct"]

# The slowest rank may take so many times the mean; else tables of its own are split by rows.
_BALANCE = 1.2


def choose(
    uses: Sequence[Use],
    ranks: int,
    memory: int | None,
    machine: Machine,
    given: Mapping[str, TablePlan | str] | None = None,
    constraints: Mapping[str, Sequence[TablePlan | str]] | None = None,
) -> Planned:
    """
    Choose a plan for each table: the fastest that fits.

    Tables too large for a rank are split by rows; each other gets the plan in which a step takes the least time.
    Tables that one rank has go, the largest first, to the rank with the least to do. While the slowest rank takes more
    than 1.2 times the mean, its largest such table is split by rows, as far as that makes the step shorter.

    Args:
        uses: the tables.
        ranks: the number of ranks, W.
        memory: the bytes of a rank for tables and states. None: they fit.
        machine: the constants of the model.
        given: the plans that are not chosen, by table.
        constraints: the plans that a table may have, by table; if there are several, ColumnWise is left out where rows
            must stay whole. Default: all that suit it, except ColumnWise.

    Returns:
        The plans: the same wherever the arguments are the same.

    Raises:
        ValueError: nothing fits (the text has the table of :class:`Planned`); a plan that a table cannot have; an
            unknown table.

    Example:
        >>> import dataclasses
        >>> from torchsparse_rec.distributed.machine import MACHINES
        >>> days = Use("days", rows=7, dim=16, element_bytes=4, row_bytes=128, ids=4096, distinct=7, bags=4096)
        >>> users = dataclasses.replace(days, name="users", rows=10**9, distinct=3000)
        >>> planned = choose([days, users], ranks=4, memory=10**11, machine=MACHINES["gloo"])
        >>> [type(each.plan).__name__ for each in planned.tables.values()]
        ['Replicated', 'RowWise']
    """
    if ranks < 1:
        raise ValueError(f"choose: ranks must be at least 1, got {ranks}")
    options = _options(uses, ranks, machine, given or {}, constraints or {})
    state = _State(options, ranks, float("inf") if memory is None else memory, machine)
    whole: list[tuple[Use, Option, str]] = []
    # Short tables first: replicating them costs the least memory for the time saved.
    for use in sorted(uses, key=lambda use: (use.bytes(), use.name)):
        best, why = (options[use.name][1][0], "given") if use.name in (given or {}) else state.fastest(use)
        if best.plan == TableWise():
            whole.append((use, best, why))
        else:
            state.put(use, best, why)

    def order(each: tuple[Use, Option, str]) -> tuple[bool, float, str]:
        # Where room is short, tables that cannot be split come first.
        return memory is not None and state.by_rows(each[0]) is not None, -each[1].owners_seconds, each[0].name

    for use, best, why in sorted(whole, key=order):
        state.put_whole(use, best, why)
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
    given: Mapping[str, TablePlan | str],
    constraints: Mapping[str, Sequence[TablePlan | str]],
) -> dict[str, tuple[Use, list[Option]]]:
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
        plans: Iterable[TablePlan | str]
        if use.name in given:
            if use.name in constraints:
                raise ValueError(f"shard: table {use.name!r} must have a plan or constraints, got both")
            plans = [given[use.name]]
        elif use.name in constraints:
            plans = constraints[use.name]
        else:
            plans = (RowWise(), TableWise(), *(() if use.rows is None else (Replicated(),)))
            plans = (TableWise(),) if _is_too_long(use) else plans
        checked = [as_plan(use.name, plan, ranks, use.dim) for plan in plans]
        if use.whole_rows and use.name in constraints:
            checked = [plan for plan in checked if not isinstance(plan, ColumnWise)] or checked
        if not checked:
            raise ValueError(f"shard: constraints of table {use.name!r} must have a plan, got none")
        for plan in checked:
            _check(use, plan)
        made[use.name] = use, [option(use, plan, ranks, machine) for plan in checked]
    return made


def _check(use: Use, plan: TablePlan) -> None:
    if use.rows is None and not isinstance(plan, (RowWise, TableWise)):
        raise ValueError(
            f"shard: the plan of table {use.name!r}, which grows, must be RowWise() or TableWise(), got {plan}"
        )
    if _is_too_long(use) and isinstance(plan, (RowWise, Replicated)):
        raise ValueError(
            f"shard: table {use.name!r} must have fewer than 2^31 rows to be RowWise or Replicated, got {use.rows}: "
            "make several tables of it, or use TableWise() or ColumnWise()"
        )
    if use.whole_rows and isinstance(plan, ColumnWise):
        raise ValueError(
            f"shard: the plan of table {use.name!r} must not be {plan}: its max_norm or its optimizer takes each row "
            "as a whole, of which each rank would have a part; use RowWise() or TableWise()"
        )


def _is_too_long(use: Use) -> bool:
    """Say whether a table has more rows than :func:`route` takes."""
    return use.rows is not None and use.rows >= 2**31


class _State:
    """
    The choices so far, and each rank's share of them.

    Args:
        options: the options of each table.
        ranks: the number of ranks, W.
        memory: bytes of a rank.
        machine: the constants of the model.
    """

    def __init__(
        self, options: Mapping[str, tuple[Use, list[Option]]], ranks: int, memory: float, machine: Machine
    ) -> None:
        self.options, self.ranks, self.memory, self.machine = options, ranks, memory, machine
        self.chosen: dict[str, tuple[Use, Option, str]] = {}
        self.seconds, self.bytes = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
        # The rest of a rank's memory if no table is replicated that need not be.
        self.spare = memory - sum(self._least_bytes(use, of) for use, of in options.values())

    def _least_bytes(self, use: Use, options: Sequence[Option]) -> float:
        if all(isinstance(each.plan, Replicated) for each in options):
            return use.bytes()
        rows = self.by_rows(use)
        return use.bytes() / self.ranks if rows is None else rows.most_bytes()

    def by_rows(self, use: Use) -> Option | None:
        """Return the option that splits a table by rows, if it may and can be split."""
        found = (each for each in self.options[use.name][1] if isinstance(each.plan, RowWise))
        return next((each for each in found if use.rows is None or each.most_bytes() < use.bytes()), None)

    def fastest(self, use: Use) -> tuple[Option, str]:
        """Return the fastest option that fits, and why."""
        options = self.options[use.name][1]
        kinds = {type(each.plan): each for each in reversed(options)}
        if len(options) == 1:
            return options[0], "all that it may have"
        if self.ranks == 1 and TableWise in kinds:
            return kinds[TableWise], "there is one rank"
        if use.rows is None and RowWise in kinds:
            return kinds[RowWise], "it grows"
        fit = [each for each in options if self._fits(use, each)]
        best = min(fit or options, key=Option.slowest)
        if isinstance(best.plan, Replicated):
            self.spare -= use.bytes() * (1 - 1 / self.ranks)
        others = (
            f"{type(each.plan).__name__} {milliseconds(each.slowest()) if each in fit else 'does not fit'}"
            for each in options
            if each is not best
        )
        return best, f"{'the fastest' if fit else 'none fits'}: {', '.join(others)}"

    def _fits(self, use: Use, option: Option) -> bool:
        if isinstance(option.plan, Replicated):
            return use.bytes() * (1 - 1 / self.ranks) <= self.spare
        return option.most_bytes() <= self.memory

    def put(self, use: Use, option: Option, why: str) -> None:
        """Choose an option for a table, instead of an earlier one."""
        if use.name in self.chosen:
            self._add(self.chosen[use.name][1], -1)
        self._add(option, 1)
        self.chosen[use.name] = use, option, why

    def _add(self, option: Option, sign: int) -> None:
        self.seconds += sign * option.seconds
        self.seconds[option.spread.ranks] += sign * option.owners_seconds * option.spread.shares
        self.bytes[option.spread.ranks] += sign * option.unit_bytes * option.spread.units

    def put_whole(self, use: Use, option: Option, why: str) -> None:
        """Choose the rank that has a table: the one with the least to do among the ranks with room."""
        room = self.bytes + use.bytes() <= self.memory
        rows = self.by_rows(use)
        if room.any():
            self.put(use, option.on(int(np.where(room, self.seconds, np.inf).argmin())), why)
        elif rows is not None:
            self.put(use, rows, "no rank has room for all of it")
        else:
            self.put(use, option.on(int(self.bytes.argmin())), why)

    def fit(self) -> list[tuple[Use, Option, str]]:
        """
        Split tables by rows, the largest of the fullest rank first, until every rank has room for its tables.

        Returns:
            The earlier choices for them.
        """
        before: list[tuple[Use, Option, str]] = []
        whole = self._splittable(Option.most_bytes) if self.bytes.max() > self.memory else []
        while self.bytes.max() > self.memory:
            rank = int(self.bytes.argmax())
            queue = whole[rank] or whole[-1]
            if not queue:
                break
            before.append(self.chosen[queue.pop()])
            use = before[-1][0]
            rows = self.by_rows(use)
            assert rows is not None
            self.put(use, rows, f"rank {rank} has no room for all of it")
        return before

    def balance(self) -> None:
        """Split tables by rows, the largest of the slowest rank first, as far as that makes the step shorter."""
        whole = self._splittable(Option.slowest)
        best, undo = self.seconds.max(), []
        while self.seconds.max() > _BALANCE * self.seconds.mean():
            rank = int(self.seconds.argmax())
            if not whole[rank]:
                break
            use, before, why = self.chosen[whole[rank].pop()]
            rows = self.by_rows(use)
            assert rows is not None
            if rows.slowest() >= before.slowest():
                continue
            self.put(use, rows, f"rank {rank} had more to do than others")
            # Ranks that are full have no room for their part of it, unless tables of theirs are split too.
            changed = [(use, before, why), *self.fit()]
            if self.bytes.max() > self.memory:
                self._put_back(changed)
                continue
            undo += changed
            if self.seconds.max() < best:
                best = self.seconds.max()
                undo.clear()
        self._put_back(undo)

    def _put_back(self, before: Sequence[tuple[Use, Option, str]]) -> None:
        """Restore earlier choices, the last first."""
        for each in reversed(before):
            self.put(*each)

    def _splittable(self, size: Callable[[Option], float]) -> list[list[str]]:
        """Return the tables that each rank has whole and that can be split, the largest last; at last all ranks'."""
        found: list[list[str]] = [[] for _ in range(self.ranks + 1)]
        for use, each, _ in sorted(self.chosen.values(), key=lambda each: (size(each[1]), each[0].name)):
            if isinstance(each.plan, (TableWise, Replicated)) and self.by_rows(use) is not None:
                rank = each.plan.rank if isinstance(each.plan, TableWise) else None
                found[-1 if rank is None else rank].append(use.name)
        return found

    def replicate_all(self) -> None:
        """Replicate all tables, if they may and fit, and if what messages take is more than what that takes."""
        copies = {
            name: each
            for name, (_, of) in self.options.items()
            for each in reversed(of)
            if isinstance(each.plan, Replicated)
        }
        if len(copies) < len(self.options) or sum(each.unit_bytes for each in copies.values()) > self.memory:
            return
        seconds = sum(each.seconds for each in copies.values()) + self._messages(copies.values())
        if seconds < self.seconds.max() + self._messages(each for _, each, _ in self.chosen.values()):
            for name, each in copies.items():
                if self.chosen[name][1] is not each:
                    self.put(self.options[name][0], each, "it saves the messages of a step")

    def _messages(self, options: Iterable[Option]) -> float:
        """Return the seconds that the messages of a step take, however short they are."""
        return sum({each.messages for each in options}) * self.machine.message_seconds

    def planned(self) -> Planned:
        """Return the choices."""
        chosen = {name: self.chosen[name] for name in self.options}
        tables = {name: Chosen(use, o.plan, o.sent, o.slowest(), why) for name, (use, o, why) in chosen.items()}
        seconds = self.seconds + self._messages(each for _, each, _ in chosen.values())
        return Planned(tables, seconds.tolist(), self.bytes.tolist())
