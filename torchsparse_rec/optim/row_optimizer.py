"""The base of all optimizers here: which parameters are tables, and how and when each of them steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .._torch import as_stored, below_autograd, grad_of, set_grad_enabled, untraced
from .._torch_modules import is_made_by_zero, is_step_seen, step_without_hooks
from ..ops.row_optimizer_rules import counts_steps
from ..tables.clock import Clock
from ..tables.gradients import StepGroup, gradient_of, update, update_blocks
from ..tables.layouts import accumulator_dtype, flat, has_whole_rows
from ..tables.stale import can_be_stale, mark_stale, mark_stepped
from ..tables.steps import ALL_ROWS, ITS_ROWS, LATER, ClockKind
from ..tables.table import Gradient, RowStates, Table, growing_among, reached, table_if_any, table_of, writing
from ._checkpoints import check_options as check_options
from ._groups import Groups
from ._rule import Rule
from ._together import SteppedTogether

__all__ = ["Rule", "RowOptimizer"]

_NO_FORM = "many steps of a row without gradient have no closed form"


class RowOptimizer(Groups):
    """
    An optimizer that steps tables by rows, and everything else as torch does.

    A subclass defines its rule (:meth:`rule`), and names after this class the optimizer of torch that it extends;
    where torch has none, it overrides ``_dense_step``.
    """

    # States with one value per row; the others have the parameter's shape.
    per_row: frozenset[str] = frozenset()
    _warned: frozenset[str] = frozenset()
    # Whether a ZeroRedundancyOptimizer has made it, for some of its parameters.
    is_of_zero = False
    # Parameters that were stepped together, by the id of the first of them.
    _together: dict[int, SteppedTogether] = {}

    # ---- What a subclass defines -------------------------------------------------------------------------------------

    def initial_value(self, name: str) -> float:
        """Return the value that a new state is filled with."""
        return 0.0

    def _dense_step(self) -> None:
        """Step what ``param_groups`` holds at this moment: parameters with strided gradients that are no tables."""
        step_without_hooks(self, super().step)  # the hooks around it are this optimizer's own, which run already

    # ---- Construction ------------------------------------------------------------------------------------------------

    def __init__(
        self, params: Any, *args: Any, lazy: bool, stochastic_rounding: bool, in_backward: bool, **kwargs: Any
    ) -> None:
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"{type(self).__name__}: params must be parameters or groups of them, such as module.parameters(), got "
                f"the module {type(params).__name__} itself"
            )
        self.in_backward = in_backward
        self.is_of_zero = is_made_by_zero()
        self._row_defaults = {"lazy": lazy, "stochastic_rounding": stochastic_rounding}
        for name in ("tensorflow_eps", "decay"):
            if name in kwargs:
                self._row_defaults[name] = kwargs.pop(name)
        super().__init__(params, *args, **kwargs)
        self._register()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see :meth:`torch.optim.Optimizer.add_param_group`."""
        for name, value in self._row_defaults.items():
            self.defaults.setdefault(name, value)
        decay = param_group.get("decay", self.defaults.get("decay", "all"))
        if decay not in ("all", "seen"):
            raise ValueError(f"{type(self).__name__}: decay must be 'all' or 'seen', got {decay!r}")
        super().add_param_group(param_group)
        # Fused lookups use the optimizer made last. Another one that steps a table takes it over.
        for parameter in self.param_groups[-1]["params"]:
            table = table_if_any(parameter)
            if table is not None:
                table.optimizer = self

    # ---- Steps -------------------------------------------------------------------------------------------------------

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Put hooks and profilers around a step, as torch does to each class, at no cost where there are none."""
        seen = torch.optim.Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: RowOptimizer, *args: Any, **kwargs: Any) -> Any:
            return (seen if is_step_seen(self) else func)(self, *args, **kwargs)

        return untraced()(step)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """
        Step all parameters that have a gradient.

        Args:
            closure: a function that computes the gradients anew and returns the loss.

        Returns:
            The result of ``closure``, or None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        dense: list[dict[str, Any]] = []
        tables: list[tuple[Tensor, Gradient]] = []
        with as_stored():
            if self.in_backward:
                self._end_backwards(tables)
            for group in self.param_groups:
                others = self._collect(group, tables)
                if others:
                    dense.append({**group, "params": others})
        if dense:
            groups, self.param_groups = self.param_groups, dense
            self._steps_densely_now = True
            try:
                self._dense_step()
            finally:
                self.param_groups, self._steps_densely_now = groups, False
        if tables:
            self.step_tables(tables)
        self.wide_states = {}
        return loss

    def _collect(self, group: dict[str, Any], tables: list[tuple[Tensor, Gradient]]) -> list[Tensor]:
        """Add a group's tables with a gradient to ``tables``; return its other parameters with one."""
        others, found = [], []
        name, idle = type(self).__name__, self._zero_rows_are_idle or group["lazy"]
        for parameter in group["params"]:
            grad = grad_of(parameter)
            if grad is None:
                continue
            if grad.layout is not torch.sparse_coo:
                table = table_if_any(parameter)
                if table is None or (
                    table.rows is None and (not table.owned or self._steps_densely(group, parameter, idle))
                ):
                    others.append(parameter)
                    continue
            found.append((parameter, grad))
        with below_autograd():  # which would make views of each gradient's rows and values
            for parameter, grad in found:
                tables.append((parameter, gradient_of(name, grad, idle)))
        return others

    def _steps_densely(self, group: dict[str, Any], parameter: Tensor, idle: bool) -> bool:
        """
        Say whether torch steps a table, none of whose gradients has left rows out yet.

        Its fused kernel takes a table whole. Torch also steps a table that our operators could write only through a
        copy.
        """
        asked = group.get("fused") or not has_whole_rows(parameter)
        asked = asked and not idle and not self._decays_seen(group)
        return bool(asked) and accumulator_dtype(parameter.dtype) == parameter.dtype

    def step_tables(self, gradients: list[tuple[Tensor, Gradient]], in_backward: bool = False) -> None:
        """Step tables that this optimizer holds, each with the gradient given here; see :meth:`begin_step`."""
        if not gradients:
            return
        of, parameters = {}, []
        for parameter, gradient in gradients:
            of[id(parameter)] = gradient
            parameters.append(parameter)
        records = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            with writing(parameters):
                for group in self.begin_step(parameters, in_backward):
                    with group.clock:
                        update(group, [*map(of.__getitem__, map(id, group.parameters))])
                        self.end_step(group)  # now: should another group's update raise, this one has had its step
        finally:
            set_grad_enabled(records)

    def step_blocks(self, parameter: Tensor, blocks: Iterable[tuple[int, Tensor]]) -> None:
        """Step a table in a backward, with blocks of its gradient: the number of the first row, and all values."""
        with writing([parameter]):
            for group in self.begin_step([parameter], in_backward=True):
                with group.clock:
                    update_blocks(group, blocks)
                    self.end_step(group)

    def begin_step(self, parameters: list[Tensor], in_backward: bool = False) -> list[StepGroup]:
        """
        Begin a step of tables; return them in groups: one call of an operator can step a group.

        As torch does, it steps a table with the parameter group that lists it now, and not where none does.

        The caller then updates the groups, by ``row_optimizer_update_`` or ``embedding_collection_update_``, and calls
        :meth:`end_step`.

        Args:
            parameters: the parameters of the tables.
            in_backward: whether a backward takes the step, before :meth:`step`. Only one backward may.
        """
        together = self._together.get(id(parameters[0]))
        if together is None or not together.is_of(parameters, self):
            self._see_groups()
            listed = [parameter for parameter in parameters if id(parameter) in self._listed]
            if in_backward and len(listed) < len(parameters):
                reached.update(map(id, parameters))  # step() marks those that a group lists
            if not listed:
                return []
            _tell_growing(listed)
            together = self._gather(parameters, listed)
            self._together = {**self._together, id(parameters[0]): together}
        elif together.grows:
            _tell_growing(together.listed)
        if in_backward and self._stepped:
            self._check_first_backward(clock for clock, _ in together.tables)
        begun = []
        for number, (clock, _) in enumerate(together.tables):
            last = together.begun.get(number)
            if last is not None and last.source is self._rule_of(last.options):
                last.renew()
            else:
                last = together.begun[number] = self._begin(together, number, self._group_with_id(clock.group))
            begun.append(last)
        if in_backward:
            mark_stepped(together.listed)
            self._stepped = [*self._stepped, *begun]
        return begun

    def begin_again(self, group: StepGroup) -> bool:
        """
        Begin the step of a backward that is the last one once more, as :meth:`begin_step` would.

        Return False, with nothing done, if anything that it rests on may have changed. No table of it may grow.
        """
        together = self._together.get(id(group.parameters[0]))
        if together is None or together.begun.get(0) is not group:
            return False
        for done in self._stepped:
            if done.clock is group.clock:
                return False
        if not together.is_of(together.given, self) or group.source is not self._rule_of(group.options):
            return False
        group.renew()
        self._stepped = [*self._stepped, group]
        return True

    def _gather(self, given: list[Tensor], listed: list[Tensor]) -> SteppedTogether:
        by_clock: dict[Clock, list[Table]] = {}
        new: dict[tuple, Clock] = {}
        for parameter in listed:
            table = table_of(parameter)
            rows = table.rows
            if (
                rows is None
                or rows.state is not self.stored_state.get(parameter)
                or rows.place != (parameter.dtype, parameter.device)
            ):
                rows = self._adopt(table, parameter, new)
            assert isinstance(rows.clock, Clock)
            by_clock.setdefault(rows.clock, []).append(table)
        return SteppedTogether(given, self, list(by_clock.items()))

    def _adopt(self, table: Table, parameter: Tensor, new: dict[tuple, Clock]) -> RowStates:
        """Take over a table with its state, and put it on a clock together with other new tables like it."""
        table.release()
        table.optimizer = self
        everything = [(group, p) for group in self.param_groups for p in group["params"]]
        # The seed of rounding is the place among the parameters: it is the same in a run that resumes this one.
        seed, group = next((i, group) for i, (group, p) in enumerate(everything) if p is parameter)
        state = self.stored_state[parameter]
        state.update(self.wide_states.pop(parameter, {}))  # once: a later call must not undo steps taken since
        place = parameter.dtype, parameter.device
        # Where each step copies the whole table, no row waits to be read: others may share its memory.
        owned = table.owned and can_be_stale(parameter) and has_whole_rows(parameter)
        if not has_whole_rows(parameter):
            self._warn_once(
                f"{type(self).__name__}: each step copies all of a table of shape {list(parameter.shape)}, whose rows "
                "are not contiguous in memory, as of a transposed matrix. With weight.contiguous() a step costs only "
                "what the batch touches"
            )
        key = (id(group), owned, self._steps_taken(state), *place)
        clock = new.setdefault(key, Clock(*key[:3], on_cuda=place[1].type == "cuda"))
        rows = table.rows = RowStates(self, state, clock, place, seed)
        clock.add(table)
        return rows

    def _begin(self, together: SteppedTogether, number: int, group: dict[str, Any]) -> StepGroup:
        clock, tables = together.tables[number]
        rule = self._rule_of(group)
        asked, hyperparameters = (rule, group["lazy"]), rule.hyperparameters
        last = together.kinds.get(number)
        if last is not None and last[0] == asked:
            kind = last[1]
        else:
            self._check_columns(tables)
            kind = self._kind(group, rule, clock.owned)
        clock.random_rounding = group["stochastic_rounding"]
        if clock.on_cuda:
            numbered = kind.others == LATER or bool(clock.rounding_seeds(tables))
            clock.check_capture(kind, numbered or counts_steps(rule.number, hyperparameters))
        together.kinds[number] = asked, kind
        if len(tables) != len(clock) and len(tables) != len(clock.tables()):
            clock = clock.split(tables)
        if kind != clock.kind:
            self._start(clock, tables, kind, hyperparameters)
        clock.make_room()
        lists = together.lists(number)
        return StepGroup(
            parameters=lists.parameters,
            weights=lists.weights(),
            states=lists.states,
            last_steps=lists.last_steps,
            history=clock.history,
            grows=together.grows,
            options=group,
            source=rule,
            rule=kind.rule,
            hyperparameters=hyperparameters,
            step=clock.step + 1,
            base=clock.base,
            maximize=group.get("maximize", False),
            rounding_seeds=clock.rounding_seeds(tables),
            whole=lists.whole,
            all_rows=kind.others == ALL_ROWS,
            clock=clock,
            writable=lists.writable,
        )

    def _check_columns(self, tables: list[Table]) -> None:
        """Raise ``ValueError`` for a table whose rows must be whole, if this rank has only some of its columns."""
        for table in tables:
            if table.part is not None and table.part.splits_columns:
                obstacle = self.column_obstacle(table.parameter)
                if obstacle is not None:
                    raise ValueError(f"table {table.part.name!r} is ColumnWise, but {obstacle}")

    def _start(self, clock: Clock, tables: list[Table], kind: ClockKind, hyperparameters: list[float]) -> None:
        """Begin a new history, for a rule, states or an eps that differ from the past steps'."""
        for growing in growing_among(table.parameter for table in tables):
            growing.history_ends()
        clock.flush(tables)
        for table in tables:
            assert table.rows is not None
            state, parameter = table.rows.state, table.parameter
            if self.counts_steps:
                state.setdefault("step", torch.tensor(0.0))
            else:
                clock.step = self._steps_taken(state)
            with torch.inference_mode(False), torch.no_grad():  # no other mode may write inference mode's tensors
                table.rows.states = [self.state_of(parameter, name, state) for name in kind.states]
        clock.start(kind, hyperparameters)

    def state_of(self, parameter: Tensor, name: str, state: dict[str, Any]) -> Tensor:
        """Return one of the operator's states, made or converted if need be; ``state`` keeps it in torch's shape."""
        dtype = accumulator_dtype(parameter.dtype)
        value = state.get(name)
        if value is None:
            value = self.new_state(parameter, name, dtype, state)
        state[name] = value.to(dtype=dtype, device=parameter.device).contiguous()
        return state[name] if name in self.per_row else flat(state[name])

    def new_state(self, parameter: Tensor, name: str, dtype: torch.dtype, state: dict[str, Any]) -> Tensor:
        shape = parameter.shape[:1] if name in self.per_row else parameter.shape
        return torch.full(shape, self.initial_value(name), dtype=dtype, device=parameter.device)

    def _kind(self, group: dict[str, Any], rule: Rule, owned: bool) -> ClockKind:
        """Return how the group's next step, by this rule, treats its tables."""
        others, motion = ITS_ROWS, "none"
        if not group["lazy"]:
            motion = rule.words.motion
            others = ITS_ROWS if motion == "none" else LATER
            if not motion:
                decays = self._is_decay_to_blame(group)
                self._warn_once(
                    f"{type(self).__name__}: "
                    + (f"weight_decay={group['weight_decay']} goes through the second moment" if decays else _NO_FORM)
                    + ", so every step updates all rows of a table, as torch does. With "
                    + ("decay='seen', " if decays and "decay" in group else "")
                    + ("decoupled decay (AdamW) or " if decays else "")
                    + "lazy=True a step updates only the rows of the batch"
                )
                others = ALL_ROWS
            if motion == "weight" and not owned:
                self._warn_once(
                    f"{type(self).__name__}: a table with a sparse gradient is looked up by a module that is not of "
                    "torchsparse_rec.nn, or its parameter has a class of its own or rows that are not contiguous: "
                    "every step updates all its rows, as torch does. After torchsparse_rec.nn.convert(model) a step "
                    "costs only what the batch "
                    "touches; lazy=True does not change the other rows"
                )
                others = ALL_ROWS
            elif not rule.regular:
                others = ALL_ROWS
        moves_weights = others == LATER and motion == "weight"
        eps = group.get("eps"), group.get("tensorflow_eps")
        return ClockKind(rule.number, rule.states, others, moves_weights, eps)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned |= {text}
            warnings.warn(text, stacklevel=2)

    def end_step(self, group: StepGroup) -> None:
        """End a step that :meth:`begin_step` began: count it, and add it to the history."""
        group.clock.advance(group.hyperparameters, group.step)
        if group.clock.moves_weights:
            mark_stale(group.parameters)
        if group.grows:
            growing = growing_among(group.parameters)
            if growing:
                growing[0].all_stepped(growing)


def _tell_growing(parameters: list[Tensor]) -> None:
    """Tell the tables that grow that a step of theirs begins."""
    growing = growing_among(parameters)
    if growing:
        growing[0].all_step(growing)
