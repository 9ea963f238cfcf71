"""Conversion of arguments to plain Python numbers and strings, which JSON can hold and which compare equal."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np


def set_field(x: Any, field: str, value: Any) -> None:
    """Set a field of a frozen dataclass, in its ``__post_init__``."""
    object.__setattr__(x, field, value)


def make_fields_plain(x: Any) -> None:
    """Convert numpy scalars in the fields of a frozen dataclass, in its ``__post_init__``."""
    for field in fields(x):
        value = getattr(x, field.name)
        new = plain(value)
        if new is not value:
            set_field(x, field.name, new)


def plain(value: Any) -> Any:
    """Convert a numpy scalar to a Python number, also in lists and tuples; return other values unchanged."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)) and any(isinstance(item, (np.generic, list, tuple)) for item in value):
        return type(value)(map(plain, value))
    return value
