"""The part of optimizers for parameter groups: which one lists a table, its rule, and the rule's effect on rows."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from ..tables.table import table_if_any
from ._in_backward import InBackward, already_written
from ._rule import Rule

__all__ = ["Groups"]


class Groups(InBackward):
    """The part of an optimizer that applies its parameter groups to tables."""

    # Whether the step of an element depends on its whole row, by the formula.
    _steps_whole_rows = False
    # Whether the rule skips rows without gradient, as lazy=True does: also rows of zeros in a strided gradient.
    _zero_rows_are_idle = False
    # The group of each parameter and its place there, by the parameter's id, as last found: lookups ask for many.
    _places: dict[int, tuple[int, int]] = {}
    # The groups and their parameters as the last step has seen them, and the ids of these parameters.
    _seen: list[tuple[dict[str, Any], list[Tensor]]] = []
    _listed: frozenset[int] = frozenset()
    # Groups by their ids, with the values that each had when its rule was made, and the rule.
    _rules: dict[int, tuple[dict[str, Any], list[Any], Rule]] = {}

    def rule(self, group: dict[str, Any]) -> Rule:
        """Return the rule of a parameter group, with the hyperparameters of its next step."""
        raise NotImplementedError

    def sparse_obstacle(self, weight: Tensor) -> str | None:
        """Return why a sparse or fused gradient of this table saves nothing, or None."""
        group = self._group_of(weight)
        if self._idle_motion(group):
            return None
        decay = f"with weight_decay={group['weight_decay']} " if self._is_decay_to_blame(group) else ""
        return f"{decay}{type(self).__name__} updates every row each step"

    def _is_decay_to_blame(self, group: dict[str, Any]) -> bool:
        """Say whether many steps of a row without gradient would have a closed form without weight decay."""
        return bool(self.rule({**group, "weight_decay": 0.0}).words.motion)

    def moves_idle_rows(self, weight: Tensor) -> bool:
        """Say whether a step also moves rows of this table, or their states, that have no gradient."""
        return self._moves_idle(self._group_of(weight))

    def _moves_idle(self, group: dict[str, Any]) -> bool:
        return self._idle_motion(group) != "none"

    def column_obstacle(self, weight: Tensor) -> str | None:
        """Return why this optimizer must not step only some columns of this table, or None if it may."""
        name, use = type(self).__name__, "use RowWise() or TableWise() for it"
        if self._steps_whole_rows:
            return f"{name} steps whole rows, and each rank would have only a part of them: {use}"
        group = self._group_if_any(weight)
        if group is None or not self._skips_zeros(group):
            return None
        for option, value, other in (("lazy", True, False), ("decay", "seen", "all")):
            if group.get(option) == value and not self._skips_zeros({**group, option: other}):
                name, use = f"{name} with {option}={value!r}", f"{use}, or {option}={other!r}"
        return (
            f"{name} skips a row whose gradient is zero in all columns, and each rank would see only its columns: {use}"
        )

    def _skips_zeros(self, group: dict[str, Any]) -> bool:
        """Say whether a looked-up row whose gradient is zero stays, though the formula would change it."""
        lazily = group["lazy"] and self._moves_idle({**group, "lazy": False})
        return self._zero_rows_are_idle or lazily or self._decays_seen(group)

    @staticmethod
    def _decays_seen(group: dict[str, Any]) -> bool:
        """Say whether weight decay is for rows with a gradient alone."""
        return group.get("decay") == "seen" and float(group["weight_decay"]) != 0

    def _group_of(self, weight: Tensor) -> dict[str, Any]:
        """Return the group that holds a table; where none does, one that moves no idle rows."""
        return self._group_if_any(weight) or {"lazy": True}

    def _group_if_any(self, weight: Tensor) -> dict[str, Any] | None:
        """Return the group that lists a table now, or None."""
        groups = self.param_groups
        g, k = self._places.get(id(weight), (0, 0))
        if not (g < len(groups) and k < len(groups[g]["params"]) and groups[g]["params"][k] is weight):
            self._places = {id(p): (g, k) for g, group in enumerate(groups) for k, p in enumerate(group["params"])}
            if id(weight) not in self._places:
                return None
            g, _ = self._places[id(weight)]
        return groups[g]

    def _idle_motion(self, group: dict[str, Any]) -> str:
        """Return how idle rows move, in the words of :func:`torchsparse_rec.ops.idle_motion`; empty: no closed form."""
        return "none" if group["lazy"] else self.rule(group).words.motion

    def holds(self, parameter: Tensor) -> bool:
        """Say whether a parameter is in one of the groups."""
        return any(p is parameter for group in self.param_groups for p in group["params"])

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        """Return a group's rule: the same object until a value of the group is another."""
        known = self._rules.get(id(group))
        if known is not None and known[0] is group and len(known[1]) == len(group):
            if all(map(is_, known[1], group.values())):
                return known[2]
        rule, values = self.rule(group), list(group.values())
        if all(_is_constant(value) for name, value in group.items() if name != "params"):
            self._rules = {**self._rules, id(group): (group, values, rule)}
        return rule

    def _group_with_id(self, number: int) -> dict[str, Any]:
        for group in self.param_groups:
            if id(group) == number:
                return group
        raise AssertionError("a clock's group has gone")

    def _see_groups(self) -> None:
        """
        Have tables that another group lists now, or none, leave their clocks, where groups have changed.

        Raises:
            RuntimeError: a backward has already stepped such a table by its group of then.
        """
        known, now = self._seen, self.param_groups
        if len(known) == len(now):
            for group, (seen, parameters) in zip(now, known, strict=True):
                listed = group["params"]
                if group is not seen or len(listed) != len(parameters) or not all(map(is_, listed, parameters)):
                    break
            else:
                return
        self._seen, self._rules = [(group, list(group["params"])) for group in now], {}
        self._listed = frozenset(id(parameter) for group in now for parameter in group["params"])
        for parameter in [p for _, parameters in (*known, *self._seen) for p in parameters]:
            table = table_if_any(parameter)
            rows = None if table is None else table.rows
            if rows is None or rows.optimizer() is not self or rows.clock.group == id(self._group_if_any(parameter)):
                continue
            if self.has_stepped([parameter]):
                self._stepped = []
                raise already_written(f"{type(self).__name__}: a table's parameter group has changed before step()")
            table.release()  # type: ignore[union-attr]


def _is_constant(value: Any) -> bool:
    """Say whether an option keeps its value as long as it is the same object: a tensor or a list may change."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return value is None or type(value) in (bool, int, float, str)
