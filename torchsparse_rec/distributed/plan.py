"""The places of tables: the plans that a user may give, and the choices."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..typing import PlanName

__all__ = [
    "Chosen",
    "ColumnWise",
    "Planned",
    "Replicated",
    "RowWise",
    "TablePlan",
    "TableWise",
    "Use",
    "as_plan",
    "milliseconds",
]


@dataclass(frozen=True)
class RowWise:
    """
    A table whose rows are split over all ranks.

    Example:
        >>> plan = {"users": RowWise()}  # as distributed.shard(module, mesh, plan) takes it
    """


@dataclass(frozen=True)
class TableWise:
    """
    A table that one rank has.

    Args:
        rank: the rank that has it. Default None: the one with the least to do.

    Example:
        >>> plan = {"countries": TableWise(), "items": TableWise(rank=1)}
    """

    rank: int | None = None


@dataclass(frozen=True)
class ColumnWise:
    """
    A table whose columns are split, so that no rank sees a whole row.

    Refused are ``max_norm`` and optimizers whose steps depend on whole rows. These are optimizers with a number or a
    norm for each row, ``Ftrl``, and most others with ``lazy=True``, which skips rows of gradient zero.

    Args:
        ranks: the ranks of the first, second, ... part of its columns. Default None: all ranks, or as many as have
            columns.

    Example:
        >>> ColumnWise([2, 0])
        ColumnWise(ranks=(2, 0))
        >>> ColumnWise.columns(10, 4)  # of four ranks
        [(0, 3), (3, 6), (6, 9), (9, 10)]
    """

    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None:
            object.__setattr__(self, "ranks", tuple(self.ranks))

    @staticmethod
    def columns(dim: int, parts: int) -> list[tuple[int, int]]:
        """Return where each part of the columns begins and ends, as ``torch.chunk`` cuts them."""
        each = -(-dim // parts)
        return [(min(dim, k * each), min(dim, (k + 1) * each)) for k in range(parts)]


@dataclass(frozen=True)
class Replicated:
    """
    A table that every rank has whole.

    Example:
        >>> plan = {"weekdays": Replicated()}
    """


TablePlan = RowWise | TableWise | ColumnWise | Replicated
#: A plan for all tables or some, as :func:`~torchsparse_rec.distributed.shard` takes it.
Plans = Literal["auto"] | PlanName | TablePlan | Mapping[str, Literal["auto"] | PlanName | TablePlan]

# TorchRec's names.
_NAMES: dict[str, TablePlan] = {
    "row_wise": RowWise(),
    "table_wise": TableWise(),
    "column_wise": ColumnWise(),
    "data_parallel": Replicated(),
}
_OF_TWO_DIMENSIONS = "a mesh of two dimensions, which is not supported: use"
_REFUSED = {
    "table_row_wise": f"is for {_OF_TWO_DIMENSIONS} RowWise() or TableWise(rank)",
    "table_column_wise": f"is for {_OF_TWO_DIMENSIONS} ColumnWise(ranks)",
    "grid_shard": f"is for {_OF_TWO_DIMENSIONS} RowWise() or ColumnWise(ranks)",
}


def as_plan(table: str, given: TablePlan | str, ranks: int, dim: int) -> TablePlan:
    """
    Return a table's plan, given as such or by TorchRec's name for it.

    Args:
        table: the name of the table, for errors.
        given: a plan, or ``"row_wise"``, ``"table_wise"``, ``"column_wise"``, ``"data_parallel"``.
        ranks: the number of ranks, W.
        dim: the dimension of its rows, D.

    Returns:
        The plan. One by columns names its ranks; one of a whole table does if it was given with a rank.

    Raises:
        ValueError: no such plan; a rank that the job does not have; more ranks than have columns.
        TypeError: no plan, or a rank that is no integer.

    Example:
        >>> as_plan("users", "row_wise", ranks=4, dim=16)
        RowWise()
        >>> as_plan("users", ColumnWise(), ranks=4, dim=16)
        ColumnWise(ranks=(0, 1, 2, 3))
        >>> as_plan("users", TableWise(4), ranks=4, dim=16)
        Traceback (most recent call last):
        ValueError: shard: the plan of table 'users' must name ranks in [0, 4), got 4
    """
    if isinstance(given, str):
        name = given.lower()
        if name in _REFUSED:
            raise ValueError(f"shard: the plan of table {table!r}, {given!r}, {_REFUSED[name]}")
        if name not in _NAMES:
            raise ValueError(f"shard: the plan of table {table!r} must be one of {', '.join(_NAMES)}, got {given!r}")
        given = _NAMES[name]
    if isinstance(given, TableWise):
        return given if given.rank is None else TableWise(*_checked(table, [given.rank], ranks))
    if isinstance(given, ColumnWise):
        filled = sum(begin < end for begin, end in ColumnWise.columns(dim, ranks))
        parts = _checked(table, range(filled) if given.ranks is None else given.ranks, ranks)
        if not parts or len(set(parts)) != len(parts) or any(b == e for b, e in ColumnWise.columns(dim, len(parts))):
            raise ValueError(
                f"shard: the plan of table {table!r} must name ranks, each once, and no more than get some of "
                f"its {dim} columns when torch.chunk cuts them, got {list(parts)}"
            )
        return ColumnWise(parts)
    if not isinstance(given, (RowWise, Replicated)):
        raise TypeError(
            f"shard: the plan of table {table!r} must be RowWise(), TableWise(), ColumnWise(), Replicated() or one of "
            f"{', '.join(_NAMES)}, got {given!r}"
        )
    return given


def _checked(table: str, named: Sequence[int], ranks: int) -> tuple[int, ...]:
    for rank in named:
        try:
            operator.index(rank)
        except TypeError:
            raise TypeError(f"shard: the plan of table {table!r} must name ranks by integers, got {rank!r}") from None
        if not 0 <= rank < ranks:
            raise ValueError(f"shard: the plan of table {table!r} must name ranks in [0, {ranks}), got {rank}")
    return tuple(map(operator.index, named))


# ---- What was chosen -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """
    A table and its use in a step.

    Args:
        name: the name of the table.
        rows: the number of rows, V; None for a table that grows.
        dim: the dimension of the rows, D.
        element_bytes: the bytes of an element.
        row_bytes: the bytes of a row with its optimizer's states.
        ids: the number of ids of a rank's batch, all features together.
        distinct: the number of distinct ids among these, from an example batch or :func:`expected_distinct`.
        bags: the number of results of a rank's batch, all features together: as many as ids where nothing is pooled.
        pooled: whether ids are pooled.
        whole_rows: whether rows must not be cut into columns, because ``max_norm`` or the optimizer needs whole rows.
        wire_bytes: the bytes of an element on the way; None: as in memory.

    Example:
        >>> Use("users", rows=1000, dim=16, element_bytes=4, row_bytes=128, ids=4096, distinct=612, bags=4096).bytes()
        128000
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
    whole_rows: bool = False
    wire_bytes: int | None = None

    def bytes(self) -> int:
        """Return how many bytes the whole table takes with its states; 0 for a table that grows."""
        return (self.rows or 0) * self.row_bytes

    def width(self) -> int:
        """Return the bytes of a row without states."""
        return self.dim * self.element_bytes

    def width_on_the_way(self) -> int:
        """Return the bytes of a row, or a result, on the way."""
        return self.dim * (self.element_bytes if self.wire_bytes is None else self.wire_bytes)

    def distinct_of_all(self, ranks: int) -> float:
        """Return how many different ids all ranks' batches have, at most."""
        return ranks * self.distinct if self.rows is None else min(ranks * self.distinct, self.rows)


@dataclass(frozen=True)
class Chosen:
    """
    The choice for a table.

    Args:
        use: the table.
        plan: the place of the table.
        sent: the bytes that a rank sends for it in a step, the mean of all ranks.
        seconds: the seconds of a step on the rank that takes longest for it, by the model.
        why: the reason, in words.

    Example:
        >>> from torchsparse_rec.distributed.planner import Use
        >>> use = Use("days", rows=7, dim=16, element_bytes=4, row_bytes=128, ids=4096, distinct=7, bags=4096)
        >>> Chosen(use, Replicated(), sent=448.0, seconds=1e-4, why="given").plan
        Replicated()
    """

    use: Use
    plan: TablePlan
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
    The plans of all tables, and each rank's parts of them: printable.

    Args:
        tables: the choices by the tables' names, in the given order.
        seconds: the seconds of a step, of each rank, by the model.
        bytes: the bytes of each rank, tables and states.

    Example:
        >>> from torchsparse_rec.distributed.machine import MACHINES
        >>> from torchsparse_rec.distributed.planner import Use, choose
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
                    milliseconds(each.seconds),
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
                f"{ranks} ranks: a step takes {milliseconds(max(self.seconds))} on rank {slowest}, "
                f"{milliseconds(sum(self.seconds) / ranks)} in the mean; rank {fullest} has "
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
        """Return a digest of tables and plans, without estimates: ranks compare it to check that they planned alike."""
        rows = [(name, t["rows"], t["dim"], t["plan"], t["ranks"]) for name, t in self.to_dict()["tables"].items()]
        return hashlib.sha256(json.dumps([len(self.seconds), rows]).encode()).hexdigest()


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, in words."""
    return f"{1e3 * seconds:.3g} ms"
