"""Of the parity check: IndexedSlices."""

from __future__ import annotations

from .case import Operator

OPERATORS: dict[str, Operator] = {}
