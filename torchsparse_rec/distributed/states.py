"""The parts of tables that ranks keep, and whole tables."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .._torch import as_stored
from ..tables.table import table_of
from .blocks import Blocks
from .collection import Sharded
from .plan import Plan, Replicated, RowWise
from .ranks import Call, Ranks
from .shards import columns

__all__ = ["add_state_hooks", "full_state_dict", "part_of"]

# Whether state_dict() is to gather whole tables.
_gathers: ContextVar[bool] = ContextVar("gathers", default=False)


def part_of(table: Tensor, plan: Plan, rank: int, ranks: int) -> Tensor:
    """Return the part of a whole table ``[V, D]`` that a rank keeps, as a tensor of its own."""
    if isinstance(plan, Replicated):
        return table.clone()
    if isinstance(plan, RowWise):
        return Blocks(table.shape[0]).part_of(table, rank, ranks)
    for owner, (begin, end) in columns(plan, table.shape[1]):
        if owner == rank:
            return table[:, begin:end].clone(memory_format=torch.contiguous_format)
    return table.new_empty(0, table.shape[1])


def _whole(part: Tensor, plan: Plan, shape: tuple[int, int], call: Call, ranks: Ranks) -> Tensor:
    """Return a whole table from the parts of all ranks, which all call this."""
    sizes = torch.full((ranks.count, 1), part.numel())
    came = ranks.headers(call, sizes)[:, 0].tolist()
    with ranks.exchange(call):
        got = ranks.send(call, [part.reshape(-1).repeat(ranks.count)], [[part.numel()] * ranks.count], [came])[0]
    parts = got.split(came)
    rows, dim = shape
    if isinstance(plan, Replicated):
        return parts[ranks.rank].view(shape)
    if isinstance(plan, RowWise):
        blocks = Blocks(rows)
        return blocks.whole(torch.cat([x.view(blocks.places, -1, dim) for x in parts], 1))
    return torch.cat([parts[owner].view(rows, -1) for owner, _ in columns(plan, dim)], 1)


def add_state_hooks(collection: Sharded) -> None:
    """Let a sharded collection's ``load_state_dict`` take whole tables, and its ``state_dict`` no parts for such."""
    collection.register_state_dict_post_hook(_save)
    collection.register_load_state_dict_pre_hook(_load)


def _save(collection: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    name, ranks = collection._shards.name, collection._shards.ranks
    if not _gathers.get():
        raise RuntimeError(
            f"{name}: state_dict() of one rank has that rank's parts of tables alone: call "
            "torchsparse_rec.distributed.full_state_dict(module) on all ranks, which gives whole tables"
        )
    for key, config, table, plan in _tables(collection, prefix):
        with as_stored():
            part = table._stored_weight().detach()
        call = Call(name, f"full_state_dict, table {config.name!r}", "train" if collection.training else "eval")
        state[key] = _whole(part, plan, (config.num_embeddings, config.embedding_dim), call, ranks)


def _load(collection: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    ranks = collection._shards.ranks
    for key, config, _table, plan in _tables(collection, prefix):
        given = state.get(key)
        if isinstance(given, Tensor) and given.shape == (config.num_embeddings, config.embedding_dim):
            state[key] = part_of(given, plan, ranks.rank, ranks.count)


def _tables(collection: Any, prefix: str) -> Any:
    """Yield each table's key, config, module and plan."""
    tables: Mapping[str, Any] = collection._modules[collection._children]._modules
    for config, plan in zip(collection._configs, collection._shards.plans, strict=True):
        table = tables[config.name]
        table_of(table._stored_weight()).flush()
        yield f"{prefix}{collection._children}.{config.name}.weight", config, table, plan


def full_state_dict(module: Module) -> dict[str, Any]:
    """
    Return a module's state with whole tables, as the module had it before it was sharded; all ranks call it.

    Args:
        module: sharded by :func:`shard`, or with such modules in it.

    Returns:
        What ``module.state_dict()`` of one process gives: it loads there, and into a module sharded by any plan. Each
        rank gets all of it, in memory of its own.

    Raises:
        RuntimeError: ranks call different things.
    """
    token = _gathers.set(True)
    try:
        return dict(module.state_dict())
    finally:
        _gathers.reset(token)
