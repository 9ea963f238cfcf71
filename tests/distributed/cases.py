"""Programs that ranks run on parts of a batch, and one process on the whole of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchsparse_rec import KeyedJaggedTensor, distributed, nn, optim
from torchsparse_rec.variable import EmbeddingVariableOption

# The examples of each rank: of as many, of different numbers, of none on some ranks.
SIZES = {
    "even": (4, 4, 4, 4),
    "uneven": (5, 2, 7, 3),
    "empty": (4, 0, 3, 0),
    "single": (4, 6, 3, 5),
    "many": (40, 17, 60, 30),
}


@dataclass(frozen=True)
class Table:
    """A table, and the features that look it up; ``option`` makes it one that grows."""

    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str = "sum"
    dtype: torch.dtype = torch.float32
    option: EmbeddingVariableOption | None = None


# Of one block, of few blocks and of many; two share feature b, one has two features.
TABLES = (Table(20, 4, ("a",)), Table(50, 5, ("b", "c")), Table(1000, 8, ("b",)))


@dataclass(frozen=True)
class Case:
    """
    A training program.

    Args:
        tables: looked up together; their names are t0, t1, ...
        plan: ``"row"``, ``"table"``, ``"column"``, ``"replicated"``, of all tables, or ``"mixed"``: the first three.
        kind: ``"bags"`` or ``"rows"``: which collection.
        weighted: whether ids have weights, which are trained.
        grad_mode: of the collection.
        optimizer: of ours, or ``torch.`` and the name of torch's.
        options: of the optimizer.
        merge: as for ``shard``.
        batch: of :data:`SIZES`; every bag of ``"single"`` has one id.
        steps: how many.
    """

    tables: tuple[Table, ...] = TABLES
    plan: str = "table"
    kind: str = "bags"
    weighted: bool = False
    grad_mode: str | None = "fused"
    optimizer: str = "Adagrad"
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    merge: bool = False
    batch: str = "uneven"
    steps: int = 4

    def __str__(self) -> str:
        parts = [self.plan, self.kind, str(self.grad_mode), self.optimizer, self.batch]
        return "-".join([*parts, *["weighted"] * self.weighted, *["merge"] * self.merge])


@dataclass
class Batch:
    """Ids, lengths and weights by feature, and a target for each of the collection's results."""

    ids: dict[str, Tensor]
    lengths: dict[str, Tensor]
    weights: dict[str, Tensor]
    targets: list[Tensor]


@dataclass
class Trained:
    """The results and the gradients of weights in each step, and all tables after the last."""

    results: list[list[Tensor]]
    gradients: list[dict[str, Tensor]]
    tables: dict[str, Tensor]


# ---- What both sides have --------------------------------------------------------------------------------------------


def collection_of(case: Case, device: str = "cpu", seed: int = 0) -> Any:
    """Return a case's collection as one process has it, the same for the same seed."""
    configs: list[Any] = []
    for k, table in enumerate(case.tables):
        fields = {"name": f"t{k}", "feature_names": list(table.features), "data_type": table.dtype}
        fields["ev_option"] = table.option
        if case.kind == "bags":
            configs.append(nn.EmbeddingBagConfig(table.rows, table.dim, pooling=table.pooling, **fields))
        else:
            configs.append(nn.EmbeddingConfig(table.rows, table.dim, **fields))
    torch.manual_seed(seed)
    if case.kind == "bags":
        return nn.EmbeddingBagCollection(configs, case.weighted, grad_mode=case.grad_mode).to(device)
    return nn.EmbeddingCollection(configs, grad_mode=case.grad_mode).to(device)


def optimizer_of(case: Case, module: Any) -> Any:
    """Return a case's optimizer of a module."""
    if case.optimizer.startswith("torch."):
        made = getattr(torch.optim, case.optimizer.removeprefix("torch."))(module.parameters(), **case.options)
        if case.grad_mode == "auto":
            module.use_optimizer(made)
        return made
    in_backward = case.grad_mode in ("fused", "auto")
    return getattr(optim, case.optimizer)(module.parameters(), in_backward=in_backward, **case.options)


def is_any_key(case: Case, feature: str) -> bool:
    """Say whether all tables that a feature looks up grow: its ids are any numbers."""
    return all(table.option is not None for table in case.tables if feature in table.features)


def as_ids(case: Case, feature: str, numbers: Tensor) -> Tensor:
    """Return the ids of a feature by their numbers."""
    return numbers * 1_000_003_000_003 - 5 if is_any_key(case, feature) else numbers


def probe(case: Case, device: Any) -> Batch:
    """Return a batch with many ids of each feature, one in a bag; where any number is a key, with unknown ones too."""
    batch = Batch({}, {}, {}, [])
    count = min(table.rows for table in case.tables)
    for feature in dict.fromkeys(feature for table in case.tables for feature in table.features):
        batch.ids[feature] = as_ids(case, feature, torch.arange(count) * (1 + is_any_key(case, feature))).to(device)
        batch.lengths[feature] = torch.ones(count, dtype=torch.int64, device=device)
        batch.weights[feature] = torch.ones(count, device=device)
    return batch


def draw(case: Case, step: int, rank: int, device: str = "cpu") -> Batch:
    """Draw a rank's batch of a step: few ids are frequent, so that ranks share them."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    bags = SIZES[case.batch][rank]
    batch = Batch({}, {}, {}, [])
    for feature in dict.fromkeys(feature for table in case.tables for feature in table.features):
        rows = min(table.rows for table in case.tables if feature in table.features)
        lengths = torch.randint(0, 4, (bags,), generator=generator)
        if case.batch == "single":
            lengths = torch.ones_like(lengths)
        count = int(lengths.sum())
        ids = as_ids(case, feature, (torch.rand(count, generator=generator) ** 3 * rows).long())
        batch.ids[feature] = ids.to(device)
        batch.lengths[feature] = lengths.to(device)
        batch.weights[feature] = torch.rand(count, generator=generator).add(0.25).to(device)
    for table in case.tables:
        for feature in table.features:
            count = bags if case.kind == "bags" else batch.ids[feature].numel()
            batch.targets.append(torch.randn(count, table.dim, generator=generator).to(device))
    return batch


def joined(batches: list[Batch]) -> Batch:
    """Return the batch that all ranks have together."""
    parts = [
        {name: torch.cat([getattr(batch, what)[name] for batch in batches]) for name in batches[0].ids}
        for what in ("ids", "lengths", "weights")
    ]
    return Batch(*parts, [torch.cat(parts) for parts in zip(*[batch.targets for batch in batches], strict=True)])


def features_of(case: Case, batch: Batch) -> KeyedJaggedTensor:
    """Return a batch as the collection takes it."""
    weights = torch.cat(list(batch.weights.values())) if case.weighted else None
    return KeyedJaggedTensor(
        list(batch.ids), torch.cat(list(batch.ids.values())), weights, torch.cat(list(batch.lengths.values()))
    )


def look_up(case: Case, module: Any, batch: Batch, ahead: Any = None) -> list[Tensor]:
    """Return the results for each feature of each table; ``ahead`` is what was prefetched, in place of the batch's."""
    results = module(features_of(case, batch) if ahead is None else ahead)
    if case.kind == "rows":
        return [results[name].values() for name in module.embedding_names()]
    return list(results.values().split([table.dim for table in case.tables for _ in table.features], 1))


def train_step(
    case: Case, module: Any, optimizer: Any, batch: Batch, factor: float | None, ahead: Any = None
) -> tuple[list, dict]:
    """Train one step on half the squared distance to the targets; return results and the gradients of weights."""
    if case.weighted:
        for weights in batch.weights.values():
            weights.requires_grad_()
    optimizer.zero_grad()
    results = look_up(case, module, batch, ahead)
    gradients = [result.detach() - target for result, target in zip(results, batch.targets, strict=True)]
    gradients = [gradient.to(result.dtype) for gradient, result in zip(gradients, results, strict=True)]
    if factor is not None:
        gradients = [gradient * factor for gradient in gradients]
    torch.autograd.backward(results, gradients)
    optimizer.step()
    of_weights = {name: weights.grad for name, weights in batch.weights.items() if weights.grad is not None}
    return [result.detach() for result in results], of_weights


# ---- One rank --------------------------------------------------------------------------------------------------------


def plans_of(case: Case, ranks: int) -> dict[str, Any]:
    """Return the plan of each table."""
    found: dict[str, Any] = {}
    for k, table in enumerate(case.tables):
        plan = ("row", "table", "column")[k % 3] if case.plan == "mixed" else case.plan
        if table.option is not None and plan == "column":
            plan = "table"
        found[f"t{k}"] = {
            "row": distributed.RowWise(),
            "table": distributed.TableWise((ranks - 1 + k) % ranks),
            "column": distributed.ColumnWise(tuple(range(len(torch.empty(table.dim).chunk(ranks))))),
            "replicated": distributed.Replicated(),
        }[plan]
    return found


def sharded_of(case: Case, device: str = "cpu", **options: Any) -> Any:
    """Return this rank's side of a case's collection."""
    module = collection_of(case, device)
    return distributed.shard(module, plan=plans_of(case, dist.get_world_size()), merge=case.merge, **options)


def tables_of(module: Any, case: Case | None = None) -> dict[str, Tensor]:
    """
    Return whole tables by their names in one process, in memory of their own.

    Where some of them grow, ``case`` is needed: it is what ``eval()`` finds for some ids of each feature, and the keys
    of all ranks, in their order, with what belongs to them.
    """
    if case is None or all(table.option is None for table in case.tables):
        return {name: table.detach().cpu().clone() for name, table in distributed.full_state_dict(module).items()}
    return contents_of(case, module, all_ranks=True)


def contents_of(case: Case, module: Any, all_ranks: bool) -> dict[str, Tensor]:
    """Return what :func:`tables_of` does for tables that grow; without ``all_ranks`` of this process alone."""
    module.eval()
    with torch.no_grad():
        results = look_up(case, module, probe(case, module.device))
    module.train()
    found = {f"result {k}": result.cpu() for k, result in enumerate(results)}
    for name, child in module.named_modules():
        if isinstance(child, nn.EmbeddingVariable):
            found.update({f"{name}.{what}": x for what, x in keys_of(child, all_ranks).items()})
    return found


def keys_of(variable: nn.EmbeddingVariable, all_ranks: bool) -> dict[str, Tensor]:
    """Return the keys of a variable in their order, with all that belongs to them, and its statistics."""
    names = ("filtered", "waiting", "admitted", "evicted")
    stats = variable.stats()
    mine = ([x.cpu() for x in variable.export()], [stats[name] for name in names])
    said: list[Any] = [mine]
    if all_ranks:
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine)
    export = [torch.cat(parts) for parts in zip(*[exported for exported, _ in said], strict=True)]
    order = export[0].argsort()
    assert len(export[0].unique()) == len(order), "a key is on one rank"
    found = dict(zip(("keys", "values", "versions", "frequencies"), [x[order] for x in export], strict=True))
    return found | {name: torch.tensor([sum(its[k] for _, its in said)]) for k, name in enumerate(names)}


def peak() -> int:
    """Return the most memory that this process has had, in KiB."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def train_rank(case: Case, device: str = "cpu") -> Trained:
    """Train on this rank's part of every batch."""
    module = sharded_of(case, device)
    optimizer = optimizer_of(case, module)
    steps = [
        train_step(case, module, optimizer, draw(case, step, dist.get_rank(), device), None)
        for step in range(case.steps)
    ]
    results = [[result.cpu() for result in results] for results, _ in steps]
    gradients = [{name: gradient.cpu() for name, gradient in gradients.items()} for _, gradients in steps]
    return Trained(results, gradients, tables_of(module, case))


# ---- One process -----------------------------------------------------------------------------------------------------


def train_alone(case: Case, ranks: int, device: str = "cpu") -> list[Trained]:
    """Train on whole batches, with gradients of results divided as by ranks; return what each rank must have."""
    module = collection_of(case, device)
    optimizer = optimizer_of(case, module)
    found = [Trained([], [], {}) for _ in range(ranks)]
    for step in range(case.steps):
        batches = [draw(case, step, rank, device) for rank in range(ranks)]
        results, gradients = train_step(case, module, optimizer, joined(batches), 1 / ranks)
        parts = [result.cpu().split([len(batch.targets[k]) for batch in batches]) for k, result in enumerate(results)]
        of_weights = {
            # A rank's weights have the gradient of its own loss, which nobody has divided.
            name: (gradient.cpu() * ranks).split([len(batch.ids[name]) for batch in batches])
            for name, gradient in gradients.items()
        }
        for rank, trained in enumerate(found):
            trained.results.append([part[rank] for part in parts])
            trained.gradients.append({name: split[rank] for name, split in of_weights.items()})
    if any(table.option is not None for table in case.tables):
        tables = contents_of(case, module, all_ranks=False)
    else:
        tables = {name: table.detach().cpu() for name, table in module.state_dict().items()}
    for trained in found:
        trained.tables = tables
    return found
