"""Tables of a model, and their optimizer's states, from checkpoints of TorchRec, dynamicemb and SOK."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import Any

import torch

from ..._agreed import agreeing, together
from ...distributed.tables import check_columns
from ...optim.row_optimizer import RowOptimizer
from ..checkpoints.format import Piece
from ..checkpoints.growing import GrowingRows
from ..checkpoints.names import Move, Target, check_distinct, names_of, targets_of
from ..checkpoints.slots import Slots
from ..checkpoints.transfers import Transfer, carry_out, check_arguments, check_contents, check_fit, group_of, moves_of
from ._opened import Opened, open_content
from ._parts import Parts, copy_kept
from ._states import check_steps, find_states

__all__ = ["load_tables"]


def load_tables(
    path: str | os.PathLike[str] | Mapping[str, Any],
    model: torch.nn.Module,
    tables: str | Mapping[str, str] | None = None,
    *,
    optimizer: RowOptimizer | None = None,
    steps: int | None = None,
    average_shards: bool = False,
    dry_run: bool = False,
) -> list[Move]:
    """
    Load tables, and their optimizer's states, from a checkpoint of TorchRec or a dump of dynamicemb or SOK.

    None of them is needed, nor a process group. Files are mapped into memory and copied part by part. So only the
    tables and the states take memory, and for a moment the keys of tables that grow. Names, shapes, dtypes, keys and
    checksums of all that is loaded are compared before any is written; dumps have no checksums. If tables of the model
    are split by :func:`torchsparse_rec.distributed.shard`, all ranks call this, and each reads its part.

    Args:
        path: a folder that ``torch.distributed.checkpoint.save`` has written, from any number of ranks, with tables
            split by rows, by columns or not; or one with such folders in it. Or a file of ``torch.save``, or a state,
            with whole tensors. Or a folder of dynamicemb's ``DynamicEmbDump`` or of ``sok.dump``, for tables that grow.
            One must trust a folder of torch as one trusts code: a part of it is a pickle.
        model: the model, whose tables are modules of ``torch.nn`` or :mod:`torchsparse_rec.nn`, collections' tables
            included.
        tables: the tables' names in the checkpoint. It is a mapping of the model's names to the checkpoint's, for the
            tables to load, any parameters among them. Or a pattern such as ``"ebc.embedding_bags.{}.weight"``, with the
            table's name for ``{}``, for all tables. A name in the checkpoint is exact, except that ``model.`` or
            ``module.`` before it may be left out; or some parts of one between dots; or has ``*`` for anything. It must
            fit one tensor. Default: the parameter's own name, or else the table's.
        optimizer: an optimizer of :mod:`torchsparse_rec.optim`, which takes over the states of the tables that it
            holds. The states may have the names of fused optimizers or of torch's. The optimizer keeps its
            hyperparameters: the checkpoint does not contain TorchRec's, nor which of two optimizers with states of the
            same names wrote it. Fused optimizers do not change rows without a gradient: ``lazy=True``.
        steps: the number of steps that the optimizer has taken, where the checkpoint does not contain it, as with
            TorchRec's fused Adam and SOK.
        average_shards: whether to take the mean of the shards' numbers, weighted by the shards' widths. It is for
            row-wise optimizers of a table that was split by columns, which has one number for a row in each shard. The
            mean is what one number for the whole row would be after the same gradients, but steps from there differ
            from TorchRec's. Default False: refuse.
        dry_run: whether to print what would go where, on the first rank, and load nothing.

    Returns:
        What went where.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a tensor or state is missing, or not the only one of its name, or has no counterpart; a shape or
            dtype differs. Also if a key is there twice, or there are more than a table's capacity, or a file is
            damaged. The error names file and tensor. Or a table is ``ColumnWise``, and the optimizer takes its rows as
            wholes. Nothing has been changed then, on any rank.

    Example:
        >>> from torchsparse_rec import nn, optim
        >>> weight, sums = torch.randn(3, 2), torch.rand(3)
        >>> states = {"ebc.embedding_bags.user.weight": {"user.momentum1": sums}}
        >>> checkpoint = {"model": {"ebc.embedding_bags.user.weight": weight}, "optimizer": {"state": states}}
        >>> config = nn.EmbeddingBagConfig(name="user", num_embeddings=3, embedding_dim=2, feature_names=["user"])
        >>> model = torch.nn.ModuleDict({"ebc": nn.EmbeddingBagCollection([config])})
        >>> optimizer = optim.RowWiseAdagrad(model.parameters())
        >>> for move in load_tables(checkpoint, model, optimizer=optimizer):
        ...     print(move)
        model.ebc.embedding_bags.user.weight -> ebc.embedding_bags.user.weight  [3, 2] float32
        optimizer.state.ebc.embedding_bags.user.weight.user.momentum1 ->
            state of ebc.embedding_bags.user.weight: sum  [3] float32
        >>> torch.equal(optimizer.state[model["ebc"].embedding_bags["user"].weight]["sum"], sums)
        True
    """
    check_arguments("load_tables", optimizer, tables)
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 0):
        raise ValueError(f"load_tables: steps must be None or an integer of at least 0, got {steps!r}")
    parts = Parts(model)
    with agreeing(parts.group):
        opened = open_content(path)
        targets = targets_of(model, tables if isinstance(tables, Mapping) else None, parts=True)
        texts: list[str | None] = [None] * len(targets) if tables is None else [*names_of(targets, tables)]
        named = [(target, opened.find(target, text)) for target, text in zip(targets, texts, strict=True)]
        check_distinct(opened.path, named)
        transfers = [_transfer_of(opened, *pair, optimizer, steps, average_shards, parts) for pair in named]
        moves = [move for transfer in transfers for move in moves_of(transfer)]
        for found in [] if dry_run else [found for transfer in transfers for found in transfer.all()]:
            found.pieces()  # by which checksums are compared
        for transfer in [] if dry_run else transfers:
            check_contents(opened.path, transfer)
    if dry_run:
        if parts.rank == 0:
            print(*moves, sep="\n")
        return moves
    together(parts.group, _loaded(transfers, optimizer, parts))
    return moves


def _transfer_of(
    opened: Opened,
    target: Target,
    name: str,
    optimizer: RowOptimizer | None,
    steps: int | None,
    average_shards: bool,
    parts: Parts,
) -> Transfer:
    """Return a checkpoint's content for a table, checked."""
    group, kept = group_of(optimizer, target.parameter), parts.of(target.parameter)
    slots, rows = Slots({}, None), list[GrowingRows]()
    held = optimizer if group is not None else None
    if name in opened.dumps:
        rows, said = opened.dumps[name].rows(target.parameter.shape[1], held)
        check_steps(opened.path, name, said, steps)
        slots = Slots({}, steps if said is None else said)
        if held is not None and group is not None and {*held.rule(group).states} != {*rows[0].states}:
            raise ValueError(
                f"{opened.path}: {name!r} must have the states {list(held.rule(group).states)}, which "
                f"{type(held).__name__} keeps as its hyperparameters say, got {list(rows[0].states)}"
            )
    else:
        found = opened.variables[name]
        if held is not None and group is not None:
            its = opened.states.get(name, {})
            slots = find_states(opened.path, found, its, held, group, steps, average_shards)
        if target.growing is not None:  # a table of fixed size, whose rows become those of the keys 0, 1, ...
            rows, slots = [GrowingRows.of_fixed(found, slots.states)], slots._replace(states={})
    if kept is not None and held is not None:
        check_columns(target.parameter_name, kept.plan, target.parameter, None)
    weight = None if rows or name in opened.dumps else opened.variables[name]
    transfer = Transfer(target, weight, rows, slots)
    shape = None if kept is None else (kept.rows, kept.dim)
    check_fit(opened.path, transfer, held, "step or iter, or steps of load_tables", shape)
    return transfer


def _loaded(transfers: list[Transfer], optimizer: RowOptimizer | None, parts: Parts) -> Generator[None, None, None]:
    """Write all transfers, a piece at a step."""
    for transfer in transfers:
        kept = parts.of(transfer.target.parameter)

        def copy(piece: Piece, out: torch.Tensor, kept: Any = kept) -> None:
            copy_kept(piece, out, kept)

        yield from carry_out(transfer, optimizer, copy)
