"""Damaged checkpoints of models: they are loaded right or refused by name, and nothing changes then, on any rank."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.cases import rewrite
from damage import check_damaged, content_of, damage, nodes_of
from torch import Tensor

from torchsparse_rec import distributed, nn, optim
from torchsparse_rec._torch import as_stored
from torchsparse_rec.variable import CBFFilter, CounterFilter, EmbeddingVariableOption

OPTIMIZERS: dict[str, Any] = {
    "Adagrad": lambda its: optim.Adagrad(its, lr=0.1),
    "amsgrad": lambda its: optim.Adam(its, lr=0.1, amsgrad=True),
    "RowWiseAdagrad": lambda its: optim.RowWiseAdagrad(its, lr=0.1),
    "momentum": lambda its: optim.SGD(its, lr=0.1, momentum=0.9),
    "torch": lambda its: torch.optim.Adagrad(its, lr=0.1),
}
EXTRA = {
    "step": 4,
    "name": ["é", None],
    "pair": (1, 2.5, float("inf")),
    "of": torch.arange(3.0),
    "one": torch.tensor(3),
}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fsync, because no test takes the power away."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Model(torch.nn.Module):
    """Tables, fixed and growing, and a dense layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [("users", 100, 6), ("days", 7, 4)]
        self.tables = nn.EmbeddingBagCollection(
            [
                nn.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=[name])
                for name, rows, dim in tables
            ],
            grad_mode="sparse",
        )
        self.single = nn.Embedding(5, 4, grad_mode="sparse")
        self.top = torch.nn.Linear(4, 1)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.counted, self.sketched = (
            nn.EmbeddingVariable(4, name=name, ev_option=EmbeddingVariableOption(filter_option=option))
            for name, option in (("counted", CounterFilter(2)), ("sketched", CBFFilter(2, 10, 0.1)))
        )

    def forward(self, ids: Tensor) -> Tensor:
        self.batches += 1
        pooled = self.tables({"users": ids.view(-1, 1), "days": (ids % 7).view(-1, 1)}).values()
        rows = self.single(ids % 5) + self.counted(ids * 1_000_003) + self.sketched(ids)
        return self.top(rows).sum() + pooled.sum()


def made(kind: str, steps: range) -> tuple[Model, Any]:
    model = Model()
    if kind == "torch":
        for table in (model.counted, model.sketched):
            table.requires_grad_(False)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in steps:
        train(model, optimizer, step)
    return model, optimizer


def train(model: Model, optimizer: Any, step: int) -> None:
    model(torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(step))).backward()
    optimizer.step()
    optimizer.zero_grad()


def load(its: tuple[Model, Any], folder: Path | None = None, version: int | None = None) -> Any:
    extra = None if folder is None else distributed.load(folder, *its, version=version)
    model, optimizer = its
    return content_of(
        [model.state_dict(), optimizer.state_dict(), model.counted.export(), model.sketched.export(), extra]
    )


def saved(folder: Path, kind: str) -> Path:
    """Save a version, and another on top of it."""
    model, optimizer = made(kind, range(4))
    distributed.save(folder, model, optimizer, extra=EXTRA)
    train(model, optimizer, 4)
    distributed.save(folder, model, optimizer, extra=EXTRA, delta=True)
    return folder


def use(its: tuple[Model, Any]) -> None:
    with suppress(RuntimeError) if type(its[1]).__module__.startswith("torch.") else nullcontext():
        train(*its, 20)  # torch's optimizer may be told to be fused, which it refuses for sparse gradients
    load(its)


def check(folder: Path, kind: str, seeds: range) -> Any:
    return check_damaged(saved(folder, kind), lambda: made(kind, range(10, 12)), load, use, seeds)


def test_some_damage(tmp_path: Path) -> None:
    counts = check(tmp_path / "saved", "Adagrad", range(40))
    assert counts["refused"] > 20 and counts["right"] > 2


@pytest.mark.full
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_damage(tmp_path: Path, kind: str) -> None:
    assert check(tmp_path / "saved", kind, range(100, 150)).total() == 50


# What a manifest may lack: what the caller gave, what older versions lack, and what torch and modules add by and by.
FREE = re.compile(
    r"\.extra\.|\.blocks|\.shards\.0\.about$|\.versions\.(?!top$|$)|\.of_ranks\.0\.(name|seen|optimizer|states\.0)"
    r"|\.options\.(foreach|fused|maximize|differentiable|lazy|decay|stochastic_rounding)$"
)
LACKING = (
    *(".metadata.tables", ".metadata.rest.top.bias", ".metadata.rest.batches.dtype", ".metadata.versions.top"),
    *(".metadata.optimizer.groups.0.options.lr", ".metadata.optimizer.dense.top.weight.step", ".metadata.extra"),
    *(".metadata.optimizer.dense.top.bias", ".metadata.tables.single.weight.states.sum", ".shards.3.about.box"),
    *(".metadata.tables.single.weight.numbers.step", ".metadata.variables.counted.weight.of_ranks.0", ".shards.4"),
)


def check_lacking(folder: Path, kind: str, wanted: Callable[[str], bool]) -> int:
    """Load a checkpoint whose manifest lacks one thing after the other; return how many there were."""
    manifest = saved(folder, kind) / "000002" / "manifest.json"
    its, whole, count = made(kind, range(10, 12)), manifest.read_bytes(), 0
    before = load(its)
    fields: list[Any] = []
    rewrite(manifest, fields.append)
    for where in [where for where, _, _ in nodes_of(fields[0], "") if wanted(where)]:

        def drop(now: Any, where: str = where) -> None:
            _, holder, key = next(each for each in nodes_of(now, "") if each[0] == where)
            del holder[key]

        rewrite(manifest, drop)
        with pytest.raises(ValueError, match=re.escape(str(folder))):
            distributed.load(folder, *its)
        assert load(its) == before, where
        manifest.write_bytes(whole)
        count += 1
    return count


def test_a_manifest_that_lacks_one_thing(tmp_path: Path) -> None:
    assert check_lacking(tmp_path, "torch", LACKING.__contains__) == len(LACKING)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Adagrad", "torch"])
def test_a_manifest_that_lacks_anything(tmp_path: Path, kind: str) -> None:
    assert check_lacking(tmp_path, kind, lambda where: not FREE.search(where)) > 350


class Fussy(torch.nn.Module):
    """A module that may refuse its extra state, which comes after its parameter."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), float(refuses)))
        self.refuses = refuses

    def get_extra_state(self) -> Any:
        return {"known": 1}

    def set_extra_state(self, state: Any) -> None:
        if self.refuses and self.weight[0] != 1:
            raise KeyError("unknown")


def fussy(folder: str) -> tuple[str, bool]:
    """Save, and load into a model in which the last rank's module refuses its state."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def model(refuses: bool) -> Any:
        torch.manual_seed(refuses)
        its = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": Fussy(refuses), "table": nn.Embedding(40, 2)})
        return distributed.shard(its, plan={"table": "row_wise"}) if ranks > 1 else its

    distributed.save(folder, model(False))
    other = model(rank == ranks - 1)
    state = other["table"].stored_weight()
    before = content_of([other["a"].state_dict(), other["b"].weight, state])
    with pytest.raises(
        ValueError, match="000001/manifest.json: the module does not take its states: 'unknown'"
    ) as error:
        distributed.load(folder, other)
    return str(error.value), content_of([other["a"].state_dict(), other["b"].weight, state]) == before


def test_a_module_that_refuses_its_state_changes_nothing_on_any_rank(two, tmp_path: Path) -> None:
    assert fussy(str(tmp_path / "one"))[1]
    for text, unchanged in two.run(fussy, str(tmp_path / "two")):
        assert unchanged and text.startswith("rank 1: ")


def on_ranks(folder: str, seeds: range) -> list[tuple[str, str, bool]]:
    """Load a checkpoint damaged in many ways; return each case, its error's text, and whether all is as it was then."""
    rank, found = dist.get_rank(), []

    def model(steps: range) -> tuple[Model, Any]:
        its = distributed.shard(Model(), plan="row_wise")
        optimizer = optim.Adagrad(its.parameters(), lr=0.1)
        for k in steps:
            train(its, optimizer, k)
        return its, optimizer

    def content(its: Any, optimizer: Any) -> Any:
        state = optimizer.state_dict()  # all rows are up to date then
        with as_stored():
            return content_of([[x.detach() for x in its.parameters()], state, its.counted.export(), its.batches])

    distributed.save(f"{folder}/saved", *model(range(4)))
    its, damaged = model(range(10, 12)), Path(folder, "damaged")
    before = content(*its)
    for seed in seeds:
        if rank == 0:
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(f"{folder}/saved", damaged)
        whats = [damage(damaged, random.Random(seed)) if rank == 0 else ""]
        dist.broadcast_object_list(whats)
        text = ""
        try:
            distributed.load(damaged, *its)
        except (ValueError, OSError) as error:
            text = str(error)
        found.append((f"seed {seed}: {whats[0]}", text, not text or content(*its) == before))
        if not text:
            its = model(range(10, 12))
            before = content(*its)
        dist.barrier()
    return found


def check_on_ranks(pool: Any, folder: Path, seeds: range) -> None:
    refused = 0
    for cases in zip(*pool.run(on_ranks, str(folder), seeds), strict=True):
        (what, first, _), *_ = cases
        assert all(unchanged for *_, unchanged in cases), cases
        assert all(bool(text) == bool(first) and (not text or str(folder) in text) for _, text, _ in cases), (
            what,
            cases,
        )
        refused += bool(first)
    assert refused > len(seeds) / 2


def test_all_ranks_refuse_what_one_finds(two, tmp_path: Path) -> None:
    check_on_ranks(two, tmp_path, range(12))


@pytest.mark.full
def test_damage_on_ranks(two, tmp_path: Path) -> None:
    check_on_ranks(two, tmp_path, range(100, 150))
