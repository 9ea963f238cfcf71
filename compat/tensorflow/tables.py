"""Tables of a model, and their optimizer's slots, from and to the files of TensorFlow, Keras and DeepRec."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from ...optim.row_optimizer import RowOptimizer
from ...typing import PartitionStrategy
from ..checkpoints.format import check_crcs
from ..checkpoints.growing import GrowingRows, growing_rows
from ..checkpoints.names import Move, Target, keras_order, names_of, pairs_of, targets_of
from ..checkpoints.slots import Slots, check_rule, find_slots, steps_by_name, v1_slots
from ..checkpoints.sources import Found, Source, open_source
from ..checkpoints.transfers import Transfer, carry_out, check_arguments, check_contents, check_fit, group_of, moves_of
from ..checkpoints.written import Saved, write_checkpoint, write_h5

__all__ = ["load_tables", "save_tables"]


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

    TensorFlow is not needed. Files are mapped into memory and copied part by part. So only the tables and the states
    take memory, and for a moment the keys of tables that grow. Names, shapes, dtypes, keys and checksums of all tensors
    are compared before any is written.

    Args:
        path: a V2 checkpoint, without ``.index``, or its folder, for the last one; a SavedModel's folder; a
            ``.weights.h5`` or ``.keras`` file, which need h5py.
        model: the model, whose tables are modules of ``torch.nn`` or :mod:`torchsparse_rec.nn`, collections' tables
            included.
        tables: the tables' names in the file. It is a mapping of the model's names to the file's, for the tables to
            load; or a pattern such as ``"model/{}/embeddings"``, with the table's name for ``{}``, for all tables.
            Default ``"{}"``. A name in the file is exact, or some parts of one between slashes, or has ``*`` for
            anything, and must fit one variable. The model's names are of tables, modules or parameters: ``"users"``,
            ``"bags.embedding_bags.users.weight"``.
        optimizer: an Adam, AdamW, Adagrad, Ftrl, RMSprop or SGD of :mod:`torchsparse_rec.optim`, which takes over the
            slots and the count of steps of the tables that it holds. Its hyperparameters must be TensorFlow's: for Adam
            also ``tensorflow_eps=True``; for momentum the lr, since TensorFlow's slot is a multiple of it. Where no
            optimizer there has TensorFlow's rule, docs/tensorflow.md names a replacement.
        variables: the names of all trainable variables of a file of Keras, with an optimizer. They are in the order of
            ``model.trainable_variables``, such as ``[v.path for v in model.trainable_variables]``. It is needed where
            several have the shape of one table.
        partition_strategy: the rule by which ids lie in partitions with separate names: ``"div"`` (default) or
            ``"mod"``, the default of ``tf.compat.v1.nn.embedding_lookup``.
        dry_run: whether to print what would go where, and load nothing.

    Returns:
        What went where.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a variable or slot is missing, or not the only one of its name; a shape or dtype differs. Also if no
            step of the optimizer is the step of the file's; or a file is damaged, foreign, big endian or compressed.
            The error names ``path`` and tensor. Nothing has been changed then.

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
    check_arguments("load_tables", optimizer, tables)
    source = open_source(path, partition_strategy)
    order = None if variables is None else keras_order(source, variables)
    transfers = [_transfer_of(source, *pair, optimizer, order) for pair in pairs_of(source, model, tables)]
    moves = [move for transfer in transfers for move in moves_of(transfer)]
    if dry_run:
        print(*moves, sep="\n")
        return moves
    for found in dict.fromkeys(found for transfer in transfers for found in transfer.all()):
        check_crcs(found.name, found.pieces())
    for transfer in transfers:
        check_contents(source.path, transfer)
    for transfer in transfers:
        for _ in carry_out(transfer, optimizer):
            pass
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
    of the model; slots follow in the same order. A Keras model with these layers and no other variables loads it.

    Args:
        path: the path of the checkpoint, without ``.index``; or a name that ends with ``.weights.h5``, which needs
            h5py.
        model: the argument of :func:`load_tables`.
        tables: the argument of :func:`load_tables`, except that names in the file are exact. Default ``"{}"``.
        optimizer: the argument of :func:`load_tables`; its slots are saved too.
        partitions: the number of slices of rows into which a checkpoint cuts each table and slot, as a partitioned
            variable. Default 1.
        global_step: the count that a checkpoint has under this name, or Keras's ``iteration``. Default: the steps of
            the optimizer; SGD does not count them.
        dry_run: whether to print what would go where, and save nothing.

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
    check_arguments("save_tables", optimizer, tables)
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


# ---- Loading --------------------------------------------------------------------------------------------------------


def _transfer_of(
    source: Source, target: Target, found: Found | str, optimizer: RowOptimizer | None, order: list[Found | None] | None
) -> Transfer:
    """Return a file's content for a table, checked."""
    growing = target.growing
    group = group_of(optimizer, target.parameter)
    slots, rows = Slots({}, None), []
    if isinstance(found, str):
        assert growing is not None
        ends: dict[str, tuple[str, float]] = {}
        if optimizer is not None and group is not None:
            ends, slots = v1_slots(optimizer, group), Slots({}, steps_by_name(source, "", group))
        rows = growing_rows(source, found, growing.embedding_dim, ends)
    elif optimizer is not None and group is not None:
        slots = find_slots(source, found, optimizer, group, order)
    if growing is not None and isinstance(found, Found):
        # A table of fixed size, whose rows become the rows of the keys 0, 1, ...
        rows, slots = [GrowingRows.of_fixed(found, slots.states)], slots._replace(states={})
    if optimizer is not None and group is not None:
        check_rule(source.path, optimizer, group, slots)
    transfer = Transfer(target, found if isinstance(found, Found) and growing is None else None, rows, slots)
    check_fit(source.path, transfer, optimizer, "beta1_power, iterations or global_step")
    return transfer


# ---- Saving ---------------------------------------------------------------------------------------------------------


def _saved(target: Target, name: str, optimizer: RowOptimizer | None) -> Saved:
    """Return a table for saving, with all rows up to date."""
    group = group_of(optimizer, target.parameter)
    if optimizer is None or group is None:
        return Saved(name, target, {}, None, None)
    state = optimizer.state.get(target.parameter, {})
    steps = int(state.get("step", 0)) if optimizer.counts_steps else None
    return Saved(name, target, state, steps, group)
