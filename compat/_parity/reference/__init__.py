"""
The slow, obvious meaning of every operator in csrc/library.cpp, in plain Python, NumPy and PyTorch: a module a family.

Each function takes the arguments of its schema, all valid, and returns the results (of a mutating operator also
what the written arguments must hold, which come last). The tests hold the operators to it, the parity check also
what TensorFlow answers, by way of compat.tensorflow.

Most compute in the widest floats and round once. They take tensors, as the operators do, or NumPy's arrays, of which
nothing is rounded (:func:`numbers.on_tensors`): the parity check's bounds (bounds.py) are as narrow as that.
"""

from __future__ import annotations

from collections.abc import Callable

from . import (
    embedding,
    embedding_collection,
    embedding_lookup,
    hash,
    row_optimizer,
    row_update,
    segment,
    sparse_segment,
    sparse_tensor,
    table,
    table_rows,
    unique,
)
from .numbers import MAX, MEAN, MIN, PROD, SQRTN, SUM

__all__ = ["MAX", "MEAN", "MIN", "PROD", "REFERENCES", "SQRTN", "SUM"]

_FAMILIES = (
    sparse_segment,
    segment,
    unique,
    hash,
    sparse_tensor,
    embedding,
    embedding_lookup,
    embedding_collection,
    row_update,
    row_optimizer,
    table,
    table_rows,
)

#: By the operator's name.
REFERENCES: dict[str, Callable] = {x.__name__: x for family in _FAMILIES for x in family.FUNCTIONS}
