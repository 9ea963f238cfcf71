"""Tables and slots as TensorFlow and Keras write them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import optim
from ...files import whole_file
from ...optim.row_optimizer import RowOptimizer
from ...tables.layouts import accumulator_dtype
from .growing import write_rows
from .names import Move, Target
from .slots import beta_powers, factor_of, keras_groups, v1_slots
from .sources import h5py_module
from .writer import CheckpointWriter, host_chunks

__all__ = ["Saved", "write_checkpoint", "write_h5"]


class Saved(NamedTuple):
    """A table to save."""

    name: str
    target: Target
    state: dict[str, Any]
    """The optimizer's, up to date; empty before the first step."""
    steps: int | None
    """None: the optimizer does not count them, or there is none."""
    group: dict[str, Any] | None
    """The optimizer's group that holds it, if one does."""

    def slot(self, optimizer: RowOptimizer, name: str) -> Tensor:
        """Return a state; before the first step one of initial values, which takes no memory."""
        if isinstance(self.state.get(name), Tensor):
            return self.state[name]
        parameter = self.target.parameter
        initial = torch.tensor(optimizer.initial_value(name), dtype=accumulator_dtype(parameter.dtype))
        return initial.expand(parameter.shape)


def _steps_of(tables: list[Saved]) -> int | None:
    """Return the steps that all tables have taken."""
    held = [table for table in tables if table.group is not None]
    for table in held:
        if table.steps != held[0].steps:
            raise ValueError(
                f"save_tables: all tables of a file must have taken as many steps, got {held[0].steps} of "
                f"{held[0].name!r} and {table.steps} of {table.name!r}: save them in files of their own"
            )
    return held[0].steps if held else None


def write_checkpoint(
    path: str,
    tables: list[Saved],
    optimizer: RowOptimizer | None,
    partitions: int,
    global_step: int | None,
    dry_run: bool,
) -> list[Move]:
    """Write a V2 checkpoint with the names of ``tf.compat.v1``, and return what went where."""
    steps = _steps_of(tables)
    moves: list[Move] = []
    with contextlib.nullcontext() if dry_run else CheckpointWriter(path) as writer:

        def add(name: str, tensor: Tensor, to: str, parts: int = 1, factor: float = 1.0) -> None:
            if writer is not None:
                writer.add(name, tensor, parts, factor)
            moves.append(Move(to, name, tuple(tensor.shape), tensor.dtype, parts))

        for table in tables:
            where, growing = table.target.parameter_name, table.target.growing
            ends: dict[str, tuple[str, float]] = {}
            if optimizer is not None and table.group is not None:
                ends = v1_slots(optimizer, table.group)
            if growing is not None:
                if writer is not None:
                    write_rows(writer, table.name, growing, ends if table.state else {})
                shape = (growing.total_count(), growing.embedding_dim)
                moves.append(Move(where, f"{table.name}-values", shape, table.target.parameter.dtype, 1))
                continue
            add(table.name, table.target.parameter.detach(), where, partitions)
            for state, (end, factor) in ends.items():
                assert optimizer is not None
                slot = table.slot(optimizer, state)
                add(f"{table.name}/{end}", slot, f"state of {where}: {state}", partitions, 1 / factor)
            if isinstance(optimizer, optim.RMSprop) and ends and "momentum_buffer" not in ends:
                zeros = torch.zeros(()).expand(table.target.parameter.shape)  # TensorFlow has it in any case
                add(f"{table.name}/RMSProp_{len(ends)}", zeros, "nothing", partitions)
        held = [table.group for table in tables if table.group is not None]
        if held and "betas" in held[0]:
            for k, power in enumerate(beta_powers([float(beta) for beta in held[0]["betas"]], steps or 0)):
                add(f"beta{k + 1}_power", torch.tensor(power), "steps")
        count = steps if global_step is None else global_step
        if count is not None:
            add("global_step", torch.tensor(count), "steps")
    return moves


@contextlib.contextmanager
def _replaced(path: str, dry_run: bool) -> Iterator[Any]:
    """Yield a new HDF5 file, which then replaces the one at a path if nothing was raised; None for a dry run."""
    h5py = h5py_module()
    if dry_run:
        yield None
        return
    with whole_file(path) as place, h5py.File(place.name, "w") as file:
        yield file


def write_h5(
    path: str,
    tables: list[Saved],
    optimizer: RowOptimizer | None,
    partitions: int,
    global_step: int | None,
    dry_run: bool,
) -> list[Move]:
    """Write a file of weights as Keras does, and return what went where."""
    steps = _steps_of(tables)
    moves: list[Move] = []
    with _replaced(path, dry_run) as file:

        def add(name: str, tensor: Tensor, to: str, factor: float = 1.0) -> None:
            if tensor.dtype == torch.bfloat16:
                raise ValueError(f"{path}: {name!r} is of bfloat16, which HDF5 does not have: save a checkpoint")
            if file is not None:
                empty = torch.empty(0, dtype=tensor.dtype).numpy()
                data = file.create_dataset(name, shape=tuple(tensor.shape), dtype=empty.dtype)
                begin = 0
                for some in host_chunks(tensor, factor):
                    data[begin : begin + len(some)] = some.numpy()
                    begin += len(some)
            moves.append(Move(to, name, tuple(tensor.shape), tensor.dtype, 1))

        for k, table in enumerate(tables):
            group = f"layers/embedding{f'_{k}' if k else ''}/vars"
            add(f"{group}/0", table.target.parameter.detach(), table.target.parameter_name)
            if file is not None:
                file[group].attrs["name"] = table.name
        held = [(table, table.group) for table in tables if table.group is not None]
        if optimizer is not None and held:
            count = (steps or 0) if global_step is None else global_step
            numbers = {"iteration": np.int64(count), "learning_rate": np.float32(held[0][1]["lr"])}
            for k, (name, number) in enumerate(numbers.items()):
                if file is not None:
                    file.create_dataset(f"optimizer/vars/{k}", data=number)
                moves.append(Move(name, f"optimizer/vars/{k}", (), torch.float32 if k else torch.int64, 1))
            place = len(numbers)
            for states in keras_groups(optimizer, held[0][1]):
                for table, its_group in held:
                    for state in states:
                        factor = 1 / factor_of(optimizer, its_group, state, True)
                        to = f"state of {table.target.parameter_name}: {state}"
                        add(f"optimizer/vars/{place}", table.slot(optimizer, state), to, factor)
                        place += 1
    return moves
