"""What reads a table of a collection without calling the collection: losses over its rows, and ``nn.lookup_sparse``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchsparse_rec import nn, optim
from torchsparse_rec.ops import Candidates

ROWS, DIM = 50, 4
READERS = ("loss", "sampled loss", "lookup_sparse")
# Whether the collection looks the table up in all steps, in every second one, before or after the other reader.
PROGRAMS = ("reader alone", "after the reader", "before the reader", "by turns")


class Tables(torch.nn.Module):
    """A table, and a larger one that is looked up with it: of a collection, or two modules."""

    def __init__(self, kind: str, mode: Any) -> None:
        super().__init__()
        self.kind = kind
        sizes = {"small": ROWS, "large": 5000}
        features = {"small": ["f"], "large": ["g"]}
        if kind == "modules":
            self.tables: Any = torch.nn.ModuleDict({x: nn.Embedding(n, DIM, grad_mode=mode) for x, n in sizes.items()})
        elif kind == "bags":
            bags = [nn.EmbeddingBagConfig(n, DIM, name=x, feature_names=features[x]) for x, n in sizes.items()]
            self.tables = nn.EmbeddingBagCollection(bags, grad_mode=mode)
        else:
            rows = [nn.EmbeddingConfig(n, DIM, name=x, feature_names=features[x]) for x, n in sizes.items()]
            self.tables = nn.EmbeddingCollection(rows, grad_mode=mode)
        self.lone = torch.nn.Parameter(torch.ones(3, DIM))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for table in self.named().values():
                table.weight.copy_(torch.randn(table.weight.shape, generator=generator))

    def named(self) -> Any:
        tables = self.tables
        return tables if self.kind == "modules" else tables.embedding_bags if self.kind == "bags" else tables.embeddings

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the sum of each id's rows in both tables, ``[3, 2, D]``."""
        if self.kind == "modules":
            return self.tables["small"](ids) + self.tables["large"](ids)
        found = self.tables({"f": ids.view(-1, 1), "g": ids.view(-1, 1)})
        its = found.values().split(DIM, 1) if self.kind == "bags" else [found["f"].values(), found["g"].values()]
        return (its[0] + its[1]).view(*ids.shape, DIM)

    def loss(self, reader: str, program: str, step: int, ids: Tensor) -> Tensor:
        def read() -> Tensor:
            table = self.named()["small"]
            if reader == "loss":
                return nn.table_cross_entropy(self.lone, table, ids[:, 0], label_smoothing=0.1)
            if reader == "sampled loss":
                drawn = Candidates(torch.arange(5), *(torch.full((n,), 0.2) for n in (len(ids), 5)))
                return nn.sampled_softmax_loss(self.lone, table, ids[:, 0], drawn)
            return nn.lookup_sparse([table], [ids.flip(0)], ["sum"])[0].square().sum() + self.lone.sum()

        def look_up() -> Tensor:
            return self.look_up(ids).square().sum()

        parts: list[Callable[[], Tensor]] = {
            "reader alone": [read],
            "after the reader": [read, look_up],
            "before the reader": [look_up, read],
            "by turns": [(read, look_up)[step % 2]],
        }[program]  # type: ignore[assignment]
        return torch.stack([part() for part in parts]).sum()


def _optimizer(model: Tables, mode: Any) -> torch.optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.1, eps=1e-3, in_backward=mode in ("fused", "auto"))


def _train(model: Tables, mode: Any, reader: str, program: str, steps: range = range(5), wrap: Any = None) -> Tables:
    optimizer, loss_of = _optimizer(model, mode), model.loss if wrap is None else wrap(model.loss)
    for step in steps:
        optimizer.zero_grad()
        ids = torch.randint(0, ROWS, (3, 2), generator=torch.Generator().manual_seed(step))
        loss_of(reader, program, step, ids).backward()
        optimizer.step()
    return model


def _assert_same(actual: Tables, wanted: Tables) -> None:
    for x, y in zip(actual.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("kind", "mode"), [("rows", "fused"), ("bags", "fused"), ("rows", "auto"), ("rows", "sparse")])
def test_as_two_dense_tables(kind: str, mode: str, reader: str, program: str) -> None:
    made = _train(Tables(kind, mode), mode, reader, program)
    _assert_same(made, _train(Tables("modules", "dense"), "dense", reader, program))
    assert (made.named()["small"].weight.grad is None) == (
        mode == "fused" or made.named()["small"]._auto.mode == "fused"
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fused", "auto", "dense", None])
@pytest.mark.parametrize("kind", ["rows", "bags"])
def test_a_loss_compiles_whole(kind: str, mode: Any) -> None:
    torch.compiler.reset()
    compiled = lambda loss: torch.compile(loss, fullgraph=True, backend="aot_eager")  # noqa: E731
    made = _train(Tables(kind, mode), mode, "loss", "after the reader", wrap=compiled)
    _assert_same(made, _train(Tables("modules", "dense"), "dense", "loss", "after the reader"))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "assign", "float64"])
def test_after_the_table_was_replaced(how: str) -> None:
    model = _train(Tables("rows", "fused"), "fused", "loss", "after the reader", range(2))
    if how == "deepcopy":
        model = copy.deepcopy(model)
    elif how == "pickle":
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        model = torch.load(file, weights_only=False)
    elif how == "assign":
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    else:
        model.double()
    wanted = Tables("modules", "dense").to(model.lone.dtype)
    for x, y in zip(wanted.parameters(), model.parameters(), strict=True):
        x.data.copy_(y)
    _assert_same(
        _train(model, "fused", "loss", "after the reader", range(2, 4)),
        _train(wanted, "dense", "loss", "after the reader", range(2, 4)),
    )


def test_without_an_optimizer_a_loss_says_so() -> None:
    model = Tables("rows", "fused")
    with pytest.raises(RuntimeError, match="^grad_mode='fused': the table must be held by an optimizer"):
        model.loss("loss", "reader alone", 0, torch.zeros(3, 2, dtype=torch.int64))
    model.tables.grad_mode = "dense"
    model.loss("loss", "reader alone", 0, torch.zeros(3, 2, dtype=torch.int64)).backward()
    assert model.named()["small"].weight.grad is not None


def _clipped(kind: str) -> Any:
    if kind == "single":
        return nn.Embedding(4, 2, max_norm=2.0)
    option = nn.EmbeddingVariableOption() if kind == "growing" else None
    config = nn.EmbeddingConfig(4, 2, "t", feature_names=["x"], max_norm=2.0, ev_option=option)
    return copy.deepcopy(nn.EmbeddingCollection([config])).embeddings["t"]


@pytest.mark.parametrize("kind", ["single", "rows", "growing"])
def test_rows_that_a_module_clips_are_refused_by_others(kind: str) -> None:
    table, input, target = _clipped(kind), torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)
    params = [torch.eye(2), table]
    readers: dict[str, Callable[[], Any]] = {
        r"TopK: table\.": lambda: nn.TopK(1)(input, table),
        r"table_cross_entropy: table\.": lambda: nn.table_cross_entropy(input, table, target),
        r"lookup_sparse: params\[1\]\.": lambda: nn.lookup_sparse(params, [target, target], ["sum", "sum"]),
    }
    if kind != "single":
        readers |= {r"its config\.": lambda: table(target)}
    if kind == "rows":
        drawn = Candidates(torch.arange(2), torch.ones(3), torch.ones(2))
        readers |= {"^nce_loss: table.": lambda: nn.nce_loss(input, table, target, drawn)}
    if kind == "growing":
        readers |= {r"lookup: its config\.": lambda: table.lookup(target)}
    for owner, read in readers.items():
        with pytest.raises(ValueError, match=owner + "max_norm must be None, got 2.0: only lookups by the module"):
            read()


def test_a_bag_table_called_by_itself_pools_as_its_config_says() -> None:
    bags = nn.EmbeddingBagCollection([nn.EmbeddingBagConfig(4, 2, "t", feature_names=["x"])])
    ids = torch.tensor([[0, 1], [2, 2]])
    torch.testing.assert_close(bags.embedding_bags["t"](ids), bags({"x": ids})["x"])
