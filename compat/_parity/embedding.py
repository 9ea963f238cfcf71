"""Of the parity check: the embedding lookups."""

from __future__ import annotations

from .case import Operator

OPERATORS: dict[str, Operator] = {}
