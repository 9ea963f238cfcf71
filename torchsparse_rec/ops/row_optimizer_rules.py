"""
The rules of the family ``row_optimizer``, as the C++ side describes them: names, hyperparameters, states, idle motion.

Contract: csrc/row_optimizer.h. The rules: csrc/row_optimizer_rules.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._torch import below_modes, constant_in_graphs

__all__ = ["OPTIMIZER_RULES", "idle_motion"]


@constant_in_graphs
def _described(rule: int | None, hyperparameters: tuple[float, ...]) -> list[str]:
    """Return the lines of ``row_optimizer_rule``."""
    with below_modes():
        text = torch.ops.torchsparse_rec.row_optimizer_rule.default(rule, hyperparameters)
        return bytes(text.tolist()).decode().split("\n")


_RULES = [line.split() for line in _described(None, ()) if line]
#: The rules' numbers, by name.
OPTIMIZER_RULES = {name: number for number, (name, *_) in enumerate(_RULES)}
#: The names of each rule's hyperparameters, in the operators' order.
HYPERPARAMETERS = {name: tuple(names) for name, *names in _RULES}


class RuleWords(NamedTuple):
    """A rule's description of itself."""

    states: tuple[str, ...]
    """The names of a table's states, in their order."""
    motion: str
    """What a step does to a row without gradient, in the words of :func:`idle_motion`; empty: no closed form."""
    reason: str
    """Why many steps without gradient have no closed form; empty: they have one."""


# By a rule's number and which of its hyperparameters are not 0: its words depend only on these.
_WORDS: dict[tuple[int, ...], RuleWords] = {}


def rule_words(rule: int, hyperparameters: Sequence[float]) -> RuleWords:
    """Return a rule's description of itself; the arguments and errors are as in :func:`idle_motion`."""
    key = (rule, *[value != 0 for value in hyperparameters])
    words = _WORDS.get(key)
    if words is None:
        states, motion, reason = _described(rule, tuple(hyperparameters))
        words = _WORDS[key] = RuleWords(tuple(states.split()), motion, reason)
    return words


# The rules whose steps are alike, whatever their number, where this hyperparameter is 0.
_ALIKE = {
    **dict.fromkeys(("adadelta", "ftrl", "lion", "rmsprop")),
    **{"adagrad": "lr_decay", "rowwise_adagrad": "lr_decay", "sgd": "momentum"},
}


def counts_steps(rule: int, hyperparameters: Sequence[float]) -> bool:
    """Say whether a step by this rule depends on its number; the arguments are as in :func:`idle_motion`."""
    name, *names = _RULES[rule]
    if name not in _ALIKE:
        return True
    unless = _ALIKE[name]
    return unless is not None and hyperparameters[names.index(unless)] != 0


def idle_motion(rule: int, hyperparameters: Sequence[float]) -> str:
    """
    Return the effect of an optimizer's step on a row without gradient: nothing, or it changes its states, or its
    weight.

    Args:
        rule: the rule's number in ``OPTIMIZER_RULES``.
        hyperparameters: the rule's, in its order.

    Returns:
        ``"none"``; ``"states"``: the states change, the weight does not; or ``"weight"``: the weight changes too.

    Raises:
        ValueError: no such rule, another number of hyperparameters, or no closed form of many such steps. The latter
            are ``lamb``, and weight decay that enters the second moment (``adam``, ``amsgrad``, ``rmsprop``,
            ``adadelta`` and ``adagrad``, if it is not decoupled and ``decay_seen`` is 0).

    Example:
        >>> idle_motion(OPTIMIZER_RULES["sgd"], [0.1, 0.9, 0.0, 0.0, 0.0])
        'weight'
    """
    words = rule_words(rule, hyperparameters)
    if not words.motion:
        name = _RULES[rule][0]
        raise ValueError(f"{name}: many steps without gradient must have a closed form, got {words.reason}")
    return words.motion
