"""
A model with tables of ours or torch's, and the verdict on a client: its results with ours beside those with torch's.

A client is a function of a :class:`Side`: it trains or uses ``side.model()`` by its own API and returns tensors by
name. It runs with torch's modules and optimizer, then with ours.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

import torchsparse_rec
from torchsparse_rec import nn, optim
from torchsparse_rec.variable import EmbeddingVariableOption

# The fifth has an optimizer made with in_backward=True, under which auto may choose fused. In the last two the tables
# are EmbeddingVariables.
MODES = ("dense", "sparse", "fused", "auto", "auto, in_backward", "growing, sparse", "growing, fused")
KINDS = ("Embedding", "EmbeddingBag", "EmbeddingBagCollection")
STEPS, BATCH, LR, DECAY = 12, 8, 0.1, 0.9
# Sizes of tables. In large ones auto chooses sparse or fused, but they are not so large that a dense reference takes
# long.
SMALL, LARGE = (40, 4), (20_000, 16)
# The rows that a table that grows has at first.
FEW = 8
# Rows that were left stale would be off by about 0.01.
RTOL, ATOL = 1e-4, 1e-5

PACKAGE = Path(torchsparse_rec.__file__).resolve().parent
Results = dict[str, Tensor]


class TorchBags(torch.nn.Module):
    """An EmbeddingBagCollection of torch's modules, with the same keys."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        bags = {name: torch.nn.EmbeddingBag(rows, dim, mode="sum") for name in ("t", "u")}
        self.embedding_bags = torch.nn.ModuleDict(bags)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Return the pooled rows, side by side."""
        pooled = [self.embedding_bags[table](features[name]) for table, name in (("t", "f"), ("u", "g"))]
        return torch.cat(pooled, 1)


def _tables(kind: str, mode: str | None, rows: int, dim: int) -> torch.nn.Module:
    if mode is None:
        return TorchBags(rows, dim) if kind == "EmbeddingBagCollection" else getattr(torch.nn, kind)(rows, dim)
    first, _, second = mode.partition(", ")
    names = (("t", "f"), ("u", "g"))
    if first == "growing":  # from a capacity that lasts for few steps
        initial = torch.zeros(rows, dim)
        if kind == "Embedding":
            return nn.EmbeddingVariable(dim, capacity=FEW, initializer=initial, grad_mode=second)  # type: ignore[arg-type]
        how: dict[str, Any] = {"ev_option": EmbeddingVariableOption(), "initializer": initial}
        configs = [nn.EmbeddingBagConfig(FEW, dim, name=table, feature_names=[name], **how) for table, name in names]
        return nn.EmbeddingBagCollection(configs, grad_mode=second)  # type: ignore[arg-type]
    if kind != "EmbeddingBagCollection":
        return getattr(nn, kind)(rows, dim, grad_mode=first)
    configs = [nn.EmbeddingBagConfig(rows, dim, name=table, feature_names=[name]) for table, name in names]
    return nn.EmbeddingBagCollection(configs, grad_mode=first)  # type: ignore[arg-type]


def grows(module: torch.nn.Module) -> TypeGuard[nn.EmbeddingVariable]:
    """Say whether a module is a table that grows."""
    return isinstance(module, nn.EmbeddingVariable)


def initial_of(table: nn.EmbeddingVariable) -> Tensor:
    """Return the rows with which torch's ids begin in a table that grows."""
    assert table.initial.values is not None
    return table.initial.values


class Model(torch.nn.Module):
    """Tables and a dense layer over their rows."""

    def __init__(self, kind: str, mode: str | None, size: tuple[int, int]) -> None:
        super().__init__()
        self.kind = kind
        self.table = _tables(kind, mode, *size)
        self.head = torch.nn.Linear(2 * size[1], 1)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for module in self.modules():
                # The rows of a table that grows begin so when their id first comes.
                made = [initial_of(module)] if grows(module) else module.parameters(recurse=False)
                for values in made:
                    values.copy_(torch.randn(values.shape, generator=generator) / 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Return a number for each row of ids ``[B, 2]``."""
        if self.kind == "Embedding":
            return self.head(self.table(ids).flatten(-2)).squeeze(-1)
        if self.kind == "EmbeddingBag":
            return self.head(self.table(ids.view(-1, 1)).view(len(ids), -1)).squeeze(-1)
        rows = self.table({"f": ids[:, :1].contiguous(), "g": ids[:, 1:].contiguous()})
        return self.head(rows if isinstance(rows, Tensor) else rows.values()).squeeze(-1)

    def tables(self) -> list[torch.nn.Module]:
        """Return the modules that have a ``weight``."""
        bags = getattr(self.table, "embedding_bags", None)
        return [self.table] if bags is None else list(bags.values())


@dataclass(frozen=True)
class Side:
    """The modules and the optimizer that a client gets: torch's (mode None), or ours in a mode."""

    kind: str = "Embedding"
    mode: str | None = None
    size: tuple[int, int] = SMALL

    def model(self) -> Model:
        """Make a model, with the same numbers on every side."""
        return Model(self.kind, self.mode, self.size)

    @property
    def ours(self) -> bool:
        """Whether modules and optimizer are ours."""
        return self.mode is not None

    @property
    def adam(self) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
        """The optimizer's class and its arguments, for clients that make it."""
        if not self.ours:
            return torch.optim.Adam, {"lr": LR}
        in_backward = str(self.mode).endswith(("fused", "in_backward"))
        return optim.Adam, {"lr": LR, "in_backward": in_backward}

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Make Adam for the parameters."""
        cls, arguments = self.adam
        return cls(parameters, **arguments)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Make a schedule that decreases the learning rate at each step."""
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)

    def made(self) -> tuple[Model, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Make a model, its optimizer and its schedule."""
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        return model, optimizer, self.schedule(optimizer)


def batches(first: int = 0, steps: int = STEPS, rank: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids ``[B, 2]`` and targets. Ids are from a window that moves on, so that many rows are idle for long."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step + 1000 * rank)
        ids = torch.randint(2 * step, 2 * step + 10, (BATCH, 2), generator=generator)
        yield ids, torch.randn(BATCH, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared distance of output to target."""
    return (output - target).square().mean()


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    first: int = 0,
    steps: int = STEPS,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
    rank: int = 0,
) -> None:
    """Train a model in the usual loop."""
    for ids, target in batches(first, steps, rank):
        optimizer.zero_grad()
        loss_of(model(ids), target).backward()
        before_step()
        optimizer.step()
        schedule.step()
        after_step()


def learned(model: torch.nn.Module, prefix: str = "") -> Results:
    """Return copies of the tensors of ``state_dict()``; of a table that grows, the rows of torch's ids."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if grows(module):
            own = f"{name}." if name else ""
            state = {key: value for key, value in state.items() if not key.startswith(own)}
            state[f"{own}weight"] = module.lookup(torch.arange(len(initial_of(module))))
    return {prefix + name: value.detach().clone() for name, value in state.items()}


def by_id(model: torch.nn.Module, rows: Results, gradients: bool = False) -> Results:
    """Return tensors by the names of parameters; where a table grows, a tensor's rows in the order of torch's ids."""
    result = dict(rows)
    for name, module in model.named_modules():
        if grows(module) and f"{name}.weight" in rows:
            places = module.keys.find(torch.arange(len(initial_of(module))))
            absent = initial_of(module) * (not gradients)
            result[f"{name}.weight"] = torch.where(places[:, None] < 0, absent, rows[f"{name}.weight"][places])
    return result


def trained(side: Side, steps: int = STEPS) -> tuple[Model, torch.optim.Optimizer, Any]:
    """Train a model, which leaves rows stale where its mode does so; return it, its optimizer and its schedule."""
    model, optimizer, schedule = side.made()
    train(model, optimizer, schedule, steps=steps)
    return model, optimizer, schedule


# ---- Verdicts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Client:
    """
    A way in which a program uses a model.

    Args:
        name: what the matrix calls it.
        run: the function of a side.
        needs: packages that it imports.
        full: whether it takes too long for daily runs, in which clients that need packages are left out anyhow.
        kinds: the modules with which it is tried.
        way: what a program can do instead where the client is refused.
    """

    name: str
    run: Callable[[Side], Results]
    needs: tuple[str, ...] = ()
    full: bool = False
    kinds: tuple[str, ...] = KINDS
    way: str = ""


@dataclass(frozen=True)
class Outcome:
    """The verdict on a client in a mode, ``right``, ``refused``, ``wrong`` or ``unclear``, and the client's message."""

    word: str
    message: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the client is right or refused."""
        return self.word in ("right", "refused")


# KeyError and RecursionError are no refusals, wherever they come from.
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError)
# Parts of other packages' errors that say clearly what cannot be done, and with what. The first two are torch's errors
# for its own sparse=True, which go on about the machine.
CLEAR = (
    "NotImplementedError: Could not run 'aten::linalg_vector_norm' with arguments from the 'SparseCPU' backend",
    "NotImplementedError: Could not run 'aten::view' with arguments from the 'SparseCPU' backend",
    "RuntimeError: Sparse gradient is not supported",
    "ValueError: Size mismatch between saved",
    "attempting to run unimplemented operator/function: func=<OpOverload(op='torchsparse_rec.table_lookup'",
    "No ONNX function found for <OpOverload(op='torchsparse_rec",
)


def sides(kind: str, mode: str) -> tuple[Side, Side]:
    """Return torch's side and ours."""
    size = LARGE if mode.startswith("auto") else SMALL
    return Side(kind, None, size), Side(kind, mode, size)


def outcome(client: Client, mode: str) -> Outcome:
    """Return the worst of the verdicts on a client with each kind of module."""
    # No module of one table pools rows of a table that grows.
    kinds = [kind for kind in client.kinds if kind != "EmbeddingBag" or not mode.startswith("growing")]
    found = [outcome_of_kind(client, kind, mode) for kind in kinds]
    for word in ("wrong", "unclear"):
        bad = [f"{kind}: {one.message}" for kind, one in zip(kinds, found, strict=True) if one.word == word]
        if bad:
            return Outcome(word, "; ".join(bad))
    refused = [kind for kind, one in zip(kinds, found, strict=True) if one.word == "refused"]
    if not refused:
        return Outcome("right")
    if len(refused) < len(found):
        return Outcome("unclear", f"{', '.join(refused)} refused: {[one.message for one in found]}, the others not")
    return Outcome("refused", found[0].message)


def outcome_of_kind(client: Client, kind: str, mode: str) -> Outcome:
    """Return the verdict on a client with one of our modules."""
    theirs, ours = sides(kind, mode)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        want = _of_torchs(client, theirs)
        torch.manual_seed(0)
        warnings.simplefilter("always")
        try:
            got = client.run(ours)
        except (Exception, CheckpointException) as error:  # The verdict judges errors of every kind.
            return judged(error)
    found = compared(got, want)
    if found.word == "wrong":
        # A tool that passes our tables by cannot be given an error: then a warning counts.
        named = [x for x in warned if "torchsparse_rec." in str(x.message) or "grad_mode=" in str(x.message)]
        return next((Outcome("refused", f"{x.category.__name__}: {x.message}") for x in named), found)
    return found


@lru_cache(maxsize=8)
def _of_torchs(client: Client, side: Side) -> Results:
    """Return the client's results with torch's modules, which are the same for all of our modes."""
    torch.manual_seed(0)
    return client.run(side)


def judged(error: BaseException) -> Outcome:
    """Return a refusal if this package raised the error, or if the error says clearly what cannot be done."""
    if error.__cause__ is not None:  # compilers put an error of their own around ours
        cause = judged(error.__cause__)
        if cause.is_good:
            return cause
    message = " ".join(f"{type(error).__name__}: {error}".split())
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = PACKAGE in frames[-1].parents and "Could not run 'aten::" not in message
    if type(error) in REFUSALS and (ours or "grad_mode=" in message):
        return Outcome("refused", message)
    clear = next((part for part in CLEAR if part in message), None)
    return Outcome("refused", clear) if clear is not None else Outcome("unclear", message[:300])


def compared(got: Results, want: Results) -> Outcome:
    """Compare results: right if all are the same to rounding."""
    if got.keys() != want.keys():
        return Outcome("wrong", f"{sorted(got)} instead of {sorted(want)}")
    off = {name: _difference(got[name], want[name]) for name in want}
    name = max(off, key=lambda name: off[name])
    return Outcome("right") if off[name] == 0 else Outcome("wrong", f"{name} is off by {off[name]:.2g}")


def _difference(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    got, want = (x.detach().to_dense().double() for x in (got, want))
    if torch.allclose(got, want, rtol=RTOL, atol=ATOL):
        return 0.0
    return float((got - want).abs().max().nan_to_num(nan=float("inf")))
