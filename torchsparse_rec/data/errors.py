"""The error that names a file and a place in it: the readers of all formats share it."""

from __future__ import annotations

import os

from ..files import PathLike

__all__ = ["DataError"]


class DataError(ValueError):
    """
    An error in a file: at some place its content is wrong.

    Args:
        path: the file's name.
        offset: the place in the file: a byte, counted from 0, or for text formats a line, counted from 1. None: the
            file as a whole.
        problem: the fault that was found there, and what was expected.
        unit: ``"byte"``, or ``"line"`` for text formats.

    Example:
        >>> from torchsparse_rec.data import DataError
        >>> print(DataError("train.txt", 3, "expected 40 fields, got 39", unit="line"))
        train.txt: line 3: expected 40 fields, got 39
    """

    def __init__(self, path: PathLike, offset: int | None, problem: str, *, unit: str = "byte"):
        self.path = os.fsdecode(path)
        self.offset = offset
        self.problem = problem
        self.unit = unit
        place = "" if offset is None else f" {unit} {offset}:"
        super().__init__(f"{self.path}:{place} {problem}")

    def __reduce__(self) -> tuple:
        """Pickle the error as its arguments, so that a worker process can hand it to the main one."""
        return _data_error, (self.path, self.offset, self.problem, self.unit)


def _data_error(path: str, offset: int | None, problem: str, unit: str) -> DataError:
    return DataError(path, offset, problem, unit=unit)
