"""Programs that ranks run on parts of a batch, and one process on the whole of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchsparse_rec import KeyedJaggedTensor, distributed, nn, optim

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
    """A table, and the features that look it up."""

    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str = "sum"
    dtype: torch.dtype = torch.float32


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
        batch.ids[feature] = (torch.rand(count, generator=generator) ** 3 * rows).long().to(device)
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


def tables_of(module: Any) -> dict[str, Tensor]:
    """Return whole tables by their names in one process, in memory of their own."""
    return {name: table.detach().cpu().clone() for name, table in distributed.full_state_dict(module).items()}


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
    return Trained(results, gradients, tables_of(module))


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
    for trained in found:
        trained.tables = {name: table.detach().cpu() for name, table in module.state_dict().items()}
    return found
