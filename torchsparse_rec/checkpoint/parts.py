"""
The protocol by which modules describe their tables, so that a checkpoint has them whole whichever rank keeps a part.

A module with tables is a :class:`HasTables`; one whose tables are split over ranks is a :class:`SplitOverRanks` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch.nn import Module, Parameter

from ..tables.boxes import Kept
from ..variable.rows import TableRows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Growing", "HasTables", "KeptKeys", "Over", "SavedRows", "SavedTable", "SplitOverRanks"]


@runtime_checkable
class HasTables(Protocol):
    """A module that looks up tables, its own or its submodules'."""

    def saved_tables(self) -> list[SavedTable | SavedRows]:
        """Return the tables, in the order in which checkpoints list them."""


@runtime_checkable
class SplitOverRanks(HasTables, Protocol):
    """A module whose tables are split over ranks."""

    def saved_over(self) -> Over:
        """Return the ranks."""


@dataclass(frozen=True)
class SavedTable:
    """
    A table with a fixed number of rows.

    Args:
        key: the name of its weight in the module's state.
        owner: the module whose ``stored_weight()`` is this process's part of the table.
        kept: the place of that part in the whole.
        is_copied: whether all ranks keep the same, so that the first writes it. Default True.
        by_columns: whether ranks keep columns of the same rows: no state has one number for a row then. Default False.
    """

    key: str
    owner: Any
    kept: Kept
    is_copied: bool = True
    by_columns: bool = False

    @property
    def weight(self) -> Parameter:
        """This process's part of the table."""
        return self.owner.stored_weight()  # type: ignore[no-any-return]


class Growing(Protocol):
    """A module that is a table that grows."""

    @property
    def table_rows(self) -> TableRows:
        """Its rows."""

    def stored_weight(self) -> Parameter:
        """Return the stored rows of the first tier."""

    def settled(self) -> AbstractContextManager[None]:
        """Hold off other threads; all keys have rows inside."""

    def replacing(self) -> AbstractContextManager[None]:
        """Hold off other threads while all rows are replaced."""

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules in it, whose states are of its rows."""


@dataclass(frozen=True)
class SavedRows:
    """
    A table that grows.

    Args:
        key: the name of its weight in the module's state.
        table: the module that is the table.
        keys: the keys that this rank keeps. Default None: all, as every rank.
    """

    key: str
    table: Growing
    keys: KeptKeys | None = None


@dataclass(frozen=True)
class KeptKeys:
    """
    The keys that a rank keeps of a table that grows.

    Args:
        where: the distribution of keys over ranks: where it is equal, each rank has the same keys.
        blocks: the first of the blocks whose keys this rank has, and the end of the last.
    """

    where: str
    blocks: tuple[int, int]


@dataclass(frozen=True)
class Over:
    """
    The ranks over which a module's tables are split.

    Args:
        name: the module's name, for errors.
        group: the ranks.
        announce: a function that announces this rank's next action to the others, and whether the model trains. It
            raises ``RuntimeError`` if they do something else.
    """

    name: str
    group: ProcessGroup
    announce: Callable[[str, bool], object]
