"""What an optimizer tells the operators of a parameter group."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Rule"]


class Rule(NamedTuple):
    """A parameter group's hyperparameters, as the operators take them."""

    name: str
    hyperparameters: list[float]
    states: tuple[str, ...]
    # False if the history cannot hold this step's effect on rows without gradient: with lr * weight_decay of 1 or more.
    regular: bool = True
