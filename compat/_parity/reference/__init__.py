"""
Slow, obvious references of every operator in csrc/library.cpp, in plain Python, NumPy and PyTorch, by family.

Each function takes the arguments of its operator's schema, all valid, and returns the results (for a mutating operator,
last, also what the written arguments must hold). The tests compare the operators with it; the parity check compares
TensorFlow's answers too, and runs the operators through compat.tensorflow.

Most compute in the widest floats and round once. They take tensors, as the operators do, or NumPy's arrays, whose
results are not rounded (:func:`numbers.on_tensors`): the parity check's narrow bounds (bounds.py) need that.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from .embedding import EXTREMES, POOLING
from .numbers import MAX, MEAN, MIN, PROD, SQRTN, SUM

__all__ = ["EXTREMES", "MAX", "MEAN", "MIN", "POOLING", "PROD", "REFERENCES", "SQRTN", "SUM"]

_FAMILIES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]

#: The function of each operator, by the operator's name.
REFERENCES: dict[str, Callable] = {x.__name__: x for family in _FAMILIES for x in getattr(family, "FUNCTIONS", ())}
