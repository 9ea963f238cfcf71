"""``nn.table_cross_entropy`` over the rows of all ranks, beside one process that has all samples and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchsparse_rec import distributed, nn, optim
from torchsparse_rec.tables.blocks import Blocks

# Of 16 blocks of 19 rows: three rows that ranks keep have no id.
ROWS, DIM, STEPS = 301, 6, 3
SIZES = {"uneven": (3, 5, 2, 4), "none on rank 1": (4, 0, 3, 0)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.2, "weight": True, "temperature": 0.7, "block": 40},
    "cosine": {"normalize": True, "label_smoothing": 0.1},
    "excluded": {"excluded": True, "ignore_index": 7, "block": 40},
    "all but one": {"excluded": "all"},
}
NAMES = "table.weight", "table.embeddings.items.weight"
PLANS = {"row": distributed.RowWise(), "table": distributed.TableWise(1)}
# The plan, the gradient mode, whether the table is looked up too, the options, the batch.
CASES = [
    *[
        (plan, mode, tied, "plain", "uneven")
        for plan in PLANS
        for mode in ("sparse", "fused")
        for tied in (False, True)
    ],
    *[(plan, "fused", False, options, "uneven") for plan in PLANS for options in ("smooth", "cosine", "excluded")],
    ("row", "fused", "by turns", "plain", "uneven"),
    ("row", "sparse", "by turns", "plain", "uneven"),
    ("row", "fused", True, "all but one", "uneven"),
    ("row", "dense", True, "smooth", "none on rank 1"),
    ("row", "fused", True, "excluded", "none on rank 1"),
    ("table", "fused", True, "cosine", "none on rank 1"),
    ("row", "auto", True, "smooth", "uneven"),
    *[(plan, "fused", "of a collection", "plain", "uneven") for plan in PLANS],
]


class Model(torch.nn.Module):
    """A table of items, their biases, and the vectors of some samples."""

    def __init__(self, mode: str | None, sizes: list[int], tied: Any = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        if tied == "of a collection":  # whose tables have no padding row
            config = nn.EmbeddingConfig(ROWS, DIM, name="items", feature_names=["item"])
            self.table: Any = nn.EmbeddingCollection([config], grad_mode=mode)
        else:
            self.table = nn.Embedding(ROWS, DIM, padding_idx=4, grad_mode=mode)
        with torch.no_grad():
            self.items.weight.copy_(torch.randn(ROWS, DIM, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(ROWS, generator=generator))
        vectors = [torch.randn(size, DIM, generator=generator) for size in sizes]
        self.vectors = torch.nn.ParameterList(vectors)

    @property
    def items(self) -> Any:
        """The table."""
        return self.table.embeddings["items"] if isinstance(self.table, nn.EmbeddingCollection) else self.table

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, ``[N, 2, D]``."""
        if isinstance(self.table, nn.EmbeddingCollection):
            return self.table({"item": ids})["item"].values().view(*ids.shape, DIM)
        return self.table(ids)


def given(step: int, rank: int, size: int, options: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return a rank's history, targets, among them one that is ignored and the padding row, and options of a step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    draw = lambda *shape: torch.randint(0, ROWS, shape, generator=generator)  # noqa: E731
    history, target = draw(size, 2), draw(size)
    target[:1] = options.get("ignore_index", -100)
    target[3:4] = 4
    made = dict(options)
    if "weight" in made:
        made["weight"] = torch.rand(ROWS, generator=torch.Generator().manual_seed(1)) + 0.5
    if made.get("excluded") == "all":
        made["excluded"] = torch.arange(ROWS).expand(size, ROWS)
    elif "excluded" in made:
        made["excluded"] = torch.cat([draw(size, 50), target[:, None].clamp_min(-1), torch.full((size, 1), -1)], 1)
    return history, target, made


def step_of(model: Model, optimizers: list[Any], losses: list[Tensor], share: float) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    (sum(x.sum() for x in losses) * share).backward()  # type: ignore[union-attr]


def losses_of(model: Model, step: int, rank: int, tied: Any, options: dict[str, Any]) -> Tensor:
    own = model.vectors[rank]
    history, target, made = given(step, rank, len(own), options)
    if tied:
        own = own + model.look_up(history).mean(1)
    if tied == "by turns" and step == 1:  # other rows are stale afterwards
        return own.square().mean(1) + 0 * model.bias.sum()
    return nn.table_cross_entropy(own, model.items, target, bias=model.bias, reduction="none", **made)


def optimizers_of(model: Model, mode: str | None) -> list[Any]:
    others = [model.bias, *model.vectors]
    # A large eps: with a small one, steps of gradients near 0 are as large, and so is their rounding.
    table = optim.Adam([model.items.weight], lr=0.05, eps=1e-3, in_backward=mode in ("fused", "auto"))
    return [table, torch.optim.SGD(others, lr=0.3)]


def on_rank(case: tuple[str, str, Any, str, str]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return a rank's losses, the whole table after training, its vectors and the biases."""
    plan, mode, tied, options, sizes = case
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, found = Model(mode, list(SIZES[sizes][:ranks]), tied), []
    distributed.shard(model, plan=PLANS[plan])
    optimizers = optimizers_of(model, mode)
    for step in range(STEPS):
        losses = losses_of(model, step, rank, tied, OPTIONS[options])
        step_of(model, optimizers, [losses], 1.0)
        dist.all_reduce(model.bias.grad)  # as DistributedDataParallel
        model.bias.grad /= ranks
        for optimizer in optimizers:
            optimizer.step()
        found.append(losses.detach())
    with torch.no_grad():
        losses = losses_of(model.eval(), STEPS, rank, tied, OPTIONS[options])
    whole = distributed.full_state_dict(model)[NAMES[tied == "of a collection"]].clone()
    return [*found, losses], whole, model.vectors[rank].detach(), model.bias.detach()


def alone(case: tuple[str, str, Any, str, str], ranks: int) -> list[tuple[list[Tensor], Tensor, Tensor, Tensor]]:
    _, mode, tied, options, sizes = case
    model, found = Model(mode, list(SIZES[sizes][:ranks]), tied), []
    optimizers = optimizers_of(model, mode)
    for step in range(STEPS + 1):
        losses = [losses_of(model, step, rank, tied, OPTIONS[options]) for rank in range(ranks)]
        found.append([x.detach() for x in losses])
        if step < STEPS:
            step_of(model, optimizers, losses, 1 / ranks)
            for vectors in model.vectors:
                vectors.grad *= ranks  # a rank's own are of its loss
            for optimizer in optimizers:
                optimizer.step()
    state = model.items.weight.detach(), model.bias.detach()
    return [([x[rank] for x in found], state[0], model.vectors[rank].detach(), state[1]) for rank in range(ranks)]


def all_on_rank(cases: list[Any]) -> list[Any]:
    return [on_rank(case) for case in cases]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_ranks_are_as_one_process(pool_of, ranks: int) -> None:
    got = pool_of(ranks).run(all_on_rank, CASES)
    for k, case in enumerate(CASES):
        for rank, wanted in enumerate(alone(case, ranks)):
            said = lambda text, case=case: f"{case}: {text}"  # noqa: E731
            torch.testing.assert_close(got[rank][k], wanted, rtol=2e-6, atol=2e-6, msg=said)


# ---- Means, other tables, DistributedDataParallel ------------------------------------------------------------------


class Tower(torch.nn.Module):
    """Samples that a dense layer makes, and the loss over the items of a collection, or of a table alone."""

    def __init__(self, collection: bool, mode: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        config = nn.EmbeddingConfig(ROWS, DIM, name="items", feature_names=["item"])
        self.table = nn.EmbeddingCollection([config]) if collection else nn.Embedding(ROWS, DIM, grad_mode=mode)
        self.top = torch.nn.Linear(DIM, DIM)
        self.bias = torch.nn.Parameter(torch.randn(ROWS))

    def items(self) -> Any:
        return self.table.embeddings["items"] if isinstance(self.table, nn.EmbeddingCollection) else self.table

    def forward(self, x: Tensor, target: Tensor, reduction: str = "none") -> Tensor:
        loss = nn.TableCrossEntropyLoss(reduction=reduction, label_smoothing=0.1)
        return loss(self.top(x), self.items(), target, bias=self.bias)


def samples_of(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    size = SIZES["uneven"][rank]
    return torch.randn(size, DIM, generator=generator), torch.randint(0, ROWS, (size,), generator=generator)


def in_ddp(collection: bool) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the mean over ranks of means over their samples, all gradients, and the loss of this rank's mean."""
    model = distributed.shard(Tower(collection), plan="row_wise")
    rows, ids = model.items().weight, Blocks(ROWS).ids_of(dist.get_rank(), 2)
    with torch.no_grad():  # of rows without an id, as an optimizer that divides 0 by 0 leaves them
        rows[ids >= ROWS] = torch.nan
    outer = torch.nn.parallel.DistributedDataParallel(model)
    x, target = samples_of(dist.get_rank())
    losses = outer(x, target)
    mean = distributed.global_mean(losses)
    mean.backward()
    assert not rows.grad[ids >= ROWS].any()
    table = torch.zeros(ROWS, DIM)
    table[ids[ids < ROWS]] = rows.grad[ids < ROWS].as_subclass(Tensor)
    dist.all_reduce(table)
    with torch.no_grad():
        one = model(x, target, "mean")
    torch.testing.assert_close(one, losses.detach().mean())
    dist.all_reduce(mean := mean.detach())
    return mean / 2, [table, *(p.grad for p in (model.bias, *model.top.parameters()))], one


@pytest.mark.slow
@pytest.mark.parametrize("collection", [False, True])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_dense_layers_around_it(two, collection: bool) -> None:
    got = two.run(in_ddp, collection)
    model = Tower(collection)
    x, target = map(torch.cat, zip(*map(samples_of, range(2)), strict=True))
    mean = model(x, target, "mean")
    mean.backward()
    wanted = [p.grad for p in (model.items().weight, model.bias, *model.top.parameters())]
    for mine, gradients, _ in got:
        torch.testing.assert_close(mine, mean.detach())
        torch.testing.assert_close(gradients, wanted)


def with_one_gradient(frozen: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and table where only rank 0's input has one."""
    table = nn.Embedding.from_pretrained(torch.eye(5), freeze=frozen)
    distributed.shard(table, plan="row_wise")
    x = torch.ones(2, 5, requires_grad=dist.get_rank() == 0)
    loss = nn.table_cross_entropy(x, table, torch.tensor([0, 4]), reduction="sum")
    loss.backward()
    with torch.no_grad():
        assert not nn.table_cross_entropy(x, table, torch.tensor([0, 4])).requires_grad
    return x.grad, table.weight.grad


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_an_input_without_gradient_on_one_rank(two) -> None:
    wanted = torch.full((2, 5), 0.2) - torch.eye(5)[[0, 4]]
    for frozen in (False, True):
        (mine, of_rows), (none, _) = two.run(with_one_gradient, frozen)
        torch.testing.assert_close(mine, wanted)
        assert none is None and (of_rows is None) == frozen


# ---- Errors --------------------------------------------------------------------------------------------------------


def wrong(what: str) -> str:
    """Do something wrong on rank 1 or on both ranks; return what was raised. Where ranks go on, look something up."""
    fused = what in ("no optimizer", "ddp")
    model: Any = Tower(False, "fused" if fused else None)
    plan = {"columns": "column_wise", "replicated": "data_parallel"}.get(what, "row_wise")
    distributed.shard(model, plan=plan)
    optimizer = optim.SGD(model.table.parameters(), lr=0.1, in_backward=what == "ddp")
    x, target = samples_of(dist.get_rank())
    options: dict[str, Any] = {}
    if dist.get_rank() == 1:
        target[2] = ROWS if what == "target" else 0
        wrongs: dict[str, Any] = {"excluded": torch.full((len(x), 1), -2), "bias": 3, "label_smoothing": 0.5}
        options = {what: wrongs[what]} if what in wrongs else {}
    with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)) as raised:
        if what == "ddp":
            torch.nn.parallel.DistributedDataParallel(Outer(model))(x, target)
        loss = nn.table_cross_entropy(x.requires_grad_(), model.table, target, **options)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.sum().backward()
    if not fused and what != "second derivative":
        assert model.table(target.clamp_max(ROWS - 1)).shape == x.shape
    del optimizer  # tables hold it weakly
    return f"{type(raised.value).__name__}: {raised.value}"


class Outer(torch.nn.Module):
    """A parent of a model, whose own DistributedDataParallel does not know the tables."""

    def __init__(self, model: Tower) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.model(x, target)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_errors_are_those_of_all_ranks(two) -> None:
    no_plan = "ValueError: table_cross_entropy: table 'table' must be RowWise or TableWise, got"
    of_rank = f"IndexError: rank 1: scores_targets: {{}} must be in [0, {ROWS}) or {{}}"
    messages = {
        "target": of_rank.format("target[2]", f"ignore_index, -100, got {ROWS}"),
        "excluded": of_rank.format("excluded[0]", "-1, got -2"),
        "bias": "TypeError: rank 1: table_cross_entropy: bias must be a tensor, got int",
        "label_smoothing": "RuntimeError: table: all ranks must make the same calls, got on rank 0: loss over all rows",
        "columns": f"{no_plan} ColumnWise: choose its plan in shard(), or take nn.sampled_softmax_loss",
        "replicated": f"{no_plan} Replicated",
        "no optimizer": "RuntimeError: rank 0: grad_mode='fused': the table must be held by an optimizer",
        "ddp": "RuntimeError: rank 0: table 'table' is shared over ranks, but in the DistributedDataParallel around it",
        "second derivative": "RuntimeError: trying to differentiate twice a function that was marked with",
    }
    for what, message in messages.items():
        for said in two.run(wrong, what):
            assert said.startswith(message), (what, said)
