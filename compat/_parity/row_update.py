"""Of the parity check: ``tf.raw_ops.ResourceSparseApply*``, the optimizers of rows."""

from __future__ import annotations

from .case import Operator

OPERATORS: dict[str, Operator] = {}
