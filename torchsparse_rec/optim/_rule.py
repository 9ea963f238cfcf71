"""The rule of a parameter group: an optimizer's arguments of the operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ops.row_optimizer_rules import HYPERPARAMETERS, OPTIMIZER_RULES, rule_words

__all__ = ["Rule"]


class Rule:
    """
    A parameter group's hyperparameters, as the operators take them, and the rule's description of itself.

    Args:
        name: a key of ``OPTIMIZER_RULES``.
        group: the hyperparameters by their names; ``betas`` are ``beta1`` and ``beta2``.
        regular: whether the history can hold this step's effect on rows without gradient: not with ``lr *
            weight_decay`` of 1 or more.
        values: the hyperparameters that the group lacks, or has with other values.
    """

    def __init__(self, name: str, group: Mapping[str, Any], regular: bool = True, **values: Any) -> None:
        if "betas" in group:
            values["beta1"], values["beta2"] = group["betas"]
        values.setdefault("decay_seen", group.get("decay") == "seen")
        self.number = OPTIMIZER_RULES[name]
        self.hyperparameters = [float(values[k] if k in values else group[k]) for k in HYPERPARAMETERS[name]]
        self.regular = regular
        self.words = rule_words(self.number, self.hyperparameters)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of a table's states, in the operators' order."""
        return self.words.states

    def __eq__(self, other: object) -> bool:
        """Say whether the steps are the same."""
        return (
            isinstance(other, Rule)
            and self.number == other.number
            and self.hyperparameters == other.hyperparameters
            and self.regular == other.regular
        )

    __hash__ = None  # type: ignore[assignment]
