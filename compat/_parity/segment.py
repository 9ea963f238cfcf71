"""Of the parity check: ``tf.math.segment_*`` and ``tf.math.unsorted_segment_*``."""

from __future__ import annotations

from .case import Operator

OPERATORS: dict[str, Operator] = {}
