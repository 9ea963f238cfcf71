"""What an optimizer of tables saves, loads and copies: rows that are current, in the form of torch's states."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ._clock import Clock
from ._tables import _optimizers, accumulator_dtype, table_if_any

__all__ = ["Checkpoints"]


class Checkpoints(Optimizer):
    """The part of an optimizer that is about its state."""

    # Whether the state has a "step".
    _counts_steps = True
    # What backwards have stepped since the last step().
    _stepped: list[Any] = []
    # Whether tables in grad_mode "fused" are updated by backward(), before step().
    in_backward = False
    # What torch's parameter groups do not have.
    _row_defaults: dict[str, Any] = {}
    # States of half parameters as they were loaded, until the first step, which knows what is a table.
    _wide: dict[Tensor, dict[str, Any]] = {}
    # Whether torch steps parameters that are no tables just now.
    _steps_densely_now = False

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """As of every optimizer, with all rows of all tables current."""
        if not self._steps_densely_now:
            self.flush()
        return self._stored_state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self.__dict__["state"] = value

    @property
    def _stored_state(self) -> defaultdict[Tensor, Any]:
        """The same, as it is stored; in an attribute of the name under which torch saves, copies and loads it."""
        return self.__dict__["state"]  # type: ignore[no-any-return]

    def _steps_taken(self, state: dict[str, Any]) -> int:
        """How many steps a parameter's state has seen; without a count, whether it has seen any."""
        return int(state.get("step", 0))

    def _clocks(self) -> list[Clock]:
        tables = [table_if_any(p) for group in self.param_groups for p in group["params"]]
        return list({t.rows.clock: None for t in tables if t and t.rows and t.rows.optimizer() is self})

    def flush(self) -> None:
        """Make all rows of all tables current, at the cost of a pass over those that are behind."""
        for clock in self._clocks():
            clock.make_current(clock.tables())

    def _register(self) -> None:
        """Be known to tables that are made later."""
        _optimizers[self] = None  # type: ignore[index]

    def _restart_clocks(self) -> None:
        for clock in self._clocks():
            rows = clock.tables()[0].rows
            assert rows is not None
            # Where the state has no count, the run that resumes from it cannot go on with this one's.
            clock.restart(None if self._counts_steps else self._steps_taken(rows.state))

    def state_dict(self) -> dict[str, Any]:
        """
        The optimizer's state as torch's: :meth:`torch.optim.Optimizer.state_dict`.

        All rows are made current first, and what is known of past steps is dropped: a run that is resumed from here
        gives the same bits as this one, which goes on.
        """
        self._restart_clocks()
        state_dict = super().state_dict()
        state_dict["state"] = {key: state for key, state in state_dict["state"].items() if state}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Take over a state, this class's or that of torch's optimizer of the same name.

        Args:
            state_dict: of an optimizer with the same parameters in the same order.
        """
        kept = [{name: group[name] for name in self._row_defaults if name in group} for group in self.param_groups]
        self._release_tables()
        self._stepped = []
        super().load_state_dict(state_dict)
        self._keep_wide_states(state_dict)
        for group, values in zip(self.param_groups, kept, strict=True):
            for name, value in values.items():
                group.setdefault(name, value)

    def _release_tables(self) -> None:
        for clock in self._clocks():
            for table in clock.tables():
                table.release()

    def _keep_wide_states(self, state_dict: dict[str, Any]) -> None:
        """Torch casts loaded states to the parameter's dtype. The next step wants those of half tables in float32."""
        self._wide = {}
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(saved["params"], group["params"], strict=True):
                if accumulator_dtype(parameter.dtype) != parameter.dtype:
                    state = state_dict["state"].get(key, {})
                    self._wide[parameter] = {k: v for k, v in state.items() if k != "step" and isinstance(v, Tensor)}

    def __getstate__(self) -> dict[str, Any]:
        """Copies are taken of current rows, as checkpoints are."""
        self._restart_clocks()
        return {**super().__getstate__(), "_row_defaults": self._row_defaults, "in_backward": self.in_backward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See :meth:`__getstate__`; torch loads a state through this too."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self._row_defaults.items():
                group.setdefault(name, value)
        self._register()
