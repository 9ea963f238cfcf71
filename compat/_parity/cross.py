"""Of the parity check: crosses of columns."""

from __future__ import annotations

from .case import Operator

OPERATORS: dict[str, Operator] = {}
