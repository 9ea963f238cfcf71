"""What the comparisons with TensorFlow share: the sides' names, its threads, and the verdict on the losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

NAMES = {"ours": "torchsparse_rec", "tensorflow": "TensorFlow"}


def use_torch_threads() -> None:
    """Give TensorFlow as many threads as torch has, unless it has already started its own."""
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    except RuntimeError:
        pass


def largest_difference(losses: Iterable[float], others: Iterable[float]) -> float:
    """
    Return the largest difference between two runs' losses, as many of each; infinite if a loss is not finite.

    Example:
        >>> largest_difference([0.5, 0.25], [0.5, 0.375])
        0.125
        >>> largest_difference([0.5, float("nan"), 0.25], [0.5, 0.375, 0.25])
        inf
    """
    differences = [abs(one - other) for one, other in zip(losses, others, strict=True)]
    # max would pass over a NaN, which is not larger than anything.
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def verdict(difference: float, losses: Sequence[float], tolerance: float) -> str:
    """Return the line that says whether the first losses differ by no more than the tolerance."""
    within = "within" if difference <= tolerance else "NOT within"
    return f"first {len(losses)} losses: largest difference {difference:.2e} ({within} {tolerance:g})"
