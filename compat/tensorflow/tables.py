"""Tables of a model, and their optimizer's slots, from and to the files of TensorFlow, Keras and DeepRec."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...optim.row_optimizer import RowOptimizer
from ...tables.table import accumulator_dtype, table_if_any
from ...typing import PartitionStrategy
from ...variable.optimizer_rows import new_zeros
from ._checkpoint_format import check_crcs, copy_bytes
from ._checkpoint_sources import Found, Source, open_source
from ._growing_tables import GrowingRows, growing_rows, insert_rows
from ._table_names import Move, Target, names_of, one_variable, pairs_of, targets_of
from ._table_slots import Slots, find_slots, steps_by_name, v1_slots
from ._tables_written import Saved, write_checkpoint, write_h5

__all__ = ["load_tables", "save_tables"]


class _Plan(NamedTuple):
    """A table, and what a file has for it."""

    target: Target
    weight: Found | None
    growing: list[GrowingRows]
    slots: Slots

    def all(self) -> list[Found]:
        own = [] if self.weight is None else [self.weight]
        return [
            *own,
            *(found for found, _ in self.slots.states.values()),
            *(x for rows in self.growing for x in rows.all()),
        ]


def load_tables(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    tables: str | Mapping[str, str] | None = None,
    *,
    optimizer: RowOptimizer | None = None,
    variables: Sequence[str] | None = None,
    partition_strategy: PartitionStrategy = "div",
    dry_run: bool = False,
) -> list[Move]:
    """
    Load tables, and their optimizer's slots, from a file of TensorFlow, Keras or DeepRec.

    TensorFlow is not needed. Files are mapped into memory and copied part by part, so that nothing but the tables and
    the states takes memory. Names, shapes, dtypes and checksums of all tensors are compared before any is written.

    Args:
        path: a V2 checkpoint, without ``.index``, or its folder, for the last one; a SavedModel's folder; a
            ``.weights.h5`` or ``.keras`` file, which need h5py.
        model: whose tables are modules of ``torch.nn`` or :mod:`torchsparse_rec.nn`, collections' tables included.
        tables: what the file calls them: a mapping of the model's names to the file's, of those to load; or a pattern
            such as ``"model/{}/embeddings"``, with the table's name for ``{}``, of all. Default ``"{}"``. A name in the
            file is exact, or some parts of one between slashes, or has ``*`` for anything, and must fit one variable.
            Names of the model are those of tables, modules or parameters: ``"users"``,
            ``"bags.embedding_bags.users.weight"``.
        optimizer: an Adam, AdamW, Adagrad, Ftrl, RMSprop or SGD of :mod:`torchsparse_rec.optim`, which takes over the
            slots and the count of steps of the tables that it holds. Its hyperparameters must be TensorFlow's: of Adam
            also ``tensorflow_eps=True``; of momentum the lr, of which TensorFlow's slot is a multiple.
        variables: of a file of Keras, with an optimizer: the names of all trainable variables, in the order of
            ``model.trainable_variables``. It is needed where several have the shape of one table.
        partition_strategy: how ids lie in partitions that have names of their own: ``"div"`` (default) or ``"mod"``,
            the default of ``tf.compat.v1.nn.embedding_lookup``.
        dry_run: print what would go where, and load nothing.

    Returns:
        What went where.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a variable or slot is missing, or not the only one of its name; a shape or dtype differs; a file is
            damaged, big endian or compressed. The error names file and tensor. Nothing has been changed then.

    Example:
        >>> import os, tempfile
        >>> from torchsparse_rec import nn, optim
        >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
        >>> old = torch.nn.ModuleDict({"users": nn.Embedding(3, 2), "cities": nn.Embedding(2, 2)})
        >>> _ = save_tables(path, old, "model/{}/embeddings", optimizer=optim.Adagrad(old.parameters()))
        >>> new = torch.nn.ModuleDict({"user": nn.Embedding(3, 2)})
        >>> optimizer = optim.Adagrad(new.parameters())
        >>> _ = load_tables(path, new, {"user": "model/users/*"}, optimizer=optimizer, dry_run=True)
        model/users/embeddings -> user.weight  [3, 2] float32
        model/users/embeddings/Adagrad -> state of user.weight: sum  [3, 2] float32
        >>> _ = load_tables(path, new, {"user": "model/users/*"}, optimizer=optimizer)
        >>> torch.equal(new["user"].weight, old["users"].weight)
        True
    """
    if partition_strategy not in ("div", "mod"):
        raise ValueError(f"load_tables: partition_strategy must be 'div' or 'mod', got {partition_strategy!r}")
    _check("load_tables", optimizer, tables)
    source = open_source(path, partition_strategy)
    order = None if variables is None else [one_variable(source, name) for name in variables]
    plans = [_planned(source, *pair, optimizer, order) for pair in pairs_of(source, model, tables)]
    moves = [move for plan in plans for move in _moves(plan)]
    if dry_run:
        print(*moves, sep="\n")
        return moves
    for found in dict.fromkeys(found for plan in plans for found in plan.all()):
        check_crcs(found.name, found.pieces())
    for plan in plans:
        _load(source, plan, optimizer)
    return moves


def save_tables(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    tables: str | Mapping[str, str] | None = None,
    *,
    optimizer: RowOptimizer | None = None,
    partitions: int = 1,
    global_step: int | None = None,
    dry_run: bool = False,
) -> list[Move]:
    """
    Save tables, and their optimizer's slots, as a V2 checkpoint of TensorFlow or a ``.weights.h5`` of Keras.

    TensorFlow is not needed. A checkpoint has the names of ``tf.compat.v1.train``: slots as ``<table>/Adam`` and
    ``<table>/Adam_1``, ``beta1_power``, ``global_step``; ``tf.train.load_checkpoint`` reads it. A growing table has
    DeepRec's names. In a ``.weights.h5`` the tables are Keras's layers ``embedding``, ``embedding_1`` ..., in the order
    of the model, and slots follow in the same order: a Keras model with these layers and no other variables loads it.

    Args:
        path: of the checkpoint, without ``.index``; or a name that ends with ``.weights.h5``, which needs h5py.
        model: as of :func:`load_tables`.
        tables: as of :func:`load_tables`, except that names in the file are exact. Default ``"{}"``.
        optimizer: as of :func:`load_tables`; its slots are saved too.
        partitions: into how many slices of rows a checkpoint cuts each table and slot, as a partitioned variable.
            Default 1.
        global_step: the count that a checkpoint has under this name, or Keras's ``iteration``. Default: the steps of
            the optimizer; SGD does not count them.
        dry_run: print what would go where, and save nothing.

    Returns:
        What went where.

    Raises:
        ValueError: names are the same, there are fewer rows than partitions, steps of tables differ, or the file's
            format has no such dtype or slot.

    Example:
        >>> import os, tempfile
        >>> from torchsparse_rec import nn
        >>> model = torch.nn.ModuleDict({"item": nn.Embedding(4, 2)})
        >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
        >>> for move in save_tables(path, model, "{}/embedding_weights", partitions=2):
        ...     print(move)
        item.weight -> item/embedding_weights  [4, 2] float32 in 2 parts
    """
    _check("save_tables", optimizer, tables)
    targets = targets_of(model, tables if isinstance(tables, Mapping) else None)
    names = names_of(targets, tables)
    for name in names:
        if "*" in name or names.count(name) > 1 or not name:
            raise ValueError(f"save_tables: tables must give each table a name of its own in the file, got {name!r}")
    for argument, value, least in (("partitions", partitions, 1), ("global_step", global_step, 0)):
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not is_count and not (argument == "global_step" and value is None):
            raise ValueError(f"save_tables: {argument} must be an integer of at least {least}, got {value!r}")
    saved = [_saved(*pair, optimizer) for pair in zip(targets, names, strict=True)]
    is_h5 = os.fspath(path).endswith(".h5")
    if is_h5 and (partitions != 1 or any(target.growing is not None for target in targets)):
        raise ValueError("save_tables: a .weights.h5 has neither partitions nor tables that grow: save a checkpoint")

    write = write_h5 if is_h5 else write_checkpoint
    moves = write(os.fspath(path), saved, optimizer, partitions, global_step, dry_run)
    if dry_run:
        print(*moves, sep="\n")
    return moves


def _check(function: str, optimizer: Any, tables: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, RowOptimizer):
        raise TypeError(
            f"{function}: optimizer must be one of torchsparse_rec.optim, got {type(optimizer).__name__}: those of "
            "compat.tensorflow.optimizers have import_slots and export_slots"
        )
    if not isinstance(tables, (str, Mapping, type(None))):
        raise TypeError(f"{function}: tables must be a pattern or a mapping of names, got {type(tables).__name__}")


def _group_of(optimizer: RowOptimizer | None, parameter: Tensor) -> dict[str, Any] | None:
    """Return the optimizer's group that holds a parameter, if one does."""
    groups = [] if optimizer is None else optimizer.param_groups
    return next((group for group in groups if any(p is parameter for p in group["params"])), None)


# ---- Loading --------------------------------------------------------------------------------------------------------


def _planned(
    source: Source, target: Target, found: Found | str, optimizer: RowOptimizer | None, order: list[Found] | None
) -> _Plan:
    """Return what a file has for a table, checked."""
    parameter, growing = target.parameter, target.growing
    group = _group_of(optimizer, parameter)
    slots, rows = Slots({}, None), []
    if isinstance(found, str):
        assert growing is not None
        ends: dict[str, tuple[str, float]] = {}
        if optimizer is not None and group is not None:
            ends, slots = v1_slots(optimizer, group), Slots({}, steps_by_name(source, "", group))
        rows = growing_rows(source, found, growing.embedding_dim, ends)
    elif optimizer is not None and group is not None:
        slots = find_slots(source, found, optimizer, group, order)
    if growing is not None:
        if isinstance(found, Found):  # a table of fixed size, whose rows become those of the keys 0, 1, ...
            states: dict[str, tuple[Found, Found | None, float]] = {
                state: (slot, None, factor) for state, (slot, factor) in slots.states.items()
            }
            rows, slots = [GrowingRows(None, found, None, None, states)], slots._replace(states={})
        if growing.total_count():
            raise ValueError(f"{target.parameter_name!r} must have no rows yet, got {growing.total_count()}")
        if growing.cold is not None and rows[0].states:
            raise ValueError(f"{target.parameter_name!r} must have all rows in one tier to take over slots")
    wide = accumulator_dtype(parameter.dtype)
    for part in rows:
        shape = (part.values.shape[0], parameter.shape[1])
        _check_tensor(source, part.values, target, shape, parameter.dtype)
        for slot, _, _ in part.states.values():
            _check_tensor(source, slot, target, shape, wide)
    weight = found if isinstance(found, Found) and growing is None else None
    if weight is not None:
        _check_tensor(source, weight, target, tuple(parameter.shape), parameter.dtype)
    for slot, _ in slots.states.values():
        _check_tensor(source, slot, target, tuple(parameter.shape), wide)
    has_slots = bool(slots.states) or any(part.states for part in rows)
    if has_slots and slots.steps is None and group is not None and ("betas" in group or group.get("lr_decay")):
        raise ValueError(
            f"{source.path} must say how many steps {type(optimizer).__name__} has taken, by beta1_power, iterations "
            "or global_step: it does not"
        )
    return _Plan(target, weight, rows, slots)


def _check_tensor(source: Source, found: Found, target: Target, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless a tensor can be copied without loss."""
    if found.shape != shape:
        raise ValueError(
            f"{source.path}: {found.name!r} must have the shape of {target.parameter_name!r}, {list(shape)}, got "
            f"{list(found.shape)}"
        )
    if found.dtype is None or not found.dtype.is_floating_point or torch.promote_types(found.dtype, dtype) != dtype:
        raise ValueError(
            f"{source.path}: {found.name!r} must be of {dtype}, or of floats that it holds, for "
            f"{target.parameter_name!r}, got {found.dtype or 'a dtype that torch does not have'}"
        )


def _moves(plan: _Plan) -> list[Move]:
    where = plan.target.parameter_name
    pairs = [] if plan.weight is None else [(plan.weight, where)]
    if plan.growing:
        for part in plan.growing:
            fields = {"keys": part.keys, "values": part.values, "freqs": part.freqs, "versions": part.versions}
            pairs += [(found, f"{name} of {where}") for name, found in fields.items() if found is not None]
            pairs += [(its[0], f"state of {where}: {state}") for state, its in part.states.items()]
    else:
        pairs += [(found, f"state of {where}: {state}") for state, (found, _) in plan.slots.states.items()]
    return [Move(found.name, to, found.shape, found.dtype, found.parts) for found, to in pairs]


@torch.no_grad()
def _load(source: Source, plan: _Plan, optimizer: RowOptimizer | None) -> None:
    """Write what a file has for a table into the model and its optimizer."""
    target, steps = plan.target, plan.slots.steps or 0
    if target.growing is not None:
        insert_rows(target.growing, plan.growing, optimizer, steps, source.path)
        return
    assert plan.weight is not None
    parameter = target.parameter
    table = table_if_any(parameter)
    if table is not None:
        table.release()  # first: rows that are stale are of the past, which ends here
    _copy(plan.weight, parameter.detach())
    group = _group_of(optimizer, parameter)
    if optimizer is None or group is None:
        return
    state: dict[str, Any] = {}
    if optimizer._counts_steps:
        on_device = group.get("capturable") or group.get("fused")
        state["step"] = torch.tensor(float(steps), device=parameter.device if on_device else "cpu")
    before, dtype = optimizer._stored_state.get(parameter, {}), accumulator_dtype(parameter.dtype)
    for name, (slot, factor) in plan.slots.states.items():
        values = before.get(name)
        if not isinstance(values, Tensor) or values.dtype != dtype or values.shape != parameter.shape:
            values = new_zeros(parameter.shape, dtype, parameter.device)  # of huge pages, which are quicker to fill
        _copy(slot, values)
        state[name] = values if factor == 1 else values.mul_(factor)
    optimizer._wide.pop(parameter, None)
    optimizer._stored_state[parameter] = state


def _copy(found: Found, out: Tensor) -> None:
    for piece in found.pieces():
        copy_bytes(piece, out)


# ---- Saving ---------------------------------------------------------------------------------------------------------


def _saved(target: Target, name: str, optimizer: RowOptimizer | None) -> Saved:
    """Return a table as it is to be saved, all rows up to date."""
    group = _group_of(optimizer, target.parameter)
    if optimizer is None or group is None:
        return Saved(name, target, {}, None, None)
    state = optimizer.state.get(target.parameter, {})
    steps = int(state.get("step", 0)) if optimizer._counts_steps else None
    return Saved(name, target, state, steps, group)
