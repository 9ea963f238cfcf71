"""Where a table is: the plans that a user may give."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ColumnWise", "Plan", "Replicated", "RowWise", "TableWise", "as_plan"]


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
        rank: that has it. Default None: the one with the least to do.

    Example:
        >>> plan = {"countries": TableWise(), "items": TableWise(rank=1)}
    """

    rank: int | None = None


@dataclass(frozen=True)
class ColumnWise:
    """
    A table whose columns are split.

    Args:
        ranks: of the first, second, ... part of its columns. Default None: all ranks, or as many as have columns.

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


Plan = RowWise | TableWise | ColumnWise | Replicated

# TorchRec's names.
_NAMES: dict[str, Plan] = {
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


def as_plan(table: str, given: Plan | str, ranks: int, dim: int) -> Plan:
    """
    Return a table's plan, given as such or by TorchRec's name for it.

    Args:
        table: its name, for errors.
        given: a plan, or ``"row_wise"``, ``"table_wise"``, ``"column_wise"``, ``"data_parallel"``.
        ranks: W.
        dim: D.

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
