"""Of the parity check: ``tf.sparse`` and ragged tensors."""

from __future__ import annotations

from .case import Operator

OPERATORS: dict[str, Operator] = {}
