"""
Benchmark rows of the overhead of small calls.

One call is 100 successive lookups of 8 ids in 3 bags of a table 1,000 x 64. Others look up in 100 such tables in a
collection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import torchsparse_rec
from torchsparse_rec import nn, ops
from torchsparse_rec.typing import GradMode

from .rows import Call, Case, CudaTargets, Make, Options, Row

REPEATS = 100
ROWS_OF_TABLE, DIM, BAGS = 1000, 64, 3


def _repeated(step: Callable[[], object], repeats: int) -> Call:
    def call() -> None:
        for _ in range(repeats):
            step()

    return call


def row(name: str, what: str, backward: bool, sparse: bool, targets: dict[str, float]) -> Row:
    """Make a benchmark row for the forward alone, which records what a gradient needs, or for forward and backward."""

    def build(options: Options) -> Case:
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(ROWS_OF_TABLE, DIM, generator=generator).to(options.device)
        ids = torch.randint(0, ROWS_OF_TABLE, (8,), generator=generator).to(options.device)
        starts = torch.tensor([0, 3, 5], device=options.device)
        offsets = torch.tensor([0, 3, 5, 8], device=options.device)
        grad = torch.ones(BAGS, DIM, device=options.device)
        repeats = options.size(REPEATS, 3)

        def step(weight: Tensor, look_up: Callable[[], Tensor]) -> Callable[[], Tensor]:
            def forward_and_backward() -> Tensor:
                result = look_up()
                weight.grad = None
                result.backward(grad)
                return result

            return forward_and_backward if backward else look_up

        def module(kind: type[torch.nn.EmbeddingBag]) -> Make:
            def make() -> Call:
                bag = kind(ROWS_OF_TABLE, DIM, mode="mean", sparse=sparse, _weight=table.clone())
                return _repeated(step(bag.weight, lambda: bag(ids, starts)), repeats)

            return make

        def operator() -> Call:
            weight = table.clone().requires_grad_()
            return _repeated(
                step(weight, lambda: ops.embedding_bag(weight, ids, offsets, mode="mean", sparse=sparse)), repeats
            )

        def check() -> None:
            ours = nn.EmbeddingBag(ROWS_OF_TABLE, DIM, mode="mean", sparse=sparse, _weight=table.clone())
            torchs = torch.nn.EmbeddingBag(ROWS_OF_TABLE, DIM, mode="mean", sparse=sparse, _weight=table.clone())
            for bag in (ours, torchs):
                bag(ids, starts).backward(grad)
            assert ours.weight.grad is not None and torchs.weight.grad is not None
            torch.testing.assert_close(ours(ids, starts), torchs(ids, starts))
            torch.testing.assert_close(ours.weight.grad.to_dense(), torchs.weight.grad.to_dense())

        peers = {"torch.nn.EmbeddingBag": module(torch.nn.EmbeddingBag)}
        ours = operator if name.endswith("operator") else module(nn.EmbeddingBag)
        return Case(ours, peers, check, sizes=f"{repeats} calls of 8 ids, {DIM} columns")

    # There is no target on a GPU, where the driver's launches take the time.
    return Row(f"overhead/{name}", what, build, targets, CudaTargets(fastest_peer=None))


KEYS = [f"f{n}" for n in range(100)]


class Tables:
    """100 tables with ids for each, a step of our collection, and a step of torch's bags."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        count = len(KEYS)
        self.tables = torch.randn(count, ROWS_OF_TABLE, DIM, generator=generator).to(device)
        self.ids = torch.randint(0, ROWS_OF_TABLE, (count, 8), generator=generator).to(device)
        self.grad = torch.randn(BAGS, count * DIM, generator=generator).to(device)
        self.lengths = torch.tensor([3, 2, 3], device=device)
        self.starts = torch.tensor([0, 3, 5], device=device)

    def ours(self, train: bool, grad_mode: GradMode) -> Callable[[], Tensor]:
        """Return a step of a collection, with ``grad_mode="fused"`` updated within backward."""
        configs = [
            nn.EmbeddingBagConfig(
                name=key, num_embeddings=ROWS_OF_TABLE, embedding_dim=DIM, feature_names=[key], pooling="mean"
            )
            for key in KEYS
        ]
        collection = nn.EmbeddingBagCollection(configs, grad_mode=grad_mode, device=self.tables.device)
        collection.load_state_dict(
            {f"embedding_bags.{key}.weight": table for key, table in zip(KEYS, self.tables, strict=True)}
        )
        # This object keeps the optimizer: tables hold it weakly, and the forward alone would not keep it.
        self.optimizer = optimizer = torchsparse_rec.optim.SGD(collection.parameters(), lr=0.01, in_backward=True)
        ids = torchsparse_rec.KeyedJaggedTensor(KEYS, self.ids.flatten(), lengths=self.lengths.repeat(len(KEYS))).sync()

        def step() -> Tensor:
            output = collection(ids).values()
            output.backward(self.grad)
            optimizer.step()
            optimizer.zero_grad()
            return output

        return step if train else lambda: collection(ids).values()

    def torchs(self, train: bool) -> Callable[[], list[Tensor]]:
        """Return a step of a loop over torch's bags."""
        bags = [
            torch.nn.EmbeddingBag(ROWS_OF_TABLE, DIM, mode="mean", sparse=True, _weight=table.clone())
            for table in self.tables
        ]
        optimizer = torch.optim.SGD([bag.weight for bag in bags], lr=0.01)
        ids, gradients = list(self.ids), [grad.contiguous() for grad in self.grad.split(DIM, 1)]

        def forward() -> list[Tensor]:
            return [bag(each, self.starts) for bag, each in zip(bags, ids, strict=True)]

        def step() -> list[Tensor]:
            outputs = forward()
            torch.autograd.backward(outputs, gradients)
            optimizer.step()
            optimizer.zero_grad()
            return outputs

        return step if train else forward


def collection_row(name: str, what: str, train: bool, grad_mode: GradMode = "fused") -> Row:
    """Make a benchmark row for the forward, which records what a gradient needs, or for a step of SGD."""

    def build(options: Options) -> Case:
        tables = Tables(options.device)

        def check() -> None:
            ours, torchs = tables.ours(train, grad_mode), tables.torchs(train)
            for _ in range(3):
                torch.testing.assert_close(ours(), torch.cat(torchs(), 1))

        peers: dict[str, Make] = {"loop of torch.nn.EmbeddingBag": lambda: tables.torchs(train)}
        sizes = f"{len(KEYS)} tables, 8 ids each, {DIM} columns"
        return Case(lambda: tables.ours(train, grad_mode), peers, check, sizes=sizes)

    # Most of a sparse step is the work of autograd and the optimizer for each table's gradient.
    target = {"forward": 16.0, "fused": 12.0, "sparse": 2.5}[grad_mode if train else "forward"]
    peers = {"loop of torch.nn.EmbeddingBag": target}
    return Row(f"overhead/{name}", what, build, peers, CudaTargets(fastest_peer=None))


# The target allows 1.5 times the peer's time.
_TARGET = {"torch.nn.EmbeddingBag": 1 / 1.5}
ROWS = [
    row("forward-operator", "a small embedding_bag that records its gradient", False, False, _TARGET),
    row("forward-module", "a small nn.EmbeddingBag that records its gradient", False, False, _TARGET),
    row("step-dense-operator", "a small embedding_bag and its dense gradient", True, False, _TARGET),
    row("step-dense-module", "a small nn.EmbeddingBag and its dense gradient", True, False, _TARGET),
    row("step-sparse-operator", "a small embedding_bag and its sparse gradient", True, True, _TARGET),
    row("step-sparse-module", "a small nn.EmbeddingBag and its sparse gradient", True, True, _TARGET),
    collection_row("collection-forward", "100 small tables: forward, which records their gradients", False),
    collection_row("collection-step", "100 small tables: forward, backward, SGD within backward", True),
    collection_row("collection-sparse", "100 small tables: forward, backward to COO gradients, SGD", True, "sparse"),
]
