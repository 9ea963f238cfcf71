"""Training that changes something between two steps: a table of ours in a mode, beside torch's dense one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

from torchsparse_rec import nn as ours
from torchsparse_rec import optim

MODES = ("dense", "sparse", "fused", "auto")
KINDS = ("rows", "bags", "collection")
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.5}),
    "momentum": ("SGD", {"lr": 0.2, "momentum": 0.9, "dampening": 0.1}),
    "Adam": ("Adam", {"lr": 0.05}),
    "Adagrad": ("Adagrad", {"lr": 0.2, "lr_decay": 0.1}),
}
DTYPES = (torch.float32, torch.float64)
NAMES = ("a", "b")  # of a collection's tables and features


class Bags(nn.Module):
    """The tables of a collection as torch's modules."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict({x: nn.EmbeddingBag(rows, dim, mode="sum", dtype=dtype) for x in NAMES})

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Return the pooled rows of all features side by side."""
        return torch.cat([self.embedding_bags[x](features[x]) for x in NAMES], 1)


class Side:
    """
    A module, its optimizer, and how a step goes: torch's where ``mode`` is None, beside ours in ``beside``.

    A change sets attributes on both sides: ``features`` changes ids, ``look_up`` a lookup, ``score`` its result,
    ``backward`` how a loss is differentiated, ``between`` what comes between the backward and the step.
    """

    def __init__(self, kind: str, mode: str | None, beside: str, of: str, dtype: torch.dtype) -> None:
        self.kind, self.mode, self.beside, self.of, self.dtype = kind, mode, beside, of, dtype
        # Auto is fused for a table of more than 1,000 rows and 65,536 elements.
        self.rows, self.dim = (1100, 60) if beside == "auto" else (100, 4)
        torch.manual_seed(0)
        self.module = self.make()
        self.optimizer = self.make_optimizer()
        self.zero: dict[str, Any] = {}
        self.features: Callable[[Tensor], Tensor] = lambda ids: ids
        self.score: Callable[[Tensor], Tensor] = lambda result: result
        self.backward: Callable[[Tensor], Any] = lambda loss: loss.backward()
        self.between: Callable[[], Any] = lambda: None
        self.step: Callable[[], Any] = lambda: self.optimizer.step()
        self.number = 0
        self.losses: list[float] = []

    def make(self) -> Any:
        """Make the module."""
        if self.kind == "collection":
            if self.mode is None:
                return Bags(self.rows, self.dim, self.dtype)
            configs = [ours.EmbeddingBagConfig(self.rows, self.dim, name=x, feature_names=[x]) for x in NAMES]
            return ours.EmbeddingBagCollection(configs, grad_mode=self.mode).to(self.dtype)
        package, how = (nn, {}) if self.mode is None else (ours, {"grad_mode": self.mode})
        if self.kind == "rows":
            return package.Embedding(self.rows, self.dim, dtype=self.dtype, **how)
        return package.EmbeddingBag(self.rows, self.dim, mode="sum", dtype=self.dtype, **how)

    def make_optimizer(self, **arguments: Any) -> Any:
        """Make an optimizer for the module."""
        name, its = OPTIMIZERS[self.of]
        # Auto also has its optimizer so that it may choose to be fused.
        in_backward = {"in_backward": True} if self.mode in ("fused", "auto") else {}
        cls = getattr(torch.optim if self.mode is None else optim, name)
        return cls(self.module.parameters(), **{**its, **arguments}, **in_backward)

    @property
    def is_ours(self) -> bool:
        return self.mode is not None

    @property
    def table(self) -> Any:
        """The module that has the first table's parameter."""
        return self.module.embedding_bags["a"] if self.kind == "collection" else self.module

    @property
    def stored(self) -> Any:
        """The first table's parameter, without a flush."""
        return self.table._parameters["weight"]

    @property
    def group(self) -> dict[str, Any]:
        """The first parameter group."""
        return self.optimizer.param_groups[0]

    def ids(self, number: int) -> Tensor:
        """Return the ids of a step: a few of the first 20 rows, some more than once, in bags of two."""
        generator = torch.Generator().manual_seed(number)
        return self.features(torch.randint(0, 20, (3, 2), generator=generator))

    def look_up(self, ids: Tensor) -> Tensor:
        """Look ids up; in the second table of a collection, others."""
        if self.kind == "collection":
            found = self.module({"a": ids, "b": (ids + 3) % 40})
            return found if isinstance(found, Tensor) else found.values()
        return self.module(ids)

    def loss(self, number: int) -> Tensor:
        """Return half the squared distance of a step's rows to ones."""
        return (self.score(self.look_up(self.ids(number))) - 1).square().sum() / 12

    def train(self, steps: int) -> None:
        """Train some steps, and keep their losses."""
        for _ in range(steps):
            self.optimizer.zero_grad(**self.zero)
            loss = self.loss(self.number)
            self.number += 1
            self.backward(loss)
            self.between()
            self.step()
            self.losses.append(loss.item())

    def see(self, *values: Any) -> None:
        """Keep numbers that should be the same on both sides."""
        for value in values:
            value = torch.as_tensor(value) if not isinstance(value, Tensor) else value
            value = value.detach().to_dense() if value.is_sparse else value.detach()
            self.losses += value.double().flatten()[:4000].tolist()

    def end(self) -> list[float]:
        """Return all that was kept, and all rows."""
        with torch.no_grad():
            for _, value in sorted(self.module.state_dict().items()):
                self.see(value)
        return self.losses


Steps = Generator[None, None, None]
Change = Callable[[Side], Steps]


def both(kind: str, mode: str, of: str, dtype: torch.dtype) -> list[Side]:
    """Return our side and torch's, with the same weights."""
    mine, theirs = (Side(kind, x, mode, of, dtype) for x in (mode, None))
    theirs.module.load_state_dict(mine.module.state_dict())
    return [mine, theirs]


def run(side: Side, change: Change) -> list[float]:
    """Train steps before a change, after it, and after its end."""
    changes = change(side)
    next(changes)
    side.train(4)
    next(changes)
    side.train(3)
    next(changes, None)
    side.train(2)
    return side.end()


def assert_same(got: list[float], want: list[float], rounded: bool) -> None:
    """Compare what was kept of two sides, to the rounding of float32 or of float64."""
    torch.testing.assert_close(got, want, rtol=2e-4 if rounded else 1e-8, atol=2e-5 if rounded else 1e-9)


def check(change: Change, kind: str, mode: str, of: str, dtype: torch.dtype, rounded: bool = False) -> None:
    """Train our side and torch's with a change."""
    got, want = (run(side, change) for side in both(kind, mode, of, dtype))
    assert_same(got, want, rounded or dtype is torch.float32)


def of_lookups(wrap: Callable[[Side, Callable, Tensor], Tensor]) -> Change:
    """Return a change of how a lookup goes, to ``wrap(side, look_up, ids)``."""

    def change(side: Side) -> Steps:
        yield
        look_up = side.look_up
        side.look_up = lambda ids: wrap(side, look_up, ids)
        yield
        side.look_up = look_up

    return change
