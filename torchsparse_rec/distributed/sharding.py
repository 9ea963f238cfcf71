"""Splitting the tables of a module over the ranks of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Module, Parameter

from .._torch import as_stored
from ..nn import EmbeddingBagCollection, EmbeddingCollection, EmbeddingVariable
from ..nn.collection import Collection
from ..tables.part import Part
from ..tables.stale import is_parameter, set_part
from ..tables.table import table_of
from .agreed import agreed
from .collection import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from .ddp import leave_out_of_ddp
from .machine import MACHINES, Machine
from .plan import Replicated, TablePlan, as_plan
from .planner import Planned, Use, choose, expected_distinct
from .ranks import Ranks
from .shards import Shards, check_columns, digest
from .states import add_state_hooks, part_of

__all__ = ["plan_of", "shard"]

# Examples of a rank's batch for the planner, each with one id of each feature.
_BATCH = 4096

_SHARDED: dict[type, Any] = {
    EmbeddingBagCollection: ShardedEmbeddingBagCollection,
    EmbeddingCollection: ShardedEmbeddingCollection,
}


def shard(
    module: Module,
    mesh: DeviceMesh | None = None,
    plan: Any = "auto",
    *,
    constraints: Mapping[str, Sequence[Any]] | None = None,
    memory: int | None = None,
    machine: Machine | None = None,
    merge: bool = True,
    wire_dtype: torch.dtype | None = None,
    timeout: float = 300.0,
) -> Module:
    """
    Split the tables of a module's collections over the ranks of a job, in place.

    Each rank keeps its part of every table, and looks up, with all others, what its own batch needs: the model's code
    stays as it is. Parameters stay the same objects; each holds a part.

    Args:
        module: a module with collections, or one: every :class:`EmbeddingBagCollection` and
            :class:`EmbeddingCollection` in it becomes a sharded one. Other tables stay as they are. It is the same on
            all ranks.
        mesh: of one dimension, the ranks that share the tables. Default: all ranks of the job.
        plan: where tables are: a plan for all of them, ``RowWise()``, ``TableWise(rank)``, ``ColumnWise(ranks)`` or
            ``Replicated()``, or TorchRec's name for one, such as ``"row_wise"``; or a mapping from names of tables to
            plans. Default ``"auto"``: where no plan is given, the planner chooses, see :func:`plan_of`. A name that
            tables of several modules have stands for all of them; one of them is ``"bags.user"``.
        constraints: for tables by name, the plans that the planner may choose from.
        memory: bytes that a rank has for tables and states. Default: as much as is needed.
        machine: the constants of the planner's model, as :func:`calibrate` measures them in the job. Default: those
            shipped for the mesh's backend.
        merge: whether a row that several ids of a batch name travels once. Default True. False gives, for any number
            of ranks, the bits of one process, at the price of a row and a gradient for each id.
        wire_dtype: ``torch.bfloat16`` or ``torch.float16``, that rows, results and gradients of a wider dtype have on
            the way: half as much is sent, and each is rounded. Default None: nothing is rounded.
        timeout: seconds after which a rank that waits for others gives up, and says for which. Default 300.

    Returns:
        The module.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised; the ranks have different modules or plans; a table's
            optimizer has states already; two modules share a table.
        ValueError: ``wire_dtype`` is another; a mesh of more than one dimension; a plan that is unknown or does not
            suit; tables that do not fit.

    A rank's gradients are added up over ranks and divided by their number, as DistributedDataParallel does with those
    of dense layers. Make the optimizer after this call, and wrap the module for DistributedDataParallel after it too:
    that leaves these tables alone.

    Example:
        >>> from torch.distributed import TCPStore, destroy_process_group, init_process_group
        >>> from torchsparse_rec.nn import EmbeddingBagCollection, EmbeddingBagConfig
        >>> init_process_group("gloo", store=TCPStore("localhost", 0, 1, is_master=True), rank=0, world_size=1)
        >>> tables = [EmbeddingBagConfig(num_embeddings=100, embedding_dim=2, name="t", feature_names=["f"])]
        >>> model = shard(EmbeddingBagCollection(tables), plan="row_wise")
        >>> model({"f": torch.tensor([3, 1, 4])}).values().shape
        torch.Size([3, 2])
        >>> destroy_process_group()
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "shard: torch.distributed must be initialised: call torch.distributed.init_process_group() first, under "
            "torchrun"
        )
    if wire_dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"shard: wire_dtype must be torch.bfloat16, torch.float16 or None, got {wire_dtype}")
    found = {name: child for name, child in module.named_modules() if type(child) in _SHARDED}
    mesh = _mesh(mesh, found)
    group = mesh.get_group()
    ranks = mesh.size()
    error, planned, texts = None, Planned({}, [], []), []
    try:
        names = _check(module, found)
        given = _given(plan, names, ranks)
        uses = [_use(name, each, k, merge, wire_dtype) for name, (each, k) in names.items()]
        machine = machine or MACHINES.get(dist.get_backend(group), MACHINES["gloo"])
        planned = choose(uses, ranks, memory, machine, given, _by_table("constraints", constraints or {}, names))
        texts = [_text(name, each, k, planned, merge, wire_dtype) for name, (each, k) in names.items()]
    except (TypeError, ValueError, RuntimeError) as raised:
        error = raised
    _check_same(agreed(group, texts, error))
    shared = Ranks(group, next(iter(found.values())).device, timeout)
    for title, each in found.items():
        plans = [planned.tables[name].plan for name, (owner, _) in names.items() if owner is each]
        weights = each._stored_weights()
        pooled = isinstance(each, EmbeddingBagCollection)
        dtypes = [weight.dtype for weight in weights]
        its = (title or type(each).__name__, plans, each._whole, each._features, dtypes, pooled, merge, wire_dtype)
        for config, weight, of_table in zip(each._configs, weights, plans, strict=True):
            _cut(weight, config.name, of_table, shared)
        each.__class__ = _SHARDED[type(each)]
        each._shards = Shards(*its, shared)
        each._forget_lookups()
        add_state_hooks(each)
    leave_out_of_ddp(module)
    vars(module)["_torchsparse_rec_planned"] = planned

    return module


def plan_of(module: Module) -> Planned:
    """
    Return where the tables of a module are, as :func:`shard` chose.

    Args:
        module: that :func:`shard` was given.

    Returns:
        An object to print: for each table rows, bytes, plan, ranks, bytes sent in a step, time, and the reason in
        words. The same on all ranks.

    Raises:
        ValueError: the module was not given to :func:`shard`.
    """
    planned = vars(module).get("_torchsparse_rec_planned")
    if planned is None:
        raise ValueError(f"plan_of: module must be one that shard() was given, got a {type(module).__name__}")
    return planned  # type: ignore[no-any-return]


def _mesh(mesh: DeviceMesh | None, found: Mapping[str, Collection]) -> DeviceMesh:
    if mesh is None:
        device = next(iter(found.values())).device.type if found else "cpu"
        return init_device_mesh("cuda" if device == "cuda" else "cpu", (dist.get_world_size(),))
    if mesh.ndim != 1:
        raise ValueError(
            f"shard: mesh must have one dimension, got {mesh.ndim}, {list(mesh.shape)}: take one of them, such as "
            f"mesh[{(mesh.mesh_dim_names or ('name',))[0]!r}]"
        )
    return mesh


def _check(module: Module, found: Mapping[str, Collection]) -> dict[str, tuple[Collection, int]]:
    """Return the collection and number of each table, by a name that no other table has."""
    if not found:
        raise ValueError(
            "shard: module must have an EmbeddingBagCollection or EmbeddingCollection that is not sharded yet, got "
            f"a {type(module).__name__} with none"
        )
    owners: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in owners and any(parameter is w for each in found.values() for w in each._stored_weights()):
            raise RuntimeError(
                f"shard: two modules share a table, {owners[id(parameter)]!r} and {name!r}: copy it first"
            )
        owners[id(parameter)] = name
    all_names = [config.name for each in found.values() for config in each._configs]
    names: dict[str, tuple[Collection, int]] = {}
    for title, each in found.items():
        for k, (config, weight) in enumerate(zip(each._configs, each._stored_weights(), strict=True)):
            unique = config.name if all_names.count(config.name) == 1 else f"{title}.{config.name}".lstrip(".")
            _check_table(unique, each._tables[k], weight)
            names[unique] = each, k
    return names


def _check_table(name: str, table: Module, weight: Parameter) -> None:
    if isinstance(table, EmbeddingVariable):
        raise ValueError(f"shard: table {name!r} must have a fixed number of rows, got an EmbeddingVariable")
    if weight.device.type == "meta":
        raise ValueError(f"shard: table {name!r} must have values, got one on meta")
    if not is_parameter(weight):
        raise ValueError(f"shard: the weight of table {name!r} must be a parameter, got one that is computed")
    record = table_of(weight)
    if record.rows is not None:
        raise RuntimeError(
            f"shard: the optimizer of table {name!r}, {type(record.optimizer).__name__}, has states of the whole "
            "table: make it afterwards"
        )


def _given(plan: Any, names: Mapping[str, tuple[Collection, int]], ranks: int) -> dict[str, TablePlan]:
    """Return the plans that the user has given, by table."""
    if isinstance(plan, str) and plan == "auto":
        return {}
    plans = _by_table("plan", plan, names) if isinstance(plan, Mapping) else dict.fromkeys(names, plan)
    found = {}
    for name, given in plans.items():
        if given == "auto":
            continue
        each, k = names[name]
        found[name] = as_plan(name, given, ranks, each._configs[k].embedding_dim)
        check_columns(name, found[name], each._stored_weights()[k])
    return found


def _by_table(argument: str, given: Mapping[str, Any], names: Mapping[str, tuple[Collection, int]]) -> dict[str, Any]:
    """Return what is given for each table; a name that several modules' tables have stands for all of them."""
    found = {}
    for key, value in given.items():
        its = [name for name, (each, k) in names.items() if key in (name, each._configs[k].name)]
        if not its:
            raise ValueError(f"shard: {argument} must name tables, {', '.join(map(repr, names))}, got {key!r}")
        found.update(dict.fromkeys(its, value))
    return found


def _use(name: str, collection: Collection, k: int, merge: bool, wire_dtype: torch.dtype | None) -> Use:
    """Describe a table for the planner, and what a step does with it where no batch is known yet."""
    config, weight = collection._configs[k], collection._stored_weights()[k]
    ids = _BATCH * len(config.feature_names)
    row = weight.element_size() * config.embedding_dim
    optimizer = table_of(weight).optimizer
    return Use(
        name,
        config.num_embeddings,
        config.embedding_dim,
        weight.element_size(),
        2 * row,
        ids,
        expected_distinct(ids, config.num_embeddings) if merge else ids,
        ids,
        isinstance(collection, EmbeddingBagCollection),
        optimizer is not None and optimizer.steps_whole_rows,
        None if wire_dtype is None else min(wire_dtype.itemsize, weight.element_size()),
    )


def _text(
    name: str, collection: Collection, k: int, planned: Planned, merge: bool, wire_dtype: torch.dtype | None
) -> tuple[str, str]:
    """Return a table's name, and all that must be the same on all ranks."""
    config, weight = collection._configs[k], collection._stored_weights()[k]
    plan = planned.tables[name].plan
    with torch.no_grad(), as_stored():
        copies = digest(weight) if isinstance(plan, Replicated) else 0
    said = {
        "in": type(collection).__name__,
        "num_embeddings": config.num_embeddings,
        "embedding_dim": config.embedding_dim,
        "dtype": weight.dtype,
        "feature_names": config.feature_names,
        "pooling": getattr(config, "pooling", None),
        "padding_idx": getattr(config, "padding_idx", None),
        "max_norm": getattr(config, "max_norm", None),
        "requires_grad": weight.requires_grad,
        "grad_mode": collection.grad_mode,
        "merge": merge,
        "wire_dtype": wire_dtype,
        "plan": plan,
        "checksum": copies,
    }
    return name, str(said)


def _check_same(texts: Sequence[list[tuple[str, str]]]) -> None:
    """Raise ``RuntimeError`` if a rank has other tables than rank 0."""
    for rank, its in enumerate(texts):
        for mine, other in zip_longest(texts[0], its, fillvalue=("no table", "")):
            if mine != other:
                raise RuntimeError(
                    f"shard: all ranks must have the same tables, got {mine[0]!r} {mine[1]} on rank 0 and {other[0]!r} "
                    f"{other[1]} on rank {rank}"
                )


@torch.no_grad()
def _cut(weight: Parameter, name: str, plan: TablePlan, ranks: Ranks) -> None:
    """Let a parameter keep this rank's part of its table."""
    table = table_of(weight)
    table.flush()
    with as_stored():
        set_part(weight, Part(ranks.group, isinstance(plan, Replicated), name))
        weight.data = part_of(weight.data, plan, ranks.rank, ranks.count)
