"""The states of sharded modules: DTensors, where each rank has its part of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch import as_stored
from .._torch_modules import mesh_of
from ..tables.blocks import Blocks
from ..tables.part import are_apart
from ..tables.table import table_of
from .boxes import KeptByPlan, kept_by_plan
from .plan import ColumnWise, Replicated, RowWise, TablePlan, TableWise
from .ranks import Ranks
from .sharded import Sharded
from .shards import columns

__all__ = ["add_state_hooks", "part_of", "parts_of"]


def part_of(table: Tensor, plan: TablePlan, rank: int, ranks: int) -> Tensor:
    """Return the part of a whole table ``[V, D]`` that a rank keeps, as a tensor of its own."""
    if isinstance(plan, Replicated):
        return table.clone()
    if isinstance(plan, RowWise):
        return Blocks(table.shape[0]).part_of(table, rank, ranks)
    for owner, (begin, end) in columns(plan, table.shape[1]):
        if owner == rank:
            return table[:, begin:end].clone(memory_format=torch.contiguous_format)
    return table.new_empty(0, table.shape[1])


def parts_of(module: Sharded, prefix: str) -> Iterator[tuple[str, Tensor, KeptByPlan]]:
    """
    Yield each table's key in a state, this rank's part of it, up to date, and what that is of the whole table.

    Tables that grow are left out: their modules refuse to give a state.
    """
    shards = module.shards
    for table, plan in zip(shards.tables, shards.plans, strict=True):
        if table.rows is None:
            continue
        table_of(table.weight).flush()
        with as_stored():
            part = table.weight.detach()
        kept = kept_by_plan(table.rows, table.dim, plan, shards.ranks.rank, shards.ranks.count)
        yield f"{prefix}{table.key}", part, kept


def add_state_hooks(module: Sharded) -> None:
    """Make a sharded module's ``state_dict`` have DTensors, and ``load_state_dict`` take them or whole tables."""
    module.register_state_dict_post_hook(_save)
    module.register_load_state_dict_pre_hook(_load)


def _save(module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    if are_apart():
        return
    for key, part, kept in parts_of(module, prefix):
        state[key] = _as_dtensor(part, kept, module.shards.ranks)


def _as_dtensor(part: Tensor, kept: KeptByPlan, ranks: Ranks) -> DTensor:
    """Return a part as the part of a DTensor ``[Q, S, D]``: by rows it is the part's own memory, else a copy."""
    mesh, placement = _layout(kept, ranks)
    box = kept.read(part, kept.box) if len(part) else part.new_empty(kept.box.shape)
    _, blocks, dim = shape = kept.whole.shape
    stride = (blocks * dim, dim, 1)
    return DTensor.from_local(box, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)


def _layout(kept: KeptByPlan, ranks: Ranks) -> tuple[DeviceMesh, Placement]:
    plan, device = kept.plan, ranks.device.type
    everybody = dist.get_process_group_ranks(ranks.group)
    if isinstance(plan, TableWise):
        assert plan.rank is not None
        return mesh_of([everybody[plan.rank]], device), Replicate()
    if isinstance(plan, ColumnWise) and plan.ranks != tuple(range(ranks.count)):
        assert plan.ranks is not None
        return mesh_of([everybody[rank] for rank in plan.ranks], device), Shard(2)
    mesh = DeviceMesh.from_group(ranks.group, device)
    if isinstance(plan, Replicated):
        return mesh, Replicate()
    return mesh, Shard(1) if isinstance(plan, RowWise) else Shard(2)


def _load(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    ranks = module.shards.ranks
    for key, part, kept in parts_of(module, prefix):
        given = state.get(key)
        if isinstance(given, DTensor):
            _check_layout(key, given, kept, ranks)
            box = given.to_local()
            if isinstance(kept.plan, RowWise):
                state[key] = box.reshape(kept.shape)
            elif len(part):
                state[key] = kept.blocks.whole(box)
            else:
                state[key] = part
        elif isinstance(given, Tensor):
            if given.shape != (kept.rows, kept.dim):
                raise ValueError(
                    f"load_state_dict: {key!r} must be a whole table, {[kept.rows, kept.dim]}, or a DTensor as of "
                    f"state_dict(), got {list(given.shape)}"
                )
            state[key] = part_of(given, kept.plan, ranks.rank, ranks.count)


def _check_layout(key: str, given: DTensor, kept: KeptByPlan, ranks: Ranks) -> None:
    mesh, placement = _layout(kept, ranks)
    wanted = list(kept.whole.shape), [placement], mesh.mesh.tolist()
    got = list(given.shape), list(given.placements), given.device_mesh.mesh.tolist()
    if got != wanted:
        raise ValueError(
            f"load_state_dict: {key!r} must be a DTensor as of state_dict() of this module, {wanted[0]}, {wanted[1]} "
            f"on ranks {wanted[2]}, got {got[0]}, {got[1]} on ranks {got[2]}: torch.distributed.checkpoint.load "
            "brings a checkpoint of other ranks or plans into that"
        )
