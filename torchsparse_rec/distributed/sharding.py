"""Splitting the tables of a module over the ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Module, Parameter

from .._agreed import agreeing
from .._torch import as_stored
from ..jagged.inputs import as_keyed_jagged_tensor
from ..nn.collection import Collection
from ..tables.part import Part
from ..tables.stale import set_part
from ..tables.table import table_of
from ..typing import PlanName
from ._keys import is_of_rank
from ._scores import OverRanks
from .boxes import kept_by_plan
from .ddp import leave_out_of_ddp
from .drawn import drawn_part
from .machine import MACHINES, Machine
from .plan import ColumnWise, Plans, Replicated, RowWise, TablePlan, TableWise, as_plan
from .planner import Planned, Use, choose, expected_distinct
from .ranks import Ranks
from .sharded import SHARDED
from .shards import Shards
from .states import add_state_hooks, part_of
from .tables import ModuleTable, check_columns, digest, growth_of, tables_of
from .together import look_up_together, note_split

__all__ = ["plan_of", "shard"]

ModuleT = TypeVar("ModuleT", bound=Module)

# Examples of a rank's batch for the planner, each with one id of each feature.
_BATCH = 4096
# The number of keys from which such a batch's keys of a table that grows are drawn.
_KEYS = 10**9


def shard(
    module: ModuleT,
    mesh: DeviceMesh | None = None,
    plan: Plans = "auto",
    *,
    batch: Any = None,
    constraints: Mapping[str, Sequence[TablePlan | PlanName]] | None = None,
    memory: int | None = None,
    machine: Machine | None = None,
    merge: bool = True,
    wire_dtype: torch.dtype | None = None,
    timeout: float = 300.0,
) -> ModuleT:
    """
    Split the tables of a module over the ranks of a job, in place.

    Each rank keeps its part of every table, and looks up, with all others, what its own batch needs: the model's code
    does not change. Parameters stay the same objects; each holds a part.

    Args:
        module: a module with tables: every :class:`Embedding`, :class:`EmbeddingBag`, :class:`EmbeddingVariable`,
            :class:`EmbeddingBagCollection` and :class:`EmbeddingCollection` of :mod:`torchsparse_rec.nn` in it, or
            itself, becomes a sharded one. Other modules, also of subclasses, stay unchanged. The module is the same on
            all ranks. If a table is on ``meta``, each rank draws the rows of its own part, on the mesh's device, so
            that none ever holds a whole one. The rows come from rank 0's generator, and are the same for every number
            of ranks and every plan. Such a table gets a new parameter.
        mesh: the ranks that share the tables, in one dimension. Default: all ranks of the job.
        plan: the places of tables. A plan for all of them is ``RowWise()``, ``TableWise(rank)``, ``ColumnWise(ranks)``
            or ``Replicated()``, or TorchRec's name for one, such as ``"row_wise"``. Or a mapping from names of tables
            to plans. Default ``"auto"``: where no plan is given, the planner chooses, see :func:`plan_of`. A name that
            tables of several modules have stands for all of them; a single one has a name such as ``"bags.user"``.
        batch: an example of a rank's batch for the planner, a ``KeyedJaggedTensor`` or a mapping from features to ids
            as the module takes it. The numbers of ids, and of different ids, that tables get are the means of all
            ranks' batches. The feature of an ``Embedding`` or ``EmbeddingBag`` has the table's name. Default None:
            4,096 examples with one id of each feature, some of them popular.
        constraints: the plans that the planner may choose from, by tables' names.
        memory: the bytes that a rank has for tables and states. Default: as much as is needed.
        machine: the constants of the planner's model, as :func:`calibrate` measures them in the job. Default: the
            shipped ones for the mesh's backend.
        merge: whether a row that several ids of a batch name travels once. Default True. False gives, for any number
            of ranks, the bits of one process, at the price of a row and a gradient for each id.
        wire_dtype: the dtype of wider rows, results and gradients on the way, ``torch.bfloat16`` or ``torch.float16``:
            half as much is sent, and each number is rounded. Default None: nothing is rounded.
        timeout: the seconds after which a rank that waits for others gives up, and names them. Default 300.

    Returns:
        The module.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised; the ranks have different modules or plans; two modules
            share a table. Also if a table's optimizer has states already, or was made while the table was on ``meta``.
        ValueError: ``wire_dtype`` is another; ``batch`` lacks a feature; a mesh of more than one dimension. Also for a
            plan that is unknown or does not suit, tables that do not fit, and a table on ``meta`` with an ``init_fn``
            that cannot draw single rows.

    Gradients are added up over ranks and divided by the number of ranks, as DistributedDataParallel does for dense
    layers. Make the optimizer after this call, and wrap the module for DistributedDataParallel after it too: that
    leaves these tables alone.

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
    inside = {id(table) for each in module.modules() if isinstance(each, Collection) for *_, table in each.configured()}
    found = {
        title: child for title, child in module.named_modules() if type(child) in SHARDED and id(child) not in inside
    }
    its = {title: tables_of(title, child) for title, child in found.items()}
    mesh = _mesh(mesh, its)
    group, count = mesh.get_group(), mesh.size()
    with agreeing(group) as counts:
        names = _checked(module, its)
        counts += [] if batch is None else [_counts(batch, names)]
    with agreeing(group) as said:
        of_ranks = [each[0] if each else {} for each in counts]
        given = _given(plan, names, count, constraints or {})
        uses = [_use(name, table, merge, wire_dtype, of_ranks) for name, table in names.items()]
        machine = machine or MACHINES.get(dist.get_backend(group), MACHINES["gloo"])
        planned = choose(uses, count, memory, machine, given, _by_table("constraints", constraints or {}, names))
        options = {"merge": merge, "wire_dtype": wire_dtype}
        texts = [(name, str(_said(table, planned.tables[name].plan) | options)) for name, table in names.items()]
        seeds = [0] * len(names)
        if any(table.is_on_meta for table in names.values()):
            seeds = torch.randint(2**63 - 1, (len(names),), device="cpu").tolist()
        said += [texts, seeds]
    _check_same([texts for texts, _ in said])
    seed = iter(said[0][1])  # rank 0's, whatever the other ranks' generators are at
    on_mesh = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    devices = [table.weight.device for table in names.values() if not table.is_on_meta]
    ranks = Ranks(group, next(iter(devices), on_mesh), timeout)
    for title, child in found.items():
        plans = [planned.tables[name].plan for name, table in names.items() if table.module is child]
        for table, of_table in zip(its[title], plans, strict=True):
            _cut(table, of_table, ranks, next(seed))
        name = title or type(child).__name__
        child.__class__ = SHARDED[type(child)]
        child.shards = Shards(name, its[title], plans, merge, wire_dtype, ranks)  # type: ignore[assignment]
        child.forget_lookups()  # type: ignore[operator]
        for table in its[title]:
            note_split(child, table.weight)
        add_state_hooks(child)  # type: ignore[arg-type]
    leave_out_of_ddp(module)
    vars(module)["_torchsparse_rec_planned"] = planned
    return module


def plan_of(module: Module) -> Planned:
    """
    Return where the tables of a module are, as :func:`shard` chose.

    Args:
        module: the module that :func:`shard` was given.

    Returns:
        An object to print: for each table rows, bytes, plan, ranks, bytes sent in a step, time, and the reason in
        words. The same on all ranks.

    Raises:
        ValueError: the module was not given to :func:`shard`.

    Example:
        >>> from torch.distributed import TCPStore, destroy_process_group, init_process_group
        >>> from torchsparse_rec.nn import Embedding
        >>> init_process_group("gloo", store=TCPStore("localhost", 0, 1, is_master=True), rank=0, world_size=1)
        >>> model = shard(torch.nn.ModuleDict({"users": Embedding(100, 2)}), plan="row_wise")
        >>> print(plan_of(model).tables["users"].why)
        given
        >>> destroy_process_group()
    """
    planned = vars(module).get("_torchsparse_rec_planned")
    if planned is None:
        raise ValueError(f"plan_of: module must be one that shard() was given, got a {type(module).__name__}")
    return planned  # type: ignore[no-any-return]


def _mesh(mesh: DeviceMesh | None, its: Mapping[str, Sequence[ModuleTable]]) -> DeviceMesh:
    if mesh is None:
        device = next((table.weight.device.type for tables in its.values() for table in tables), "cpu")
        return init_device_mesh("cuda" if device == "cuda" else "cpu", (dist.get_world_size(),))
    if mesh.ndim != 1:
        raise ValueError(
            f"shard: mesh must have one dimension, got {mesh.ndim}, {list(mesh.shape)}: take one of them, such as "
            f"mesh[{(mesh.mesh_dim_names or ('name',))[0]!r}]"
        )
    return mesh


def _checked(module: Module, its: Mapping[str, Sequence[ModuleTable]]) -> dict[str, ModuleTable]:
    """Return each table, by a name that no other table has."""
    if not its:
        raise ValueError(
            f"shard: module must have {', '.join(each.__name__ for each in SHARDED)} that is not sharded yet, got "
            f"a {type(module).__name__} with none"
        )
    weights = {id(table.weight) for tables in its.values() for table in tables}
    owners: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in owners and id(parameter) in weights:
            raise RuntimeError(
                f"shard: two modules share a table, {owners[id(parameter)]!r} and {name!r}: copy it first"
            )
        owners[id(parameter)] = name
    given = [table.name for tables in its.values() for table in tables]
    names: dict[str, ModuleTable] = {}
    for title, tables in its.items():
        for table in tables:
            unique = table.name if given.count(table.name) == 1 else f"{title}.{table.name}".lstrip(".")
            table.check(unique)
            names[unique] = table
    return names


def _given(
    plan: Any, names: Mapping[str, ModuleTable], ranks: int, constraints: Mapping[str, Any]
) -> dict[str, TablePlan]:
    """Return the plans that the user has given, by table: here, or as a variable's ``target_gpu``."""
    wanted = _by_table("plan", plan, names) if isinstance(plan, Mapping) else dict.fromkeys(names, plan)
    plans = {name: its for name, its in wanted.items() if not (isinstance(its, str) and its == "auto")}
    chosen = plans.keys() | _by_table("constraints", constraints, names).keys()
    for name, table in names.items():
        if table.grows and table.child.target_gpu >= 0 and name not in chosen:
            if table.child.target_gpu >= ranks:
                raise ValueError(
                    f"shard: target_gpu of table {name!r} must be a rank, in [0, {ranks}), got {table.child.target_gpu}"
                )
            plans[name] = TableWise(table.child.target_gpu)
    found = {}
    for name, given in plans.items():
        table = names[name]
        found[name] = as_plan(name, given, ranks, table.dim)
        check_columns(name, found[name], table.weight, table.max_norm)
    return found


def _by_table(argument: str, given: Mapping[str, Any], names: Mapping[str, ModuleTable]) -> dict[str, Any]:
    """Return the value given for each table; a name that several modules' tables have stands for all of them."""
    found = {}
    for key, value in given.items():
        its = [name for name, table in names.items() if key in (name, table.name)]
        if not its:
            raise ValueError(f"shard: {argument} must name tables, {', '.join(map(repr, names))}, got {key!r}")
        found.update(dict.fromkeys(its, value))
    return found


def _counts(batch: Any, names: Mapping[str, ModuleTable]) -> dict[str, tuple[int, int, int]]:
    """Count for each table a batch's ids, its different ids, and its results."""
    features = list(dict.fromkeys(feature for table in names.values() for feature in table.features))
    its = as_keyed_jagged_tensor(batch, features, "shard: batch").to_dict()
    found = {}
    for name, table in names.items():
        ids = torch.cat([its[feature].values() for feature in table.features])
        bags = sum(its[feature].lengths().numel() for feature in table.features)
        found[name] = ids.numel(), ids.unique().numel(), ids.numel() if table.pooling is None else bags
    return found


def _use(
    name: str,
    table: ModuleTable,
    merge: bool,
    wire_dtype: torch.dtype | None,
    of_ranks: Sequence[Mapping[str, tuple[int, int, int]]],
) -> Use:
    """Describe a table and its use in a step for the planner: as in the batches of ranks, if they have any."""
    ids = bags = float(_BATCH * len(table.features))
    counted = [counts[name] for counts in of_ranks if name in counts]
    if counted:
        ids, distinct, bags = (sum(column) / len(counted) for column in zip(*counted, strict=True))
    else:
        distinct = expected_distinct(ids, _KEYS if table.rows is None else table.rows)
    element = table.weight.element_size()
    optimizer = table_of(table.weight).optimizer
    return Use(
        name,
        table.rows,
        table.dim,
        element,
        2 * element * table.dim,
        ids,
        distinct if merge else ids,
        bags,
        table.pooling is not None,
        table.max_norm is not None or (optimizer is not None and optimizer.column_obstacle(table.weight) is not None),
        None if wire_dtype is None else min(wire_dtype.itemsize, element),
    )


def _said(table: ModuleTable, plan: TablePlan) -> dict[str, Any]:
    """Return what of a table must be the same on all ranks."""
    return {
        "in": type(table.module).__name__,
        "num_embeddings": table.rows,
        "embedding_dim": table.dim,
        "dtype": table.weight.dtype,
        "feature_names": table.features,
        "pooling": table.pooling,
        "padding_idx": table.padding_idx,
        "max_norm": table.max_norm,
        "requires_grad": table.weight.requires_grad,
        "grad_mode": table.module.grad_mode,
        "plan": plan,
        "initializer": table.initializer if table.is_on_meta else "its values",
        **(growth_of(table.child) if table.grows else {}),
        "checksum": digest(table.weight) if isinstance(plan, Replicated) and not table.is_on_meta else 0,
    }


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
def _cut(table: ModuleTable, plan: TablePlan, ranks: Ranks, seed: int) -> None:
    """Make a parameter keep this rank's part of its table; for a table on meta draw the part, for a new parameter."""
    weight = table.weight
    if table.rows is None:
        _cut_growing(table, plan, ranks)
        return
    table_of(weight).flush()
    with as_stored():
        if table.is_on_meta:
            kept = kept_by_plan(table.rows, table.dim, plan, ranks.rank, ranks.count)
            part = drawn_part(table, kept, seed, ranks.device)
            weight = table.child._parameters["weight"] = Parameter(part, weight.requires_grad)
        else:
            part = part_of(weight.data, plan, ranks.rank, ranks.count)
        its = ranks.group, isinstance(plan, Replicated), table.name, None, look_up_together, OverRanks
        set_part(weight, Part(*its, isinstance(plan, RowWise), isinstance(plan, ColumnWise)))
        weight.data = part


def _cut_growing(table: ModuleTable, plan: TablePlan, ranks: Ranks) -> None:
    """Make a variable keep this rank's keys."""
    has: Callable[[Tensor], Tensor]
    if isinstance(plan, RowWise):
        has = partial(is_of_rank, rank=ranks.rank, ranks=ranks.count)
        table.child.keep_keys(has, ranks.count)
    else:
        assert isinstance(plan, TableWise)
        is_mine = plan.rank == ranks.rank
        has = partial(torch.full_like, fill_value=is_mine, dtype=torch.bool)
        if not is_mine:
            table.child.keep_keys(has, None)
    set_part(table.weight, Part(ranks.group, False, table.name, has, look_up_together, OverRanks))
