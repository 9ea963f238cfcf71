"""
Restore what training has changed, bit for bit: parameters, buffers, gradients, optimizers, schedulers, random numbers.

All values are copied back into the tensors that they came from. That includes what our optimizers keep of stale rows
(``tables/clock.py``): no row is flushed, so that training goes on as if the diagnosis had not run.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from .._torch import as_stored
from ..nn.auto import AutoChoice
from ..optim.row_optimizer import RowOptimizer
from ..tables.clock import Clock
from ..tables.stale import mark_fresh, mark_stale
from ..tables.table import Rows, Table, note_change, table_if_any
from ._find import Found

__all__ = ["RandomNumbers", "Snapshot"]


class RandomNumbers:
    """The states of all global random generators, and of the given ones."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self._python, self._numpy = random.getstate(), numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._own = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Restore the states of all generators."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._own:
            generator.set_state(state)


class Snapshot:
    """
    A copy of all that training changes.

    Args:
        found: the models, optimizers and other objects with state. Copies of their parameters, gradients and states
            take as much memory again.
    """

    def __init__(self, found: Found) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._random = RandomNumbers(found.generators)
        self._modules = [
            (part, part.training, dict(part._buffers)) for model in found.models for part in model.modules()
        ]
        self._parameters = list({id(p): p for p in _parameters_of(found)}.values())
        self._gradients = [(p, p.grad) for p in self._parameters]
        for p in self._parameters:
            self._keep(p)
            self._keep_gradient(p)
        for _, _, buffers in self._modules:
            for buffer in buffers.values():
                self._keep(buffer)
        self._optimizers = [_OptimizerState(self, optimizer) for optimizer in found.optimizers]
        self._tables = [_TableState(self, p) for p in self._parameters]
        self._choices = [(choice, dict(choice.__dict__)) for choice in _choices_of(found.models)]
        scalers = [other for other in found.others if isinstance(other, torch.amp.GradScaler)]
        self._scalers = [_ScalerState(self, scaler) for scaler in scalers]
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in found.others if other not in scalers]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything; this may be called several times."""
        with as_stored():
            for tensor, alias, kept in self._tensors.values():
                if tensor.layout is torch.strided and tensor.data_ptr() != alias.data_ptr():
                    tensor.data = alias  # training gave the tensor other memory
                # A sparse tensor's .data is another tensor: a copy into it would not change the indices of this one.
                (tensor.data if tensor.layout is torch.strided else tensor).copy_(kept)
        for part, training, buffers in self._modules:
            part.training = training
            part._buffers.clear()
            part._buffers.update(buffers)
        for p, (parameter, gradient) in zip(self._parameters, self._gradients, strict=True):
            assert p is parameter
            parameter.grad = gradient
        for optimizer in self._optimizers:
            optimizer.restore()
        for table in self._tables:
            table.restore()
        for choice, attributes in self._choices:
            choice.__dict__.clear()
            choice.__dict__.update(attributes)
        for scaler in self._scalers:
            scaler.restore()
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
        note_change()
        self._random.restore()

    def _keep(self, tensor: Any) -> None:
        """Copy a tensor's values, unless that was done before."""
        if isinstance(tensor, Tensor) and id(tensor) not in self._tensors:
            with as_stored():
                alias = tensor.detach()
            self._tensors[id(tensor)] = (tensor, alias, alias.clone())

    def keep_tree(self, value: Any) -> Any:
        """Copy the values of all tensors in nested dicts and lists, and return the same tensors in new containers."""
        if isinstance(value, Tensor):
            self._keep(value)
            return value
        if isinstance(value, dict):
            return {name: self.keep_tree(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self.keep_tree(each) for each in value)
        return copy.deepcopy(value)

    def _keep_gradient(self, parameter: Parameter) -> None:
        if parameter.grad is not None:
            self._keep(parameter.grad)


class _OptimizerState:
    """An optimizer's hyperparameters and the state of each parameter; not the parameters themselves."""

    def __init__(self, snapshot: Snapshot, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._snapshot = snapshot
        self._stepped = list(getattr(optimizer, "_stepped", []))
        self._states = {p: (state, snapshot.keep_tree(state)) for p, state in _states_of(optimizer).items()}
        self._groups = [
            (group, {k: snapshot.keep_tree(v) for k, v in group.items() if k not in ("params", "param_names")})
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        if isinstance(self._optimizer, RowOptimizer):
            self._optimizer._stepped = list(self._stepped)
        states = _states_of(self._optimizer)
        for parameter in [p for p in states if p not in self._states]:
            del states[parameter]
        for parameter, (state, kept) in self._states.items():
            state.clear()
            state.update(_containers(kept))
            states[parameter] = state
        for group, kept in self._groups:
            for name in [k for k in group if k not in kept and k not in ("params", "param_names")]:
                del group[name]
            group.update(_containers(kept))


def _states_of(optimizer: Optimizer) -> Any:
    """Return an optimizer's state by parameter, as stored: the ``state`` of our optimizers flushes stale rows first."""
    return optimizer._stored_state if isinstance(optimizer, RowOptimizer) else optimizer.state


class _ScalerState:
    """A gradient scaler's state, with the optimizers it has unscaled since its last update: state_dict() lacks them."""

    def __init__(self, snapshot: Snapshot, scaler: torch.amp.GradScaler) -> None:
        self._scaler, self._attributes = scaler, dict(vars(scaler))
        self._stages = snapshot.keep_tree(dict(self._attributes.get("_per_optimizer_states", {})))
        for value in self._attributes.values():
            snapshot._keep(value)

    def restore(self) -> None:
        vars(self._scaler).clear()
        vars(self._scaler).update(self._attributes)
        stages = self._attributes.get("_per_optimizer_states")
        if stages is not None:
            stages.clear()
            stages.update(_containers(self._stages))


def _containers(value: Any) -> Any:
    """Return the same tensors in new dicts and lists, so that nobody changes the snapshot's own containers."""
    if isinstance(value, dict):
        return {name: _containers(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_containers(each) for each in value)
    return value if isinstance(value, Tensor) else copy.deepcopy(value)


class _TableState:
    """What our optimizers keep of a table beside weight and state: which rows are stale, and the steps they missed."""

    def __init__(self, snapshot: Snapshot, parameter: Parameter) -> None:
        self._parameter = parameter
        table = table_if_any(parameter)
        self._table: Table | None = table
        self._rows: Rows | None = table.rows if table is not None else None
        if self._rows is not None:
            slots = {name: getattr(self._rows, name) for name in Rows.__slots__}
            self._slots = {**slots, "states": list(slots["states"])}
            snapshot.keep_tree([*slots["states"], slots["last_step"]])
            self._clock: Clock = slots["clock"]
            self._attributes = {**self._clock.__dict__, "_tables": list(self._clock._tables)}
            snapshot.keep_tree([self._clock.history, self._clock.steps])

    def restore(self) -> None:
        table = table_if_any(self._parameter)
        if table is None:
            return
        if self._rows is None:
            table._rows = None  # without the table's own release, which would flush its stale rows
        else:
            for name, value in self._slots.items():
                setattr(self._rows, name, list(value) if name == "states" else value)
            self._clock.__dict__.update({**self._attributes, "_tables": list(self._attributes["_tables"])})
            table._rows = self._rows
        mark_fresh(self._parameter)
        mark_stale([self._parameter])


def _parameters_of(found: Found) -> list[Parameter]:
    of_models = [p for model in found.models for p in model.parameters()]
    of_optimizers = [p for optimizer in found.optimizers for group in optimizer.param_groups for p in group["params"]]
    return of_models + of_optimizers


def _choices_of(models: list[Module]) -> list[AutoChoice]:
    """Return the ``AutoChoice`` of each table with ``grad_mode="auto"``: what it has counted and chosen."""
    parts = [part for model in models for part in model.modules()]
    choices = [getattr(part, name, None) for part in parts for name in ("_auto", "auto")]
    return [choice for choice in choices if isinstance(choice, AutoChoice)]
