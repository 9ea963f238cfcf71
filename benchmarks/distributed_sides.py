"""A training step of many tables over ranks: in this library, in torch's DistributedDataParallel and in TorchRec."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchsparse_rec import KeyedJaggedTensor, distributed

from .ids import zipf_ids
from .many_tables import BATCHES, EPS, INITIAL_SUM, LEARNING_RATE, Problem, Shape, Side
from .many_tables_sides import our_side, tensorflow_side
from .rows import Options, UnavailableError

RULE = "adagrad"


class Average(Problem):
    """
    The whole batch's problem, as one process does it: its gradients are the mean over ranks.

    Args:
        shape: the shape of the model; its batch is that of all ranks.
        rank: the rank that has a part of the batch.
        ranks: the number of ranks among which the batch is split.
        skew: whether some ids are popular, by Zipf's law; else they are uniform.
    """

    def __init__(self, shape: Shape, rank: int, ranks: int, skew: bool) -> None:
        super().__init__(shape, "cpu")
        self.rank, self.ranks, self.skew = rank, ranks, skew

    def ids_in_words(self) -> str:
        """Say how ids are spread."""
        return "popular ids (Zipf)" if self.skew else "uniform ids"

    @cached_property
    def batches(self) -> list[Tensor]:
        """As of the base class."""
        if not self.skew:
            return super().batches
        shape = self.shape
        return [
            torch.cat(
                [zipf_ids(shape.batch * hot, shape.rows, "cpu", 1000 * k + n) for n, hot in enumerate(shape.hots)]
            )
            for k in range(BATCHES)
        ]

    @cached_property
    def gradients(self) -> list[Tensor]:
        """As of the base class, divided by the number of ranks."""
        return [gradient / self.ranks for gradient in super().gradients]

    def whole(self) -> Problem:
        """Return the same problem, with tables that no side has trained."""
        return Average(self.shape, self.rank, self.ranks, self.skew)

    def part(self) -> Problem:
        """Return this rank's part of it: as many examples as every rank has. Gradients are of its own loss."""
        each = self.shape.batch // self.ranks
        mine = slice(self.rank * each, (self.rank + 1) * each)
        part = Problem(replace(self.shape, batch=each), "cpu")
        part.batches = [
            torch.cat(
                [
                    ids.view(-1, hot)[mine].reshape(-1)
                    for ids, hot in zip(self.by_feature(batch), self.shape.hots, strict=True)
                ]
            )
            for batch in self.batches
        ]
        part.gradients = [(gradient * self.ranks)[mine].contiguous() for gradient in self.gradients]
        return part


@dataclass(frozen=True)
class Sided(Side):
    """A side, and whether it runs on the first rank alone."""

    alone: bool = False


def over_ranks(problem: Average, plan: str) -> Sided:
    """Make a step of our collection, split over ranks."""
    part, collections = problem.part(), list[Any]()

    def split(collection: Any) -> None:
        keys = [key for config in collection.embedding_bag_configs() for key in config.feature_names]
        names = [config.name for config in collection.embedding_bag_configs()]
        turns = {name: distributed.TableWise(k % problem.ranks) for k, name in enumerate(names)}
        example = KeyedJaggedTensor(keys, part.batches[0], offsets=part.offsets)
        where: Any = turns if plan == "table_wise" else plan
        collections.append(distributed.shard(collection, plan=where, batch=example))

    side = our_side(RULE, part, split)
    (collection,) = collections

    def trained() -> list[Tensor]:
        if problem.shape.grows:
            return [_of_all_ranks(table) for table in collection.embedding_bags.children()]
        return list(distributed.full_state_dict(collection).values())

    return Sided(side.step, trained)


def _of_all_ranks(table: Any) -> Tensor:
    """Return the rows of a table that grows in the order of keys."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, table.export()[:2])
    keys, values = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
    return values[keys.argsort()]  # type: ignore[no-any-return]


def _alone(problem: Average, make: Callable[[], Side]) -> Sided:
    """Make a side on the first rank alone."""
    if problem.rank:
        return Sided(lambda: None, list, True)
    side = make()
    return Sided(side.step, side.tables, True)


class _Bags(torch.nn.Module):
    def __init__(self, problem: Problem, sparse: bool) -> None:
        super().__init__()
        ((_, mode),) = problem.shape.parts
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag.from_pretrained(
                table.clone(), freeze=False, mode=mode, sparse=sparse, include_last_offset=True
            )
            for table in problem.tables
        )
        self.starts = [torch.arange(problem.shape.batch + 1) * hot for hot in problem.shape.hots]

    def forward(self, ids: tuple[Tensor, ...]) -> Tensor:
        looked_up = [bag(its, starts) for bag, its, starts in zip(self.bags, ids, self.starts, strict=True)]
        return torch.cat(looked_up, 1)


def ddp(problem: Average, options: Options, sparse: bool) -> Sided:
    """Make a step of torch's EmbeddingBags, which every rank has whole."""
    # This is the default, but unless it is called, torch warns of its own optimizer's gradients.
    torch.sparse.check_sparse_tensor_invariants.disable()
    part = problem.part()
    bags = _Bags(part, sparse)
    model = torch.nn.parallel.DistributedDataParallel(bags)
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=LEARNING_RATE, eps=EPS, initial_accumulator_value=INITIAL_SUM)
    inputs = itertools.cycle([part.by_feature(ids) for ids in part.batches])
    (gradient,) = part.gradients

    def step() -> None:
        model(next(inputs)).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return Sided(step, lambda: [weight.detach() for weight in bags.parameters()])


def torchrec(problem: Average, options: Options) -> Sided:
    """Make a step of TorchRec's collection with FBGEMM's tables, each on one rank, in turn."""
    for package, name in (("torchrec", "torchrec"), ("fbgemm_gpu", "fbgemm-gpu-cpu")):
        if importlib.util.find_spec(package) is None:
            raise UnavailableError(f"{name} is not installed")
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as training
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise

    part, rank, ranks = problem.part(), problem.rank, problem.ranks
    ((dim, mode),) = part.shape.parts
    names = [f"f{n}" for n in range(len(part.shape.hots))]
    pooling = torchrec.PoolingType.MEAN if mode == "mean" else torchrec.PoolingType.SUM
    tables = [
        torchrec.EmbeddingBagConfig(part.shape.rows, dim, f"t_{name}", feature_names=[name], pooling=pooling)
        for name in names
    ]
    rule = {"optimizer": training.OptimType.EXACT_ADAGRAD, "learning_rate": LEARNING_RATE, "eps": EPS}
    sharder = EmbeddingBagCollectionSharder(fused_params=rule)
    bags = torchrec.EmbeddingBagCollection(tables, device=torch.device("cpu"))
    where = {table.name: table_wise(rank=k % ranks, compute_kernel="fused") for k, table in enumerate(tables)}
    plan = construct_module_sharding_plan(
        bags, where, sharder=sharder, local_size=ranks, world_size=ranks, device_type="cpu"
    )
    model = torchrec.distributed.DistributedModelParallel(
        torch.nn.ModuleDict({"bags": bags}),
        device=torch.device("cpu"),
        plan=torchrec.distributed.types.ShardingPlan({"bags": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )
    sharded = model.module["bags"]
    # FBGEMM's module is not among the modules of TorchRec's.
    its = [each for lookups in sharded._lookups for each in lookups.modules()]
    (own,) = [each for each in its if isinstance(each, training.SplitTableBatchedEmbeddingBagsCodegen)]
    weights = own.split_embedding_weights()
    for weight, table in zip(weights, part.tables[rank::ranks], strict=True):
        weight.copy_(table)
    for (state,) in own.split_optimizer_states():
        state.fill_(INITIAL_SUM)
    lengths = part.offsets.diff()
    inputs = itertools.cycle([torchrec.KeyedJaggedTensor(names, ids, lengths=lengths) for ids in part.batches])
    of_name = dict(zip(names, part.gradients[0].split(dim, 1), strict=True))
    gradients: list[Tensor] = []

    def step() -> None:
        result = sharded(next(inputs))
        values = result.values()
        if not gradients:  # in the order of the results
            gradients.append(torch.cat([of_name[key] for key in result.keys()], 1))
        values.backward(gradients[0])

    def trained() -> list[Tensor]:
        of_ranks: list[Any] = [None] * ranks
        dist.all_gather_object(of_ranks, weights)
        return [of_ranks[k % ranks][k // ranks] for k in range(len(names))]

    return Sided(step, trained)


OURS = over_ranks
PEERS: dict[str, Callable[[Average, Options], Sided]] = {
    "ours on one process": lambda problem, options: _alone(problem, lambda: our_side(RULE, problem)),
    "torch's DDP, sparse gradients": partial(ddp, sparse=True),
    "torch's DDP, dense gradients": partial(ddp, sparse=False),
    "TorchRec, table-wise": torchrec,
    "TensorFlow embedding_lookup_sparse on one process": lambda problem, options: _alone(
        problem, lambda: tensorflow_side(options, RULE, "embedding_lookup_sparse", problem)
    ),
}
