"""Checkpoints of tables over ranks: from any number of ranks and plan into any other, and into one process and back."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import peak
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchsparse_rec import KeyedJaggedTensor, distributed, nn, optim
from torchsparse_rec.variable import CounterFilter, EmbeddingVariableOption

PLANS: dict[str, Any] = {
    "row": "row_wise",
    "table": "table_wise",
    "column": "column_wise",
    "copies": "data_parallel",
}
OPTIMIZERS: dict[str, Any] = {
    "Adagrad": lambda its: optim.Adagrad(its, lr=0.1),
    "Adam": lambda its: optim.Adam(its, lr=0.1, betas=(0.8, 0.9)),
    "fused": lambda its: optim.Adagrad(its, lr=0.1, in_backward=True),
    "RowWiseAdagrad": lambda its: optim.RowWiseAdagrad(its, lr=0.1),
    "torch": lambda its: torch.optim.Adam(its, lr=0.1),
    "none": lambda its: None,
}


# Without a tensor in it, which does not compare by ==.
EXTRA = {"step": 4, "name": ["é", None], "pair": (1, 2.5, float("inf"))}


class Model(torch.nn.Module):
    """Tables, fixed and growing, and a dense layer with a buffer."""

    def __init__(self, kind: str, grows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.EmbeddingBagCollection(
            [
                nn.EmbeddingBagConfig(num_embeddings=100, embedding_dim=6, name="users", feature_names=["user"]),
                nn.EmbeddingBagConfig(num_embeddings=7, embedding_dim=4, name="days", feature_names=["day", "before"]),
            ],
            grad_mode={"fused": "fused", "torch": "dense"}.get(kind, "sparse"),
        )
        self.single = nn.Embedding(50, 4, grad_mode=self.tables.grad_mode)
        self.top = torch.nn.Linear(18, 1)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.grows = None
        if grows:
            option = EmbeddingVariableOption(filter_option=CounterFilter(2))
            self.grows = nn.EmbeddingVariable(4, name="keys", ev_option=option, grad_mode=self.tables.grad_mode)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        self.batches += 1
        users = features["user"].values()
        parts = [self.tables(features).values(), self.single(users % 50)]
        result = self.top(torch.cat(parts, 1)).squeeze(1)
        if self.grows is not None:
            result = result + self.grows(users * 1_000_003).sum(1)
        return result


def batch(step: int, rank: int) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.cat([torch.randint(0, 100, (8,), generator=random), torch.randint(0, 7, (16,), generator=random)])
    return KeyedJaggedTensor(["user", "day", "before"], ids, lengths=torch.ones(24, dtype=torch.int64))


def made(kind: str, plan: Any, grows: bool = False) -> tuple[Any, Any]:
    model = Model(kind, grows)
    if dist.is_initialized():
        where = {name: plan for name in ("users", "days", "single")} if plan is not None else "auto"
        if plan == "auto":
            where = "auto"
        elif grows:
            where["keys"] = "table_wise" if plan == "table_wise" else "row_wise"
            where["grows"] = where.pop("keys")
        distributed.shard(model, plan=where)
    return model, OPTIMIZERS[kind]([*model.parameters()])


def train(model: Any, optimizer: Any, steps: range) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        if optimizer is None:
            for parameter in model.parameters():
                parameter.grad = None
            continue
        if dist.is_initialized() and not isinstance(model, DistributedDataParallel):
            for parameter in model.top.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def digest(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return whole tables with their states, as one process has them, and what is dense."""
    found: dict[str, Any] = {}
    if dist.is_initialized() and model.grows is None:
        found.update({k: x.clone() for k, x in distributed.full_state_dict(model).items()})
    elif not dist.is_initialized():
        found.update({k: x.clone() for k, x in model.state_dict().items() if isinstance(x, Tensor)})
    if model.grows is not None:
        export = model.grows.export()
        its = [tuple(x.tolist() for x in export)]
        if dist.is_initialized():
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, its[0])
            its = of_ranks
        rows = [
            row for keys, values, versions, counts in its for row in zip(keys, values, versions, counts, strict=True)
        ]
        found = {k: x for k, x in found.items() if not k.startswith("grows")}
        found["grows"] = sorted(rows)
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, x in a.items():
        assert torch.equal(x, b[key]) if isinstance(x, Tensor) else x == b[key], key


def saves(folder: str, kind: str, plan: Any, grows: bool = False) -> dict[str, Any]:
    model, optimizer = made(kind, plan, grows)
    train(model, optimizer, range(4))
    number = distributed.save(folder, model, optimizer, extra=EXTRA)
    assert number == 1
    return digest(model, optimizer)


def loads(folder: str, kind: str, plan: Any, grows: bool = False) -> dict[str, Any]:
    model, optimizer = made(kind, plan, grows)
    assert distributed.load(folder, model, optimizer) == EXTRA
    return digest(model, optimizer)


def goes_on(folder: str, to: str, kind: str, plan: Any, grows: bool) -> dict[str, Any]:
    """Train, save and train on; or, if another folder is to have the end, load and train on."""
    model, optimizer = made(kind, plan, grows)
    if to != folder:
        distributed.load(folder, model, optimizer, version=1)
    else:
        train(model, optimizer, range(4))
        distributed.save(folder, model, optimizer)
    train(model, optimizer, range(4, 8))
    distributed.save(to, model, optimizer)
    return digest(model, optimizer)


def both(folder: str, kind: str, grows: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a checkpoint into one process; return the model's content, and the optimizer's states."""
    model, optimizer = made(kind, None, grows)
    distributed.load(folder, model, optimizer)
    states: dict[str, Any] = {}
    for number, state in ({} if optimizer is None else optimizer.state_dict()["state"]).items():
        if not (grows and number == len([*model.parameters()]) - 1):  # by row, in an order of its own
            states |= {f"{number} {name}": torch.as_tensor(x).clone() for name, x in state.items()}
    return digest(model, optimizer), states


def loads_and_saves(folder: str, to: str, kind: str, plan: Any, grows: bool = False) -> dict[str, Any]:
    model, optimizer = made(kind, plan, grows)
    assert distributed.load(folder, model, optimizer) == EXTRA
    distributed.save(to, model, optimizer, extra=EXTRA)
    return digest(model, optimizer)


# ---- Into any number of ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["Adagrad", "torch"])
def test_saved_by_any_loaded_by_any(pool_of, tmp_path, ranks: int, kind: str) -> None:
    for name, plan in PLANS.items():
        folder = str(tmp_path / name)
        saved = pool_of(ranks).run(saves, folder, kind, plan)[0]
        whole, states = both(folder, kind)
        same(saved, whole)
        for other, into in ((1, "row"), (2, "table"), (3, "column"), (4, "row"), (2, "copies")):
            to = str(tmp_path / f"{name} {other} {into}")
            for found in pool_of(other).run(loads_and_saves, folder, to, kind, PLANS[into]):
                same(saved, found)
            again, other_states = both(to, kind)
            same(whole, again)
            same(states, other_states)


@pytest.mark.parametrize("kind", ["Adagrad", "Adam", "none"])
def test_saved_by_one_process_loaded_by_ranks(pool_of, tmp_path, kind: str) -> None:
    whole = saves(str(tmp_path / "one"), kind, None, True)
    for found in pool_of(2).run(loads_and_saves, str(tmp_path / "one"), str(tmp_path / "two"), kind, "row_wise", True):
        assert found["grows"] == whole["grows"]
    (first, states), (again, others) = both(str(tmp_path / "one"), kind, True), both(str(tmp_path / "two"), kind, True)
    same(whole, first)
    same(first, again)
    same(states, others)
    if kind != "none":
        assert len(states) >= 6 and any(x.any() for x in states.values())


@pytest.mark.parametrize("plans", [("row_wise", "table_wise"), ("table_wise", "row_wise"), ("row_wise", "row_wise")])
def test_tables_that_grow_go_into_other_ranks_and_plans(pool_of, tmp_path, plans: tuple[str, str]) -> None:
    saved = pool_of(2).run(saves, str(tmp_path / "a"), "Adagrad", plans[0], True)
    for found in pool_of(3).run(loads_and_saves, str(tmp_path / "a"), str(tmp_path / "b"), "Adagrad", plans[1], True):
        assert found["grows"] == saved[0]["grows"] and len(found["grows"]) > 8
    (first, _), (again, _) = both(str(tmp_path / "a"), "Adagrad", True), both(str(tmp_path / "b"), "Adagrad", True)
    same(first, again)


# Daily: each two of the three together. The others add no more than the third.
@pytest.mark.parametrize(
    ("kind", "plan", "grows"),
    [
        pytest.param(
            *(kind, plan, grows),
            id=f"{kind}-{plan}-{'grows' if grows else 'fixed'}",
            marks=[] if (kind in ("Adagrad", "fused")) == ((plan == "row_wise") == grows) else [pytest.mark.slow],
        )
        for kind in ("Adagrad", "Adam", "fused", "RowWiseAdagrad")
        for plan in ("row_wise", "table_wise")
        for grows in (False, True)
    ],
)
def test_a_resumed_run_has_the_same_bits(two, tmp_path, kind: str, plan: str, grows: bool) -> None:
    whole = two.run(goes_on, str(tmp_path / "a"), str(tmp_path / "a"), kind, plan, grows)
    resumed = two.run(goes_on, str(tmp_path / "a"), str(tmp_path / "b"), kind, plan, grows)
    for a, b in zip(whole, resumed, strict=True):
        same(a, b)
    (_, states), (_, again) = both(str(tmp_path / "a"), kind, grows), both(str(tmp_path / "b"), kind, grows)
    same(states, again)
    assert states


def in_ddp(folder: str) -> tuple[Any, Any]:
    model, optimizer = made("Adagrad", "row_wise")
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer, range(3))
    distributed.save(folder, wrapped, optimizer)
    other, its = made("Adagrad", "table_wise")
    assert distributed.load(folder, DistributedDataParallel(other), its) is None
    return digest(model, optimizer), digest(other, its)


def test_a_model_in_ddp_has_the_names_of_the_model(two, tmp_path) -> None:
    for saved, loaded in two.run(in_ddp, str(tmp_path)):
        same(saved, loaded)


# ---- When something is wrong -----------------------------------------------------------------------------------------


def fails(folder: str, what: str) -> None:
    model, optimizer = made("Adagrad", "row_wise")
    train(model, optimizer, range(2))
    if what == "save":
        if dist.get_rank() == 1:
            model.top.register_buffer("odd", torch.zeros(2).to_sparse())
        distributed.save(folder, model, optimizer, on_phase=_full_disk if dist.get_rank() == 1 else None)
    elif what == "extra":
        distributed.save(folder, model, optimizer, extra=object() if dist.get_rank() == 1 else 1)
    elif what == "busy":
        distributed.save(folder, model, optimizer)


def _full_disk(phase: str) -> None:
    if phase == "write shard 1":
        raise OSError(28, "No space left on device")


def loads_unchanged(folder: str, kind: str, dim: int = 6) -> tuple[str, bool]:
    model, optimizer = made(kind, "row_wise")
    if dim != 6:
        tables = [nn.EmbeddingBagConfig(num_embeddings=100, embedding_dim=dim, name="users", feature_names=["user"])]
        model = torch.nn.ModuleDict({"tables": nn.EmbeddingBagCollection(tables)})
        distributed.shard(model, plan="row_wise")
        optimizer = OPTIMIZERS[kind](model.parameters())
    before = {k: x.clone() for k, x in distributed.full_state_dict(model).items()}
    text = ""
    try:
        distributed.load(folder, model, optimizer)
    except (ValueError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
    after = distributed.full_state_dict(model)
    return text, all(torch.equal(x, after[k]) for k, x in before.items())


def test_an_error_of_one_rank_is_that_of_all_and_earlier_versions_stay(two, tmp_path) -> None:
    folder = str(tmp_path)
    saved = two.run(saves, folder, "Adagrad", "row_wise")[0]
    for error in two.errors(fails, folder, "save"):
        assert isinstance(error, (OSError, ValueError)) and "rank 1" in str(error)
    for error in two.errors(fails, folder, "extra"):
        assert type(error) is ValueError and re.match(
            "rank 1: save: extra must be None, a number, a string, a tensor", str(error)
        )
    assert sorted(os.listdir(folder)) == [".lock", "000001"]
    same(saved, two.run(loads, folder, "Adagrad", "table_wise")[0])


def test_two_jobs_do_not_write_at_once(two, tmp_path) -> None:
    from torchsparse_rec.checkpoint import CheckpointStore

    with CheckpointStore(tmp_path).writer("full", {}):
        for error in two.errors(fails, str(tmp_path), "busy"):
            assert isinstance(error, BlockingIOError) and "another writer" in str(error)


def test_what_does_not_suit_is_refused_before_anything_is_written(two, tmp_path) -> None:
    folder = str(tmp_path)
    two.run(saves, folder, "Adagrad", "row_wise")
    for text, unchanged in two.run(loads_unchanged, folder, "Adam"):
        assert unchanged and "optimizer must be a Adagrad, as in the checkpoint, got a Adam" in text, text
    for text, unchanged in two.run(loads_unchanged, folder, "Adagrad", 5):
        assert unchanged and "lacks ['single.weight', 'tables.embedding_bags.days.weight']" in text, text
    for text, unchanged in two.run(loads_unchanged, str(tmp_path / "nothing"), "Adagrad"):
        assert unchanged and text.startswith(("FileNotFoundError", "OSError")), text


def test_states_that_are_not_of_rows_are_refused(tmp_path) -> None:
    table = nn.Embedding(6, 3)
    optimizer = torch.optim.Adafactor(table.parameters())
    table(torch.arange(3)).sum().backward()
    optimizer.step()
    with pytest.raises(
        ValueError, match=r"state 'row_var' of table 'weight' must be \[6, 3\] or \[6\], .* got \[6, 1\]"
    ):
        distributed.save(tmp_path, table, optimizer)
    other = torch.optim.SGD([*table.parameters(), torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match="must hold only parameters of the module, got another, number 1"):
        distributed.save(tmp_path, table, other)


@pytest.mark.parametrize("damage", ["byte", "short", "gone", "manifest"])
def test_a_damaged_checkpoint_is_named_and_changes_nothing(two, tmp_path, damage: str) -> None:
    folder = str(tmp_path)
    two.run(saves, folder, "Adagrad", "row_wise")
    shards = sorted((tmp_path / "000001").glob("shard-00001-*.safetensors"))
    path = tmp_path / "000001" / "manifest.json" if damage == "manifest" else shards[-1]
    data = bytearray(path.read_bytes())
    data[-1 if damage != "manifest" else 40] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "short" else data)
    for text, unchanged in two.run(loads_unchanged, folder, "Adagrad"):
        assert unchanged and path.name in text and "CheckpointError" not in text[:3], text


def test_a_checkpoint_without_some_rows_is_refused(two, tmp_path) -> None:
    from torchsparse_rec.checkpoint import CheckpointStore

    two.run(saves, str(tmp_path), "Adagrad", "row_wise")
    store = CheckpointStore(tmp_path)
    chain = store.open()
    shards = list(chain.shards())
    lost = next(shard for _, shard in shards[::-1] if shard.name == "table")
    with store.writer("full", chain.version.metadata) as writer:
        for path, shard in shards:
            if shard is not lost:
                writer.write(shard.name, chain.read_shard(path, shard), shard.about)
        writer.commit()
    for text, unchanged in two.run(loads_unchanged, str(tmp_path), "Adagrad"):
        assert unchanged and f"must have all of {lost.about['state']} of table {lost.about['table']!r}" in text, text


def test_versions_are_numbered_and_kept(two, tmp_path) -> None:
    assert two.run(three, str(tmp_path)) == [[1, 2, 3, "two", [0, 1, 2]]] * 2
    assert sorted(os.listdir(tmp_path)) == [".lock", "000002", "000003"]


def three(folder: str) -> list[Any]:
    model, optimizer = made("Adagrad", "row_wise")
    train(model, optimizer, range(1))
    names = [("one", torch.ones(2)), ("two", torch.arange(3)), ("three", torch.tensor(3))]
    numbers = [distributed.save(folder, model, optimizer, extra=name, keep=2) for name in names]
    name, numbers_of_two = distributed.load(folder, model, optimizer, version=2)
    return [*numbers, name, numbers_of_two.tolist()]


PHASES = ["sweep", "write shard 0", "write shard 1", "fsync", "rename manifest", "committed"]


def killed(folder: str, phase: str, rank: int) -> None:
    model, optimizer = made("Adagrad", "row_wise")
    train(model, optimizer, range(6))

    def kill(now: str) -> None:
        if now == phase and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    distributed.save(folder, model, optimizer, extra="later", on_phase=kill)


@pytest.mark.parametrize(
    ("phase", "rank"), [*((phase, 0) for phase in PHASES), ("write shard 0", 1), ("write shard 1", 1)]
)
def test_killed_at_any_moment_there_is_a_whole_version(pool_of, tmp_path, phase: str, rank: int) -> None:
    folder = str(tmp_path)
    saved = pool_of(2).run(saves, folder, "Adagrad", "row_wise")[0]
    pool = pool_of(2)
    outcomes = pool.outcomes(killed, folder, phase, rank, after_error=20.0)
    assert all(outcome.error is not None for outcome in outcomes)
    model, optimizer = made("Adagrad", None)
    extra = distributed.load(folder, model, optimizer)
    if phase == "committed":
        assert extra == "later"
    else:
        assert extra == EXTRA
        same(saved, digest(model, optimizer))
    assert distributed.save(folder, model, optimizer) in (2, 3)  # what was left is swept away
    assert not list(Path(folder).glob(".*.partial"))


# ---- Memory ----------------------------------------------------------------------------------------------------------


def megabytes(folder: str, rows: int) -> list[float]:
    """Make a table of 64 columns, step, save and load it; return by how much this rank's memory peaks until each."""
    config = nn.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=64, name="t", feature_names=["f"])
    model = nn.EmbeddingBagCollection([config], device="meta", grad_mode="fused")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    distributed.shard(model, plan="row_wise")
    optimizer = optim.Adagrad(model.parameters(), lr=0.1, in_backward=True)
    model({"f": torch.arange(8)}).values().sum().backward()
    optimizer.step()
    found = [(peak() - before) / 1024]
    distributed.save(folder, model, optimizer)
    found.append((peak() - before) / 1024)
    distributed.load(folder, model, optimizer)
    return [*found, (peak() - before) / 1024]


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot begin anew here")
def test_no_rank_holds_a_whole_table_or_its_part_twice(pool_of, tmp_path) -> None:
    small, large = (pool_of(4).run(megabytes, str(tmp_path / str(rows)), rows) for rows in (2**10, 2**20))
    table_and_states = 2 * 2**20 * 64 * 4 / 2**20
    for a, b in zip(small, large, strict=True):
        more = [x - y for x, y in zip(b, a, strict=True)]
        assert max(more) < table_and_states / 4 + 80, more  # of any table, some rows are drawn and read at a time
