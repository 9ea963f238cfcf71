"""The numbers that stand for reductions in the schemas, ``tsr::Reduction`` of csrc/checks.h, and pooling's words."""

from __future__ import annotations

from typing import get_args

from .typing import Combiner, Pooling

SUM, MEAN, SQRTN, MAX, MIN, PROD = range(6)

#: How the rows of a bag are pooled, by the words that lookups take.
POOLING: dict[str, int] = dict(zip(get_args(Pooling), (SUM, MEAN, SQRTN, MAX, MIN), strict=True))
#: The same of TensorFlow's lookups by sparse ids.
COMBINERS: dict[Combiner, int] = {word: POOLING[word] for word in get_args(Combiner)}


def is_divided(reduction: int) -> bool:
    """Say whether a sum is divided: by the number of its terms or their weights, or by a root."""
    return reduction in (MEAN, SQRTN)


def is_extreme(reduction: int) -> bool:
    """Say whether each element comes from one row alone, which the backward has to know."""
    return reduction in (MAX, MIN)
