"""Whole tables of one process, streamed from the parts of all ranks into files that are mapped."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .._agreed import agreed, agreeing
from ..nn import EmbeddingVariable
from ..tables.part import part_state
from ..variable.arguments import SAVE_INSTEAD, check_whole
from .boxes import KeptByPlan, kept_by_plan
from .plan import Replicated, RowWise, TableWise
from .ranks import Call, Ranks
from .sharded import Sharded
from .states import parts_of

__all__ = ["full_state_dict"]

# Bytes of a table that travel at a time.
_BYTES = 2**24


def full_state_dict(module: Module, *, folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """
    Return a module's state with whole tables, as the module had it before it was sharded; all ranks call it.

    Whole tables travel a few megabytes at a time, into files that are mapped: no rank has one in memory. Ranks of one
    machine share the files, whose names are gone when this returns, and whose disk space is free again when the
    tensors are.

    Args:
        module: a module sharded by :func:`shard`, or with such modules in it.
        folder: a folder that exists on each machine with ranks, on a disk with room for all tables. Default: a folder
            for temporary files, see ``tempfile.gettempdir``: choose another where that is in memory.

    Returns:
        What ``module.state_dict()`` of one process gives, with tables on the CPU: it loads there, and into a module
        sharded by any plan. Ranks of one machine have the same tables: clone one before you write it.

    Raises:
        RuntimeError: ranks call different things.
        OSError: there is no such folder, or no room in it; on all ranks, and training may go on.

    Example:
        >>> from torch.distributed import TCPStore, destroy_process_group, init_process_group
        >>> from torchsparse_rec.distributed import shard
        >>> from torchsparse_rec.nn import EmbeddingBagCollection, EmbeddingBagConfig
        >>> init_process_group("gloo", store=TCPStore("localhost", 0, 1, is_master=True), rank=0, world_size=1)
        >>> tables = [EmbeddingBagConfig(num_embeddings=100, embedding_dim=2, name="t", feature_names=["f"])]
        >>> model = shard(EmbeddingBagCollection(tables), plan="row_wise")
        >>> {name: x.shape for name, x in full_state_dict(model).items()}
        {'embedding_bags.t.weight': torch.Size([100, 2])}
        >>> destroy_process_group()
    """
    for child in module.modules():
        if isinstance(child, EmbeddingVariable):
            check_whole(child.stored_weight(), "full_state_dict", SAVE_INSTEAD)
    with part_state():
        state = dict(module.state_dict())
    places: dict[Ranks, _Place] = {}
    try:
        for title, sharded in module.named_modules():
            if isinstance(sharded, Sharded):
                ranks = sharded.shards.ranks
                call = ranks.announce(sharded.shards.name, "full_state_dict", sharded.training)
                if ranks not in places:
                    places[ranks] = _Place(ranks, folder)
                for key, table, kept in parts_of(sharded, f"{title}." if title else ""):
                    state[key] = _streamed(table, kept, ranks, call, places[ranks])
    finally:
        for place in places.values():
            place.close()
    for ranks in places:  # on every rank the names are gone
        agreed(ranks.group, None)
    return state


class _Place:
    """
    A folder that the ranks of a machine share, and which of them writes there.

    Args:
        ranks: all ranks.
        folder: the folder in which it is made; None: the one for temporary files.
    """

    def __init__(self, ranks: Ranks, folder: str | os.PathLike[str] | None) -> None:
        self.path, self.writes = Path(), False
        self.writers: list[int] = []
        left = list(range(ranks.count))
        while left:
            with agreeing(ranks.group) as said:
                if left[0] == ranks.rank:
                    self.path = Path(tempfile.mkdtemp(prefix="torchsparse_rec-", dir=folder))
                    self.writes = True
                said += [platform.node(), self.path]
            machine, path = said[left[0]]
            self.writers.append(left[0])
            joins = ranks.rank in left and platform.node() == machine and path.is_dir()
            if joins:
                self.path = path
            joined = agreed(ranks.group, joins)
            left = [rank for rank in left if not joined[rank]]

    def close(self) -> None:
        """Remove the names of the files."""
        if self.writes:
            shutil.rmtree(self.path, ignore_errors=True)


def _streamed(part: Tensor, kept: KeptByPlan, ranks: Ranks, call: Call, place: _Place) -> Tensor:
    """Return a whole table in a file; the parts of all ranks go there by some places of all blocks at a time."""
    if isinstance(kept.plan, Replicated):
        kept = kept_by_plan(kept.rows, kept.dim, TableWise(0), ranks.rank, ranks.count)
        part = part if ranks.rank == 0 else part[:0]
    path = place.path / "table"
    with agreeing(ranks.group):
        if place.writes:
            try:
                with open(path, "wb") as file:  # room for all of it: a mapped file that has none ends the process
                    os.posix_fallocate(file.fileno(), 0, kept.rows * kept.dim * part.element_size())
            except OSError as error:
                raise OSError(error.errno, f"no room for a table: {error.strerror}", str(path)) from error
    whole = torch.from_file(str(path), shared=True, size=kept.rows * kept.dim, dtype=part.dtype)
    whole = whole.view(kept.rows, kept.dim)
    each = [kept_by_plan(kept.rows, kept.dim, kept.plan, rank, ranks.count) for rank in range(ranks.count)]
    blocks = kept.blocks.count
    step = max(1, _BYTES // (blocks * kept.dim * part.element_size()))
    with ranks:
        for begin in range(0, kept.blocks.places, step):
            places = begin, min(begin + step, kept.blocks.places)
            rows = places[0] * blocks, min(places[1] * blocks, kept.rows)
            sizes = [_size(other, places, rows) for other in each]
            piece = _piece(part, kept, places, rows)
            sent = [len(piece) if rank in place.writers else 0 for rank in range(ranks.count)]
            came = sizes if place.writes else [0] * ranks.count
            out = piece.repeat(len(place.writers)) if ranks.count > 1 else piece
            got = ranks.start(ranks.group, call, [out], [sent], [came])()[0]
            if place.writes:
                whole[slice(*rows)] = _joined(got.split(sizes), each, places, rows)
    agreed(ranks.group, None)
    if place.writes:
        path.unlink()
    return whole


def _size(kept: KeptByPlan, places: tuple[int, int], rows: tuple[int, int]) -> int:
    """Return how many elements a rank keeps of some places of all blocks, which are rows of the whole table."""
    _, blocks, width = kept.box.shape
    return (places[1] - places[0]) * blocks * width if isinstance(kept.plan, RowWise) else (rows[1] - rows[0]) * width


def _piece(part: Tensor, kept: KeptByPlan, places: tuple[int, int], rows: tuple[int, int]) -> Tensor:
    if isinstance(kept.plan, RowWise):
        return part.view(kept.box.shape)[slice(*places)].reshape(-1)
    return part[slice(*rows)].reshape(-1)


def _joined(pieces: Sequence[Tensor], each: list[KeptByPlan], places: tuple[int, int], rows: tuple[int, int]) -> Tensor:
    """Return rows of the whole table from all ranks' pieces of them."""
    first = each[0]
    if isinstance(first.plan, RowWise):
        shapes = [(places[1] - places[0], *kept.box.shape[1:]) for kept in each]
        box = torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], 1)
        return box[:, first.blocks.reversed.to(box.device)].flatten(0, 1)[: rows[1] - rows[0]]
    found = sorted((kept.box.columns, k) for k, kept in enumerate(each) if kept.box.shape[2])
    return torch.cat([pieces[k].view(rows[1] - rows[0], -1) for _, k in found], 1)
