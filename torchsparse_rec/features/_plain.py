"""Arguments as Python's own numbers and texts, which JSON holds and which are equal whatever they were given as."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np


def set_field(x: Any, field: str, value: Any) -> None:
    """Of a frozen dataclass that is being made."""
    object.__setattr__(x, field, value)


def make_fields_plain(x: Any) -> None:
    """Of a frozen dataclass that is being made: numpy's scalars, also in lists and tuples."""
    for field in fields(x):
        value = getattr(x, field.name)
        new = plain(value)
        if new is not value:
            set_field(x, field.name, new)


def plain(value: Any) -> Any:
    """A numpy scalar as Python's, in a list or tuple too; all else as it is."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)) and any(isinstance(item, (np.generic, list, tuple)) for item in value):
        return type(value)(map(plain, value))
    return value
