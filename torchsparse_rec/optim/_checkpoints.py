"""Saving, loading and copying an optimizer of tables: with all rows up to date, in the form of torch's states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..tables.layouts import accumulator_dtype
from ..tables.steps import Steps
from ..tables.table import Table, announce, table_if_any

__all__ = ["Checkpoints", "check_options"]


class Checkpoints(Optimizer):
    """The part of an optimizer of tables that saves, loads and copies its state."""

    # Whether the state has a "step".
    counts_steps = True
    # The groups of tables that backwards have stepped since the last step().
    _stepped: list[Any] = []
    # Whether tables in grad_mode "fused" are updated by backward(), before step().
    in_backward = False
    # The options of a parameter group that torch's optimizers do not have.
    _row_defaults: dict[str, Any] = {}
    # The loaded states of half-precision parameters, until the first step, which determines the tables.
    wide_states: dict[Tensor, dict[str, Any]] = {}
    # Whether torch is stepping the parameters that are no tables at this moment.
    _steps_densely_now = False

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state by parameter, as every optimizer of torch has it, with all rows of all tables up to date."""
        if not self._steps_densely_now:
            self.flush()
        return self.stored_state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self.__dict__["state"] = value

    @property
    def stored_state(self) -> defaultdict[Tensor, Any]:
        """Return ``state`` without a flush; it is stored under the name by which torch saves, copies and loads it."""
        return self.__dict__["state"]  # type: ignore[no-any-return]

    def _steps_taken(self, state: dict[str, Any]) -> int:
        """Return how many steps a parameter's state has seen; without a count, 1 if it has seen any, otherwise 0."""
        return int(state.get("step", 0))

    def _clocks(self) -> list[Steps[Table]]:
        listed = [p for group in self.param_groups for p in group["params"]]
        tables = [table_if_any(p) for p in (*listed, *self.stored_state)]  # one that left the groups has its state
        return list({t.rows.clock: None for t in tables if t and t.rows and t.rows.optimizer() is self})

    def flush(self) -> None:
        """
        Bring all rows of all tables up to date, at the cost of a pass over the stale ones.

        Rows of an :class:`EmbeddingVariable` that lie in tiers beyond its first, as on an SSD, are not changed: to
        rewrite a disk would cost what the tiers save. They catch up when they are read, promoted or saved.
        """
        for clock in self._clocks():
            clock.flush(clock.tables())

    def _register(self) -> None:
        """Add this optimizer to the list in which tables made later look for theirs."""
        announce(self)  # type: ignore[arg-type]

    def _restart_clocks(self) -> None:
        for clock in self._clocks():
            rows = clock.tables()[0].rows
            assert rows is not None
            # A state without a count of steps cannot hand the count on to the run that resumes from it.
            clock.restart(None if self.counts_steps else self._steps_taken(rows.state))

    def state_dict(self) -> dict[str, Any]:
        """
        Return the optimizer's state in the form of :meth:`torch.optim.Optimizer.state_dict`.

        All rows are flushed first, and the history of past steps is dropped. A run resumed from this state gives the
        same bits as the run that saved it and goes on.

        Raises:
            RuntimeError: a parameter has a state and no parameter group.
        """
        listed = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for parameter in self.stored_state:
            if id(parameter) not in listed:
                raise RuntimeError(
                    f"{type(self).__name__}: a parameter of shape {tuple(parameter.shape)} has a state, but no "
                    "parameter group lists it: add it to one, or drop its state by `del optimizer.state[parameter]`"
                )
        self._restart_clocks()
        state_dict = super().state_dict()
        wide = self.wide_states
        if wide:  # loaded, and not stepped since: as they were saved
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            for key, state in state_dict["state"].items():
                state_dict["state"][key] = {**state, **wide.get(parameters[key], {})}
        state_dict["state"] = {key: state for key, state in state_dict["state"].items() if state}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Load a state saved by this class, or by torch's optimizer of the same name.

        Args:
            state_dict: the state of an optimizer with the same parameters in the same order. Its tensors are copied,
                where torch's optimizers would go on to share them with the optimizer that they came from.

        Raises:
            ValueError: other groups; an option or a state that no step could use. Nothing has changed then.
        """
        self._load(state_dict, copies=True)

    def load_own(self, state_dict: dict[str, Any]) -> None:
        """Load a state as :meth:`load_state_dict` does, whose tensors are for this optimizer alone: none is copied."""
        self._load(state_dict, copies=False)

    def _load(self, state_dict: dict[str, Any], copies: bool) -> None:
        """Load a state, and copy the tensors that torch has neither cast nor moved, or keep them."""
        kept = [{name: group[name] for name in self._row_defaults if name in group} for group in self.param_groups]
        super().load_state_dict(state_dict)
        if copies:  # the optimizer that they came from may go on
            self._own_states(state_dict)
        self._keep_wide_states(state_dict, copies)
        for group, values in zip(self.param_groups, kept, strict=True):
            for name, value in values.items():
                group.setdefault(name, value)

    def _own_states(self, state_dict: dict[str, Any]) -> None:
        """Copy the states that still belong to a state_dict."""
        given = {id(x) for state in state_dict["state"].values() for x in state.values() if isinstance(x, Tensor)}
        for state in self.stored_state.values():
            for name, value in state.items():
                if id(value) in given:
                    state[name] = value.clone()

    def _check_loaded(self, state: Mapping[Any, Any], groups: list[dict[str, Any]]) -> None:
        """Raise ``ValueError`` unless this optimizer can go on from states by parameter and from groups."""
        who = f"{type(self).__name__}.load_state_dict"
        # What torch adds to groups of its older versions, and we to torch's.
        filled = object.__new__(type(self))
        filled.__dict__ = {"defaults": {**self.defaults}, "_row_defaults": self._row_defaults}
        filled._take({"state": {}, "param_groups": [dict(group) for group in groups]})
        for number, group in enumerate(filled.param_groups):
            check_options(f"{who}: group {number}", group, self, number)
            names = self.rule(group).states  # type: ignore[attr-defined]
            for k, parameter in enumerate(group["params"]):
                where = f"{who}: the state of parameter {k} of group {number}"
                its = state.get(parameter, {})
                if not isinstance(its, Mapping):
                    raise ValueError(f"{where} must be a mapping, got {repr(its):.100}")
                if its and self.counts_steps and not _is_number(its.get("step")):
                    raise ValueError(f"{where} must have a number 'step', got {repr(its.get('step')):.100}")
                for name in names:
                    if its.get(name) is not None:
                        self._check_state(f"{where}: {name}", its[name], parameter, name)

    def _check_state(self, where: str, value: Any, parameter: Tensor, name: str) -> None:
        shape = parameter.shape[:1] if name in self.per_row else parameter.shape  # type: ignore[attr-defined]
        table = table_if_any(parameter)
        # A table that grows has as many rows as its state_dict, which may be loaded later.
        first = 1 if table is not None and table.growing is not None else 0
        if not isinstance(value, Tensor) or value.dim() != len(shape) or value.shape[first:] != shape[first:]:
            got = list(value.shape) if isinstance(value, Tensor) else f"{repr(value):.100}"
            raise ValueError(f"{where} must be a tensor {list(shape)}, got {got}")

    def _release_tables(self) -> None:
        for clock in self._clocks():
            for table in clock.tables():
                table.release()

    def _keep_wide_states(self, state_dict: dict[str, Any], copies: bool) -> None:
        """Keep states of half-precision tables as saved, in float32: torch casts them to the parameter's dtype."""
        self.wide_states = {}
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(saved["params"], group["params"], strict=True):
                if accumulator_dtype(parameter.dtype) != parameter.dtype:
                    state = state_dict["state"].get(key, {})
                    its = {k: v for k, v in state.items() if k != "step" and isinstance(v, Tensor)}
                    self.wide_states[parameter] = {k: v.clone() if copies else v for k, v in its.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy of the optimizer, with all rows up to date, as in a checkpoint."""
        self._restart_clocks()
        return {**super().__getstate__(), "_row_defaults": self._row_defaults, "in_backward": self.in_backward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the result of :meth:`__getstate__`, or a state that torch loads."""
        if "param_groups" in vars(self):  # torch loads a state, and has changed nothing yet
            self._check_loaded(state["state"], state["param_groups"])
            self._release_tables()
            self._stepped = []
        self._take(state)
        self._register()

    def _take(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self._row_defaults.items():
                group.setdefault(name, value)


def check_options(where: str, group: Mapping[str, Any], optimizer: Optimizer, number: int) -> None:
    """
    Raise ``ValueError`` unless a parameter group has the options of an optimizer's own.

    Args:
        where: the place of the group, for the error.
        group: the options by name.
        optimizer: the optimizer that is to have the group. The group's options must be numbers, or several, where this
            optimizer's are.
        number: the number of the optimizer's group.
    """
    for name, own in optimizer.param_groups[number].items():
        if name in optimizer.defaults and not (name in group and _is_alike(group[name], own)):
            got = f"{group[name]!r:.100}" if name in group else "nothing"
            raise ValueError(f"{where} must have an option {name!r} like {own!r}, got {got}")


def _is_alike(value: Any, own: Any) -> bool:
    if isinstance(own, (list, tuple)):
        is_like = isinstance(value, (list, tuple)) and len(value) == len(own)
        return is_like and all(map(_is_alike, value, own))
    if isinstance(own, bool):
        return _is_number(value) and bool(value in (0, 1))
    return _is_number(value) or not _is_number(own)


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1)
