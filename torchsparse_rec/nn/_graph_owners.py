"""Modules that operators of compiled graphs find by a number."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch.nn import Parameter

from .plan import LookupPlan


class Owner(Protocol):
    """A module with tables, as lookups need it."""

    def stored_weights(self) -> Sequence[Parameter]: ...

    def readers_of(self, tables: tuple[int, ...]) -> Any: ...

    def _fused_lookups(self, plan: LookupPlan, tables: tuple[int, ...]) -> Any: ...


_numbers = itertools.count()
_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


def register_owner(module: Owner) -> int:
    """Return a number by which operators find the module."""
    number = next(_numbers)
    _owners[number] = module
    return number


def owner_of(number: int) -> Owner:
    """Return the module of a number."""
    return _owners[number]
