"""Of the parity check: the Keras layers that hash."""

from __future__ import annotations

from .case import Operator

OPERATORS: dict[str, Operator] = {}
