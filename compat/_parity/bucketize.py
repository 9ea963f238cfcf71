"""Of the parity check: ``tf.raw_ops.Bucketize``."""

from __future__ import annotations

from .case import Operator

OPERATORS: dict[str, Operator] = {}
